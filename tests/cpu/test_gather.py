"""Rows of requests read through a block table: which row, which value, what stays untouched.

The oracle below goes row by row in plain Python; values come from tests.oracle.
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
)
from tests import helpers, oracle
from tests.helpers import FORMATS, SCALED_FORMATS, assert_values_equal, make_cache, rejected

OUT_DTYPES = ("float32", "bfloat16", "float16")


def slow_slots(table, first, starts, num_blocks, block_size, tokens, open_ended=False):
    """Slot of each output row: None where nobody owns it, -1 where its row is none of the cache."""
    count = len(first) if open_ended else len(first) - 1
    slots = []
    for token in range(tokens):
        owner = None
        for request in range(count):
            last = open_ended and request == count - 1
            if first[request] <= token and (last or token < first[request + 1]):
                owner = request
        if owner is None:
            slots.append(None)
            continue
        position = token - first[owner] + (0 if starts is None else starts[owner])
        column, row = position // block_size, position % block_size
        if not 0 <= column < len(table[owner]) or not 0 <= table[owner][column] < num_blocks:
            slots.append(-1)
        else:
            slots.append(table[owner][column] * block_size + row)
    return slots


def random_cache(backend, rng, fmt, num_blocks=5, block_size=4, rank=512, rope=64):
    """A cache of random rows with gaps between rows and blocks; also its bytes."""
    cache = make_cache(backend, fmt, num_blocks, block_size, rank, rope, row_pad=16, block_pad=64)
    pool = rng.integers(0, 256, cache.bytes().size, np.uint8)
    for slot in range(num_blocks * block_size):
        start = cache.geometry.row_at(slot)
        if fmt == "fp8_ds_mla":
            scales = 2.0 ** rng.uniform(-30, 10, 4)
            pool[start + 512 : start + 528] = scales.astype("<f4").view(np.uint8)
    cache.buffer = backend.buffer(pool)
    dtype = helpers.STORAGE_DTYPES[fmt]
    cache.array = backend.view(
        cache.buffer,
        cache.array.shape,
        dtype,
        (cache.geometry.block_stride, cache.geometry.row_stride, dtype.itemsize),
        256,
    )
    return cache, pool


def numbered_cache(backend, num_blocks=4, block_size=4):
    """A float32 cache [N, B, 2] whose rows hold (block, row)."""
    values = np.zeros((num_blocks, block_size, 2), np.float32)
    values[..., 0] = np.arange(num_blocks)[:, None]
    values[..., 1] = np.arange(block_size)
    return backend.array(values)


def gathered(backend, *args, **options):
    """Gather in float32 and return plain numbers."""
    rows = gather_cache(*args, out_dtype="float32", **options)
    return backend.to_numpy(rows).tolist()


def ints(backend, values, dtype=np.int64):
    return backend.array(np.array(values, dtype))


# --- which row ------------------------------------------------------------------------------------


def test_a_start_within_a_block(backend):
    rows = gathered(
        backend,
        numbered_cache(backend),
        ints(backend, [[2, 0, 3]], np.int32),
        ints(backend, [0, 4], np.int32),
        seq_starts=ints(backend, [5], np.int32),
    )
    assert rows == [[0, 1], [0, 2], [0, 3], [3, 0]]


def test_a_request_that_runs_past_its_row_of_the_table_reads_zeros(backend):
    """Not the next request's blocks, which lie behind it in memory."""
    rows = gathered(
        backend,
        numbered_cache(backend),
        ints(backend, [[3, 2], [1, 1]], np.int32),
        ints(backend, [0, 4, 5], np.int32),
        seq_starts=ints(backend, [6, 0], np.int32),
    )
    assert rows == [[2, 2], [2, 3], [0, 0], [0, 0], [1, 0]]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_blocks_that_the_cache_does_not_have_read_as_zeros(backend, dtype):
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    table = [[1, -1, 9, low, high, 4, 3]]
    for block_size in (1, 4):
        rows = gathered(
            backend,
            numbered_cache(backend, block_size=block_size),
            ints(backend, table, dtype),
            ints(backend, [0, 7 * block_size]),
        )
        expected = [[block, row] for block in (1, 3) for row in range(block_size)]
        assert rows == [*expected[:block_size], *[[0, 0]] * 5 * block_size, *expected[block_size:]]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_starts_outside_the_table_read_zeros(backend, dtype):
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    rows = gathered(
        backend,
        numbered_cache(backend),
        ints(backend, [[1, 2]] * 4),
        ints(backend, [0, 2, 4, 6, 8]),
        seq_starts=ints(backend, [-1, low, high - 1, 7], dtype),
    )
    assert rows == [[0, 0], [1, 0], *[[0, 0]] * 4, [2, 3], [0, 0]]


def test_requests_without_tokens_own_nothing(backend):
    rows = gathered(
        backend,
        numbered_cache(backend),
        ints(backend, [[0], [1], [2], [3], [0]]),
        ints(backend, [0, 0, 2, 2, 3, 3]),
    )
    assert rows == [[1, 0], [1, 1], [3, 0]]


def test_rows_before_the_first_request_belong_to_nobody(backend):
    rows = gathered(
        backend,
        numbered_cache(backend),
        ints(backend, [[3], [2]]),
        ints(backend, [1, 2, 4]),
        num_tokens=5,
    )
    assert rows == [[0, 0], [3, 0], [2, 0], [2, 1], [0, 0]]


