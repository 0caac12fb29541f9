// copy: rows as they are, byte for byte; of gathers in the dtype of the cache, of indexer keys, of
// conversions to the same layout, and of what is looked into on the host.
//
// Rows are looked up as gather.cu does, and blocks work on them alike.

#include "memory.cuh"
#include "read_params.cuh"
#include "row_places.cuh"
#include "types.cuh"

namespace cupy_mla {

// In how many pieces a block keeps its rows.
template <int kCount>
struct Pieces {
  static constexpr int kPieces = kCount;
};

// Copies a piece by the threads of its row; null makes zeros.
template <class Word>
__device__ __forceinline__ void copy_words(u8* destination, const u8* source, i32 bytes) {
  const i32 words = bytes / static_cast<i32>(sizeof(Word));
  for (i32 i = static_cast<i32>(threadIdx.x); i < words; i += static_cast<i32>(blockDim.x)) {
    reinterpret_cast<Word*>(destination)[i] =
        source != nullptr ? reinterpret_cast<const Word*>(source)[i] : Word{0};
  }
}

// Copies a piece of each of the block's rows by 4 bytes, or one, at a time.
template <class Places>
__device__ __forceinline__ void copy_piece(const Places& places, int piece, i32 count, i32 bytes,
                                           bool by_words) {
  for (i32 row = static_cast<i32>(threadIdx.y); row < count; row += static_cast<i32>(blockDim.y)) {
    u8* destination = places.destinations[piece][row];
    if (destination == nullptr) continue;
    if (by_words) {
      copy_words<u32>(destination, places.sources[piece][row], bytes);
    } else {
      copy_words<u8>(destination, places.sources[piece][row], bytes);
    }
  }
}

template <class Places>
__device__ __forceinline__ void copy_vectors(const Places& places, i32 count, i32 bytes,
                                             bool streaming) {
  constexpr int kRows = tuning::kRowsInFlight;
  const u32 units = static_cast<u32>(bytes) / kVectorBytes;
  const i32 step = static_cast<i32>(blockDim.y);
  uint4 vectors[kRows];
  const auto ask = [&](int k, i32 row, u32 unit) {
    vectors[k] = {0, 0, 0, 0};
    if (unit < units && row < count && places.sources[0][row] != nullptr) {
      vectors[k] = load_vector(places.sources[0][row] + unit * kVectorBytes);
    }
  };
  i32 row = static_cast<i32>(threadIdx.y);
#pragma unroll
  for (int k = 0; k < kRows; ++k) ask(k, row + k * step, threadIdx.x);
  for (; row < count; row += kRows * step) {
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const i32 this_row = row + k * step;
      if (this_row >= count) break;
      u8* destination = places.destinations[0][this_row];
      if (destination != nullptr) {
        for (u32 unit = threadIdx.x; unit < units; unit += blockDim.x) {
          // Rows of more units than threads: the others one by one.
          if (unit != threadIdx.x) ask(k, this_row, unit);
          store_vector(destination + unit * kVectorBytes, vectors[k], streaming);
        }
      }
      // The next one at once, while the others in flight are stored.
      ask(k, this_row + kRows * step, threadIdx.x);
    }
  }
}

template <class Format>
__device__ __forceinline__ void copy(const ReadParams& p) {
  constexpr int kPieces = Format::kPieces;
  using Places = RowPlaces<kPieces, kPieces>;
  Places& places = block_shared<Places>();
  const i32 count = find_places<true>(p, places);
  const u64 bits =
      address_bits(p.source[0]) | address_bits(p.destination[0]) | static_cast<u64>(p.width);
  if (is_vector_aligned(bits)) {
    copy_vectors(places, count, p.width, p.stream_stores != 0);
  } else {
    copy_piece(places, 0, count, p.width, bits % sizeof(u32) == 0);
  }
  if constexpr (kPieces == 2) {
    const u64 second_bits = address_bits(p.source[1]) | address_bits(p.destination[1]) |
                            static_cast<u64>(p.second_bytes);
    copy_piece(places, 1, count, p.second_bytes, second_bits % sizeof(u32) == 0);
  }
}

}  // namespace cupy_mla
