// Keys that a warp norms, rotates and stores one after the other.

#pragma once

#include "keys.cuh"
#include "norm.cuh"
#include "rope.cuh"
#include "types.cuh"

namespace cupy_mla {

// What a warp needs for each of its keys. `Format` says how a cache stores values (copy_values.cuh,
// flat_fp8_values.cuh, ds_mla_values.cuh).
//
// Latent parts of kWideRow elements at addresses of vector alignment, inputs and caches, stay in
// registers; all others go by element, with the same sums.
template <class Format>
struct KeyRows {
  using Input = typename Format::Input;

  const KeyNorm& norm;
  const SharedWeights& weights;  // of latent parts of kWideRow elements
  const u8* weight;              // of others
  i32 lane;
  bool from_vectors;  // of kWideRow elements each
  bool to_vectors;
  Format format;

  // Loads a key, but for its angles: where these are, a position has to say first.
  __device__ __forceinline__ void load(const u8* latent, const u8* rope,
                                       KeyFragment<Input>& fragment) const {
    if (from_vectors) {
      load_run(latent, lane, fragment);
    } else if constexpr (Format::kTiled) {
      load_run_by_element(latent, lane, fragment);
    }
    if (lane < norm.rope.half) load_elements<Input>(norm.rope, rope, lane, fragment.pair);
  }

  __device__ __forceinline__ void load_angles(const u8* angles,
                                              KeyFragment<Input>& fragment) const {
    if (lane < norm.rope.half && angles != nullptr) {
      load_angle(norm.rope, angles, lane, fragment.pair);
    }
  }

  // Works on the latent part; it goes to `to`, the row, unless that is null. The observer is shown
  // what is stored before it is rounded: observer.run(values) a lane's run, observer.element(i,
  // value) what else a lane has of it.
  template <class Observer>
  __device__ __forceinline__ void store_latent(const u8* latent, const KeyFragment<Input>& fragment,
                                               u8* to, const Observer& observer) const {
    // Tiles are always of whole runs, which flat rows are at this width and alignment alone.
    const bool by_runs =
        Format::kTiled || (from_vectors && (to == nullptr || (to_vectors && format.takes_runs())));
    if (by_runs) {
      float values[kRun];
      widen_vectors<Input>(fragment.latent, values);
      norm_run<Input>(norm, weights, lane, values);
      if (to != nullptr) format.store_run(values, to, lane, to_vectors);
      observer.run(values);
    }
    if constexpr (!Format::kTiled) {
      if (!by_runs) {
        norm_by_element<Input>(norm, latent, weight, lane, [&](i32 i, float value) {
          if (to != nullptr) format.store_element(value, i, to);
          observer.element(i, value);
        });
      }
    }
  }

  // The same for the rotary part: observer.pair(places, a, b) a pair.
  template <class Observer>
  __device__ __forceinline__ void store_rope(const u8* rope, const u8* angles,
                                             const KeyFragment<Input>& fragment, u8* to,
                                             const Observer& observer) const {
    u8* rope_to = to == nullptr ? nullptr : Format::rope_of(to, norm.lora_rank);
    rotate_key<Input>(norm, angles, rope, fragment.pair, lane,
                      [&](const PairPlaces& places, float a, float b) {
                        if (rope_to != nullptr) {
                          format.store_pair(a, b, places.first, places.second, rope_to);
                        }
                        observer.pair(places, a, b);
                      });
  }
};

}  // namespace cupy_mla
