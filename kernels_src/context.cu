// context: RMSNorm, RoPE and insert of all layers, straight from one projection.
//
// A warp takes a row, one after the other of those that are its own; a block has consecutive
// tokens of one layer, and the blocks of a layer follow one another in the grid. Lane k of a warp
// looks up slot and position of the warp's k-th row for all lanes. While a row is worked on, the
// next one is on its way.
//
// Latent parts of 512 elements at addresses of vector alignment, rows and caches, stay in
// registers; all others go by element, with the same sums.

#include "claim.cuh"
#include "context_params.cuh"
#include "keys.cuh"
#include "lanes.cuh"
#include "memory.cuh"
#include "norm.cuh"
#include "paging.cuh"
#include "stats.cuh"
#include "types.cuh"

namespace cupy_mla {

template <class Format>
struct ContextWarp {
  using Input = typename Format::Input;

  const ContextParams& p;
  const Format format;
  const i32 lane;

  // One lane's share of a row that goes to `row`.
  __device__ __forceinline__ void store(const KeyRow& source, const KeyFragment<Input>& fragment,
                                        const float (&weight)[kRun], u8* row, Tally& tally) const {
    float values[kRun];
    norm_run(p.norm, fragment, weight, values);
    format.store_run(values, row, lane);
    if (p.collect_stats) count(values, kRun, tally);
    store_rope(source, fragment.pair, row, tally);
  }

  // The same from and to any address, for any width.
  __device__ __forceinline__ void store_by_element(const KeyRow& source, const u8* weight, u8* row,
                                                   Tally& tally) const {
    const PairBits pair = load_first_pair<Input>(p.norm, source, lane);
    norm_by_element<Input>(p.norm, source.latent, weight, lane,
                           [&](i32 first, i32 count_of_run, const float (&values)[kRun]) {
                             format.store_run_by_element(values, first, count_of_run, row);
                             if (p.collect_stats) count(values, count_of_run, tally);
                           });
    store_rope(source, pair, row, tally);
  }

  __device__ __forceinline__ void store_rope(const KeyRow& source, const PairBits& pair, u8* row,
                                             Tally& tally) const {
    u8* rope = Format::rope_of(row, p.norm.lora_rank);
    rotate_key<Input>(p.norm, source, pair, lane, [&](const PairPlaces& places, float a, float b) {
      format.store_pair(a, b, places.first, places.second, rope);
      if (!p.collect_stats) return;
      // fp8_ds_mla does not scale this part, and then nothing saturates.
      const float values[2] = {a, b};
      count(values, 2, tally);
    });
  }

  template <int kCount>
  __device__ __forceinline__ void count(const float (&values)[kCount], i32 used,
                                        Tally& tally) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i >= used) continue;
      tally.nonfinite += is_nonfinite<Float32>(bits_of(values[i]));
      tally.saturated += format.is_saturated(values[i]);
    }
  }
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
  const i32 first_token = block * p.block_tokens + static_cast<i32>(threadIdx.y);
  const i32 end_token = min((block + 1) * p.block_tokens, p.tokens);

  // Everything is asked for before anything is looked at.
  const i32 own_token = first_token + lane * warps;
  const bool has_token = own_token < end_token;
  u64 loaded_slot = 0;
  u64 loaded_position = 0;
  if (has_token) {
    loaded_slot = load_slot(slots, own_token, p.slot_bytes);
    if (p.positions != nullptr) {
      loaded_position = load_slot({p.positions, p.position_bytes}, own_token, p.position_bytes);
    }
  }
  const u8* kv = p.kv + layer * p.kv_layer_stride;
  const u8* weight_row = p.weight + layer * p.norm.weight_stride;
  const bool from_vectors =
      p.norm.lora_rank == kWideRow && is_vector_aligned(address_of(kv) | p.kv_token_stride);
  float weight[kRun] = {};
  if (from_vectors && first_token < end_token) {
    load_numbers(weight_row + lane * kRun * number_bytes(p.norm.weight_type), p.norm.weight_type,
                 weight);
  }
  const LayerEntry entry = *entry_address;
  const Format format(Format::kLayerScale ? scale_of(entry) : 0.0f, entry.scale_ue8m0 != 0,
                      p.stream_stores != 0);

  const u8* angles = nullptr;
  if (p.norm.rope.width != 0) {
    angles = find_angles(p.norm.rope, p.table, slot_of(loaded_position, p.position_bytes));
  }
  const auto row_of = [&](i32 token, i32 k) -> KeyRow {
    const u8* latent = kv + token * p.kv_token_stride;
    const u8* rope = latent + p.norm.lora_rank * i64{sizeof(typename Input::Bits)};
    return {latent, rope, shuffle_pointer(angles, k)};
  };

  KeyRow row{};
  KeyFragment<Input> fragment{};
  if (first_token < end_token) {
    row = row_of(first_token, 0);
    if (from_vectors) fragment = load_key<Input>(p.norm, row, lane);
  }

  Tally tally = {0, 0, 0, 0};
  u8* destination = nullptr;
  if (has_token) {
    const Ledger ledger = {p.counters + layer * kCounters, p.errors};
    const bool has_position = p.norm.rope.width == 0 || angles != nullptr;
    destination = claim_row(entry, ledger, layer, own_token, slot_of(loaded_slot, p.slot_bytes),
                            has_position, tally);
  }
  const bool by_vectors = from_vectors && is_vector_aligned(address_of(entry.cache) |
                                                            entry.block_stride | entry.row_stride);

  const ContextWarp<Format> warp{p, format, lane};
  for (i32 token = first_token, k = 0; token < end_token; token += warps, ++k) {
    KeyRow next_row{};
    KeyFragment<Input> next{};
    if (token + warps < end_token) {
      next_row = row_of(token + warps, k + 1);
      if (from_vectors) next = load_key<Input>(p.norm, next_row, lane);
    }
    u8* to = shuffle_pointer(destination, k);
    if (to != nullptr) {
      const u32 before = tally.nonfinite;
      if (by_vectors) {
        warp.store(row, fragment, weight, to, tally);
      } else {
        warp.store_by_element(row, weight_row, to, tally);
      }
      if (p.collect_stats && tally.nonfinite != before) {
        const i64 slot = slot_of(load_slot(slots, token, p.slot_bytes), p.slot_bytes);
        record_first(&p.errors[kErrorNonfinite], layer, token, slot);
      }
    }
    row = next_row;
    fragment = next;
  }
  if (p.collect_stats) add_to_counters(tally, &p.counters[layer * kCounters]);
}

}  // namespace cupy_mla
