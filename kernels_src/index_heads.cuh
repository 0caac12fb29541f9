// Queries of the sparse indexer: RoPE, then fp8 with a scale a head, which goes into its weight.

#pragma once

#include "exact_math.cuh"
#include "fp8.cuh"
#include "head_groups.cuh"
#include "index_rows.cuh"
#include "lanes.cuh"
#include "norm.cuh"
#include "numbers.cuh"
#include "paging.cuh"
#include "query_params.cuh"
#include "quotients.cuh"
#include "rope.cuh"
#include "types.cuh"

namespace cupy_mla {

// The only head that is worked on in registers: half of it is rotated.
constexpr i32 kHeadWidth = 128;
constexpr i32 kHeadHalf = 32;
constexpr int kGroupPairs = kHeadHalf / kGroupLanes;
constexpr int kGroupRest = (kHeadWidth - 2 * kHeadHalf) / kGroupLanes;

// A lane's share of such a head as it lies in memory: two runs that are rotated and two that are
// not, and the head's weight.
struct HeadBits {
  QuadBits low;
  QuadBits high;
  QuadBits rest[kGroupRest / 4];
  u32 weight;
};

template <class Input>
struct IndexHeads {
  using Bits = typename Input::Bits;

  const QueryParams& p;
  i32 token;
  i32 lane;

  __device__ __forceinline__ const u8* source(i32 head) const {
    return p.index_q + token * p.index_q_strides.token + head * p.index_q_strides.head;
  }

  __device__ __forceinline__ u8* destination(i32 head) const {
    return p.index_out + token * p.index_strides.token + head * p.index_strides.head;
  }

  __device__ __forceinline__ u32 load_weight(i32 head) const {
    return load_number_bits(p.index_weights + token * p.weights_stride, p.weights_type, head);
  }

  // Makes up for the scale that the codes were divided by.
  __device__ __forceinline__ void store_weight(i32 head, u32 bits, float scale) const {
    const float product = mul_rn_f32(
        mul_rn_f32(mul_rn_f32(widen_number(bits, p.weights_type), scale), p.softmax_scale),
        p.head_scale);
    u8* row = p.weights_out + token * p.weights_out_stride;
    reinterpret_cast<u32*>(row)[head] = canonical_f32(product);
  }

  // Where the lane's rotated runs begin: its pairs are of both halves, or neighbours.
  __device__ __forceinline__ i32 low_element() const {
    const i32 pair = lane % kGroupLanes * kGroupPairs;
    return p.index_rope.step == 1 ? pair : 2 * pair;
  }
  __device__ __forceinline__ i32 high_element() const {
    return low_element() + (p.index_rope.step == 1 ? kHeadHalf : kGroupPairs);
  }
  __device__ __forceinline__ i32 rest_element() const {
    return 2 * kHeadHalf + lane % kGroupLanes * kGroupRest;
  }

  // Heads first to first + 3 of those before `end`, of kHeadWidth elements, 2 * kHeadHalf of them
  // rotated.
  __device__ __forceinline__ void load_group(i32 first, i32 end, HeadBits& bits) const {
    const i32 head = first + lane / kGroupLanes;
    if (head >= end) return;
    const u8* row = source(head);
    const auto load = [&](QuadBits& quad, i32 element) {
      quad.load(row + element * i64{sizeof(Bits)}, kNumberType<Input>);
    };
    load(bits.low, low_element());
    load(bits.high, high_element());
#pragma unroll
    for (int i = 0; i < kGroupRest / 4; ++i) load(bits.rest[i], rest_element() + 4 * i);
    if (lane % kGroupLanes == 0) bits.weight = load_weight(head);
  }

  // All lanes of the warp take part.
  __device__ __forceinline__ void store_group(i32 first, i32 end, const HeadBits& bits,
                                              bool has_angles,
                                              const GroupAngles<kGroupPairs>& angles) const {
    const i32 head = first + lane / kGroupLanes;
    const bool in_halves = p.index_rope.step == 1;
    // As pairs: a[i] and b[i] are rotated together, whichever way they lie in memory.
    float a[kGroupPairs] = {};
    float b[kGroupPairs] = {};
    float rest[kGroupRest] = {};
    if (head < end) {
      if (has_angles) {
        float low[kGroupPairs];
        float high[kGroupPairs];
        bits.low.widen(kNumberType<Input>, low);
        bits.high.widen(kNumberType<Input>, high);
        arrange(in_halves, low, high, a, b);
#pragma unroll
        for (int i = 0; i < kGroupPairs; ++i) rotate(a[i], b[i], angles.cos[i], angles.sin[i]);
      }
#pragma unroll
      for (int i = 0; i < kGroupRest / 4; ++i) {
        float four[4];
        bits.rest[i].widen(kNumberType<Input>, four);
#pragma unroll
        for (int j = 0; j < 4; ++j) rest[4 * i + j] = four[j];
      }
    }
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < kGroupPairs; ++i) {
      amax = max_f32(amax, max_f32(abs_f32(a[i]), abs_f32(b[i])));
    }
#pragma unroll
    for (int i = 0; i < kGroupRest; ++i) amax = max_f32(amax, abs_f32(rest[i]));
    const float scale = index_power_of_two(max_over_lanes<kGroupLanes>(amax));
    if (head >= end) return;
    if (lane % kGroupLanes == 0) store_weight(head, bits.weight, scale);
    const PowerOfTwoScale quotients(scale);
    u8* to = destination(head);
    u32 rest_codes[2];
    encode_quotients<E4m3>(quotients, rest, rest_codes);
    *reinterpret_cast<u64*>(to + rest_element()) = rest_codes[0] | static_cast<u64>(rest_codes[1])
                                                                       << 32;
    float low[kGroupPairs];
    float high[kGroupPairs];
    u32 low_codes[1];
    u32 high_codes[1];
    disarrange(in_halves, a, b, low, high);
    encode_quotients<E4m3>(quotients, low, low_codes);
    encode_quotients<E4m3>(quotients, high, high_codes);
    *reinterpret_cast<u32*>(to + low_element()) = low_codes[0];
    *reinterpret_cast<u32*>(to + high_element()) = high_codes[0];
  }

