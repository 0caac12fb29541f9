// query: RoPE and fp8 of the queries of attention and of the indexer.
//
// A thread block takes some heads of one token, either of attention or of the indexer. A warp takes
// a head of attention at a time, or four heads of the indexer, whose rows are short: eight lanes
// each, so that little is done for all lanes alike.

#include "elements.cuh"
#include "exact_math.cuh"
#include "fp8.cuh"
#include "index_rows.cuh"
#include "lanes.cuh"
#include "memory.cuh"
#include "norm.cuh"
#include "numbers.cuh"
#include "paging.cuh"
#include "query_params.cuh"
#include "quotients.cuh"
#include "rope.cuh"
#include "types.cuh"

namespace cupy_mla {

// The rows of an input type.
template <class InputType>
struct QueryRows {
  using Input = InputType;
};

__device__ __forceinline__ bool are_vectors(const u8* array, const HeadStrides& strides) {
  return is_vector_aligned(address_of(array) | strides.token | strides.head);
}

// --- heads of attention
// ---------------------------------------------------------------------------

// What a lane loads of a head before anything is computed: its first run of the latent part, and
// its first pair.
template <class Input>
struct HeadFragment {
  uint4 latent[kRun / kVectorElements<Input>];
  PairBits pair;
};

template <class Input>
struct AttentionHeads {
  using Bits = typename Input::Bits;
  using Fragment = HeadFragment<Input>;

  const QueryParams& p;
  const QuotientScale& scale;
  i32 token;
  i32 lane;
  bool by_vectors;

  __device__ __forceinline__ const u8* latent_of(i32 head) const {
    return p.ql_nope + token * p.ql_nope_strides.token + head * p.ql_nope_strides.head;
  }
  __device__ __forceinline__ const u8* rope_of(i32 head) const {
    return p.q_pe + token * p.q_pe_strides.token + head * p.q_pe_strides.head;
  }

  __device__ __forceinline__ void load_run(const u8* from, i32 run, Fragment& fragment) const {
#pragma unroll
    for (int i = 0; i < kRun / kVectorElements<Input>; ++i) {
      fragment.latent[i] = load_vector(from + run * i64{kRun * sizeof(Bits)} + i * kVectorBytes);
    }
  }

  // All but the angles, which are those of the token.
  __device__ __forceinline__ void load(i32 head, Fragment& fragment) const {
    if (by_vectors && lane < p.lora_rank / kRun) load_run(latent_of(head), lane, fragment);
    if (lane < p.rope.half) load_elements<Input>(p.rope, rope_of(head), lane, fragment.pair);
  }

  // [latent] as codes.
  __device__ __forceinline__ void store_latent(const u8* from, Fragment fragment, u8* to) const {
    if (by_vectors) {
#pragma unroll 1
      for (i32 run = lane; run < p.lora_rank / kRun; run += kLanes) {
        if (run != lane) load_run(from, run, fragment);
        float values[kRun];
        u32 codes[kRun / 4];
        widen_vectors<Input>(fragment.latent, values);
        encode_quotients<E4m3>(scale, values, codes);
        store_vector(to + run * kRun, {codes[0], codes[1], codes[2], codes[3]},
                     p.stream_stores != 0);
      }
    } else {
#pragma unroll 1
      for (i32 i = lane; i < p.lora_rank; i += kLanes) {
        const float value = Input::widen(reinterpret_cast<const Bits*>(from)[i]);
        to[i] = static_cast<u8>(encode_two<E4m3>(scale, value, 0.0f));
      }
    }
  }

