// The indexer's part of norm_rope: LayerNorm of its key, RoPE, and a quantised row of its cache.

#pragma once

#include "claim.cuh"
#include "index_rows.cuh"
#include "memory.cuh"
#include "norm.cuh"
#include "norm_rope_params.cuh"
#include "norm_rope_token.cuh"
#include "numbers.cuh"
#include "rope.cuh"
#include "types.cuh"

namespace cupy_mla {

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
__device__ __forceinline__ void store_index_key(const NormRopeParams& p, const WarpToken& token) {
  if (!token.exists) return;
  // Everything is asked for before anything is looked at, as in context.cu.
  const LoadedIndex position = load_index_of(token, p.positions, p.position_bytes);
  const LoadedIndex slot = load_index_of(token, p.index_slots, p.index_slot_bytes);
  const i32 first = token.lane * kIndexRun;
  IndexFragment fragment{};
  fragment.run.load(
      p.index_k + token.index * p.index_k_stride + first * i64{sizeof(typename Input::Bits)},
      kNumberType<Input>);
  QuadBits weight;
  QuadBits bias;
  weight.load(p.index_weight + first * number_bytes(p.index_weight_type), p.index_weight_type);
  bias.load(p.index_bias + first * number_bytes(p.index_bias_type), p.index_bias_type);

  const u8* angles = find_angles_of(token, p, p.index_rope, p.index_table, position);
  fragment.load_angles(p.index_rope, angles, token.lane);
  IndexCache cache = p.index;
  cache.codes.cache = p.index_codes;
  cache.scales.cache = p.index_scales;
  const IndexPlace to =
      claim_index_row(cache, ledger_of(token, p, kIndexCache), kIndexCache, token.index,
                      slot.value(p.index_slot_bytes), angles != nullptr);
  if (to.codes == nullptr) return;

  IndexNorm norm;
  weight.widen(p.index_weight_type, norm.weight);
  bias.widen(p.index_bias_type, norm.bias);
  float values[kIndexRun];
  fragment.run.widen(kNumberType<Input>, values);
  layer_norm(norm, p.index_eps, values);
  round_if_staged<Input>(p.key, values);
  rotate_index_run(p.index_rope, fragment, block_shared<IndexShared>().rows[threadIdx.y],
                   token.lane, values);
  round_if_staged<Input>(p.key, values);
  store_index_row(values, to, true, token.lane);
}

}  // namespace cupy_mla
