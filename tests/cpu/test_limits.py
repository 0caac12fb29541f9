"""Offsets beyond 31 bits, and how much memory a call may take."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from cupy_mla import GroupedCacheWriter, concat_and_cache_mla, read_slots
from tests import oracle

MIB = 2**20


@pytest.fixture(scope="module")
def large_cache():
    """2.15 GB of bytes that the system hands out page by page as they are touched."""
    return np.zeros((233_017, 16, 576), np.uint8)


def rows(tokens, dtype=oracle.BFLOAT16):
    values = (np.arange(tokens * 576) % 97 + 1).reshape(tokens, 576).astype(dtype)
    return values[:, :512], values[:, 512:]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("grouped", [False, True])
def test_slots_beyond_two_gigabytes(large_cache, dtype, grouped):
    slots = np.array([0, 3_728_270, 3_728_271], dtype)
    assert large_cache.size == 3_728_272 * 576 > 2**31
    kv_c, k_pe = rows(3)
    flat = large_cache.reshape(-1)
    for slot in slots.tolist():
        flat[slot * 576 : slot * 576 + 576] = 0
    if grouped:
        writer = GroupedCacheWriter([large_cache], "fp8", [0.5])
        writer.insert(kv_c[None], k_pe[None], slots)
        assert writer.stats()["slots_out_of_range"].tolist() == [0]
    else:
        concat_and_cache_mla(kv_c, k_pe, large_cache, slots, "fp8", 0.5)
    last = 2_147_484_096
    assert slots[2] * np.int64(576) == last
    for token, start in enumerate((0, last - 576, last)):
        expected = oracle.encode_row(kv_c[token], k_pe[token], "fp8_e4m3", 0.5)
        assert flat[start : start + 576].tobytes() == expected
    # An int32 product wraps to -2147483200: as an index it counts from the end, to byte 1472.
    assert not np.any(flat[576:65536])
    assert not np.any(flat[last - 65536 : last - 576])
    got = read_slots(large_cache, slots, "fp8", 0.5)
    for token in range(3):
        row = oracle.encode_row(kv_c[token], k_pe[token], "fp8_e4m3", 0.5)
        assert np.array_equal(got[token], oracle.decode_row(row, "fp8_e4m3", 0.5))


def test_strides_beyond_two_gigabytes(large_cache):
    """Two blocks almost 2 GB apart, and layers that far apart."""
    pair = large_cache[:: large_cache.shape[0] - 1]
    assert pair.strides[0] > 2**31 - 10_000
    pair[:] = 0
    kv_c, k_pe = rows(2)
    concat_and_cache_mla(kv_c, k_pe, pair, np.array([31, 3]), "fp8_e5m2", 2.0)
    flat = large_cache.reshape(-1)
    for token, start in ((0, 2_147_484_096), (1, 3 * 576)):
        expected = oracle.encode_row(kv_c[token], k_pe[token], "fp8_e5m2", 2.0)
        assert flat[start : start + 576].tobytes() == expected
    assert np.count_nonzero(pair) == 2 * 576


def peak_of(call):
    """Bytes allocated at most during a call, beyond those that were there before."""
    call()  # what is made once, such as tables, does not count
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("fmt", ["bfloat16", "fp8_e4m3", "fp8_ds_mla"])
def test_a_large_insert_takes_at_most_twice_its_inputs(fmt):
    layers, tokens = 5, 16384
    values = np.ones((layers, tokens, 576), oracle.BFLOAT16)
    kv_c, k_pe = values[:, :, :512], values[:, :, 512:]
    width = {"bfloat16": 576, "fp8_e4m3": 576, "fp8_ds_mla": 656}[fmt]
    storage = oracle.BFLOAT16 if fmt == "bfloat16" else np.uint8
    caches = [np.zeros((tokens // 64, 64, width), storage) for _ in range(layers)]
    scales = [0.5] * layers if fmt == "fp8_e4m3" else None
    writer = GroupedCacheWriter(caches, fmt, scales)
    slots = np.arange(tokens)[::-1].copy()
    assert peak_of(lambda: writer.insert(kv_c, k_pe, slots)) <= 2 * values.nbytes
    for cache in caches:
        assert np.all(cache[:, :, :512] == cache[0, 0, 0])
        assert np.any(cache[0, 0].view(np.uint8) != 0)


@pytest.mark.parametrize("fmt", ["fp8_e5m2", "fp8_ds_mla"])
def test_a_large_insert_into_one_layer_takes_no_more_than_its_inputs(fmt):
    """Temporaries do not grow with the number of tokens."""
    tokens = 65536
    values = np.ones((tokens, 576), oracle.BFLOAT16)
    cache = np.zeros((tokens // 64, 64, 656 if fmt == "fp8_ds_mla" else 576), np.uint8)
    slots = np.arange(tokens)
    scale = 1.0 if fmt == "fp8_e5m2" else None

    def call():
        concat_and_cache_mla(values[:, :512], values[:, 512:], cache, slots, fmt, scale)

    assert peak_of(call) <= values.nbytes
    assert np.all(cache[:, :, :512] == (0x3C if fmt == "fp8_e5m2" else 0x7E))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("fmt", ["bfloat16", "fp8_e4m3", "fp8_ds_mla"])
def test_one_token_never_costs_a_copy_of_the_cache(fmt, padded):
    width = {"bfloat16": 576, "fp8_e4m3": 576, "fp8_ds_mla": 656}[fmt]
    storage = oracle.BFLOAT16 if fmt == "bfloat16" else np.uint8
    pool = np.zeros((2000, 66, width), storage)
    cache = pool[:, :64] if padded else pool
    assert pool.nbytes > 70 * MIB
    kv_c, k_pe = rows(1)
    slots = np.array([cache.shape[1] * 1999 + 5])
    scale = 0.5 if fmt == "fp8_e4m3" else None
    writer = GroupedCacheWriter([cache], fmt, None if scale is None else [scale])
    calls = {
        "single": lambda: concat_and_cache_mla(kv_c, k_pe, cache, slots, fmt, scale),
        "writer": lambda: writer.insert(kv_c[None], k_pe[None], slots),
        "construction": lambda: GroupedCacheWriter(
            [cache], fmt, None if scale is None else [scale]
        ),
        "read": lambda: read_slots(cache, slots, fmt, scale),
    }
    for name, call in calls.items():
        assert peak_of(call) < MIB, name
    row = pool[1999, 5].view(np.uint8)
    assert row.tobytes() == oracle.encode_row(kv_c[0], k_pe[0], fmt, scale)
    assert np.count_nonzero(pool.view(np.uint8).any(axis=2)) == 1


def test_a_batch_read_takes_little_more_than_its_result():
    cache = np.zeros((256, 64, 656), np.uint8)
    slots = np.arange(16384)
    result = 16384 * 576 * 4
    assert peak_of(lambda: read_slots(cache, slots, "fp8_ds_mla")) <= 3 * result
