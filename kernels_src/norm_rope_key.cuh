// The key's part of norm_rope: RMSNorm of the latent part, RoPE, and both into the MLA cache.

#pragma once

#include "claim.cuh"
#include "copy_values.cuh"
#include "key_rows.cuh"
#include "memory.cuh"
#include "norm.cuh"
#include "norm_rope_params.cuh"
#include "norm_rope_token.cuh"
#include "paging.cuh"
#include "rope.cuh"
#include "types.cuh"

namespace cupy_mla {

// Stores a key in arrays of its own too, where these are wanted.
template <class Input>
struct KeyOutputs {
  CopyValues<Input> format;
  u8* latent;  // null where it is not wanted
  u8* rope;
  i32 lane;
  bool to_vectors;

  __device__ __forceinline__ void run(const float (&values)[kRun]) const {
    if (latent == nullptr) return;
    if (to_vectors) {
      format.store_run(values, latent, lane, true);
    } else {
#pragma unroll
      for (int i = 0; i < kRun; ++i) format.store_element(values[i], lane * kRun + i, latent);
    }
  }

  __device__ __forceinline__ void element(i32 i, float value) const {
    if (latent != nullptr) format.store_element(value, i, latent);
  }

  __device__ __forceinline__ void pair(const PairPlaces& places, float a, float b) const {
    if (rope != nullptr) format.store_pair(a, b, places.first, places.second, rope);
  }
};

template <class Format>
__device__ __forceinline__ void store_key(const NormRopeParams& p, const WarpToken& token) {
  using Input = typename Format::Input;
  // Everything is asked for before anything is looked at, as in context.cu.
  const bool has_cache = p.slots != nullptr;
  const LoadedIndex position = load_index_of(token, p.positions, p.position_bytes);
  const LoadedIndex slot = load_index_of(token, p.slots, p.slot_bytes);
  LayerEntry entry = p.mla;
  entry.cache = p.mla_cache;
  entry.scale = p.mla_scale;
  const float scale = Format::kLayerScale && has_cache ? scale_of(entry) : 0.0f;
  SharedWeights& weights = block_shared<SharedWeights>();
  const bool is_wide = p.key.lora_rank == kWideRow;
  QuadBits quad{};
  if (is_wide) quad = SharedWeights::load(p.kv_weight, p.key.weight_type, thread_of(token));
  const u8* latent = p.kv_c + token.index * p.kv_c_stride;
  const u8* rope = p.k_pe + token.index * p.k_pe_stride;
  KeyRows<Format> rows = {
      p.key,
      weights,
      p.kv_weight,
      token.lane,
      is_wide && is_vector_aligned(address_of(p.kv_c) | p.kv_c_stride),
      is_vector_aligned(address_of(entry.cache) | entry.block_stride | entry.row_stride),
      Format()};
  KeyFragment<Input> fragment;
  if (token.exists) rows.load(latent, rope, fragment);

  const u8* angles = find_angles_of(token, p, p.key.rope, p.k_table, position);
  u8* to = nullptr;
  if (has_cache && token.exists) {
    const bool has_position = p.key.rope.half == 0 || angles != nullptr;
    to = claim_row(entry, ledger_of(token, p, kMlaCache), kMlaCache, token.index,
                   slot.value(p.slot_bytes), has_position);
  }
  const bool streaming = p.stream_stores != 0;
  if (has_cache) rows.format = Format(scale, entry.scale_ue8m0 != 0, streaming);
  if (is_wide) weights.put(quad, p.key.weight_type, thread_of(token));
  rows.load_angles(angles, fragment);
  __syncthreads();

  if (!token.exists) return;
  const KeyOutputs<Input> outputs = {
      CopyValues<Input>(0.0f, false, streaming),
      p.kv_c_out == nullptr ? nullptr : p.kv_c_out + token.index * p.kv_c_out_stride,
      p.k_pe_out == nullptr ? nullptr : p.k_pe_out + token.index * p.k_pe_out_stride, token.lane,
      is_vector_aligned(address_of(p.kv_c_out) | p.kv_c_out_stride)};
  if (to == nullptr && outputs.latent == nullptr && outputs.rope == nullptr) return;
  rows.store_latent(latent, fragment, to, outputs);
  rows.store_rope(rope, angles, fragment, to, outputs);
}

}  // namespace cupy_mla
