// Rotary position embedding: table rows [cos half | sin half], pairs (2i, 2i + 1) or (i, i + half).

#pragma once

#include "exact_math.cuh"
#include "numbers.cuh"
#include "types.cuh"

namespace cupy_mla {

// How a table lies in memory, and which pairs it rotates.
struct RopeTable {
  i64 stride;  // bytes from a position's row to the next
  i64 rows;
  i32 type;   // NumberType
  i32 width;  // elements that are rotated; 0: there is no table
  i32 is_neox;
  i32 reserved;
};

// Row of a position; null where the table has none, and then nothing of it is read.
__device__ __forceinline__ const u8* find_angles(const RopeTable& table, const u8* data,
                                                 i64 position) {
  return position >= 0 && position < table.rows ? data + position * table.stride : nullptr;
}

struct PairPlaces {
  i32 first;
  i32 second;
};

__device__ __forceinline__ PairPlaces pair_places(const RopeTable& table, i32 pair) {
  if (table.is_neox) return {pair, pair + table.width / 2};
  return {2 * pair, 2 * pair + 1};
}

// A pair and its angle as they lie in memory.
struct PairBits {
  u32 first;
  u32 second;
  u32 cos;
  u32 sin;
};

template <class Input>
__device__ __forceinline__ PairBits load_pair(const RopeTable& table, const u8* angles,
                                              const u8* elements, i32 pair) {
  using Bits = typename Input::Bits;
  const PairPlaces places = pair_places(table, pair);
  PairBits bits{};
  bits.first = reinterpret_cast<const Bits*>(elements)[places.first];
  bits.second = reinterpret_cast<const Bits*>(elements)[places.second];
  if (angles != nullptr) {
    bits.cos = load_number_bits(angles, table.type, pair);
    bits.sin = load_number_bits(angles, table.type, table.width / 2 + pair);
  }
  return bits;
}

// (a, b) becomes (a * cos - b * sin, b * cos + a * sin).
__device__ __forceinline__ void rotate(float& a, float& b, float cos, float sin) {
  const float first = sub_rn_f32(mul_rn_f32(a, cos), mul_rn_f32(b, sin));
  b = add_rn_f32(mul_rn_f32(b, cos), mul_rn_f32(a, sin));
  a = first;
}

// Calls visit(places, a, b) for the rotated pairs that a lane has: pair `lane`, which has been
// loaded, and every 32nd from there. Without angles they are zero.
template <class Input, class Visit>
__device__ __forceinline__ void for_each_pair(const RopeTable& table, const u8* angles,
                                              const u8* elements, PairBits bits, i32 lane,
                                              Visit visit) {
  const i32 half = table.width / 2;
#pragma unroll 1
  for (i32 pair = lane; pair < half;) {
    float a = 0.0f;
    float b = 0.0f;
    if (angles != nullptr) {
      a = Input::widen(bits.first);
      b = Input::widen(bits.second);
      rotate(a, b, widen_number(bits.cos, table.type), widen_number(bits.sin, table.type));
    }
    visit(pair_places(table, pair), a, b);
    pair += 32;
    if (pair < half) bits = load_pair<Input>(table, angles, elements, pair);
  }
}

}  // namespace cupy_mla
