// convert: rows of any cache as rows of an fp8 cache, at the same slots.
//
// An element becomes the float32 value that it stands for, and is quantised as an insert does it.
// Conversions to 16- and 32-bit rows are gathers that write to slots, and those that keep the bytes
// are copies, so only the fp8 formats are destinations here. The destination is a template
// argument, since scales and stores differ; what the source holds is a uniform switch around a few
// conversions. That makes 3 kernels of this file instead of 21, and a cache is converted once, not
// at every step.
//
// Rows are looked up as gather.cu does; blockDim.x threads share a row, each with runs of 16 of its
// elements.

#include "elements.cuh"
#include "memory.cuh"
#include "read_params.cuh"
#include "row_places.cuh"
#include "types.cuh"

namespace cupy_mla {

// A row of the cache that is read.
struct SourceRow {
  const ReadParams& p;
  const u8* row;
  const u8* scales;
  float layer_scale;

  __device__ __forceinline__ bool in_rope(i32 first) const { return first >= p.rope_first; }

  __device__ __forceinline__ const u8* rope_at(i32 i) const {
    return row + p.rope_offset + (i - p.rope_first) * static_cast<i32>(sizeof(Bfloat16::Bits));
  }

  template <class Element, int kCount>
  __device__ __forceinline__ static void widen_run(const u8* elements, i32 first,
                                                   float (&values)[kCount]) {
    constexpr int kBytes = sizeof(typename Element::Bits);
    widen_words<Element>(load_words<kCount * kBytes>(elements + first * i64{kBytes}), values);
  }

  template <class Element, int kCount>
  __device__ __forceinline__ void scale_run(float scale, i32 first, float (&values)[kCount]) const {
    widen_run<Element>(row, first, values);
    for (float& value : values) value = mul_rn_f32(value, scale);
  }

  // The scale of an element's tile, or of the layer; tiles' scales are aligned where codes are.
  __device__ __forceinline__ float scale_at(i32 i) const {
    if (p.tile_shift == 0) return layer_scale;
    return reinterpret_cast<const float*>(scales)[i >> p.tile_shift];
  }

  __device__ __forceinline__ float scale_at_any_address(i32 i) const {
    if (p.tile_shift == 0) return layer_scale;
    return float_of(load_unaligned<4>(scales + (i >> p.tile_shift) * 4));
  }

  // Elements `first` and behind, none of them on the other side of a border.
  template <int kCount>
  __device__ __forceinline__ void read_run(i32 first, float (&values)[kCount]) const {
    if (in_rope(first))
      return widen_run<Bfloat16>(rope_at(p.rope_first), first - p.rope_first, values);
    switch (p.element) {
      case kBfloat16:
        return widen_run<Bfloat16>(row, first, values);
      case kFloat16:
        return widen_run<Float16>(row, first, values);
      case kFloat32:
        return widen_run<Float32>(row, first, values);
      case kE4m3:
        return scale_run<E4m3Codes>(scale_at(first), first, values);
      default:
        return scale_run<E5m2Codes>(scale_at(first), first, values);
    }
  }

  __device__ __forceinline__ float read_value(i32 i) const {
    if (in_rope(i)) return Bfloat16::widen(load_unaligned<2>(rope_at(i)));
    switch (p.element) {
      case kBfloat16:
        return Bfloat16::widen(load_unaligned<2>(row + i * i64{2}));
      case kFloat16:
        return Float16::widen(load_unaligned<2>(row + i * i64{2}));
      case kFloat32:
        return Float32::widen(load_unaligned<4>(row + i * i64{4}));
      case kE4m3:
        return mul_rn_f32(widen_bits<E4m3Codes>(row[i]), scale_at_any_address(i));
      default:
        return mul_rn_f32(widen_bits<E5m2Codes>(row[i]), scale_at_any_address(i));
    }
  }

  __device__ __forceinline__ bool is_bf16(i32 i) const {
    return in_rope(i) || p.element == kBfloat16;
  }

  __device__ __forceinline__ const u8* bf16_at(i32 i) const {
    return in_rope(i) ? rope_at(i) : row + i * i64{2};
  }

  // Eight elements as bf16: their bits where that is what they are.
  __device__ __forceinline__ uint4 read_bf16(i32 first) const {
    if (is_bf16(first)) return load_vector(bf16_at(first));
    float values[8];
    read_run(first, values);
    return narrow_vector<Bfloat16>(values);
  }

  __device__ __forceinline__ u32 read_bf16_bits(i32 i) const {
    if (is_bf16(i)) return load_unaligned<2>(bf16_at(i));
    return cvt_rn_bf16(read_value(i));
  }
};

template <class Destination>
__device__ __forceinline__ void convert(const ReadParams& p) {
  using Places = RowPlaces<2, 1>;
  Places& places = block_shared<Places>();
  const float layer_scale = scale_of(p.source[0]);
  const Destination destination(p.destination[0], p.stream_stores != 0);
  const i32 count = find_places<false>(p, places);
  const bool by_vectors =
      Destination::has_whole_runs(p.width) &&
      is_vector_aligned(address_bits(p.source[0]) | address_bits(p.destination[0]));
  for (i32 row = static_cast<i32>(threadIdx.y); row < count; row += static_cast<i32>(blockDim.y)) {
    u8* to = places.destinations[0][row];
    if (to == nullptr) continue;
    const SourceRow source = {p, places.sources[0][row], places.sources[1][row], layer_scale};
    if (by_vectors) {
      destination.store(source, to, p.width);
    } else {
      destination.store_by_element(source, to, p.width);
    }
  }
}

}  // namespace cupy_mla
