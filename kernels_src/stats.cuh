// What a writer counts and remembers about its rows.

#pragma once

#include "memory.cuh"
#include "types.cuh"

namespace cupy_mla {

// Columns of a layer's counters.
enum Counter {
  kSlotsOutOfRange,
  kPositionsOutOfRange,
  kRowsWritten,
  kSlotsPadding,
  kNonfiniteElements,
  kSaturatedElements,
  kCounters,
};

// The first event of a kind. Whoever sets `claimed` writes the rest; the host reads it after it has
// synchronised, and sets it to 0 again.
struct ErrorRecord {
  u32 claimed;
  i32 layer;
  i64 token;
  i64 slot;
};

enum ErrorKind { kErrorSlot, kErrorPosition, kErrorNonfinite, kErrorKinds };

__device__ __forceinline__ void record_first(ErrorRecord* record, i32 layer, i64 token, i64 slot) {
  // Looked at before it is claimed: a batch full of NaN would queue up for one atomic.
  if (*const_cast<volatile u32*>(&record->claimed) != 0) return;
  if (atomicCAS(&record->claimed, 0u, 1u) != 0) return;
  record->layer = layer;
  record->token = token;
  record->slot = slot;
}

// What a thread counts for a layer while it works.
struct Tally {
  u32 rows;
  u32 padding;
  u32 nonfinite;
  u32 saturated;
};

// Adds the threads' tallies to the layer's counters with one atomic a counter and block. All
// threads of the block have to come here.
__device__ inline void add_to_counters(const Tally& tally, u64* counters) {
  struct Sums {
    u32 values[4];
  };
  Sums& sums = block_shared<Sums>();
  const u32 thread = threadIdx.y * blockDim.x + threadIdx.x;
  if (thread == 0) {
    for (u32& value : sums.values) value = 0;
  }
  __syncthreads();
  if (tally.rows) atomicAdd(&sums.values[0], tally.rows);
  if (tally.padding) atomicAdd(&sums.values[1], tally.padding);
  if (tally.nonfinite) atomicAdd(&sums.values[2], tally.nonfinite);
  if (tally.saturated) atomicAdd(&sums.values[3], tally.saturated);
  __syncthreads();
  if (thread == 0) {
    for (int i = 0; i < 4; ++i) {
      if (sums.values[i]) atomicAdd(&counters[kRowsWritten + i], static_cast<u64>(sums.values[i]));
    }
  }
}

}  // namespace cupy_mla
