// The one argument of the context kernel. cupy_mla/_cuda/params.py holds the same structure as a
// NumPy dtype; offsets and sizes are compared at compile time.

#pragma once

#include "insert_params.cuh"
#include "keys.cuh"
#include "paging.cuh"
#include "stats.cuh"
#include "types.cuh"

namespace cupy_mla {

struct ContextParams {
  // Addresses that differ from call to call.
  const u8* kv;         // each layer's latent part, its rotary part behind it
  const u8* positions;  // null where rope_dim is 0
  const u8* slots;      // unless use_slot_list
  const u8* weight;     // of layer 0
  const u8* table;      // null where rope_dim is 0

  i64 kv_layer_stride;  // strides are in bytes
  i64 kv_token_stride;
  i64 slot_layer_stride;  // 0 where one serves all
  i64 slot_token_stride;
  const LayerEntry* layers;  // device table, used from `first_layer` on
  u64* counters;             // [layers][kCounters]
  ErrorRecord* errors;       // [kErrorKinds]

  KeyNorm norm;
  i32 tokens;
  i32 slot_bytes;  // 4 or 8
  i32 position_bytes;
  i32 first_layer;
  i32 layers_are_mapped;     // as in InsertParams
  Divisor blocks_per_layer;  // thread blocks, each of `block_tokens` consecutive tokens
  i32 block_tokens;          // at most 32 a warp
  i32 use_slot_list;
  i32 collect_stats;
  i32 stream_stores;  // 1: what is written exceeds the L2 cache

  SlotArray slot_list[kSlotListLayers];  // by layer of this launch
};

}  // namespace cupy_mla
