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

  QuotientScale scale;
  bool streaming;

  FlatFp8Values() = default;
  __device__ __forceinline__ FlatFp8Values(float scale, bool, bool streaming)
      : scale(scale), streaming(streaming) {}

  // Whether store_run() can be used.
  __device__ __forceinline__ bool takes_runs() const { return scale.is_usual(); }

  __device__ __forceinline__ static u8* rope_of(u8* row, i32 lora_rank) { return row + lora_rank; }

  // The lane's run of a latent part of kWideRow elements at an address of vector alignment.
  __device__ __forceinline__ void store_run(const float (&values)[kRun], u8* latent, i32 lane,
                                            bool) const {
    u32 codes[kRun / 4];
#pragma unroll
    for (int i = 0; i < kRun / 4; ++i) {
      const float four[4] = {scale.divide(values[4 * i]), scale.divide(values[4 * i + 1]),
                             scale.divide(values[4 * i + 2]), scale.divide(values[4 * i + 3])};
      codes[i] = Code::encode(four);
    }
    store_vector(latent + lane * kRun, {codes[0], codes[1], codes[2], codes[3]}, streaming);
  }

  __device__ __forceinline__ void store_element(float value, i32 i, u8* latent) const {
    latent[i] = static_cast<u8>(encode_two<Code>(scale, value, 0.0f));
  }

  __device__ __forceinline__ void store_pair(float a, float b, i32 first, i32 second,
                                             u8* rope) const {
    const u32 codes = encode_two<Code>(scale, a, b);
    store_two<u8>(rope, first, second, codes & 0xFFu, codes >> 8 & 0xFFu);
  }

  // Divides once more: statistics then cost nothing where nobody wants them.
  __device__ __forceinline__ bool is_saturated(float value) const {
    return cupy_mla::is_saturated<Code>(scale.divide(scale.bring_near(value)));
  }
};

}  // namespace cupy_mla
