"""Bytes of fp8_ds_mla rows: tile scales of both formats, NaN and infinity, the byte map."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cupy_mla import GroupedCacheWriter, concat_and_cache_mla, get_layout, read_slots
from tests import helpers, oracle
from tests.helpers import check_insert, codes_hex, make_cache, row_of

NAN = math.nan
INF = math.inf


def store(backend, insert_path, kv_c, k_pe=None, scale_format="float32"):
    """Bytes of the row that one token leaves in slot 6."""
    cache = make_cache(backend, "fp8_ds_mla")
    k_pe = np.zeros((1, 1, 64), oracle.BFLOAT16) if k_pe is None else k_pe
    slots = np.array([6])
    assert check_insert(insert_path, [cache], kv_c, k_pe, slots, scale_format=scale_format)
    return cache.row(6)


def scale_bits(row, tile):
    """The four bytes of a tile's scale as one hexadecimal number."""
    return f"{int.from_bytes(row[512 + 4 * tile : 516 + 4 * tile].tobytes(), 'little'):08X}"


@pytest.mark.parametrize(
    ("scale_format", "bits", "code"),
    [("float32", "3F400000", "7E"), ("ue8m0", "3F800000", "7A")],
)
def test_the_scale_format_decides_scale_and_code(backend, insert_path, scale_format, bits, code):
    row = store(backend, insert_path, row_of([336]), scale_format=scale_format)
    assert scale_bits(row, 0) == bits
    assert codes_hex(row, 2) == f"{code} 00"


@pytest.mark.parametrize(("scale_format", "bits"), [("float32", "00800000"), ("ue8m0", "39000000")])
def test_a_tile_of_zeros_has_the_smallest_scale(backend, insert_path, scale_format, bits):
    row = store(backend, insert_path, row_of([]), scale_format=scale_format)
    assert [scale_bits(row, tile) for tile in range(4)] == [bits] * 4
    assert not np.any(row[:512])


def test_zeros_read_back_as_zeros(backend, insert_path):
    for scale_format in ("float32", "ue8m0"):
        cache = make_cache(backend, "fp8_ds_mla")
        kv_c, k_pe = row_of([-0.0, 0.0]), row_of([], 64)
        check_insert(insert_path, [cache], kv_c, k_pe, np.array([6]), scale_format=scale_format)
        row = backend.to_numpy(read_slots(cache.array, backend.array(np.array([6])), "fp8_ds_mla"))
        assert row.shape == (1, 576)
        assert np.all(row == 0)
        assert np.signbit(row[0, 0])
        assert not np.signbit(row[0, 1])


def test_nan_does_not_count_for_the_scale(backend, insert_path):
    kv_c = row_of([1, NAN, 2])
    kv_c[0, 0, 128:] = 448
    row = store(backend, insert_path, kv_c)
    assert scale_bits(row, 0) == "3B924925"
    assert codes_hex(row, 4) == "76 7F 7E 00"
    assert [scale_bits(row, tile) for tile in (1, 2, 3)] == ["3F800000"] * 3
    assert np.all(row[128:512] == 0x7E)
    row = store(backend, insert_path, row_of([1, -NAN, 2]), scale_format="ue8m0")
    assert scale_bits(row, 0) == "3C000000"
    assert codes_hex(row, 4) == "70 7F 78 00"


def test_a_tile_of_only_nan(backend, insert_path):
    kv_c = row_of([NAN] * 128)
    row = store(backend, insert_path, kv_c)
    assert scale_bits(row, 0) == "00800000"
    assert np.all(row[:128] == 0x7F)
    row = store(backend, insert_path, kv_c, scale_format="ue8m0")
    assert scale_bits(row, 0) == "39000000"
    assert np.all(row[:128] == 0x7F)


@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
def test_infinity_makes_the_scale_infinite(backend, insert_path, scale_format):
    row = store(backend, insert_path, row_of([1, INF, -2, 0]), scale_format=scale_format)
    assert scale_bits(row, 0) == "7F800000"
    assert codes_hex(row, 4) == "00 7F 80 00"


def test_statistics_report_the_token_with_infinity(backend):
    caches = [make_cache(backend, "fp8_ds_mla") for _ in range(2)]
    writer = GroupedCacheWriter([cache.array for cache in caches], "fp8_ds_mla", collect_stats=True)
    kv_c = np.zeros((2, 3, 512), oracle.BFLOAT16)
    kv_c[1, 2, 130] = INF
    writer.insert(
        backend.array(kv_c),
        backend.array(np.zeros((2, 3, 64), oracle.BFLOAT16)),
        backend.array(np.array([4, 0, 11])),
    )
    assert writer.stats()["nonfinite_elements"].tolist() == [0, 1]
    with pytest.raises(ValueError, match=r"layer\D*1\D.*token\D*2\D.*slot\D*11\b"):
        writer.check()


def test_amax_is_divided_by_448_not_multiplied(backend, insert_path):
    assert scale_bits(store(backend, insert_path, row_of([1.015625])), 0) == "3B149249"


