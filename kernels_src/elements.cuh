// Elements of rows on their way out of a cache: loaded as whole words, widened, and narrowed to
// what an output is made of. A NaN that was converted has one code in each output dtype, 0x7FFF or
// 0x7FFFFFFF; only bit copies keep its sign and payload. casts.narrow of the reference says the
// same.

#pragma once

#include "exact_math.cuh"
#include "memory.cuh"
#include "rows.cuh"
#include "types.cuh"

namespace cupy_mla {

// Codes of fp8; Bfloat16, Float16 and Float32 of rows.cuh are elements as well.

struct E4m3Codes {
  using Bits = u8;
  __device__ __forceinline__ static void widen(u32 codes, float (&values)[4]) {
    e4m3x4_to_f32(codes, values);
  }
};

struct E5m2Codes {
  using Bits = u8;
  __device__ __forceinline__ static void widen(u32 codes, float (&values)[4]) {
    e5m2x4_to_f32(codes, values);
  }
};

template <class A, class B>
constexpr bool kSame = false;
template <class A>
constexpr bool kSame<A, A> = true;

// Consecutive bytes: 4, 8, or vectors.
template <int kBytes>
struct Words {
  u32 at[kBytes / 4];
};

// What the address of Words has to be a multiple of.
template <int kBytes>
constexpr u32 kWordsAlignment = kBytes < static_cast<int>(kVectorBytes) ? kBytes : kVectorBytes;

template <int kBytes>
__device__ __forceinline__ Words<kBytes> load_words(const u8* source) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes % kVectorBytes == 0, "of one load each");
  Words<kBytes> words;
  if constexpr (kBytes == 4) {
    words.at[0] = __ldcs(reinterpret_cast<const u32*>(source));
  } else if constexpr (kBytes == 8) {
    const u64 both = __ldcs(reinterpret_cast<const u64*>(source));
    words.at[0] = static_cast<u32>(both);
    words.at[1] = static_cast<u32>(both >> 32);
  } else {
#pragma unroll
    for (u32 i = 0; i < kBytes / kVectorBytes; ++i) {
      const uint4 vector = load_vector(source + i * kVectorBytes);
      words.at[4 * i] = vector.x;
      words.at[4 * i + 1] = vector.y;
      words.at[4 * i + 2] = vector.z;
      words.at[4 * i + 3] = vector.w;
    }
  }
  return words;
}

// The lowest kBytes bytes at an address of any alignment.
template <int kBytes>
__device__ __forceinline__ u32 load_unaligned(const u8* source) {
  u32 bits = 0;
#pragma unroll
  for (int i = 0; i < kBytes; ++i) bits |= static_cast<u32>(source[i]) << 8 * i;
  return bits;
}

// The values of the first kCount elements of words.
template <class Element, int kCount, int kBytes>
__device__ __forceinline__ void widen_words(const Words<kBytes>& words, float (&values)[kCount]) {
  constexpr int kEach = 4 / sizeof(typename Element::Bits);
  static_assert(kCount <= kEach * kBytes / 4, "enough words");
#pragma unroll
  for (int i = 0; i < kCount / kEach; ++i) {
    const u32 word = words.at[i];
    if constexpr (kEach == 4) {
      float four[4];
      Element::widen(word, four);
#pragma unroll
      for (int k = 0; k < 4; ++k) values[4 * i + k] = four[k];
    } else if constexpr (kEach == 2) {
      values[2 * i] = Element::widen(word & 0xFFFFu);
      values[2 * i + 1] = Element::widen(word >> 16);
    } else {
      values[i] = Element::widen(word);
    }
  }
}

// The value of one element by its bits.
template <class Element>
__device__ __forceinline__ float widen_bits(u32 bits) {
  if constexpr (sizeof(typename Element::Bits) == 1) {
    float values[4];
    Element::widen(bits, values);
    return values[0];
  } else {
    return Element::widen(bits);
  }
}

// One word of an output of 16 bits.
template <class Output>
__device__ __forceinline__ u32 narrow_pair(float a, float b) {
  if constexpr (kSame<Output, Bfloat16>) {
    return cvt_rn_bf16x2(a, b);
  } else {
    return cvt_rn_f16x2(a, b);
  }
}

template <class Output>
__device__ __forceinline__ typename Output::Bits narrow(float x) {
  if constexpr (kSame<Output, Float32>) {
    return canonical_f32(x);
  } else if constexpr (kSame<Output, Bfloat16>) {
    return cvt_rn_bf16(x);
  } else {
    return cvt_rn_f16(x);
  }
}

// A vector of an output.
template <class Output>
__device__ __forceinline__ uint4 narrow_vector(const float (&values)[kVectorElements<Output>]) {
  if constexpr (kSame<Output, Float32>) {
    return {canonical_f32(values[0]), canonical_f32(values[1]), canonical_f32(values[2]),
            canonical_f32(values[3])};
  } else {
    return {narrow_pair<Output>(values[0], values[1]), narrow_pair<Output>(values[2], values[3]),
            narrow_pair<Output>(values[4], values[5]), narrow_pair<Output>(values[6], values[7])};
  }
}

}  // namespace cupy_mla
