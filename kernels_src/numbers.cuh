// 16- and 32-bit floats: widened to float32 where they are loaded, rounded to nearest even where
// they are stored.

#pragma once

#include "elements.cuh"
#include "exact_math.cuh"
#include "memory.cuh"
#include "rows.cuh"
#include "types.cuh"

namespace cupy_mla {

// Element types of weights and tables, as cupy_mla/_cuda/params.py numbers them: not worth a
// specialisation, since every thread of a launch takes the same branch.
enum NumberType : i32 { kBfloat16, kFloat16, kFloat32 };

template <class Type>
constexpr NumberType kNumberType = kSame<Type, Bfloat16>  ? kBfloat16
                                   : kSame<Type, Float16> ? kFloat16
                                                          : kFloat32;

// What an element type can hold of a float32.
template <class Type>
__device__ __forceinline__ float rounded(float x) {
  return Type::widen(narrow<Type>(x));
}

__device__ __forceinline__ u32 number_bytes(i32 type) { return type == kFloat32 ? 4 : 2; }

// Element i as it lies in memory: widening it would wait for it.
__device__ __forceinline__ u32 load_number_bits(const u8* numbers, i32 type, i64 i) {
  return type == kFloat32 ? reinterpret_cast<const u32*>(numbers)[i]
                          : reinterpret_cast<const u16*>(numbers)[i];
}

__device__ __forceinline__ float widen_number(u32 bits, i32 type) {
  if (type == kFloat32) return Float32::widen(bits);
  return type == kBfloat16 ? Bfloat16::widen(bits) : Float16::widen(bits);
}

// All of them, with one look at their type.
template <int kCount>
__device__ __forceinline__ void widen_numbers(const u32 (&bits)[kCount], i32 type,
                                              float (&values)[kCount]) {
  if (type == kFloat32) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = Float32::widen(bits[i]);
  } else if (type == kBfloat16) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = Bfloat16::widen(bits[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = Float16::widen(bits[i]);
  }
}

__device__ __forceinline__ float load_number(const u8* numbers, i32 type, i64 i) {
  return widen_number(load_number_bits(numbers, type, i), type);
}

// The values of vectors.
template <class Type, int kVectors, int kCount>
__device__ __forceinline__ void widen_vectors(const uint4 (&vectors)[kVectors],
                                              float (&values)[kCount]) {
  static_assert(kCount == kVectors * kVectorElements<Type>, "all of them");
  for_each_quad<Type>(vectors, [&](int i, const float (&four)[4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) values[4 * i + j] = four[j];
  });
}

// Consecutive numbers from any address of their alignment.
template <class Type, int kCount>
__device__ __forceinline__ void load_values(const u8* numbers, float (&values)[kCount]) {
  using Bits = typename Type::Bits;
  constexpr int kBytes = kCount * sizeof(Bits);
  if constexpr (kBytes % kVectorBytes == 0) {
    if (is_vector_aligned(address_of(numbers))) {
      uint4 vectors[kBytes / kVectorBytes];
#pragma unroll
      for (int i = 0; i < kBytes / static_cast<int>(kVectorBytes); ++i) {
        vectors[i] = reinterpret_cast<const uint4*>(numbers)[i];
      }
      widen_vectors<Type>(vectors, values);
      return;
    }
  } else if constexpr (kBytes == 8 && kCount == 4) {
    if (address_of(numbers) % kBytes == 0) {
      const u64 word = *reinterpret_cast<const u64*>(numbers);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        values[i] = Type::widen(static_cast<u32>(word >> 16 * i) & 0xFFFFu);
      }
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    values[i] = Type::widen(reinterpret_cast<const Bits*>(numbers)[i]);
  }
}

template <int kCount>
__device__ __forceinline__ void load_numbers(const u8* numbers, i32 type, float (&values)[kCount]) {
  if (type == kFloat32) {
    load_values<Float32>(numbers, values);
  } else if (type == kBfloat16) {
    load_values<Bfloat16>(numbers, values);
  } else {
    load_values<Float16>(numbers, values);
  }
}

// 8 or 4 numbers from an address of the alignment of as many bytes, at most of a vector's.
template <int kCount>
__device__ __forceinline__ void load_numbers_by_vectors(const u8* numbers, i32 type,
                                                        float (&values)[kCount]) {
  const auto* source = reinterpret_cast<const uint4*>(numbers);
  if (type == kFloat32) {
    uint4 vectors[kCount / 4];
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) vectors[i] = source[i];
    widen_vectors<Float32>(vectors, values);
    return;
  }
  u32 words[kCount / 2];
  if constexpr (kCount == 8) {
    const uint4 vector = *source;
    words[0] = vector.x;
    words[1] = vector.y;
    words[2] = vector.z;
    words[3] = vector.w;
  } else {
    static_assert(kCount == 4, "a vector or half of one");
    const u64 both = *reinterpret_cast<const u64*>(numbers);
    words[0] = static_cast<u32>(both);
    words[1] = static_cast<u32>(both >> 32);
  }
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    values[2 * i] = widen_number(words[i] & 0xFFFFu, type);
    values[2 * i + 1] = widen_number(words[i] >> 16, type);
  }
}

// A vector of the values from `first` on.
template <class Type, int kCount>
__device__ __forceinline__ uint4 pack_vector(const float (&values)[kCount], int first) {
  float part[kVectorElements<Type>];
#pragma unroll
  for (int i = 0; i < kVectorElements<Type>; ++i) part[i] = values[first + i];
  return narrow_vector<Type>(part);
}

template <class Small, class Wide>
__device__ __forceinline__ void store_neighbours(u8* array, i32 first, u32 a, u32 b) {
  *reinterpret_cast<Wide*>(array + first * i64{sizeof(Small)}) =
      static_cast<Wide>(a | static_cast<u64>(b) << 8 * sizeof(Small));
}

// Stores elements `first` and `second` of an array; in one go where they are neighbours.
template <class Bits>
__device__ __forceinline__ void store_two(u8* array, i32 first, i32 second, u32 a, u32 b) {
  auto* elements = reinterpret_cast<Bits*>(array);
  const bool aligned = address_of(elements + first) % (2 * sizeof(Bits)) == 0;
  if (second == first + 1 && aligned) {
    if constexpr (sizeof(Bits) == 1) store_neighbours<Bits, u16>(array, first, a, b);
    if constexpr (sizeof(Bits) == 2) store_neighbours<Bits, u32>(array, first, a, b);
    if constexpr (sizeof(Bits) == 4) store_neighbours<Bits, u64>(array, first, a, b);
  } else {
    elements[first] = static_cast<Bits>(a);
    elements[second] = static_cast<Bits>(b);
  }
}

}  // namespace cupy_mla
