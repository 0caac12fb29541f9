// insert: stores each token's row in the caches of any number of layers.
//
// A block takes p.block_tokens consecutive tokens of one layer; the blocks of a layer follow one
// another in the grid. blockDim.x threads share a row, each with its own unit of it, and blockDim.y
// rows are stored at a time. Row formats (copy_rows.cuh, flat_fp8_rows.cuh, ds_mla_rows.cuh) say
// what a unit is.
//
// The kernel lives by the bytes it moves, and a row of fp8 leaves few instructions for anything but
// its encoding. So a slot is looked up by one thread for all that share its row, and each thread
// stores several rows.
//
// Which accesses are wide enough is decided here from pointers and strides, a layer at a time, not
// on the host: a captured graph goes on working when the table of layers gets other caches.

#include "insert_params.cuh"
#include "memory.cuh"
#include "paging.cuh"
#include "rows.cuh"
#include "stats.cuh"
#include "types.cuh"

namespace cupy_mla {

// Found from the arguments alone: rows are on their way before the table of layers has come.
__device__ __forceinline__ i32 find_layer(const InsertParams& p, i32 launch_layer) {
  const i32 layer = p.first_layer + launch_layer;
  return p.layers_are_mapped ? p.layers[layer].source_layer : layer;
}

__device__ __forceinline__ LayerRows find_rows(const InsertParams& p, i32 layer) {
  return {p.kv_c.data + layer * p.kv_c.layer_stride,
          p.k_pe.data + layer * p.k_pe.layer_stride,
          p.kv_c.token_stride,
          p.k_pe.token_stride,
          p.lora_rank,
          p.rope_dim};
}

__device__ __forceinline__ SlotArray find_slots(const InsertParams& p, i32 launch_layer,
                                                i32 layer) {
  if (p.use_slot_list) return p.slot_list[launch_layer];
  return {p.slots.data + layer * p.slots.layer_stride, p.slots.token_stride};
}

__device__ __forceinline__ LayerEntry find_cache(const InsertParams& p, i32 launch_layer) {
  return load_entry(p.layers != nullptr ? p.layers + p.first_layer + launch_layer : &p.layer);
}

__device__ __forceinline__ float find_scale(const InsertParams& p, const LayerEntry& entry,
                                            i32 layer) {
  if (p.scales != nullptr) return p.scales[layer];
  return entry.scale != nullptr ? *entry.scale : entry.scale_value;
}

template <class Format>
__device__ __forceinline__ bool reads_vectors(const LayerRows& rows) {
  return Format::has_whole_units(rows.lora_rank, rows.rope_dim) &&
         is_vector_aligned(address_of(rows.latent) | rows.latent_stride | address_of(rows.rope) |
                           rows.rope_stride);
}

__device__ __forceinline__ bool writes_vectors(const LayerEntry& entry) {
  return is_vector_aligned(address_of(entry.cache) | entry.block_stride | entry.row_stride);
}

// Where the row of a slot goes; null where it goes nowhere.
__device__ __forceinline__ u8* claim_row(const InsertParams& p, const LayerEntry& entry, i32 layer,
                                         i32 token, i64 slot, Tally& tally) {
  if (slot < 0) {
    ++tally.padding;
    return nullptr;
  }
  if (slot >= entry.num_slots) {
    if (p.counters != nullptr) {
      atomicAdd(&p.counters[layer * kCounters + kSlotsOutOfRange], u64{1});
      record_first(&p.errors[kErrorSlot], layer, token, slot);
    }
    return nullptr;
  }
  ++tally.rows;
  return row_address(entry, slot);
}

// What the block's first threads find out for all of them.
template <class Format>
struct InsertShared {
  u8* destinations[tuning::kMaxThreads];  // by token of the block
  Format format;
  bool by_vectors;
};

template <class Format>
__device__ __forceinline__ void insert(const InsertParams& p) {
  using Cursor = typename Format::Cursor;
  using Fragment = typename Format::Fragment;
  constexpr int kRows = tuning::kRowsInFlight;
  InsertShared<Format>& shared = block_shared<InsertShared<Format>>();

  const i32 launch_layer = static_cast<i32>(divide(blockIdx.x, p.blocks_per_layer));
  const i32 block = static_cast<i32>(blockIdx.x - launch_layer * p.blocks_per_layer.value);
  const i32 layer = find_layer(p, launch_layer);
  const SlotArray slots = find_slots(p, launch_layer, layer);
  if (slots.data == nullptr) return;  // all threads of the block
  const i32 first_token = block * p.block_tokens;
  const i32 end_token = min(first_token + p.block_tokens, p.tokens);

  // Everything is asked for before anything is looked at: slots, rows and the layer's cache take
  // equally long to come. Rows of padding are thus read for nothing; the inputs do have them.
  // The first threads look up slots, the last one prepares what all rows share: two warps, where
  // a block has as many.
  const u32 thread = threadIdx.y * blockDim.x + threadIdx.x;
  const i32 slot_token = first_token + static_cast<i32>(thread);
  const bool prepares = thread == blockDim.x * blockDim.y - 1;
  u8* listed_cache = nullptr;
  LayerEntry entry;
  if (slot_token < end_token || prepares) {
    entry = find_cache(p, launch_layer);
    if (p.cache_ptrs != nullptr) listed_cache = p.cache_ptrs[layer];
  }
  const LoadedIndex loaded_slot =
      load_index(slots, slot_token, p.slot_bytes, slot_token < end_token);
  const LayerRows rows = find_rows(p, layer);
  const u32 units = Format::units(rows.lora_rank, rows.rope_dim);
  const bool from_vectors = reads_vectors<Format>(rows);
  const Cursor cursor(rows, threadIdx.x);
  const i32 row_step = static_cast<i32>(blockDim.y);
  i32 token = first_token + static_cast<i32>(threadIdx.y);
  Fragment fragments[kRows];
  const bool has_unit = from_vectors && threadIdx.x < units;
#pragma unroll
  for (int k = 0; k < kRows; ++k) {
    if (has_unit && token + k * row_step < end_token) {
      fragments[k] = Format::load(cursor, token + k * row_step);
    }
  }

  if (p.cache_ptrs != nullptr) entry.cache = listed_cache;
  Tally tally = {0, 0, 0, 0};
  if (slot_token < end_token) {
    const i64 slot = loaded_slot.value(p.slot_bytes);
    shared.destinations[slot_token - first_token] =
        claim_row(p, entry, layer, slot_token, slot, tally);
  }
  if (prepares) {
    const Format format(Format::kLayerScale ? find_scale(p, entry, layer) : 0.0f,
                        entry.scale_ue8m0 != 0, p.stream_stores != 0);
    shared.format = format;
    shared.by_vectors = from_vectors && writes_vectors(entry) && format.takes_vectors();
  }
  __syncthreads();
  const Format format = shared.format;

  // What a row's threads found in it, if statistics are wanted.
  const auto note_nonfinite = [&](i32 row_token, u32 before) {
    if (!p.collect_stats || tally.nonfinite == before) return;
    const i64 slot = load_index(slots, row_token, p.slot_bytes).value(p.slot_bytes);
    record_first(&p.errors[kErrorNonfinite], layer, row_token, slot);
  };
  if (shared.by_vectors) {
    while (token < end_token) {
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        const i32 row_token = token + k * row_step;
        if (row_token >= end_token) break;
        u8* destination = shared.destinations[row_token - first_token];
        if (destination != nullptr) {
          const u32 before = tally.nonfinite;
          for (u32 unit = threadIdx.x; unit < units; unit += blockDim.x) {
            // Rows of more units than threads: the others one by one.
            if (unit != threadIdx.x) fragments[k] = Format::load(Cursor(rows, unit), row_token);
            format.store(fragments[k], destination, unit);
            if (p.collect_stats) format.count(fragments[k], tally);
          }
          note_nonfinite(row_token, before);
        }
        // The next one at once, while the others in flight are stored.
        const i32 next_token = row_token + kRows * row_step;
        if (has_unit && next_token < end_token) fragments[k] = Format::load(cursor, next_token);
      }
      token += kRows * row_step;
    }
  } else {
    for (; token < end_token; token += row_step) {
      u8* destination = shared.destinations[token - first_token];
      if (destination == nullptr) continue;
      const u32 before = tally.nonfinite;
      format.store_by_element(rows, token, destination, tally);
      note_nonfinite(token, before);
    }
  }
  if (p.collect_stats) add_to_counters(tally, &p.counters[layer * kCounters]);
}

}  // namespace cupy_mla
