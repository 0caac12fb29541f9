// The one argument of the norm_rope kernel. cupy_mla/_cuda/params_fused.py holds the same structure
// as a NumPy dtype; offsets and sizes are compared at compile time.

#pragma once

#include "index_rows.cuh"
#include "keys.cuh"
#include "paging.cuh"
#include "stats.cuh"
#include "types.cuh"

namespace cupy_mla {

// What the thread blocks of a launch do; those for the same tokens follow one another.
enum NormRopePart : i32 { kQueryPart, kKeyPart, kIndexPart, kTopkPart };

// Places of counters and error records.
enum NormRopeCache : i32 { kMlaCache, kIndexCache, kNormRopeCaches };

struct NormRopeParams {
  // Addresses that differ from call to call; null where there is none.
  const u8* positions;
  const u8* q_c;
  const u8* kv_c;
  const u8* k_pe;
  const u8* index_k;
  u8* topk;
  const u8* slots;
  const u8* index_slots;
  u8* q_c_out;
  u8* kv_c_out;
  u8* k_pe_out;
  const u8* q_weight;
  const u8* kv_weight;
  const u8* k_table;
  const u8* index_weight;
  const u8* index_bias;
  const u8* index_table;
  u8* mla_cache;
  const float* mla_scale;  // null: that of `mla`
  u8* index_codes;         // first byte of each plane of block 0
  u8* index_scales;

  u64* counters;        // [kNormRopeCaches][kCounters], or null
  ErrorRecord* errors;  // [kNormRopeCaches][kErrorKinds], null with `counters`

  // Scalars by who reads them: each line of the constant cache that a block touches costs it time.
  i32 tokens;
  i32 position_bytes;
  Divisor parts;      // thread blocks that share tokens
  i32 stream_stores;  // 1: what is written exceeds the L2 cache
  u64 part_kinds;     // NormRopePart of each of these, a byte each, the first one lowest

  i32 q_width;
  i32 q_weight_type;  // NumberType, as the other two
  float q_eps;
  i32 topk_bytes;        // of a row
  i32 slot_bytes;        // of the MLA cache's
  i32 index_slot_bytes;  // of the indexer cache's
  i64 q_c_stride;        // bytes a token, as the others
  i64 q_c_out_stride;
  i64 topk_stride;

  i64 kv_c_stride;
  i64 k_pe_stride;
  i64 kv_c_out_stride;
  i64 k_pe_out_stride;
  KeyNorm key;
  LayerEntry mla;  // without its address, as the other two

  i64 index_k_stride;
  i32 index_weight_type;
  i32 index_bias_type;
  float index_eps;
  i32 reserved[3];  // no holes: entries lie at multiples of 16 bytes
  RopeTable index_rope;
  IndexCache index;
};

}  // namespace cupy_mla
