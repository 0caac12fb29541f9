// Heads of queries whose rows are short: a warp takes four at a time, so that a lane's share is a
// vector and little is done for all lanes alike.

#pragma once

#include "lanes.cuh"
#include "memory.cuh"
#include "numbers.cuh"
#include "query_params.cuh"
#include "rope.cuh"
#include "types.cuh"

namespace cupy_mla {

// Heads that a warp takes at a time, and the lanes that share one.
constexpr i32 kGroups = 4;
constexpr i32 kGroupLanes = kLanes / kGroups;

__device__ __forceinline__ bool are_vectors(const u8* array, const HeadStrides& strides) {
  return is_vector_aligned(address_of(array) | strides.token | strides.head);
}

// Cosines and sines of neighbouring pairs; zeros where there are no angles.
template <int kPairs>
struct GroupAngles {
  float cos[kPairs];
  float sin[kPairs];

  __device__ __forceinline__ GroupAngles(const RopeTable& table, const u8* angles, i32 first)
      : cos(), sin() {
    if (angles == nullptr) return;
    const u32 bytes = number_bytes(table.type);
    load_numbers(angles + first * bytes, table.type, cos);
    load_numbers(angles + (first + table.half) * bytes, table.type, sin);
  }
};

}  // namespace cupy_mla
