// float32 values as rows of fp8 with one scale a layer: [latent | rope], a byte an element.

#pragma once

#include "fp8.cuh"
#include "norm.cuh"
#include "numbers.cuh"
#include "types.cuh"

namespace cupy_mla {

// Divides by a scale of any size.
template <int kCount>
__device__ __forceinline__ void divide_all(const Divider<false>& divider, float (&values)[kCount]) {
  if (!divider.is_usual()) {
#pragma unroll
    for (float& value : values) value = divider.bring_near(value);
  }
#pragma unroll
  for (float& value : values) value = divider.divide(value);
}

template <class Code, class InputType>
struct FlatFp8Values {
  using Input = InputType;
  static constexpr bool kLayerScale = true;
  static constexpr bool kSaturates = true;

  Divider<false> divider;
  bool streaming;

  __device__ __forceinline__ FlatFp8Values(float scale, bool, bool streaming)
      : divider(scale), streaming(streaming) {}

  __device__ __forceinline__ static u8* rope_of(u8* row, i32 lora_rank) { return row + lora_rank; }

  // Four codes, the first one in the lowest byte.
  __device__ __forceinline__ u32 encode(float a, float b, float c, float d) const {
    float quotients[4] = {a, b, c, d};
    divide_all(divider, quotients);
    return Code::encode(quotients);
  }

  // The lane's run of a latent part of kWideRow elements at an address of vector alignment.
  __device__ __forceinline__ void store_run(const float (&values)[kRun], u8* latent,
                                            i32 lane) const {
    u32 codes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      codes[i] = encode(values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]);
    }
    store_vector(latent + lane * kRun, {codes[0], codes[1], codes[2], codes[3]}, streaming);
  }

  // The first `count` values from element `first` on, at any address.
  __device__ __forceinline__ void store_run_by_element(const float (&values)[kRun], i32 first,
                                                       i32 count, u8* latent) const {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      if (i < count) latent[first + i] = static_cast<u8>(encode(values[i], 0.0f, 0.0f, 0.0f));
    }
  }

  __device__ __forceinline__ void store_pair(float a, float b, i32 first, i32 second,
                                             u8* rope) const {
    const u32 codes = encode(a, b, 0.0f, 0.0f);
    store_two<u8>(rope, first, second, codes & 0xFFu, codes >> 8 & 0xFFu);
  }

  // Divides once more: statistics then cost nothing where nobody wants them.
  __device__ __forceinline__ bool is_saturated(float value) const {
    return cupy_mla::is_saturated<Code>(divider.divide(divider.bring_near(value)));
  }
};

}  // namespace cupy_mla
