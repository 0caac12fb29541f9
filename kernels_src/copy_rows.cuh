// Rows of 16- and 32-bit floats: [latent | rope], bit for bit.

#pragma once

#include "rows.cuh"

namespace cupy_mla {

template <class InputType>
struct CopyRows {
  using Input = InputType;
  static constexpr bool kLayerScale = false;
  static constexpr int kUnit = kVectorElements<Input>;
  using Cursor = UnitCursor<Input, kUnit>;

  // What one thread holds of one row: a unit.
  struct Fragment {
    uint4 data[1];
  };

  bool streaming;

  CopyRows() = default;
  __device__ __forceinline__ CopyRows(float, bool, bool streaming) : streaming(streaming) {}

  __device__ __forceinline__ bool takes_vectors() const { return true; }

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
    store_vector(destination + unit * kVectorBytes, fragment.data[0], streaming);
  }

  __device__ __forceinline__ void count(const Fragment& fragment, Tally& tally) const {
    tally.nonfinite += count_nonfinite<Input>(fragment.data);
  }

  // The same bytes from and to any alignment, by the threads of the row in turn.
  __device__ __forceinline__ void store_by_element(const LayerRows& rows, i32 token,
                                                   u8* destination, Tally& tally) const {
    using Bits = typename Input::Bits;
    for (i32 i = threadIdx.x; i < rows.lora_rank + rows.rope_dim; i += blockDim.x) {
      const Bits bits = rows.element<Bits>(token, i);
      tally.nonfinite += is_nonfinite<Input>(bits);
      reinterpret_cast<Bits*>(destination)[i] = bits;
    }
  }
};

}  // namespace cupy_mla
