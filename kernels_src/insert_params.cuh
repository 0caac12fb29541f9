// The one argument of the insert kernel. cupy_mla/_cuda/params.py holds the same structure as a
// NumPy dtype; offsets and sizes are compared at compile time.

#pragma once

#include "paging.cuh"
#include "stats.cuh"
#include "types.cuh"

namespace cupy_mla {

// Layers a launch can take where each has a slot array of its own.
constexpr int kSlotListLayers = 16;

// Rows of a token a layer; strides are in bytes, and 0 where one serves all.
struct StridedRows {
  const u8* data;
  i64 layer_stride;
  i64 token_stride;
};

struct InsertParams {
  StridedRows kv_c;
  StridedRows k_pe;   // data is null where rope_dim is 0
  StridedRows slots;  // unless use_slot_list

  const LayerEntry* layers;  // device table, used from `first_layer` on; null: `layer` serves all
  u8* const* cache_ptrs;     // where not null: the layers' caches, in place of LayerEntry::cache
  const float* scales;       // where not null: the layers' scales, in place of LayerEntry's
  u64* counters;             // [layers][kCounters], or null
  ErrorRecord* errors;       // [kErrorKinds], null with `counters`

  i32 tokens;
  i32 slot_bytes;  // 4 or 8
  i32 lora_rank;   // elements of a row of kv_c
  i32 rope_dim;    // elements of a row of k_pe
  i32 first_layer;
  i32 layers_are_mapped;  // 1: inputs are LayerEntry::source_layer's; 0: that is first_layer + n,
                          // which need not be waited for
  Divisor blocks_per_layer;  // thread blocks, each of `block_tokens` consecutive tokens
  i32 block_tokens;          // at most as many as the block has threads
  i32 use_slot_list;
  i32 collect_stats;
  i32 stream_stores;  // 1: what is written exceeds the L2 cache
  i32 reserved[3];    // no holes: what follows is aligned to 16 bytes

  LayerEntry layer;
  SlotArray slot_list[kSlotListLayers];  // by layer of this launch
};

}  // namespace cupy_mla
