// Which rows of a paged cache a launch may write, and the count of those it may not.

#pragma once

#include "paging.cuh"
#include "stats.cuh"
#include "types.cuh"

namespace cupy_mla {

// Where a layer's losses are written down; both null where nobody asks.
struct Ledger {
  u64* counters;
  ErrorRecord* errors;  // [kErrorKinds]
};

// Whether the row of a slot is stored: no padding, no slot beyond the cache, no position beyond the
// table. A row counts as one of these, the first that holds.
__device__ __forceinline__ bool claim(const LayerEntry& entry, const Ledger& ledger, i32 layer,
                                      i32 token, i64 slot, bool has_position) {
  if (slot < 0) return false;
  const bool beyond = slot >= entry.num_slots;
  if (beyond || !has_position) {
    if (ledger.counters != nullptr) {
      const int counter = beyond ? kSlotsOutOfRange : kPositionsOutOfRange;
      atomicAdd(&ledger.counters[counter], u64{1});
      record_first(&ledger.errors[beyond ? kErrorSlot : kErrorPosition], layer, token, slot);
    }
    return false;
  }
  return true;
}

// Where the row goes; null where it goes nowhere.
__device__ __forceinline__ u8* claim_row(const LayerEntry& entry, const Ledger& ledger, i32 layer,
                                         i32 token, i64 slot, bool has_position) {
  const bool is_stored = claim(entry, ledger, layer, token, slot, has_position);
  return is_stored ? row_address(entry, slot) : nullptr;
}

__device__ __forceinline__ float scale_of(const LayerEntry& entry) {
  return entry.scale != nullptr ? *entry.scale : entry.scale_value;
}

}  // namespace cupy_mla
