// Where a slot's row lies in a paged cache.

#pragma once

#include "exact_math.cuh"
#include "types.cuh"

namespace cupy_mla {

// Division by a value that is known when the launch is prepared, for dividends below 2^31:
// quotient = (mulhi(n, multiplier) + n) >> shift, with shift = ceil(log2(divisor)) and
// multiplier = floor(2^32 * (2^shift - divisor) / divisor) + 1.
struct Divisor {
  u32 value;
  u32 multiplier;
  u32 shift;
};

__device__ __forceinline__ u32 divide(u32 dividend, const Divisor& divisor) {
  return (__umulhi(dividend, divisor.multiplier) + dividend) >> divisor.shift;
}

// One layer's cache. Writers keep a device table of these and change it in place, so that a
// captured graph follows; single calls pass one by value.
struct alignas(16) LayerEntry {
  u8* cache;           // first byte of block 0
  const float* scale;  // the layer's scale where it is read at each use, else null
  i64 block_stride;    // bytes from a block to the next
  i64 row_stride;      // bytes from a row of a block to the next
  i64 num_slots;       // rows of the cache; the largest int64 where nobody knows
  Divisor block_size;  // rows of a block
  i32 source_layer;    // which layer of kv_c, k_pe, slots, scales and counters this one takes
  float scale_value;   // the scale where neither a table of scales nor `scale` has it
  i32 scale_ue8m0;     // block-scaled layouts: 1 = scales are powers of two
};

// Reads an entry, which may lie in a kernel's arguments, at once.
__device__ __forceinline__ LayerEntry load_entry(const LayerEntry* source) {
  union Vectors {
    uint4 vectors[sizeof(LayerEntry) / sizeof(uint4)];
    LayerEntry entry;
    __device__ __forceinline__ Vectors() {}
  } loaded;
  static_assert(sizeof(LayerEntry) % sizeof(uint4) == 0, "an entry is whole vectors");
#pragma unroll
  for (u32 i = 0; i < sizeof(LayerEntry) / sizeof(uint4); ++i) {
    loaded.vectors[i] = load_now(reinterpret_cast<const uint4*>(source) + i);
  }
  return loaded.entry;
}

// A row of a cache.
struct RowPlace {
  i64 block;
  i64 row;  // of the block
};

__device__ __forceinline__ RowPlace find_row(const Divisor& block_size, i64 slot) {
  if (slot >> 31 == 0) {
    const u32 quotient = divide(static_cast<u32>(slot), block_size);
    return {quotient, static_cast<u32>(slot) - quotient * block_size.value};
  }
  // Beyond 2^31 rows; long division of the upper and the lower 31 bits would need no less code.
  return {slot / block_size.value, slot % block_size.value};
}

__device__ __forceinline__ u8* row_address(const LayerEntry& layer, const RowPlace& place) {
  return layer.cache + place.block * layer.block_stride + place.row * layer.row_stride;
}

__device__ __forceinline__ u8* row_address(const LayerEntry& layer, i64 slot) {
  return row_address(layer, find_row(layer.block_size, slot));
}

struct SlotArray {
  const u8* data;  // null: leave the layer out
  i64 token_stride;
};

// A slot or a position as it lies in memory, int32 or int64: what is made of it would wait for it,
// and what is asked for next would wait too.
struct LoadedIndex {
  u32 low = 0;
  u32 high = 0;

  __device__ __forceinline__ i64 value(i32 bytes) const {
    return bytes == 8 ? static_cast<i64>(u64{high} << 32 | low) : static_cast<i32>(low);
  }
};

// 0 where it is not wanted; then nothing is read.
__device__ __forceinline__ LoadedIndex load_index(const SlotArray& indices, i32 token, i32 bytes,
                                                  bool wanted = true) {
  LoadedIndex loaded;
  load_words_now(indices.data + token * indices.token_stride, wanted ? bytes : 0, loaded.low,
                 loaded.high);
  return loaded;
}

}  // namespace cupy_mla
