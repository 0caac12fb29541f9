// Keys of the sparse indexer: 128 codes and one scale a row, a warp a row.

#pragma once

#include "claim.cuh"
#include "exact_math.cuh"
#include "fp8.cuh"
#include "lanes.cuh"
#include "paging.cuh"
#include "quotients.cuh"
#include "types.cuh"

namespace cupy_mla {

constexpr int kIndexRun = 4;  // consecutive elements that a lane has
constexpr i32 kIndexWidth = kLanes * kIndexRun;

// An indexer cache: its codes and its scales lie in planes of their own in each block, which are
// entries of one geometry.
struct IndexCache {
  LayerEntry codes;
  LayerEntry scales;
};

// Where a row goes; both null where it goes nowhere.
struct IndexPlace {
  u8* codes;
  u8* scale;
};

__device__ __forceinline__ IndexPlace claim_index_row(const IndexCache& cache, const Ledger& ledger,
                                                      i32 place, i32 token, i64 slot,
                                                      bool has_position) {
  if (!claim(cache.codes, ledger, place, token, slot, has_position)) return {nullptr, nullptr};
  const RowPlace row = find_row(cache.codes.block_size, slot);
  return {row_address(cache.codes, row), row_address(cache.scales, row)};
}

// max(amax, 1e-4) / 448.
__device__ __forceinline__ float index_scale(float amax) {
  constexpr float kLeastAmax = 1e-4f;
  constexpr float kLeast = 0x1p-126f;  // which the former keeps it from
  return amax_scale(max_f32(amax, kLeastAmax), kLeast);
}

// The smallest power of two that is not below that.
__device__ __forceinline__ float index_power_of_two(float amax) {
  constexpr float kLeast = 0x1p-22f;  // for 1e-4 and less
  return amax_power_of_two(amax, kLeast);
}

// Stores a row of which each lane has a run.
__device__ __forceinline__ void store_index_row(const float (&values)[kIndexRun],
                                                const IndexPlace& place, bool ue8m0, i32 lane) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < kIndexRun; ++i) amax = max_f32(amax, abs_f32(values[i]));
  amax = max_of_warp(amax);
  const float scale = ue8m0 ? index_power_of_two(amax) : index_scale(amax);
  u32 codes[1];
  if (ue8m0) {
    encode_quotients<E4m3>(PowerOfTwoScale(scale), values, codes);
  } else {
    encode_quotients<E4m3>(QuotientScale(scale), values, codes);
  }
  u8* destination = place.codes + lane * kIndexRun;
  if (address_of(place.codes) % 4 == 0) {
    *reinterpret_cast<u32*>(destination) = codes[0];
  } else {
    store_unaligned<4>(destination, codes[0]);
  }
  if (lane == 0) store_unaligned<4>(place.scale, bits_of(scale));
}

}  // namespace cupy_mla
