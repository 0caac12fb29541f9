// Rows of fp8 with one scale a layer: [latent | rope], a byte an element.

#pragma once

#include "fp8.cuh"
#include "quotients.cuh"
#include "rows.cuh"

namespace cupy_mla {

template <class Code, class InputType>
struct FlatFp8Rows {
  using Input = InputType;
  static constexpr bool kLayerScale = true;
  static constexpr int kUnit = kVectorBytes;
  static constexpr int kLoads = kUnit / kVectorElements<Input>;
  using Cursor = UnitCursor<Input, kUnit>;

  // What one thread holds of one row: the elements of one vector of codes.
  struct Fragment {
    uint4 data[kLoads];
  };

  QuotientScale scale;
  bool streaming;

  FlatFp8Rows() = default;
  __device__ __forceinline__ FlatFp8Rows(float scale, bool, bool streaming)
      : scale(scale), streaming(streaming) {}

  __device__ __forceinline__ bool takes_vectors() const { return scale.is_usual(); }

  __device__ __forceinline__ static bool has_whole_units(i32 lora_rank, i32 rope_dim) {
    return (lora_rank | rope_dim) % kUnit == 0;
  }

  __device__ __forceinline__ static u32 units(i32 lora_rank, i32 rope_dim) {
    return static_cast<u32>(lora_rank + rope_dim) / kUnit;
  }

  __device__ __forceinline__ static Fragment load(const Cursor& cursor, i32 token) {
    Fragment fragment;
    cursor.load(token, fragment.data);
    return fragment;
  }

  __device__ __forceinline__ void store(const Fragment& fragment, u8* destination, u32 unit) const {
    u32 codes[4];
    for_each_quad<Input>(fragment.data, [&](int i, float (&values)[4]) {
      for (float& value : values) value = scale.divide(value);
      codes[i] = Code::encode(values);
    });
    store_vector(destination + unit * kUnit, {codes[0], codes[1], codes[2], codes[3]}, streaming);
  }

  // Divides once more: statistics then cost nothing where nobody wants them.
  __device__ __forceinline__ void count(const Fragment& fragment, Tally& tally) const {
    tally.nonfinite += count_nonfinite<Input>(fragment.data);
    for_each_quad<Input>(fragment.data, [&](int, float (&values)[4]) {
      for (float value : values) tally.saturated += is_saturated<Code>(scale.divide(value));
    });
  }

  // The same bytes from and to any alignment and by any scale, by the threads of the row in turn.
  __device__ __forceinline__ void store_by_element(const LayerRows& rows, i32 token,
                                                   u8* destination, Tally& tally) const {
    for (i32 i = threadIdx.x; i < rows.lora_rank + rows.rope_dim; i += blockDim.x) {
      const u32 bits = rows.element<typename Input::Bits>(token, i);
      const float quotient = scale.divide(scale.bring_near(Input::widen(bits)));
      tally.nonfinite += is_nonfinite<Input>(bits);
      tally.saturated += is_saturated<Code>(quotient);
      destination[i] = static_cast<u8>(Code::encode({quotient, 0.0f, 0.0f, 0.0f}));
    }
  }
};

}  // namespace cupy_mla
