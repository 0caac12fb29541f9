"""fused_norm_rope: numbers from bug reports, padding, positions, rounding in stages."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_mla import concat_and_cache_mla, fused_norm_rope, indexer_k_quant_and_cache
from tests import fused_oracle, oracle
from tests.fused_helpers import (
    CACHE_KINDS,
    arguments,
    assert_same_bits,
    both_ways,
    cos_sin,
    expect,
    make_indexer_cache,
    make_layer,
    scale_of,
)
from tests.helpers import (
    INPUT_DTYPES,
    SENTINEL,
    assert_bytes_equal,
    make_cache,
)

F32 = np.float32


# --- numbers from bug reports ---------------------------------------------------------------------


def test_rotation_of_pairs(backend, rng):
    """x = [1, 2, 3, 4], cos = [0, 1], sin = [1, 0]: pairs give [-2, 1, 3, 4]."""
    layer = make_layer(rng, tokens=1, rank=4, rope=4, dtype=F32)
    layer.k_pe = np.array([[1, 2, 3, 4]], F32)
    layer.k_table = np.array([[0, 1, 1, 0]], F32)
    out = backend.array(np.empty((1, 4), F32))
    fused_norm_rope(**arguments(backend, layer, k_pe_out=out, has_indexer=False))
    assert backend.to_numpy(out).tolist() == [[-2, 1, 3, 4]]


def test_the_weight_is_multiplied_before_any_rounding(backend, rng):
    """512 alternating 1 and 3, weight 1.015625: 1.359375, not 1.3671875."""
    layer = make_layer(rng, tokens=1)
    layer.kv_c = np.tile(np.array([1, 3], F32), 256)[None].astype(oracle.BFLOAT16)
    layer.kv_weight = np.full(512, 1.015625, F32).astype(oracle.BFLOAT16)
    layer.kv_eps = 1e-6
    cache = make_cache(backend)
    given = arguments(backend, layer, mla_kv_cache=cache.array, has_indexer=False)
    fused_norm_rope(**given)
    row = cache.row(0)[: 512 * 2].view(oracle.BFLOAT16)
    assert float(row[1]) == 1.359375
    wide = row.astype(F32)
    assert np.all(wide[1::2] == 1.359375)


def test_each_norm_has_its_own_eps(backend, rng):
    layer = make_layer(rng, tokens=1, q_dim=512)
    small = np.full((1, 512), 2.0**-10, F32).astype(oracle.BFLOAT16)
    layer.q_c, layer.kv_c = small, small
    layer.q_weight = layer.kv_weight = np.ones(512, oracle.BFLOAT16)
    layer.q_eps, layer.kv_eps = 1e-6, 1e-5
    out = backend.array(np.empty((1, 512), oracle.BFLOAT16))
    q = backend.to_numpy(
        fused_norm_rope(**arguments(backend, layer, kv_c_out=out, has_indexer=False))
    )
    assert np.all(q.astype(F32) == 0.69921875)
    assert np.all(backend.to_numpy(out).astype(F32) == 0.294921875)


@both_ways
@pytest.mark.parametrize("fmt", ["bfloat16", "fp8_e4m3", "fp8_ds_mla"])
def test_padding_leaves_the_last_row_alone_and_norms_the_query(backend, rng, run, fmt):
    layer = make_layer(rng, tokens=3, slots=[-1, 2, -(2**40)])
    cache = make_cache(backend, fmt, 2, 4)
    indexer = make_indexer_cache(backend, 2, 4)
    poisoned = backend.array(np.full(layer.q_c.shape, np.nan, oracle.BFLOAT16))
    out = run(
        arguments(
            backend,
            layer,
            mla_kv_cache=cache.array,
            mla_kv_cache_dtype=fmt,
            mla_k_scale=scale_of(fmt),
            indexer_k_cache=indexer.array,
            q_c_out=poisoned,
        )
    )
    assert np.all(cache.row(7) == SENTINEL)
    assert np.any(cache.row(2) != SENTINEL)
    want = expect(layer, None, None)
    assert_same_bits(backend.to_numpy(out), want.q_c)


@pytest.mark.parametrize("fresh", [True, False])
def test_fewer_slots_than_tokens_use_the_first_ones(backend, rng, fresh):
    layer = make_layer(rng, tokens=8)
    layer.slots = np.array([9, 0, 5])
    cache, indexer = make_cache(backend), make_indexer_cache(backend, 4, 4)
    want = expect(layer, cache, indexer)
    changes = {"mla_kv_cache": cache.array, "indexer_k_cache": indexer.array}
    if not fresh:
        changes["q_c_out"] = backend.array(np.full(layer.q_c.shape, np.nan, oracle.BFLOAT16))
    out = backend.to_numpy(fused_norm_rope(**arguments(backend, layer, **changes)))
    assert_bytes_equal(cache.bytes(), want.mla_pool, cache.geometry)
    assert_bytes_equal(indexer.bytes(), want.indexer_pool, indexer.geometry)
    assert out.shape[0] == (3 if fresh else 8)
    assert_same_bits(out[:3], want.q_c)
    assert np.all(np.isnan(out[3:].astype(F32)))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_positions_and_slots_of_both_widths(backend, rng, dtype):
    layer = make_layer(rng, tokens=2, positions=[0, 7])
    want = expect(layer, make_cache(backend), None)
    cache = make_cache(backend)
    layer.positions, layer.slots = layer.positions.astype(dtype), layer.slots.astype(dtype)
    fused_norm_rope(**arguments(backend, layer, mla_kv_cache=cache.array, has_indexer=False))
    assert_bytes_equal(cache.bytes(), want.mla_pool, cache.geometry)


@pytest.mark.parametrize("position", [-1, 16, 2**31 - 1, -(2**31), 2**40, -(2**63)])
def test_positions_outside_the_table(backend, rng, position):
    """No wild read; the rows are left out, the rotated output is zero, the others are not."""
    layer = make_layer(rng, tokens=3, positions=[1, position, 2])
    cache, indexer = make_cache(backend), make_indexer_cache(backend, 4, 4)
    want = expect(layer, cache, indexer)
    pe_out = backend.array(np.full((3, 64), np.nan, oracle.BFLOAT16))
    kv_out = backend.array(np.full((3, 512), np.nan, oracle.BFLOAT16))
    given = arguments(
        backend,
        layer,
        mla_kv_cache=cache.array,
        indexer_k_cache=indexer.array,
        k_pe_out=pe_out,
        kv_c_out=kv_out,
    )
    q = backend.to_numpy(fused_norm_rope(**given))
    assert_bytes_equal(cache.bytes(), want.mla_pool, cache.geometry)
    assert_bytes_equal(indexer.bytes(), want.indexer_pool, indexer.geometry)
    assert np.all(cache.row(1) == SENTINEL)
    assert np.all(backend.to_numpy(pe_out)[1].view(np.uint16) == 0)
    assert_same_bits(backend.to_numpy(kv_out), want.kv_c)
    assert_same_bits(q, want.q_c)


def test_a_table_of_another_dtype_with_the_same_values(backend, rng):
    layer = make_layer(rng, tokens=3)
    angles = cos_sin(16, 64, oracle.FLOAT16)
    angles = np.round(angles.astype(F32) * 64) / 64  # exact in float16 and in bfloat16
    bits = []
    for dtype in (np.float32, oracle.BFLOAT16, np.float16):
        layer.k_table = layer.index_table = angles.astype(dtype)
        cache, indexer = make_cache(backend), make_indexer_cache(backend)
        changes = {"mla_kv_cache": cache.array, "indexer_k_cache": indexer.array}
        fused_norm_rope(**arguments(backend, layer, **changes))
        bits.append(cache.bytes().tobytes() + indexer.bytes().tobytes())
    assert bits[0] == bits[1] == bits[2]


# --- rounding in stages ---------------------------------------------------------------------------


@pytest.mark.parametrize(("fmt", "scale_format"), CACHE_KINDS)
def test_staged_is_norm_then_rope_then_insert(backend, rng, fmt, scale_format):
    layer = make_layer(rng, dtype=INPUT_DTYPES[fmt])
    staged, fused, separate = (make_cache(backend, fmt) for _ in range(3))
    kv_out, pe_out = (backend.array(np.empty_like(rows)) for rows in (layer.kv_c, layer.k_pe))
    for cache, rounding in ((fused, "fused"), (staged, "staged")):
        fused_norm_rope(
            **arguments(
                backend,
                layer,
                mla_kv_cache=cache.array,
                mla_kv_cache_dtype=fmt,
                mla_k_scale=scale_of(fmt),
                scale_format=scale_format,
                rounding=rounding,
                kv_c_out=kv_out,
                k_pe_out=pe_out,
                has_indexer=False,
            )
        )
    concat_and_cache_mla(
        kv_out,
        pe_out,
        separate.array,
        backend.array(layer.slots),
        fmt,
        scale_of(fmt),
        scale_format=scale_format,
    )
    assert_bytes_equal(staged.bytes(), separate.bytes(), separate.geometry)
    if fmt == "fp8_e4m3":
        codes = np.stack([cache.bytes()[256:][: 5 * 576] for cache in (fused, staged)])
        ranks = fused_oracle.code_order(codes)
        assert np.abs(ranks[0] - ranks[1]).max() == 1  # they differ, by one code at most
    if fmt in oracle.DTYPES:  # one rounding is all there is
        assert_bytes_equal(fused.bytes(), staged.bytes(), fused.geometry)


def test_staged_keys_are_what_separate_operations_store(backend, rng):
    layer = make_layer(rng)
    staged, fused, separate = (make_indexer_cache(backend, 4, 4) for _ in range(3))
    for cache, rounding in ((staged, "staged"), (fused, "fused")):
        fused_norm_rope(**arguments(backend, layer, indexer_k_cache=cache.array, rounding=rounding))
    keys = []
    for token in range(layer.tokens):
        key = fused_oracle.layer_norm(
            fused_oracle.widen(layer.index_k[token]),
            fused_oracle.widen(layer.index_weight),
            fused_oracle.widen(layer.index_bias),
            layer.index_eps,
        )
        key = fused_oracle.rounded(key, oracle.BFLOAT16)
        key, _ = fused_oracle.rope(key, layer.index_table, int(layer.positions[token]), True)
        keys.append(fused_oracle.narrow(key, oracle.BFLOAT16))
    indexer_k_quant_and_cache(
        backend.array(np.array(keys)), separate.array, backend.array(layer.slots)
    )
    assert_bytes_equal(staged.bytes(), separate.bytes(), separate.geometry)
    assert not np.array_equal(staged.bytes(), fused.bytes())
