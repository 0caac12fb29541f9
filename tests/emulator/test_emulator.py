"""The emulator itself, by kernels that do what a GPU leaves undefined: it has to be an error."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from cupy_mla._cuda import sources
from cupy_mla.errors import CompileError
from tests.emulator import device as emulator
from tests.emulator.device import EmulatorError, run_source

HEADERS = sources.flatten(("memory.cuh",))
KERNEL = """
using namespace cupy_mla;
struct Params { u64 out; };
extern "C" __global__ void kernel(const Params p) {
  [[maybe_unused]] u32* out = reinterpret_cast<u32*>(p.out);
  [[maybe_unused]] const u32 thread = threadIdx.y * blockDim.x + threadIdx.x;
#line 1 "body"
  BODY
}
"""


def run(body: str, threads: tuple[int, int] = (32, 2), grid: int = 1) -> np.ndarray:
    """Run a kernel of one body; return what it put in 1024 words."""
    out = np.zeros(1024, np.uint32)
    source = HEADERS + KERNEL.replace("BODY", body)
    run_source(source, "kernel", grid, threads, [out.ctypes.data])
    return out


def test_threads_and_blocks_are_numbered():
    body = "out[blockIdx.x * 64 + thread] = blockIdx.x << 16 | threadIdx.y << 8 | threadIdx.x;"
    out = run(body, grid=3)
    thread = np.arange(64)
    for block in range(3):
        want = block << 16 | thread // 32 << 8 | thread % 32
        assert (out[64 * block : 64 * block + 64] == want).all()


def test_a_barrier_orders_shared_memory():
    body = """
      struct Words { u32 of[64]; };
      Words& words = block_shared<Words>();
      words.of[thread] = thread;
      __syncthreads();
      out[thread] = words.of[63 - thread];
      __syncthreads();
      words.of[thread] = 1000 + thread;
      __syncthreads();
      out[64 + thread] = words.of[63 - thread];"""
    out = run(body)
    assert (out[:64] == np.arange(64)[::-1]).all()
    assert (out[64:128] == 1000 + np.arange(64)[::-1]).all()


def test_a_missing_barrier_shows():
    """Without it a thread reads what its successors have not written yet."""
    body = """
      struct Words { u32 of[64]; };
      Words& words = block_shared<Words>();
      words.of[thread] = thread;
      out[thread] = words.of[63 - thread];"""
    assert (run(body)[:64] != np.arange(64)[::-1]).any()


def test_shuffles_exchange_values_of_one_warp():
    body = """
      out[thread] = __shfl_xor_sync(0xFFFFFFFFu, thread, 5u);
      out[64 + thread] = __shfl_sync(0xFFFFFFFFu, thread, 3u);
      u32 sum = thread;
      for (u32 step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
      out[128 + thread] = sum;"""
    thread = np.arange(64)
    out = run(body)
    assert (out[:64] == (thread ^ 5)).all()
    assert (out[64:128] == thread // 32 * 32 + 3).all()
    assert (out[128:192] == np.repeat([496, 496 + 32 * 32], 32)).all()


def test_a_shuffle_of_part_of_a_warp():
    body = "if (thread % 32 < 8) out[thread] = __shfl_xor_sync(0xFFu, thread + 1, 1u);"
    out = run(body)
    assert out[:8].tolist() == [2, 1, 4, 3, 6, 5, 8, 7]
    assert out[32:40].tolist() == [34, 33, 36, 35, 38, 37, 40, 39]
    assert not out[8:32].any()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("if (thread != 5) __syncthreads();", "thread 5 of block 0 has exited"),
        (
            "if (thread < 32) { __syncthreads(); } else {\n __syncthreads(); }",
            "waits at the barrier in body:1, but thread 63 of block 0 at the one in body:2",
        ),
        (
            "for (u32 i = 0; i <= thread / 32; ++i) __syncthreads();",
            "thread 32 of block 0 waits at the barrier in body:1, but thread 0",
        ),
        (
            "if (thread % 32 == 9) return;\n out[thread] = __shfl_xor_sync(~0u, thread, 1u);",
            "thread 9 of block 0 has exited",
        ),
        (
            "if (thread % 32 < 8) out[thread] = __shfl_sync(0xFFu, thread, 8u);",
            "reads lane 8, which is not in its mask",
        ),
        (
            "if (thread % 32 < 9) out[thread] = __shfl_sync(0xFFu, thread, 0u);",
            "lacks the caller",
        ),
        (
            "out[thread] = __shfl_sync(thread < 16 ? ~0u : 0xFFFFFFFEu, thread, 1u);",
            "or with another mask",
        ),
        (
            "if (thread % 2) { out[thread] = __shfl_sync(~0u, thread, 0u); } else {\n"
            "out[thread] = __shfl_sync(~0u, thread, 0u); }",
            "of the same warp at the shuffle in body:",
        ),
        (
            "for (u32 i = 0; i < 2 - thread / 63; ++i) __shfl_sync(~0u, thread, 0u);",
            "thread 32 of block 0 waits at the shuffle in body:1, but thread 63",
        ),
        (
            "if (thread < 8) __syncwarp(0xFFu); else if (thread < 10) __syncwarp(0x700u);",
            "waits at the warp barrier",
        ),
        (
            "store_vector(out + 1, load_vector(out), thread == 0);",
            "misaligned access of 16 bytes",
        ),
        ("store_vector(out, load_vector(out + 2), true);", "misaligned access of 16 bytes"),
    ],
)
def test_what_a_gpu_leaves_undefined_is_an_error(body, message):
    with pytest.raises(EmulatorError) as caught:
        run(body)
    assert message in str(caught.value)


def test_a_mask_may_not_name_lanes_that_do_not_exist():
    with pytest.raises(EmulatorError, match="names lane 20, which does not exist"):
        run("out[thread] = __shfl_sync(~0u, thread, 0u);", (20, 1))


def test_shared_memory_holds_a_pattern_before_each_block():
    body = """
      struct Word { u32 value; };
      Word& word = block_shared<Word>();
      if (thread == 0) out[blockIdx.x] = word.value;
      word.value = 7;"""
    assert (run(body, grid=4)[:4] == 0xCDCDCDCD).all()


def test_shared_memory_of_the_language_does_not_compile():
    with pytest.raises(CompileError, match="__shared__"):
        run("__shared__ u32 words[64]; out[thread] = words[thread];")


def test_the_device_works_on_after_an_error():
    device = emulator.EmulatorDevice()
    source = HEADERS + KERNEL.replace("BODY", "if (out[thread] == 0) __syncthreads();")
    function = device.compile(source, "kernel")
    out = np.arange(64, dtype=np.uint32)
    arguments = emulator.Arguments(np.array([out.ctypes.data], np.uint64).tobytes())
    for _ in range(3):
        with pytest.raises(EmulatorError):
            device.launch(function, 1, (32, 2), arguments, 0)
    out[0] = 1
    device.launch(function, 1, (32, 2), arguments, 0)


def test_memory_of_the_device_is_aligned_and_not_zero():
    device = emulator.EmulatorDevice()
    memory = device.allocate(100)
    assert memory.ptr % 256 == 0
    assert (device.download(memory, 0) == 0xCD).all()
    device.upload(memory, np.arange(100, dtype=np.uint8), 0)
    assert (device.download(memory, 0) == np.arange(100)).all()


def test_libraries_do_not_share_state(tmp_path):
    """Two kernels of one name: the second one must not run on the statics of the first."""
    first = run("struct A { u32 v; }; block_shared<A>().v = 1; out[0] = block_shared<A>().v;")
    second = run("struct A { u32 v; }; block_shared<A>().v = 2; out[0] = block_shared<A>().v;")
    assert (first[0], second[0]) == (1, 2)
    assert ctypes.sizeof(ctypes.c_void_p) == 8
