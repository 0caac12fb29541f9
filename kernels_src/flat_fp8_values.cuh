// float32 values as rows of fp8 with one scale a layer: [latent | rope], a byte an element.

#pragma once

#include "quotients.cuh"
#include "norm.cuh"
#include "numbers.cuh"
#include "types.cuh"

namespace cupy_mla {

template <class Code, class InputType>
struct FlatFp8Values {
  using Input = InputType;
  static constexpr bool kLayerScale = true;
  static constexpr bool kTiled = false;

  Divider<false> divider;
  bool streaming;

  FlatFp8Values() = default;
  __device__ __forceinline__ FlatFp8Values(float scale, bool, bool streaming)
      : divider(scale), streaming(streaming) {}

  __device__ __forceinline__ static u8* rope_of(u8* row, i32 lora_rank) { return row + lora_rank; }

  // The lane's run of a latent part of kWideRow elements at an address of vector alignment.
  __device__ __forceinline__ void store_run(const float (&values)[kRun], u8* latent, i32 lane,
                                            bool) const {
    u32 codes[kRun / 4];
    encode_quotients<Code>(divider, values, codes);
    store_vector(latent + lane * kRun, {codes[0], codes[1], codes[2], codes[3]}, streaming);
  }

  __device__ __forceinline__ void store_element(float value, i32 i, u8* latent) const {
    u32 codes[1];
    encode_quotients<Code>(divider, {value, 0.0f, 0.0f, 0.0f}, codes);
    latent[i] = static_cast<u8>(codes[0]);
  }

  __device__ __forceinline__ void store_pair(float a, float b, i32 first, i32 second,
                                             u8* rope) const {
    u32 codes[1];
    encode_quotients<Code>(divider, {a, b, 0.0f, 0.0f}, codes);
    store_two<u8>(rope, first, second, codes[0] & 0xFFu, codes[0] >> 8 & 0xFFu);
  }

  // Divides once more: statistics then cost nothing where nobody wants them.
  __device__ __forceinline__ bool is_saturated(float value) const {
    return cupy_mla::is_saturated<Code>(divider.divide(divider.bring_near(value)));
  }
};

}  // namespace cupy_mla
