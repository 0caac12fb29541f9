// The token of a warp, and what the parts of norm_rope ask for of it.

#pragma once

#include "claim.cuh"
#include "lanes.cuh"
#include "norm_rope_params.cuh"
#include "paging.cuh"
#include "rope.cuh"
#include "types.cuh"

namespace cupy_mla {

// A warp behind the last token has none, but still brings its share of what its block needs.
struct WarpToken {
  i32 lane;
  i32 index;
  bool exists;
};

__device__ __forceinline__ i32 thread_of(const WarpToken& token) {
  return static_cast<i32>(threadIdx.y) * kLanes + token.lane;
}

// All lanes know the row, one of them writes down what became of it.
__device__ __forceinline__ Ledger ledger_of(const WarpToken& token, const NormRopeParams& p,
                                            i32 cache) {
  if (p.counters == nullptr || token.lane != 0) return {nullptr, nullptr};
  return {p.counters + cache * kCounters, p.errors + cache * kErrorKinds};
}

// The token's slot or position, where there are any.
__device__ __forceinline__ LoadedIndex load_index_of(const WarpToken& token, const u8* indices,
                                                     i32 bytes) {
  return load_index({indices, bytes}, token.index, bytes, indices != nullptr && token.exists);
}

// Angles of the token; null without a table, a position in it, or a token.
__device__ __forceinline__ const u8* find_angles_of(const WarpToken& token, const NormRopeParams& p,
                                                    const RopeTable& table, const u8* data,
                                                    const LoadedIndex& position) {
  if (table.half == 0 || !token.exists) return nullptr;
  return find_angles(table, data, position.value(p.position_bytes));
}

}  // namespace cupy_mla
