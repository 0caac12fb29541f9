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

template <int kCount>
__device__ __forceinline__ void scale_values(float (&values)[kCount], float r,
                                             const float (&weight)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = mul_rn_f32(mul_rn_f32(values[i], r), weight[i]);
}

// Calls visit(first, count, values) for the runs of a row that a lane has: `count` elements from
// `first` on, 0 behind them. All lanes are called equally often.
template <class Input, class Visit>
__device__ __forceinline__ void for_each_run(const u8* row, i32 width, i32 lane, Visit visit) {
  const i32 run = width >= kWideRow ? kRun : kNarrowRun;
  const auto* elements = reinterpret_cast<const typename Input::Bits*>(row);
  for (i32 start = 0; start < width; start += kLanes * run) {
    const i32 first = start + lane * run;
    const i32 count = min(run, width - first);
    float values[kRun];
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      values[i] = i < count ? Input::widen(elements[first + i]) : 0.0f;
    }
    visit(first, count, values);
  }
}

// A row of any width from any address: calls store(first, count, values) for the normed runs.
template <class Input, class Store>
__device__ __forceinline__ void rms_norm_by_element(const u8* row, i32 width, const u8* weight,
                                                    i32 weight_type, float eps, i32 lane,
                                                    Store store) {
  float sum = 0.0f;
  for_each_run<Input>(row, width, lane, [&](i32, i32, const float (&values)[kRun]) {
    sum = add_squares(sum, values);
  });
  const float mean = div_rn_f32(sum_over_lanes(sum), static_cast<float>(width));
  const float r = reciprocal_root(mean, eps);
  for_each_run<Input>(row, width, lane, [&](i32 first, i32 count, float (&values)[kRun]) {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      if (i < count) {
        const float factor = load_number(weight, weight_type, first + i);
        values[i] = mul_rn_f32(mul_rn_f32(values[i], r), factor);
      }
    }
    store(first, count, values);
  });
}

}  // namespace cupy_mla
