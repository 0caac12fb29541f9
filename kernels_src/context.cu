// context: RMSNorm, RoPE and insert of all layers, straight from one projection.
//
// A warp takes a row, one after the other of those that are its own; a block has consecutive
// tokens of one layer, and the blocks of a layer follow one another in the grid. Lane k of a warp
// looks up slot and position of the warp's k-th row for all lanes. While a row is worked on, the
// next one is on its way.

#include "claim.cuh"
#include "context_params.cuh"
#include "key_rows.cuh"
#include "lanes.cuh"
#include "memory.cuh"
#include "norm.cuh"
#include "paging.cuh"
#include "stats.cuh"
#include "types.cuh"

namespace cupy_mla {

// Counts what is stored.
template <class Format>
struct ContextObserver {
  const Format& format;
  Tally& tally;
  bool collect_stats;

  template <int kCount>
  __device__ __forceinline__ void run(const float (&values)[kCount]) const {
    if (!collect_stats) return;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      // Not by the mask of is_nonfinite(): the compiler would make a flushing comparison of that.
      tally.nonfinite += bits_of(abs_f32(values[i])) >= kInfinityBits;
      tally.saturated += format.is_saturated(values[i]);
    }
  }

  __device__ __forceinline__ void element(i32, float value) const { run({value}); }

  __device__ __forceinline__ void pair(const PairPlaces&, float a, float b) const { run({a, b}); }
};

template <class Format>
__device__ __forceinline__ void context(const ContextParams& p) {
  using Input = typename Format::Input;
  const i32 launch_layer = static_cast<i32>(divide(blockIdx.x, p.blocks_per_layer));
  const i32 block = static_cast<i32>(blockIdx.x - launch_layer * p.blocks_per_layer.value);
  const LayerEntry* entry_address = p.layers + p.first_layer + launch_layer;
  const i32 layer =
      p.layers_are_mapped ? entry_address->source_layer : p.first_layer + launch_layer;
  const SlotArray slots =
      p.use_slot_list ? p.slot_list[launch_layer]
                      : SlotArray{p.slots + layer * p.slot_layer_stride, p.slot_token_stride};
  if (slots.data == nullptr) return;  // all threads of the block

  const i32 lane = static_cast<i32>(threadIdx.x);
  const i32 warps = static_cast<i32>(blockDim.y);
  const i32 thread = static_cast<i32>(threadIdx.y) * kLanes + lane;
  const i32 first_token = block * p.block_tokens + static_cast<i32>(threadIdx.y);
  const i32 end_token = min((block + 1) * p.block_tokens, p.tokens);

  // Everything is asked for before anything is looked at: positions, slots, weights, the layer's
  // entry and the first row take equally long to come. Angles alone have to wait for a position.
  const i32 own_token = first_token + lane * warps;
  const bool has_token = own_token < end_token;
  const LoadedIndex position = load_index({p.positions, p.position_bytes}, own_token,
                                          p.position_bytes, has_token && p.positions != nullptr);
  const LoadedIndex loaded_slot = load_index(slots, own_token, p.slot_bytes, has_token);
  const LayerEntry entry = load_entry(entry_address);
  SharedWeights& weights = block_shared<SharedWeights>();
  const bool is_wide = p.norm.lora_rank == kWideRow;
  QuadBits quad{};
  if (is_wide) {
    quad = SharedWeights::load(p.weight + layer * p.norm.weight_stride, p.norm.weight_type, thread);
  }
  const u8* latent = p.kv + layer * p.kv_layer_stride + first_token * p.kv_token_stride;
  const i64 rope_offset = p.norm.lora_rank * i64{sizeof(typename Input::Bits)};
  KeyRows<Format> rows = {p.norm,
                          weights,
                          p.weight + layer * p.norm.weight_stride,
                          lane,
                          is_wide && is_vector_aligned(address_of(latent) | p.kv_token_stride),
                          false,
                          Format()};
  KeyFragment<Input> fragment;
  if (first_token < end_token) rows.load(latent, latent + rope_offset, fragment);

  const u8* own_angles = nullptr;
  if (p.norm.rope.half != 0) {
    own_angles = find_angles(p.norm.rope, p.table, position.value(p.position_bytes));
  }
  Tally tally = {0, 0, 0, 0};
  u8* destination = nullptr;
  bool is_padding = false;
  if (has_token) {
    const Ledger ledger = {p.counters + layer * kCounters, p.errors};
    const i64 slot = loaded_slot.value(p.slot_bytes);
    is_padding = slot < 0;
    const bool has_position = p.norm.rope.half == 0 || own_angles != nullptr;
    destination = claim_row(entry, ledger, layer, own_token, slot, has_position);
  }
  rows.to_vectors =
      is_vector_aligned(address_of(entry.cache) | entry.block_stride | entry.row_stride);
  rows.format = Format(Format::kLayerScale ? scale_of(entry) : 0.0f, entry.scale_ue8m0 != 0,
                       p.stream_stores != 0);
  if (is_wide) weights.put(quad, p.norm.weight_type, thread);
  // Last, since nothing but the rotation needs them: what comes before would wait for them as well.
  rows.load_angles(shuffle_pointer(own_angles, 0), fragment);
  __syncthreads();

  const i32 warp_tokens = end_token - first_token;  // from the first one on
  for (i32 k = 0; k * warps < warp_tokens; ++k) {
    // The next row is on its way while this one is worked on.
    KeyFragment<Input> next;
    const u8* next_latent = latent + warps * p.kv_token_stride;
    if ((k + 1) * warps < warp_tokens) {
      rows.load(next_latent, next_latent + rope_offset, next);
      rows.load_angles(shuffle_pointer(own_angles, k + 1), next);
    }
    u8* to = shuffle_pointer(destination, k);
    const u32 before = tally.nonfinite;
    const ContextObserver<Format> observer = {rows.format, tally, p.collect_stats != 0};
    if (to != nullptr) {
      rows.store_latent(latent, fragment, to, observer);
      rows.store_rope(latent + rope_offset, shuffle_pointer(own_angles, k), fragment, to, observer);
    }
    if (p.collect_stats) {
      if (tally.nonfinite != before) {
        const i32 token = first_token + k * warps;
        const i64 slot = load_index(slots, token, p.slot_bytes).value(p.slot_bytes);
        record_first(&p.errors[kErrorNonfinite], layer, token, slot);
      }
    }
    fragment = next;
    latent = next_latent;
  }
  if (p.collect_stats) {
    tally.rows = destination != nullptr;
    tally.padding = is_padding;
    add_to_counters(tally, &p.counters[layer * kCounters]);
  }
}

}  // namespace cupy_mla
