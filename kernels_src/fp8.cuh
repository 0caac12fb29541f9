// Division by a scale and rounding to fp8.

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

// Divides by one scale; the quotients are those of IEEE division, wherever fp8 can tell.
//
// div.rn costs a dozen instructions and a call behind a branch. Fused steps do the same in four an
// element: q = x * (1/s), then q -= (q * s - x) * (1/s), where the residual in brackets is exact.
//  - Numerators of 11 significant bits or fewer (bfloat16, float16) take one step. That this gives
//    the correctly rounded quotient is checked for all pairs of significands, 2^10 by 2^23 of them.
//  - float32 numerators take two: the first leaves a faithful quotient, and from such a one the
//    second gives the correctly rounded one (Markstein's theorem; 1/s is correctly rounded).
//  - For 2^-80 <= s <= 2^80 exponents do no harm: 1/s is normal, and where the residual underflows
//    (|x| < 2^-102) the quotient is below 2^-21, which both formats round to a zero of its sign.
//    Other scales are brought near by a power of two, and x with them. Where that takes x out of
//    range, the quotient is one that saturates or rounds to zero.
//  - The residual has the sign that keeps a negative zero: (-0 * s) - (-0) is +0.
//  - From 1e6 on, q is left as it is: it saturates anyway, and an infinite q has no residual.
// A live scale may hold anything: a negative one gives its sign to x, by 0, Inf and NaN the first
// product is already what division gives.
template <bool kShortSignificand>
struct Divider {
  static constexpr float kCorrectBelow = 1e6f;
  static constexpr u32 kLeastBits = 0x17800000u;     // 2^-80
  static constexpr u32 kGreatestBits = 0x67800000u;  // 2^80

  float scale;
  float inverse;
  float factor;  // of x; 1 but for unusual scales
  float correct_below;

  Divider() = default;
  __device__ __forceinline__ explicit Divider(float divisor) {
    // Compared as integers: NaN is above every number.
    const u32 magnitude = bits_of(divisor) & ~kSignBit;
    const float power = magnitude < kLeastBits ? 0x1p64f : magnitude > kGreatestBits ? 0x1p-64f : 1;
    // abs_f32, not the float of `magnitude`: the compiler would see through that and flush.
    scale = mul_rn_f32(abs_f32(divisor), power);
    inverse = rcp_rn_f32(scale);
    factor = float_of(bits_of(power) | (bits_of(divisor) & kSignBit));
    correct_below = magnitude < kInfinityBits ? kCorrectBelow : 0.0f;
  }

  // Whether numerators need no bring_near().
  __device__ __forceinline__ bool is_usual() const { return bits_of(factor) == bits_of(1.0f); }

  __device__ __forceinline__ float bring_near(float x) const { return mul_rn_f32(x, factor); }

  // x / scale for an x that has been brought near.
  __device__ __forceinline__ float divide(float x) const {
    const float q = correct(x, mul_rn_f32(x, inverse));
    return kShortSignificand ? q : correct(x, q);
  }

  __device__ __forceinline__ float correct(float x, float q) const {
    const float residual = fma_rn_f32(q, scale, neg_f32(x));
    return fma_rn_f32_if_below(neg_f32(residual), inverse, q, correct_below);
  }
};

// max(amax / 448, least) for amax >= 0, Inf included, and least >= 2^-126: the scale with which the
// largest magnitude of a tile becomes the largest e4m3. One step, as in Divider; checked for every
// float32. Where the residual underflows, `least` is the larger one.
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
