// Compares the division by a scale of fp8.cuh with IEEE division. Compiled behind the flattened
// header; prints a name and the number of differences a line.

#include <algorithm>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <thread>
#include <vector>

using namespace cupy_mla;

namespace {

constexpr u32 kOne = 0x3F800000u;
constexpr u32 kMantissas = 1u << 23;

bool differ(float a, float b) { return bits_of(a) != bits_of(b); }

// Adds up count(part, parts) over all cores.
template <class Count>
std::uint64_t in_parallel(Count count) {
  const unsigned parts = std::max(1u, std::thread::hardware_concurrency());
  std::vector<std::uint64_t> sums(parts);
  std::vector<std::thread> threads;
  for (unsigned part = 0; part < parts; ++part) {
    threads.emplace_back([&, part] { sums[part] = count(part, parts); });
  }
  std::uint64_t total = 0;
  for (unsigned part = 0; part < parts; ++part) {
    threads[part].join();
    total += sums[part];
  }
  return total;
}

template <bool kShort>
float divide(float x, float s) {
  return Divider<kShort>(s).divide(x);
}

// All significands of 11 bits by all of 24 bits.
std::uint64_t short_significands() {
  return in_parallel([](unsigned part, unsigned parts) {
    std::uint64_t wrong = 0;
    for (u32 i = part; i < 1024; i += parts) {
      const float x = float_of(kOne | i << 13);
      u32 here = 0;
      for (u32 m = 0; m < kMantissas; ++m) {
        const float s = float_of(kOne | m);
        here += differ(divide<true>(x, s), x / s);
      }
      wrong += here;
    }
    return wrong;
  });
}

// float32 numerators whose quotients are as close to the middle between two floats as they get: for
// an odd significand s, an x and an odd M of 25 bits with x * 2^e - M * s = n for a small n.
template <class Divide>
std::uint64_t hardest_quotients(Divide divide) {
  return in_parallel([divide](unsigned part, unsigned parts) {
    std::uint64_t wrong = 0;
    for (u32 s = kMantissas + 1 + 2 * part; s < 2 * kMantissas; s += 6 * parts) {
      u32 inverse = s;  // of s modulo 2^32, by Newton
      for (int i = 0; i < 4; ++i) inverse *= 2 - s * inverse;
      for (int n = -3; n <= 3; n += 2) {
        for (int e = 24; e <= 25; ++e) {
          const u32 low_bits = (1u << e) - 1;
          const u32 middle = (0u - static_cast<u32>(n) * inverse & low_bits) | 1u << 24;
          const std::uint64_t product = static_cast<std::uint64_t>(middle) * s + n;
          const std::uint64_t x = product >> e;
          if (x < kMantissas || x >= 2 * kMantissas || (product & low_bits) != 0) continue;
          const float numerator = static_cast<float>(x);
          const float divisor = static_cast<float>(s);
          wrong += differ(divide(numerator, divisor), numerator / divisor);
        }
      }
    }
    return wrong;
  });
}

// Scales of tiles for every magnitude that float32 has.
std::uint64_t tile_scales(float least) {
  return in_parallel([least](unsigned part, unsigned parts) {
    const u32 step = (kInfinityBits + parts) / parts;
    const u32 end = std::min(kInfinityBits + 1, (part + 1) * step);
    std::uint64_t wrong = 0;
    for (u32 bits = part * step; bits < end; ++bits) {
      const float quotient = float_of(bits) / 448.0f;
      wrong += differ(amax_scale(float_of(bits), least), quotient > least ? quotient : least);
    }
    return wrong;
  });
}

void report(const char* name, std::uint64_t wrong) { std::printf("%s %" PRIu64 "\n", name, wrong); }

}  // namespace

int main() {
  report("short_significands", short_significands());
  report("hardest_quotients", hardest_quotients(divide<false>));
  // That they are hard: what a reciprocal makes of them.
  report("by_reciprocal",
         hardest_quotients([](float x, float s) { return mul_rn_f32(x, rcp_rn_f32(s)); }));
  report("tile_scales_float32", tile_scales(0x1p-126f));
  report("tile_scales_ue8m0", tile_scales(1e-4f));
}
