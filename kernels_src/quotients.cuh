// float32 values divided by a scale of any size, as fp8 codes.

#pragma once

#include "fp8.cuh"
#include "types.cuh"

namespace cupy_mla {

// Four codes a word, the first one in the lowest byte.
template <class Code, int kWords>
__device__ __forceinline__ void encode_quotients(const Divider<false>& divider,
                                                 const float (&values)[4 * kWords],
                                                 u32 (&codes)[kWords]) {
  float quotients[4 * kWords];
#pragma unroll
  for (int i = 0; i < 4 * kWords; ++i) quotients[i] = values[i];
  if (!divider.is_usual()) {
#pragma unroll
    for (float& quotient : quotients) quotient = divider.bring_near(quotient);
  }
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const float four[4] = {divider.divide(quotients[4 * i]), divider.divide(quotients[4 * i + 1]),
                           divider.divide(quotients[4 * i + 2]),
                           divider.divide(quotients[4 * i + 3])};
    codes[i] = Code::encode(four);
  }
}

}  // namespace cupy_mla
