// gather: decodes rows of a cache to an output dtype.
//
// The rows are those of a slot array or those that a block table names, and go to an array or to
// the same slots of another cache; row_places.cuh looks them up, a thread a row, for all threads
// that share the row afterwards. A block takes p.block_rows consecutive rows: blockDim.x threads
// share a row, each with its own units of it, and blockDim.y rows are written at a time.

#include "elements.cuh"
#include "memory.cuh"
#include "read_params.cuh"
#include "row_places.cuh"
#include "types.cuh"

namespace cupy_mla {

template <class Format>
__device__ __forceinline__ void gather(const ReadParams& p) {
  using Output = typename Format::Output;
  using Places = RowPlaces<Format::kPlanes, 1>;
  constexpr int kRows = tuning::kRowsInFlight;
  Places& places = block_shared<Places>();
  // Asked for before the rows are looked up, which takes longer.
  const Format format{Format::kLayerScale ? scale_of(p.source[0]) : 0.0f};
  const i32 count = find_places<true>(p, places);
  const i32 step = static_cast<i32>(blockDim.y);
  const auto source = [&](i32 row) { return places.sources[0][row]; };
  const auto scales = [&](i32 row) { return places.sources[Format::kPlanes - 1][row]; };

  if (Format::reads_vectors(p) && is_vector_aligned(address_bits(p.destination[0]))) {
    const u32 units = static_cast<u32>(p.width) / Format::kUnit;
    typename Format::Fragment fragments[kRows];
    const auto ask = [&](int k, i32 row, u32 unit) {
      if (unit < units && row < count && source(row) != nullptr) {
        fragments[k] = Format::load(source(row), scales(row), unit);
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
            uint4 vector = {0, 0, 0, 0};
            if (source(this_row) != nullptr) vector = format.decode(fragments[k], unit);
            store_vector(destination + unit * kVectorBytes, vector, p.stream_stores != 0);
          }
        }
        // The next one at once, while the others in flight are stored.
        ask(k, this_row + kRows * step, threadIdx.x);
      }
    }
    return;
  }
  // The same bytes from and to any alignment.
  for (i32 row = static_cast<i32>(threadIdx.y); row < count; row += step) {
    auto* destination = reinterpret_cast<typename Output::Bits*>(places.destinations[0][row]);
    if (destination == nullptr) continue;
    for (i32 i = static_cast<i32>(threadIdx.x); i < p.width; i += static_cast<i32>(blockDim.x)) {
      destination[i] =
          source(row) != nullptr ? format.decode_element(source(row), scales(row), i) : 0;
    }
  }
}

}  // namespace cupy_mla
