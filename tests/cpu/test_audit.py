"""audit_cache and compare_caches: places by slot, part and element, and what scales prove."""

from __future__ import annotations

import json
import re
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_mla import audit_cache, concat_and_cache_mla, get_layout
from cupy_mla.inspection import compare_caches
from tests import helpers, oracle
from tests.helpers import make_cache, rejected


def ds_mla_row(code=0x38, scales=(1.0,) * 4, rope=b"\x80\x3f" * 64):
    """512 codes, four float32 scales, 64 bfloat16."""
    return bytes([code]) * 512 + np.array(scales, "<f4").tobytes() + rope


def ds_mla_cache(backend, rows, block_size=4):
    """A contiguous cache of the given rows; a row that is None holds 7F bytes."""
    data = b"".join(b"\x7f" * 656 if row is None else bytes(row) for row in rows)
    buffer = backend.buffer(np.frombuffer(data, np.uint8).copy())
    blocks = len(rows) // block_size
    return backend.view(buffer, (blocks, block_size, 656), np.uint8, (656 * block_size, 656, 1))


def written(backend, rows, scale_format, block_size=4):
    """An fp8_ds_mla cache of float rows [n, 512], n a multiple of the block size."""
    cache = make_cache(backend, "fp8_ds_mla", len(rows) // block_size, block_size)
    with np.errstate(all="ignore"):
        kv_c = np.asarray(rows, np.float32).astype(oracle.BFLOAT16)
    concat_and_cache_mla(
        backend.array(kv_c),
        backend.array(np.zeros((len(rows), 64), oracle.BFLOAT16)),
        cache.array,
        backend.array(np.arange(len(rows))),
        "fp8_ds_mla",
        scale_format=scale_format,
    )
    return cache.array


# --- NaN and Inf ----------------------------------------------------------------------------------


def test_places_in_every_part_of_a_row(backend):
    """Byte 600 of a row is element (600 - 528) / 2 = 36 of the rotary part."""
    rows = [bytearray(ds_mla_row()) for _ in range(16)]
    rows[13][600:602] = b"\xc1\x7f"  # slot 13 = block 3, row 1
    rows[13][520:524] = b"\x00\x00\xc0\xff"
    rows[13][0] = 0xFF
    rows[2][511] = 0x7F
    rows[2][516:520] = b"\x00\x00\x80\x7f"  # an infinite scale
    rows[2][528:530] = b"\x80\xff"  # minus infinity
    audit = audit_cache(ds_mla_cache(backend, rows), "fp8_ds_mla")
    assert audit.rows == 16
    assert audit.nonfinite == [
        (2, "nope", 511),
        (2, "scale", 1),
        (2, "rope", 0),
        (13, "nope", 0),
        (13, "scale", 2),
        (13, "rope", 36),
    ]
    assert audit.nonfinite_count == 6


@pytest.mark.parametrize(
    ("fmt", "width", "patterns"),
    [
        ("bfloat16", 2, ["80 7F", "80 FF", "C1 7F", "81 FF"]),
        ("float16", 2, ["00 7C", "00 FC", "01 7C", "FF FF"]),
        ("float32", 4, ["00 00 80 7F", "00 00 80 FF", "01 00 80 7F", "00 00 C0 FF"]),
        ("fp8_e4m3", 1, ["7F", "FF"]),
        ("fp8_e5m2", 1, ["7C", "FC", "7D", "FF"]),
    ],
)
def test_all_bits_that_are_no_number(backend, fmt, width, patterns):
    cache = make_cache(backend, fmt, 2, 4, rank=6, rope=2, row_pad=8, fill=0)
    pool = cache.bytes()
    expected = []
    for number, pattern in enumerate(patterns):
        element = number + 3  # from the latent part into the rotary one
        start = cache.geometry.row_at(number) + element * width
        pool[start : start + width] = np.frombuffer(bytes.fromhex(pattern), np.uint8)
        expected.append((number, "nope", element) if element < 6 else (number, "rope", element - 6))
    strides = (cache.geometry.block_stride, cache.geometry.row_stride, width)
    array = backend.view(backend.buffer(pool), (2, 4, 8), helpers.STORAGE_DTYPES[fmt], strides, 256)
    audit = audit_cache(array, fmt, kv_lora_rank=6, rope_dim=2)
    assert audit.nonfinite == expected
    assert audit.scale_format is None
    assert audit.scale_evidence is None


@pytest.mark.parametrize(
    ("fmt", "bits"),
    [("bfloat16", 0x7F7F), ("float16", 0x7BFF), ("fp8_e4m3", 0x7E), ("fp8_e5m2", 0x7B)],
)
def test_the_largest_numbers_and_their_negatives_are_numbers(backend, fmt, bits):
    dtype = helpers.STORAGE_DTYPES[fmt]
    sign = 0x80 if dtype.itemsize == 1 else 0x8000
    values = np.array([bits, bits | sign, 0, sign], f"u{dtype.itemsize}").view(dtype)
    cache = backend.array(values.reshape(1, 1, 4))
    audit = audit_cache(cache, fmt, kv_lora_rank=4, rope_dim=0)
    assert audit.nonfinite == []
    assert audit.saturated == (2 if dtype.itemsize == 1 else 0)
    largest = {
        "bfloat16": (2 - 2**-7) * 2.0**127,
        "float16": 65504,
        "fp8_e4m3": 448,
        "fp8_e5m2": 57344,
    }[fmt]
    assert audit.amax == {"nope": (float(largest),)}


def test_rows_that_were_never_mapped_are_left_out(backend):
    rows = [None, ds_mla_row(), None, ds_mla_row(0x7F), ds_mla_row(), None, None, None]
    cache = ds_mla_cache(backend, rows)
    audit = audit_cache(cache, "fp8_ds_mla", slots=backend.array(np.array([4, 3, 1], np.int32)))
    assert audit.rows == 3
    assert audit.nonfinite == [(3, "nope", element) for element in range(512)]
    assert audit_cache(cache, "fp8_ds_mla").rows == 8


def test_slots_are_looked_at_once_and_bad_ones_counted(backend):
    cache = ds_mla_cache(backend, [ds_mla_row(0x7E)] * 8)
    for slots in (
        [5, 2, 5, -1, 8, 2**40],
        backend.array(np.array([5, 2, 5, -1, 8, 2**40])),
        np.array([5, 2, 5, -1, 8, 2**40], np.int64)[::-1],
    ):
        audit = audit_cache(cache, "fp8_ds_mla", slots=slots)
        assert (audit.rows, audit.slots_skipped, audit.saturated) == (2, 3, 2 * 512)
    assert audit_cache(cache, "fp8_ds_mla", slots=range(3, 6)).rows == 3
    for nothing in ([], [-1], backend.array(np.zeros(0, np.int64))):
        audit = audit_cache(cache, "fp8_ds_mla", slots=nothing)
        assert (audit.rows, audit.scale_format, audit.nonfinite) == (0, None, [])
        assert audit.amax == {"nope": (0.0,) * 4, "scale": (0.0,) * 4, "rope": (0.0,)}


def test_no_more_than_ten_thousand_places_are_kept_and_all_are_counted(backend):
    cache = ds_mla_cache(backend, [None] * 40)
    audit = audit_cache(cache, "fp8_ds_mla")
    assert len(audit.nonfinite) == 10_000
    assert audit.nonfinite_count == 40 * 512  # 7F7F7F7F and 7F7F are finite
    assert audit.nonfinite[:2] == [(0, "nope", 0), (0, "nope", 1)]
    assert audit.nonfinite[-1] == (19, "nope", 271)


def test_rows_behind_the_first_chunk(backend):
    """6393 rows of 656 bytes are looked at in one go."""
    cache = np.zeros((4000, 4, 656), np.uint8)
    flat = cache.reshape(16000, 656)
    places = [0, 6392, 6393, 12785, 12786, 15999]
    for slot in places:
        flat[slot, 100] = 0x7F
    audit = audit_cache(backend.array(cache), "fp8_ds_mla")
    assert audit.nonfinite == [(slot, "nope", 100) for slot in places]
    assert audit.rows == 16000
    assert audit.zero_scales == 64000


# --- scales ---------------------------------------------------------------------------------------


def tile_rows(*amax):
    """Rows [n, 512] whose four tiles hold one number and half of it."""
    rows = np.zeros((len(amax), 512), np.float32)
    rows[:, ::128] = np.array(amax)[:, None]
    rows[:, 1::128] = np.array(amax)[:, None] / 2
    return rows


@pytest.mark.parametrize(
    ("amax", "scale_format", "expected", "counts"),
    [
        # (float32, ue8m0, either, neither) among 16 tiles
        (336, "float32", "float32", (16, 0, 0, 0)),  # scale 0.75
        (336, "ue8m0", "ue8m0", (0, 16, 0, 0)),  # scale 1, largest code 336
        (448, "float32", None, (0, 0, 16, 0)),  # scale 1, largest code 448: the same bytes
        (448, "ue8m0", None, (0, 0, 16, 0)),
        (0, "float32", "float32", (16, 0, 0, 0)),  # the least float32 scale
        (0, "ue8m0", "ue8m0", (0, 16, 0, 0)),  # 2^-13
    ],
)
def test_what_one_magnitude_proves(backend, amax, scale_format, expected, counts):
    audit = audit_cache(written(backend, tile_rows(*[amax] * 4), scale_format), "fp8_ds_mla")
    evidence = audit.scale_evidence
    assert (evidence.float32, evidence.ue8m0, evidence.either, evidence.neither) == counts
    assert evidence.tiles == 16
    assert audit.scale_format == expected


def test_bytes_that_both_formats_would_write_are_the_same(backend):
    caches = [written(backend, tile_rows(*[448.0] * 4), name) for name in ("float32", "ue8m0")]
    assert compare_caches(*caches, "fp8_ds_mla").equal


def test_a_few_telling_tiles_among_many_are_enough(backend):
    for scale_format in ("float32", "ue8m0"):
        cache = written(backend, tile_rows(448, 448, 448, 300), scale_format)
        audit = audit_cache(cache, "fp8_ds_mla")
        assert audit.scale_format == scale_format
        assert audit.scale_evidence.either == 12


def test_a_cache_of_both_formats_is_none_of_them(backend):
    rows = [
        ds_mla_row(0x7E, (0.75,) * 4),
        ds_mla_row(0x38, (2.0, 1.0, 0.5, 0.25)),
        ds_mla_row(),
        ds_mla_row(),
    ]
    audit = audit_cache(ds_mla_cache(backend, rows), "fp8_ds_mla")
    assert audit.scale_format is None
    assert (audit.scale_evidence.float32, audit.scale_evidence.ue8m0) == (4, 12)
    assert "mixed" in str(audit.scale_evidence)
    assert (
        audit_cache(ds_mla_cache(backend, rows), "fp8_ds_mla", slots=[0]).scale_format == "float32"
    )
    assert audit_cache(ds_mla_cache(backend, rows), "fp8_ds_mla", slots=[1]).scale_format == "ue8m0"


def test_scales_that_prove_nothing(backend):
    subnormal = 2.0**-130
    rows = [
        bytes(656),  # never written
        ds_mla_row(scales=(0.0, -0.0, subnormal, -subnormal)),
        ds_mla_row(scales=(-1.0, np.nan, np.inf, -np.inf)),
        ds_mla_row(0x7E, (1.0, 1.0, 1.0, 1.0)),
    ]
    audit = audit_cache(ds_mla_cache(backend, rows), "fp8_ds_mla")
    assert audit.scale_format is None
    assert audit.zero_scales == 6
    assert audit.denormal_scales == 2
    assert audit.negative_scales == 2
    assert [place for place in audit.nonfinite if place[1] == "scale"] == [
        (2, "scale", 1),
        (2, "scale", 2),
        (2, "scale", 3),
    ]
    assert (audit.scale_evidence.either, audit.scale_evidence.neither) == (4, 12)
    assert "cannot be told" in str(audit.scale_evidence)
    assert "16 tiles seen" in str(audit.scale_evidence)


@given(
    data=st.data(),
    scale_format=st.sampled_from(["float32", "ue8m0"]),
    special=st.booleans(),
)
def test_the_wrong_format_is_never_named(backend, data, scale_format, special):
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    if special:
        rows = helpers.random_bits(rng, (4, 512), oracle.BFLOAT16).astype(np.float32)
    else:
        rows = rng.standard_normal((4, 512)) * 2.0 ** rng.integers(-20, 20, (4, 1))
    audit = audit_cache(written(backend, rows, scale_format), "fp8_ds_mla")
    assert audit.scale_format in (scale_format, None)
    evidence = audit.scale_evidence
    assert (evidence.ue8m0 if scale_format == "float32" else evidence.float32) == 0
    if not special:  # 16 tiles of random numbers are all but sure to tell
        assert audit.scale_format == scale_format


# --- magnitudes -----------------------------------------------------------------------------------


def test_the_largest_magnitude_of_each_tile_scale_and_part(backend):
    first = bytearray(ds_mla_row(0x38, (0.5, 2.0, 1.0, 4.0)))
    first[130] = 0xFE  # -448 in tile 1
    first[528:532] = b"\x00\xc0\x80\x7f"  # -2, Inf
    second = bytearray(ds_mla_row(0x40, (1.0, 1.0, 3.0, np.inf)))
    cache = ds_mla_cache(backend, [first, second, ds_mla_row(), ds_mla_row()])
    audit = audit_cache(cache, "fp8_ds_mla")
    assert audit.amax == {
        "nope": (2.0, 896.0, 6.0, 4.0),
        "scale": (1.0, 2.0, 3.0, 4.0),
        "rope": (2.0,),
    }
    assert audit.saturated == 1


def test_a_product_beyond_float32_is_finite(backend):
    rows = [ds_mla_row(0x7E, (2.0**127,) * 4)] * 4
    audit = audit_cache(ds_mla_cache(backend, rows), "fp8_ds_mla")
    assert audit.amax["nope"] == (448 * 2.0**127,) * 4
    json.dumps(audit.to_dict(), allow_nan=False)


def test_flat_fp8_is_measured_as_stored(backend):
    cache = np.zeros((2, 2, 576), np.uint8)
    cache[1, 0, 3], cache[0, 1, 575], cache[0, 0, 0] = 0x7B, 0xC0, 0x7C  # 57344, -2, Inf
    audit = audit_cache(backend.array(cache), "fp8_e5m2")
    assert audit.amax == {"nope": (57344.0,), "rope": (2.0,)}
    assert audit.saturated == 1
    assert audit.nonfinite == [(0, "nope", 0)]


def test_indexer_keys(backend):
    """4 rows a block: 512 bytes of codes, then 16 bytes of scales."""
    blocks = np.zeros((2, 528), np.uint8)
    blocks[:, :512] = 0x38
    blocks[:, 512:] = np.tile(np.array([1.5], "<f4").view(np.uint8), 4)
    blocks[1, 128 * 2 + 7] = 0x7F  # row 2 of block 1 is slot 6
    blocks[0, 512 + 4 * 3 : 528] = np.array([np.nan], "<f4").view(np.uint8)  # slot 3
    audit = audit_cache(backend.array(blocks.reshape(2, 4, 132)), "indexer_fp8")
    assert audit.nonfinite == [(3, "scale", 0), (6, "nope", 7)]
    assert audit.amax == {"nope": (1.5,), "scale": (1.5,)}
    assert audit.scale_format == "float32"


# --- as a whole -----------------------------------------------------------------------------------


@pytest.fixture
def audit(backend):
    rows = [ds_mla_row(0x38, (2.0, 0.0, 2.0, 2.0)), ds_mla_row(0x7F), ds_mla_row(), ds_mla_row()]
    return audit_cache(ds_mla_cache(backend, rows), "fp8_ds_mla", slots=[0, 1, 9])


def test_an_audit_is_plain_data(audit):
    document = json.loads(json.dumps(audit.to_dict(), allow_nan=False))
    places = document.pop("nonfinite")
    assert places[0] == {"slot": 1, "part": "nope", "element": 0}
    assert len(places) == 512
    assert document == {
        "layout": "fp8_ds_mla",
        "rows": 2,
        "slots_skipped": 1,
        "scale_format": "ue8m0",
        "scale_evidence": {"float32": 0, "ue8m0": 7, "either": 0, "neither": 1},
        "nonfinite_count": 512,
        "zero_scales": 1,
        "denormal_scales": 0,
        "negative_scales": 0,
        "saturated": 0,
        "amax": {"nope": [2.0, 0.0, 2.0, 2.0], "scale": [2.0, 1.0, 2.0, 2.0], "rope": [1.0]},
    }


def test_an_audit_is_shown_in_words(audit):
    text = str(audit)
    assert text.startswith("CacheAudit\n")
    assert re.search(r"slots outside +1 of those given", text)
    assert "512: slot 1 nope[0], slot 1 nope[1]" in text
    assert "ue8m0 (8 tiles seen: 0 only float32 scales leave, 7 only ue8m0 scales" in text
    assert "1 zero, 0 subnormal, 0 negative" in text
    page = audit._repr_html_()
    for line in text.splitlines()[1:]:
        assert line.split("  ")[-1].strip().replace("'", "&#x27;").replace("<", "&lt;") in page


def test_flat_fp8_says_that_its_scale_is_elsewhere(backend):
    text = str(audit_cache(backend.array(np.zeros((1, 1, 576), np.uint8)), "fp8"))
    assert "before the layer's scale" in text
    assert "scale format" not in text


@pytest.mark.parametrize("four_d", [False, True])
def test_padded_caches_and_an_axis_for_one_head(backend, four_d):
    """Three blocks of four rows, 672 bytes from one to the next, 2736 from a block to the next."""
    shape, strides = (3, 4, 656), (2736, 672, 1)
    if four_d:
        shape, strides = (3, 4, 1, 656), (2736, 672, 672, 1)
    pool = np.full(256 + 3 * 2736 + 256, 0x7F, np.uint8)
    np.ndarray((3, 4, 656), np.uint8, pool, 256, (2736, 672, 1))[:] = 0
    for place, found in ((None, []), (9, [(9, "nope", 9)])):
        if place is not None:
            pool[256 + 2 * 2736 + 672 + 9] = 0xFF
        cache = backend.view(backend.buffer(pool), shape, np.uint8, strides, 256)
        assert audit_cache(cache, "fp8_ds_mla").nonfinite == found


def test_other_sizes_and_layouts(backend):
    cache = np.zeros((1, 2, 320), np.float32)
    cache[0, 1, 256] = np.nan
    for kv_cache_dtype, sizes in (
        ("auto", {"kv_lora_rank": 256, "rope_dim": 64}),
        (get_layout("float32", kv_lora_rank=256, rope_dim=64), {}),
    ):
        audit = audit_cache(backend.array(cache), kv_cache_dtype, **sizes)
        assert audit.nonfinite == [(1, "rope", 0)]


def test_memory_does_not_grow_with_the_cache(tmp_path):
    cache = np.lib.format.open_memmap(tmp_path / "cache.npy", "w+", np.uint8, (8192, 16, 576))
    del cache  # 75 MB, most of it a hole
    cache = np.load(tmp_path / "cache.npy", mmap_mode="r")
    tracemalloc.start()
    audit = audit_cache(cache, "fp8")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert audit.rows == 131072
    assert peak < 32 << 20


def test_torch_caches_are_read():
    torch = pytest.importorskip("torch")
    cache = torch.zeros((2, 4, 576), dtype=torch.bfloat16)
    cache[1, 3, 2] = float("nan")
    audit = audit_cache(cache, "auto", slots=torch.tensor([7, 0]))
    assert audit.nonfinite == [(7, "nope", 2)]


@pytest.mark.parametrize(
    ("changes", "exception", "argument", "fragments"),
    [
        ({"kv_cache_dtype": "fp4"}, ValueError, "kv_cache_dtype", ["fp8_ds_mla"]),
        ({"kv_cache_dtype": "fp8"}, ValueError, "kv_cache", ["576", "656"]),
        ({"kv_cache_dtype": "auto"}, TypeError, "kv_cache", ["uint8"]),
        ({"slots": [0.5]}, TypeError, "slots", ["integers", "float64"]),
        ({"slots": 3}, TypeError, "slots", ["int"]),
        ({"slots": np.zeros((2, 2), np.int64)}, ValueError, "slots", ["[n]", "[2, 2]"]),
        ({"slots": [True, False]}, TypeError, "slots", ["integers", "bool"]),
        ({"kv_lora_rank": 256}, ValueError, "kv_lora_rank", ["512"]),
        ({"kv_lora_rank": 0}, ValueError, "kv_lora_rank", ["at least 1"]),
        ({"kv_cache": [1]}, TypeError, "kv_cache", ["list"]),
    ],
)
def test_arguments_that_do_not_fit(backend, changes, exception, argument, fragments):
    good = {"kv_cache": ds_mla_cache(backend, [ds_mla_row()] * 4), "kv_cache_dtype": "fp8_ds_mla"}
    with rejected(exception, "audit_cache", argument, *fragments):
        audit_cache(**(good | changes))


# --- comparison -----------------------------------------------------------------------------------


def test_where_two_caches_differ(backend):
    rows = [bytearray(ds_mla_row()) for _ in range(16)]
    first = ds_mla_cache(backend, rows)
    rows[6][523] = 0x41  # the last byte of scale 2
    rows[6][600] = 0x7F
    rows[9][3] = 0x40
    rows[9][4] = 0x40
    rows[9][601] = 0x00
    result = compare_caches(first, ds_mla_cache(backend, rows, block_size=2), "fp8_ds_mla")
    assert not result.equal
    assert (result.rows, result.rows_differing) == (16, 2)
    assert result.elements_differing == {"nope": 2, "scale": 1, "rope": 2}
    difference = result.first
    assert (difference.slot, difference.block, difference.row) == (6, 1, 2)
    assert (difference.part, difference.element) == ("scale", 2)
    assert difference.first == "1 (00 00 80 3F)"
    assert difference.second == "16 (00 00 80 41)"
    document = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert document["first"]["part"] == "scale"
    assert document["elements_differing"] == {"nope": 2, "scale": 1, "rope": 2}
    assert "block 1, row 2 (slot 6), scale[2]: 1 (00 00 80 3F) and 16 (00 00 80 41)" in str(result)
    assert "2 elements differ" in result._repr_html_()


def test_caches_that_are_equal_and_slots_that_are_compared(backend):
    rows = [bytearray(ds_mla_row()) for _ in range(8)]
    first = ds_mla_cache(backend, rows)
    rows[3][0] = 0x39
    second = ds_mla_cache(backend, rows)
    same = compare_caches(first, second, "fp8_ds_mla", slots=[0, 1, 7, -1])
    assert same.equal
    assert same.rows == 3
    assert same.first is None
    assert same.to_dict()["first"] is None
    assert "3, of which 0 differ" in str(same)
    assert not compare_caches(first, second, "fp8_ds_mla", slots=[3]).equal


def test_equal_numbers_of_other_bits_differ(backend):
    first, second = (np.zeros((1, 1, 576), np.float32) for _ in range(2))
    second[0, 0, 513] = -0.0
    result = compare_caches(backend.array(first), backend.array(second), "float32")
    assert result.elements_differing == {"nope": 0, "rope": 1}
    assert str(result.first).endswith("rope[1]: 0 (00 00 00 00) and -0 (00 00 00 80)")


def test_differences_behind_the_first_chunk(backend):
    """6393 rows of 656 bytes are looked at in one go."""
    first = np.zeros((4000, 4, 656), np.uint8)
    second = first.copy()
    for slot in (6392, 6393, 15999):
        second.reshape(16000, 656)[slot, 512] = 1
    result = compare_caches(backend.array(first), backend.array(second), "fp8_ds_mla")
    assert (result.rows, result.rows_differing) == (16000, 3)
    assert result.elements_differing == {"nope": 0, "scale": 3, "rope": 0}
    assert (result.first.slot, result.first.part) == (6392, "scale")


def test_caches_of_another_number_of_slots_are_not_compared(backend):
    first, second = (backend.array(np.zeros((n, 4, 656), np.uint8)) for n in (1, 2))
    with rejected(ValueError, "compare_caches", "both caches", "4 and 8"):
        compare_caches(first, second, "fp8_ds_mla")