def test_every_amax_of_a_binade_and_its_neighbours(backend, insert_path):
    # All mantissas of bfloat16 with several exponents, one to a tile.
    exponents = np.array([1, 20, 110, 119, 120, 121, 126, 127, 134, 135, 136, 253, 254])
    bits = (exponents[:, None] << 7) + np.arange(128)
    amax = bits.astype(np.uint16).reshape(-1, 4).view(oracle.BFLOAT16)
    kv_c = np.zeros((1, len(amax), 512), oracle.BFLOAT16)
    kv_c[0, :, ::128] = amax
    k_pe = np.zeros((1, len(amax), 64), oracle.BFLOAT16)
    for scale_format in ("float32", "ue8m0"):
        cache = make_cache(backend, "fp8_ds_mla", num_blocks=len(amax) // 4)
        slots = np.arange(len(amax))
        check_insert(insert_path, [cache], kv_c, k_pe, slots, scale_format=scale_format)
        scales = np.stack([cache.row(slot)[512:528].view("<f4") for slot in slots])
        with np.errstate(all="ignore"):
            ratio = amax.astype(np.float32).astype(np.float64) / 448
        if scale_format == "float32":
            expected = np.maximum(ratio.astype(np.float32), np.float32(2**-126))
        else:
            expected = 2.0 ** np.ceil(np.log2(np.maximum(ratio, 1e-4)))
        assert np.array_equal(scales, expected.astype(np.float32))


def test_tiles_of_subnormal_numbers(backend, insert_path):
    smallest = np.uint16(1).view(oracle.BFLOAT16).astype(np.float32)  # 2**-133
    row = store(backend, insert_path, row_of([smallest, -127 * smallest, 2**-126]))
    assert scale_bits(row, 0) == "00800000"
    assert codes_hex(row, 3) == "04 B8 38"  # 2**-7, -127/128, 1


def test_exact_byte_map(backend, insert_path):
    kv_c = np.repeat(np.arange(1, 5), 128).astype(oracle.BFLOAT16)[None, None]
    k_pe = np.arange(64).astype(oracle.BFLOAT16)[None, None]
    row = store(backend, insert_path, kv_c, k_pe)
    assert row.size == 656
    assert row[:512].tolist() == [0x7E] * 512
    scales = "25 49 12 3B 25 49 92 3B B7 6D DB 3B 25 49 12 3C"
    assert codes_hex(row[512:], 16) == scales
    rope = "00 00 80 3F 00 40 40 40 80 40 A0 40 C0 40 E0 40 00 41 10 41"
    assert codes_hex(row[528:], 20) == rope
    assert codes_hex(row[652:], 4) == "78 42 7C 42"


def test_tiles_are_independent(backend, insert_path, rng):
    kv_c = helpers.random_rows(rng, (1, 1, 512), oracle.BFLOAT16)
    row = store(backend, insert_path, kv_c)
    for tile in range(4):
        other = kv_c.copy()
        other[0, 0, 128 * tile : 128 * tile + 128] *= 4
        changed = np.flatnonzero(store(backend, insert_path, other) != row)
        # Four times the values: the same codes with four times the scale, so one byte or two.
        assert set(changed) <= set(range(512 + 4 * tile, 516 + 4 * tile))
        assert changed.size


def test_the_rotary_part_is_copied_bit_for_bit(backend, insert_path):
    bits = np.array([0x7FC1, 0x8000, 0x0001, 0xFF80, 0x7F80, 0xFF81, 0x7F7F, 0x1234], np.uint16)
    k_pe = np.tile(bits, 8).view(oracle.BFLOAT16)[None, None]
    row = store(backend, insert_path, row_of([1e30, -7]), k_pe)
    assert row[528:656].view("<u2").tolist() == bits.tolist() * 8


def test_random_bits_of_every_kind(backend, insert_path, rng):
    kv_c = helpers.random_bits(rng, (2, 12, 512), oracle.BFLOAT16)
    # Without the largest exponents most tiles would be infinite.
    kv_c[:, 3:] = helpers.random_rows(rng, (2, 9, 512), oracle.BFLOAT16)
    k_pe = helpers.random_bits(rng, (2, 12, 64), oracle.BFLOAT16)
    for scale_format in ("float32", "ue8m0"):
        caches = [make_cache(backend, "fp8_ds_mla") for _ in range(2)]
        slots = np.arange(12)
        check_insert(insert_path, caches, kv_c, k_pe, slots, scale_format=scale_format)


def test_a_layout_object_brings_its_scale_format(backend, insert_path):
    layout = get_layout("fp8_ds_mla", scale_format="ue8m0")
    cache = make_cache(backend, "fp8_ds_mla")
    insert_path(
        backend.array(row_of([336])),
        backend.array(row_of([], 64)),
        [cache.array],
        backend.array(np.array([6])),
        layout,
        scale_format="ue8m0",
    )
    assert codes_hex(cache.row(6), 1) == "7A"
    assert scale_bits(cache.row(6), 0) == "3F800000"


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "rope"), [(256, 64), (512, 32), (512, 0), (448, 64), (511, 64)])
def test_other_widths_of_rows_are_refused(backend, rank, rope):
    cache = make_cache(backend, "fp8_ds_mla")
    kv_c = backend.array(np.ones((1, 1, rank), oracle.BFLOAT16))
    k_pe = backend.array(np.ones((1, 1, rope), oracle.BFLOAT16))
    slots = backend.array(np.array([3]))
    blamed, number = ("kv_c", "512") if rank != 512 else ("k_pe", "64")
    with helpers.rejected(
        ValueError,
        "concat_and_cache_mla",
        [blamed, "kv_lora_rank", "rope_dim", "kv_cache_dtype"],
        number,
        caches=[cache],
    ):
        concat_and_cache_mla(kv_c[0], k_pe[0], cache.array, slots, "fp8_ds_mla")
    with helpers.rejected(
        ValueError,
        "GroupedCacheWriter",
        ["kv_lora_rank" if rank != 512 else "rope_dim", "kv_cache_dtype"],
        number,
        caches=[cache],
    ):
        GroupedCacheWriter([cache.array], "fp8_ds_mla", kv_lora_rank=rank, rope_dim=rope)
    writer = GroupedCacheWriter([cache.array], "fp8_ds_mla")
    with helpers.rejected(ValueError, "insert", blamed, number, caches=[cache]):
        writer.insert(kv_c, k_pe, slots)


