"""Every specialisation, compiled for every generation of GPU with CuPy's own options."""

from __future__ import annotations

import functools
import re

import pytest

from cupy_mla._cuda import registry, sources
from cupy_mla.layouts import get_layout
from tests.emulator import probe
from tests.nvrtc import nvrtc

pytestmark = pytest.mark.skipif(
    nvrtc.library() is None, reason='needs NVRTC: pip install "cupy-mla[emulator]"'
)

ARCHS = ("sm_75", "sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
every_arch = pytest.mark.parametrize("arch", ARCHS)
every_specialisation = pytest.mark.parametrize(
    "special", tuple(registry.specialisations()), ids=lambda s: s.entry
)
every_insert = pytest.mark.parametrize(
    "special", tuple(registry.specialisations("insert")), ids=lambda s: s.entry
)


@functools.cache
def compiled(special: registry.Specialisation, arch: str) -> nvrtc.Compiled:
    """Compile a specialisation."""
    source = sources.build(special, get_layout(special.format.layout))
    return nvrtc.compile_source(source.text, arch)


@pytest.mark.parametrize("name", list(registry.KERNELS))
def test_functions_of_the_device_say_so(name):
    """Lambdas with parameters of any type, for example, would be the host's."""
    for special in registry.specialisations(name):
        source = sources.build(special, get_layout(special.format.layout))
        without = nvrtc.DEVICE_BY_DEFAULT
        assert nvrtc.compile_source(source.text, "compute_75", without=without).ptx


@every_arch
@every_specialisation
def test_a_kernel_compiles_without_local_memory_or_flushing(special, arch):
    result = compiled(special, arch)
    assert not re.search("warning|error", result.log), result.log
    assert (result.stack_bytes, result.spill_bytes) == (0, 0)
    assert not re.search(r"\b(ld|st)\.local\b|\.local \.", result.ptx)
    # Not one instruction that flushes: comparisons and absolute values count too.
    assert ".ftz" not in result.ptx
    assert f".entry {special.entry}(" in result.ptx


@every_arch
@every_insert
def test_a_multiprocessor_holds_enough_threads(special, arch):
    """At least 24 warps: below that too few rows are in flight to keep the memory busy."""
    result = compiled(special, arch)
    warps = 65536 // (32 * -(-result.registers // 8) * 8)
    block = 8 if special.format.warp_a_row else 9
    assert warps // block * block >= 24


@every_insert
def test_vectors_of_16_bytes_carry_the_rows(special):
    ptx = compiled(special, "sm_90").ptx
    assert re.search(r"ld\.global\.cs\.v4", ptx)
    assert re.search(r"st\.global\.cs\.v4", ptx)
    assert re.search(r"st\.global\.wb\.v4", ptx)


@every_arch
@pytest.mark.parametrize("layout", ["fp8_e4m3", "fp8_e5m2", "fp8_ds_mla"])
def test_the_hardware_converts_where_it_can(layout, arch):
    code = "e5m2" if layout == "fp8_e5m2" else "e4m3"
    ptx = compiled(registry.find("insert", layout, "bfloat16"), arch).ptx
    has_instruction = f"cvt.rn.satfinite.{code}x2.f32" in ptx
    assert has_instruction == (int(arch.removeprefix("sm_")) >= 89)


@every_insert
def test_inserts_divide_without_a_division(special):
    """The point of quotients.cuh: neither division instruction nor a call for one."""
    ptx = compiled(special, "sm_90").ptx
    assert not re.search(r"\bdiv\.(rn|full|approx)", ptx)


@every_arch
def test_the_probe_of_exact_math_flushes_nowhere(arch):
    result = nvrtc.compile_source(probe.source(), arch)
    assert ".ftz" not in result.ptx
    for instruction in ("add", "sub", "mul", "fma", "div", "rcp", "sqrt"):
        assert f"{instruction}.rn.f32" in result.ptx


def test_ptx_of_the_oldest_target_holds_the_software_path():
    """What the driver compiles for any newer GPU when asked to: that is how it is tested there."""
    result = nvrtc.compile_source(probe.source(), "compute_75")
    assert ".target sm_75" in result.ptx
    assert "e4m3x2" not in result.ptx


def test_flushing_would_be_seen():
    """The plain operators do flush with these options."""
    source = 'extern "C" __global__ void k(float* x) { x[0] = x[1] / x[2]; }'
    assert "div.rn.ftz.f32" in nvrtc.compile_source(source, "sm_90").ptx


def test_local_memory_would_be_seen():
    source = """extern "C" __global__ void k(int* x, int n) {
      int values[64];
      for (int i = 0; i < 64; ++i) values[x[i] & 63] = i;
      x[0] = values[n];
    }"""
    assert nvrtc.compile_source(source, "sm_90").stack_bytes > 0


def test_an_error_names_file_and_line():
    with pytest.raises(nvrtc.NvrtcError, match=r"paging.cuh\(7\): error: .*no_such_name"):
        nvrtc.compile_source('#line 7 "paging.cuh"\nint x = no_such_name;', "sm_90")
