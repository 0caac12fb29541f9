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

// offsetof as a constant: NVRTC has no <cstddef> without an include path, and no builtin of that
// name; its front end offers this, which its own offsetof is made of.
#if defined(__CUDACC__)
#define CUPY_MLA_OFFSETOF(type, member) __INTADDR__(&((static_cast<type*>(0))->member))
#else
#define CUPY_MLA_OFFSETOF(type, member) __builtin_offsetof(type, member)
#endif
