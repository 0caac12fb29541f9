// Wide memory accesses with cache hints, and a block's shared memory.

#pragma once

#include "types.cuh"

namespace cupy_mla {

constexpr u32 kVectorBytes = 16;

// Whether every address or stride whose bits were or-ed together is a multiple of a vector.
__device__ __forceinline__ bool is_vector_aligned(u64 bits) { return bits % kVectorBytes == 0; }

__device__ __forceinline__ u64 address_of(const void* pointer) {
  return reinterpret_cast<u64>(pointer);
}

// Rows that come in are read once: mark them as the first to leave the caches.
__device__ __forceinline__ uint4 load_vector(const void* source) {
  return __ldcs(static_cast<const uint4*>(source));
}

// `streaming`: the rows are more than the L2 cache holds, so let them leave it first.
__device__ __forceinline__ void store_vector(void* destination, const uint4& value,
                                             bool streaming) {
  if (streaming) {
    __stcs(static_cast<uint4*>(destination), value);
  } else {
    __stwb(static_cast<uint4*>(destination), value);
  }
}

// Stores the lowest `kBytes` bytes of a value to an address of any alignment.
template <int kBytes>
__device__ __forceinline__ void store_unaligned(u8* destination, u32 value) {
#pragma unroll
  for (int i = 0; i < kBytes; ++i) destination[i] = static_cast<u8>(value >> 8 * i);
}

// The block's only shared object of type T; not initialised. In the emulator a plain __shared__
// does not compile: storage has to come from here, where it is poisoned before each block.
template <class T>
__device__ __forceinline__ T& block_shared() {
#if defined(__CUDACC__)
  __shared__ T storage;
  return storage;
#else
  return emulator::block_shared<T>();
#endif
}

}  // namespace cupy_mla
