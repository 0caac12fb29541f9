// The one argument of the indexer kernel. cupy_mla/_cuda/params_fused.py holds the same structure
// as a NumPy dtype; offsets and sizes are compared at compile time.

#pragma once

#include "index_rows.cuh"
#include "types.cuh"

namespace cupy_mla {

struct IndexerParams {
  // Addresses that differ from call to call.
  const u8* k;
  const u8* slots;
  u8* codes;  // first byte of each plane of block 0
  u8* scales;

  i64 k_stride;      // bytes a token
  i64 reserved[3];   // what follows is aligned to 16 bytes
  IndexCache cache;  // without addresses
  i32 tokens;
  i32 slot_bytes;
  i32 block_tokens;  // consecutive tokens of a thread block, at most 32 a warp
  i32 ue8m0;         // 1: scales are powers of two
};

}  // namespace cupy_mla
