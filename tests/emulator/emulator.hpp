// A CUDA device for g++: runs the blocks of a kernel one after the other, each thread on a stack of
// its own, so that barriers and shuffles are real ones.
//
// It is included in front of a kernel's flattened source (-include). What a GPU leaves undefined is
// an error here: a barrier or a shuffle that not all of its threads reach, a shuffle that reads a
// lane outside its mask, a vector access off its alignment. Shared memory holds a pattern before
// each block. It runs no PTX: exact_math.cuh has host twins.

#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

namespace emulator {

struct Index {
  unsigned x, y, z;
};

inline Index thread_index, block_index, block_size, grid_size;

}  // namespace emulator

#define threadIdx (emulator::thread_index)
#define blockIdx (emulator::block_index)
#define blockDim (emulator::block_size)
#define gridDim (emulator::grid_size)

namespace emulator {

constexpr unsigned kWarp = 32;
constexpr unsigned char kPoison = 0xCD;
constexpr std::size_t kStackBytes = 128 * 1024;

// --- switching stacks
// -----------------------------------------------------------------------------

#if defined(__x86_64__)

// Saves the registers that a call has to keep, and the stack pointer; loads another one's.
extern "C" __attribute__((visibility("hidden"))) void emulator_switch(void** save, void* load);
asm(R"(
.text
.globl emulator_switch
.hidden emulator_switch
.type emulator_switch, @function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch, .-emulator_switch
)");

struct Context {
  void* stack_pointer = nullptr;

  void prepare(void* stack, std::size_t bytes, void (*entry)()) {
    auto** top = reinterpret_cast<void**>(static_cast<char*>(stack) + bytes);
    *--top = nullptr;  // where the entry would return to; also aligns the stack as a call does
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    stack_pointer = top;
  }

  void switch_to(Context& other) { emulator_switch(&stack_pointer, other.stack_pointer); }
};

#else

struct Context {
  ucontext_t context;

  void prepare(void* stack, std::size_t bytes, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = bytes;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
  }

  void switch_to(Context& other) { swapcontext(&context, &other.context); }
};

#endif

// --- threads
// --------------------------------------------------------------------------------------

struct Site {
  const char* file;
  int line;
};

inline bool operator==(const Site& a, const Site& b) {
  return a.line == b.line && std::strcmp(a.file, b.file) == 0;
}

enum class State { kNew, kRunning, kAtBarrier, kAtWarpOp, kExited };

// What a thread brings to a barrier or to an operation of its warp, and takes away.
struct Visit {
  Site site;
  const char* what;
  unsigned mask;
  unsigned source;  // lane to read
  std::uint64_t value;
  std::uint64_t result;
};

struct Stack {
  Context context;
  void* memory;
  unsigned thread;
};

struct Thread {
  State state;
  Visit visit;
  Stack* stack;
};

struct Block {
  std::vector<Thread> threads;
  std::vector<unsigned> ready;  // to be resumed, the last one first
  std::vector<Stack*> idle;
  std::vector<Stack*> stacks;
  Context scheduler;
  unsigned current = 0;
  unsigned at_barrier = 0;
  std::uint64_t generation = 0;
  std::string error;
  void (*run)(const void*) = nullptr;
  const void* arguments = nullptr;
#if defined(__SANITIZE_ADDRESS__)
  const void* scheduler_bottom = nullptr;
  std::size_t scheduler_size = 0;
#endif
};

inline Block block;

inline Thread& current_thread() { return block.threads[block.current]; }

inline std::string name(unsigned thread) {
  return "thread " + std::to_string(thread) + " of block " + std::to_string(block_index.x);
}

inline std::string name(const Site& site) {
  return std::string(site.file) + ":" + std::to_string(site.line);
}

// Gives control back to the scheduler.
inline void leave() {
  Stack& stack = *current_thread().stack;
#if defined(__SANITIZE_ADDRESS__)
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(&fake, block.scheduler_bottom, block.scheduler_size);
#endif
  stack.context.switch_to(block.scheduler);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake, &block.scheduler_bottom, &block.scheduler_size);
#endif
}

// Ends the launch; the thread is never resumed.
[[noreturn]] inline void fail(const std::string& message) {
  block.error = name(block.current) + ": " + message;
  leave();
  std::abort();
}

// A stack runs one thread after the other, so that threads which never wait share one.
inline void stack_main() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &block.scheduler_bottom, &block.scheduler_size);
#endif
  for (;;) {
    block.run(block.arguments);
    current_thread().state = State::kExited;
    leave();
  }
}

inline Stack* take_stack() {
  if (!block.idle.empty()) {
    Stack* stack = block.idle.back();
    block.idle.pop_back();
    return stack;
  }
  auto* stack = new Stack{};
  stack->memory = std::aligned_alloc(4096, kStackBytes);
  stack->context.prepare(stack->memory, kStackBytes, stack_main);
  block.stacks.push_back(stack);
  return stack;
}

