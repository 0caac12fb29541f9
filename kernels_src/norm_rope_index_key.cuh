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

// A lane's run of a key, with weight, bias and angles, as they lie in memory.
struct IndexFragment {
  QuadBits run;
  QuadBits weight;
  QuadBits bias;
  u32 angles[2 * kIndexRun];  // cosines, then sines
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

// RoPE of runs of which each is rotated as a whole, and in halves lies in one of them.
struct RunRope {
  const RopeTable& table;
  i32 lane;

  __device__ __forceinline__ static bool takes(const RopeTable& table) {
    return table.half % kIndexRun == 0;
  }

  __device__ __forceinline__ bool in_halves() const { return table.step == 1; }
  __device__ __forceinline__ bool is_rotated() const { return lane * kIndexRun < 2 * table.half; }
  __device__ __forceinline__ bool is_first_half() const { return lane * kIndexRun < table.half; }

  // Element i has angle i of the run, or that of every other one.
  __device__ __forceinline__ void load(const u8* angles, IndexFragment& fragment) const {
    if (angles == nullptr || !is_rotated()) return;
    const i32 element = lane * kIndexRun;
    const i32 in_half = is_first_half() ? element : element - table.half;
    const i32 pair = in_halves() ? in_half : element / 2;
    if (table.type == kFloat32) {
      load(reinterpret_cast<const u32*>(angles) + pair, fragment);
    } else {
      load(reinterpret_cast<const u16*>(angles) + pair, fragment);
    }
  }

  template <class Bits>
  __device__ __forceinline__ void load(const Bits* cos, IndexFragment& fragment) const {
    const Bits* sin = cos + table.half;
    const i32 places[kIndexRun] = {0, in_halves() ? 1 : 0, in_halves() ? 2 : 1,
                                   in_halves() ? 3 : 1};
#pragma unroll
    for (int i = 0; i < kIndexRun; ++i) {
      fragment.angles[i] = cos[places[i]];
      fragment.angles[kIndexRun + i] = sin[places[i]];
    }
  }

  // All lanes of the warp take part.
  __device__ __forceinline__ void rotate(const IndexFragment& fragment,
                                         float (&values)[kIndexRun]) const {
    // Of the pair (a, b), a becomes a * cos - b * sin, and b becomes b * cos + a * sin.
    float others[kIndexRun] = {values[1], values[0], values[3], values[2]};
    u32 signs[kIndexRun] = {kSignBit, 0, kSignBit, 0};  // of the products with a sine
    if (in_halves()) {
      const i32 away = table.half / kIndexRun;
      const i32 partner = is_first_half() ? lane + away : lane - away;
#pragma unroll
      for (int i = 0; i < kIndexRun; ++i) {
        others[i] = __shfl_sync(kWholeWarp, values[i], partner);
        signs[i] = is_first_half() ? kSignBit : 0;
      }
    }
    if (!is_rotated()) return;
    float angles[2 * kIndexRun];
    widen_numbers(fragment.angles, table.type, angles);
#pragma unroll
    for (int i = 0; i < kIndexRun; ++i) {
      const float by_cos = mul_rn_f32(values[i], angles[i]);
      const float by_sin = mul_rn_f32(others[i], angles[kIndexRun + i]);
      values[i] = add_rn_f32(by_cos, float_of(bits_of(by_sin) ^ signs[i]));
    }
  }
};

// RoPE of a lane's run for any table; `row` is the warp's.
__device__ __forceinline__ void rotate_by_element(const RopeTable& table, const u8* angles,
                                                  float (&row)[kIndexWidth], i32 lane,
                                                  float (&values)[kIndexRun]) {
#pragma unroll
  for (int i = 0; i < kIndexRun; ++i) row[lane * kIndexRun + i] = values[i];
  __syncwarp(kWholeWarp);
#pragma unroll 1
  for (i32 pair = lane; pair < table.half; pair += kLanes) {
    const PairPlaces places = pair_places(table, pair);
    rotate(row[places.first], row[places.second], load_number(angles, table.type, pair),
           load_number(angles, table.type, table.half + pair));
  }
  __syncwarp(kWholeWarp);
#pragma unroll
  for (int i = 0; i < kIndexRun; ++i) values[i] = row[lane * kIndexRun + i];
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
  fragment.weight.load(p.index_weight + first * number_bytes(p.index_weight_type),
                       p.index_weight_type);
  fragment.bias.load(p.index_bias + first * number_bytes(p.index_bias_type), p.index_bias_type);

  const u8* angles = find_angles_of(token, p, p.index_rope, p.index_table, position);
  const RunRope by_runs = {p.index_rope, token.lane};
  const bool is_by_runs = RunRope::takes(p.index_rope);
  if (is_by_runs) by_runs.load(angles, fragment);
  IndexCache cache = p.index;
  cache.codes.cache = p.index_codes;
  cache.scales.cache = p.index_scales;
  const IndexPlace to =
      claim_index_row(cache, ledger_of(token, p, kIndexCache), kIndexCache, token.index,
                      slot.value(p.index_slot_bytes), angles != nullptr);
  if (to.codes == nullptr) return;

  IndexNorm norm;
  fragment.weight.widen(p.index_weight_type, norm.weight);
  fragment.bias.widen(p.index_bias_type, norm.bias);
  float values[kIndexRun];
  fragment.run.widen(kNumberType<Input>, values);
  layer_norm(norm, p.index_eps, values);
  round_if_staged<Input>(p.key, values);
  if (is_by_runs) {
    by_runs.rotate(fragment, values);
  } else {
    rotate_by_element(p.index_rope, angles, block_shared<IndexShared>().rows[threadIdx.y],
                      token.lane, values);
  }
  round_if_staged<Input>(p.key, values);
  store_index_row(values, to, true, token.lane);
}

}  // namespace cupy_mla
