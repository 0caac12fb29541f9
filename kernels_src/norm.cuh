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

// Elements that a lane takes at a time of a row of kWideRow elements or more, and of others.
constexpr int kRun = 16;
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

// Weights of a row of kWideRow elements, widened for all warps of a block.
struct SharedWeights {
  uint4 quads[kRun / 4][kLanes];  // by quad of a run, then by lane: no two lanes share a bank

  // By all threads of the block, who have to wait for one another afterwards.
  __device__ __forceinline__ void fill(const u8* weight, i32 type) {
    const i32 threads = static_cast<i32>(blockDim.x * blockDim.y);
    const i32 thread = static_cast<i32>(threadIdx.y * blockDim.x + threadIdx.x);
#pragma unroll 1
    for (i32 quad = thread; quad < kWideRow / 4; quad += threads) {
      float values[4];
      load_numbers(weight + quad * 4 * number_bytes(type), type, values);
      quads[quad % (kRun / 4)][quad / (kRun / 4)] = {bits_of(values[0]), bits_of(values[1]),
                                                     bits_of(values[2]), bits_of(values[3])};
    }
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
