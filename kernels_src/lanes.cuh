// What the lanes of a whole warp do together.

#pragma once

#include "exact_math.cuh"
#include "types.cuh"

namespace cupy_mla {

constexpr i32 kLanes = 32;
constexpr u32 kWholeWarp = 0xFFFFFFFFu;

// In the order of the tree in norm.cuh.
__device__ __forceinline__ float sum_over_lanes(float sum) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) {
    sum = add_rn_f32(sum, __shfl_xor_sync(kWholeWarp, sum, step));
  }
  return sum;
}

// The largest one among each `kGroup` neighbouring lanes; a NaN loses against a number.
template <int kGroup>
__device__ __forceinline__ float max_over_lanes(float largest) {
#pragma unroll
  for (int step = kGroup / 2; step > 0; step /= 2) {
    largest = max_f32(largest, __shfl_xor_sync(kWholeWarp, largest, step));
  }
  return largest;
}

// A pointer that lane `lane` has.
template <class T>
__device__ __forceinline__ T* shuffle_pointer(T* pointer, i32 lane) {
  return reinterpret_cast<T*>(__shfl_sync(kWholeWarp, reinterpret_cast<u64>(pointer), lane));
}

}  // namespace cupy_mla
