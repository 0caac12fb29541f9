// Rows of e4m3 in tiles as rows of an output dtype: RNE(float32(code) * scale), and a rotary
// part as it is, or rounded once.
//
// A unit is what makes one vector of output, so that every store fills whole sectors, and a load
// asks for as few bytes as belong to it: 4 or 8 codes.

#pragma once

#include "elements.cuh"
#include "read_params.cuh"
#include "row_places.cuh"

namespace cupy_mla {

// e4m3 in tiles with scales of their own, which lie where the second plane says, and bf16 behind
// where the layout has a rotary part.
template <class OutputType>
struct TiledSource {
  using Output = OutputType;
  static constexpr bool kLayerScale = false;
  static constexpr int kPlanes = 2;
  static constexpr int kUnit = kVectorElements<Output>;
  static constexpr int kWords = kUnit / 4;
  static constexpr u32 kLatentUnits = layout::kLoraRank / kUnit;
  static constexpr int kRopeBytes = kUnit * sizeof(Bfloat16::Bits);
  static_assert(layout::kNopeOffset == 0, "codes come first");
  static_assert(layout::kScaleOffset % i32{sizeof(float)} == 0,
                "scales are aligned where codes are");
  static_assert(layout::kTile % kUnit == 0, "no unit straddles two tiles");
  static_assert(layout::kRopeDim % kUnit == 0, "the rotary part is whole units");
  static_assert(layout::kRopeDim == 0 || layout::kRopeOffset % i32{kVectorBytes} == 0,
                "the rotary part can be read as vectors");

  struct Fragment {
    Words<kRopeBytes> words;  // codes fill the first half
    u32 scale;                // bits
  };

  TiledSource() = default;
  __device__ __forceinline__ explicit TiledSource(float) {}

  __device__ __forceinline__ static bool reads_vectors(const ReadParams& p) {
    constexpr u32 kAlignment =
        layout::kRopeDim != 0 ? kWordsAlignment<kRopeBytes> : kWordsAlignment<kUnit>;
    return address_bits(p.source[0]) % kAlignment == 0;
  }

  __device__ __forceinline__ static Fragment load(const u8* row, const u8* scales, u32 unit) {
    // One load for either, and what only one of them has by load_words_now(): a choice between two
    // loads would wait for what was loaded.
    Fragment fragment{};
    const bool is_rope = layout::kRopeDim != 0 && unit >= kLatentUnits;
    const u8* first =
        row + (is_rope ? layout::kRopeOffset + (unit - kLatentUnits) * kRopeBytes : unit * kUnit);
    const Words<kUnit> words = load_words<kUnit>(first);
#pragma unroll
    for (int i = 0; i < kWords; ++i) fragment.words.at[i] = words.at[i];
    u32 unused = 0;
    load_words_now(first + kUnit, is_rope ? kUnit : 0, fragment.words.at[kWords],
                   kWords > 1 ? fragment.words.at[2 * kWords - 1] : unused);
    load_words_now(scales + unit / (layout::kTile / kUnit) * sizeof(float),
                   is_rope ? 0 : sizeof(float), fragment.scale, unused);
    return fragment;
  }

  __device__ __forceinline__ uint4 decode(const Fragment& fragment, u32 unit) const {
    float values[kUnit];
    if (layout::kRopeDim != 0 && unit >= kLatentUnits) {
      if constexpr (kSame<Output, Bfloat16>) {
        const u32(&words)[kRopeBytes / 4] = fragment.words.at;
        return {words[0], words[1], words[2], words[3]};
      }
      widen_words<Bfloat16>(fragment.words, values);
    } else {
      widen_words<E4m3Codes>(fragment.words, values);
      for (float& value : values) value = mul_rn_f32(value, float_of(fragment.scale));
    }
    return narrow_vector<Output>(values);
  }

  __device__ __forceinline__ typename Output::Bits decode_element(const u8* row, const u8* scales,
                                                                  i32 i) const {
    if (layout::kRopeDim != 0 && i >= layout::kLoraRank) {
      const u32 bits = load_unaligned<2>(row + layout::kRopeOffset + (i - layout::kLoraRank) * 2);
      if constexpr (kSame<Output, Bfloat16>) return static_cast<u16>(bits);
      return narrow<Output>(Bfloat16::widen(bits));
    }
    const float scale = float_of(load_unaligned<4>(scales + i / layout::kTile * 4));
    return narrow<Output>(mul_rn_f32(widen_bits<E4m3Codes>(row[i]), scale));
  }
};

}  // namespace cupy_mla
