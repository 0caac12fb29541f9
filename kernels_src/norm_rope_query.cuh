// The query's part of norm_rope: RMSNorm of its latent part.

#pragma once

#include "elements.cuh"
#include "memory.cuh"
#include "norm.cuh"
#include "norm_rope_params.cuh"
#include "norm_rope_token.cuh"
#include "numbers.cuh"
#include "types.cuh"

namespace cupy_mla {

// A query's weights as they lie in memory, for all warps of a block of kMaxThreads threads; where
// they are too many for that, each warp reads them where they are.
struct SharedQueryWeights {
  static constexpr int kTurns = 2;  // vectors that a thread brings
  static constexpr i32 kVectors = kTurns * tuning::kMaxThreads;

  struct Brought {
    uint4 vectors[kTurns];
  };

  uint4 vectors[kVectors];

  __device__ __forceinline__ static i32 vectors_of(const NormRopeParams& p) {
    return p.q_width * number_bytes(p.q_weight_type) / static_cast<i32>(kVectorBytes);
  }

  __device__ __forceinline__ static bool suffices_for(const NormRopeParams& p) {
    return vectors_of(p) <= kVectors;
  }

  // Of weights that it suffices for, as put().
  __device__ __forceinline__ static Brought load(const NormRopeParams& p, i32 thread) {
    Brought brought{};
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const i32 place = i * tuning::kMaxThreads + thread;
      if (place < vectors_of(p)) {
        brought.vectors[i] = reinterpret_cast<const uint4*>(p.q_weight)[place];
      }
    }
    return brought;
  }

  // The block's threads have to wait for one another afterwards.
  __device__ __forceinline__ void put(const NormRopeParams& p, const Brought& brought, i32 thread) {
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const i32 place = i * tuning::kMaxThreads + thread;
      if (place < vectors_of(p)) vectors[place] = brought.vectors[i];
    }
  }
};

// A row of at least kWideRow elements, whole runs at addresses of vector alignment.
template <class Input>
struct WideQuery {
  static constexpr int kRunVectors = kRun / kVectorElements<Input>;
  static constexpr int kFirst = 8 / kRunVectors;  // runs a lane asks for at once
  static constexpr int kElements = kVectorElements<Input>;
  static constexpr int kAtOnce = 2;  // vectors it asks for again at once

  const NormRopeParams& p;
  const u8* weights;
  i32 lane;
  uint4 first[kFirst][kRunVectors];

  // By way of the L1 cache, since each vector is needed twice.
  __device__ __forceinline__ static void load_run(const uint4* row, i32 run,
                                                  uint4 (&vectors)[kRunVectors]) {
#pragma unroll
    for (int i = 0; i < kRunVectors; ++i) vectors[i] = row[run * kRunVectors + i];
  }

  __device__ __forceinline__ static float add(float sum, const uint4 (&vectors)[kRunVectors]) {
    float values[kRun];
    widen_vectors<Input>(vectors, values);
    return add_squares(sum, values);
  }

  __device__ __forceinline__ void load(const uint4* row) {
#pragma unroll
    for (int i = 0; i < kFirst; ++i) {
      const i32 run = i * kLanes + lane;
      if (run < p.q_width / kRun) load_run(row, run, first[i]);
    }
  }

  // Of the row that was loaded.
  __device__ __forceinline__ float factor(const uint4* row) const {
    const i32 runs = p.q_width / kRun;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kFirst; ++i) {
      if (i * kLanes + lane < runs) sum = add(sum, first[i]);
    }
#pragma unroll 1
    for (i32 run = kFirst * kLanes + lane; run < runs; run += kLanes) {
      uint4 vectors[kRunVectors];
      load_run(row, run, vectors);
      sum = add(sum, vectors);
    }
    const float mean = div_rn_f32(sum_over_lanes(sum), static_cast<float>(p.q_width));
    return reciprocal_root(mean, p.q_eps);
  }

  // Loads the row again, neighbouring lanes neighbouring vectors: kept in registers, each run would
  // have code of its own, and more of it than the instruction caches hold of all parts together.
  __device__ __forceinline__ void store(const uint4* row, float r, uint4* to) const {
    const i32 vectors = p.q_width / kElements;
    const i32 weight_bytes = kElements * number_bytes(p.q_weight_type);
#pragma unroll 1
    for (i32 begin = lane; begin < vectors; begin += kAtOnce * kLanes) {
      uint4 bits[kAtOnce][1];
#pragma unroll
      for (int c = 0; c < kAtOnce; ++c) {
        if (begin + c * kLanes < vectors) bits[c][0] = row[begin + c * kLanes];
      }
#pragma unroll
      for (int c = 0; c < kAtOnce; ++c) {
        const i32 i = begin + c * kLanes;
        if (i >= vectors) break;
        float values[kElements];
        float weight[kElements];
        widen_vectors<Input>(bits[c], values);
        load_numbers_by_vectors(weights + i * weight_bytes, p.q_weight_type, weight);
#pragma unroll
        for (int k = 0; k < kElements; ++k) {
          values[k] = mul_rn_f32(mul_rn_f32(values[k], r), weight[k]);
        }
        store_vector(to + i, pack_vector<Input>(values, 0), p.stream_stores != 0);
      }
    }
  }
};

template <class Input>
__device__ __forceinline__ void norm_wide_query(const NormRopeParams& p, const WarpToken& token,
                                                const u8* from, u8* to) {
  // Everything is asked for before anything is looked at.
  SharedQueryWeights& shared = block_shared<SharedQueryWeights>();
  const bool is_shared = SharedQueryWeights::suffices_for(p);
  SharedQueryWeights::Brought brought{};
  if (is_shared) brought = SharedQueryWeights::load(p, thread_of(token));
  WideQuery<Input> query = {
      p, is_shared ? reinterpret_cast<const u8*>(shared.vectors) : p.q_weight, token.lane, {}};
  const auto* row = reinterpret_cast<const uint4*>(from);
  if (token.exists) query.load(row);
  if (is_shared) shared.put(p, brought, thread_of(token));
  __syncthreads();
  if (token.exists) query.store(row, query.factor(row), reinterpret_cast<uint4*>(to));
}

template <class Input>
__device__ __forceinline__ void norm_query(const NormRopeParams& p, const WarpToken& token) {
  const u8* from = p.q_c + token.index * p.q_c_stride;
  u8* to = p.q_c_out + token.index * p.q_c_out_stride;
  const bool is_wide = p.q_width >= kWideRow && p.q_width % kRun == 0;
  if (is_wide && is_vector_aligned(address_of(p.q_c) | p.q_c_stride | address_of(p.q_c_out) |
                                   p.q_c_out_stride | address_of(p.q_weight))) {
    norm_wide_query<Input>(p, token, from, to);
    return;
  }
  if (!token.exists) return;
  rms_norm_by_element<Input>(
      from, p.q_width, p.q_weight, p.q_weight_type, p.q_eps, token.lane, [&](i32 i, float value) {
        reinterpret_cast<typename Input::Bits*>(to)[i] = narrow<Input>(value);
      });
}

}  // namespace cupy_mla
