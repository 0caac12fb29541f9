// Integer names of fixed width. NVRTC runs without an include path, so <cstdint> is not to be had.

#pragma once

namespace cupy_mla {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

}  // namespace cupy_mla
