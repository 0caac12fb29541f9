"""get_layout: names, sizes, fields and byte maps, against literal offsets."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from cupy_mla import CacheLayout, concat_and_cache_mla, get_layout
from cupy_mla.layouts import LAYOUT_NAMES
from tests import oracle
from tests.helpers import rejected

BF16, E4M3, E5M2 = oracle.BFLOAT16, oracle.E4M3, oracle.E5M2
F16, F32, U8 = oracle.FLOAT16, oracle.FLOAT32, oracle.UINT8

# name, row bytes, storage dtype, width, scale format, fp8, needs a scale, tile, fields
EXPECTED = {
    "bfloat16": (1152, BF16, 576, None, False, False, 0, [
        ("nope", 0, BF16, 512), ("rope", 1024, BF16, 64)]),
    "float16": (1152, F16, 576, None, False, False, 0, [
        ("nope", 0, F16, 512), ("rope", 1024, F16, 64)]),
    "float32": (2304, F32, 576, None, False, False, 0, [
        ("nope", 0, F32, 512), ("rope", 2048, F32, 64)]),
    "fp8_e4m3": (576, U8, 576, None, True, True, 0, [
        ("nope", 0, E4M3, 512), ("rope", 512, E4M3, 64)]),
    "fp8_e5m2": (576, U8, 576, None, True, True, 0, [
        ("nope", 0, E5M2, 512), ("rope", 512, E5M2, 64)]),
    "fp8_ds_mla": (656, U8, 656, "float32", True, False, 128, [
        ("nope", 0, E4M3, 512), ("scale", 512, F32, 4), ("rope", 528, BF16, 64)]),
}  # fmt: skip


@pytest.mark.parametrize("name", list(EXPECTED))
def test_attributes(name):
    layout = get_layout(name)
    size, storage, width, scale_format, is_fp8, needs_scale, tile, fields = EXPECTED[name]
    assert isinstance(layout, CacheLayout)
    assert layout.name == name
    assert (layout.kv_lora_rank, layout.rope_dim) == (512, 64)
    assert layout.row_bytes == size
    assert layout.storage_dtype == storage
    assert isinstance(layout.storage_dtype, np.dtype)
    assert layout.width == width
    assert layout.scale_format == scale_format
    assert layout.is_fp8 is is_fp8
    assert layout.needs_scale is needs_scale
    assert layout.tile == tile
    found = [(field.name, field.offset, field.dtype, field.count) for field in layout.fields]
    assert found == fields
    assert isinstance(layout.fields, tuple)
    assert all(isinstance(field.dtype, np.dtype) for field in layout.fields)


def test_names_are_all_there_is():
    assert tuple(LAYOUT_NAMES) == tuple(EXPECTED)


@pytest.mark.parametrize("name", list(EXPECTED))
def test_fields_fill_a_row_without_holes(name):
    layout = get_layout(name)
    position = 0
    for field in layout.fields:
        assert field.offset == position
        position += field.dtype.itemsize * field.count
    assert position == layout.row_bytes == layout.width * layout.storage_dtype.itemsize


def test_fp8_is_e4m3():
    assert get_layout("fp8") == get_layout("fp8_e4m3")
    assert get_layout("fp8").name == "fp8_e4m3"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_auto_is_the_given_dtype(dtype):
    assert get_layout("auto", dtype=dtype) == get_layout(dtype)
    assert get_layout("auto") == get_layout("bfloat16")


def test_scale_formats_belong_to_the_tiled_layout():
    assert get_layout("fp8_ds_mla").scale_format == "float32"
    pow2 = get_layout("fp8_ds_mla", scale_format="ue8m0")
    assert pow2.scale_format == "ue8m0"
    assert pow2 != get_layout("fp8_ds_mla")
    assert (pow2.row_bytes, pow2.width) == (656, 656)
    for name in EXPECTED:
        if name != "fp8_ds_mla":
            assert get_layout(name, scale_format="ue8m0") == get_layout(name)
            assert get_layout(name, scale_format="ue8m0").scale_format is None


@pytest.mark.parametrize(
    ("name", "rank", "rope", "size", "offset"),
    [
        ("bfloat16", 256, 64, 640, 512),
        ("bfloat16", 7, 3, 20, 14),
        ("float32", 7, 3, 40, 28),
        ("fp8_e4m3", 7, 3, 10, 7),
        ("fp8_e5m2", 512, 32, 544, 512),
    ],
)
def test_other_widths(name, rank, rope, size, offset):
    layout = get_layout(name, kv_lora_rank=rank, rope_dim=rope)
    assert (layout.kv_lora_rank, layout.rope_dim) == (rank, rope)
    assert layout.row_bytes == size
    assert layout.width == rank + rope
    assert {field.name: (field.offset, field.count) for field in layout.fields} == {
        "nope": (0, rank),
        "rope": (offset, rope),
    }


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2"])
def test_rows_without_a_rotary_part(name):
    layout = get_layout(name, rope_dim=0)
    assert layout.width == 512
    assert layout.row_bytes == 512 * layout.storage_dtype.itemsize
    fields = {field.name: (field.offset, field.count) for field in layout.fields}
    assert fields.pop("nope") == (0, 512)
    assert all(count == 0 for _, count in fields.values())


# --- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "per_row", "total"),
    [
        ("bfloat16", 1152, 9_210_691_584),
        ("fp8", 576, 4_605_345_792),
        ("fp8_ds_mla", 656, 5_244_977_152),
    ],
)
def test_bytes_of_61_layers_of_131072_tokens(name, per_row, total):
    layout = get_layout(name)
    assert layout.row_bytes == per_row
    assert layout.block_bytes(1) == per_row
    assert 61 * (131072 // 64) * layout.block_bytes(64) == total


@pytest.mark.parametrize("name", list(EXPECTED))
@pytest.mark.parametrize("block_size", [1, 3, 64, 3328])
def test_bytes_of_a_block(name, block_size):
    assert get_layout(name).block_bytes(block_size) == EXPECTED[name][0] * block_size


def test_a_row_without_rope_in_bfloat16():
    assert get_layout("bfloat16", rope_dim=0).row_bytes == 1024


@pytest.mark.parametrize("name", list(EXPECTED))
def test_empty_makes_a_cache_that_takes_rows(name):
    layout = get_layout(name)
    cache = layout.empty(3, 5)
    assert isinstance(cache, np.ndarray)
    assert cache.shape == (3, 5, EXPECTED[name][2])
    assert cache.dtype == EXPECTED[name][1]
    assert cache.flags.c_contiguous
    assert cache.flags.writeable
    dtype = {"float16": F16, "float32": F32}.get(name, BF16)
    scale = 1.0 if layout.needs_scale else None
    concat_and_cache_mla(
        np.ones((1, 512), dtype), np.ones((1, 64), dtype), cache, np.array([14]), layout, scale
    )
    row = cache.reshape(15, -1)[14].view(np.uint8)
    expected = oracle.encode_row(np.ones(512, dtype), np.ones(64, dtype), name, scale)
    assert row.tobytes() == expected


@pytest.mark.parametrize("module", [None, "numpy", [], math])
def test_empty_takes_a_module_of_arrays(module):
    with rejected(TypeError, "empty", "xp", "numpy or cupy", repr(module)):
        get_layout("fp8").empty(1, 1, xp=module)


def test_empty_refuses_what_no_memory_holds():
    most = (2**63 - 1) // (576 * 2**40)
    with rejected(ValueError, "empty", "num_blocks", f"at most {most} of {2**40} rows", str(2**40)):
        get_layout("fp8").empty(2**40, 2**40)


def test_empty_asks_the_given_module():
    class Module:
        """Records what a cache is asked for."""

        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)

            def make(shape, *arguments, **options):
                made.append((shape, arguments, options))
                return "an array"

            return make

    made = []
    assert get_layout("fp8_ds_mla").empty(2, 4, xp=Module()) == "an array"
    [(shape, arguments, options)] = made
    assert tuple(shape) == (2, 4, 656)
    assert np.dtype([*arguments, *options.values()][0]) == np.uint8


# --- a byte map written by hand -------------------------------------------------------------------

GOLDEN_ROW = {
    0: "38",  # 1.0 / 2**-8 is 256, but the tile's scale is 448 / 448
    127: "7E",
    128: "7E",
    255: "00",
    512: "00 00 80 3F",  # scale of tile 0: 1.0
    516: "00 00 00 3F",  # of tile 1: 0.5
    520: "00 00 80 00",  # of tile 2, all zero: the smallest normal float32
    524: "00 00 00 40",  # of tile 3: 2.0
    511: "FE",
    528: "80 3F",  # rope[0] = 1.0
    530: "00 80",  # rope[1] = -0.0
    654: "C1 7F",  # rope[63]: a NaN with a payload
}


def test_golden_row_of_fp8_ds_mla():
    kv_c = np.zeros((1, 512), np.float32)
    kv_c[0, 0], kv_c[0, 127] = 1.0, 448.0
    kv_c[0, 128] = 224.0
    kv_c[0, 511] = -896.0
    k_pe = np.zeros((1, 64), np.uint16)
    k_pe[0, [0, 1, 63]] = [0x3F80, 0x8000, 0x7FC1]
    cache = np.full((1, 1, 656), 0xA5, np.uint8)
    concat_and_cache_mla(kv_c.astype(BF16), k_pe.view(BF16), cache, np.array([0]), "fp8_ds_mla")
    row = cache[0, 0]
    for offset, text in GOLDEN_ROW.items():
        found = row[offset : offset + len(text.split())].tobytes().hex(" ").upper()
        assert found == text, offset
    assert np.count_nonzero(row) == 4 + 2 + 1 + 1 + 1 + 2 + 1 + 2


# --- what a layout says about itself --------------------------------------------------------------


@pytest.mark.parametrize("name", list(EXPECTED))
def test_description_names_every_field_with_its_offset(name):
    layout = get_layout(name)
    text = layout.describe()
    html = layout._repr_html_()
    assert isinstance(text, str)
    for shown in (text, html):
        assert name in shown
        assert str(EXPECTED[name][0]) in shown
        for field_name, offset, dtype, count in EXPECTED[name][-1]:
            for part in (field_name, str(offset), dtype.name, str(count)):
                assert part in shown, part
    assert "<" in html
    assert "<" not in text or name in text


@pytest.mark.parametrize("name", list(EXPECTED))
def test_dictionary_survives_json(name):
    size, storage, width, scale_format, *_, fields = EXPECTED[name]
    found = json.loads(json.dumps(get_layout(name).to_dict()))
    assert found["name"] == name
    assert found["row_bytes"] == size
    assert found["width"] == width
    assert found["scale_format"] == scale_format
    assert found["storage_dtype"] == storage.name
    for given, (field_name, offset, dtype, count) in zip(found["fields"], fields, strict=True):
        assert given["name"] == field_name
        assert given["offset"] == offset
        assert given["dtype"] == dtype.name
        assert given["count"] == count


def test_constants_for_kernels_hold_the_row_size():
    text = get_layout("fp8_ds_mla").cuda_constants()
    for number in ("656", "528", "512"):
        assert number in text
    assert "656" not in get_layout("fp8_e4m3").cuda_constants()


def test_layouts_are_immutable_and_hashable():
    layout = get_layout("fp8_ds_mla")
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.name = "other"
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.fields[0].offset = 1
    assert len({layout, get_layout("fp8_ds_mla"), get_layout("bfloat16")}) == 2


def test_a_layout_is_a_layout():
    layout = get_layout("fp8_ds_mla", scale_format="ue8m0")
    assert get_layout(layout) == layout
