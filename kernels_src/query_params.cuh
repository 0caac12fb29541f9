// The one argument of the query kernel. cupy_mla/_cuda/params_fused.py holds the same structure as
// a NumPy dtype; offsets and sizes are compared at compile time.

#pragma once

#include "paging.cuh"
#include "rope.cuh"
#include "types.cuh"

namespace cupy_mla {

// How heads of tokens lie in memory.
struct HeadStrides {
  i64 token;  // bytes
  i64 head;
};

struct QueryParams {
  // Addresses that differ from call to call; null where there is none.
  const u8* positions;
  const u8* q_pe;
  const u8* q_table;
  const u8* ql_nope;     // null: mqa is not quantised, and holds the rotary part alone
  const float* q_scale;  // null: `scale_value`
  const u8* index_q;
  const u8* index_table;
  const u8* index_weights;
  u8* mqa_out;
  u8* index_out;
  u8* weights_out;

  HeadStrides q_pe_strides;
  HeadStrides ql_nope_strides;
  HeadStrides index_q_strides;
  HeadStrides mqa_strides;
  HeadStrides index_strides;
  i64 weights_stride;  // bytes a token
  i64 weights_out_stride;

  RopeTable rope;
  RopeTable index_rope;
  i32 position_bytes;
  i32 heads;
  i32 lora_rank;
  i32 index_heads;
  i32 index_width;
  i32 weights_type;  // NumberType
  float scale_value;
  float softmax_scale;
  float head_scale;
  Divisor token_blocks;  // thread blocks of a token: for its heads, then for its indexer's
  i32 mqa_blocks;        // how many of them are for its heads
  i32 mqa_block_heads;   // heads of a thread block
  i32 index_block_heads;
  i32 stream_stores;  // 1: what is written exceeds the L2 cache
};

}  // namespace cupy_mla
