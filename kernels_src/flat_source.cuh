// Rows of one dtype as rows of an output dtype: RNE(float32(code) * scale) for fp8, else one
// rounding.
//
// A unit is what makes one vector of output, so that every store fills whole sectors, and a load
// asks for as few bytes as belong to it: 4 for float32 from fp8, 32 for 16 bits from float32.

#pragma once

#include "elements.cuh"
#include "read_params.cuh"
#include "row_places.cuh"

namespace cupy_mla {

// [latent | rope] of one dtype, in fp8 with the layer's scale.
template <class Element, class OutputType>
struct FlatSource {
  using Output = OutputType;
  static constexpr bool kLayerScale = sizeof(typename Element::Bits) == 1;
  static constexpr int kPlanes = 1;
  static constexpr int kUnit = kVectorElements<Output>;
  static constexpr int kUnitBytes = kUnit * sizeof(typename Element::Bits);
  static_assert(!kSame<Element, Output>, "rows of the output's dtype are copied");
  using Fragment = Words<kUnitBytes>;

  float scale;

  __device__ __forceinline__ static bool reads_vectors(const ReadParams& p) {
    return p.width % kUnit == 0 && address_bits(p.source[0]) % kWordsAlignment<kUnitBytes> == 0;
  }

  __device__ __forceinline__ static Fragment load(const u8* row, const u8*, u32 unit) {
    return load_words<kUnitBytes>(row + unit * kUnitBytes);
  }

  __device__ __forceinline__ uint4 decode(const Fragment& fragment, u32) const {
    float values[kUnit];
    widen_words<Element>(fragment, values);
    if constexpr (kLayerScale) {
      for (float& value : values) value = mul_rn_f32(value, scale);
    }
    return narrow_vector<Output>(values);
  }

  __device__ __forceinline__ typename Output::Bits decode_element(const u8* row, const u8*,
                                                                  i32 i) const {
    using Bits = typename Element::Bits;
    const float value = widen_bits<Element>(reinterpret_cast<const Bits*>(row)[i]);
    return narrow<Output>(kLayerScale ? mul_rn_f32(value, scale) : value);
  }
};

}  // namespace cupy_mla
