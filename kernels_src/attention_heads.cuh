// Queries of attention: [latent | rope] as fp8, or the rotary part alone.

#pragma once

#include "elements.cuh"
#include "fp8.cuh"
#include "head_groups.cuh"
#include "lanes.cuh"
#include "memory.cuh"
#include "numbers.cuh"
#include "paging.cuh"
#include "query_params.cuh"
#include "quotients.cuh"
#include "rope.cuh"
#include "rows.cuh"
#include "types.cuh"

namespace cupy_mla {

// The only rotary part that is worked on in vectors, if its pairs are neighbours.
constexpr i32 kRopeWidth = 64;
constexpr int kRopeRun = kRopeWidth / kGroupLanes;

template <class Input>
struct AttentionHeads {
  using Bits = typename Input::Bits;
  using Angles = GroupAngles<kRopeRun / 2>;

  // A lane's first run of a latent part, and its run of a rotary part.
  struct Latent {
    uint4 vectors[kRun / kVectorElements<Input>];
  };
  struct Rope {
    uint4 vectors[kRopeRun / kVectorElements<Input>];
  };

  const QueryParams& p;
  i32 token;
  i32 lane;
  bool quantised;

  __device__ __forceinline__ const u8* latent_of(i32 head) const {
    return p.ql_nope + token * p.ql_nope_strides.token + head * p.ql_nope_strides.head;
  }
  __device__ __forceinline__ const u8* rope_of(i32 head) const {
    return p.q_pe + token * p.q_pe_strides.token + head * p.q_pe_strides.head;
  }
  __device__ __forceinline__ u8* destination(i32 head) const {
    return p.mqa_out + token * p.mqa_strides.token + head * p.mqa_strides.head;
  }
  __device__ __forceinline__ u8* rope_destination(i32 head) const {
    return destination(head) + (quantised ? p.lora_rank : 0);
  }

  __device__ __forceinline__ bool has_vector_latents() const {
    return p.lora_rank % kRun == 0 && are_vectors(p.ql_nope, p.ql_nope_strides) &&
           are_vectors(p.mqa_out, p.mqa_strides);
  }
  __device__ __forceinline__ bool has_vector_ropes() const {
    return p.rope.half == kRopeWidth / 2 && p.rope.partner == 1 &&
           are_vectors(p.q_pe, p.q_pe_strides) && are_vectors(p.mqa_out, p.mqa_strides) &&
           (!quantised || p.lora_rank % kRopeRun == 0);
  }

  // Run `run` of a latent part of vector alignment; nothing behind its last one.
  __device__ __forceinline__ void load_latent(i32 head, i32 run, Latent& latent) const {
    if (run >= p.lora_rank / kRun) return;
    const u8* from = latent_of(head) + run * i64{kRun * sizeof(Bits)};
#pragma unroll
    for (int i = 0; i < kRun / kVectorElements<Input>; ++i) {
      latent.vectors[i] = load_vector(from + i * kVectorBytes);
    }
  }

  __device__ __forceinline__ void store_latent(i32 head, Latent latent,
                                               const QuotientScale& scale) const {
#pragma unroll 1
    for (i32 run = lane; run < p.lora_rank / kRun; run += kLanes) {
      if (run != lane) load_latent(head, run, latent);
      float values[kRun];
      u32 codes[kRun / 4];
      widen_vectors<Input>(latent.vectors, values);
      encode_quotients<E4m3>(scale, values, codes);
      store_vector(destination(head) + run * kRun, {codes[0], codes[1], codes[2], codes[3]},
                   p.stream_stores != 0);
    }
  }

  // The same from and to any alignment.
  __device__ __forceinline__ void store_latent_by_element(i32 head,
                                                          const QuotientScale& scale) const {
    const auto* from = reinterpret_cast<const Bits*>(latent_of(head));
    u8* to = destination(head);
#pragma unroll 1
    for (i32 i = lane; i < p.lora_rank; i += kLanes) {
      to[i] = static_cast<u8>(encode_two<E4m3>(scale, Input::widen(from[i]), 0.0f));
    }
  }

  // Rotary parts of heads first to first + 3 of those before `end`, of vector alignment.
  __device__ __forceinline__ void load_ropes(i32 first, i32 end, Rope& rope) const {
    const i32 head = first + lane / kGroupLanes;
    if (head >= end) return;
    const u8* from = rope_of(head) + lane % kGroupLanes * i64{kRopeRun * sizeof(Bits)};
#pragma unroll
    for (int i = 0; i < kRopeRun / kVectorElements<Input>; ++i) {
      rope.vectors[i] = load_vector(from + i * kVectorBytes);
    }
  }

