// Every function of exact_math.cuh, fp8.cuh and quotients.cuh that decides bits, on arrays of
// operands.

namespace probe {

using namespace cupy_mla;

struct Params {
  const float* a;
  const float* b;
  const float* c;
  u32* out;  // [operations][count], in the order of probe.OPERATIONS
  u64 count;
};

}  // namespace probe

extern "C" __global__ void exact_math_probe(const __grid_constant__ probe::Params p) {
  using namespace cupy_mla;
  const u64 i = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= p.count) return;
  const float a = p.a[i];
  const float b = p.b[i];
  const float c = p.c[i];
  const u16 low = static_cast<u16>(bits_of(a));
  u32* out = p.out + i;
  const auto put = [&](u32 bits) {
    *out = bits;
    out += p.count;
  };
  put(bits_of(add_rn_f32(a, b)));
  put(bits_of(sub_rn_f32(a, b)));
  put(bits_of(mul_rn_f32(a, b)));
  put(bits_of(fma_rn_f32(a, b, c)));
  put(bits_of(div_rn_f32(a, b)));
  put(bits_of(rcp_rn_f32(a)));
  put(bits_of(sqrt_rn_f32(abs_f32(a))));
  put(bits_of(max_f32(a, b)));
  put(bits_of(abs_f32(a)));
  put(bits_of(neg_f32(a)));
  put(bits_of(fma_rn_f32_if_below(a, b, c, 1.0f)));
  put(bits_of(bf16_to_f32(low)));
  put(bits_of(f16_to_f32(low)));
  put(cvt_rn_bf16(a));
  put(cvt_rn_f16(a));
  put(cvt_sat_e4m3x4(a, b, c, 1.0f));
  put(cvt_sat_e5m2x4(a, b, c, 1.0f));
  put(cvt_sat_e4m3_soft(a));
  put(cvt_sat_e5m2_soft(a));
  float four[4];
  e4m3x4_to_f32(bits_of(a), four);
  for (float value : four) put(bits_of(value));
  e5m2x4_to_f32(bits_of(a), four);
  for (float value : four) put(bits_of(value));
  put(bits_of(e4m3_to_f32_soft(bits_of(a) & 0xFFu)));
  put(cvt_rn_bf16x2(a, b));
  put(cvt_rn_f16x2(a, b));
  put(canonical_f32(a));
  const float power = amax_power_of_two(abs_f32(b), 0x1p-22f);
  put(bits_of(power));
  put(encode_two<E4m3>(QuotientScale(b), a, c));
  put(encode_two<E5m2>(QuotientScale(b), a, c));
  put(encode_two<E4m3>(PowerOfTwoScale(power), a, c));
}
