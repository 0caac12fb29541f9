// fp8_ds_mla rows from float32 values, by a warp a row: a lane holds 16 latent elements, as where
// ds_mla_rows.cuh stores bf16.

#pragma once

#include "ds_mla_rows.cuh"
#include "lanes.cuh"
#include "memory.cuh"
#include "paging.cuh"
#include "quotients.cuh"
#include "rows.cuh"

namespace cupy_mla {

// `Row` gives a source row: read_run(first, values), read_value(i) and, of the rotary part,
// read_bf16(first) and read_bf16_bits(i).
struct DsMlaDestination {
  static_assert(DsMlaRows::kUnit == kRun, "a warp holds the latent part");

  DsMlaRows rows;

  __device__ __forceinline__ DsMlaDestination(const LayerEntry& entry, bool streaming)
      : rows(0.0f, entry.scale_ue8m0 != 0, streaming) {}

  __device__ __forceinline__ static bool has_whole_runs(i32) { return true; }

  // The scale of the lane's tile by the largest magnitude of its own elements; all lanes of the
  // warp take part.
  __device__ __forceinline__ float tile_scale(float amax) const {
    return rows.tile_scale(max_over_lanes<DsMlaRows::kTileLanes>(amax));
  }

  template <class Row>
  __device__ __forceinline__ void store(const Row& row, u8* destination, i32) const {
    const u32 lane = threadIdx.x;
    float values[kRun];
    row.read_run(static_cast<i32>(lane) * kRun, values);
    float amax = 0.0f;
    for (float value : values) amax = max_f32(amax, abs_f32(value));
    const float scale = tile_scale(amax);
    u32 codes[kRun / 4];
    encode_quotients<E4m3>(QuotientScale(scale), values, codes);
    const uint4 scales = DsMlaRows::collect_scales(scale);
    store_vector(destination + lane * kVectorBytes, {codes[0], codes[1], codes[2], codes[3]},
                 rows.streaming);
    if (lane == DsMlaRows::kRopeLanes) {
      store_vector(destination + layout::kScaleOffset, scales, rows.streaming);
    } else if (lane < DsMlaRows::kRopeLanes) {
      store_vector(destination + layout::kRopeOffset + lane * kVectorBytes,
                   row.read_bf16(layout::kLoraRank + static_cast<i32>(lane) * 8), rows.streaming);
    }
  }

  template <class Row>
  __device__ __forceinline__ void store_by_element(const Row& row, u8* destination, i32) const {
    const u32 lane = threadIdx.x;
    const i32 first = static_cast<i32>(lane) * kRun;
    float amax = 0.0f;
#pragma unroll 1
    for (i32 i = first; i < first + kRun; ++i) amax = max_f32(amax, abs_f32(row.read_value(i)));
    const float scale = tile_scale(amax);
    const QuotientScale divisor(scale);
#pragma unroll 1
    for (i32 i = first; i < first + kRun; ++i) {
      destination[i] = static_cast<u8>(encode_two<E4m3>(divisor, row.read_value(i), 0.0f));
    }
    if (lane % DsMlaRows::kTileLanes == 0) {
      store_unaligned<4>(destination + layout::kScaleOffset + lane / DsMlaRows::kTileLanes * 4,
                         bits_of(scale));
    }
    for (u32 i = lane; i < layout::kRopeDim; i += DsMlaRows::kWarp) {
      store_unaligned<2>(destination + layout::kRopeOffset + 2 * i,
                         row.read_bf16_bits(layout::kLoraRank + static_cast<i32>(i)));
    }
  }
};

}  // namespace cupy_mla
