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

// The smallest power of two that is not below amax / 448, nor below `least`, one as well; for
// amax >= 0, and Inf for Inf. 448 is 1.75 * 2^8, so a larger significand than 1.75 carries. The
// same comes of the quotient in float32: that is a power of two only where amax is 448 times one.
// Checked for every float32.
__device__ __forceinline__ float amax_power_of_two(float amax, float least) {
  constexpr u32 kOne = 1u << 23;  // of an exponent
  constexpr u32 kThreeQuarters = 3 * kOne / 4;
  const u32 bits = bits_of(amax);
  const u32 carried = (bits + (kOne - 1 - kThreeQuarters)) & kInfinityBits;
  const i32 power = max(static_cast<i32>(carried - 8 * kOne), static_cast<i32>(bits_of(least)));
  return float_of(bits == kInfinityBits ? kInfinityBits : static_cast<u32>(power));
}

}  // namespace cupy_mla