  // The rotary part; `bits` holds the lane's first pair and its angle.
  __device__ __forceinline__ void store_rope(const u8* from, const u8* angles, const PairBits& bits,
                                             u8* to, bool quantised) const {
    for_each_pair<Input>(
        p.rope, angles, from, bits, lane, [&](const PairPlaces& places, float a, float b) {
          if (quantised) {
            const u32 codes = encode_two<E4m3>(scale, a, b);
            store_two<u8>(to, places.first, places.second, codes & 0xFFu, codes >> 8 & 0xFFu);
          } else {
            store_two<Bits>(to, places.first, places.second, narrow<Input>(a), narrow<Input>(b));
          }
        });
  }
};

template <class Input>
__device__ __forceinline__ void store_attention(const QueryParams& p, i32 token, i32 block,
                                                const LoadedIndex& position) {
  const i32 lane = static_cast<i32>(threadIdx.x);
  const i32 step = static_cast<i32>(blockDim.y);
  const bool quantised = p.ql_nope != nullptr;
  const bool by_vectors = quantised && p.lora_rank % kRun == 0 &&
                          are_vectors(p.ql_nope, p.ql_nope_strides) &&
                          are_vectors(p.mqa_out, p.mqa_strides);
  QuotientScale scale;
  const AttentionHeads<Input> heads = {p, scale, token, lane, by_vectors};
  const i32 end_head = min((block + 1) * p.mqa_block_heads, p.heads);
  i32 head = block * p.mqa_block_heads + static_cast<i32>(threadIdx.y);

  // Everything is asked for before anything is looked at. Angles alone have to wait for a position.
  HeadFragment<Input> fragment;
  if (head < end_head) heads.load(head, fragment);
  if (quantised) scale = QuotientScale(p.q_scale != nullptr ? *p.q_scale : p.scale_value);
  const u8* angles = find_angles(p.rope, p.q_table, position.value(p.position_bytes));
  PairBits angle{};
  if (lane < p.rope.half && angles != nullptr) load_angle(p.rope, angles, lane, angle);

  for (; head < end_head; head += step) {
    // The next one is on its way while this one is worked on.
    HeadFragment<Input> next;
    if (head + step < end_head) heads.load(head + step, next);
    u8* to = p.mqa_out + token * p.mqa_strides.token + head * p.mqa_strides.head;
    if (quantised) {
      heads.store_latent(heads.latent_of(head), fragment, to);
      to += p.lora_rank;
    }
    const PairBits bits = {fragment.pair.first, fragment.pair.second, angle.cos, angle.sin};
    heads.store_rope(heads.rope_of(head), angles, bits, to, quantised);
    fragment = next;
  }
}

// --- heads of the indexer
// -------------------------------------------------------------------------

// Heads that a warp takes at a time, and the lanes that share one.
constexpr i32 kGroups = 4;
constexpr i32 kGroupLanes = kLanes / kGroups;
// The only head that is worked on in registers: half of it is rotated.
constexpr i32 kHeadWidth = 128;
constexpr i32 kHeadHalf = 32;
constexpr int kGroupPairs = kHeadHalf / kGroupLanes;
constexpr int kGroupRest = (kHeadWidth - 2 * kHeadHalf) / kGroupLanes;

template <class Input>
struct IndexHeads {
  using Bits = typename Input::Bits;

  const QueryParams& p;
  i32 token;
  const u8* angles;
  i32 lane;

  __device__ __forceinline__ const u8* source(i32 head) const {
    return p.index_q + token * p.index_q_strides.token + head * p.index_q_strides.head;
  }

  __device__ __forceinline__ u8* destination(i32 head) const {
    return p.index_out + token * p.index_strides.token + head * p.index_strides.head;
  }

  // Makes up for the scale that the codes were divided by.
  __device__ __forceinline__ void store_weight(i32 head, float scale) const {
    const float weight =
        load_number(p.index_weights + token * p.weights_stride, p.weights_type, head);
    const float product =
        mul_rn_f32(mul_rn_f32(mul_rn_f32(weight, scale), p.softmax_scale), p.head_scale);
    u8* row = p.weights_out + token * p.weights_out_stride;
    reinterpret_cast<u32*>(row)[head] = canonical_f32(product);
  }

