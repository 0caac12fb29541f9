// Rows of float32 values as rows of the fp8 formats: what the writers of insert.cu make of inputs
// of 16 bits is made of values here. A thread holds 16 consecutive elements.

#pragma once

#include "fp8.cuh"
#include "types.cuh"

namespace cupy_mla {

constexpr int kRun = 16;

// Codes of a run of values, divided by a scale.
template <class Code>
__device__ __forceinline__ void encode_run(const Divider<false>& divider, float (&values)[kRun],
                                           u32 (&codes)[kRun / 4]) {
  if (!divider.is_usual()) {
    for (float& value : values) value = divider.bring_near(value);
  }
#pragma unroll
  for (int i = 0; i < kRun / 4; ++i) {
    const float four[4] = {divider.divide(values[4 * i]), divider.divide(values[4 * i + 1]),
                           divider.divide(values[4 * i + 2]), divider.divide(values[4 * i + 3])};
    codes[i] = Code::encode(four);
  }
}

}  // namespace cupy_mla
