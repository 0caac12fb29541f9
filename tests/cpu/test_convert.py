"""Conversion of caches: every pair of formats byte by byte, what is copied, what is refused."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from cupy_mla import concat_and_cache_mla, convert_cache, get_layout, read_slots
from tests import helpers, oracle
from tests.helpers import FORMATS, SCALED_FORMATS, assert_bytes_equal, make_cache, rejected

SCALES = {"src": 0.37, "dst": 1.5}
DESTINATIONS = [
    *((fmt, "float32") for fmt in FORMATS),
    ("fp8_ds_mla", "ue8m0"),
]


def scale_for(fmt, side):
    return SCALES[side] if fmt in SCALED_FORMATS else None


def filled(backend, rng, fmt, num_blocks, block_size, *, special=False, **options):
    """A cache of rows of many magnitudes; with `special`, of all kinds of bits."""
    cache = make_cache(backend, fmt, num_blocks, block_size, row_pad=32, block_pad=64, **options)
    pool = cache.bytes()
    for slot in range(num_blocks * block_size):
        values = helpers.random_rows(rng, (576,), helpers.INPUT_DTYPES[fmt])
        if special:
            values = helpers.random_bits(rng, (576,), helpers.INPUT_DTYPES[fmt])
        with np.errstate(all="ignore"):
            row = oracle.encode_row(values[:512], values[512:], fmt, scale_for(fmt, "src"))
        if special and fmt in SCALED_FORMATS:
            row = rng.integers(0, 256, 576, np.uint8).tobytes()
        start = cache.geometry.row_at(slot)
        pool[start : start + len(row)] = np.frombuffer(row, np.uint8)
    fill(cache, pool)
    return cache


def fill(cache, pool):
    """Put other bytes into a cache's pool."""
    dtype = helpers.STORAGE_DTYPES[cache.fmt]
    geometry = cache.geometry
    cache.buffer = cache.backend.buffer(pool)
    shape = (geometry.num_blocks, geometry.block_size, geometry.row_bytes // dtype.itemsize)
    strides = (geometry.block_stride, geometry.row_stride, dtype.itemsize)
    cache.array = cache.backend.view(cache.buffer, shape, dtype, strides, geometry.offset)


def expected_row(row, src_fmt, dst_fmt, scale_format):
    """Bytes that a row becomes, by the rules in the documentation of convert_cache."""
    values = oracle.decode_row(row, src_fmt, scale_for(src_fmt, "src"))
    own = {"fp8_ds_mla": (512, "bfloat16")}.get(src_fmt, (0, src_fmt))

    def plain(start, stop, name):
        if start >= own[0] and own[1] == name:  # the bits as they are
            first = {"fp8_ds_mla": 528 - 2 * 512}.get(src_fmt, 0)
            size = oracle.DTYPES[name].itemsize
            return row[first + start * size : first + stop * size]
        with np.errstate(all="ignore"):
            return values[start:stop].astype(oracle.DTYPES[name]).tobytes()

    if dst_fmt in oracle.DTYPES:
        return plain(0, 512, dst_fmt) + plain(512, 576, dst_fmt)
    if dst_fmt in SCALED_FORMATS:
        return oracle.encode_fp8(values, SCALES["dst"], dst_fmt).tobytes()
    rope = np.frombuffer(plain(512, 576, "bfloat16"), oracle.BFLOAT16)
    return oracle.encode_row(values[:512], rope, "fp8_ds_mla", None, scale_format)


def expected_pool(src, dst, scale_format, slots):
    before, pool = src.bytes(), dst.bytes()
    for slot in slots:
        begin = src.geometry.row_at(slot)
        row = before[begin : begin + src.geometry.row_bytes].tobytes()
        new = expected_row(row, src.fmt, dst.fmt, scale_format)
        start = dst.geometry.row_at(slot)
        pool[start : start + len(new)] = np.frombuffer(new, np.uint8)
    return pool


def convert(src, dst, **options):
    convert_cache(
        src.array,
        dst.array,
        src.fmt,
        dst.fmt,
        src_scale=scale_for(src.fmt, "src"),
        dst_scale=scale_for(dst.fmt, "dst"),
        **options,
    )


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("src_fmt", FORMATS)
@pytest.mark.parametrize(("dst_fmt", "scale_format"), DESTINATIONS)
def test_every_pair_of_formats(backend, rng, src_fmt, dst_fmt, scale_format):
    if (src_fmt, dst_fmt, scale_format) == ("fp8_ds_mla", "fp8_ds_mla", "float32"):
        src_layout = get_layout("fp8_ds_mla", scale_format="ue8m0")  # else the bytes are copied
    else:
        src_layout = src_fmt
    src = filled(backend, rng, src_fmt, 6, 4)
    dst = make_cache(backend, dst_fmt, 3, 8, row_pad=16, block_pad=32)
    expected = expected_pool(src, dst, scale_format, range(24))
    before = src.bytes()
    convert_cache(
        src.array,
        dst.array,
        src_layout,
        dst_fmt,
        src_scale=scale_for(src_fmt, "src"),
        dst_scale=scale_for(dst_fmt, "dst"),
        scale_format=scale_format,
    )
    assert_bytes_equal(dst.bytes(), expected, dst.geometry)
    assert_bytes_equal(src.bytes(), before, src.geometry)


@pytest.mark.parametrize("src_fmt", FORMATS)
@pytest.mark.parametrize("dst_fmt", SCALED_FORMATS)
def test_nan_infinities_and_subnormal_numbers_become_codes(backend, rng, src_fmt, dst_fmt):
    src = filled(backend, rng, src_fmt, 2, 4, special=True)
    dst = make_cache(backend, dst_fmt, 2, 4)
    expected = expected_pool(src, dst, "float32", range(8))
    convert(src, dst)
    assert_bytes_equal(dst.bytes(), expected, dst.geometry)


def test_known_bytes(backend):
    """224 = 448 * 0.5 in each format."""
    row = np.full((1, 1, 576), 0x7E, np.uint8)
    for fmt, scale, expected in (
        ("bfloat16", None, "60 43"),
        ("float16", None, "00 5B"),
        ("float32", None, "00 00 60 43"),
        ("fp8_e4m3", 1.0, "76"),
        ("fp8_e5m2", 1.0, "5B"),
        ("fp8_e5m2", 0.25, "63"),
    ):
        dst = make_cache(backend, fmt, 1, 1)
        convert_cache(backend.array(row), dst.array, "fp8", fmt, src_scale=0.5, dst_scale=scale)
        size = len(expected.split())
        assert {
            dst.row(0)[i : i + size].tobytes().hex(" ").upper() for i in range(0, 576, size)
        } == {expected}


@pytest.mark.parametrize(
    ("scale_format", "scale", "code"),
    [("float32", "00 00 40 3F", 0x7E), ("ue8m0", "00 00 80 3F", 0x7A)],
)
def test_the_scale_format_of_the_destination(backend, scale_format, scale, code):
    src = np.zeros((1, 1, 576), np.float32)
    src[0, 0, 130] = -336
    dst = make_cache(backend, "fp8_ds_mla", 1, 1)
    convert_cache(backend.array(src), dst.array, "float32", "fp8_ds_mla", scale_format=scale_format)
    row = dst.row(0)
    assert row[516:520].tobytes().hex(" ").upper() == scale
    assert row[130] == code | 0x80
    assert row[:128].max() == 0


def test_the_latent_part_is_rounded_once_and_the_rotary_part_to_bfloat16(backend):
    src = np.zeros((1, 1, 576), np.float32)
    src[0, 0, :3] = [448, 17.01, 17]  # by way of bfloat16, 17.01 would be 17 and then 16
    src[0, 0, 512:515] = [1 + 2**-8, 1 + 2**-8 + 2**-20, 3]  # a tie, and above it
    dst = make_cache(backend, "fp8_ds_mla", 1, 1)
    convert_cache(backend.array(src), dst.array, "float32", "fp8_ds_mla")
    row = dst.row(0)
    assert row[:3].tolist() == [0x7E, 0x59, 0x58]
    assert row[528:534].tobytes().hex(" ").upper() == "80 3F 81 3F 40 40"


@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
def test_bfloat16_rows_become_what_the_writer_stores(backend, rng, scale_format):
    src = filled(backend, rng, "bfloat16", 2, 4, special=True)
    converted, written = (make_cache(backend, "fp8_ds_mla", 2, 4) for _ in range(2))
    convert(src, converted, scale_format=scale_format)
    rows = backend.to_numpy(src.array).reshape(8, 576)
    concat_and_cache_mla(
        backend.array(np.ascontiguousarray(rows[:, :512])),
        backend.array(np.ascontiguousarray(rows[:, 512:])),
        written.array,
        backend.array(np.arange(8)),
        "fp8_ds_mla",
        scale_format=scale_format,
    )
    assert_bytes_equal(converted.bytes(), written.bytes(), written.geometry)


def test_writing_powers_of_two_again_keeps_all_values(backend, rng):
    """A named source does not say that its scales are powers of two already; nothing is lost."""
    first, second, third = (make_cache(backend, "fp8_ds_mla", 4, 4) for _ in range(3))
    src = filled(backend, rng, "bfloat16", 4, 4)
    convert(src, first, scale_format="ue8m0")
    convert(first, second, scale_format="ue8m0")
    convert(second, third, scale_format="ue8m0")
    slots = backend.array(np.arange(16))
    values = [
        backend.to_numpy(read_slots(cache.array, slots, "fp8_ds_mla"))
        for cache in (first, second, third)
    ]
    helpers.assert_values_equal(values[1], values[0])
    assert_bytes_equal(third.bytes(), second.bytes(), second.geometry)


# --- copies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_of_one_layout_and_scale_are_copied_bit_for_bit(backend, rng, fmt):
    """All bits, so that a NaN of any sign and payload and an infinite code are kept."""
    src = make_cache(backend, fmt, 6, 4, row_pad=32)
    fill(src, rng.integers(0, 256, src.bytes().size, np.uint8))
    dst = make_cache(backend, fmt, 4, 6, block_pad=96)
    expected = dst.bytes()
    for slot in range(24):
        start = dst.geometry.row_at(slot)
        expected[start : start + dst.geometry.row_bytes] = src.row(slot)
    scale = 0.37 if fmt in SCALED_FORMATS else None
    convert_cache(src.array, dst.array, fmt, fmt, src_scale=scale, dst_scale=scale)
    assert_bytes_equal(dst.bytes(), expected, dst.geometry)


def test_another_scale_writes_the_codes_again(backend):
    src = np.full((1, 1, 4), 0x7E, np.uint8)
    src[0, 0, 1:] = [0xFF, 0x80, 0x01]
    dst = make_cache(backend, "fp8_e4m3", 1, 1, rank=4, rope=0)
    convert_cache(backend.array(src), dst.array, "fp8", "fp8", src_scale=0.5, dst_scale=2.0)
    assert dst.row(0).tolist() == [0x6E, 0x7F, 0x80, 0x00]  # 112, NaN, -0, 2^-11 to even


def test_power_of_two_scales_are_copied_between_two_such_layouts(backend, rng):
    layout = get_layout("fp8_ds_mla", scale_format="ue8m0")
    src = make_cache(backend, "fp8_ds_mla", 2, 2)
    fill(src, rng.integers(0, 256, src.bytes().size, np.uint8))
    for dst_dtype, options in ((layout, {}), ("fp8_ds_mla", {"scale_format": "ue8m0"})):
        dst = make_cache(backend, "fp8_ds_mla", 2, 2)
        convert_cache(src.array, dst.array, layout, dst_dtype, **options)
        assert all(np.array_equal(dst.row(slot), src.row(slot)) for slot in range(4))


def test_flat_layouts_of_another_border_are_the_same_bytes(backend, rng):
    src = rng.integers(0, 256, (2, 4, 40), np.uint8)
    for src_dtype, dst_dtype in (
        (get_layout("fp8", kv_lora_rank=32, rope_dim=8), "fp8"),
        ("fp8", get_layout("fp8", kv_lora_rank=8, rope_dim=32)),
    ):
        dst = make_cache(backend, "fp8_e4m3", 2, 4, rank=32, rope=8)
        convert_cache(
            backend.array(src), dst.array, src_dtype, dst_dtype, src_scale=3.0, dst_scale=3
        )
        assert np.array_equal(backend.to_numpy(dst.array), src)


def test_indexer_keys_are_moved_to_blocks_of_another_size(backend, rng):
    """4 blocks of 2 to 2 blocks of 4: the scales lie elsewhere in a block."""
    codes = rng.integers(0, 256, (8, 128), np.uint8)
    scales = rng.integers(0, 256, (8, 4), np.uint8)

    def pack(block_size):
        blocks = [
            np.concatenate(
                [codes[i : i + block_size].reshape(-1), scales[i : i + block_size].reshape(-1)]
            )
            for i in range(0, 8, block_size)
        ]
        return np.stack(blocks).reshape(-1, block_size, 132)

    dst = backend.array(np.zeros((2, 4, 132), np.uint8))
    convert_cache(backend.array(pack(2)), dst, "indexer_fp8", "indexer_fp8")
    assert np.array_equal(backend.to_numpy(dst), pack(4))


def test_indexer_keys_are_read_as_numbers(backend, rng):
    src = np.zeros((1, 2, 132), np.uint8)
    flat = src.reshape(264)
    flat[:256] = 0x38
    flat[256:264] = np.array([0.5, 3.0], "<f4").view(np.uint8)
    dst = backend.array(np.zeros((2, 1, 128), np.float32))
    convert_cache(backend.array(src), dst, "indexer_fp8", "float32")
    assert backend.to_numpy(dst)[:, 0, [0, 127]].tolist() == [[0.5, 0.5], [3.0, 3.0]]


# --- slots ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_only_the_given_slots(backend, rng, dtype):
    src = filled(backend, rng, "bfloat16", 3, 4)
    dst = make_cache(backend, "fp8_ds_mla", 4, 3)
    slots = [7, -1, 11, 12, 0, 7, np.iinfo(dtype).max, np.iinfo(dtype).min]
    expected = expected_pool(src, dst, "ue8m0", [7, 11, 0])
    convert(src, dst, scale_format="ue8m0", slots=backend.array(np.array(slots, dtype)))
    assert_bytes_equal(dst.bytes(), expected, dst.geometry)


@pytest.mark.parametrize("slots", [[], [-1, -5], [99]])
@pytest.mark.parametrize("dst_fmt", ["float32", "fp8_ds_mla"])
def test_no_slots_change_nothing(backend, rng, slots, dst_fmt):
    src = filled(backend, rng, "bfloat16", 2, 4)
    dst = make_cache(backend, dst_fmt, 2, 4)
    with helpers.unchanged(dst):
        convert(src, dst, slots=backend.array(np.array(slots, np.int64)))


def test_caches_without_blocks(backend):
    src, dst = (backend.array(np.zeros((0, 4, 8), dtype)) for dtype in (np.float32, np.float16))
    convert_cache(src, dst, "float32", "float16")


def test_more_rows_than_are_converted_at_a_time(backend):
    values = np.arange(2500 * 3, dtype=np.float32).reshape(50, 50, 3)
    dst = backend.array(np.zeros((2500, 1, 3), np.float16))
    convert_cache(backend.array(values), dst, "float32", "float16")
    assert np.array_equal(backend.to_numpy(dst).reshape(50, 50, 3), values.astype(np.float16))


def test_offsets_beyond_two_gigabytes():
    """Row 3 728 271 of a 576-byte cache begins at byte 2 147 484 096; zero pages are lazy."""
    src = np.zeros((233017, 16, 576), np.uint8)
    dst = np.zeros((233017, 16, 576), np.uint8)
    src[233016, 15] = 0x7E
    src[0, 0] = 0x40
    slots = np.array([0, 3728271], np.int32)
    convert_cache(src, dst, "fp8", "fp8_e5m2", src_scale=0.5, dst_scale=1.0, slots=slots)
    assert set(dst[233016, 15].tolist()) == {0x5B}
    assert set(dst[0, 0].tolist()) == {0x3C}


def test_no_float_copy_of_the_cache_is_made(tmp_path):
    src = np.lib.format.open_memmap(tmp_path / "src.npy", "w+", np.uint8, (2048, 16, 576))
    dst = np.lib.format.open_memmap(tmp_path / "dst.npy", "w+", np.uint8, (2048, 16, 656))
    src[:] = 0x38
    tracemalloc.start()
    convert_cache(src, dst, "fp8", "fp8_ds_mla", src_scale=1.0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 << 20  # float32 values of all rows would take 75 MB
    assert dst[-1, -1, :4].tolist() == [0x7E] * 4


# --- what is refused ------------------------------------------------------------------------------


def test_caches_that_share_memory(backend):
    buffer = backend.buffer(np.zeros(4096, np.uint8))
    src = backend.view(buffer, (2, 4, 8), np.float32, (128, 32, 4))
    for shape, dtype, strides, offset in (
        ((2, 4, 8), np.float32, (128, 32, 4), 0),
        ((2, 4, 8), np.float16, (64, 16, 2), 254),
        ((2, 4, 8), np.float16, (512, 16, 2), 252),
    ):
        dst = backend.view(buffer, shape, dtype, strides, offset)
        with rejected(ValueError, "convert_cache", "dst", "share memory with src"):
            convert_cache(src, dst, "float32", np.dtype(dtype).name)


def test_layers_that_interleave_in_one_pool_share_no_memory(backend):
    """[blocks, layers, rows, width]: the byte ranges of two layers meet, their rows do not."""
    values = np.zeros((3, 2, 4, 8), np.float32)
    values[:, 0] = np.arange(96, dtype=np.float32).reshape(3, 4, 8)
    buffer = backend.buffer(values.reshape(-1).view(np.uint8))
    src = backend.view(buffer, (3, 4, 8), np.float32, (256, 32, 4), 0)
    dst = backend.view(buffer, (3, 4, 8), np.float32, (256, 32, 4), 128)
    convert_cache(src, dst, "float32", "float32")
    pool = backend.to_numpy(buffer).view(np.float32).reshape(3, 2, 4, 8)
    assert np.array_equal(pool[:, 1], values[:, 0])
    assert np.array_equal(pool[:, 0], values[:, 0])


@pytest.mark.parametrize(
    ("changes", "exception", "argument", "fragments"),
    [
        ({"dst_shape": (2, 3, 576)}, ValueError, "src and dst", ["same number of slots"]),
        ({"dst_shape": (2, 4, 320)}, ValueError, "src and dst", ["576", "320"]),
        ({"src_dtype": "int4"}, ValueError, "src_dtype", ["fp8_ds_mla", "int4"]),
        ({"dst_dtype": "int4"}, ValueError, "dst_dtype", ["fp8_ds_mla", "int4"]),
        ({"dst_dtype": 8}, TypeError, "dst_dtype", ["name", "int"]),
        ({"src_dtype": "float16"}, TypeError, "src", ["float16", "float32"]),
        ({"dst_dtype": "float32"}, TypeError, "dst", ["float32", "uint8"]),
        ({"dst_dtype": "fp8_ds_mla"}, ValueError, "dst", ["656", "576"]),
        ({"dst_scale": None}, ValueError, "dst_scale", ["fp8_e4m3"]),
        ({"dst_scale": -1.0}, ValueError, "dst_scale", ["> 0", "-1"]),
        ({"dst_scale": "1"}, TypeError, "dst_scale", ["array"]),
        ({"scale_format": "raw"}, ValueError, "scale_format", ["ue8m0", "raw"]),
        ({"slots": np.zeros((2, 2), np.int64)}, ValueError, "slots", ["[n]", "[2, 2]"]),
        ({"slots": np.zeros(2, np.float32)}, TypeError, "slots", ["int32", "float32"]),
        ({"slots": [1, 2]}, TypeError, "slots", ["array", "list"]),
        (
            {"src_dtype": get_layout("float32", kv_lora_rank=500, rope_dim=76),
             "dst_dtype": get_layout("fp8", kv_lora_rank=512, rope_dim=64)},
            ValueError,
            "src and dst",
            ["500 + 76", "512 + 64"],
        ),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit(backend, changes, exception, argument, fragments):
    dst = make_cache(backend, "fp8_e4m3", 2, 4)
    if "dst_shape" in changes:
        blocks, rows, width = changes["dst_shape"]
        dst = make_cache(backend, "fp8_e4m3", blocks, rows, rank=width, rope=0)
    options = {"src_dtype": "float32", "dst_dtype": "fp8", "dst_scale": 1.0} | changes
    options.pop("dst_shape", None)
    if isinstance(options.get("slots"), np.ndarray):
        options["slots"] = backend.array(options["slots"])
    src = backend.array(np.ones((2, 4, 576), np.float32))
    with rejected(exception, "convert_cache", argument, *fragments, caches=[dst]):
        convert_cache(src, dst.array, **options)


def test_the_source_needs_its_scale_too(backend):
    src = backend.array(np.zeros((2, 4, 576), np.uint8))
    dst = make_cache(backend, "float32", 2, 4)
    with rejected(ValueError, "convert_cache", "src_scale", "fp8_e5m2", caches=[dst]):
        convert_cache(src, dst.array, "fp8_e5m2", "float32")


def test_indexer_keys_are_written_by_their_own_operation_alone(backend):
    src = backend.array(np.zeros((2, 4, 128), np.float32))
    dst = backend.array(np.zeros((2, 4, 132), np.uint8))
    with rejected(ValueError, "convert_cache", "dst_dtype", "indexer_fp8"):
        convert_cache(src, dst, "float32", "indexer_fp8")


def test_a_read_only_destination(backend):
    src, dst = np.ones((1, 2, 4), np.float32), np.zeros((1, 2, 4), np.float16)
    dst.flags.writeable = False
    with rejected(ValueError, "convert_cache", "dst", "read-only"):
        convert_cache(src, dst, "float32", "float16")
    src.flags.writeable = False
    dst = np.zeros((1, 2, 4), np.float16)
    convert_cache(src, dst, "float32", "float16")
    assert dst.min() == 1


def test_caches_on_two_devices():
    src = helpers.FakeDevice((1, 2, 4), "<f4")
    with rejected(ValueError, "convert_cache", "src", "same CUDA device", "cuda:0"):
        convert_cache(src, np.zeros((1, 2, 4), np.float16), "float32", "float16")
