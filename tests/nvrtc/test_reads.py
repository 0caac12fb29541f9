"""What the compiler makes of the kernels that read rows: wide accesses, hardware conversions."""

from __future__ import annotations

import re

import pytest

from cupy_mla._cuda import registry
from tests.nvrtc import nvrtc
from tests.nvrtc.test_kernels import ARCHS, compiled

pytestmark = pytest.mark.skipif(
    nvrtc.library() is None, reason='needs NVRTC: pip install "cupy-mla[emulator]"'
)

READS = tuple(s for name in ("gather", "copy", "convert") for s in registry.specialisations(name))
every_read = pytest.mark.parametrize("special", READS, ids=lambda s: s.entry)
every_arch = pytest.mark.parametrize("arch", ARCHS)


@every_read
def test_vectors_of_16_bytes_go_out(special):
    ptx = compiled(special, "sm_90").ptx
    assert re.search(r"st\.global\.cs\.v4", ptx)
    assert re.search(r"st\.global\.wb\.v4", ptx)


@every_read
def test_rows_come_in_by_loads_of_what_a_store_needs(special):
    """A vector of output is made of 4 to 32 bytes of a row, each asked for once."""
    ptx = compiled(special, "sm_90").ptx
    if special.kernel.name != "gather":
        assert re.search(r"ld\.global\.cs\.v4", ptx)
        return
    stored = {"bfloat16": 2, "float16": 2, "float32": 4}
    elements = 16 // stored[special.input.dtype]
    nbytes = elements * stored.get(special.format.layout, 1)
    pattern = {4: r"\.(u|b)32", 8: r"\.(u|b)64"}.get(nbytes, r"\.v4\.(u|b)32")
    assert re.search(r"ld\.global\.cs" + pattern, ptx)


@every_arch
@pytest.mark.parametrize("output", ["bfloat16", "float16", "float32"])
def test_the_hardware_widens_and_narrows_where_it_can(arch, output):
    number = int(arch.removeprefix("sm_"))
    ptx = compiled(registry.find("gather", "fp8_ds_mla", output), arch).ptx
    assert ("cvt.rn.f16x2.e4m3x2" in ptx) == (number >= 89)
    if output != "float32":
        pair = "bf16x2" if output == "bfloat16" else "f16x2"
        assert (f"cvt.rn.{pair}.f32" in ptx) == (number >= 80)


@every_arch
@every_read
def test_a_multiprocessor_holds_enough_threads(special, arch):
    """At least 24 warps of blocks of 9, or 8 where a warp has a row of its own."""
    result = compiled(special, arch)
    warps = 65536 // (32 * -(-result.registers // 8) * 8)
    block = 8 if special.format.warp_a_row else 9
    assert warps // block * block >= 24
