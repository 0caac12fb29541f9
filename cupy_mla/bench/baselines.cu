// What the benchmark compares kernels with; none of it is part of an operation.
//
//   empty               a kernel node that does nothing
//   copy                moves given numbers of bytes, 16 at a time: the ceiling of an operation
//   scalar_insert       a grouped insert in the published shape: a block a token and layer, one
//                       element a thread and turn, 2-byte loads and 1-byte stores
//   scalar_ds_mla       the same for fp8_ds_mla: 64 threads for the tiles, 32 for the rope part
//   read_rows           reads rows of caches as attention does, and stores nothing
//   read_all            reads a buffer larger than the L2 cache, so that nothing else is left in it
//   spin                keeps the device busy while the host gets a graph on its way
//
// Each kernel has one structure as its argument; baselines.py has the same as NumPy dtypes. The
// text is compiled behind exact_math.cuh of kernels_src, so that both know one rounding.

namespace bench {

using cupy_mla::bits_of;
using cupy_mla::float_of;
using cupy_mla::i32;
using cupy_mla::i64;
using cupy_mla::u16;
using cupy_mla::u32;
using cupy_mla::u64;
using cupy_mla::u8;

// Never true, and no compiler knows: what was only read has to be read.
__device__ __forceinline__ bool never(const uint4& bits, u32 key) {
  return key == 0u && (bits.x ^ bits.y ^ bits.z ^ bits.w) == 0xDEADBEEFu;
}

__device__ __forceinline__ void mix(uint4& sum, const uint4& value) {
  sum.x ^= value.x;
  sum.y ^= value.y;
  sum.z ^= value.z;
  sum.w ^= value.w;
}

// --- empty, spin, read_all

struct EmptyParams {
  u64 nothing;
};

__device__ __forceinline__ void empty(const EmptyParams&) {}

struct SpinParams {
  i64 cycles;
};

__device__ __forceinline__ void spin(const SpinParams& p) {
#if defined(__CUDACC__)
  const i64 start = clock64();
  while (clock64() - start < p.cycles) {
  }
#else
  (void)p;
#endif
}

struct ReadAllParams {
  const u8* source;
  u8* sink;  // one byte
  i64 vectors;
  i64 key;  // not 0
};

__device__ __forceinline__ void read_all(const ReadAllParams& p) {
  const auto* source = reinterpret_cast<const uint4*>(p.source);
  const i64 step = static_cast<i64>(gridDim.x) * blockDim.x;
  uint4 sum = {0, 0, 0, 0};
  for (i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; i < p.vectors; i += step) {
    mix(sum, source[i]);
  }
  if (never(sum, static_cast<u32>(p.key))) *p.sink = 1;
}

// --- copy

struct CopyParams {
  const u8* source;
  u8* destination;
  i64 read_vectors;
  i64 written_vectors;
  i32 tile_reads;   // vectors that a block reads for each tile
  i32 tile_writes;  // and those that it writes
  i32 tiles;        // of a block
  i32 streaming;    // 1: stores leave the L2 cache first
  i64 key;          // not 0
};

constexpr int kCopyVectors = 4;  // of a thread and tile

__device__ __forceinline__ void copy(const CopyParams& p) {
  const auto* source = reinterpret_cast<const uint4*>(p.source);
  auto* destination = reinterpret_cast<uint4*>(p.destination);
  for (i32 turn = 0; turn < p.tiles; ++turn) {
    const i64 tile = static_cast<i64>(blockIdx.x) * p.tiles + turn;
    const i64 first_read = tile * p.tile_reads;
    const i64 first_write = tile * p.tile_writes;
    uint4 values[kCopyVectors];
    uint4 sum = {0, 0, 0, 0};
#pragma unroll
    for (int k = 0; k < kCopyVectors; ++k) {
      const i32 i = static_cast<i32>(threadIdx.x + k * blockDim.x);
      values[k] = uint4{0, 0, 0, 0};
      if (i < p.tile_reads && first_read + i < p.read_vectors) {
        values[k] = __ldcs(source + first_read + i);
      }
    }
#pragma unroll
    for (int k = 0; k < kCopyVectors; ++k) mix(sum, values[k]);
#pragma unroll
    for (int k = 0; k < kCopyVectors; ++k) {
      const i32 i = static_cast<i32>(threadIdx.x + k * blockDim.x);
      if (i >= p.tile_writes || first_write + i >= p.written_vectors) continue;
      // Of all that the thread has read, so that no load can be left out.
      const uint4 value = {values[k].x, values[k].y, values[k].z, sum.w};
      if (p.streaming) {
        __stcs(destination + first_write + i, value);
      } else {
        __stwb(destination + first_write + i, value);
      }
    }
    if (never(sum, static_cast<u32>(p.key))) *p.destination = 0;
  }
}

// --- inserts in the published shape

struct ScalarParams {
  const u8* kv_c;  // [layers, tokens, lora_rank], strides in bytes
  i64 kv_c_layer_stride;
  i64 kv_c_token_stride;
  const u8* k_pe;
  i64 k_pe_layer_stride;
  i64 k_pe_token_stride;
  const i64* slots;     // [tokens], for all layers
  u8* const* caches;    // [layers]
  const float* scales;  // [layers]
  i64 block_stride;     // bytes
  i64 row_stride;
  i32 tokens;
  i32 block_size;
  i32 lora_rank;
  i32 rope_dim;
  i32 scale_offset;  // in a row, of formats with scales in it
  i32 rope_offset;
};

struct Bfloat16 {
  using Bits = u16;
  __device__ __forceinline__ static float widen(u16 bits) { return cupy_mla::bf16_to_f32(bits); }
};

struct Float16 {
  using Bits = u16;
  __device__ __forceinline__ static float widen(u16 bits) { return cupy_mla::f16_to_f32(bits); }
};

struct Float32 {
  using Bits = u32;
  __device__ __forceinline__ static float widen(u32 bits) { return float_of(bits); }
};

__device__ __forceinline__ u8 encode_e4m3(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  u16 codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(0.0f), "f"(x));
  return static_cast<u8>(codes);
#else
  return static_cast<u8>(cupy_mla::cvt_sat_e4m3_soft(x));
#endif
}

