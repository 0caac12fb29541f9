// Values divided by a scale of any size, as fp8 codes: div.rn costs a dozen instructions and a call
// behind a branch.

#pragma once

#include "exact_math.cuh"
#include "fp8.cuh"
#include "types.cuh"

namespace cupy_mla {

// Quotients of one scale in two operations: x * high + (x * low), the second one fused.
//
// high + low is 1/s to 47 bits, so the result is the IEEE quotient but for those that lie next to
// the middle of two floats. Codes cannot tell: the middle of two codes, and the least magnitude
// that saturates, have 5 significant bits at most. That the result is on the same side of each such
// number as the IEEE quotient, or is that number as well, is checked for all significands of s and
// of numbers, and every x that is near the product of both.
//  - high is 1/s rounded down, so that low has its sign: an infinite x then stays infinite, not
//  NaN.
//  - One significand of s in 2^23 needs a low that is a hair smaller; see the constructor.
//  - For 2^-85 <= s <= 2^80 nothing that a code can tell underflows: quotients of 2^-17 and more
//  have
//    an x of 2^-102 and more. Other scales are brought near by a power of two, and x with them.
//  - A scale of 0, Inf or NaN has both parts alike: the quotients are Inf, 0 or NaN as they should.
struct QuotientScale {
  static constexpr u32 kLeastBits = 0x17800000u;     // 2^-80
  static constexpr u32 kGreatestBits = 0x67800000u;  // 2^80
  static constexpr u32 kSignificand = 0x7FFFFFu;
  static constexpr u32 kOddSignificand = 0x3FFFFFu;

  float high;
  float low;
  float factor;  // of x; 1 but for unusual scales

  QuotientScale() = default;
  __device__ __forceinline__ explicit QuotientScale(float divisor) {
    // Compared as integers: NaN is above every number.
    const u32 magnitude = bits_of(divisor) & ~kSignBit;
    factor = magnitude < kLeastBits ? 0x1p64f : magnitude > kGreatestBits ? 0x1p-64f : 1.0f;
    const float scale = mul_rn_f32(divisor, factor);
    const float inverse = rcp_rn_f32(scale);
    high = inverse;
    float rest = fma_rn_f32(neg_f32(high), scale, 1.0f);
    if (static_cast<i32>(bits_of(rest)) <= 0) {
      high = float_of(bits_of(high) - 1);
      rest = fma_rn_f32(neg_f32(high), scale, 1.0f);
    }
    const float first = mul_rn_f32(rest, inverse);
    low = fma_rn_f32(fma_rn_f32(neg_f32(first), scale, rest), inverse, first);
    if ((bits_of(scale) & kSignificand) == kOddSignificand) low = float_of(bits_of(low) - 1);
    if (magnitude == 0 || magnitude >= kInfinityBits) high = low = inverse;
  }

  // Whether numerators need no bring_near().
  __device__ __forceinline__ bool is_usual() const { return bits_of(factor) == bits_of(1.0f); }

  __device__ __forceinline__ float bring_near(float x) const { return mul_rn_f32(x, factor); }

  // The quotient of an x that has been brought near.
  __device__ __forceinline__ float divide(float x) const {
    return fma_rn_f32(x, high, mul_rn_f32(x, low));
  }

  // The quotients of values that may be divided by any scale.
  template <int kCount>
  __device__ __forceinline__ void divide_all(const float (&values)[kCount],
                                             float (&quotients)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) quotients[i] = values[i];
    if (!is_usual()) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) quotients[i] = bring_near(quotients[i]);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) quotients[i] = divide(quotients[i]);
  }
};

// Quotients of a scale that is a power of two up to 2^126, or Inf: the products with its inverse,
// which are rounded alike.
struct PowerOfTwoScale {
  float inverse;

  __device__ __forceinline__ explicit PowerOfTwoScale(float scale) {
    const u32 bits = bits_of(scale);
    inverse = float_of(bits == kInfinityBits ? 0u : 2 * bits_of(1.0f) - bits);
  }

  template <int kCount>
  __device__ __forceinline__ void divide_all(const float (&values)[kCount],
                                             float (&quotients)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) quotients[i] = mul_rn_f32(values[i], inverse);
  }
};

// Codes of values, four a word, the first one in the lowest byte.
template <class Code, int kWords, class Scale>
__device__ __forceinline__ void encode_quotients(const Scale& scale,
                                                 const float (&values)[4 * kWords],
                                                 u32 (&codes)[kWords]) {
  float quotients[4 * kWords];
  scale.divide_all(values, quotients);
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const float four[4] = {quotients[4 * i], quotients[4 * i + 1], quotients[4 * i + 2],
                           quotients[4 * i + 3]};
    codes[i] = Code::encode(four);
  }
}

// Codes of two values in the lower half of a word.
template <class Code, class Scale>
__device__ __forceinline__ u32 encode_two(const Scale& scale, float a, float b) {
  const float values[2] = {a, b};
  float quotients[2];
  scale.divide_all(values, quotients);
  const float four[4] = {quotients[0], quotients[1], 0.0f, 0.0f};
  return Code::encode(four);
}

}  // namespace cupy_mla
