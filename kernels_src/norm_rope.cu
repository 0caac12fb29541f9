// norm_rope: what a layer does between its projections and its attention, in one launch.
//
// The query's latent part is normed, and its row of top-k indices filled with -1; the key's latent
// part is normed, its rotary part rotated, and both are stored in the MLA cache; the indexer's key
// is normed, rotated, quantised and stored in the indexer cache. These parts are independent: each
// thread block does one of them for some tokens, a warp a token, one after the other.

#include "claim.cuh"
#include "copy_values.cuh"
#include "index_rows.cuh"
#include "key_rows.cuh"
#include "lanes.cuh"
#include "memory.cuh"
#include "norm.cuh"
#include "norm_rope_params.cuh"
#include "numbers.cuh"
#include "paging.cuh"
#include "rope.cuh"
#include "types.cuh"

namespace cupy_mla {

// The tokens of a warp: every `step`-th from `first` on. Lane k looks after the k-th.
struct WarpTokens {
  i32 lane;
  i32 first;
  i32 end;
  i32 step;

  __device__ __forceinline__ i32 own() const { return first + lane * step; }
  __device__ __forceinline__ bool has_own() const { return own() < end; }
};

__device__ __forceinline__ Ledger ledger_of(const NormRopeParams& p, i32 cache) {
  if (p.counters == nullptr) return {nullptr, nullptr};
  return {p.counters + cache * kCounters, p.errors + cache * kErrorKinds};
}

// An index of the lane's own token.
__device__ __forceinline__ LoadedIndex load_own_index(const u8* indices, i32 bytes,
                                                      const WarpTokens& tokens) {
  return load_index({indices, bytes}, tokens.own(), bytes, indices != nullptr && tokens.has_own());
}

// Angles of the lane's own token; null without a table, a position in it, or a token.
__device__ __forceinline__ const u8* find_own_angles(const NormRopeParams& p,
                                                     const RopeTable& table, const u8* data,
                                                     const LoadedIndex& position,
                                                     const WarpTokens& tokens) {
  if (table.half == 0 || !tokens.has_own()) return nullptr;
  return find_angles(table, data, position.value(p.position_bytes));
}

// --- the query
// ------------------------------------------------------------------------------------

// Runs that a lane asks for before it looks at the first one.
template <class Input>
constexpr int kFirstRuns = sizeof(typename Input::Bits) == 2 ? 4 : 2;

// A row of at least kWideRow elements, whole runs at addresses of vector alignment.
template <class Input>
struct WideQuery {
  static constexpr int kFirst = kFirstRuns<Input>;
  static constexpr int kVectors = kRun / kVectorElements<Input>;
  static constexpr i64 kRunBytes = kRun * sizeof(typename Input::Bits);

  const NormRopeParams& p;
  i32 lane;

  __device__ __forceinline__ const u8* weight_of(i32 run) const {
    return p.q_weight + run * kRun * number_bytes(p.q_weight_type);
  }

  // Asks for the weights, which are needed when the sum is there.
  __device__ __forceinline__ void prefetch_weights() const {
    for (i32 run = lane; run < p.q_width / kRun; run += kLanes) prefetch(weight_of(run));
  }

  // By way of the L1 cache, since each run is needed twice.
  __device__ __forceinline__ static void load(const u8* row, i32 run, uint4 (&vectors)[kVectors]) {
    const auto* source = reinterpret_cast<const uint4*>(row + run * kRunBytes);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) vectors[i] = source[i];
  }

  __device__ __forceinline__ static float add(float sum, const uint4 (&vectors)[kVectors]) {
    float values[kRun];
    widen_vectors<Input>(vectors, values);
    return add_squares(sum, values);
  }

  // `by_pairs`: all lanes have a run to store.
  __device__ __forceinline__ void store(u8* row, i32 run, const uint4 (&vectors)[kVectors], float r,
                                        bool by_pairs) const {
    float values[kRun];
    float weight[kRun];
    widen_vectors<Input>(vectors, values);
    load_numbers_by_vectors(weight_of(run), p.q_weight_type, weight);
#pragma unroll
    for (int i = 0; i < kRun; ++i) values[i] = mul_rn_f32(mul_rn_f32(values[i], r), weight[i]);
    uint4 stored[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      stored[i] = pack_vector<Input>(values, i * kVectorElements<Input>);
    }
    u8* to = row + run * kRunBytes;
    if (by_pairs) {
      store_by_pairs(to, stored, lane, p.stream_stores != 0);
      return;
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      store_vector(to + i * kVectorBytes, stored[i], p.stream_stores != 0);
    }
  }

