"""Sources, argument structures, the table of kernels, and grids: the host side of a launch."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_mla import _kernel_files
from cupy_mla._cuda import compiler, geometry, params, registry, sources
from cupy_mla.errors import CompileError
from cupy_mla.layouts import LAYOUT_NAMES, get_layout
from tests.emulator.device import EmulatorDevice

EVERY = tuple(registry.specialisations())
INSERTS = tuple(registry.specialisations("insert"))
every_specialisation = pytest.mark.parametrize("special", EVERY, ids=lambda s: s.entry)


def source_of(special, **sizes) -> sources.Source:
    """Return the source of a specialisation."""
    return sources.build(special, get_layout(special.format.layout, **sizes))


# --- sources --------------------------------------------------------------------------------------


@every_specialisation
def test_a_source_needs_no_include_path(special):
    source = source_of(special)
    assert "#include" not in source.text
    assert "#pragma once" not in source.text
    assert source.text.count('extern "C" __global__') == 1
    assert source.entry in source.text


@every_specialisation
def test_line_directives_lead_back_to_the_files(special):
    """Each line of the text stands in its file at the number that the directives say."""
    name, number, checked = None, 0, 0
    for line in source_of(special).text.splitlines():
        directive = re.fullmatch(r'#line (\d+) "(.*)"', line)
        if directive:
            number, name = int(directive[1]), directive[2]
            continue
        if name in _kernel_files.names() and line:
            assert _kernel_files.read(name).splitlines()[number - 1] == line
            checked += 1
        number += 1
    assert checked > 300


def test_files_are_joined_once_each_and_before_their_users():
    text = sources.flatten(("insert.cu", "flat_fp8_rows.cuh"))
    opened = [name for number, name in re.findall(r'#line (\d+) "(.*)"', text) if number == "1"]
    assert len(opened) == len(set(opened))
    assert opened[0] == "insert.cu"
    assert text.index("alignas(16) LayerEntry {") < text.index("struct InsertParams {")
    assert text.index("float fma_rn_f32(") < text.index("struct QuotientScale {")
    assert text.index("struct QuotientScale {") < text.index("struct FlatFp8Rows {")


def test_every_kernel_file_is_used():
    used = set()
    for special in EVERY:
        used |= set(re.findall(r'#line 1 "(.*?)"', source_of(special).text))
    assert set(_kernel_files.names()) <= used


def test_specialisations_have_names_and_texts_of_their_own():
    assert len({s.entry for s in EVERY}) == len({source_of(s).digest for s in EVERY}) == len(EVERY)


def test_one_source_serves_all_sizes_of_a_flat_layout():
    special = registry.find("insert", "fp8_e4m3", "bfloat16")
    assert source_of(special) is source_of(special, kv_lora_rank=7, rope_dim=0)


def test_the_digest_is_that_of_all_files():
    assert compiler.digest() == _kernel_files.digest()


def test_only_exact_math_holds_inline_ptx():
    for name in _kernel_files.names():
        assert name == "exact_math.cuh" or not re.search(r"\basm\b", _kernel_files.read(name)), name


def test_exact_math_never_flushes():
    code = re.sub(r"//.*", "", _kernel_files.read("exact_math.cuh"))
    assert code.count("asm(") > 12
    assert ".ftz" not in code


# --- the table of kernels -------------------------------------------------------------------------


def test_every_layout_takes_what_its_kernels_are_built_for():
    formats = registry.KERNELS["insert"].formats
    assert [row_format.layout for row_format in formats] == list(LAYOUT_NAMES)
    for row_format in formats:
        built = {tuning.dtype for tuning in row_format.inputs}
        assert built == {dtype.name for dtype in get_layout(row_format.layout).input_dtypes}


@every_specialisation
def test_find(special):
    found = registry.find(special.kernel.name, special.format.layout, special.input.dtype)
    assert found == special


def test_what_is_not_built_is_not_found():
    with pytest.raises(KeyError, match="insert is not built for layout fp8_ds_mla and input float"):
        registry.find("insert", "fp8_ds_mla", "float32")


# --- structures -----------------------------------------------------------------------------------


def test_structures_have_no_holes():
    for dtype in (
        np.dtype({"names": ["a", "b"], "formats": ["<i4", "<i8"], "offsets": [0, 8]}),
        np.dtype({"names": ["a"], "formats": ["<i4"], "offsets": [0], "itemsize": 8}),
        np.dtype({"names": ["a"], "formats": ["<i4"], "offsets": [4], "itemsize": 8}),
    ):
        with pytest.raises(TypeError, match="hole"):
            params.Struct("Holey", dtype)


@pytest.mark.parametrize("change", ["size", "offset"])
def test_a_structure_that_differs_from_the_source_does_not_compile(change):
    text = source_of(registry.find("insert", "bfloat16", "bfloat16")).text
    if change == "size":
        broken = text.replace("  i32 reserved[3];", "  i32 reserved[7];")
    else:
        broken = text.replace(
            "  i32 tokens;\n  i32 slot_bytes;", "  i32 slot_bytes;\n  i32 tokens;"
        )
    assert broken != text
    with pytest.raises(CompileError, match=f"{change} of InsertParams"):
        EmulatorDevice().compile(broken, "insert_bfloat16_bfloat16")


def test_a_layout_that_differs_from_the_source_does_not_compile():
    text = source_of(registry.find("insert", "fp8_ds_mla", "bfloat16")).text
    broken = text.replace("kScaleOffset = 512", "kScaleOffset = 528")
    with pytest.raises(CompileError, match="scales follow the codes"):
        EmulatorDevice().compile(broken, "insert_fp8_ds_mla_bfloat16")


def test_offsets():
    assert params.INSERT_PARAMS.offset("kv_c") == 0
    assert params.INSERT_PARAMS.offset("layer") % 16 == 0
    assert params.LAYER_ENTRY.dtype.itemsize == 64
    assert params.INSERT_PARAMS.zeros().nbytes == params.INSERT_PARAMS.dtype.itemsize


@given(st.integers(1, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_divisors_are_exact(value, dividend):
    for number in (dividend, dividend - dividend % value, 2**31 - 1):
        for n in {number, max(number - 1, 0)}:
            _, multiplier, shift = params.divisor(value)
            assert multiplier < 2**32
            assert ((n * multiplier >> 32) + n) < 2**32
            assert ((n * multiplier >> 32) + n) >> shift == n // value


@pytest.mark.parametrize("value", [0, -1, 2**31])
def test_divisors_out_of_range(value):
    with pytest.raises(ValueError, match="between 1 and"):
        params.divisor(value)


# --- grids ----------------------------------------------------------------------------------------


@given(
    st.sampled_from(INSERTS),
    st.integers(1, 70) | st.just(2**20),
    st.integers(1, 3000) | st.integers(1, 2**31 - 2**17),
    st.integers(1, 700) | st.sampled_from([512, 4096, 100_000]),
    st.integers(0, 128),
    st.sampled_from([1, 20, 132]),
)
def test_grids_cover_every_token_once(special, layers, tokens, rank, rope, sm_count):
    if special.format.warp_a_row:
        rank, rope = 512, 64
    sizes = {"layers": layers, "tokens": tokens, "lora_rank": rank, "rope_dim": rope}
    try:
        shape = geometry.insert_shape(special, **sizes, sm_count=sm_count)
    except ValueError as error:
        assert "must fit a grid" in str(error)
        assert layers * tokens >= 2**31 - 2**17
        return
    lanes, rows = shape.block
    assert 1 <= lanes * rows <= geometry.MAX_THREADS
    assert shape.block_tokens <= lanes * rows
    assert shape.grid == layers * shape.blocks_per_layer < 2**31
    assert (shape.blocks_per_layer - 1) * shape.block_tokens < tokens
    assert shape.blocks_per_layer * shape.block_tokens >= tokens
    assert rows <= shape.block_tokens
    if special.format.warp_a_row:
        assert lanes == 32


# --- compiling ------------------------------------------------------------------------------------


def test_each_source_is_compiled_once_a_device():
    device = EmulatorDevice()
    special = registry.find("insert", "fp8_e4m3", "bfloat16")
    first = compiler.load(device, special, get_layout("fp8_e4m3"))
    assert compiler.load(device, special, get_layout("fp8_e4m3")) is first
    assert compiler.load(device, special, get_layout("fp8_e4m3", kv_lora_rank=256)) is first
    assert device.compiled == ["insert_fp8_e4m3_bfloat16"]
    compiler.load(EmulatorDevice(), special, get_layout("fp8_e4m3"))
    assert device.compiled == ["insert_fp8_e4m3_bfloat16"]


def test_what_does_not_compile_is_named(monkeypatch):
    read = _kernel_files.read

    def broken(name: str) -> str:
        return read(name) + ("\nint x = no_such_name;\n" if name == "paging.cuh" else "")

    monkeypatch.setattr(_kernel_files, "read", broken)
    sources._build.cache_clear()
    special = registry.find("insert", "fp8_e5m2", "float16")
    with pytest.raises(CompileError) as caught:
        compiler.load(EmulatorDevice(), special, get_layout("fp8_e5m2"))
    sources._build.cache_clear()
    text = str(caught.value)
    line = len(read("paging.cuh").splitlines()) + 2
    for part in ("insert", "fp8_e5m2", "float16", "emulator", f"paging.cuh:{line}", "no_such_name"):
        assert part in text
