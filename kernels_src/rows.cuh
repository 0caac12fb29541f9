// A token's row on its way from the inputs to the cache: what all row formats share.

#pragma once

#include "exact_math.cuh"
#include "memory.cuh"
#include "stats.cuh"
#include "types.cuh"

namespace cupy_mla {

// Input element types. `Bits` holds an element as it lies in memory.

struct Bfloat16 {
  using Bits = u16;
  static constexpr u32 kExponentMask = 0x7F80u;
  __device__ __forceinline__ static float widen(u32 bits) {
    return bf16_to_f32(static_cast<u16>(bits));
  }
};

struct Float16 {
  using Bits = u16;
  static constexpr u32 kExponentMask = 0x7C00u;
  __device__ __forceinline__ static float widen(u32 bits) {
    return f16_to_f32(static_cast<u16>(bits));
  }
};

struct Float32 {
  using Bits = u32;
  static constexpr u32 kExponentMask = kInfinityBits;
  __device__ __forceinline__ static float widen(u32 bits) { return float_of(bits); }
};

template <class Input>
__device__ __forceinline__ bool is_nonfinite(u32 bits) {
  return (bits & Input::kExponentMask) == Input::kExponentMask;
}

// Consecutive float32 values that a thread holds of a row: as many as a vector has codes of fp8.
constexpr int kRun = kVectorBytes;

// Elements that a vector of 16 bytes holds.
template <class Input>
constexpr int kVectorElements = kVectorBytes / sizeof(typename Input::Bits);

// Calls visit(i, values) for the i-th four elements of consecutive vectors, widened. Four at a time
// make one word of fp8 codes and keep few registers busy.
template <class Input, int kVectors, class Visit>
__device__ __forceinline__ void for_each_quad(const uint4 (&vectors)[kVectors], Visit visit) {
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const uint4& v = vectors[i];
    if constexpr (sizeof(typename Input::Bits) == 4) {
      float values[4] = {Input::widen(v.x), Input::widen(v.y), Input::widen(v.z),
                         Input::widen(v.w)};
      visit(i, values);
    } else {
      float first[4] = {Input::widen(v.x & 0xFFFFu), Input::widen(v.x >> 16),
                        Input::widen(v.y & 0xFFFFu), Input::widen(v.y >> 16)};
      visit(2 * i, first);
      float second[4] = {Input::widen(v.z & 0xFFFFu), Input::widen(v.z >> 16),
                         Input::widen(v.w & 0xFFFFu), Input::widen(v.w >> 16)};
      visit(2 * i + 1, second);
    }
  }
}

template <class Input, int kVectors>
__device__ __forceinline__ u32 count_nonfinite(const uint4 (&vectors)[kVectors]) {
  u32 count = 0;
#pragma unroll
  for (const uint4& vector : vectors) {
    const u32 words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (u32 word : words) {
      count += is_nonfinite<Input>(word);
      if constexpr (sizeof(typename Input::Bits) == 2) count += is_nonfinite<Input>(word >> 16);
    }
  }
  return count;
}

// A layer's inputs: the two parts of each token's row.
struct LayerRows {
  const u8* latent;
  const u8* rope;
  i64 latent_stride;  // bytes a token
  i64 rope_stride;
  i32 lora_rank;
  i32 rope_dim;

  __device__ __forceinline__ const u8* latent_of(i32 token) const {
    return latent + token * latent_stride;
  }
  __device__ __forceinline__ const u8* rope_of(i32 token) const {
    return rope + token * rope_stride;
  }

  // Element i of a token's whole row.
  template <class Bits>
  __device__ __forceinline__ Bits element(i32 token, i32 i) const {
    return i < lora_rank ? reinterpret_cast<const Bits*>(latent_of(token))[i]
                         : reinterpret_cast<const Bits*>(rope_of(token))[i - lora_rank];
  }
};

// Where unit `unit` of kUnit consecutive elements lies in every token's row. No unit straddles the
// two parts.
template <class Input, int kUnit>
struct UnitCursor {
  const u8* data;
  i64 stride;

  __device__ __forceinline__ UnitCursor(const LayerRows& rows, u32 unit) {
    const i32 first = static_cast<i32>(unit) * kUnit;
    const bool in_latent = first < rows.lora_rank;
    data = (in_latent ? rows.latent : rows.rope) +
           (in_latent ? first : first - rows.lora_rank) * i64{sizeof(typename Input::Bits)};
    stride = in_latent ? rows.latent_stride : rows.rope_stride;
  }

  template <int kVectors>
  __device__ __forceinline__ void load(i32 token, uint4 (&vectors)[kVectors]) const {
    const u8* source = data + token * stride;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) vectors[i] = load_vector(source + i * kVectorBytes);
  }
};

}  // namespace cupy_mla