inline void forget_stacks() {
  for (Stack* stack : block.stacks) {
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(stack->memory, kStackBytes);
#endif
    std::free(stack->memory);
    delete stack;
  }
  block.stacks.clear();
  block.idle.clear();
}

inline void resume(unsigned index) {
  Thread& thread = block.threads[index];
  if (thread.state == State::kNew) thread.stack = take_stack();
  thread.state = State::kRunning;
  block.current = index;
  thread_index = {index % block_size.x, index / block_size.x % block_size.y,
                  index / block_size.x / block_size.y};
#if defined(__SANITIZE_ADDRESS__)
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(&fake, thread.stack->memory, kStackBytes);
#endif
  block.scheduler.switch_to(thread.stack->context);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
  if (thread.state == State::kExited) {
    block.idle.push_back(thread.stack);
    thread.stack = nullptr;
  }
}

inline void release_barrier() {
  const Site site = current_thread().visit.site;
  for (unsigned i = 0; i < block.threads.size(); ++i) {
    const Thread& thread = block.threads[i];
    if (!(thread.visit.site == site)) {
      block.error = name(i) + " waits at the barrier in " + name(thread.visit.site) + ", but " +
                    name(block.current) + " at the one in " + name(site);
      return;
    }
  }
  for (unsigned i = static_cast<unsigned>(block.threads.size()); i-- > 0;) block.ready.push_back(i);
  block.at_barrier = 0;
}

// Completes an operation of a warp once all lanes of its mask have come.
inline void try_warp_op(unsigned index) {
  const Visit& visit = block.threads[index].visit;
  const unsigned first = index / kWarp * kWarp;
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if (!(visit.mask >> lane & 1u)) continue;
    if (first + lane >= block.threads.size()) {
      block.error = name(index) + ": the mask of the " + visit.what + " in " + name(visit.site) +
                    " names lane " + std::to_string(lane) + ", which does not exist";
      return;
    }
    const Thread& peer = block.threads[first + lane];
    if (peer.state != State::kAtWarpOp) return;
    if (!(peer.visit.site == visit.site) || peer.visit.mask != visit.mask) {
      block.error = name(index) + " is at the " + visit.what + " in " + name(visit.site) +
                    ", but " + name(first + lane) + " of the same warp at the " + peer.visit.what +
                    " in " + name(peer.visit.site) + " or with another mask";
      return;
    }
  }
  for (unsigned lane = kWarp; lane-- > 0;) {
    if (!(visit.mask >> lane & 1u)) continue;
    Visit& taken = block.threads[first + lane].visit;
    if (!(visit.mask >> taken.source & 1u)) {
      block.error = name(first + lane) + ": the " + taken.what + " in " + name(taken.site) +
                    " reads lane " + std::to_string(taken.source) + ", which is not in its mask";
      return;
    }
    taken.result = block.threads[first + taken.source].visit.value;
    block.threads[first + lane].state = State::kRunning;
    block.ready.push_back(first + lane);
  }
}

inline std::string describe_wait(unsigned index) {
  const Thread& thread = block.threads[index];
  if (thread.state == State::kExited) return name(index) + " has exited";
  return name(index) + " waits at the " + thread.visit.what + " in " + name(thread.visit.site);
}

// Nobody can go on, and not all have exited: name one that waits and one that does otherwise.
inline void report_deadlock() {
  unsigned waiting = 0;
  while (block.threads[waiting].state == State::kExited) ++waiting;
  const Thread& thread = block.threads[waiting];
  const unsigned first = thread.state == State::kAtWarpOp ? waiting / kWarp * kWarp : 0;
  for (unsigned i = first; i < block.threads.size(); ++i) {
    const Thread& other = block.threads[i];
    if (other.state != thread.state || !(other.visit.site == thread.visit.site)) {
      block.error = describe_wait(waiting) + ", but " + describe_wait(i);
      return;
    }
  }
  block.error = describe_wait(waiting) + " for ever";
}

inline void run_block() {
  ++block.generation;
  block.at_barrier = 0;
  block.ready.clear();
  for (Thread& thread : block.threads) thread = Thread{State::kNew, {}, nullptr};
  for (unsigned i = static_cast<unsigned>(block.threads.size()); i-- > 0;) block.ready.push_back(i);
  while (!block.ready.empty()) {
    const unsigned index = block.ready.back();
    block.ready.pop_back();
    resume(index);
    const State state = block.threads[index].state;
    if (block.error.empty() && state == State::kAtBarrier &&
        ++block.at_barrier == block.threads.size()) {
      release_barrier();
    }
    if (block.error.empty() && state == State::kAtWarpOp) try_warp_op(index);
    if (!block.error.empty()) return;
  }
  for (const Thread& thread : block.threads) {
    if (thread.state != State::kExited) return report_deadlock();
  }
}

