// Rows of fp8 with one scale a layer, from float32 values: a thread holds 16 at a time.

#pragma once

#include "fp8.cuh"
#include "memory.cuh"
#include "paging.cuh"
#include "quotients.cuh"
#include "row_places.cuh"
#include "rows.cuh"

namespace cupy_mla {

// `Row` gives a source row: read_run(first, values) and read_value(i).
template <class Code>
struct FlatDestination {
  QuotientScale scale;
  bool streaming;

  __device__ __forceinline__ FlatDestination(const LayerEntry& entry, bool streaming)
      : scale(scale_of(entry)), streaming(streaming) {}

  __device__ __forceinline__ static bool has_whole_runs(i32 width) { return width % kRun == 0; }

  template <class Row>
  __device__ __forceinline__ void store(const Row& row, u8* destination, i32 width) const {
    const i32 step = kRun * static_cast<i32>(blockDim.x);
    for (i32 first = kRun * static_cast<i32>(threadIdx.x); first < width; first += step) {
      float values[kRun];
      u32 codes[kRun / 4];
      row.read_run(first, values);
      encode_quotients<Code>(scale, values, codes);
      store_vector(destination + first, {codes[0], codes[1], codes[2], codes[3]}, streaming);
    }
  }

  // The same bytes from and to any alignment.
  template <class Row>
  __device__ __forceinline__ void store_by_element(const Row& row, u8* destination,
                                                   i32 width) const {
    for (i32 i = static_cast<i32>(threadIdx.x); i < width; i += static_cast<i32>(blockDim.x)) {
      destination[i] = static_cast<u8>(encode_two<Code>(scale, row.read_value(i), 0.0f));
    }
  }
};

}  // namespace cupy_mla
