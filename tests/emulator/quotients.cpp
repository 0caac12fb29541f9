// Compares the quotients of quotients.cuh with IEEE division where codes can tell, and the scales
// of tiles. Compiled behind the flattened header; prints a name and the number of differences a
// line.

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

// -1, 0 or 1.
int order(float a, float b) { return (a > b) - (a < b); }

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

// Counts the quotients by which a number of 5 significand bits looks larger, equal or smaller than
// by those of IEEE division: for every significand of a scale, every such number, and every x near
// their product.
template <class Divide>
std::uint64_t wrong_sides(Divide divider_of) {
  return in_parallel([divider_of](unsigned part, unsigned parts) {
    std::uint64_t wrong = 0;
    for (u32 significand = part; significand < kMantissas; significand += parts) {
      const float scale = float_of(kOne | significand);
      const auto divide = divider_of(scale);
      for (int sixteenths = 16; sixteenths < 32; ++sixteenths) {
        const float number = static_cast<float>(sixteenths) / 16.0f;
        const u32 product = bits_of(number * scale);
        for (u32 bits = product - 4; bits <= product + 4; ++bits) {
          const float x = float_of(bits);
          wrong += order(divide(x), number) != order(x / scale, number);
        }
      }
    }
    return wrong;
  });
}

// Scales of tiles for every magnitude that float32 has: scale_of(amax) has to be what want_of()
// makes of the quotient, or of `least`.
template <class ScaleOf, class WantOf>
std::uint64_t wrong_scales(float least, ScaleOf scale_of, WantOf want_of) {
  return in_parallel([=](unsigned part, unsigned parts) {
    const u32 step = (kInfinityBits + parts) / parts;
    const u32 end = std::min(kInfinityBits + 1, (part + 1) * step);
    std::uint64_t wrong = 0;
    for (u32 bits = part * step; bits < end; ++bits) {
      const float quotient = float_of(bits) / 448.0f;
      const float want = want_of(quotient > least ? quotient : least);
      wrong += bits_of(scale_of(float_of(bits), least)) != bits_of(want);
    }
    return wrong;
  });
}

std::uint64_t powers_of_two(float least) {
  return wrong_scales(least, amax_power_of_two, [](float scale) {
    // Any bit of the mantissa carries; Inf has none.
    return float_of((bits_of(scale) + 0x7FFFFFu) & kInfinityBits);
  });
}

// Random bits as codes of both formats, by scales of every exponent.
std::uint64_t wrong_codes() {
  std::uint64_t state = 20260;
  const auto random = [&] {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return static_cast<u32>(state >> 16);
  };
  std::uint64_t wrong = 0;
  for (int i = 0; i < 1 << 20; ++i) {
    const float divisor = float_of(random());
    const QuotientScale scale(divisor);
    for (int j = 0; j < 8; ++j) {
      float x = float_of(random());
      // Every other one where codes are neither zero nor saturated.
      if (j % 2) x = divisor * float_of((random() & 0x8FFFFFFFu) | 0x30000000u);
      const float values[2] = {x, x};
      float quotients[2];
      scale.divide_all(values, quotients);
      wrong += cvt_sat_e4m3_soft(quotients[0]) != cvt_sat_e4m3_soft(x / divisor);
      wrong += cvt_sat_e5m2_soft(quotients[1]) != cvt_sat_e5m2_soft(x / divisor);
    }
  }
  return wrong;
}

void report(const char* name, std::uint64_t wrong) { std::printf("%s %" PRIu64 "\n", name, wrong); }

}  // namespace

int main() {
  report("wrong_sides", wrong_sides([](float s) {
           return [scale = QuotientScale(s)](float x) { return scale.divide(x); };
         }));
  // That the cases are hard: what becomes of them by a reciprocal, and without the odd significand.
  report("by_reciprocal", wrong_sides([](float s) {
           return [inverse = rcp_rn_f32(s)](float x) { return mul_rn_f32(x, inverse); };
         }));
  report("without_the_odd_one", wrong_sides([](float s) {
           QuotientScale scale(s);
           if ((bits_of(s) & QuotientScale::kSignificand) == QuotientScale::kOddSignificand) {
             scale.low = float_of(bits_of(scale.low) + 1);
           }
           return [scale](float x) { return scale.divide(x); };
         }));
  report("wrong_codes", wrong_codes());
  report("tile_scales_float32",
         wrong_scales(0x1p-126f, amax_scale, [](float scale) { return scale; }));
  report("tile_powers_of_two", powers_of_two(0x1p-13f));
  report("index_powers_of_two", powers_of_two(0x1p-22f));
}