  // Heads first to first + 3 of those before `end`, of kHeadWidth elements, 2 * kHeadHalf of them
  // rotated, at addresses of vector alignment. `cos` and `sin` are those of the lane's pairs.
  __device__ __forceinline__ void store_group(i32 first, i32 end, const float (&cos)[kGroupPairs],
                                              const float (&sin)[kGroupPairs]) const {
    const i32 place = lane % kGroupLanes;
    const i32 head = first + lane / kGroupLanes;
    const bool in_halves = p.index_rope.step == 1;
    // As pairs: a[i] and b[i] are rotated together, whichever way they lie in memory.
    float a[kGroupPairs] = {};
    float b[kGroupPairs] = {};
    float rest[kGroupRest] = {};
    if (head < end) {
      const u8* row = source(head);
      const auto at = [&](i32 element) { return row + element * i64{sizeof(Bits)}; };
      if (angles != nullptr) {
        float low[kGroupPairs];
        float high[kGroupPairs];
        const i32 element = place * kGroupPairs;
        load_values<Input>(at(in_halves ? element : 2 * element), low);
        load_values<Input>(at(in_halves ? element + kHeadHalf : 2 * element + kGroupPairs), high);
        arrange(in_halves, low, high, a, b);
#pragma unroll
        for (int i = 0; i < kGroupPairs; ++i) rotate(a[i], b[i], cos[i], sin[i]);
      }
      load_values<Input>(at(2 * kHeadHalf + place * kGroupRest), rest);
    }
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < kGroupPairs; ++i) {
      amax = max_f32(amax, max_f32(abs_f32(a[i]), abs_f32(b[i])));
    }
#pragma unroll
    for (int i = 0; i < kGroupRest; ++i) amax = max_f32(amax, abs_f32(rest[i]));
    const float scale = index_scale(max_over_lanes<kGroupLanes>(amax), true);
    if (head >= end) return;
    const QuotientScale quotients(scale);
    float low[kGroupPairs];
    float high[kGroupPairs];
    u32 low_codes[1];
    u32 high_codes[1];
    u32 rest_codes[2];
    disarrange(in_halves, a, b, low, high);
    encode_quotients<E4m3>(quotients, low, low_codes);
    encode_quotients<E4m3>(quotients, high, high_codes);
    encode_quotients<E4m3>(quotients, rest, rest_codes);
    u8* to = destination(head);
    const i32 element = place * kGroupPairs;
    *reinterpret_cast<u32*>(to + (in_halves ? element : 2 * element)) = low_codes[0];
    *reinterpret_cast<u32*>(to + (in_halves ? element + kHeadHalf : 2 * element + kGroupPairs)) =
        high_codes[0];
    *reinterpret_cast<u64*>(to + 2 * kHeadHalf + place * kGroupRest) =
        rest_codes[0] | static_cast<u64>(rest_codes[1]) << 32;
    if (place == 0) store_weight(head, scale);
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
  __device__ __forceinline__ float value(const u8* row, i32 i) const {
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
  __device__ __forceinline__ void store_by_element(i32 head) const {
    const u8* row = source(head);
    float amax = 0.0f;
#pragma unroll 1
    for (i32 i = lane; i < p.index_width; i += kLanes) amax = max_f32(amax, abs_f32(value(row, i)));
    const float scale = index_scale(max_over_lanes<kLanes>(amax), true);
    const QuotientScale quotients(scale);
    u8* to = destination(head);
#pragma unroll 1
    for (i32 i = lane; i < p.index_width; i += kLanes) {
      to[i] = static_cast<u8>(encode_two<E4m3>(quotients, value(row, i), 0.0f));
    }
    if (lane == 0) store_weight(head, scale);
  }
};

template <class Input>
__device__ __forceinline__ void store_indexer(const QueryParams& p, i32 token, i32 block,
                                              const LoadedIndex& position) {
  const u8* angles = find_angles(p.index_rope, p.index_table, position.value(p.position_bytes));
  const i32 lane = static_cast<i32>(threadIdx.x);
  const i32 warp = static_cast<i32>(threadIdx.y);
  const i32 warps = static_cast<i32>(blockDim.y);
  const IndexHeads<Input> heads = {p, token, angles, lane};
  const i32 first_head = block * p.index_block_heads;
  const i32 end_head = min(first_head + p.index_block_heads, p.index_heads);
  const bool by_groups = p.index_width == kHeadWidth && p.index_rope.half == kHeadHalf &&
                         are_vectors(p.index_q, p.index_q_strides) &&
                         are_vectors(p.index_out, p.index_strides);
  if (by_groups) {
    float cos[kGroupPairs] = {};
    float sin[kGroupPairs] = {};
    if (angles != nullptr) {
      const u32 bytes = number_bytes(p.index_rope.type);
      const u8* own = angles + lane % kGroupLanes * kGroupPairs * bytes;
      load_numbers(own, p.index_rope.type, cos);
      load_numbers(own + kHeadHalf * bytes, p.index_rope.type, sin);
    }
    for (i32 head = first_head + warp * kGroups; head < end_head; head += warps * kGroups) {
      heads.store_group(head, end_head, cos, sin);
    }
  } else {
    for (i32 head = first_head + warp; head < end_head; head += warps) heads.store_by_element(head);
  }
}

template <class Format>
__device__ __forceinline__ void query(const QueryParams& p) {
  using Input = typename Format::Input;
  const i32 token = static_cast<i32>(divide(blockIdx.x, p.token_blocks));
  const i32 block = static_cast<i32>(blockIdx.x - token * p.token_blocks.value);
  const LoadedIndex position = load_index({p.positions, p.position_bytes}, token, p.position_bytes);
  if (block < p.mqa_blocks) {
    store_attention<Input>(p, token, block, position);
  } else {
    store_indexer<Input>(p, token, block - p.mqa_blocks, position);
  }
}

}  // namespace cupy_mla
