// float32 values as fp8_ds_mla rows: e4m3 latent in tiles | a float32 scale a tile | bf16 rope.

#pragma once

#include "ds_mla_rows.cuh"
#include "elements.cuh"
#include "fp8.cuh"
#include "lanes.cuh"
#include "norm.cuh"
#include "numbers.cuh"
#include "quotients.cuh"
#include "types.cuh"

namespace cupy_mla {

struct DsMlaValues {
  using Input = DsMlaRows::Input;
  static constexpr bool kLayerScale = false;
  static constexpr bool kTiled = true;
  static constexpr i32 kTileLanes = layout::kTile / kRun;

  static_assert(layout::kLoraRank == kWideRow, "a warp holds the latent part, a lane a run of it");

  struct Encoded {
    u32 codes[4];
    u32 scale;  // bits, of the lane's tile
  };

  DsMlaRows rows;

  DsMlaValues() = default;
  __device__ __forceinline__ DsMlaValues(float scale, bool scale_ue8m0, bool streaming)
      : rows(scale, scale_ue8m0, streaming) {}

  // Whether store_run() can be used.
  __device__ __forceinline__ bool takes_runs() const { return true; }

  __device__ __forceinline__ static u8* rope_of(u8* row, i32) { return row + layout::kRopeOffset; }

  // All lanes of the warp take part, each with its own run.
  __device__ __forceinline__ Encoded encode(const float (&values)[kRun]) const {
    float amax = 0.0f;
#pragma unroll
    for (float value : values) amax = max_f32(amax, abs_f32(value));
    const float scale = rows.tile_scale(max_over_lanes<kTileLanes>(amax));
    Encoded encoded;
    encoded.scale = bits_of(scale);
    encode_quotients<E4m3>(QuotientScale(scale), values, encoded.codes);
    return encoded;
  }

  // The lane's run of a latent part, and the tiles' scales. `to_vectors`: at an address of vector
  // alignment.
  __device__ __forceinline__ void store_run(const float (&values)[kRun], u8* latent, i32 lane,
                                            bool to_vectors) const {
    const Encoded encoded = encode(values);
    const u32(&codes)[4] = encoded.codes;
    u8* scale = latent + layout::kScaleOffset + lane / kTileLanes * 4;
    const bool has_scale = lane % kTileLanes == 0;
    if (to_vectors) {
      store_vector(latent + lane * kRun, {codes[0], codes[1], codes[2], codes[3]}, rows.streaming);
      if (has_scale) *reinterpret_cast<u32*>(scale) = encoded.scale;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) store_unaligned<4>(latent + lane * kRun + 4 * i, codes[i]);
      if (has_scale) store_unaligned<4>(scale, encoded.scale);
    }
  }

  __device__ __forceinline__ void store_pair(float a, float b, i32 first, i32 second,
                                             u8* rope) const {
    const u32 bits = narrow_pair<Bfloat16>(a, b);
    if (second == first + 1 && address_of(rope) % 4 == 0) {
      reinterpret_cast<u32*>(rope)[first / 2] = bits;
    } else {
      store_unaligned<2>(rope + 2 * first, bits);
      store_unaligned<2>(rope + 2 * second, bits >> 16);
    }
  }

  // No code saturates: a scale is at least amax / 448, and by an infinite one Inf becomes NaN.
  __device__ __forceinline__ bool is_saturated(float) const { return false; }
};

}  // namespace cupy_mla