  // Calls meanwhile() while the row is on its way.
  template <class Meanwhile>
  __device__ __forceinline__ void norm(const u8* from, u8* to, Meanwhile meanwhile) const {
    const i32 runs = p.q_width / kRun;
    uint4 first[kFirst][kVectors];
#pragma unroll
    for (int c = 0; c < kFirst; ++c) {
      if (c * kLanes + lane < runs) load(from, c * kLanes + lane, first[c]);
    }
    meanwhile();
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < kFirst; ++c) {
      if (c * kLanes + lane < runs) sum = add(sum, first[c]);
    }
#pragma unroll 1
    for (i32 run = kFirst * kLanes + lane; run < runs; run += kLanes) {
      uint4 vectors[kVectors];
      load(from, run, vectors);
      sum = add(sum, vectors);
    }
    const float mean = div_rn_f32(sum_over_lanes(sum), static_cast<float>(p.q_width));
    const float r = reciprocal_root(mean, p.q_eps);
    // Loaded again: kept in registers, each run would have code of its own, and more of it than the
    // instruction caches hold of all parts together.
#pragma unroll 1
    for (i32 run = lane; run < runs; run += kLanes) {
      uint4 vectors[kVectors];
      load(from, run, vectors);
      store(to, run, vectors, r, run - lane + kLanes <= runs);
    }
  }
};

// Sets all bits of consecutive 4-byte words.
__device__ __forceinline__ void fill_with_ones(u8* start, i32 bytes, i32 lane, bool streaming) {
  constexpr u32 kOnes = 0xFFFFFFFFu;
  const i32 head = min(bytes, static_cast<i32>(-address_of(start) % kVectorBytes));
  const i32 vectors = (bytes - head) / static_cast<i32>(kVectorBytes);
  u8* tail = start + head + vectors * i64{kVectorBytes};
  const i32 tail_words = (bytes - head) % static_cast<i32>(kVectorBytes) / 4;
  for (i32 i = lane; i < vectors; i += kLanes) {
    store_vector(start + head + i * i64{kVectorBytes}, {kOnes, kOnes, kOnes, kOnes}, streaming);
  }
  if (lane < head / 4) reinterpret_cast<u32*>(start)[lane] = kOnes;
  if (lane < tail_words) reinterpret_cast<u32*>(tail)[lane] = kOnes;
}

// Norms queries, and fills rows of indices while they are on their way.
template <class Input>
__device__ __forceinline__ void norm_queries(const NormRopeParams& p, const WarpTokens& tokens) {
  using Bits = typename Input::Bits;
  const bool is_wide = p.q_width >= kWideRow && p.q_width % kRun == 0;
  const bool by_vectors =
      is_wide && is_vector_aligned(address_of(p.q_c) | p.q_c_stride | address_of(p.q_c_out) |
                                   p.q_c_out_stride | address_of(p.q_weight));
  if (by_vectors) WideQuery<Input>{p, tokens.lane}.prefetch_weights();
  for (i32 token = tokens.first; token < tokens.end; token += tokens.step) {
    const u8* from = p.q_c + token * p.q_c_stride;
    u8* to = p.q_c_out + token * p.q_c_out_stride;
    const auto fill = [&] {
      if (p.topk == nullptr) return;
      fill_with_ones(p.topk + token * p.topk_stride, p.topk_bytes, tokens.lane,
                     p.stream_stores != 0);
    };
    if (by_vectors) {
      WideQuery<Input>{p, tokens.lane}.norm(from, to, fill);
    } else {
      fill();
      rms_norm_by_element<Input>(
          from, p.q_width, p.q_weight, p.q_weight_type, p.q_eps, tokens.lane,
          [&](i32 i, float value) { reinterpret_cast<Bits*>(to)[i] = narrow<Input>(value); });
    }
  }
}

