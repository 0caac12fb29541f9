// The one argument of the kernels that read rows: gather, copy and convert.
// cupy_mla/_cuda/params.py holds the same structures as NumPy dtypes; offsets and sizes are
// compared at compile time.

#pragma once

#include "paging.cuh"
#include "types.cuh"

namespace cupy_mla {

// Numbers of 4 or 8 bytes, any step apart.
struct IndexArray {
  const u8* data;
  i64 stride;  // bytes from one to the next
  i64 bytes;   // of one
};

enum RowKind : i32 {
  kEverySlot,    // row n is slot n
  kListedSlots,  // row n is slot slots[n]
  kBlockTable,   // row n is one of a request's, whose blocks a table names
};

// Which slot each row of an operation is. See BlockTablePlan of cupy_mla/_plan.py for tables.
struct RowIndex {
  IndexArray slots;
  IndexArray blocks;   // of the first request, by column
  IndexArray first;    // by request: its first row; one entry more unless open_ended
  IndexArray start;    // by request: its position there; data is null where all are 0
  IndexArray owner;    // by row: its request; data is null where that is searched for
  i64 request_stride;  // bytes from a request's blocks to the next one's
  i64 positions;       // that the table has columns for
  i64 num_blocks;      // of the cache
  i32 kind;
  i32 num_seqs;
  i32 open_ended;  // 1: the last request goes on to the last row
  i32 reserved;
};

// What an element of the latent part is, where a kernel is not built for one layout.
enum ElementKind : i32 { kBfloat16, kFloat16, kFloat32, kE4m3, kE5m2 };

struct ReadParams {
  // Whole rows, or the latent part, of the cache that is read; then the scales of those rows, or
  // the rows' second piece where a block keeps two.
  LayerEntry source[2];
  // Where they go, likewise. An array is a cache of one block.
  LayerEntry destination[2];
  RowIndex rows;
  i32 row_count;
  i32 block_rows;     // consecutive rows that a thread block takes, at most one a thread
  i32 width;          // elements of a row; to copy: bytes of its first piece
  i32 second_bytes;   // to copy: bytes of its second piece
  i32 to_slots;       // 1: a row goes to the slot it comes from; 0: row n is row n of an array
  i32 zero_missing;   // 1: rows that name no row of the cache become zeros; 0: they stay
  i32 zero_unowned;   // 1: rows of no request become zeros; 0: they stay
  i32 stream_stores;  // 1: what is written exceeds the L2 cache
  i32 element;        // to convert: ElementKind of the source's latent part
  i32 tile_shift;     // to convert: log2 of the elements a scale, or 0 for the layer's scale
  i32 rope_first;     // to convert: the source's first element of bf16 behind fp8, else width
  i32 rope_offset;    // to convert: where that lies in a row
};

}  // namespace cupy_mla
