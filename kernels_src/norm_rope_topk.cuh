// The part of norm_rope that fills rows of top-k indices.

#pragma once

#include "lanes.cuh"
#include "memory.cuh"
#include "norm_rope_params.cuh"
#include "norm_rope_token.cuh"
#include "types.cuh"

namespace cupy_mla {

// Sets all bits of consecutive 4-byte words.
__device__ __forceinline__ void fill_with_ones(u8* start, i32 bytes, i32 lane, bool streaming) {
  constexpr u32 kOnes = 0xFFFFFFFFu;
  const i32 head = min(bytes, static_cast<i32>(-address_of(start) % kVectorBytes));
  const i32 vectors = (bytes - head) / static_cast<i32>(kVectorBytes);
  u8* tail = start + head + vectors * i64{kVectorBytes};
  const i32 tail_words = (bytes - head) % static_cast<i32>(kVectorBytes) / 4;
  for (i32 i = lane; i < vectors; i += kLanes) {
    store_vector(start + head + i * i64{kVectorBytes}, {kOnes, kOnes, kOnes, kOnes}, streaming);
  }
  if (lane < head / 4) reinterpret_cast<u32*>(start)[lane] = kOnes;
  if (lane < tail_words) reinterpret_cast<u32*>(tail)[lane] = kOnes;
}

// Fills the token's row of top-k indices with -1.
__device__ __forceinline__ void fill_indices(const NormRopeParams& p, const WarpToken& token) {
  if (!token.exists) return;
  fill_with_ones(p.topk + token.index * p.topk_stride, p.topk_bytes, token.lane,
                 p.stream_stores != 0);
}

}  // namespace cupy_mla