// --- the key
// --------------------------------------------------------------------------------------

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
__device__ __forceinline__ void store_keys(const NormRopeParams& p, const WarpTokens& tokens) {
  using Input = typename Format::Input;
  // Everything is asked for before anything is looked at, as in context.cu.
  const bool has_cache = p.slots != nullptr;
  const LoadedIndex position = load_own_index(p.positions, p.position_bytes, tokens);
  const LoadedIndex slot = load_own_index(p.slots, p.slot_bytes, tokens);
  LayerEntry entry = p.mla;
  entry.cache = p.mla_cache;
  entry.scale = p.mla_scale;
  const float scale = Format::kLayerScale && has_cache ? scale_of(entry) : 0.0f;
  SharedWeights& weights = block_shared<SharedWeights>();
  const bool is_wide = p.key.lora_rank == kWideRow;
  const i32 thread = static_cast<i32>(threadIdx.y) * kLanes + tokens.lane;
  QuadBits quad{};
  if (is_wide) quad = SharedWeights::load(p.kv_weight, p.key.weight_type, thread);
  const u8* latent = p.kv_c + tokens.first * p.kv_c_stride;
  const u8* rope = p.k_pe + tokens.first * p.k_pe_stride;
  KeyRows<Format> rows = {
      p.key,
      weights,
      p.kv_weight,
      nullptr,
      tokens.lane,
      is_wide && is_vector_aligned(address_of(p.kv_c) | p.kv_c_stride),
      is_vector_aligned(address_of(entry.cache) | entry.block_stride | entry.row_stride),
      Format()};
  KeyFragment<Input> fragment;
  if (tokens.first < tokens.end) rows.load(latent, rope, fragment);

  rows.angles = find_own_angles(p, p.key.rope, p.k_table, position, tokens);
  u8* destination = nullptr;
  if (has_cache && tokens.has_own()) {
    destination =
        claim_row(entry, ledger_of(p, kMlaCache), kMlaCache, tokens.own(), slot.value(p.slot_bytes),
                  p.key.rope.half == 0 || rows.angles != nullptr);
  }
  const bool streaming = p.stream_stores != 0;
  if (has_cache) rows.format = Format(scale, entry.scale_ue8m0 != 0, streaming);
  const bool outs_are_vectors = is_vector_aligned(address_of(p.kv_c_out) | p.kv_c_out_stride);
  if (is_wide) weights.put(quad, p.key.weight_type, thread);
  rows.load_angles(0, fragment);
  __syncthreads();

  for (i32 token = tokens.first, k = 0; token < tokens.end; token += tokens.step, ++k) {
    u8* to = shuffle_pointer(destination, k);
    if (to != nullptr || p.kv_c_out != nullptr || p.k_pe_out != nullptr) {
      const KeyOutputs<Input> outputs = {
          CopyValues<Input>(0.0f, false, streaming),
          p.kv_c_out == nullptr ? nullptr : p.kv_c_out + token * p.kv_c_out_stride,
          p.k_pe_out == nullptr ? nullptr : p.k_pe_out + token * p.k_pe_out_stride, tokens.lane,
          outs_are_vectors};
      rows.store(latent, rope, k, fragment, to, outputs);
    }
    latent += tokens.step * p.kv_c_stride;
    rope += tokens.step * p.k_pe_stride;
    if (token + tokens.step < tokens.end) {
      rows.load(latent, rope, fragment);
      rows.load_angles(k + 1, fragment);
    }
  }
}

// --- the indexer's key
// ----------------------------------------------------------------------------

// A row for each warp of the block, to rotate elements that are in other lanes.
struct IndexShared {
  float rows[tuning::kMaxThreads / kLanes][kIndexWidth];
};

// Weight and bias of a lane's run.
struct IndexNorm {
  float weight[kIndexRun];
  float bias[kIndexRun];
};

// A lane's run of a key and its angles, as they lie in memory.
struct IndexFragment {
  QuadBits run;
  u32 cos[kIndexRun];
  u32 sin[kIndexRun];

  __device__ __forceinline__ void load_angles(const RopeTable& table, const u8* angles, i32 lane) {
    if (angles == nullptr) return;
    const bool in_halves = table.step == 1;
#pragma unroll
    for (int i = 0; i < kIndexRun; ++i) {
      const i32 element = lane * kIndexRun + i;
      if (element >= 2 * table.half) continue;
      const i32 pair = in_halves ? element % table.half : element / 2;
      cos[i] = load_number_bits(angles, table.type, pair);
      sin[i] = load_number_bits(angles, table.type, table.half + pair);
    }
  }
};

// LayerNorm of a lane's run.
__device__ __forceinline__ void layer_norm(const IndexNorm& norm, float eps,
                                           float (&values)[kIndexRun]) {
  constexpr float kInverseWidth = 1.0f / kIndexWidth;  // exact
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kIndexRun; ++i) sum = add_rn_f32(sum, values[i]);
  const float mean = mul_rn_f32(sum_over_lanes(sum), kInverseWidth);
#pragma unroll
  for (int i = 0; i < kIndexRun; ++i) values[i] = sub_rn_f32(values[i], mean);
  const float squares = sum_over_lanes(add_squares(0.0f, values));
  const float r = reciprocal_root(mul_rn_f32(squares, kInverseWidth), eps);
#pragma unroll
  for (int i = 0; i < kIndexRun; ++i) {
    values[i] = add_rn_f32(mul_rn_f32(mul_rn_f32(values[i], r), norm.weight[i]), norm.bias[i]);
  }
}

