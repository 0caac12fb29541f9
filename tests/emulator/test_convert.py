"""Conversions by kernels, with the package's launch code, against the NumPy reference.

Every byte of every pool is compared.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_mla import audit_cache, convert_cache, get_layout
from cupy_mla._arrays import describe
from cupy_mla._cuda import read, registry
from cupy_mla._cuda.backend import CudaBackend
from tests import oracle
from tests.emulator.device import EmulatorDevice
from tests.emulator.reads import FORMATS, agree, by_kernels, random_cache, storage

SOURCES = (*FORMATS[:6], "fp8_ds_mla ue8m0", "indexer_fp8")
DESTINATIONS = ("bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla")
SCALE_FORMATS = ("float32", "ue8m0")
every_source = pytest.mark.parametrize("source", SOURCES)
every_destination = pytest.mark.parametrize("destination", DESTINATIONS)


def convert(src, dst, source, destination, **options):
    """Convert; a source of powers of two is written again by float32 scales, and not copied."""
    layout = source
    if source == "fp8_ds_mla ue8m0":
        layout = get_layout("fp8_ds_mla", scale_format="ue8m0")
    scales = {"src_scale": 0.37, "dst_scale": 1.5}
    convert_cache(src, dst, layout, destination, **(scales | options))


def caches(rng, source, destination, *, width=576, src=None, dst=None, finite=False):
    """Make both caches, of 24 slots in blocks of other sizes; return them and their pools."""
    fmt = source.partition(" ")[0]
    width = 128 if fmt == "indexer_fp8" else width
    return (
        *random_cache(rng, fmt, width, blocks=6, block_size=4, finite=finite, **(src or {})),
        *random_cache(rng, destination, width, blocks=3, block_size=8, **(dst or {})),
    )


def fits(source, destination):
    """Whether rows of both have as many elements."""
    return (source, destination) != ("indexer_fp8", "fp8_ds_mla")


def test_what_is_built():
    built = {(s.format.layout, s.input.dtype) for s in registry.specialisations("convert")}
    assert built == {(fmt, "float32") for fmt in ("fp8_e4m3", "fp8_e5m2", "fp8_ds_mla")}


@every_source
@every_destination
@pytest.mark.parametrize("scale_format", SCALE_FORMATS)
@pytest.mark.parametrize("finite", [True, False])
def test_every_pair(rng, source, destination, scale_format, finite):
    if not fits(source, destination):
        return
    device = EmulatorDevice(l2_bytes=0 if finite else 1 << 20)
    src, src_pool, dst, pool = caches(rng, source, destination, finite=finite)
    agree(
        device,
        lambda: convert(src, dst, source, destination, scale_format=scale_format),
        pool,
        src_pool,
    )
    copies = source == destination and not source.startswith("fp8_")
    copies |= (source, destination, scale_format) in {
        ("fp8_ds_mla", "fp8_ds_mla", "float32"),
        ("fp8_ds_mla ue8m0", "fp8_ds_mla", "ue8m0"),
    }
    kind = "copy" if copies else "convert" if destination.startswith("fp8_") else "gather"
    assert [entry.partition("_")[0] for entry, _, _ in device.launches] == [kind]


@every_source
@every_destination
@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ({"row_pad": 4, "block_pad": 8}, {}),
        ({}, {"row_pad": 8, "block_pad": 4}),
        ({"offset": 264}, {"offset": 260}),
        ({"row_pad": 16, "offset": 272}, {"block_pad": 16}),
    ],
)
def test_alignments(device, rng, source, destination, src, dst):
    if not fits(source, destination):
        return
    if source == "indexer_fp8":
        src = {key: value for key, value in src.items() if key != "row_pad"}
    src, _, dst, pool = caches(rng, source, destination, src=src, dst=dst, finite=True)
    for scale_format in SCALE_FORMATS:
        agree(
            device,
            lambda f=scale_format: convert(src, dst, source, destination, scale_format=f),
            pool,
        )


@pytest.mark.parametrize("source", SOURCES[3:])
@pytest.mark.parametrize("destination", DESTINATIONS[3:])
@pytest.mark.parametrize("finite", [True, False])
def test_byte_caches_at_any_address(device, rng, source, destination, finite):
    if not fits(source, destination):
        return
    far = {"offset": 257, "block_pad": 5}
    src, _, dst, pool = caches(
        rng, source, destination, src=far, dst=far | {"row_pad": 3}, finite=finite
    )
    agree(device, lambda: convert(src, dst, source, destination), pool)


@pytest.mark.parametrize("source", SOURCES[:5])
@pytest.mark.parametrize("destination", DESTINATIONS[:5])
@pytest.mark.parametrize("width", [1, 7, 24, 320, 4112])
@pytest.mark.parametrize("aligned", [False, True])
def test_other_widths(device, rng, source, destination, width, aligned):
    """With rows that are as close as they can, and that begin at multiples of 16 bytes."""
    sizes = [width * storage(fmt).itemsize for fmt in (source, destination)]
    pads = [{"row_pad": -size % 16 if aligned else 0} for size in sizes]
    src, _, dst, pool = caches(
        rng, source, destination, width=width, src=pads[0], dst=pads[1], finite=True
    )
    agree(device, lambda: convert(src, dst, source, destination), pool)


@every_source
@every_destination
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_slots(device, rng, source, destination, index):
    if not fits(source, destination):
        return
    src, _, dst, pool = caches(rng, source, destination, finite=True)
    info = np.iinfo(index)
    slots = np.array([5, -1, 23, 24, 0, info.max, info.min, 5, 11], index)
    agree(device, lambda: convert(src, dst, source, destination, slots=slots), pool)
    for nothing in (slots[:0], np.array([-1, 99], index)):
        agree(device, lambda n=nothing: convert(src, dst, source, destination, slots=n), pool)


@pytest.mark.parametrize("destination", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize(
    "scale", [2.0**-149, 2.0**-130, 1.2e-38, 2.0**-81, 1e-9, 0.3, 3e5, 2.0**81, 3.4e38]
)
@pytest.mark.parametrize("width", [576, 570])
def test_scales_of_every_size(device, rng, destination, scale, width):
    """float32 numbers around the scale, beside ties of the codes, and of any bits."""
    codes = np.arange(0x7B, dtype=np.uint8).view(oracle.CODE_DTYPES[destination])
    numbers = codes.astype(np.float64)
    ties = (numbers[:-1] + numbers[1:]) / 2
    with np.errstate(all="ignore"):
        near = (rng.choice(ties, (12, width)) * scale).astype(np.float32)
        near = (near.view(np.int32) + rng.integers(-2, 3, near.shape, np.int32)).view(np.float32)
        spread = np.exp2(rng.uniform(-18, 17, (6, width)) + np.log2(scale)).astype(np.float32)
    bits = rng.integers(0, 2**32, (6, width), np.uint32).view(np.float32)
    src = np.concatenate([near, -spread, bits])[:, None]
    _, _, dst, pool = caches(rng, "float32", destination, width=width)
    agree(device, lambda: convert(src, dst, "float32", destination, dst_scale=scale), pool)


@pytest.mark.parametrize("scale_format", SCALE_FORMATS)
@pytest.mark.parametrize("pad", [0, 3])
def test_float32_tiles_of_every_kind(device, rng, scale_format, pad):
    rows = rng.standard_normal((24, 1, 576)).astype(np.float32)
    rows[0] = 0
    rows[1, :, :128], rows[1, :, 128:256] = np.nan, -0.0
    rows[2, :, :4] = [1, np.inf, -2, 0]
    with np.errstate(all="ignore"):
        for number, exponent in enumerate(range(-149, 120, 18), 3):
            rows[number] *= np.float32(2.0**exponent)
    rows[18:] = rng.integers(0, 2**32, (6, 1, 576), np.uint32).view(np.float32)
    rows[18:, :, 130:] = np.where(np.isfinite(rows[18:, :, 130:]), rows[18:, :, 130:], 0)
    _, _, dst, pool = caches(rng, "float32", "fp8_ds_mla", dst={"row_pad": pad})
    agree(device, lambda: convert(rows, dst, "float32", "fp8_ds_mla", scale_format=scale_format),
          pool)  # fmt: skip


def test_rotary_parts_keep_their_bits_or_get_one_nan(device):
    """NaN of both signs: as they are from bfloat16, 7FFF from what has to be rounded."""
    numbers = np.full((1, 1, 576), 1.0, np.float32)
    numbers[0, 0, 512:515] = [np.nan, -np.nan, -np.inf]
    half = numbers.astype(np.float16)
    brain = numbers.astype(oracle.BFLOAT16)
    brain.view(np.uint16)[0, 0, 512:514] = [0xFFC1, 0x7F81]
    for src, expected in (
        (numbers, "FF 7F FF 7F 80 FF"),
        (half, "FF 7F FF 7F 80 FF"),
        (brain, "C1 FF 81 7F 80 FF"),
    ):
        for run in (lambda call: call(), lambda call: by_kernels(device, call)):
            dst = np.zeros((1, 1, 656), np.uint8)
            run(lambda s=src, d=dst: convert(s, d, s.dtype.name, "fp8_ds_mla"))
            assert dst[0, 0, 528:534].tobytes().hex(" ").upper() == expected


def test_more_rows_than_a_block_takes(rng):
    src, _ = random_cache(rng, "float16", blocks=150, block_size=2, finite=True)
    for sm_count in (1, 132):
        device = EmulatorDevice(sm_count=sm_count)
        for destination in ("fp8_e4m3", "fp8_ds_mla", "float32"):
            dst, pool = random_cache(rng, destination, blocks=100, block_size=3)
            agree(device, lambda d=dst, k=destination: convert(src, d, "float16", k), pool)


def test_rows_beyond_2_gib(device, rng):
    """Caches of 2.15 and 2.4 GB of which three rows are touched; the rest is never mapped."""
    src = np.zeros((233016, 16, 576), np.uint8)
    dst = np.zeros((116508, 32, 656), np.uint8)
    slots = np.array([0, 3_728_254, 3_728_255])
    src.reshape(-1, 576)[slots] = rng.integers(0, 0x7F, (3, 576), np.uint8)
    convert(src, dst, "fp8", "fp8_ds_mla", slots=slots)
    written = dst.reshape(-1, 656)
    wanted = written[slots].copy()
    assert wanted[:, :512].any(axis=1).all()
    written[slots] = 0
    by_kernels(device, lambda: convert(src, dst, "fp8", "fp8_ds_mla", slots=slots))
    assert np.array_equal(written[slots], wanted)


@given(data=st.data())
def test_any_conversion(device, data):
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    source, destination = draw(st.sampled_from(SOURCES[:7])), draw(st.sampled_from(DESTINATIONS))
    width = 576
    if "ds_mla" not in source + destination:
        width = draw(st.sampled_from([16, 48, 576]) | st.integers(1, 70))
    sizes = [1, 2, 3, 4, 6, 8, 12, 24]

    def place(fmt):
        size = draw(st.sampled_from(sizes))
        unit = oracle.DTYPES[fmt].itemsize if fmt in oracle.DTYPES else 1
        pads = st.sampled_from([0, 16]) | st.integers(0, 5).map(lambda n: n * unit)
        return {
            "blocks": 24 // size,
            "block_size": size,
            "row_pad": draw(pads),
            "block_pad": draw(pads),
            "offset": 256 + draw(pads),
        }

    fmt = source.partition(" ")[0]
    src, _ = random_cache(rng, fmt, width, finite=draw(st.booleans()), **place(fmt))
    dst, pool = random_cache(rng, destination, width, **place(destination))
    floats = st.floats(width=32, min_value=2.0**-149, allow_infinity=False)
    options = {
        "scale_format": draw(st.sampled_from(SCALE_FORMATS)),
        "src_scale": draw(floats),
        "dst_scale": draw(floats),
        "slots": draw(st.sampled_from([None, rng.integers(-3, 30, 9)])),
    }
    agree(device, lambda: convert(src, dst, source, destination, **options), pool)


# --- rows on the host -----------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("chunk", [1, 2000, 4 << 20])
def test_rows_go_to_the_host_in_pieces(device, rng, monkeypatch, fmt, chunk):
    monkeypatch.setattr(read, "_CHUNK_BYTES", chunk)
    pad = 0 if fmt == "indexer_fp8" else 8
    cache, _ = random_cache(rng, fmt, row_pad=pad, block_pad=4)
    sizes = {"kv_lora_rank": 512, "rope_dim": 64}
    for slots in (None, [3, 1, 19, 99], []):
        want = audit_cache(cache, fmt, slots=slots, **sizes)
        got = by_kernels(device, lambda s=slots: audit_cache(cache, fmt, slots=s, **sizes))
        assert got == want


def test_arrays_are_copied_to_the_host(device):
    numbers = np.arange(24).reshape(2, 3, 4)
    backend = CudaBackend(device)
    for array in (
        numbers,
        numbers[:, 1],
        numbers[::-1, ::-2, 1::2],
        numbers.transpose(2, 0, 1),
        np.broadcast_to(numbers[0, 0], (5, 4)),
        numbers[:0],
        numbers[1, 2, 3:].reshape(()),
        numbers.astype(oracle.BFLOAT16)[:, ::2],
    ):
        copied = backend.host_copy(describe(array))
        assert (copied.shape, copied.dtype) == (array.shape, array.dtype)
        assert np.array_equal(copied, array)
        assert not np.shares_memory(copied, array)


def test_strided_slots_are_found(device, rng):
    cache, _ = random_cache(rng, "bfloat16")
    table = np.array([[3, 7], [1, 9], [4, 0]])
    for slots in (table[:, 0], table[::-1, 1], table[:0, 0]):
        want = audit_cache(cache, "bfloat16", slots=slots)
        assert by_kernels(device, lambda s=slots: audit_cache(cache, "bfloat16", slots=s)) == want