  // From two runs of memory to pairs: halves lie as they are, neighbours take turns.
  __device__ __forceinline__ static void arrange(bool in_halves, const float (&low)[4],
                                                 const float (&high)[4], float (&a)[4],
                                                 float (&b)[4]) {
    const float even[4] = {low[0], low[2], high[0], high[2]};
    const float odd[4] = {low[1], low[3], high[1], high[3]};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[i] = in_halves ? low[i] : even[i];
      b[i] = in_halves ? high[i] : odd[i];
    }
  }

  __device__ __forceinline__ static void disarrange(bool in_halves, const float (&a)[4],
                                                    const float (&b)[4], float (&low)[4],
                                                    float (&high)[4]) {
    const float first[4] = {a[0], b[0], a[1], b[1]};
    const float second[4] = {a[2], b[2], a[3], b[3]};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      low[i] = in_halves ? a[i] : first[i];
      high[i] = in_halves ? b[i] : second[i];
    }
  }

  // Element i of a rotated head.
  __device__ __forceinline__ float value(const u8* row, const u8* angles, i32 i) const {
    const auto* elements = reinterpret_cast<const Bits*>(row);
    const RopeTable& table = p.index_rope;
    if (i >= 2 * table.half) return Input::widen(elements[i]);
    if (angles == nullptr) return 0.0f;
    const bool in_halves = table.step == 1;
    const bool is_first = in_halves ? i < table.half : i % 2 == 0;
    const i32 pair = in_halves ? (is_first ? i : i - table.half) : i / 2;
    const PairPlaces places = pair_places(table, pair);
    float a = Input::widen(elements[places.first]);
    float b = Input::widen(elements[places.second]);
    rotate(a, b, load_number(angles, table.type, pair),
           load_number(angles, table.type, table.half + pair));
    return is_first ? a : b;
  }

  // A head of any width at any address.
  __device__ __forceinline__ void store_by_element(i32 head, const u8* angles) const {
    const u8* row = source(head);
    float amax = 0.0f;
#pragma unroll 1
    for (i32 i = lane; i < p.index_width; i += kLanes)
      amax = max_f32(amax, abs_f32(value(row, angles, i)));
    const float scale = index_power_of_two(max_of_warp(amax));
    const PowerOfTwoScale quotients(scale);
    u8* to = destination(head);
#pragma unroll 1
    for (i32 i = lane; i < p.index_width; i += kLanes) {
      to[i] = static_cast<u8>(encode_two<E4m3>(quotients, value(row, angles, i), 0.0f));
    }
    if (lane == 0) store_weight(head, load_weight(head), scale);
  }
};

template <class Input>
__device__ __forceinline__ void store_indexer(const QueryParams& p, i32 token, i32 block,
                                              const LoadedIndex& position) {
  const i32 lane = static_cast<i32>(threadIdx.x);
  const i32 warp = static_cast<i32>(threadIdx.y);
  const i32 warps = static_cast<i32>(blockDim.y);
  const IndexHeads<Input> heads = {p, token, lane};
  const i32 first_head = block * p.index_block_heads;
  const i32 end_head = min(first_head + p.index_block_heads, p.index_heads);
  const bool by_groups = p.index_width == kHeadWidth && p.index_rope.half == kHeadHalf &&
                         are_vectors(p.index_q, p.index_q_strides) &&
                         are_vectors(p.index_out, p.index_strides);
  const auto load = [&](i32 first, HeadBits& bits) { heads.load_group(first, end_head, bits); };
  WorkAhead<HeadBits, 1> groups(first_head + warp * kGroups, end_head, warps * kGroups);
  if (by_groups) groups.start(load);
  const u8* angles = find_angles(p.index_rope, p.index_table, position.value(p.position_bytes));
  if (by_groups) {
    const GroupAngles<kGroupPairs> own(p.index_rope, angles, lane % kGroupLanes * kGroupPairs);
    groups.run(load, [&](i32 first, const HeadBits& bits) {
      heads.store_group(first, end_head, bits, angles != nullptr, own);
    });
  } else {
    for (i32 head = first_head + warp; head < end_head; head += warps) {
      heads.store_by_element(head, angles);
    }
  }
}

}  // namespace cupy_mla