template <class Arguments>
int launch(void (*kernel)(Arguments), unsigned grid, unsigned block_x, unsigned block_y,
           const void* bytes, char* error, std::size_t error_size) {
  struct Call {
    void (*kernel)(Arguments);
    Arguments arguments;
  };
  Call call{kernel, {}};
  std::memcpy(static_cast<void*>(&call.arguments), bytes, sizeof(Arguments));
  block.run = [](const void* opaque) {
    const Call& call = *static_cast<const Call*>(opaque);
    call.kernel(call.arguments);
  };
  block.arguments = &call;
  block.error.clear();
  block.threads.resize(block_x * block_y);
  grid_size = {grid, 1, 1};
  block_size = {block_x, block_y, 1};
  for (unsigned x = 0; x < grid && block.error.empty(); ++x) {
    block_index = {x, 0, 0};
    run_block();
  }
  if (block.error.empty()) return 0;
  forget_stacks();  // some hold threads that will never go on
  std::snprintf(error, error_size, "%s", block.error.c_str());
  return 1;
}

// --- what kernels call
// ----------------------------------------------------------------------------

inline void wait_for_block(Site site) {
  Thread& thread = current_thread();
  thread.state = State::kAtBarrier;
  thread.visit = {site, "barrier", 0, 0, 0, 0};
  leave();
}

template <class T>
T warp_op(Site site, const char* what, unsigned mask, T value, unsigned source) {
  static_assert(sizeof(T) <= sizeof(std::uint64_t));
  Thread& thread = current_thread();
  const unsigned lane = block.current % kWarp;
  if (!(mask >> lane & 1u)) {
    fail(std::string("the mask of the ") + what + " in " + name(site) + " lacks the caller");
  }
  thread.visit = {site, what, mask, source, 0, 0};
  std::memcpy(&thread.visit.value, &value, sizeof(T));
  thread.state = State::kAtWarpOp;
  leave();
  T result;
  std::memcpy(&result, &current_thread().visit.result, sizeof(T));
  return result;
}

template <class T>
T shuffle(Site site, unsigned mask, T value, unsigned source) {
  return warp_op(site, "shuffle", mask, value, source % kWarp);
}

template <class T>
T shuffle_xor(Site site, unsigned mask, T value, unsigned lanes) {
  return warp_op(site, "shuffle", mask, value, block.current % kWarp ^ lanes);
}

inline void wait_for_warp(Site site, unsigned mask) {
  warp_op(site, "warp barrier", mask, 0, block.current % kWarp);
}

// The block's object of type T. Holds the pattern when the block's first thread asks for it.
template <class T>
T& block_shared() {
  alignas(T) static unsigned char storage[sizeof(T)];
  static std::uint64_t generation = 0;
  if (generation != block.generation) {
    generation = block.generation;
    std::memset(storage, kPoison, sizeof(T));
  }
  return *reinterpret_cast<T*>(storage);
}

template <class T>
void check_alignment(const T* pointer) {
  if (reinterpret_cast<std::uintptr_t>(pointer) % alignof(T)) {
    fail("misaligned access of " + std::to_string(alignof(T)) + " bytes");
  }
}

}  // namespace emulator

#define __syncthreads() emulator::wait_for_block({__FILE__, __LINE__})
#define __syncwarp(mask) emulator::wait_for_warp({__FILE__, __LINE__}, mask)
#define __shfl_sync(...) emulator::shuffle({__FILE__, __LINE__}, __VA_ARGS__)
#define __shfl_xor_sync(...) emulator::shuffle_xor({__FILE__, __LINE__}, __VA_ARGS__)

template <class T>
inline T __ldcs(const T* pointer) {
  emulator::check_alignment(pointer);
  return *pointer;
}

template <class T>
inline void __stcs(T* pointer, const T& value) {
  emulator::check_alignment(pointer);
  *pointer = value;
}

template <class T>
inline void __stwb(T* pointer, const T& value) {
  emulator::check_alignment(pointer);
  *pointer = value;
}

// Threads take turns and never lose control between two accesses, so that these are atomic.

template <class T>
inline T atomicAdd(T* address, T value) {
  const T old = *address;
  *address = old + value;
  return old;
}

template <class T>
inline T atomicCAS(T* address, T expected, T value) {
  const T old = *address;
  if (old == expected) *address = value;
  return old;
}

inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<std::uint64_t>(a) * b >> 32);
}

template <class T>
inline T min(T a, T b) {
  return b < a ? b : a;
}

template <class T>
inline T max(T a, T b) {
  return a < b ? b : a;
}

#define EMULATOR_ENTRY(kernel)                                                               \
  extern "C" __attribute__((visibility("default"))) int emulator_entry(                      \
      unsigned grid, unsigned block_x, unsigned block_y, const void* arguments, char* error, \
      std::size_t error_size) {                                                              \
    return emulator::launch(kernel, grid, block_x, block_y, arguments, error, error_size);   \
  }
