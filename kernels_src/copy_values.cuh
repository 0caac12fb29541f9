// float32 values as rows of 16- and 32-bit floats: [latent | rope].

#pragma once

#include "elements.cuh"
#include "lanes.cuh"
#include "norm.cuh"
#include "numbers.cuh"
#include "types.cuh"

namespace cupy_mla {

template <class InputType>
struct CopyValues {
  using Input = InputType;
  using Bits = typename Input::Bits;
  static constexpr bool kLayerScale = false;
  static constexpr bool kTiled = false;

  bool streaming;

  CopyValues() = default;
  __device__ __forceinline__ CopyValues(float, bool, bool streaming) : streaming(streaming) {}

  // Whether store_run() can be used.
  __device__ __forceinline__ bool takes_runs() const { return true; }

  __device__ __forceinline__ static u8* rope_of(u8* row, i32 lora_rank) {
    return row + lora_rank * i64{sizeof(Bits)};
  }

  // The lane's run of a latent part of kWideRow elements at an address of vector alignment.
  __device__ __forceinline__ void store_run(const float (&values)[kRun], u8* latent, i32 lane,
                                            bool) const {
    constexpr int kElements = kVectorElements<Input>;
    uint4 vectors[kRun / kElements];
#pragma unroll
    for (int i = 0; i < kRun / kElements; ++i) {
      vectors[i] = pack_vector<Input>(values, i * kElements);
    }
    store_by_pairs(latent + lane * i64{kRun * sizeof(Bits)}, vectors, lane, streaming);
  }

  __device__ __forceinline__ void store_element(float value, i32 i, u8* latent) const {
    reinterpret_cast<Bits*>(latent)[i] = narrow<Input>(value);
  }

  __device__ __forceinline__ void store_pair(float a, float b, i32 first, i32 second,
                                             u8* rope) const {
    store_two<Bits>(rope, first, second, narrow<Input>(a), narrow<Input>(b));
  }

  __device__ __forceinline__ bool is_saturated(float) const { return false; }
};

}  // namespace cupy_mla
