// Rounding to fp8, and the scales of tiles.

#pragma once

#include "exact_math.cuh"
#include "types.cuh"

namespace cupy_mla {

struct E4m3 {
  // Magnitudes from here on would round to NaN without saturation: those above 464.
  static constexpr u32 kOverflowBits = 0x43E80001u;
  // Four codes, the first one in the lowest byte.
  __device__ __forceinline__ static u32 encode(const float (&q)[4]) {
    return cvt_sat_e4m3x4(q[0], q[1], q[2], q[3]);
  }
};

struct E5m2 {
  // Magnitudes from here on would round to Inf without saturation: the tie at 61440 goes up.
  static constexpr u32 kOverflowBits = 0x47700000u;
  __device__ __forceinline__ static u32 encode(const float (&q)[4]) {
    return cvt_sat_e5m2x4(q[0], q[1], q[2], q[3]);
  }
};

// Whether a cast without saturation would make Inf or NaN of a quotient: of Inf too, of NaN not.
template <class Code>
__device__ __forceinline__ bool is_saturated(float quotient) {
  const u32 magnitude = bits_of(quotient) & ~kSignBit;
  return magnitude >= Code::kOverflowBits && magnitude <= kInfinityBits;
}

// max(amax / 448, least) for amax >= 0, Inf included, and least >= 2^-126: the scale with which the
// largest magnitude of a tile becomes the largest e4m3. The product with the inverse, and one step
// that corrects it by its exact residual; checked for every float32. Where the residual underflows,
// `least` is the larger one.
__device__ __forceinline__ float amax_scale(float amax, float least) {
  constexpr float kMax = 448.0f;
  constexpr float kInverse = 1.0f / kMax;
  const float q = mul_rn_f32(amax, kInverse);
  const float residual = fma_rn_f32(q, kMax, neg_f32(amax));
  return max_f32(fma_rn_f32_if_below(neg_f32(residual), kInverse, q, float_of(kInfinityBits)),
                 least);
}

// The smallest power of two not below a positive normal x: any bit of the mantissa carries.
__device__ __forceinline__ float ceil_power_of_two(float x) {
  return float_of((bits_of(x) + 0x7FFFFFu) & kInfinityBits);
}

}  // namespace cupy_mla
