// fp8_ds_mla rows: e4m3 latent in tiles | a float32 scale a tile | bf16 rope, bit for bit.
//
// A warp stores a row: a lane holds 16 consecutive latent elements, so eight lanes share a tile,
// and the first lanes hold the rope part too.

#pragma once

#include "fp8.cuh"
#include "quotients.cuh"
#include "rows.cuh"

namespace cupy_mla {

struct DsMlaRows {
  using Input = Bfloat16;
  static constexpr bool kLayerScale = false;
  static constexpr u32 kWarp = 32;
  static constexpr u32 kAllLanes = 0xFFFFFFFFu;
  static constexpr int kUnit = 16;
  static constexpr int kLoads = kUnit / kVectorElements<Input>;
  static constexpr u32 kTileLanes = layout::kTile / kUnit;
  static constexpr u32 kRopeLanes = layout::kRopeDim / kVectorElements<Input>;

  static_assert(layout::kLoraRank == layout::kTiles * layout::kTile, "tiles cover the latent part");
  static_assert(layout::kNopeOffset == 0, "codes come first");
  static_assert(layout::kScaleOffset == layout::kLoraRank, "scales follow the codes");
  static_assert(layout::kRopeOffset == layout::kScaleOffset + layout::kTiles * 4,
                "the rope part follows the scales");
  static_assert(layout::kRowBytes == layout::kRopeOffset + layout::kRopeDim * 2,
                "the rope part ends the row");
  static_assert(layout::kLoraRank == kWarp * kUnit, "a warp holds the latent part");
  static_assert(layout::kTiles * 4 == kVectorBytes, "one vector holds the scales");
  static_assert(kRopeLanes < kWarp && layout::kRowBytes % kVectorBytes == 0,
                "the tail is whole vectors");

  // Where a lane's share lies in every token's row.
  struct Cursor {
    LayerRows rows;
    u32 lane;

    __device__ __forceinline__ Cursor(const LayerRows& rows, u32 lane) : rows(rows), lane(lane) {
      this->rows.latent += lane * kUnit * sizeof(Input::Bits);
      this->rows.rope += lane * kVectorBytes;
    }
  };

  // What one lane holds of one row.
  struct Fragment {
    uint4 latent[kLoads];
    uint4 rope[1];  // of lanes below kRopeLanes
  };

  // The latent part as a lane stores it.
  struct Encoded {
    u32 codes[4];
    float scale;  // of the lane's tile
  };

  bool scale_ue8m0;
  bool streaming;

  DsMlaRows() = default;
  __device__ __forceinline__ DsMlaRows(float, bool scale_ue8m0, bool streaming)
      : scale_ue8m0(scale_ue8m0), streaming(streaming) {}

  __device__ __forceinline__ bool takes_vectors() const { return true; }

  __device__ __forceinline__ static bool has_whole_units(i32, i32) { return true; }

  __device__ __forceinline__ static u32 units(i32, i32) { return kWarp; }

  __device__ __forceinline__ static Fragment load(const Cursor& cursor, i32 token) {
    Fragment fragment{};
    const u8* latent = cursor.rows.latent_of(token);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      fragment.latent[i] = load_vector(latent + i * kVectorBytes);
    }
    if (cursor.lane < kRopeLanes) fragment.rope[0] = load_vector(cursor.rows.rope_of(token));
    return fragment;
  }

  // The scale of a tile by its largest magnitude, which is never NaN.
  __device__ __forceinline__ float tile_scale(float amax) const {
    constexpr float kLeast = 0x1p-126f;      // no division of 0 by 0 in a tile of zeros
    constexpr float kLeastUe8m0 = 0x1p-13f;  // not below 1e-4
    if (scale_ue8m0) return amax_power_of_two(amax, kLeastUe8m0);
    return amax_scale(amax, kLeast);
  }