@pytest.mark.parametrize("width", [655, 657, 576, 584, 640, 528])
def test_rows_of_other_sizes_are_refused(backend, width):
    cache = make_cache(backend, "fp8_ds_mla", row_bytes=width)
    kv_c, k_pe = backend.array(row_of([1])), backend.array(row_of([1], 64))
    slots = backend.array(np.array([3]))
    with helpers.rejected(
        ValueError, "concat_and_cache_mla", "kv_cache", "656", str(width), caches=[cache]
    ):
        concat_and_cache_mla(kv_c[0], k_pe[0], cache.array, slots, "fp8_ds_mla")
    with helpers.rejected(
        ValueError, "GroupedCacheWriter", ["kv_caches"], "656", str(width), caches=[cache]
    ):
        GroupedCacheWriter([cache.array], "fp8_ds_mla")
    with helpers.rejected(ValueError, "read_slots", "kv_cache", "656", str(width)):
        read_slots(cache.array, slots, "fp8_ds_mla")


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("width", [584, 656])
def test_a_block_planar_or_tiled_cache_is_no_flat_one(backend, fmt, width):
    cache = make_cache(backend, "fp8_ds_mla", 2, 64, row_bytes=width)
    kv_c, k_pe = backend.array(row_of([1])), backend.array(row_of([1], 64))
    slots = backend.array(np.array([3]))
    with helpers.rejected(
        ValueError, "concat_and_cache_mla", "kv_cache", "576", str(width), caches=[cache]
    ):
        concat_and_cache_mla(kv_c[0], k_pe[0], cache.array, slots, fmt, 1.0)
    with helpers.rejected(
        ValueError, "GroupedCacheWriter", "kv_caches", "576", str(width), caches=[cache]
    ):
        GroupedCacheWriter([cache.array], fmt, [1.0])


@pytest.mark.parametrize("dtype", [oracle.FLOAT16, oracle.FLOAT32], ids=str)
def test_rows_must_be_bfloat16(backend, dtype):
    cache = make_cache(backend, "fp8_ds_mla")
    kv_c = backend.array(row_of([1], 512, dtype))
    k_pe = backend.array(row_of([1], 64, dtype))
    slots = backend.array(np.array([3]))
    with helpers.rejected(
        TypeError, "concat_and_cache_mla", "kv_c", "bfloat16", dtype.name, caches=[cache]
    ):
        concat_and_cache_mla(kv_c[0], k_pe[0], cache.array, slots, "fp8_ds_mla")
    writer = GroupedCacheWriter([cache.array], "fp8_ds_mla")
    with helpers.rejected(TypeError, "insert", "kv_c", "bfloat16", dtype.name, caches=[cache]):
        writer.insert(kv_c, k_pe, slots)


@pytest.mark.parametrize("bits", [0x7F81, 0xFF81, 0x7FC1], ids=hex)
@pytest.mark.parametrize("place", [0, 3, 127])
def test_no_kind_of_nan_makes_a_scale(backend, bits, place):
    """A signalling NaN, too, is passed over where the largest magnitude is looked for."""
    cache = make_cache(backend, "fp8_ds_mla")
    kv_c = helpers.row_of([2.0] * 512)[0]
    kv_c.view(np.uint16)[0, place] = bits
    k_pe = np.zeros((1, 64), oracle.BFLOAT16)
    slots = backend.array(np.array([1]))
    concat_and_cache_mla(backend.array(kv_c), backend.array(k_pe), cache.array, slots, "fp8_ds_mla")
    row = cache.row(1)
    assert row[512:528].tobytes().hex() == "2549923b" * 4  # 2 / 448
    assert row[place] == 0x7F
    assert np.all(np.delete(row[:512], place) == 0x7E)
