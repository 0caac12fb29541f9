"""Rows read back: decoding of every code, one multiplication, invalid slots, output dtypes."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_mla import concat_and_cache_mla, get_layout, read_slots
from tests import helpers, oracle
from tests.helpers import FORMATS, assert_values_equal, make_cache

OUT_DTYPES = ("float32", "bfloat16", "float16")


def cache_of_codes(backend, fmt, codes):
    """A cache of one row of the given bytes."""
    cache = make_cache(backend, fmt, 1, 1, rank=len(codes), rope=0)
    pool = cache.bytes()
    pool[256 : 256 + len(codes)] = codes
    cache.buffer = backend.buffer(pool)
    cache.array = backend.view(
        cache.buffer, (1, 1, len(codes)), np.uint8, (len(codes), len(codes), 1), 256
    )
    return cache


def cache_of_row(backend, row):
    """An fp8_ds_mla cache of one row of the given bytes."""
    cache = make_cache(backend, "fp8_ds_mla", 1, 1)
    pool = cache.bytes()
    pool[256:912] = np.frombuffer(bytes(row), np.uint8)
    cache.buffer = backend.buffer(pool)
    cache.array = backend.view(cache.buffer, (1, 1, 656), np.uint8, (656, 656, 1), 256)
    return cache


def read_row(backend, cache, fmt, scale=None, out_dtype="float32"):
    slots = backend.array(np.array([0]))
    rows = read_slots(cache.array, slots, fmt, scale, out_dtype=out_dtype)
    return backend.to_numpy(rows)[0]


def e4m3_value(code):
    """Value of an e4m3fn code by its definition."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return np.nan
    magnitude = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -magnitude if sign else magnitude


def e5m2_value(code):
    """Value of an e5m2 code by its definition."""
    sign, exponent, mantissa = code >> 7, code >> 2 & 31, code & 3
    if exponent == 31:
        magnitude = np.nan if mantissa else np.inf
    elif exponent == 0:
        magnitude = mantissa * 2.0**-16
    else:
        magnitude = (4 + mantissa) * 2.0 ** (exponent - 17)
    return -magnitude if sign else magnitude


@pytest.mark.parametrize(("fmt", "value"), [("fp8_e4m3", e4m3_value), ("fp8_e5m2", e5m2_value)])
@pytest.mark.parametrize("out_dtype", OUT_DTYPES)
def test_every_code_is_decoded_by_its_definition(backend, fmt, value, out_dtype):
    cache = cache_of_codes(backend, fmt, np.arange(256, dtype=np.uint8))
    got = read_row(backend, cache, fmt, 1.0, out_dtype)
    expected = np.array([value(code) for code in range(256)], np.float32)
    assert_values_equal(got, expected.astype(oracle.DTYPES[out_dtype]))
    if fmt == "fp8_e4m3":
        assert got[0x7E] == 448
        assert got[0x80] == 0
        assert np.signbit(got[0x80])
        assert np.flatnonzero(np.isnan(got)).tolist() == [0x7F, 0xFF]
    else:
        assert got[0x7C] == np.inf
        assert got[0xFC] == -np.inf
        nan_codes = [0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]
        assert np.flatnonzero(np.isnan(got)).tolist() == nan_codes


@pytest.mark.parametrize("fmt", helpers.SCALED_FORMATS)
@pytest.mark.parametrize("scale", [1.0, 0.37, 2.0**-20, 3.0])
def test_decoding_and_encoding_again_gives_the_codes(backend, fmt, scale):
    codes = np.arange(256, dtype=np.uint8)
    cache = cache_of_codes(backend, fmt, codes)
    values = read_row(backend, cache, fmt, scale)
    again = make_cache(backend, fmt, 1, 1, rank=256, rope=0)
    concat_and_cache_mla(
        backend.array(values[None]), None, again.array, backend.array(np.array([0])), fmt, scale
    )
    expected = codes.copy()
    expected[np.isnan(values)] = 0x7F
    if fmt == "fp8_e5m2":
        expected[[0x7C, 0xFC]] = [0x7B, 0xFB]  # infinities come back saturated
    assert np.array_equal(again.row(0), expected)


def test_the_scale_is_multiplied_in_float32_with_one_rounding(backend):
    cache = cache_of_codes(backend, "fp8_e4m3", np.array([0x7E, 0x0A], np.uint8))
    got = read_row(backend, cache, "fp8_e4m3", 0.37, "bfloat16")
    assert got.astype(np.float64).tolist() == [166.0, 0.007232666015625]


