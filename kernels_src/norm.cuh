// RMSNorm by a warp, with the sum in a fixed order.
//
// The tree of cupy_mla/reference/norm.py: a lane takes 16 neighbours at a time of rows of 512
// elements or more, 4 of narrower ones, adds what it has in rising order, and a butterfly adds the
// lanes' sums. No product is contracted with a sum: each operation is rounded by itself.

#pragma once

#include "exact_math.cuh"
#include "lanes.cuh"
#include "numbers.cuh"
#include "types.cuh"

namespace cupy_mla {

// A lane takes kRun elements at a time of a row of kWideRow elements or more, and of others:
constexpr int kNarrowRun = 4;
constexpr i32 kWideRow = kLanes * kRun;

template <int kCount>
__device__ __forceinline__ float add_squares(float sum, const float (&values)[kCount]) {
#pragma unroll
  for (float value : values) sum = add_rn_f32(sum, mul_rn_f32(value, value));
  return sum;
}

__device__ __forceinline__ float reciprocal_root(float mean, float eps) {
  return rcp_rn_f32(sqrt_rn_f32(add_rn_f32(mean, eps)));
}

// The same for the sum of a row of kWideRow elements: a division by a power of two is exact.
__device__ __forceinline__ float reciprocal_root_of_wide_row(float sum, float eps) {
  return reciprocal_root(mul_rn_f32(sum, 1.0f / kWideRow), eps);
}

// Four neighbouring numbers as they lie in memory: widening them would wait for them.
struct QuadBits {
  u32 words[4];  // of two numbers of 16 bits each, the last two unused; or of one of 32

  __device__ __forceinline__ void load(const u8* numbers, i32 type) {
    const u64 address = address_of(numbers);
    if (type == kFloat32) {
      if (is_vector_aligned(address)) {
        const uint4 vector = *reinterpret_cast<const uint4*>(numbers);
        set(vector.x, vector.y, vector.z, vector.w);
      } else {
        const auto* elements = reinterpret_cast<const u32*>(numbers);
        set(elements[0], elements[1], elements[2], elements[3]);
      }
    } else if (address % 8 == 0) {
      const u64 both = *reinterpret_cast<const u64*>(numbers);
      set(static_cast<u32>(both), static_cast<u32>(both >> 32), 0, 0);
    } else {
      const auto* elements = reinterpret_cast<const u16*>(numbers);
      set(elements[0] | static_cast<u32>(elements[1]) << 16,
          elements[2] | static_cast<u32>(elements[3]) << 16, 0, 0);
    }
  }

  __device__ __forceinline__ void set(u32 a, u32 b, u32 c, u32 d) {
    words[0] = a;
    words[1] = b;
    words[2] = c;
    words[3] = d;
  }

  // Bits of the numbers as float32.
  __device__ __forceinline__ uint4 widened(i32 type) const {
    if (type == kFloat32) return {words[0], words[1], words[2], words[3]};
    return {bits_of(widen_number(words[0] & 0xFFFFu, type)),
            bits_of(widen_number(words[0] >> 16, type)),
            bits_of(widen_number(words[1] & 0xFFFFu, type)),
            bits_of(widen_number(words[1] >> 16, type))};
  }

  __device__ __forceinline__ void widen(i32 type, float (&values)[4]) const {
    const uint4 bits = widened(type);
    values[0] = float_of(bits.x);
    values[1] = float_of(bits.y);
    values[2] = float_of(bits.z);
    values[3] = float_of(bits.w);
  }
};

// Weights of a row of kWideRow elements, widened for all warps of a block.
struct SharedWeights {
  static constexpr i32 kQuads = kWideRow / 4;

  uint4 quads[kRun / 4][kLanes];  // by quad of a run, then by lane: no two lanes share a bank

  // The quad that a thread brings, of a block of kQuads threads or more.
  __device__ __forceinline__ static QuadBits load(const u8* weight, i32 type, i32 thread) {
    QuadBits bits{};
    if (thread < kQuads) bits.load(weight + thread * 4 * number_bytes(type), type);
    return bits;
  }

  // The block's threads have to wait for one another afterwards.
  __device__ __forceinline__ void put(const QuadBits& bits, i32 type, i32 thread) {
    if (thread < kQuads) quads[thread % (kRun / 4)][thread / (kRun / 4)] = bits.widened(type);
  }

  // Turns each value x of a lane's run into (x * r) * weight.
  __device__ __forceinline__ void scale(float (&values)[kRun], float r, i32 lane) const {
#pragma unroll
    for (int i = 0; i < kRun / 4; ++i) {
      const uint4& quad = quads[i][lane];
      const u32 weights[4] = {quad.x, quad.y, quad.z, quad.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float& value = values[4 * i + j];
        value = mul_rn_f32(mul_rn_f32(value, r), float_of(weights[j]));
      }
    }
  }
};

// Calls visit(i, x) for the elements of a row that a lane has, in the order of the sum.
template <class Input, class Visit>
__device__ __forceinline__ void for_each_element(const u8* row, i32 width, i32 lane, Visit visit) {
  const i32 run = width >= kWideRow ? kRun : kNarrowRun;
  const auto* elements = reinterpret_cast<const typename Input::Bits*>(row);
#pragma unroll 1
  for (i32 first = lane * run; first < width; first += kLanes * run) {
    const i32 end = min(first + run, width);
#pragma unroll 1
    for (i32 i = first; i < end; ++i) visit(i, Input::widen(elements[i]));
  }
}

// A row of any width from any address: calls store(i, y) for the normed elements.
template <class Input, class Store>
__device__ __forceinline__ void rms_norm_by_element(const u8* row, i32 width, const u8* weight,
                                                    i32 weight_type, float eps, i32 lane,
                                                    Store store) {
  float sum = 0.0f;
  for_each_element<Input>(row, width, lane,
                          [&](i32, float x) { sum = add_rn_f32(sum, mul_rn_f32(x, x)); });
  const float mean = div_rn_f32(sum_over_lanes(sum), static_cast<float>(width));
  const float r = reciprocal_root(mean, eps);
  for_each_element<Input>(row, width, lane, [&](i32 i, float x) {
    store(i, mul_rn_f32(mul_rn_f32(x, r), load_number(weight, weight_type, i)));
  });
}

}  // namespace cupy_mla
