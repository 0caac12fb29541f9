// What the lanes of a whole warp do together.

#pragma once

#include "exact_math.cuh"
#include "memory.cuh"
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

// The largest one of the warp, of numbers >= 0: their order is that of their bits.
__device__ __forceinline__ float max_of_warp(float largest) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return float_of(__reduce_max_sync(kWholeWarp, bits_of(largest)));
#else
  return max_over_lanes<kLanes>(largest);
#endif
}

// What the neighbour in a pair of lanes has.
__device__ __forceinline__ uint4 swap_in_pair(const uint4& vector) {
  return {__shfl_xor_sync(kWholeWarp, vector.x, 1), __shfl_xor_sync(kWholeWarp, vector.y, 1),
          __shfl_xor_sync(kWholeWarp, vector.z, 1), __shfl_xor_sync(kWholeWarp, vector.w, 1)};
}

// Part by part: a choice between objects would be one between addresses, and take local memory.
__device__ __forceinline__ uint4 choose(bool first, const uint4& a, const uint4& b) {
  return {first ? a.x : b.x, first ? a.y : b.y, first ? a.z : b.z, first ? a.w : b.w};
}

// Stores the consecutive vectors of all lanes, each lane's behind those of the one before it; `run`
// is where the lane's own begin. A lane that stored its own would fill half a 32-byte sector at a
// time: so both lanes of a pair store neighbouring vectors of one, then of the other.
template <int kVectors>
__device__ __forceinline__ void store_by_pairs(u8* run, const uint4 (&vectors)[kVectors], i32 lane,
                                               bool streaming) {
  static_assert(kVectors % 2 == 0, "whole sectors");
  constexpr i64 kRunBytes = kVectors * kVectorBytes;
  const bool is_even = lane % 2 == 0;
  u8* first = is_even ? run : run - kRunBytes + kVectorBytes;
#pragma unroll
  for (int i = 0; i < kVectors; i += 2) {
    const uint4 other = swap_in_pair(choose(is_even, vectors[i + 1], vectors[i]));
    store_vector(first + i * kVectorBytes, choose(is_even, vectors[i], other), streaming);
    store_vector(first + kRunBytes + i * kVectorBytes, choose(is_even, other, vectors[i + 1]),
                 streaming);
  }
}

// What a warp works on one after the other: items first, first + step, ... below `end`, kAhead of
// them on their way from memory while one is worked on.
template <class Fragment, int kAhead>
struct WorkAhead {
  i32 first;
  i32 end;
  i32 step;
  Fragment fragments[kAhead];

  __device__ __forceinline__ WorkAhead(i32 first, i32 end, i32 step)
      : first(first), end(end), step(step) {}

  // Calls load(i, fragment) for the first items.
  template <class Load>
  __device__ __forceinline__ void start(Load load) {
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (first + k * step < end) load(first + k * step, fragments[k]);
    }
  }

  // Calls store(i, fragment) for all items, and load() for those behind the first ones.
  template <class Load, class Store>
  __device__ __forceinline__ void run(Load load, Store store) {
    for (; first < end; first += kAhead * step) {
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        const i32 i = first + k * step;
        if (i >= end) break;
        store(i, fragments[k]);
        if (i + kAhead * step < end) load(i + kAhead * step, fragments[k]);
      }
    }
  }
};

// A pointer that lane `lane` has.
template <class T>
__device__ __forceinline__ T* shuffle_pointer(T* pointer, i32 lane) {
  return reinterpret_cast<T*>(__shfl_sync(kWholeWarp, reinterpret_cast<u64>(pointer), lane));
}

}  // namespace cupy_mla