__device__ __forceinline__ u8 encode_e5m2(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  u16 codes;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(0.0f), "f"(x));
  return static_cast<u8>(codes);
#else
  return static_cast<u8>(cupy_mla::cvt_sat_e5m2_soft(x));
#endif
}

// What is stored of an element.
template <class Input>
struct Same {
  using From = typename Input::Bits;
  using To = typename Input::Bits;
  __device__ __forceinline__ static To convert(From bits, float) { return bits; }
};

template <class Input>
struct E4m3 {
  using From = typename Input::Bits;
  using To = u8;
  __device__ __forceinline__ static To convert(From bits, float scale) {
    return encode_e4m3(cupy_mla::div_rn_f32(Input::widen(bits), scale));
  }
};

template <class Input>
struct E5m2 {
  using From = typename Input::Bits;
  using To = u8;
  __device__ __forceinline__ static To convert(From bits, float scale) {
    return encode_e5m2(cupy_mla::div_rn_f32(Input::widen(bits), scale));
  }
};

// The token and the layer of a block, and its row; null for padding.
struct Place {
  i64 token;
  i64 layer;
  u8* row;
};

__device__ __forceinline__ Place find_place(const ScalarParams& p) {
  const u32 layer = blockIdx.x / static_cast<u32>(p.tokens);
  const u32 token = blockIdx.x - layer * static_cast<u32>(p.tokens);
  const i64 slot = p.slots[token];
  u8* row = nullptr;
  if (slot >= 0) {
    row =
        p.caches[layer] + slot / p.block_size * p.block_stride + slot % p.block_size * p.row_stride;
  }
  return {token, layer, row};
}

template <class Element>
__device__ __forceinline__ void scalar_insert(const ScalarParams& p) {
  const Place place = find_place(p);
  if (place.row == nullptr) return;
  const float scale = p.scales != nullptr ? p.scales[place.layer] : 1.0f;
  const auto store = [&](const u8* source, i64 layer_stride, i64 token_stride, i32 size,
                         i32 offset) {
    const auto* from = reinterpret_cast<const typename Element::From*>(
        source + place.layer * layer_stride + place.token * token_stride);
    auto* to = reinterpret_cast<typename Element::To*>(place.row) + offset;
    for (i32 i = static_cast<i32>(threadIdx.x); i < size; i += static_cast<i32>(blockDim.x)) {
      to[i] = Element::convert(from[i], scale);
    }
  };
  store(p.kv_c, p.kv_c_layer_stride, p.kv_c_token_stride, p.lora_rank, 0);
  store(p.k_pe, p.k_pe_layer_stride, p.k_pe_token_stride, p.rope_dim, p.lora_rank);
}