@pytest.mark.parametrize("block_size", [1, 3, 48])
def test_block_sizes_that_are_no_power_of_two(backend, block_size):
    cache = numbered_cache(backend, num_blocks=4, block_size=block_size)
    table, starts = [[3, 1, 2]], [block_size - 1]
    rows = gathered(
        backend,
        cache,
        ints(backend, table),
        ints(backend, [0, block_size + 1]),
        seq_starts=ints(backend, starts),
    )
    slots = slow_slots(table, [0, block_size + 1], starts, 4, block_size, block_size + 1)
    assert rows == [[slot // block_size, slot % block_size] for slot in slots]


@pytest.mark.parametrize("columns", [0, 2])
def test_no_requests_and_no_tokens(backend, columns):
    cache = numbered_cache(backend)
    table = backend.array(np.zeros((0, columns), np.int32))
    assert gathered(backend, cache, table, ints(backend, [0])) == []
    table = backend.array(np.zeros((2, columns), np.int32))
    assert gathered(backend, cache, table, ints(backend, [0, 0, 0])) == []
    assert gathered(backend, cache, table, ints(backend, [0, 1, 3]), num_tokens=0) == []


def test_a_table_without_columns_reads_zeros(backend):
    out = backend.array(np.full((3, 2), 7, np.float32))
    table = backend.array(np.zeros((1, 0), np.int32))
    gather_cache(numbered_cache(backend), table, ints(backend, [0, 2]), out=out)
    assert backend.to_numpy(out).tolist() == [[0, 0], [0, 0], [7, 7]]


def test_a_cache_without_blocks_reads_zeros(backend):
    cache = backend.array(np.zeros((0, 4, 2), np.float32))
    assert gathered(backend, cache, ints(backend, [[0, 1]]), ints(backend, [0, 2])) == [[0, 0]] * 2


def test_tables_that_are_slices_of_larger_ones(backend):
    """Any strides: columns cut off, every other request, every other column, transposed."""
    cache = numbered_cache(backend, num_blocks=8)
    whole = np.arange(48, dtype=np.int32).reshape(6, 8) % 8
    buffer = backend.buffer(whole.reshape(-1).view(np.uint8))
    cu = [0, 5, 9, 12]
    for view, shape, strides in (
        (whole[:3, :2], (3, 2), (32, 4)),
        (whole[::2, 1:4], (3, 3), (64, 4)),
        (whole[:3, ::2], (3, 4), (32, 8)),
        (whole.T[:3], (3, 6), (4, 32)),
    ):
        offset = 4 if view.base is not None and view[0, 0] == 1 else 0
        table = backend.view(buffer, shape, np.int32, strides, offset)
        rows = gathered(backend, cache, table, ints(backend, cu))
        slots = slow_slots(view.tolist(), cu, None, 8, 4, 12)
        assert rows == [[slot // 4, slot % 4] if slot >= 0 else [0, 0] for slot in slots]


def test_lengths_and_starts_with_strides(backend):
    cache = numbered_cache(backend)
    wide = np.array([0, 99, 2, 99, 3, 99], np.int64)
    buffer = backend.buffer(wide.view(np.uint8))
    cu = backend.view(buffer, (3,), np.int64, (16,))
    starts = backend.view(buffer, (2,), np.int64, (-16,), 32)  # [3, 2]
    rows = gathered(backend, cache, ints(backend, [[1], [2]]), cu, seq_starts=starts)
    assert rows == [[1, 3], [0, 0], [2, 2]]


@given(data=st.data())
def test_any_table_lengths_and_starts(backend, data):
    draw = data.draw
    num_blocks, block_size = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    requests, columns = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    index = st.sampled_from([np.int32, np.int64])
    block = st.integers(-2, num_blocks + 1)
    table = [[draw(block) for _ in range(columns)] for _ in range(requests)]
    cu = sorted(draw(st.lists(st.integers(0, 12), min_size=requests + 1, max_size=requests + 1)))
    starts = [draw(st.integers(-3, 20)) for _ in range(requests)]
    tokens = draw(st.integers(0, 14))
    values = np.arange(num_blocks * block_size * 3, dtype=np.float32) + 1
    values = values.reshape(num_blocks, block_size, 3)
    out = backend.array(np.full((tokens, 3), -5, np.float32))
    gather_cache(
        backend.array(values),
        backend.array(np.array(table, draw(index)).reshape(requests, columns)),
        ints(backend, cu, draw(index)),
        seq_starts=ints(backend, starts, draw(index)),
        out=out,
    )
    slots = slow_slots(table, cu, starts, num_blocks, block_size, tokens)
    expected = [
        [-5.0] * 3 if slot is None else [0.0] * 3 if slot < 0 else values.reshape(-1, 3)[slot]
        for slot in slots
    ]
    assert np.array_equal(backend.to_numpy(out), np.array(expected).reshape(tokens, 3))


def test_an_offset_beyond_two_gigabytes(backend):
    """Row 3 728 271 of a 576-byte fp8 cache begins at byte 2 147 484 096; zero pages are lazy."""
    cache = np.zeros((233017, 16, 576), np.uint8)
    cache[233016, 15] = 0x38
    cache[0, 0] = 0x40
    table = ints(backend, [[0, 233016]], np.int32)
    out = backend.array(np.zeros((2, 576), np.float32))
    cu, starts = ints(backend, [0, 1, 2]), ints(backend, [0, 31])
    table = backend.array(np.concatenate([backend.to_numpy(table)] * 2))
    gather_cache(backend.array(cache), table, cu, "fp8", 1.0, seq_starts=starts, out=out)
    assert backend.to_numpy(out)[:, [0, 575]].tolist() == [[2.0, 2.0], [1.0, 1.0]]


# --- which value ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("out_dtype", OUT_DTYPES)
def test_every_format_in_every_output_dtype(backend, rng, fmt, out_dtype):
    cache, pool = random_cache(backend, rng, fmt)
    table = rng.integers(-1, 6, (3, 4)).astype(np.int32)
    cu, starts = [0, 9, 9, 20], [3, 0, 1]
    scale = 0.37 if fmt in SCALED_FORMATS else None
    got = gather_cache(
        cache.array,
        backend.array(table),
        ints(backend, cu, np.int32),
        fmt,
        scale,
        seq_starts=ints(backend, starts, np.int32),
        out_dtype=out_dtype,
        num_tokens=22,
    )
    slots = slow_slots(table.tolist(), cu, starts, 5, 4, 22)
    assert slots[20:] == [None, None]
    wanted = np.array([-1 if slot is None else slot for slot in slots])
    assert (wanted >= 0).sum() > 5
    expected = oracle.read(pool, cache.geometry, wanted, 576, fmt, scale, out_dtype)
    assert_values_equal(backend.to_numpy(got), expected)
    helpers.assert_bytes_equal(cache.bytes(), pool, cache.geometry)


@pytest.mark.parametrize("fmt", ["bfloat16", "float16"])
def test_bits_are_kept_in_the_dtype_of_the_cache(backend, rng, fmt):
    cache, pool = random_cache(backend, rng, fmt)
    got = gather_cache(cache.array, ints(backend, [[4]]), ints(backend, [0, 4]), fmt, out_dtype=fmt)
    for row in range(4):
        start = cache.geometry.row_at(16 + row)
        bits = np.ascontiguousarray(backend.to_numpy(got)[row]).view(np.uint8)
        assert np.array_equal(bits, pool[start : start + 1152])


@pytest.mark.parametrize("fmt", ["bfloat16", "fp8_e4m3"])
@pytest.mark.parametrize(("rank", "rope"), [(256, 64), (512, 0), (7, 3), (2600, 0)])
def test_rows_of_other_widths(backend, rng, fmt, rank, rope):
    cache, pool = random_cache(backend, rng, fmt, rank=rank, rope=rope)
    scale = 0.5 if fmt in SCALED_FORMATS else None
    got = gather_cache(cache.array, ints(backend, [[2, 1]]), ints(backend, [0, 8]), fmt, scale)
    slots = np.array([8, 9, 10, 11, 4, 5, 6, 7])
    expected = oracle.read(pool, cache.geometry, slots, rank + rope, fmt, scale, "bfloat16")
    assert_values_equal(backend.to_numpy(got), expected)


def test_a_code_is_multiplied_by_the_float32_scale_and_rounded_once(backend):
    cache = np.zeros((1, 1, 2), np.uint8)
    cache[0, 0] = [0x7E, 0x0A]
    args = backend.array(cache), ints(backend, [[0]]), ints(backend, [0, 1]), "fp8"
    row = backend.to_numpy(gather_cache(*args, 0.37))[0]
    assert row.astype(np.float64).tolist() == [166.0, 0.007232666015625]


def test_a_stored_scale_is_no_power_of_two_and_taken_as_it_is(backend):
    row = np.zeros((1, 1, 656), np.uint8)
    row[0, 0, :512] = 0x7E
    row[0, 0, 512:528] = np.frombuffer(bytes.fromhex("0000403F" * 4), np.uint8)  # 0.75
    got = gather_cache(
        backend.array(row), ints(backend, [[0]]), ints(backend, [0, 1]), "fp8_ds_mla"
    )
    assert set(backend.to_numpy(got)[0, :512].astype(float)) == {336.0}


def test_a_layout_is_taken_in_place_of_a_name(backend, rng):
    layout = get_layout("fp8_e5m2", kv_lora_rank=10, rope_dim=2)
    cache = rng.integers(0, 0x7C, (2, 4, 12)).astype(np.uint8)
    got = gather_cache(backend.array(cache), ints(backend, [[1]]), ints(backend, [0, 1]), layout, 1)
    expected = oracle.decode_row(cache[1, 0].tobytes(), "fp8_e5m2", 1.0, "bfloat16")
    assert_values_equal(backend.to_numpy(got)[0], expected)


def test_a_cache_with_an_axis_for_one_head(backend, rng):
    cache = rng.standard_normal((3, 4, 1, 6)).astype(np.float32)
    got = gathered(backend, backend.array(cache), ints(backend, [[2]]), ints(backend, [0, 3]))
    assert got == cache[2, :3, 0].tolist()


# --- out ------------------------------------------------------------------------------------------


def padded_out(backend, tokens, width, dtype, gap):
    """An output array with `gap` bytes after each row in a pool of sentinels."""
    stride = width * dtype.itemsize + gap
    buffer = backend.buffer(np.full(64 + tokens * stride + 64, 0xA5, np.uint8))
    return backend.view(buffer, (tokens, width), dtype, (stride, dtype.itemsize), 64), buffer


@pytest.mark.parametrize("out_dtype", OUT_DTYPES)
def test_out_is_written_where_it_is_owned_and_nowhere_else(backend, rng, out_dtype):
    dtype = oracle.DTYPES[out_dtype]
    cache, pool = random_cache(backend, rng, "fp8_ds_mla")
    out, buffer = padded_out(backend, 8, 576, dtype, 12)
    got = gather_cache(
        cache.array,
        ints(backend, [[1], [-1]]),
        ints(backend, [1, 3, 5]),
        "fp8_ds_mla",
        out=out,
        out_dtype="float32",
    )
    assert got is out
    stride = 576 * dtype.itemsize + 12
    expected = np.full(backend.to_numpy(buffer).size, 0xA5, np.uint8)
    rows = oracle.read(
        pool, cache.geometry, np.array([4, 5, -1, -1]), 576, "fp8_ds_mla", None, out_dtype
    )
    for token, row in enumerate(rows, 1):
        start = 64 + token * stride
        expected[start : start + 576 * dtype.itemsize] = row.view(np.uint8)
    actual = backend.to_numpy(buffer).copy()
    values = np.ndarray((8, 576), dtype, actual, 64, (stride, dtype.itemsize))
    assert_values_equal(values[1:5].copy(), rows)
    values[1:5] = rows  # NaN may differ by its bits
    assert np.array_equal(actual, expected)


def test_num_tokens_bounds_what_is_written_in_a_larger_out(backend):
    out = backend.array(np.full((6, 2), 7, np.float32))
    args = numbered_cache(backend), ints(backend, [[3, 3]]), ints(backend, [0, 5])
    assert gather_cache(*args, out=out, num_tokens=3) is out
    assert backend.to_numpy(out).tolist() == [[3, 0], [3, 1], [3, 2], [7, 7], [7, 7], [7, 7]]


def test_num_tokens_below_and_above_the_lengths(backend):
    args = numbered_cache(backend), ints(backend, [[3, 3]]), ints(backend, [0, 3])
    assert gathered(backend, *args, num_tokens=2) == [[3, 0], [3, 1]]
    assert gathered(backend, *args, num_tokens=5) == [[3, 0], [3, 1], [3, 2], [0, 0], [0, 0]]
    assert gathered(backend, *args) == [[3, 0], [3, 1], [3, 2]]


def test_rows_that_nobody_owns_are_zero_in_new_arrays_of_any_size(backend):
    """More rows than are worked on at a time, and memory that held something else before."""
    cache = numbered_cache(backend)
    args = cache, ints(backend, [[1]]), ints(backend, [0, 1])
    for _ in range(3):
        garbage = [backend.array(np.full((5000, 2), np.nan, np.float32)) for _ in range(2)]
        rows = np.array(gathered(backend, *args, num_tokens=5000))
        assert rows[0].tolist() == [1, 0]
        assert not rows[1:].any()
        del garbage


def test_the_default_output_is_bfloat16(backend):
    rows = gather_cache(numbered_cache(backend), ints(backend, [[1]]), ints(backend, [0, 1]))
    assert backend.to_numpy(rows).dtype == oracle.BFLOAT16


def test_a_read_only_cache_is_read(backend):
    cache = np.ones((1, 2, 4), np.float32)
    cache.flags.writeable = False
    assert gathered(backend, cache, ints(backend, [[0]]), ints(backend, [0, 1])) == [[1] * 4]


def test_torch_arrays_are_written_in_place():
    torch = pytest.importorskip("torch")
    cache = torch.arange(24, dtype=torch.float32).reshape(3, 4, 2).to(torch.bfloat16)
    table, cu = torch.tensor([[2, 1]], dtype=torch.int32), torch.tensor([0, 5])
    rows = gather_cache(cache, table, cu)
    assert rows.dtype == torch.bfloat16
    assert rows[:, 0].tolist() == [16, 18, 20, 22, 8]
    out = torch.full((6, 2), -1.0)
    assert gather_cache(cache, table, cu, out=out) is out
    assert out[:, 0].tolist() == [16, 18, 20, 22, 8, -1]


def test_jax_arrays_are_read_and_never_written():
    jax = pytest.importorskip("jax")
    cache = jax.numpy.arange(24, dtype="float32").reshape(3, 4, 2)
    table, cu = jax.numpy.array([[2, 1]]), jax.numpy.array([0, 5])
    rows = gather_cache(cache, table, cu, out_dtype="float32")
    assert isinstance(rows, jax.Array)
    assert rows[:, 0].tolist() == [16, 18, 20, 22, 8]
    with rejected(ValueError, "gather_cache", "out", "read-only"):
        gather_cache(cache, table, cu, out=jax.numpy.zeros((5, 2)))


# --- what is refused ------------------------------------------------------------------------------


@pytest.fixture
def call(backend):
    """Call gather_cache on good arguments, some of them replaced."""
    good = {
        "kv_cache": numbered_cache(backend),
        "block_table": ints(backend, [[1, 2], [3, 0]], np.int32),
        "cu_seq_lens": ints(backend, [0, 2, 4], np.int32),
    }

    def run(**changes):
        return gather_cache(**(good | changes))

    run()
    return run


@pytest.mark.parametrize(
    ("argument", "values", "exception", "fragments"),
    [
        ("block_table", np.zeros(4, np.int32), ValueError, ["[n_seq, max_blocks]", "[4]"]),
        ("block_table", np.zeros((2, 2), np.float32), TypeError, ["int32 or int64", "float32"]),
        ("block_table", np.zeros((2, 2), np.uint32), TypeError, ["int32 or int64", "uint32"]),
        ("cu_seq_lens", np.zeros(4, np.int32), ValueError, ["[3]", "[4]"]),
        ("cu_seq_lens", np.zeros((3, 1), np.int32), ValueError, ["[3]", "[3, 1]"]),
        ("cu_seq_lens", np.zeros(3, np.float32), TypeError, ["int32 or int64", "float32"]),
        ("seq_starts", np.zeros(3, np.int32), ValueError, ["[2]", "[3]"]),
        ("seq_starts", np.zeros(2, np.uint8), TypeError, ["int32 or int64", "uint8"]),
        ("out", np.zeros((4, 3), np.float32), ValueError, ["[tokens, 2]", "[4, 3]"]),
        ("out", np.zeros((2, 4, 2), np.float32), ValueError, ["[tokens, 2]", "[2, 4, 2]"]),
        ("out", np.zeros((4, 2), np.float64), TypeError, ["bfloat16", "float64"]),
        ("out", np.zeros((4, 4), np.float32)[:, ::2], ValueError, ["stride 1", "2"]),
        ("kv_cache", np.zeros((4, 8), np.float32), ValueError, ["[num_blocks", "[4, 8]"]),
        ("kv_cache", np.zeros((4, 4, 4), np.float32)[..., ::2], ValueError, ["stride 1"]),
        ("kv_cache", np.zeros((4, 4, 2), np.uint8), TypeError, ["auto", "uint8"]),
    ],
)
def test_arrays_that_do_not_fit(backend, call, argument, values, exception, fragments):
    if values.strides != np.zeros(values.shape, values.dtype).strides:
        buffer = backend.buffer(np.zeros(values.base.nbytes, np.uint8))
        array = backend.view(buffer, values.shape, values.dtype, values.strides)
    else:
        array = backend.array(values)
    with rejected(exception, "gather_cache", argument, *fragments):
        call(**{argument: array})


@pytest.mark.parametrize(
    ("changes", "exception", "argument", "fragments"),
    [
        ({"num_tokens": -1}, ValueError, "num_tokens", ["at least 0", "-1"]),
        ({"num_tokens": 2.0}, TypeError, "num_tokens", ["integer", "float"]),
        ({"num_tokens": True}, TypeError, "num_tokens", ["integer", "bool"]),
        ({"out_dtype": "fp8"}, TypeError, "out_dtype", ["bfloat16", "fp8"]),
        ({"out_dtype": np.float64}, TypeError, "out_dtype", ["bfloat16", "float64"]),
        ({"kv_cache_dtype": "int4"}, ValueError, "kv_cache_dtype", ["fp8_ds_mla", "int4"]),
        ({"block_table": None}, TypeError, "block_table", ["array", "NoneType"]),
        ({"cu_seq_lens": [0, 2, 4]}, TypeError, "cu_seq_lens", ["array", "list"]),
    ],
)
def test_values_that_do_not_fit(call, changes, exception, argument, fragments):
    with rejected(exception, "gather_cache", argument, *fragments):
        call(**changes)


def test_an_output_with_too_few_rows(backend, call):
    out = backend.array(np.zeros((3, 2), np.float32))
    with rejected(ValueError, "gather_cache", "out", "[at least 4, 2]", "[3, 2]"):
        call(out=out, num_tokens=4)


def test_an_output_whose_rows_overlap(backend, call):
    buffer = backend.buffer(np.zeros(64, np.uint8))
    out = backend.view(buffer, (4, 2), np.float32, (4, 4))
    with rejected(ValueError, "gather_cache", "out", "overlap", "4 bytes"):
        call(out=out)


def test_an_output_inside_the_cache(backend):
    buffer = backend.buffer(np.zeros(4096, np.uint8))
    cache = backend.view(buffer, (4, 4, 2), np.float32, (64, 16, 4))
    table, cu = ints(backend, [[1]]), ints(backend, [0, 2])
    with rejected(ValueError, "gather_cache", "out", "kv_cache"):
        gather_cache(cache, table, cu, out=backend.view(buffer, (2, 2), np.float32, (8, 4), 60))
    # Between the rows, and behind the cache, it shares no byte with them.
    gather_cache(cache, table, cu, out=backend.view(buffer, (2, 2), np.float32, (16, 4), 8))
    gather_cache(cache, table, cu, out=backend.view(buffer, (2, 2), np.float32, (8, 4), 248))


def test_flat_fp8_needs_its_scale(backend):
    cache = backend.array(np.zeros((1, 1, 4), np.uint8))
    args = cache, ints(backend, [[0]]), ints(backend, [0, 1]), "fp8"
    with rejected(ValueError, "gather_cache", "scale", "fp8_e4m3"):
        gather_cache(*args)
    for bad in (0.0, -1.0, np.nan, np.inf):
        with rejected(ValueError, "gather_cache", "scale", "> 0"):
            gather_cache(*args, bad)


def test_lengths_that_end_below_zero():
    with rejected(ValueError, "gather_cache", "cu_seq_lens", "-3"):
        gather_cache(np.zeros((1, 1, 4), np.float32), np.array([[0]]), np.array([0, -3]))


def test_a_stream_for_host_arrays():
    args = np.zeros((1, 1, 4), np.float32), np.array([[0]]), np.array([0, 1])
    with rejected(ValueError, "gather_cache", "stream", "host memory"):
        gather_cache(*args, stream=object())


def test_arrays_on_a_device_beside_a_host_cache():
    cache, cu = np.zeros((1, 1, 4), np.float32), np.array([0, 1])
    table = helpers.FakeDevice((1, 1), "<i4")
    with rejected(ValueError, "gather_cache", "block_table", "same CUDA device", "cuda:0"):
        gather_cache(cache, table, cu)
    with rejected(ValueError, "gather_cache", "out", "same CUDA device"):
        gather_cache(cache, np.array([[0]]), cu, out=helpers.FakeDevice((1, 4), "<f4"))


# --- vLLM's names ---------------------------------------------------------------------------------


def test_the_owner_of_each_row_is_given(backend):
    dst = backend.array(np.full((7, 2), -1, np.float32))
    result = gather_and_maybe_dequant_cache(
        numbered_cache(backend),
        dst,
        ints(backend, [[2, 0, 3], [1, 1, 1]], np.int32),
        ints(backend, [0, 4, 5], np.int32),
        ints(backend, [0, 0, 0, 0, 1, 1, 9], np.int32),
        6,
        "auto",
        None,
        ints(backend, [5, 2], np.int32),
    )
    assert result is None
    rows = backend.to_numpy(dst).tolist()
    # Row 5 lies behind its request, row 6 behind num_tokens: both stay.
    assert rows == [[0, 1], [0, 2], [0, 3], [3, 0], [1, 2], [-1, -1], [-1, -1]]


def test_owners_that_are_no_requests_own_nothing(backend):
    dst = backend.array(np.full((4, 2), -1, np.float32))
    gather_and_maybe_dequant_cache(
        numbered_cache(backend),
        dst,
        ints(backend, [[3], [2]]),
        ints(backend, [1, 2, 4]),
        ints(backend, [-1, 2, 2**40, 1]),
        4,
        "auto",
        None,
    )
    assert backend.to_numpy(dst).tolist() == [[-1, -1], [-1, -1], [-1, -1], [2, 1]]
    dst = backend.array(np.full((1, 2), -1, np.float32))
    gather_and_maybe_dequant_cache(  # row 0 lies before request 0
        numbered_cache(backend),
        dst,
        ints(backend, [[3]]),
        ints(backend, [1, 2]),
        ints(backend, [0]),
        1,
        "auto",
        None,
    )
    assert backend.to_numpy(dst).tolist() == [[-1, -1]]


@pytest.mark.parametrize("fmt", FORMATS)
def test_dequantised_with_owners_is_the_same_as_without(backend, rng, fmt):
    cache, _ = random_cache(backend, rng, fmt)
    table = rng.integers(0, 5, (2, 2)).astype(np.int32)
    cu, owner = [0, 3, 8], [0, 0, 0, 1, 1, 1, 1, 1]
    scale = backend.array(np.array([0.37], np.float32))
    dst = backend.array(np.zeros((8, 576), oracle.BFLOAT16))
    gather_and_maybe_dequant_cache(
        cache.array,
        dst,
        backend.array(table),
        ints(backend, cu, np.int32),
        ints(backend, owner, np.int32),
        8,
        fmt,
        scale,
    )
    expected = gather_cache(cache.array, backend.array(table), ints(backend, cu), fmt, scale)
    assert_values_equal(backend.to_numpy(dst), backend.to_numpy(expected))


def test_with_owners_the_arrays_are_checked(backend):
    args = {
        "src_cache": numbered_cache(backend),
        "dst": backend.array(np.zeros((4, 2), np.float32)),
        "block_table": ints(backend, [[0]]),
        "cu_seq_lens": ints(backend, [0, 4]),
        "token_to_seq": ints(backend, [0] * 4),
        "num_tokens": 4,
        "kv_cache_dtype": "auto",
        "scale": None,
    }
    name = "gather_and_maybe_dequant_cache"
    for argument, value, exception, fragments in (
        ("num_tokens", 5, ValueError, ["[at least 5, 2]"]),
        ("num_tokens", None, TypeError, ["integer"]),
        ("dst", None, TypeError, ["array"]),
        ("token_to_seq", ints(backend, [0] * 3), ValueError, ["[at least 4]", "[3]"]),
        ("token_to_seq", ints(backend, [0] * 4, np.int8), TypeError, ["int32 or int64"]),
        ("src_cache", backend.array(np.zeros((1, 4, 3), np.float32)), ValueError, ["3"]),
    ):
        with pytest.raises(exception) as caught:
            gather_and_maybe_dequant_cache(**(args | {argument: value}))
        blamed = [argument, "dst"]
        helpers.assert_message(str(caught.value), name, blamed, *fragments)


def test_upconverting_goes_on_to_the_next_start_and_to_the_end(backend, rng):
    cache, pool = random_cache(backend, rng, "fp8_ds_mla")
    table = np.array([[1, 2], [4, 0], [3, 3]], np.int32)
    first, starts = [2, 5, 9], [3, 0, 2]
    dst = backend.array(np.full((20, 576), 7, oracle.BFLOAT16))
    result = cp_gather_and_upconvert_fp8_kv_cache(
        cache.array,
        dst,
        backend.array(table),
        ints(backend, [*first, 0], np.int32),
        3,
        ints(backend, [*starts, 0], np.int32),
    )
    assert result is None
    slots = slow_slots(table.tolist(), first, starts, 5, 4, 20, open_ended=True)
    assert slots[:2] == [None, None]
    assert slots[14:16] == [15, -1]  # the last request has two blocks, and goes on with zeros
    rows = backend.to_numpy(dst)
    assert (rows[:2].astype(np.float32) == 7).all()
    expected = oracle.read(
        pool, cache.geometry, np.array(slots[2:]), 576, "fp8_ds_mla", None, "bfloat16"
    )
    assert_values_equal(rows[2:], expected)
    assert not rows[15:].astype(np.float32).any()


def test_upconverting_uses_the_first_requests_of_longer_arrays(backend, rng):
    cache, pool = random_cache(backend, rng, "fp8_ds_mla")
    dst = backend.array(np.zeros((4, 576), oracle.BFLOAT16))
    cp_gather_and_upconvert_fp8_kv_cache(
        cache.array, dst, ints(backend, [[2], [-9]]), ints(backend, [0, 2, 4]), 1
    )
    slots = np.arange(8, 12)
    expected = oracle.read(pool, cache.geometry, slots, 576, "fp8_ds_mla", None, "bfloat16")
    assert_values_equal(backend.to_numpy(dst), expected)


def test_upconverting_no_requests_writes_nothing(backend):
    cache = backend.array(np.zeros((1, 4, 656), np.uint8))
    dst = backend.array(np.full((2, 576), 7, oracle.BFLOAT16))
    cp_gather_and_upconvert_fp8_kv_cache(
        cache, dst, backend.array(np.zeros((0, 3), np.int32)), ints(backend, []), 0
    )
    assert (backend.to_numpy(dst).astype(np.float32) == 7).all()


def test_upconverting_checks_its_arrays(backend):
    args = {
        "src_cache": backend.array(np.zeros((1, 4, 656), np.uint8)),
        "dst": backend.array(np.zeros((2, 576), oracle.BFLOAT16)),
        "block_table": ints(backend, [[0], [0]]),
        "workspace_starts": ints(backend, [0, 1]),
        "batch_size": 2,
    }
    cp_gather_and_upconvert_fp8_kv_cache(**args)
    for argument, value, exception, fragments in (
        ("src_cache", backend.array(np.zeros((1, 4, 584), np.uint8)), ValueError, ["656", "584"]),
        ("dst", backend.array(np.zeros((2, 576), np.float16)), TypeError, ["bfloat16"]),
        ("dst", backend.array(np.zeros((2, 512), oracle.BFLOAT16)), ValueError, ["576", "512"]),
        ("block_table", ints(backend, [[0]]), ValueError, ["at least 2", "[1, 1]"]),
        ("workspace_starts", ints(backend, [0]), ValueError, ["at least 2", "[1]"]),
        ("seq_starts", ints(backend, [0]), ValueError, ["at least 2", "[1]"]),
        ("batch_size", -1, ValueError, ["at least 0"]),
    ):
        with rejected(exception, "cp_gather_and_upconvert_fp8_kv_cache", argument, *fragments):
            cp_gather_and_upconvert_fp8_kv_cache(**(args | {argument: value}))


# --- indexer keys ---------------------------------------------------------------------------------


def indexer_pool(rng, num_blocks, block_size, block_stride):
    """Blocks of B x 128 codes, then B x 4 bytes of scales, `block_stride` bytes apart."""
    pool = np.full(64 + num_blocks * block_stride + 64, 0xA5, np.uint8)
    codes = rng.integers(0, 256, (num_blocks, block_size, 128), np.uint8)
    scales = rng.standard_normal((num_blocks, block_size)).astype("<f4")
    for block in range(num_blocks):
        start = 64 + block * block_stride
        pool[start : start + 128 * block_size] = codes[block].reshape(-1)
        plane = start + 128 * block_size
        pool[plane : plane + 4 * block_size] = scales[block].view(np.uint8)
    return pool, codes, scales


@pytest.mark.parametrize("block_size", [1, 3, 64])
@pytest.mark.parametrize("scale_dtype", [np.uint8, np.float32])
def test_indexer_keys_and_scales_are_copied_from_their_planes(
    backend, rng, block_size, scale_dtype
):
    stride = 132 * block_size + 96
    pool, codes, scales = indexer_pool(rng, 4, block_size, stride)
    cache = backend.view(backend.buffer(pool), (4, block_size, 132), np.uint8, (stride, 132, 1), 64)
    table, cu = [[2, 0, 7], [3, 1, 1]], [1, 2 * block_size + 2, 2 * block_size + 4]
    tokens = cu[-1] + 2
    keys = backend.array(np.full((tokens, 128), 0x55, np.uint8))
    filled = np.full((tokens, 4), 0x55, np.uint8).view(scale_dtype)
    factors = backend.array(filled)
    result = cp_gather_indexer_k_quant_cache(
        cache, keys, factors, ints(backend, table, np.int32), ints(backend, cu, np.int32)
    )
    assert result is None
    slots = slow_slots(table, cu, None, 4, block_size, tokens)
    assert None in slots
    assert -1 in slots
    got = np.ascontiguousarray(backend.to_numpy(factors)).view(np.uint8).reshape(tokens, 4)
    for token, slot in enumerate(slots):
        key, factor = backend.to_numpy(keys)[token], got[token].tobytes()
        if slot is None:
            assert set(key) == {0x55}
            assert factor == b"\x55" * 4
        elif slot < 0:
            assert not key.any()
            assert factor == bytes(4)
        else:
            assert np.array_equal(key, codes.reshape(-1, 128)[slot])
            assert factor == scales.reshape(-1)[slot].tobytes()


def test_indexer_keys_into_strided_float8_arrays(backend, rng):
    pool, codes, scales = indexer_pool(rng, 2, 4, 528)
    cache = backend.view(backend.buffer(pool), (2, 4, 132), oracle.E4M3, (528, 132, 1), 64)
    key_buffer = backend.buffer(np.zeros(1000, np.uint8))
    factor_buffer = backend.buffer(np.zeros(100, np.uint8))
    keys = backend.view(key_buffer, (4, 128), oracle.E4M3, (160, 1), 8)
    factors = backend.view(factor_buffer, (4, 4), oracle.E4M3, (12, 1), 3)
    cp_gather_indexer_k_quant_cache(
        cache, keys, factors, ints(backend, [[1]]), ints(backend, [0, 4])
    )
    expected = np.zeros(1000, np.uint8)
    for row in range(4):
        expected[8 + 160 * row : 136 + 160 * row] = codes[1, row]
    assert np.array_equal(backend.to_numpy(key_buffer), expected)
    expected = np.zeros(100, np.uint8)
    for row in range(4):
        start = 3 + 12 * row
        expected[start : start + 4] = np.frombuffer(scales[1, row].tobytes(), np.uint8)
    assert np.array_equal(backend.to_numpy(factor_buffer), expected)


def test_gathering_indexer_rows_multiplies_them_by_their_scales(backend, rng):
    pool, codes, scales = indexer_pool(rng, 3, 4, 528)
    cache = backend.view(backend.buffer(pool), (3, 4, 132), np.uint8, (528, 132, 1), 64)
    got = gather_cache(
        cache, ints(backend, [[2]]), ints(backend, [0, 4]), "indexer_fp8", out_dtype="float32"
    )
    expected = codes[2].view(oracle.E4M3).astype(np.float32) * scales[2][:, None]
    assert_values_equal(backend.to_numpy(got), expected)


def test_indexer_arrays_are_checked(backend):
    args = {
        "kv_cache": backend.array(np.zeros((1, 4, 132), np.uint8)),
        "dst_k": backend.array(np.zeros((2, 128), np.uint8)),
        "dst_scale": backend.array(np.zeros((2, 4), np.uint8)),
        "block_table": ints(backend, [[0]]),
        "cu_seq_lens": ints(backend, [0, 2]),
    }
    cp_gather_indexer_k_quant_cache(**args)
    buffer = backend.buffer(np.zeros(4096, np.uint8))
    gaps = backend.view(buffer, (1, 4, 132), np.uint8, (1024, 256, 1))
    shared = backend.view(buffer, (2, 128), np.uint8, (128, 1))
    bytes_ = np.uint8
    for argument, value, exception, fragments in (
        ("kv_cache", backend.array(np.zeros((1, 4, 136), bytes_)), ValueError, ["132", "136"]),
        ("kv_cache", backend.array(np.zeros((1, 4, 132), np.int8)), TypeError, ["uint8", "int8"]),
        ("kv_cache", gaps, ValueError, ["132 bytes", "256 bytes"]),
        ("dst_k", backend.array(np.zeros((2, 64), bytes_)), ValueError, ["[tokens, 128]"]),
        ("dst_k", backend.array(np.zeros((2, 128), oracle.BFLOAT16)), TypeError, ["uint8"]),
        ("dst_scale", backend.array(np.zeros((2, 1), bytes_)), ValueError, ["[at least 2, 4]"]),
        ("dst_scale", backend.array(np.zeros((1, 4), bytes_)), ValueError, ["[at least 2, 4]"]),
        ("dst_scale", backend.array(np.zeros((2, 4), np.float32)), ValueError, ["2, 1]"]),
        ("dst_scale", backend.array(np.zeros((2, 4), np.float16)), TypeError, ["float32"]),
        ("block_table", ints(backend, [0]), ValueError, ["[n_seq, max_blocks]"]),
        ("cu_seq_lens", ints(backend, [0]), ValueError, ["[2]", "[1]"]),
    ):
        with rejected(exception, "cp_gather_indexer_k_quant_cache", argument, *fragments):
            cp_gather_indexer_k_quant_cache(**(args | {argument: value}))
    overlapping = backend.view(buffer, (2, 4), np.uint8, (4, 1), 130)
    with rejected(ValueError, "cp_gather_indexer_k_quant_cache", "dst_scale", "dst_k"):
        cp_gather_indexer_k_quant_cache(**(args | {"dst_k": shared, "dst_scale": overlapping}))
