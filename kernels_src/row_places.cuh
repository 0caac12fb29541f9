// Where the rows of a thread block come from and go to, looked up by one thread a row for all that
// share it.

#pragma once

#include "memory.cuh"
#include "paging.cuh"
#include "read_params.cuh"
#include "types.cuh"

namespace cupy_mla {

// What names no slot.
constexpr i64 kNoRow = -1;    // a row that the cache does not have
constexpr i64 kUnowned = -2;  // a row of no request

__device__ __forceinline__ i64 load_index(const IndexArray& array, i64 n) {
  const u8* address = array.data + n * array.stride;
  return array.bytes == 8 ? *reinterpret_cast<const i64*>(address)
                          : *reinterpret_cast<const i32*>(address);
}

// The last request that begins at a row or before it, or -1.
__device__ __forceinline__ i64 find_request(const RowIndex& rows, i32 row) {
  i64 low = 0;
  i64 high = rows.num_seqs;
  while (low < high) {
    const i64 middle = (low + high) / 2;
    if (load_index(rows.first, middle) <= row) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low - 1;
}

__device__ __forceinline__ i64 find_in_table(const RowIndex& rows, i32 row,
                                             const Divisor& block_size) {
  const i64 request =
      rows.owner.data != nullptr ? load_index(rows.owner, row) : find_request(rows, row);
  if (request < 0 || request >= rows.num_seqs) return kUnowned;
  // Unsigned, so that numbers of any size wrap and are seen to be out of range.
  const u64 offset = static_cast<u64>(row) - static_cast<u64>(load_index(rows.first, request));
  if (static_cast<i64>(offset) < 0) return kUnowned;
  if (!rows.open_ended && row >= load_index(rows.first, request + 1)) return kUnowned;
  const u64 start =
      rows.start.data != nullptr ? static_cast<u64>(load_index(rows.start, request)) : 0;
  const u64 position = offset + start;  // what is below 0 is beyond all columns too
  if (position >= static_cast<u64>(rows.positions)) return kNoRow;
  const u64 column = position >> 31 == 0 ? divide(static_cast<u32>(position), block_size)
                                         : position / block_size.value;
  const IndexArray blocks = {rows.blocks.data + request * rows.request_stride, rows.blocks.stride,
                             rows.blocks.bytes};
  const i64 block = load_index(blocks, static_cast<i64>(column));
  if (block < 0 || block >= rows.num_blocks) return kNoRow;
  return block * block_size.value + static_cast<i64>(position - column * block_size.value);
}

template <bool kTables>
__device__ __forceinline__ i64 find_slot(const ReadParams& p, i32 row) {
  if constexpr (kTables) {
    if (p.rows.kind == kBlockTable) return find_in_table(p.rows, row, p.source[0].block_size);
  }
  if (p.rows.kind == kEverySlot) return row;
  const i64 slot = load_index(p.rows.slots, row);
  return slot >= 0 && slot < p.source[0].num_slots ? slot : kNoRow;
}

// By row of the thread block. Of a source, kSources planes are looked up, of a destination
// kDestinations.
template <int kSources, int kDestinations>
struct RowPlaces {
  const u8* sources[kSources][tuning::kMaxThreads];      // null: the row becomes zeros
  u8* destinations[kDestinations][tuning::kMaxThreads];  // null: the row stays
};

// Fills in the places of the block's rows and returns how many there are; kTables: whether a block
// table may name them. All threads of the block have to come here.
template <bool kTables, int kSources, int kDestinations>
__device__ __forceinline__ i32 find_places(const ReadParams& p,
                                           RowPlaces<kSources, kDestinations>& places) {
  const i32 first_row = static_cast<i32>(blockIdx.x) * p.block_rows;
  const i32 count = min(p.block_rows, p.row_count - first_row);
  const i32 thread = static_cast<i32>(threadIdx.y * blockDim.x + threadIdx.x);
  if (thread < count) {
    const i64 slot = find_slot<kTables>(p, first_row + thread);
    const bool found = slot >= 0;
    const bool goes = found || (slot == kUnowned ? p.zero_unowned : p.zero_missing) != 0;
    const i64 to = p.to_slots ? slot : first_row + thread;
#pragma unroll
    for (int i = 0; i < kSources; ++i) {
      places.sources[i][thread] = found ? row_address(p.source[i], slot) : nullptr;
    }
#pragma unroll
    for (int i = 0; i < kDestinations; ++i) {
      places.destinations[i][thread] = goes ? row_address(p.destination[i], to) : nullptr;
    }
  }
  __syncthreads();
  return count;
}

// The address bits of a cache's rows, or-ed together.
__device__ __forceinline__ u64 address_bits(const LayerEntry& entry) {
  return address_of(entry.cache) | static_cast<u64>(entry.block_stride) |
         static_cast<u64>(entry.row_stride);
}

__device__ __forceinline__ float scale_of(const LayerEntry& entry) {
  return entry.scale != nullptr ? *entry.scale : entry.scale_value;
}

}  // namespace cupy_mla
