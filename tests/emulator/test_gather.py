"""The gather and copy kernels, with the package's launch code, against the NumPy reference.

Every byte of every output is compared, and every byte around it.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_mla import (
    cp_gather_and_upconvert_fp8_kv_cache,
    cp_gather_indexer_k_quant_cache,
    gather_and_maybe_dequant_cache,
    gather_cache,
    get_layout,
    read_slots,
)
from cupy_mla._cuda import geometry, registry
from tests import oracle
from tests.emulator.device import EmulatorDevice
from tests.emulator.reads import (
    FORMATS,
    OUTPUTS,
    agree,
    bits_of,
    by_kernels,
    make_out,
    random_cache,
    storage,
)

every_format = pytest.mark.parametrize("fmt", FORMATS)
every_output = pytest.mark.parametrize("output", OUTPUTS)
SCALE = 0.37


def width_of(fmt, width=576):
    return 128 if fmt == "indexer_fp8" else width


def table_case(rng, requests=4, columns=3, blocks=5, block_size=4):
    """A table with some blocks that the cache lacks, lengths with an empty request, and starts."""
    table = rng.integers(-1, blocks + 1, (requests, columns)).astype(np.int32)
    lengths = rng.integers(0, columns * block_size, requests)
    lengths[1] = 0
    cu = np.concatenate([[2], 2 + np.cumsum(lengths)]).astype(np.int32)
    return table, cu, rng.integers(-1, 5, requests).astype(np.int64)


def test_the_combinations_are_all_that_are_built():
    built = {(s.format.layout, s.input.dtype) for s in registry.specialisations("gather")}
    assert built == {(fmt, output) for fmt in FORMATS for output in OUTPUTS if fmt != output}
    assert {s.entry for s in registry.specialisations("copy")} == {
        "copy_rows_uint8",
        "copy_planes_uint8",
    }


# --- where bytes come from and go to --------------------------------------------------------------


@every_format
@every_output
@pytest.mark.parametrize("streams", [False, True])
def test_every_specialisation_by_a_table(rng, fmt, output, streams):
    device = EmulatorDevice(l2_bytes=0 if streams else 1 << 20)
    cache, pool = random_cache(rng, fmt, block_pad=64)
    table, cu, starts = table_case(rng)
    out, out_pool = make_out(int(cu[-1]) + 3, width_of(fmt), output)
    agree(
        device,
        lambda: gather_cache(cache, table, cu, fmt, SCALE, seq_starts=starts, out=out),
        out_pool,
        pool,
    )
    names = {"copy_rows_uint8"} if fmt == output else {f"gather_{fmt}_{output}"}
    assert {entry for entry, _, _ in device.launches} == names


@every_format
@every_output
def test_every_specialisation_by_slots(device, rng, fmt, output):
    cache, pool = random_cache(rng, fmt, block_pad=32)
    slots = np.array([3, 19, -1, 0, 20, 3, 2**40, -(2**63), 2**63 - 1, 11])
    for index in (slots, slots.clip(-(2**31), 2**31 - 1).astype(np.int32)):
        agree(device, lambda i=index: read_slots(cache, i, fmt, SCALE, out_dtype=output), pool)


@every_format
@every_output
@pytest.mark.parametrize(
    ("row_pad", "offset", "gap", "out_offset"),
    [(0, 260, 0, 256), (4, 256, 0, 256), (8, 264, 4, 256), (16, 272, 8, 264), (0, 256, 16, 260)],
)
def test_alignments(device, rng, fmt, output, row_pad, offset, gap, out_offset):
    if fmt == "indexer_fp8":
        row_pad = 0
    cache, _ = random_cache(rng, fmt, row_pad=row_pad, offset=offset, block_pad=row_pad)
    table, cu, starts = table_case(rng)
    out, pool = make_out(int(cu[-1]), width_of(fmt), output, gap=gap, offset=out_offset)
    agree(
        device,
        lambda: gather_cache(cache, table, cu, fmt, SCALE, seq_starts=starts, out=out),
        pool,
    )


@pytest.mark.parametrize("fmt", ["fp8_e5m2", "fp8_ds_mla", "indexer_fp8"])
@every_output
@pytest.mark.parametrize(("row_pad", "offset"), [(1, 256), (0, 257), (2, 258), (3, 259)])
def test_byte_caches_at_any_address(device, rng, fmt, output, row_pad, offset):
    cache, _ = random_cache(
        rng, fmt, row_pad=0 if fmt == "indexer_fp8" else row_pad, offset=offset, block_pad=3
    )
    slots = rng.permutation(20)
    agree(device, lambda: read_slots(cache, slots, fmt, SCALE, out_dtype=output))


@pytest.mark.parametrize("fmt", FORMATS[:5])
@every_output
@pytest.mark.parametrize("width", [1, 7, 12, 24, 320, 1160, 8192])
@pytest.mark.parametrize("aligned", [False, True])
def test_other_widths(device, rng, fmt, output, width, aligned):
    """With rows that begin at multiples of 16 bytes, and at others."""
    size, out_size = (width * storage(name).itemsize for name in (fmt, output))
    gap = -out_size % 16 if aligned else 2 * storage(output).itemsize
    cache, _ = random_cache(rng, fmt, width, row_pad=-size % 16 if aligned else 0)
    table, cu = np.array([[2, 7, 1], [0, 3, 3]]), np.array([0, 9, 14])
    out, pool = make_out(15, width, output, gap=gap)
    agree(device, lambda: gather_cache(cache, table, cu, fmt, SCALE, out=out), pool)


@every_format
def test_caches_of_one_block_and_blocks_of_one_row(device, rng, fmt):
    """Steps that nobody takes may be of any size."""
    for blocks, block_size in ((1, 16), (16, 1), (1, 1)):
        cache, _ = random_cache(rng, fmt, blocks=blocks, block_size=block_size, block_pad=8)
        slots = np.arange(blocks * block_size)
        got = agree(device, lambda c=cache, s=slots: read_slots(c, s, fmt, SCALE))
        if fmt != "indexer_fp8":
            agree(device, lambda c=cache[:, :1], s=slots: read_slots(c, s, fmt, SCALE))
        assert got.shape[0] == blocks * block_size


@pytest.mark.parametrize("sm_count", [1, 4, 132])
@pytest.mark.parametrize("tokens", [1, 2, 29, 1000])
def test_grids(rng, sm_count, tokens):
    cache, _ = random_cache(rng, "fp8_ds_mla", blocks=40)
    slots = rng.integers(-2, 170, tokens)
    device = EmulatorDevice(sm_count=sm_count)
    agree(device, lambda: read_slots(cache, slots, "fp8_ds_mla", out_dtype="bfloat16"))
    agree(device, lambda: read_slots(cache, slots, "fp8_ds_mla"))


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["bfloat16", "float16"])
@every_output
def test_every_16_bit_number(device, fmt, output):
    cache = np.arange(65536, dtype=np.uint16).view(oracle.DTYPES[fmt]).reshape(128, 1, 512)
    got = agree(device, lambda: read_slots(cache, np.arange(128), fmt, out_dtype=output))
    if fmt != output:
        nan = 0x7FFFFFFF if output == "float32" else 0x7FFF
        found = bits_of(got)[np.isnan(cache.reshape(128, 512).astype(np.float32))]
        assert set(found.tolist()) == {nan}


@pytest.mark.parametrize("output", ["bfloat16", "float16"])
def test_float32_numbers(device, rng, output):
    """Ties, their neighbours, what overflows, subnormal numbers, and random bits."""
    halves = np.arange(65536, dtype=np.uint16)
    if output == "bfloat16":
        ties = (halves.astype(np.uint32) << 16) + np.uint32(0x8000)
    else:
        with np.errstate(all="ignore"):
            ties = halves.view(np.float16).astype(np.float32).view(np.uint32) + np.uint32(0x1000)
    bits = np.concatenate([ties - 1, ties, ties + 1, rng.integers(0, 2**32, 65536, np.uint32)])
    cache = bits.view(np.float32).reshape(512, 1, 512)
    agree(device, lambda: read_slots(cache, np.arange(512), out_dtype=output))


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "fp8_e5m2"])
@every_output
@pytest.mark.parametrize(
    "scale", [1.0, 0.37, 3.0, 2.0**-149, 2.0**-130, 1.2e-38, 2.0**-120, 1e-9, 2.0**100, 3.4e38]
)
def test_every_code_with_scales_of_every_size(device, fmt, output, scale):
    cache = np.arange(256, dtype=np.uint8).reshape(1, 1, 256)
    agree(device, lambda: read_slots(cache, np.array([0]), fmt, scale, out_dtype=output))


@pytest.mark.parametrize("fmt", ["fp8_ds_mla", "indexer_fp8"])
@every_output
def test_every_code_with_stored_scales_of_every_kind(device, fmt, output):
    scales = [1, 0.37, 0.0, -0.0, -2.5, 2.0**-149, 2.0**-127, 3.4e38, np.inf, -np.inf, np.nan, 448]
    size, place = (656, 512) if fmt == "fp8_ds_mla" else (132, 128)
    rows = np.zeros((2 * len(scales), 1, size), np.uint8)
    for number, scale in enumerate(np.repeat(np.array(scales, "<f4"), 2)):
        rows[number, 0, :place] = np.resize(np.arange(256) + 128 * (number % 2), place)
        count = (528 - place) // 4 if size == 656 else 1
        rows[number, 0, place : place + 4 * count] = np.repeat(scale, count).view(np.uint8)
        if size == 656:
            rope = np.arange(64, dtype=np.uint16) + np.uint16(0x7F70 + 0x8000 * (number % 2))
            rows[number, 0, 528:] = rope.view(np.uint8)
    slots = np.arange(len(rows))
    agree(device, lambda: read_slots(rows, slots, fmt, out_dtype=output))


@pytest.mark.parametrize(
    ("output", "nan", "inf"),
    [
        ("bfloat16", "FF 7F", "80 FF"),
        ("float16", "FF 7F", "00 FC"),
        ("float32", "FF FF FF 7F", "00 00 80 FF"),
    ],
)
def test_a_nan_has_one_code_unless_its_bits_are_copied(device, output, nan, inf):
    """NaN of both signs in fp8, and Inf times zero; the rotary part keeps its bits in bfloat16."""
    row = np.zeros((1, 1, 656), np.uint8)
    row[0, 0, :3] = [0x7F, 0xFF, 0x00]
    row[0, 0, 512:516] = np.array([-np.inf], "<f4").view(np.uint8)
    row[0, 0, 3] = 0x38
    row[0, 0, 528:534] = [0xC1, 0xFF, 0x81, 0x7F, 0x80, 0xFF]
    expected = [nan, nan, nan, inf]
    rope = ["C1 FF", "81 7F", "80 FF"] if output == "bfloat16" else [nan, nan, inf]
    for call in (
        lambda: read_slots(row, np.array([0]), "fp8_ds_mla", out_dtype=output),
        lambda: by_kernels(
            device, lambda: read_slots(row, np.array([0]), "fp8_ds_mla", out_dtype=output)
        ),
    ):
        values = call()[0]
        shown = [element.tobytes().hex(" ").upper() for element in values]
        assert shown[:4] == expected
        assert shown[512:515] == rope


# --- block tables ---------------------------------------------------------------------------------


@given(data=st.data())
def test_any_table(device, data):
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    fmt, output = draw(st.sampled_from([("bfloat16", "bfloat16"), ("fp8_e4m3", "float32")]))
    blocks, block_size = draw(st.integers(0, 4)), draw(st.integers(1, 5))
    cache, _ = random_cache(rng, fmt, 16, blocks=blocks, block_size=block_size)
    requests, columns = draw(st.integers(0, 6)), draw(st.integers(0, 4))
    index = st.sampled_from([np.int32, np.int64])

    def whole(dtype):
        info = np.iinfo(dtype)
        ends = st.sampled_from([info.min, info.min + 1, info.max, info.max - 1])
        return st.integers(-3, 20) | ends

    def drawn(count, values, dtype):
        return np.array([draw(values) for _ in range(count)], dtype)

    dtype = draw(index)
    table = drawn(requests * columns, whole(dtype), dtype).reshape(requests, columns)
    cu = np.sort(drawn(requests + 1, st.integers(-5, 25), draw(index)))
    starts = draw(st.sampled_from([None, np.int32, np.int64]))
    if starts is not None:
        starts = drawn(requests, whole(starts), starts)
    out, pool = make_out(draw(st.integers(0, 30)), 16, output, gap=draw(st.sampled_from([0, 4])))
    if draw(st.booleans()):
        agree(
            device,
            lambda: gather_cache(cache, table, cu, fmt, 1.0, seq_starts=starts, out=out),
            pool,
        )
    else:
        dtype = draw(index)
        owner = drawn(len(out), whole(dtype), dtype)
        agree(
            device,
            lambda: gather_and_maybe_dequant_cache(
                cache, out, table, cu, owner, len(out), fmt, 1.0, starts
            ),
            pool,
        )


@given(data=st.data())
def test_any_workspace(device, data):
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    cache, _ = random_cache(rng, "fp8_ds_mla", blocks=3, block_size=2)
    requests = draw(st.integers(0, 4))
    table = rng.integers(-1, 4, (requests + 1, 3)).astype(np.int32)
    firsts = st.lists(st.integers(-2, 12), min_size=requests + 1, max_size=requests + 1)
    first = np.array(sorted(draw(firsts)))
    starts = draw(st.sampled_from([None, rng.integers(-2, 7, requests + 1)]))
    out, pool = make_out(draw(st.integers(0, 14)), 576, "bfloat16")
    agree(
        device,
        lambda: cp_gather_and_upconvert_fp8_kv_cache(cache, out, table, first, requests, starts),
        pool,
    )


def test_a_new_array_is_zero_where_nobody_owns_it(device, rng):
    """Its memory held a pattern."""
    cache, _ = random_cache(rng, "fp8_e4m3")
    table, cu = np.array([[1], [9]]), np.array([2, 4, 5])
    for output in OUTPUTS:
        rows = agree(
            device,
            lambda o=output: gather_cache(
                cache, table, cu, "fp8", SCALE, num_tokens=40, out_dtype=o
            ),
        )
        assert not bits_of(rows)[[0, 1, *range(4, 40)]].any()
        assert bits_of(rows)[2:4].any()
    rows = agree(device, lambda: gather_cache(cache, table, cu, "fp8", SCALE))
    assert rows.shape == (5, 576)


def test_70_000_requests(device, rng):
    """Three of four are empty; each of the others has a row of a block of its own."""
    requests = 70_000
    cache, _ = random_cache(rng, "fp8_e4m3", 16, blocks=64, block_size=16)
    lengths = (np.arange(requests) % 4 == 1).astype(np.int32)
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    table = (np.arange(requests) % 64).astype(np.int32)[:, None]
    starts = (np.arange(requests) % 16).astype(np.int32)
    out, pool = make_out(int(cu[-1]), 16, "bfloat16")
    agree(
        device,
        lambda: gather_cache(cache, table, cu, "fp8", SCALE, seq_starts=starts, out=out),
        pool,
    )
    owners = np.flatnonzero(lengths)
    want = read_slots(cache, owners % 64 * 16 + owners % 16, "fp8", SCALE, out_dtype="bfloat16")
    assert np.array_equal(bits_of(out), bits_of(want))


@pytest.mark.parametrize("far", [2**31, 2**32 + 48, 2**40])
def test_a_long_request(device, rng, far):
    """Positions around a number of 32 bits or more, of a table whose columns lie on one another."""
    cache, _ = random_cache(rng, "bfloat16", 8, blocks=3, block_size=48)
    columns = (far + 4800) // 48
    table = np.lib.stride_tricks.as_strided(np.array([2]), (3, columns), (0, 0))
    starts = np.array([far - 3, far - 49, columns * 48 - 2])
    cu = np.array([0, 5, 55, 60])
    got = agree(
        device,
        lambda: gather_cache(cache, table, cu, seq_starts=starts, out_dtype="bfloat16"),
    )
    assert bits_of(got)[:57].any(axis=1).all()
    assert not bits_of(got)[57:].any()


def test_rows_beyond_2_gib(device, rng):
    """A cache of 2.15 GB of which three rows are touched; the rest is never mapped."""
    rows = 3_728_272
    cache = np.zeros((rows // 16, 16, 576), np.uint8)
    flat = cache.reshape(rows, 576)
    chosen = np.array([0, 3_728_270, 3_728_271])
    flat[chosen] = rng.integers(0, 256, (3, 576), np.uint8)
    agree(device, lambda: read_slots(cache, chosen, "fp8", SCALE))
    table = np.array([[0, 233016]], np.int32)
    starts = np.array([14], np.int32)
    agree(
        device,
        lambda: gather_cache(cache, table, np.array([0, 18]), "fp8", SCALE, seq_starts=starts),
    )


@every_format
def test_tables_lengths_and_starts_of_any_stride(device, rng, fmt):
    cache, _ = random_cache(rng, fmt)
    large = rng.integers(-1, 6, (12, 9)).astype(np.int32)
    lengths = np.array([[0, 99], [4, 99], [9, 99], [11, 99]])[:, 0]
    starts = rng.integers(-2, 9, (7, 3))[::-2][:3, 2]
    for table in (large[::4, 2:5], large[2::-1, ::-2], large.T[:3, ::3]):
        agree(
            device,
            lambda t=table: gather_cache(
                cache, t, lengths, fmt, SCALE, seq_starts=starts, num_tokens=12
            ),
        )


# --- indexer keys ---------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 3, 4, 64])
@pytest.mark.parametrize(
    ("gap", "offset", "scale_gap", "scale_offset", "scale_dtype"),
    [
        (0, 256, 0, 256, "float32"),
        (32, 272, 4, 260, "float32"),
        (1, 257, 3, 258, "uint8"),
        (4, 256, 0, 257, "uint8"),
    ],
)
def test_indexer_keys(device, rng, block_size, gap, offset, scale_gap, scale_offset, scale_dtype):
    cache, _ = random_cache(
        rng, "indexer_fp8", blocks=5, block_size=block_size, block_pad=gap, offset=offset
    )
    table, cu, _ = table_case(rng, block_size=block_size)
    tokens = int(cu[-1]) + 2
    keys, key_pool = make_out(tokens, 128, "uint8", gap=gap, offset=offset)
    count = 1 if scale_dtype == "float32" else 4
    scales, scale_pool = make_out(tokens, count, scale_dtype, gap=scale_gap, offset=scale_offset)
    agree(
        device,
        lambda: cp_gather_indexer_k_quant_cache(cache, keys, scales, table, cu),
        key_pool,
        scale_pool,
    )


# --- launches -------------------------------------------------------------------------------------


def test_a_second_gather_compiles_and_allocates_nothing(device, rng, monkeypatch):
    cache, _ = random_cache(rng, "fp8_ds_mla")
    table, cu, starts = table_case(rng)
    out, pool = make_out(int(cu[-1]), 576, "bfloat16")
    args = cache, table, cu, "fp8_ds_mla"

    def fail(*_):
        raise AssertionError("something else than a launch")

    def twice():
        gather_cache(*args, seq_starts=starts, out=out)
        wanted = pool.copy()
        with monkeypatch.context() as patch:
            for name in ("compile", "allocate", "upload", "download", "empty"):
                patch.setattr(device, name, fail)
            launches = len(device.launches)
            pool[...] = 0x5A
            gather_cache(*args, seq_starts=starts, out=out)
            assert len(device.launches) == launches + 1
        assert np.array_equal(pool, wanted)

    by_kernels(device, twice)


def test_no_rows_are_no_launch(device, rng):
    cache, _ = random_cache(rng, "fp8_e4m3")
    launches = len(device.launches)
    agree(device, lambda: read_slots(cache, np.zeros(0, np.int64), "fp8", SCALE))
    agree(device, lambda: gather_cache(cache, np.zeros((2, 1), int), np.zeros(3, int), "fp8", 1))
    assert len(device.launches) == launches


@given(
    st.sampled_from(tuple(registry.specialisations("gather"))),
    st.integers(1, 3000) | st.integers(1, 2**31 - 1),
    st.integers(1, 700) | st.sampled_from([576, 4096, 100_000]),
    st.sampled_from([4, 8, 16]),
    st.sampled_from([1, 20, 132]),
)
def test_grids_cover_every_row_once(special, rows, size, unit, sm_count):
    try:
        shape = geometry.read_shape(special, rows=rows, size=size, unit=unit, sm_count=sm_count)
    except ValueError as error:
        assert "must fit a grid" in str(error)
        assert rows > 2**31 - 2**17
        return
    lanes, at_a_time = shape.block
    assert 1 <= lanes * at_a_time <= geometry.MAX_THREADS
    assert at_a_time <= shape.block_tokens <= lanes * at_a_time
    assert (shape.grid - 1) * shape.block_tokens < rows <= shape.grid * shape.block_tokens


def test_layouts_that_differ_only_in_size_share_a_kernel():
    device = EmulatorDevice()
    for width in (32, 48):
        layout = get_layout("fp8", kv_lora_rank=width, rope_dim=16)
        cache = np.zeros((1, 2, width + 16), np.uint8)
        by_kernels(device, lambda c=cache, k=layout: read_slots(c, np.array([1]), k, 1.0))
    assert device.compiled == ["gather_fp8_e4m3_float32"]
