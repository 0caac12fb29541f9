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

// What a lane loads of a key before anything is computed: its run of a latent part of kWideRow
// elements, and its first pair.
template <class Input>
struct KeyFragment {
  uint4 latent[kRun / kVectorElements<Input>];
  PairBits pair;
};

// From an address of vector alignment.
template <class Input>
__device__ __forceinline__ void load_run(const u8* latent, i32 lane, KeyFragment<Input>& fragment) {
  const u8* source = latent + lane * i64{kRun * sizeof(typename Input::Bits)};
#pragma unroll
  for (int i = 0; i < kRun / kVectorElements<Input>; ++i) {
    fragment.latent[i] = load_vector(source + i * kVectorBytes);
  }
}

// From any address; of elements of 16 bits.
template <class Input>
__device__ __forceinline__ void load_run_by_element(const u8* latent, i32 lane,
                                                    KeyFragment<Input>& fragment) {
  const auto* elements = reinterpret_cast<const u16*>(latent) + lane * kRun;
  u32 words[kRun / 2];
#pragma unroll
  for (int i = 0; i < kRun / 2; ++i) {
    words[i] = elements[2 * i] | static_cast<u32>(elements[2 * i + 1]) << 16;
  }
  fragment.latent[0] = {words[0], words[1], words[2], words[3]};
  fragment.latent[1] = {words[4], words[5], words[6], words[7]};
}

template <class Input>
__device__ __forceinline__ float round_if_staged(const KeyNorm& norm, float value) {
  return norm.staged ? rounded<Input>(value) : value;
}

template <class Input, int kCount>
__device__ __forceinline__ void round_if_staged(const KeyNorm& norm, float (&values)[kCount]) {
  if (!norm.staged) return;
#pragma unroll
  for (float& value : values) value = rounded<Input>(value);
}

// RMSNorm of a latent part of kWideRow elements, of which the lane has a run.
template <class Input>
__device__ __forceinline__ void norm_run(const KeyNorm& norm, const SharedWeights& weights,
                                         i32 lane, float (&values)[kRun]) {
  const float sum = sum_over_lanes(add_squares(0.0f, values));
  weights.scale(values, reciprocal_root_of_wide_row(sum, norm.eps), lane);
  round_if_staged<Input>(norm, values);
}

// The same for any width and any address: calls store(i, y) for the elements that the lane has.
template <class Input, class Store>
__device__ __forceinline__ void norm_by_element(const KeyNorm& norm, const u8* latent,
                                                const u8* weight, i32 lane, Store store) {
  rms_norm_by_element<Input>(
      latent, norm.lora_rank, weight, norm.weight_type, norm.eps, lane,
      [&](i32 i, float value) { store(i, round_if_staged<Input>(norm, value)); });
}

// Calls visit(places, a, b) for the rotated pairs that a lane has.
template <class Input, class Visit>
__device__ __forceinline__ void rotate_key(const KeyNorm& norm, const u8* angles, const u8* rope,
                                           const PairBits& first, i32 lane, Visit visit) {
  for_each_pair<Input>(
      norm.rope, angles, rope, first, lane, [&](const PairPlaces& places, float a, float b) {
        visit(places, round_if_staged<Input>(norm, a), round_if_staged<Input>(norm, b));
      });
}

}  // namespace cupy_mla