  // Encodes the latent part; all lanes of the warp take part, each with its own elements.
  __device__ __forceinline__ Encoded encode(const uint4 (&latent)[kLoads]) const {
    float amax = 0.0f;
    for_each_quad<Input>(latent, [&](int, const float (&values)[4]) {
#pragma unroll
      for (float value : values) amax = max_f32(amax, abs_f32(value));
    });
#pragma unroll
    for (u32 step = kTileLanes / 2; step > 0; step /= 2) {
      amax = max_f32(amax, __shfl_xor_sync(kAllLanes, amax, step));
    }
    Encoded encoded;
    encoded.scale = tile_scale(amax);
    const QuotientScale divisor(encoded.scale);
    for_each_quad<Input>(latent, [&](int i, const float (&values)[4]) {
      float quotients[4];
      divisor.divide_all(values, quotients);
      encoded.codes[i] = E4m3::encode(quotients);
    });
    return encoded;
  }

  // The scales of all tiles, in every lane.
  __device__ __forceinline__ static uint4 collect_scales(float scale) {
    const u32 bits = bits_of(scale);
    return {
        __shfl_sync(kAllLanes, bits, 0 * kTileLanes), __shfl_sync(kAllLanes, bits, 1 * kTileLanes),
        __shfl_sync(kAllLanes, bits, 2 * kTileLanes), __shfl_sync(kAllLanes, bits, 3 * kTileLanes)};
  }

  __device__ __forceinline__ void store(const Fragment& fragment, u8* destination, u32 lane) const {
    const Encoded encoded = encode(fragment.latent);
    const u32(&codes)[4] = encoded.codes;
    store_vector(destination + lane * kVectorBytes, {codes[0], codes[1], codes[2], codes[3]},
                 streaming);
    // One store for the scales and the rope part behind them: a row is not a whole number of
    // 32-byte sectors, and two stores would touch the sector that they share twice.
    const uint4 scales = collect_scales(encoded.scale);
    if (lane <= kRopeLanes) {
      const bool has_rope = lane < kRopeLanes;
      const u32 offset =
          has_rope ? layout::kRopeOffset + lane * kVectorBytes : layout::kScaleOffset;
      store_vector(destination + offset, has_rope ? fragment.rope[0] : scales, streaming);
    }
  }

  // Codes never saturate: a scale is at least amax / 448, and by an infinite one Inf becomes NaN.
  __device__ __forceinline__ void count(const Fragment& fragment, Tally& tally) const {
    tally.nonfinite +=
        count_nonfinite<Input>(fragment.latent) + count_nonfinite<Input>(fragment.rope);
  }

  // The same bytes from and to any alignment.
  __device__ __forceinline__ void store_by_element(const LayerRows& rows, i32 token,
                                                   u8* destination, Tally& tally) const {
    const u32 lane = threadIdx.x;
    const auto* elements =
        reinterpret_cast<const Input::Bits*>(rows.latent_of(token)) + lane * kUnit;
    u32 words[kUnit / 2];
#pragma unroll
    for (int i = 0; i < kUnit / 2; ++i) {
      words[i] = elements[2 * i] | static_cast<u32>(elements[2 * i + 1]) << 16;
    }
    const uint4 latent[kLoads] = {{words[0], words[1], words[2], words[3]},
                                  {words[4], words[5], words[6], words[7]}};
    tally.nonfinite += count_nonfinite<Input>(latent);
    const Encoded encoded = encode(latent);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      store_unaligned<4>(destination + lane * kUnit + 4 * i, encoded.codes[i]);
    }
    if (lane % kTileLanes == 0) {
      store_unaligned<4>(destination + layout::kScaleOffset + lane / kTileLanes * 4,
                         bits_of(encoded.scale));
    }
    const auto* rope = reinterpret_cast<const Input::Bits*>(rows.rope_of(token));
    for (u32 i = lane; i < layout::kRopeDim; i += kWarp) {
      const u32 bits = rope[i];
      tally.nonfinite += is_nonfinite<Input>(bits);
      store_unaligned<2>(destination + layout::kRopeOffset + 2 * i, bits);
    }
  }
};

}  // namespace cupy_mla