// RoPE of a lane's run; `row` is the warp's.
__device__ __forceinline__ void rotate_index_run(const RopeTable& table,
                                                 const IndexFragment& fragment,
                                                 float (&row)[kIndexWidth], i32 lane,
                                                 float (&values)[kIndexRun]) {
#pragma unroll
  for (int i = 0; i < kIndexRun; ++i) row[lane * kIndexRun + i] = values[i];
  __syncwarp(kWholeWarp);
#pragma unroll
  for (int i = 0; i < kIndexRun; ++i) {
    const i32 element = lane * kIndexRun + i;
    if (element >= 2 * table.half) continue;
    // Of the pair (a, b) this is a where it is first, else b.
    const bool is_first = table.step == 1 ? element < table.half : element % 2 == 0;
    const i32 other = is_first ? element + table.partner : element - table.partner;
    const float by_cos = mul_rn_f32(values[i], widen_number(fragment.cos[i], table.type));
    const float by_sin = mul_rn_f32(row[other], widen_number(fragment.sin[i], table.type));
    values[i] = is_first ? sub_rn_f32(by_cos, by_sin) : add_rn_f32(by_cos, by_sin);
  }
  __syncwarp(kWholeWarp);
}

template <class Input>
__device__ __forceinline__ void store_index_keys(const NormRopeParams& p,
                                                 const WarpTokens& tokens) {
  // Everything is asked for before anything is looked at, as in context.cu.
  const LoadedIndex position = load_own_index(p.positions, p.position_bytes, tokens);
  const LoadedIndex slot = load_own_index(p.index_slots, p.index_slot_bytes, tokens);
  const i32 first = tokens.lane * kIndexRun;
  const u8* source =
      p.index_k + tokens.first * p.index_k_stride + first * i64{sizeof(typename Input::Bits)};
  IndexFragment fragment{};
  if (tokens.first < tokens.end) fragment.run.load(source, kNumberType<Input>);
  QuadBits weight;
  QuadBits bias;
  weight.load(p.index_weight + first * number_bytes(p.index_weight_type), p.index_weight_type);
  bias.load(p.index_bias + first * number_bytes(p.index_bias_type), p.index_bias_type);

  const u8* angles = find_own_angles(p, p.index_rope, p.index_table, position, tokens);
  fragment.load_angles(p.index_rope, shuffle_pointer(angles, 0), tokens.lane);
  IndexCache cache = p.index;
  cache.codes.cache = p.index_codes;
  cache.scales.cache = p.index_scales;
  IndexPlace place = {nullptr, nullptr};
  if (tokens.has_own()) {
    place = claim_index_row(cache, ledger_of(p, kIndexCache), kIndexCache, tokens.own(),
                            slot.value(p.index_slot_bytes), angles != nullptr);
  }
  IndexNorm norm;
  weight.widen(p.index_weight_type, norm.weight);
  bias.widen(p.index_bias_type, norm.bias);
  float (&row)[kIndexWidth] = block_shared<IndexShared>().rows[threadIdx.y];
  for (i32 token = tokens.first, k = 0; token < tokens.end; token += tokens.step, ++k) {
    const IndexPlace to = {shuffle_pointer(place.codes, k), shuffle_pointer(place.scale, k)};
    if (to.codes != nullptr) {
      float values[kIndexRun];
      fragment.run.widen(kNumberType<Input>, values);
      layer_norm(norm, p.index_eps, values);
      if (p.key.staged) {
#pragma unroll
        for (int i = 0; i < kIndexRun; ++i) values[i] = rounded<Input>(values[i]);
      }
      rotate_index_run(p.index_rope, fragment, row, tokens.lane, values);
      if (p.key.staged) {
#pragma unroll
        for (int i = 0; i < kIndexRun; ++i) values[i] = rounded<Input>(values[i]);
      }
      store_index_row(values, to, true, tokens.lane);
    }
    source += tokens.step * p.index_k_stride;
    if (token + tokens.step < tokens.end) {
      fragment.run.load(source, kNumberType<Input>);
      fragment.load_angles(p.index_rope, shuffle_pointer(angles, k + 1), tokens.lane);
    }
  }
}

template <class Format>
__device__ __forceinline__ void norm_rope(const NormRopeParams& p) {
  using Input = typename Format::Input;
  const i32 group = static_cast<i32>(divide(blockIdx.x, p.parts));
  const i32 part = p.part_kinds[blockIdx.x - group * p.parts.value];
  const i32 first_token = group * p.block_tokens;
  const WarpTokens tokens = {
      static_cast<i32>(threadIdx.x), first_token + static_cast<i32>(threadIdx.y),
      min(first_token + p.block_tokens, p.tokens), static_cast<i32>(blockDim.y)};
  if (part == kQueryPart) {
    norm_queries<Input>(p, tokens);
  } else if (part == kKeyPart) {
    store_keys<Format>(p, tokens);
  } else {
    store_index_keys<Input>(p, tokens);
  }
}

}  // namespace cupy_mla
