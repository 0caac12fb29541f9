// Rotary position embedding: table rows [cos half | sin half], pairs (2i, 2i + 1) or (i, i + half).

#pragma once

#include "exact_math.cuh"
#include "lanes.cuh"
#include "numbers.cuh"
#include "types.cuh"

namespace cupy_mla {

// How a table lies in memory, and which pairs it rotates.
struct RopeTable {
  i64 stride;  // bytes from a position's row to the next
  i64 rows;
  i32 type;     // NumberType
  i32 half;     // pairs that are rotated; 0: there is no table
  i32 step;     // elements from a pair's first one to the next pair's: 1 for halves, else 2
  i32 partner;  // elements from a pair's first one to its second: `half`, or 1
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
  const i32 first = pair * table.step;
  return {first, first + table.partner};
}

// A pair and its angle as they lie in memory.
struct PairBits {
  u32 first;  // of a pair that is one word: both
  u32 second;
  u32 cos;
  u32 sin;
};

// Whether pairs of elements are words: two neighbours of 16 bits.
template <class Input>
__device__ __forceinline__ bool are_words(const RopeTable& table, const u8* elements) {
  return sizeof(typename Input::Bits) == 2 && table.partner == 1 && address_of(elements) % 4 == 0;
}

template <class Input>
__device__ __forceinline__ void load_elements(const RopeTable& table, const u8* elements, i32 pair,
                                              PairBits& bits) {
  using Bits = typename Input::Bits;
  const PairPlaces places = pair_places(table, pair);
  const auto* first = reinterpret_cast<const Bits*>(elements) + places.first;
  if (are_words<Input>(table, elements)) {
    bits.first = *reinterpret_cast<const u32*>(first);
  } else {
    bits.first = first[0];
    bits.second = first[table.partner];
  }
}

__device__ __forceinline__ void load_angle(const RopeTable& table, const u8* angles, i32 pair,
                                           PairBits& bits) {
  const u32 bytes = number_bytes(table.type);
  const u8* cos = angles + pair * bytes;
  bits.cos = load_number_bits(cos, table.type, 0);
  bits.sin = load_number_bits(cos + table.half * bytes, table.type, 0);
}

// Without angles their bits stay as they are: then nobody looks at them.
template <class Input>
__device__ __forceinline__ PairBits load_pair(const RopeTable& table, const u8* angles,
                                              const u8* elements, i32 pair) {
  PairBits bits;
  load_elements<Input>(table, elements, pair, bits);
  if (angles != nullptr) load_angle(table, angles, pair, bits);
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
#pragma unroll 1
  for (i32 pair = lane; pair < table.half;) {
    float a = 0.0f;
    float b = 0.0f;
    if (angles != nullptr) {
      const bool is_word = are_words<Input>(table, elements);
      a = Input::widen(is_word ? bits.first & 0xFFFFu : bits.first);
      b = Input::widen(is_word ? bits.first >> 16 : bits.second);
      rotate(a, b, widen_number(bits.cos, table.type), widen_number(bits.sin, table.type));
    }
    visit(pair_places(table, pair), a, b);
    pair += kLanes;
    if (pair < table.half) bits = load_pair<Input>(table, angles, elements, pair);
  }
}

}  // namespace cupy_mla
