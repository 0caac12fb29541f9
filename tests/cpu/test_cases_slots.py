"""Which rows are written: padding, slots beyond the cache, widths of slots, duplicates."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_mla import GroupedCacheWriter, concat_and_cache_mla
from tests import helpers, oracle
from tests.helpers import (
    FORMATS,
    INPUT_DTYPES,
    assert_bytes_equal,
    check_insert,
    constant_rows,
    make_cache,
    random_rows,
)

any_format = pytest.mark.parametrize("fmt", FORMATS)


def make_rows(rng, fmt, layers, tokens):
    dtype = INPUT_DTYPES[fmt]
    return random_rows(rng, (layers, tokens, 512), dtype), random_rows(
        rng, (layers, tokens, 64), dtype
    )


@any_format
@pytest.mark.parametrize("negative", [-1, -2, -8, -(2**31), -(2**63)])
def test_negative_slots_leave_the_last_row_alone(backend, insert_path, rng, fmt, negative):
    kv_c, k_pe = make_rows(rng, fmt, 1, 3)
    cache = make_cache(backend, fmt, num_blocks=2)
    slots = np.array([negative, 2, negative], np.int64)
    assert check_insert(insert_path, [cache], kv_c, k_pe, slots)
    assert np.all(cache.row(7) == helpers.SENTINEL)
    assert np.any(cache.row(2) != helpers.SENTINEL)


@any_format
@pytest.mark.parametrize("by_layer", [False, True])
def test_fewer_slots_than_rows_use_the_first_rows(backend, insert_path, rng, fmt, by_layer):
    kv_c, k_pe = make_rows(rng, fmt, 2, 8)
    slots = np.array([9, 0, 15, 4, 7])
    if by_layer:
        slots = np.stack([slots, slots[::-1]])
    caches = [make_cache(backend, fmt) for _ in range(2)]
    assert check_insert(insert_path, caches, kv_c, k_pe, slots)


def test_rows_and_rotary_parts_may_be_padded_differently(backend, insert_path, rng):
    kv_c, k_pe = make_rows(rng, "bfloat16", 1, 8)
    slots = np.array([9, 0, 15])
    assert check_insert(insert_path, [make_cache(backend)], kv_c, k_pe[:, :5], slots)
    assert check_insert(insert_path, [make_cache(backend)], kv_c[:, :3], k_pe, slots)


@any_format
def test_slots_beyond_the_cache_are_never_written(backend, insert_path, rng, fmt):
    kv_c, k_pe = make_rows(rng, fmt, 1, 5)
    cache = make_cache(backend, fmt, num_blocks=2)
    slots = np.array([7, 8, 2**40 + 17, 2**63 - 1, 2**32], np.int64)
    assert check_insert(insert_path, [cache], kv_c, k_pe, slots)
    assert np.any(cache.row(7) != helpers.SENTINEL)


def test_slots_beyond_one_layer_but_inside_another(backend, insert_path, rng):
    kv_c, k_pe = make_rows(rng, "bfloat16", 2, 3)
    caches = [make_cache(backend, num_blocks=2), make_cache(backend, num_blocks=4)]
    assert check_insert(insert_path, caches, kv_c, k_pe, np.array([7, 8, 15]))


def test_writer_counts_slots_beyond_the_cache_and_names_the_first(backend, rng):
    kv_c, k_pe = make_rows(rng, "bfloat16", 2, 3)
    caches = [make_cache(backend, num_blocks=2) for _ in range(2)]
    writer = GroupedCacheWriter([cache.array for cache in caches])
    slots = np.array([[7, 1, 2], [7, 8, 2**40 + 17]])
    writer.insert(backend.array(kv_c), backend.array(k_pe), backend.array(slots))
    assert writer.stats()["slots_out_of_range"].tolist() == [0, 2]
    with pytest.raises(ValueError, match=r"layer\D*1\D.*(token\D*1\D.*slot\D*8|token\D*2\D.*slot)"):
        writer.check()


@any_format
def test_slots_of_32_and_64_bits_are_alike(backend, insert_path, rng, fmt):
    kv_c, k_pe = make_rows(rng, fmt, 2, 3)
    pools = []
    for dtype in (np.int32, np.int64):
        caches = [make_cache(backend, fmt) for _ in range(2)]
        assert check_insert(insert_path, caches, kv_c, k_pe, np.array([5, -1, 2], dtype))
        pools.append(caches[1].bytes())
    assert_bytes_equal(pools[0], pools[1], caches[1].geometry)


@pytest.mark.parametrize("dtype", ["float32", "float64", "uint64", "uint32", "int16", "bool"])
def test_slots_of_other_dtypes_are_refused(backend, dtype):
    cache = make_cache(backend)
    kv_c = backend.array(np.ones((1, 2, 512), oracle.BFLOAT16))
    k_pe = backend.array(np.ones((1, 2, 64), oracle.BFLOAT16))
    slots = backend.array(np.array([1, 0]).astype(dtype))
    with helpers.rejected(
        TypeError, "concat_and_cache_mla", "slot_mapping", "int64", dtype, caches=[cache]
    ):
        concat_and_cache_mla(kv_c[0], k_pe[0], cache.array, slots)
    writer = GroupedCacheWriter([cache.array])
    with helpers.rejected(TypeError, "insert", "slot_mapping", "int64", dtype, caches=[cache]):
        writer.insert(kv_c, k_pe, slots)


@any_format
def test_tokens_that_share_a_slot_touch_only_its_row(backend, insert_path, fmt):
    dtype = INPUT_DTYPES[fmt]
    kv_c = constant_rows([range(64)], 512, dtype)
    k_pe = constant_rows([range(64)], 64, dtype)
    cache = make_cache(backend, fmt)
    slots = np.full(64, 3)
    if backend.last_duplicate_wins:
        assert check_insert(insert_path, [cache], kv_c, k_pe, slots)
        return
    before = cache.bytes()
    insert_path(
        backend.array(kv_c),
        backend.array(k_pe),
        [cache.array],
        backend.array(slots),
        fmt,
        helpers.default_scales(fmt, 1),
    )
    start = cache.geometry.row_at(3)
    after = cache.bytes()
    after[start : start + cache.geometry.row_bytes] = helpers.SENTINEL
    assert_bytes_equal(after, before, cache.geometry)


def test_last_of_interleaved_duplicates_wins(backend, insert_path, rng):
    if not backend.last_duplicate_wins:
        pytest.skip("which of several tokens wins a slot is unspecified here")
    kv_c, k_pe = make_rows(rng, "bfloat16", 1, 9)
    slots = np.array([3, 7, 3, -1, 7, 1, 3, 99, 1])
    assert check_insert(insert_path, [make_cache(backend)], kv_c, k_pe, slots)


@any_format
def test_dummy_run_with_only_padding_changes_nothing(backend, insert_path, fmt):
    dtype = INPUT_DTYPES[fmt]
    kv_c = np.full((2, 16, 512), np.nan, dtype)
    k_pe = np.full((2, 16, 64), np.nan, dtype)
    caches = [make_cache(backend, fmt) for _ in range(2)]
    with helpers.unchanged(*caches):
        assert check_insert(insert_path, caches, kv_c, k_pe, np.full(16, -1))


@any_format
def test_slot_zero_is_an_ordinary_slot(backend, insert_path, rng, fmt):
    kv_c, k_pe = make_rows(rng, fmt, 1, 2)
    cache = make_cache(backend, fmt)
    assert check_insert(insert_path, [cache], kv_c, k_pe, np.array([0, 1]))
    assert np.any(cache.row(0) != helpers.SENTINEL)


@any_format
def test_no_tokens_is_no_work(backend, insert_path, fmt):
    dtype = INPUT_DTYPES[fmt]
    caches = [make_cache(backend, fmt) for _ in range(2)]
    empty = np.zeros((2, 0, 512), dtype), np.zeros((2, 0, 64), dtype)
    rows = np.ones((2, 3, 512), dtype), np.ones((2, 3, 64), dtype)
    with helpers.unchanged(*caches):
        for kv_c, k_pe in (empty, rows):
            for slots in (np.zeros(0, np.int64), np.zeros((2, 0), np.int32)):
                assert check_insert(insert_path, caches, kv_c, k_pe, slots)


@any_format
def test_every_slot_of_a_cache_in_random_order(backend, insert_path, rng, fmt):
    kv_c, k_pe = make_rows(rng, fmt, 2, 35)
    caches = [make_cache(backend, fmt, num_blocks=5, block_size=7) for _ in range(2)]
    slots = np.stack([rng.permutation(35), rng.permutation(35)])
    assert check_insert(insert_path, caches, kv_c, k_pe, slots)
    for cache in caches:
        assert not np.any(np.all(cache.bytes()[256:-256].reshape(35, -1) == 0xA5, axis=1))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_strided_slots_are_followed_or_refused(backend, insert_path, rng, dtype):
    kv_c, k_pe = make_rows(rng, "bfloat16", 1, 4)
    size = np.dtype(dtype).itemsize
    room = np.array([5, 100, 0, 101, -1, 102, 14, 103], dtype)
    slots = backend.view(backend.buffer(room.view(np.uint8)), (4,), dtype, (2 * size,))
    check_insert(
        insert_path,
        [make_cache(backend)],
        kv_c,
        k_pe,
        room[::2].copy(),
        slots_array=slots,
        may_refuse="slot_mapping",
    )


@pytest.mark.parametrize("fmt", helpers.FLAT_FORMATS)
@pytest.mark.parametrize("duplicates", [False, True])
def test_batches_of_thousands_of_tokens(backend, insert_path, rng, fmt, duplicates):
    if duplicates and not backend.last_duplicate_wins:
        pytest.skip("which of several tokens wins a slot is unspecified here")
    dtype = INPUT_DTYPES[fmt]
    tokens = 4099
    kv_c = random_rows(rng, (1, tokens, 14), dtype)
    k_pe = random_rows(rng, (1, tokens, 6), dtype)
    cache = make_cache(backend, fmt, 70, 60, rank=14, rope=6, block_pad=8)
    slots = rng.permutation(4200)[:tokens]
    if duplicates:
        slots = rng.integers(-5, 300, tokens)
    assert check_insert(insert_path, [cache], kv_c, k_pe, slots)


def test_batches_of_thousands_of_tiled_rows(backend, insert_path, rng):
    kv_c, k_pe = make_rows(rng, "fp8_ds_mla", 1, 2051)
    cache = make_cache(backend, "fp8_ds_mla", 33, 64)
    slots = rng.permutation(33 * 64)[:2051]
    assert check_insert(insert_path, [cache], kv_c, k_pe, slots)


def test_the_first_bad_row_of_thousands_is_named(backend):
    cache = make_cache(backend, "bfloat16", 70, 60, rank=14, rope=6)
    writer = GroupedCacheWriter([cache.array], kv_lora_rank=14, rope_dim=6, collect_stats=True)
    kv_c, k_pe = np.ones((1, 4099, 14), oracle.BFLOAT16), np.ones((1, 4099, 6), oracle.BFLOAT16)
    k_pe[0, 3001, 5] = np.inf
    writer.insert(backend.array(kv_c), backend.array(k_pe), backend.array(np.arange(4099) + 1))
    assert writer.stats()["rows_written"].tolist() == [4099]
    assert writer.stats()["nonfinite_elements"].tolist() == [1]
    with pytest.raises(ValueError, match=r"layer 0\b.*token 3001\b.*slot 3002\b"):
        writer.check()
