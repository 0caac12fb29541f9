"""What the compiler makes of the fused kernels."""

from __future__ import annotations

import re

import pytest

from cupy_mla._cuda import registry
from tests.nvrtc import nvrtc
from tests.nvrtc.test_kernels import ARCHS, compiled

pytestmark = pytest.mark.skipif(
    nvrtc.library() is None, reason='needs NVRTC: pip install "cupy-mla[emulator]"'
)

KERNELS = ("context", "norm_rope", "query", "indexer")
every_arch = pytest.mark.parametrize("arch", ARCHS)
every_kernel = pytest.mark.parametrize(
    "special",
    [special for name in KERNELS for special in registry.specialisations(name)],
    ids=lambda s: s.entry,
)


@every_arch
@every_kernel
def test_a_multiprocessor_holds_enough_warps(special, arch):
    """Each has a row of a kilobyte on its way: 20 of them keep the memory of an H200 busy."""
    registers = -(-compiled(special, arch).registers // 8) * 8
    threads = special.kernel.max_threads
    assert 65536 // (registers * threads) * threads // 32 >= 20


@every_kernel
def test_vectors_carry_rows(special):
    ptx = compiled(special, "sm_90").ptx
    if special.kernel.name == "indexer":  # a lane has four elements
        assert re.search(r"ld\.global\.(u64|v4)", ptx) or special.input.dtype == "float32"
        return
    assert re.search(r"ld\.global\.cs\.v4", ptx)
    assert re.search(r"st\.global\.cs\.v4", ptx)
    assert re.search(r"st\.global\.wb\.v4", ptx)


@every_arch
@every_kernel
def test_the_hardware_converts_where_it_can(special, arch):
    ptx = compiled(special, arch).ptx
    stores_codes = special.kernel.name != "context" or special.format.layout.startswith("fp8")
    has_instruction = bool(re.search(r"cvt\.rn\.satfinite\.e[45]m[32]x2\.f32", ptx))
    assert has_instruction == (stores_codes and int(arch.removeprefix("sm_")) >= 89)


@every_kernel
def test_nothing_is_contracted_but_quotients(special):
    """fma only where it divides: a sum of squares and RoPE are rounded operation by operation."""
    ptx = compiled(special, "sm_90").ptx
    assert re.search(r"mul\.rn\.f32", ptx)
    assert not re.search(r"\b(mad|fma)\.f32|\b(mul|add|sub)\.(ftz\.)?f32", ptx)