__device__ __forceinline__ void scalar_ds_mla(const ScalarParams& p) {
  constexpr u32 kAllLanes = 0xFFFFFFFFu;
  constexpr u32 kCodeThreads = 64;  // 8 elements each, 16 threads a tile
  constexpr u32 kElements = 8;
  constexpr u32 kTileThreads = 16;
  constexpr float kLeast = 0x1p-126f;
  const Place place = find_place(p);
  if (place.row == nullptr) return;
  if (threadIdx.x >= kCodeThreads) {
    const auto* from = reinterpret_cast<const u32*>(p.k_pe + place.layer * p.k_pe_layer_stride +
                                                    place.token * p.k_pe_token_stride);
    auto* to = reinterpret_cast<u32*>(place.row + p.rope_offset);
    const u32 i = threadIdx.x - kCodeThreads;
    if (i < static_cast<u32>(p.rope_dim) / 2) to[i] = from[i];
    return;
  }
  const auto* from = reinterpret_cast<const uint4*>(p.kv_c + place.layer * p.kv_c_layer_stride +
                                                    place.token * p.kv_c_token_stride);
  const uint4 words = from[threadIdx.x];
  const u32 pairs[4] = {words.x, words.y, words.z, words.w};
  float values[kElements];
  float amax = 0.0f;
#pragma unroll
  for (u32 i = 0; i < kElements; ++i) {
    values[i] = Bfloat16::widen(static_cast<u16>(pairs[i / 2] >> (i % 2 * 16)));
    amax = cupy_mla::max_f32(amax, cupy_mla::abs_f32(values[i]));
  }
#pragma unroll
  for (u32 step = kTileThreads / 2; step > 0; step /= 2) {
    amax = cupy_mla::max_f32(amax, __shfl_xor_sync(kAllLanes, amax, step));
  }
  const float scale = cupy_mla::max_f32(cupy_mla::div_rn_f32(amax, 448.0f), kLeast);
  u64 codes = 0;
#pragma unroll
  for (u32 i = 0; i < kElements; ++i) {
    codes |= static_cast<u64>(encode_e4m3(cupy_mla::div_rn_f32(values[i], scale))) << (8 * i);
  }
  reinterpret_cast<u64*>(place.row)[threadIdx.x] = codes;
  if (threadIdx.x % kTileThreads == 0) {
    reinterpret_cast<float*>(place.row + p.scale_offset)[threadIdx.x / kTileThreads] = scale;
  }
}

// --- read_rows

struct ReadRowsParams {
  u8* const* caches;  // [layers]
  const i64* slots;   // [tokens], for all layers
  u8* sink;           // one byte
  i64 block_stride;   // bytes
  i64 row_stride;
  i32 tokens;
  i32 block_size;
  i32 row_vectors;
  i32 key;  // not 0
};

// blockDim.x threads share a row, blockDim.y rows are read at a time.
__device__ __forceinline__ void read_rows(const ReadRowsParams& p) {
  const u32 blocks = (static_cast<u32>(p.tokens) + blockDim.y - 1) / blockDim.y;
  const u32 layer = blockIdx.x / blocks;
  const u32 token = (blockIdx.x - layer * blocks) * blockDim.y + threadIdx.y;
  if (token >= static_cast<u32>(p.tokens)) return;
  const i64 slot = p.slots[token];
  if (slot < 0) return;
  const auto* row = reinterpret_cast<const uint4*>(
      p.caches[layer] + slot / p.block_size * p.block_stride + slot % p.block_size * p.row_stride);
  uint4 sum = {0, 0, 0, 0};
  for (i32 i = static_cast<i32>(threadIdx.x); i < p.row_vectors;
       i += static_cast<i32>(blockDim.x)) {
    mix(sum, row[i]);
  }
  if (never(sum, static_cast<u32>(p.key))) *p.sink = 1;
}

}  // namespace bench