def test_the_product_is_a_float32_before_it_is_rounded(backend):
    """Products that float32 rounds to a tie of bfloat16, which a wider product would not see."""
    bits = np.arange(0x3F80, 0x4180, dtype=np.uint16)
    below = bits.view(oracle.BFLOAT16).astype(np.float32)
    above = (bits + 1).view(oracle.BFLOAT16).astype(np.float32)
    ties = (below + above) / 2
    scales = (ties / np.float32(13)).astype(np.float32)
    exact = scales.astype(np.float64) * 13
    chosen = np.flatnonzero((scales * np.float32(13) == ties) & (exact != ties))
    assert np.any((exact > ties)[chosen] & (bits[chosen] % 2 == 0))
    cache = cache_of_codes(backend, "fp8_e4m3", np.array([0x55], np.uint8))  # 13.0
    for index in chosen:
        got = read_row(backend, cache, "fp8_e4m3", float(scales[index]), "bfloat16")
        even = below[index] if bits[index] % 2 == 0 else above[index]
        assert float(got[0]) == even


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("out_dtype", OUT_DTYPES)
@pytest.mark.parametrize("named", [True, False])
def test_random_rows_of_every_format_in_every_output_dtype(backend, rng, fmt, out_dtype, named):
    cache = make_cache(backend, fmt, block_pad=64, row_pad=32)
    pool = rng.integers(0, 256, cache.bytes().size, np.uint8)
    for slot in range(16):  # infinite scales would make most of the numbers NaN
        start = cache.geometry.row_at(slot)
        if fmt == "fp8_ds_mla":
            scales = 2.0 ** rng.uniform(-30, 10, 4)
            pool[start + 512 : start + 528] = scales.astype("<f4").view(np.uint8)
    array = cache.array
    cache.buffer = backend.buffer(pool)
    cache.array = backend.view(
        cache.buffer,
        array.shape,
        helpers.STORAGE_DTYPES[fmt],
        (
            cache.geometry.block_stride,
            cache.geometry.row_stride,
            helpers.STORAGE_DTYPES[fmt].itemsize,
        ),
        256,
    )
    slots = np.array([15, 0, 3, 3, -1, 16, 2**40, 7, -(2**40)])
    scale = 0.37 if fmt in helpers.SCALED_FORMATS else None
    name = fmt if named else get_layout(fmt)
    got = read_slots(cache.array, backend.array(slots), name, scale, out_dtype=out_dtype)
    expected = oracle.read(pool, cache.geometry, slots, 576, fmt, scale, out_dtype)
    assert_values_equal(backend.to_numpy(got), expected)
    helpers.assert_bytes_equal(cache.bytes(), pool, cache.geometry)


def test_the_stored_scale_of_a_tile_is_used_as_it_is(backend):
    row = bytearray(656)
    row[:512] = bytes([0x7E]) * 512
    row[512:528] = np.array([0.75, 1.0, 0.75 * 2**-10, 3.0], "<f4").tobytes()
    got = read_row(backend, cache_of_row(backend, row), "fp8_ds_mla")
    assert got.shape == (576,)
    assert np.all(got[:128] == 336.0)
    assert np.all(got[128:256] == 448.0)
    assert np.all(got[256:384] == 0.328125)
    assert np.all(got[384:512] == 1344.0)
    assert np.all(got[512:] == 0)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_invalid_slots_give_zeros(backend, dtype):
    cache = make_cache(backend, fill=0x7F)
    slots = np.array([-1, 16, 0, 2**31 - 1, -(2**31)], dtype)
    got = backend.to_numpy(read_slots(cache.array, backend.array(slots)))
    assert not np.any(got[[0, 1, 3, 4]].view(np.uint32))
    assert np.all(got[2] != 0)


def test_reading_no_slots_gives_no_rows(backend):
    cache = make_cache(backend)
    got = backend.to_numpy(read_slots(cache.array, backend.array(np.zeros(0, np.int64))))
    assert got.shape == (0, 576)
    assert got.dtype == np.float32


def test_reading_a_cache_with_an_axis_for_one_head(backend, rng):
    flat = make_cache(backend, "bfloat16")
    head = make_cache(backend, "bfloat16", four_d=True)
    rows = helpers.random_rows(rng, (2, 512), oracle.BFLOAT16)
    rope = helpers.random_rows(rng, (2, 64), oracle.BFLOAT16)
    slots = backend.array(np.array([2, 13]))
    for cache in (flat, head):
        concat_and_cache_mla(backend.array(rows), backend.array(rope), cache.array, slots)
        got = backend.to_numpy(read_slots(cache.array, slots))
        expected = np.concatenate([rows, rope], axis=1).astype(np.float32)
        assert_values_equal(got, expected)


@pytest.mark.parametrize("fmt", ["bfloat16", "float16"])
def test_reading_in_the_dtype_of_the_cache_keeps_the_bits(backend, rng, fmt):
    dtype = oracle.DTYPES[fmt]
    rows = helpers.random_rows(rng, (3, 512), dtype)
    rope = helpers.random_rows(rng, (3, 64), dtype)
    cache = make_cache(backend, fmt)
    slots = backend.array(np.array([2, 13, 0]))
    concat_and_cache_mla(backend.array(rows), backend.array(rope), cache.array, slots)
    got = backend.to_numpy(read_slots(cache.array, slots, out_dtype=fmt))
    expected = np.concatenate([rows, rope], axis=1)
    assert got.dtype == dtype
    assert np.array_equal(got.view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize("fmt", ["fp8", "fp8_e5m2"])
def test_tiled_rows_are_not_read_as_flat_codes(backend, fmt):
    """A reader is told no size, so that a width of 656 could be anything: the name decides."""
    cache = make_cache(backend, "fp8_ds_mla")
    slots = backend.array(np.array([1]))
    with helpers.rejected(ValueError, "read_slots", "kv_cache", "fp8_ds_mla"):
        read_slots(cache.array, slots, fmt, 1.0)
    wide = get_layout(fmt, kv_lora_rank=592, rope_dim=64)
    assert backend.to_numpy(read_slots(cache.array, slots, wide, 1.0)).shape == (1, 656)
