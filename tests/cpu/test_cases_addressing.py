"""Where rows are read and written: strides, pages, packed pools, block sizes, widths."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_mla import GroupedCacheWriter, concat_and_cache_mla, read_slots
from tests import helpers, oracle
from tests.helpers import (
    FORMATS,
    INPUT_DTYPES,
    check_insert,
    constant_rows,
    make_cache,
    make_layered_pool,
    make_projection,
    random_rows,
    surrounded,
)

SLOTS = np.array([5, 0, -1, 14], np.int64)
any_format = pytest.mark.parametrize("fmt", FORMATS)
one_of_each_kind = pytest.mark.parametrize("fmt", ["bfloat16", "fp8_e4m3", "fp8_ds_mla"])


def make_rows(rng, fmt, layers, tokens, rank=512, rope=64):
    dtype = INPUT_DTYPES[fmt]
    return random_rows(rng, (layers, tokens, rank), dtype), random_rows(
        rng, (layers, tokens, rope), dtype
    )


# --- slots shared by all layers -------------------------------------------------------------------


def slots_as(backend, form):
    """The same slots for three layers: broadcast with stride 0, copied, or one row."""
    if form == "one row":
        return backend.array(SLOTS)
    if form == "copied":
        return backend.array(np.tile(SLOTS, (3, 1)))
    buffer = backend.buffer(SLOTS.view(np.uint8))
    return backend.view(buffer, (3, 4), np.int64, (0, 8))


@pytest.mark.parametrize("form", ["broadcast", "copied", "one row"])
def test_slots_broadcast_with_stride_zero_serve_every_layer(backend, insert_path, form):
    caches = [make_cache(backend) for _ in range(3)]
    numbers = [[10 * layer + token for token in range(4)] for layer in range(3)]
    check_insert(
        insert_path,
        caches,
        constant_rows(numbers, 512, oracle.BFLOAT16),
        constant_rows(numbers, 64, oracle.BFLOAT16),
        SLOTS,
        slots_array=slots_as(backend, form),
    )
    for layer, cache in enumerate(caches):
        for token, slot in [(0, 5), (1, 0), (3, 14)]:
            bits = np.array(10 * layer + token, np.float32).astype(oracle.BFLOAT16).view(np.uint16)
            assert np.all(cache.values(slot) == bits)


# --- strided inputs -------------------------------------------------------------------------------


@any_format
def test_inputs_that_are_views_of_one_projection_output(backend, insert_path, fmt):
    dtype = INPUT_DTYPES[fmt]
    kv_c_array, k_pe_array, kv_c, k_pe = make_projection(backend, 5, 2, 512, 64, dtype)
    check_insert(
        insert_path,
        [make_cache(backend, fmt) for _ in range(2)],
        kv_c,
        k_pe,
        np.array([[3, 1, 15, 0, 9], [2, -1, 7, 8, 4]]),
        kv_c_array=kv_c_array,
        k_pe_array=k_pe_array,
    )
    assert np.array_equal(backend.to_numpy(kv_c_array).view(np.uint8), kv_c.view(np.uint8))
    assert np.array_equal(backend.to_numpy(k_pe_array).view(np.uint8), k_pe.view(np.uint8))


@any_format
@pytest.mark.parametrize("lead", [0, 1, 2, 4, 7])
def test_rows_at_odd_addresses_amid_nan(backend, insert_path, rng, fmt, lead):
    kv_c, k_pe = make_rows(rng, fmt, 2, 6)
    check_insert(
        insert_path,
        [make_cache(backend, fmt) for _ in range(2)],
        kv_c,
        k_pe,
        np.array([0, 5, 3, 12, 1, 14]),
        kv_c_array=surrounded(backend, kv_c, lead=lead, pad=1),
        k_pe_array=surrounded(backend, k_pe, lead=lead + 1, pad=3),
        may_refuse="kv_c",
    )


@one_of_each_kind
def test_rows_in_reverse_token_order(backend, insert_path, rng, fmt):
    kv_c, k_pe = make_rows(rng, fmt, 1, 4)
    dtype = INPUT_DTYPES[fmt]
    buffer = backend.buffer(kv_c.reshape(-1).view(np.uint8))
    size = dtype.itemsize
    reverse = backend.view(
        buffer, kv_c.shape, dtype, (4 * 512 * size, -512 * size, size), 3 * 512 * size
    )
    check_insert(
        insert_path,
        [make_cache(backend, fmt)],
        kv_c[:, ::-1],
        k_pe,
        np.array([2, 0, 7, 5]),
        kv_c_array=reverse,
    )


@one_of_each_kind
def test_one_row_broadcast_to_all_tokens_and_layers(backend, insert_path, rng, fmt):
    kv_c, k_pe = make_rows(rng, fmt, 1, 1)
    dtype = INPUT_DTYPES[fmt]
    same = backend.view(
        backend.buffer(kv_c.reshape(-1).view(np.uint8)), (2, 3, 512), dtype, (0, 0, dtype.itemsize)
    )
    check_insert(
        insert_path,
        [make_cache(backend, fmt) for _ in range(2)],
        np.broadcast_to(kv_c, (2, 3, 512)).copy(),
        np.broadcast_to(k_pe, (2, 3, 64)).copy(),
        np.array([4, 1, 8]),
        kv_c_array=same,
    )


@pytest.mark.parametrize("fmt", ["bfloat16", "fp8_e4m3"])
def test_an_axis_of_one_element_may_have_any_stride(backend, insert_path, rng, fmt):
    dtype = INPUT_DTYPES[fmt]
    size = dtype.itemsize
    kv_c, k_pe = make_rows(rng, fmt, 1, 3, 1, 1)
    buffer = backend.buffer(np.concatenate([kv_c, k_pe], axis=2).reshape(-1).view(np.uint8))
    strides = (1000 * size, 2 * size, 5 * size)  # of layers and of elements: never used
    check_insert(
        insert_path,
        [make_cache(backend, fmt, rank=1, rope=1)],
        kv_c,
        k_pe,
        np.array([2, 0, 7]),
        kv_c_array=backend.view(buffer, (1, 3, 1), dtype, strides),
        k_pe_array=backend.view(buffer, (1, 3, 1), dtype, strides, size),
    )


# --- caches that are views ------------------------------------------------------------------------


@any_format
def test_cache_that_is_a_view_into_larger_pages(backend, insert_path, rng, fmt):
    row = oracle.row_bytes(fmt, 512, 64)
    kv_c, k_pe = make_rows(rng, fmt, 1, 4)
    cache = make_cache(backend, fmt, block_pad=2 * row)
    assert check_insert(insert_path, [cache], kv_c, k_pe, np.array([0, 3, 4, 15]))
    pool = cache.bytes()[256 : 256 + 4 * 6 * row].reshape(4, 6, row)
    assert np.all(pool[:, 4:6] == helpers.SENTINEL)
    for block, offset in [(0, 0), (0, 3), (1, 0), (3, 3)]:
        assert np.any(pool[block, offset] != helpers.SENTINEL)


@any_format
def test_cache_of_all_layers_in_one_buffer(backend, insert_path, rng, fmt):
    kv_c, k_pe = make_rows(rng, fmt, 2, 3)
    caches = make_layered_pool(backend, fmt, 2, 3, 4)
    slots = np.array([[0, 7, 11], [3, 4, -1]])
    assert check_insert(insert_path, caches, kv_c, k_pe, slots)


def test_row_of_a_layered_pool_lies_at_its_literal_place(backend, insert_path):
    caches = make_layered_pool(backend, "bfloat16", 2, 3, 4)
    kv_c = constant_rows([[1.0], [2.0]], 512, oracle.BFLOAT16)
    k_pe = constant_rows([[3.0], [4.0]], 64, oracle.BFLOAT16)
    check_insert(insert_path, caches, kv_c, k_pe, np.array([[9], [6]]))
    pool = caches[0].bytes()[256:-256].view(np.uint16).reshape(3, 2, 4, 576)
    assert np.all(pool[2, 0, 1, :512] == 0x3F80)
    assert np.all(pool[2, 0, 1, 512:] == 0x4040)
    assert np.all(pool[1, 1, 2, :512] == 0x4000)
    assert np.all(pool[1, 1, 2, 512:] == 0x4080)
    assert np.count_nonzero(pool != 0xA5A5) == 2 * 576


@one_of_each_kind
def test_layers_with_different_strides_and_block_sizes(backend, insert_path, rng, fmt):
    row = oracle.row_bytes(fmt, 512, 64)
    kv_c, k_pe = make_rows(rng, fmt, 4, 5)
    caches = [
        make_cache(backend, fmt),
        make_cache(backend, fmt, block_pad=2 * row),
        make_cache(backend, fmt, num_blocks=6, block_size=3, row_pad=32),
        make_cache(backend, fmt, num_blocks=1, block_size=17),
    ]
    slots = np.array([[15, 0, 4, 3, -1], [15, 0, 4, 3, 7], [17, 0, 4, 3, 2], [16, 0, 4, -5, 2]])
    assert check_insert(insert_path, caches, kv_c, k_pe, slots)


@any_format
def test_blocks_of_size_one_with_a_meaningless_stride(backend, insert_path, rng, fmt):
    size = helpers.STORAGE_DTYPES[fmt].itemsize
    row = oracle.row_bytes(fmt, 512, 64)
    kv_c, k_pe = make_rows(rng, fmt, 1, 3)
    cache = make_cache(backend, fmt, num_blocks=8, block_size=1)
    # DLPack exporters rewrite the stride of an axis of length 1 to one element.
    cache.array = backend.view(
        cache.buffer, (8, 1, row // size), helpers.STORAGE_DTYPES[fmt], (row, size, size), 256
    )
    assert check_insert(insert_path, [cache], kv_c, k_pe, np.array([7, 0, 3]))


@one_of_each_kind
def test_one_block_with_a_meaningless_block_stride(backend, insert_path, rng, fmt):
    size = helpers.STORAGE_DTYPES[fmt].itemsize
    row = oracle.row_bytes(fmt, 512, 64)
    kv_c, k_pe = make_rows(rng, fmt, 1, 3)
    cache = make_cache(backend, fmt, num_blocks=1, block_size=4)
    cache.array = backend.view(
        cache.buffer, (1, 4, row // size), helpers.STORAGE_DTYPES[fmt], (size, row, size), 256
    )
    assert check_insert(insert_path, [cache], kv_c, k_pe, np.array([3, 0, 2]))


@any_format
@pytest.mark.parametrize("block_size", [1, 3, 48, 3328])
def test_block_sizes_that_are_no_power_of_two(backend, insert_path, rng, fmt, block_size):
    kv_c, k_pe = make_rows(rng, fmt, 1, 4)
    cache = make_cache(backend, fmt, num_blocks=3, block_size=block_size, block_pad=16)
    slots = np.array([block_size - 1, block_size, 2 * block_size - 1, 2 * block_size])
    if block_size == 1:
        slots = np.array([2, 0, 1, -1])
    assert check_insert(insert_path, [cache], kv_c, k_pe, slots)


@any_format
def test_collapsed_cache_gets_the_same_bytes(backend, insert_path, rng, fmt):
    kv_c, k_pe = make_rows(rng, fmt, 1, 4)
    slots = np.array([31, 0, 5, 18])
    paged = make_cache(backend, fmt, num_blocks=8, block_size=4)
    collapsed = make_cache(backend, fmt, num_blocks=32, block_size=1)
    for cache in (paged, collapsed):
        assert check_insert(insert_path, [cache], kv_c, k_pe, slots)
    assert np.array_equal(paged.bytes(), collapsed.bytes())


@any_format
def test_cache_with_an_axis_for_one_head(backend, insert_path, rng, fmt):
    kv_c, k_pe = make_rows(rng, fmt, 2, 4)
    caches = [
        make_cache(backend, fmt, four_d=True, block_pad=64),
        make_cache(backend, fmt, four_d=True),
    ]
    assert check_insert(insert_path, caches, kv_c, k_pe, np.array([15, 0, 5, -1]))


@one_of_each_kind
def test_blocks_in_reverse_order(backend, insert_path, rng, fmt):
    dtype = helpers.STORAGE_DTYPES[fmt]
    row = oracle.row_bytes(fmt, 512, 64)
    kv_c, k_pe = make_rows(rng, fmt, 1, 3)
    cache = make_cache(backend, fmt)
    cache.geometry = oracle.Geometry(256 + 3 * 4 * row, 4, 4, -4 * row, row, row)
    shape = (4, 4, row // dtype.itemsize)
    strides = (-4 * row, row, dtype.itemsize)
    cache.array = backend.view(cache.buffer, shape, dtype, strides, 256 + 3 * 4 * row)
    assert check_insert(insert_path, [cache], kv_c, k_pe, np.array([0, 6, 15]))


@pytest.mark.parametrize("offset", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("fmt", ["fp8_e4m3", "fp8_e5m2", "fp8_ds_mla"])
def test_cache_at_any_byte_alignment(backend, insert_path, rng, fmt, offset):
    kv_c, k_pe = make_rows(rng, fmt, 1, 4)
    cache = make_cache(backend, fmt, offset=256 + offset)
    slots = np.array([0, 3, 4, 15])
    check_insert(insert_path, [cache], kv_c, k_pe, slots, may_refuse="kv_cache")


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "fp8_ds_mla"])
@pytest.mark.parametrize(("row_pad", "block_pad"), [(1, 0), (0, 4), (0, 1), (3, 7), (16, 48)])
def test_cache_with_any_padding(backend, insert_path, rng, fmt, row_pad, block_pad):
    kv_c, k_pe = make_rows(rng, fmt, 1, 4)
    cache = make_cache(backend, fmt, row_pad=row_pad, block_pad=block_pad)
    slots = np.array([0, 3, 4, 15])
    check_insert(insert_path, [cache], kv_c, k_pe, slots, may_refuse="kv_cache")


@pytest.mark.parametrize("offset", [2, 4, 8])
def test_cache_of_16_bit_elements_at_any_element_alignment(backend, insert_path, rng, offset):
    kv_c, k_pe = make_rows(rng, "bfloat16", 1, 4)
    cache = make_cache(backend, offset=256 + offset, row_pad=2)
    assert check_insert(insert_path, [cache], kv_c, k_pe, np.array([0, 3, 4, 15]))


# --- last axis ------------------------------------------------------------------------------------


def test_cache_whose_last_axis_is_strided_is_refused(backend):
    cache = make_cache(backend, rank=1024, rope=128)
    every_other = backend.view(cache.buffer, (4, 4, 576), oracle.BFLOAT16, (9216, 2304, 4), 256)
    kv_c = backend.array(np.ones((3, 512), oracle.BFLOAT16))
    k_pe = backend.array(np.ones((3, 64), oracle.BFLOAT16))
    slots = backend.array(np.array([0, 1, 2]))
    with helpers.rejected(ValueError, "concat_and_cache_mla", "kv_cache", "stride", caches=[cache]):
        concat_and_cache_mla(kv_c, k_pe, every_other, slots)
    with helpers.rejected(
        ValueError, "GroupedCacheWriter", ["kv_caches", "kv_cache"], "stride", caches=[cache]
    ):
        GroupedCacheWriter([every_other])


def test_rows_whose_last_axis_is_reversed_are_refused(backend):
    cache = make_cache(backend)
    rows = np.ones((3, 512), oracle.BFLOAT16)
    buffer = backend.buffer(rows.reshape(-1).view(np.uint8))
    reverse = backend.view(buffer, (3, 512), oracle.BFLOAT16, (1024, -2), 1022)
    k_pe = backend.array(np.ones((3, 64), oracle.BFLOAT16))
    slots = backend.array(np.array([0, 1, 2]))
    with helpers.rejected(ValueError, "concat_and_cache_mla", "kv_c", "stride", caches=[cache]):
        concat_and_cache_mla(reverse, k_pe, cache.array, slots)


# --- other widths ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", helpers.FLAT_FORMATS)
@pytest.mark.parametrize(("rank", "rope"), [(256, 64), (512, 32), (7, 3), (1, 1), (5, 0), (33, 96)])
def test_other_widths_are_exact_and_read_back(backend, insert_path, rng, fmt, rank, rope):
    kv_c, k_pe = make_rows(rng, fmt, 2, 4, rank, rope)
    caches = [make_cache(backend, fmt, rank=rank, rope=rope, block_pad=8) for _ in range(2)]
    slots = np.array([[5, 0, -1, 14], [1, 2, 3, 15]])
    assert check_insert(insert_path, caches, kv_c, k_pe, slots)
    scales = helpers.default_scales([cache.fmt for cache in caches], 2)
    for layer, cache in enumerate(caches):
        scale = None if scales is None else scales[layer]
        rows = read_slots(cache.array, backend.array(slots[layer]), fmt, scale)
        expected = oracle.read(cache.bytes(), cache.geometry, slots[layer], rank + rope, fmt, scale)
        helpers.assert_values_equal(backend.to_numpy(rows), expected)


@pytest.mark.parametrize("fmt", helpers.FLAT_FORMATS)
@pytest.mark.parametrize("absent", [False, True])
def test_rows_without_a_rotary_part(backend, insert_path, rng, fmt, absent):
    kv_c, k_pe = make_rows(rng, fmt, 2, 3, 512, 0)
    caches = [make_cache(backend, fmt, rope=0) for _ in range(2)]
    slots = np.array([3, -1, 12])
    assert check_insert(insert_path, caches, kv_c, None if absent else k_pe, slots)
    scales = helpers.default_scales([fmt] * 2, 2)
    rows = read_slots(caches[0].array, backend.array(slots), fmt, scales and scales[0])
    expected = oracle.read(
        caches[0].bytes(), caches[0].geometry, slots, 512, fmt, scales and scales[0]
    )
    helpers.assert_values_equal(backend.to_numpy(rows), expected)


# --- arrays that change between calls -------------------------------------------------------------


@one_of_each_kind
def test_each_call_writes_to_the_caches_it_was_given(backend, insert_path, rng, fmt):
    first, second = make_cache(backend, fmt), make_cache(backend, fmt)
    kv_c, k_pe = make_rows(rng, fmt, 2, 3)
    slots = np.array([1, 6, 11])
    assert check_insert(insert_path, [first, second], kv_c, k_pe, slots)
    assert check_insert(insert_path, [second, first], kv_c, k_pe, slots + 1)
    del first
    for _ in range(4):  # some of them get the memory and the id of the one that is gone
        third = make_cache(backend, fmt)
        kv_c, k_pe = make_rows(rng, fmt, 2, 3)
        assert check_insert(insert_path, [third, second], kv_c, k_pe, slots + 3)
        del third


@one_of_each_kind
def test_each_call_reads_the_rows_it_was_given(backend, insert_path, rng, fmt):
    cache = make_cache(backend, fmt)
    for step in range(4):
        kv_c, k_pe = make_rows(rng, fmt, 1, 3)
        slots = np.array([1, 6, 11]) + step
        assert check_insert(insert_path, [cache], kv_c, k_pe, slots)
