// A token's key in one layer: RMSNorm of its latent part, RoPE of its rotary part, by a warp.

#pragma once

#include "norm.cuh"
#include "numbers.cuh"
#include "rope.cuh"
#include "rows.cuh"
#include "types.cuh"

namespace cupy_mla {

// What all keys of a launch have in common.
struct KeyNorm {
  i64 weight_stride;  // bytes from a layer's weights to the next one's
  i32 weight_type;    // NumberType
  i32 lora_rank;
  float eps;
  i32 staged;  // 1: rounded to the input's type after the norm and after RoPE, too
  RopeTable rope;
};

// The two parts of a key, and the angles of its position: null where the table has no such.
struct KeyRow {
  const u8* latent;
  const u8* rope;
  const u8* angles;
};

// What a lane loads of a key before anything is computed: its run of a latent part of kWideRow
// elements from an address of vector alignment, and its first pair.
template <class Input>
struct KeyFragment {
  uint4 latent[kRun / kVectorElements<Input>];
  PairBits pair;
};

template <class Input>
__device__ __forceinline__ PairBits load_first_pair(const KeyNorm& norm, const KeyRow& row,
                                                    i32 lane) {
  if (lane >= norm.rope.width / 2) return {};
  return load_pair<Input>(norm.rope, row.angles, row.rope, lane);
}

template <class Input>
__device__ __forceinline__ KeyFragment<Input> load_key(const KeyNorm& norm, const KeyRow& row,
                                                       i32 lane) {
  KeyFragment<Input> fragment;
  const u8* source = row.latent + lane * i64{kRun * sizeof(typename Input::Bits)};
#pragma unroll
  for (int i = 0; i < kRun / kVectorElements<Input>; ++i) {
    fragment.latent[i] = load_vector(source + i * kVectorBytes);
  }
  fragment.pair = load_first_pair<Input>(norm, row, lane);
  return fragment;
}

template <class Input, int kCount>
__device__ __forceinline__ void round_if_staged(const KeyNorm& norm, float (&values)[kCount]) {
  if (!norm.staged) return;
#pragma unroll
  for (float& value : values) value = rounded<Input>(value);
}

// The lane's run of the normed latent part.
template <class Input>
__device__ __forceinline__ void norm_run(const KeyNorm& norm, const KeyFragment<Input>& fragment,
                                         const float (&weight)[kRun], float (&values)[kRun]) {
  for_each_quad<Input>(fragment.latent, [&](int i, const float (&four)[4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) values[4 * i + j] = four[j];
  });
  const float sum = sum_over_lanes(add_squares(0.0f, values));
  scale_values(values, reciprocal_root_of_wide_row(sum, norm.eps), weight);
  round_if_staged<Input>(norm, values);
}

// The same for any width and any address: calls store(first, count, values) run by run.
template <class Input, class Store>
__device__ __forceinline__ void norm_by_element(const KeyNorm& norm, const u8* latent,
                                                const u8* weight, i32 lane, Store store) {
  rms_norm_by_element<Input>(latent, norm.lora_rank, weight, norm.weight_type, norm.eps, lane,
                             [&](i32 first, i32 count, float (&values)[kRun]) {
                               round_if_staged<Input>(norm, values);
                               store(first, count, values);
                             });
}

// Calls visit(places, a, b) for the rotated pairs that a lane has.
template <class Input, class Visit>
__device__ __forceinline__ void rotate_key(const KeyNorm& norm, const KeyRow& row,
                                           const PairBits& first, i32 lane, Visit visit) {
  for_each_pair<Input>(norm.rope, row.angles, row.rope, first, lane,
                       [&](const PairPlaces& places, float a, float b) {
                         float pair[2] = {a, b};
                         round_if_staged<Input>(norm, pair);
                         visit(places, pair[0], pair[1]);
                       });
}

}  // namespace cupy_mla
