// Float arithmetic whose bits matter: every operation that decides a stored byte, and nothing else.
//
// CuPy appends -ftz=true to the options of every compilation, after the caller's own. With it the
// plain operators, __fmul_rn, fmaxf and a comparison of floats all flush subnormals. Inline PTX
// that says no .ftz keeps them, and a multiplication and an addition that are written apart are
// never contracted. The host twins under #else are plain C++ for the emulator, compiled with
// -ffp-contract=off; both sides give equal bits for all inputs but a NaN's payload.
//
// This is the only file with inline PTX.

#pragma once

#include "types.cuh"

namespace cupy_mla {

#if defined(__CUDACC__)

__device__ __forceinline__ float add_rn_f32(float a, float b) {
  float result;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

__device__ __forceinline__ float sub_rn_f32(float a, float b) {
  float result;
  asm("sub.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

__device__ __forceinline__ float mul_rn_f32(float a, float b) {
  float result;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// a * b + c, rounded once.
__device__ __forceinline__ float fma_rn_f32(float a, float b, float c) {
  float result;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(a), "f"(b), "f"(c));
  return result;
}

__device__ __forceinline__ float div_rn_f32(float a, float b) {
  float result;
  asm("div.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

__device__ __forceinline__ float rcp_rn_f32(float a) {
  float result;
  asm("rcp.rn.f32 %0, %1;" : "=f"(result) : "f"(a));
  return result;
}

__device__ __forceinline__ float sqrt_rn_f32(float a) {
  float result;
  asm("sqrt.rn.f32 %0, %1;" : "=f"(result) : "f"(a));
  return result;
}

// As instructions, so that ptxas folds them into the operand of the next one; the C++ operator
// would flush a subnormal.
__device__ __forceinline__ float abs_f32(float a) {
  float result;
  asm("abs.f32 %0, %1;" : "=f"(result) : "f"(a));
  return result;
}

__device__ __forceinline__ float neg_f32(float a) {
  float result;
  asm("neg.f32 %0, %1;" : "=f"(result) : "f"(a));
  return result;
}

// The larger one; a NaN loses against a number. +0 is larger than -0.
__device__ __forceinline__ float max_f32(float a, float b) {
  float result;
  asm("max.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// fma_rn_f32(a, b, q) if |q| < limit, else q (also where q is NaN). As one predicated instruction:
// a select behind an unconditional fma would be a fifth instruction in the division below.
__device__ __forceinline__ float fma_rn_f32_if_below(float a, float b, float q, float limit) {
  asm("{\n\t"
      ".reg .pred below;\n\t"
      ".reg .f32 magnitude;\n\t"
      "abs.f32 magnitude, %0;\n\t"
      "setp.lt.f32 below, magnitude, %3;\n\t"
      "@below fma.rn.f32 %0, %1, %2, %0;\n\t"
      "}"
      : "+f"(q)
      : "f"(a), "f"(b), "f"(limit));
  return q;
}

// A load that stays where it stands: the compiler would put it behind the branch that needs it
// first, and so make one round trip to memory two.
__device__ __forceinline__ uint4 load_now(const uint4* source) {
  uint4 value;
  asm volatile("ld.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(source));
  return value;
}

// The same for the two words of 8 bytes, for one of 4, or for nothing where `bytes` is 0: each into
// a register of its own, since a choice or a pair of registers would wait for what was loaded.
__device__ __forceinline__ void load_words_now(const void* source, i32 bytes, u32& low, u32& high) {
  asm volatile(
      "{\n\t"
      ".reg .pred any, both;\n\t"
      "setp.ne.s32 any, %3, 0;\n\t"
      "setp.eq.s32 both, %3, 8;\n\t"
      "@any ld.u32 %0, [%2];\n\t"
      "@both ld.u32 %1, [%2+4];\n\t"
      "}"
      : "+r"(low), "+r"(high)
      : "l"(source), "r"(bytes));
}

#else

__device__ inline void load_words_now(const void* source, i32 bytes, u32& low, u32& high) {
  if (&low == &high) __builtin_trap();  // one register for both would lose a word
  const auto* words = static_cast<const u32*>(source);
  if (bytes != 0) low = words[0];
  if (bytes == 8) high = words[1];
}

__device__ inline uint4 load_now(const uint4* source) { return *source; }

__device__ inline float add_rn_f32(float a, float b) { return a + b; }
__device__ inline float sub_rn_f32(float a, float b) { return a - b; }
__device__ inline float mul_rn_f32(float a, float b) { return a * b; }
__device__ inline float fma_rn_f32(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
__device__ inline float div_rn_f32(float a, float b) { return a / b; }
__device__ inline float rcp_rn_f32(float a) { return 1.0f / a; }
__device__ inline float sqrt_rn_f32(float a) { return __builtin_sqrtf(a); }

__device__ inline float abs_f32(float a) { return __builtin_fabsf(a); }
__device__ inline float neg_f32(float a) { return -a; }

__device__ inline float max_f32(float a, float b) {
  if (a != a) return b;
  if (b != b) return a;
  if (a == b) return __builtin_signbit(a) ? b : a;
  return a > b ? a : b;
}

__device__ inline float fma_rn_f32_if_below(float a, float b, float q, float limit) {
  return __builtin_fabsf(q) < limit ? __builtin_fmaf(a, b, q) : q;
}

#endif

__device__ __forceinline__ u32 bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ float float_of(u32 bits) { return __uint_as_float(bits); }

constexpr u32 kSignBit = 0x80000000u;
constexpr u32 kInfinityBits = 0x7F800000u;
constexpr u32 kNanBits = 0x7FFFFFFFu;

// Widening, exact.

__device__ __forceinline__ float bf16_to_f32(u16 bits) {
  return float_of(static_cast<u32>(bits) << 16);
}

__device__ __forceinline__ float f16_to_f32(u16 bits) {
#if defined(__CUDACC__)
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(bits));
  return result;
#else
  const u32 sign = static_cast<u32>(bits & 0x8000u) << 16;
  const u32 magnitude = bits & 0x7FFFu;
  if (magnitude >= 0x7C00u) return float_of(sign | kInfinityBits | (magnitude & 0x3FFu) << 13);
  // A subnormal has no hidden bit: count it in units of 2^-24.
  if (magnitude < 0x400u) {
    return float_of(sign | bits_of(static_cast<float>(magnitude) * 0x1p-24f));
  }
  return float_of(sign | ((magnitude << 13) + ((127u - 15u) << 23)));
#endif
}

// Narrowing, to nearest even. Every NaN becomes 0x7FFF, as PTX cvt has it.

__device__ __forceinline__ u16 cvt_rn_bf16(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  u16 result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result) : "f"(x));
  return result;
#else
  const u32 bits = bits_of(x);
  if ((bits & ~kSignBit) > kInfinityBits) return 0x7FFFu;
  return static_cast<u16>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
#endif
}

// The upper bits of `magnitude` without its lowest `shift` (1 to 31) ones, to nearest even.
__device__ __forceinline__ u32 shift_right_rn(u32 magnitude, u32 shift) {
  return (magnitude + ((1u << (shift - 1)) - 1u) + (magnitude >> shift & 1u)) >> shift;
}

// Magnitude of a finite float32 in a format with `kMantissa` mantissa bits and exponent bias
// `kBias`, to nearest even. What is too large comes out as a code above the format's finite ones.
template <int kMantissa, int kBias>
__device__ __forceinline__ u32 narrow_rn(u32 magnitude) {
  constexpr u32 kShift = 23 - kMantissa;
  constexpr u32 kLeastNormal = 127 - kBias + 1;  // its exponent, as float32 counts
  const u32 exponent = magnitude >> 23;
  if (exponent >= kLeastNormal) {
    return shift_right_rn(magnitude, kShift) - ((kLeastNormal - 1) << kMantissa);
  }
  // A subnormal result: the hidden bit becomes an ordinary one, and less of the mantissa stays.
  // float32's own subnormals lie so far below that it makes no difference that they have none.
  const u32 shift = kShift + (kLeastNormal - exponent);
  return shift > 31 ? 0u : shift_right_rn((magnitude & 0x7FFFFFu) | 0x800000u, shift);
}

__device__ __forceinline__ u16 cvt_rn_f16(float x) {
#if defined(__CUDACC__)
  u16 result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result) : "f"(x));
  return result;
#else
  const u32 bits = bits_of(x);
  const u32 magnitude = bits & ~kSignBit;
  if (magnitude > kInfinityBits) return 0x7FFFu;
  const u32 code = magnitude == kInfinityBits ? 0x7C00u : narrow_rn<10, 15>(magnitude);
  return static_cast<u16>(((bits & kSignBit) >> 16) | (code < 0x7C00u ? code : 0x7C00u));
#endif
}

// fp8 by integer arithmetic: below sm_89, and on the host. Saturating, a NaN is 0x7F in both
// formats without its sign, which is what cvt.satfinite does.
template <int kMantissa, int kBias, u32 kMaxCode>
__device__ __forceinline__ u32 cvt_sat_fp8_soft(float x) {
  const u32 bits = bits_of(x);
  const u32 magnitude = bits & ~kSignBit;
  if (magnitude > kInfinityBits) return 0x7Fu;
  const u32 code = narrow_rn<kMantissa, kBias>(magnitude);
  return (bits >> 24 & 0x80u) | (code < kMaxCode ? code : kMaxCode);
}

__device__ __forceinline__ u32 cvt_sat_e4m3_soft(float x) {
  return cvt_sat_fp8_soft<3, 7, 0x7E>(x);
}
__device__ __forceinline__ u32 cvt_sat_e5m2_soft(float x) {
  return cvt_sat_fp8_soft<2, 15, 0x7B>(x);
}

// Four codes, the first one in the lowest byte.

__device__ __forceinline__ u32 cvt_sat_e4m3x4(float a, float b, float c, float d) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  u32 codes;
  asm("{\n\t"
      ".reg .b16 low, high;\n\t"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n\t"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n\t"
      "mov.b32 %0, {low, high};\n\t"
      "}"
      : "=r"(codes)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return codes;
#else
  return cvt_sat_e4m3_soft(a) | cvt_sat_e4m3_soft(b) << 8 | cvt_sat_e4m3_soft(c) << 16 |
         cvt_sat_e4m3_soft(d) << 24;
#endif
}

__device__ __forceinline__ u32 cvt_sat_e5m2x4(float a, float b, float c, float d) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  u32 codes;
  asm("{\n\t"
      ".reg .b16 low, high;\n\t"
      "cvt.rn.satfinite.e5m2x2.f32 low, %2, %1;\n\t"
      "cvt.rn.satfinite.e5m2x2.f32 high, %4, %3;\n\t"
      "mov.b32 %0, {low, high};\n\t"
      "}"
      : "=r"(codes)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return codes;
#else
  return cvt_sat_e5m2_soft(a) | cvt_sat_e5m2_soft(b) << 8 | cvt_sat_e5m2_soft(c) << 16 |
         cvt_sat_e5m2_soft(d) << 24;
#endif
}

// Four codes widened, exact but for a NaN's payload.

__device__ __forceinline__ float e4m3_to_f32_soft(u32 code) {
  const u32 magnitude = code & 0x7Fu;
  if (magnitude == 0x7Fu) return float_of(kNanBits);
  // Exponent and mantissa lie as in a float32 whose exponent lacks the difference of the biases,
  // subnormal codes as subnormal floats.
  return mul_rn_f32(float_of((code & 0x80u) << 24 | magnitude << 20), 0x1p120f);
}

__device__ __forceinline__ void e4m3x4_to_f32(u32 codes, float (&values)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  u32 low;
  u32 high;
  asm("{\n\t"
      ".reg .b16 a, b;\n\t"
      "mov.b32 {a, b}, %2;\n\t"
      "cvt.rn.f16x2.e4m3x2 %0, a;\n\t"
      "cvt.rn.f16x2.e4m3x2 %1, b;\n\t"
      "}"
      : "=r"(low), "=r"(high)
      : "r"(codes));
  values[0] = f16_to_f32(static_cast<u16>(low));
  values[1] = f16_to_f32(static_cast<u16>(low >> 16));
  values[2] = f16_to_f32(static_cast<u16>(high));
  values[3] = f16_to_f32(static_cast<u16>(high >> 16));
#else
  for (int i = 0; i < 4; ++i) values[i] = e4m3_to_f32_soft(codes >> 8 * i & 0xFFu);
#endif
}

// A code of e5m2 is the upper half of a float16.
__device__ __forceinline__ void e5m2x4_to_f32(u32 codes, float (&values)[4]) {
  values[0] = f16_to_f32(static_cast<u16>(codes << 8));
  values[1] = f16_to_f32(static_cast<u16>(codes & 0xFF00u));
  values[2] = f16_to_f32(static_cast<u16>(codes >> 8 & 0xFF00u));
  values[3] = f16_to_f32(static_cast<u16>(codes >> 16 & 0xFF00u));
}

// Two numbers narrowed as by the functions above, the first one in the lower half.

__device__ __forceinline__ u32 cvt_rn_bf16x2(float a, float b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  u32 result;
  asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(result) : "f"(a), "f"(b));
  return result;
#else
  return cvt_rn_bf16(a) | static_cast<u32>(cvt_rn_bf16(b)) << 16;
#endif
}

__device__ __forceinline__ u32 cvt_rn_f16x2(float a, float b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  u32 result;
  asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(result) : "f"(a), "f"(b));
  return result;
#else
  return cvt_rn_f16(a) | static_cast<u32>(cvt_rn_f16(b)) << 16;
#endif
}

// The bits of a float32 that goes out: a NaN has one code there too, whatever made it.
__device__ __forceinline__ u32 canonical_f32(float x) {
  const u32 bits = bits_of(x);
  return (bits & ~kSignBit) > kInfinityBits ? kNanBits : bits;
}

}  // namespace cupy_mla