  // Without angles they are zeros.
  __device__ __forceinline__ void store_ropes(i32 first, i32 end, const Rope& rope, bool has_angles,
                                              const Angles& angles,
                                              const QuotientScale& scale) const {
    const i32 head = first + lane / kGroupLanes;
    if (head >= end) return;
    float values[kRopeRun] = {};
    if (has_angles) {
      widen_vectors<Input>(rope.vectors, values);
#pragma unroll
      for (int i = 0; i < kRopeRun / 2; ++i) {
        rotate(values[2 * i], values[2 * i + 1], angles.cos[i], angles.sin[i]);
      }
    }
    const i32 element = lane % kGroupLanes * kRopeRun;
    u8* to = rope_destination(head);
    if (quantised) {
      u32 codes[kRopeRun / 4];
      encode_quotients<E4m3>(scale, values, codes);
      *reinterpret_cast<u64*>(to + element) = codes[0] | static_cast<u64>(codes[1]) << 32;
    } else {
#pragma unroll
      for (int i = 0; i < kRopeRun / kVectorElements<Input>; ++i) {
        store_vector(to + element * i64{sizeof(Bits)} + i * kVectorBytes,
                     pack_vector<Input>(values, i * kVectorElements<Input>), p.stream_stores != 0);
      }
    }
  }

  // The same for any rotary part.
  __device__ __forceinline__ void store_rope_by_pair(i32 head, const u8* angles,
                                                     const QuotientScale& scale) const {
    u8* to = rope_destination(head);
    PairBits bits{};
    if (lane < p.rope.half) bits = load_pair<Input>(p.rope, angles, rope_of(head), lane);
    for_each_pair<Input>(
        p.rope, angles, rope_of(head), bits, lane, [&](const PairPlaces& places, float a, float b) {
          if (quantised) {
            const u32 codes = encode_two<E4m3>(scale, a, b);
            store_two<u8>(to, places.first, places.second, codes & 0xFFu, codes >> 8 & 0xFFu);
          } else {
            store_two<Bits>(to, places.first, places.second, narrow<Input>(a), narrow<Input>(b));
          }
        });
  }
};

// Heads of a token: a warp takes the latent part of one at a time, and the rotary parts of four.
template <class Input>
__device__ __forceinline__ void store_attention(const QueryParams& p, i32 token, i32 block,
                                                const LoadedIndex& position) {
  using Heads = AttentionHeads<Input>;
  using Latent = typename Heads::Latent;
  using Rope = typename Heads::Rope;
  const i32 lane = static_cast<i32>(threadIdx.x);
  const i32 warp = static_cast<i32>(threadIdx.y);
  const i32 warps = static_cast<i32>(blockDim.y);
  const bool quantised = p.ql_nope != nullptr;
  const Heads heads = {p, token, lane, quantised};
  const i32 first_head = block * p.mqa_block_heads;
  const i32 end_head = min(first_head + p.mqa_block_heads, p.heads);

  // Everything is asked for before anything is looked at. Angles alone have to wait for a position.
  const bool by_latents = quantised && heads.has_vector_latents();
  const auto load_latent = [&](i32 head, Latent& latent) { heads.load_latent(head, lane, latent); };
  WorkAhead<Latent, 2> latents(first_head + warp, end_head, warps);
  if (by_latents) latents.start(load_latent);
  const bool by_ropes = heads.has_vector_ropes();
  const auto load_ropes = [&](i32 first, Rope& rope) { heads.load_ropes(first, end_head, rope); };
  WorkAhead<Rope, 1> ropes(first_head + warp * kGroups, end_head, warps * kGroups);
  if (by_ropes) ropes.start(load_ropes);
  QuotientScale scale;
  if (quantised) scale = QuotientScale(p.q_scale != nullptr ? *p.q_scale : p.scale_value);

  if (by_latents) {
    latents.run(load_latent,
                [&](i32 head, const Latent& latent) { heads.store_latent(head, latent, scale); });
  } else if (quantised) {
    for (i32 head = first_head + warp; head < end_head; head += warps) {
      heads.store_latent_by_element(head, scale);
    }
  }
  const u8* angles = find_angles(p.rope, p.q_table, position.value(p.position_bytes));
  if (by_ropes) {
    const typename Heads::Angles own(p.rope, angles, lane % kGroupLanes * kRopeRun / 2);
    ropes.run(load_ropes, [&](i32 first, const Rope& rope) {
      heads.store_ropes(first, end_head, rope, angles != nullptr, own, scale);
    });
  } else {
    for (i32 head = first_head + warp; head < end_head; head += warps) {
      heads.store_rope_by_pair(head, angles, scale);
    }
  }
}

}  // namespace cupy_mla
