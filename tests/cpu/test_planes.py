"""Layouts that keep the parts of rows apart in a block: where they lie, and who refuses them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from cupy_mla import (
    GroupedCacheWriter,
    concat_and_cache_mla,
    concat_and_cache_mla_grouped,
    get_layout,
    read_slots,
)
from tests import helpers, oracle
from tests.helpers import FORMATS, rejected


def test_the_bytes_of_indexer_keys():
    """A block of B rows: B x 128 codes, then B scales of 4 bytes."""
    layout = get_layout("indexer_fp8")
    assert (layout.row_bytes, layout.width, layout.storage_dtype) == (132, 132, np.uint8)
    assert layout.block_bytes(64) == 8448
    assert layout.is_planar
    for block_size, row, code, scale in (
        (1, 0, 0, 128),
        (2, 1, 128, 260),
        (64, 0, 0, 8192),
        (64, 63, 8064, 8444),
        (3328, 3327, 425856, 439292),
    ):
        assert layout.offset_in_block("nope", row, block_size) == code
        assert layout.offset_in_block("scale", row, block_size) == scale
    assert [plane.start(64) for plane in layout.planes] == [0, 8192]
    assert [plane.nbytes for plane in layout.planes] == [128, 4]
    assert layout.empty(3, 64).shape == (3, 64, 132)


@pytest.mark.parametrize("fmt", FORMATS)
def test_layouts_of_whole_rows_have_one_plane(fmt):
    layout = get_layout(fmt)
    assert not layout.is_planar
    (plane,) = layout.planes
    assert (plane.start(64), plane.nbytes) == (0, layout.row_bytes)
    for field in layout.fields:
        assert field.plane == 0
        offset = layout.offset_in_block(field.name, 5, 64)
        assert offset == 5 * oracle.row_bytes(fmt, 512, 64) + field.offset


def test_a_part_that_the_layout_does_not_have():
    with rejected(ValueError, "offset_in_block", "name", "nope or scale", "'rope'"):
        get_layout("indexer_fp8").offset_in_block("rope", 0, 64)


def test_planes_are_shown_by_row_and_block_size():
    text = get_layout("indexer_fp8").describe().splitlines()
    assert text[0].startswith("indexer_fp8: 132 bytes a row, row r in a block of B rows")
    assert text[1].split()[:2] == ["128*r", "nope"]
    assert text[2].split("  ")[1:3] == ["128*B + 4*r", "scale"]
    assert "128*B + 4*r" in get_layout("indexer_fp8")._repr_html_()
    document = json.loads(json.dumps(get_layout("indexer_fp8").to_dict()))
    assert [field["plane"] for field in document["fields"]] == [0, 1]


def test_sizes_given_for_other_layouts_do_not_change_it():
    layout = get_layout("indexer_fp8", kv_lora_rank=256, rope_dim=0)
    assert layout == get_layout("indexer_fp8")
    assert (layout.kv_lora_rank, layout.rope_dim) == (128, 0)
    assert get_layout("indexer_fp8", scale_format="ue8m0").scale_format == "ue8m0"


@pytest.mark.parametrize("kv_cache_dtype", ["indexer_fp8", get_layout("indexer_fp8")])
def test_inserts_of_latent_rows_refuse_indexer_keys(backend, kv_cache_dtype):
    cache = helpers.make_cache(backend, "fp8_e4m3", 2, 4, rank=132, rope=0)
    kv_c = backend.array(np.ones((1, 128), np.float32))
    slots = backend.array(np.array([0]))
    with rejected(ValueError, "concat_and_cache_mla", "kv_cache_dtype", "indexer", caches=[cache]):
        concat_and_cache_mla(kv_c, None, cache.array, slots, kv_cache_dtype)
    sizes = {"kv_lora_rank": 128, "rope_dim": 0}
    with rejected(ValueError, "GroupedCacheWriter", "kv_cache_dtype", "indexer"):
        GroupedCacheWriter([cache.array], kv_cache_dtype, **sizes)


def test_the_grouped_operation_refuses_indexer_keys():
    fake = helpers.FakeDevice
    with rejected(ValueError, "concat_and_cache_mla_grouped", "kv_cache_dtype", "indexer"):
        concat_and_cache_mla_grouped(
            fake((2, 3, 128), "<f4"),
            None,
            fake((2,), "<i8"),
            fake((3,), "<i8"),
            4,
            528,
            132,
            kv_cache_dtype="indexer_fp8",
        )


@pytest.mark.parametrize("block_size", [1, 3, 64])
def test_indexer_rows_are_read_by_slot(backend, rng, block_size):
    codes = rng.integers(0, 0x7F, (2, block_size, 128), np.uint8)
    scales = rng.standard_normal((2, block_size)).astype("<f4")
    blocks = np.concatenate(
        [codes.reshape(2, -1), scales.view(np.uint8).reshape(2, -1)], axis=1
    ).reshape(2, block_size, 132)
    slots = np.array([2 * block_size - 1, -1, 0, 2 * block_size])
    got = read_slots(backend.array(blocks), backend.array(slots), "indexer_fp8")
    rows = codes.view(oracle.E4M3).astype(np.float32) * scales[..., None]
    expected = np.zeros((4, 128), np.float32)
    expected[0], expected[2] = rows[1, -1], rows[0, 0]
    helpers.assert_values_equal(backend.to_numpy(got), expected)
