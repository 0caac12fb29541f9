"""fused_norm_rope and FusedNormRope: bits, bounds, what is stored, what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_mla import FusedNormRope, concat_and_cache_mla, fused_norm_rope, indexer_k_quant_and_cache
from cupy_mla.reference import norm
from tests import fused_oracle, helpers, oracle
from tests.fused_helpers import (
    Layer,
    arguments,
    assert_same_bits,
    cos_sin,
    expect,
    make_indexer_cache,
    make_layer,
    weights,
)
from tests.helpers import (
    INPUT_DTYPES,
    SENTINEL,
    assert_bytes_equal,
    make_cache,
    random_bits,
    rejected,
    surrounded,
)

F32 = np.float32
CACHE_KINDS = [
    ("bfloat16", "float32"),
    ("float16", "float32"),
    ("float32", "float32"),
    ("fp8_e4m3", "float32"),
    ("fp8_e5m2", "float32"),
    ("fp8_ds_mla", "float32"),
    ("fp8_ds_mla", "ue8m0"),
]
SCALE = 0.05
LAYER_NAMES = (
    "q_rms_norm_w",
    "q_rms_eps",
    "kv_rms_norm_w",
    "kv_rms_eps",
    "k_rope_cos_sin_cache",
    "index_k_layer_norm_w",
    "index_k_layer_norm_bias",
    "index_k_layer_norm_eps",
    "index_k_rope_cos_sin_cache",
    "indexer_k_cache",
    "mla_kv_cache",
    "mla_kv_cache_dtype",
    "mla_k_scale",
    "has_indexer",
    "index_rope_interleave",
    "scale_format",
    "rounding",
)


def run_function(given):
    return fused_norm_rope(**given)


def run_object(given):
    given = dict(given)
    layer = FusedNormRope(**{name: given.pop(name) for name in LAYER_NAMES if name in given})
    return layer(**given)


both_ways = pytest.mark.parametrize("run", [run_function, run_object], ids=["function", "object"])


def scale_of(fmt):
    return SCALE if fmt in helpers.SCALED_FORMATS else None


def caches_of(backend, fmt, **geometry):
    return (
        make_cache(backend, fmt, 3, 4, row_pad=16, block_pad=32),
        make_indexer_cache(backend, 3, 4, block_pad=64),
    )


def check_against_oracle(backend, run, layer: Layer, fmt, scale_format="float32", **options):
    """Run a step and compare every byte that it may write with the scalar oracle."""
    mla, indexer = caches_of(backend, fmt)
    staged = options.get("rounding") == "staged"
    want = expect(
        layer,
        mla,
        indexer,
        scale=scale_of(fmt),
        scale_format=scale_format,
        staged=staged,
        interleave=options.get("index_rope_interleave", False),
    )
    dtype, rows = layer.q_c.dtype, len(layer.q_c)
    outs = {
        name: np.full((rows + 1, source.shape[1]), np.nan, dtype)
        for name, source in (
            ("q_c_out", layer.q_c),
            ("kv_c_out", layer.kv_c),
            ("k_pe_out", layer.k_pe),
        )
    }
    arrays = {name: backend.array(out) for name, out in outs.items()}
    topk = backend.array(np.full((rows + 1, 6), 99, np.int32))
    given = arguments(
        backend,
        layer,
        topk_indices_buffer=topk,
        mla_kv_cache=mla.array,
        mla_kv_cache_dtype=fmt,
        mla_k_scale=scale_of(fmt),
        indexer_k_cache=indexer.array,
        scale_format=scale_format,
        **arrays,
        **options,
    )
    before = {
        name: backend.to_numpy(array).copy()
        for name, array in given.items()
        if isinstance(array, np.ndarray) and name in INPUTS
    }
    returned = run(given)
    assert returned is arrays["q_c_out"]
    assert_bytes_equal(mla.bytes(), want.mla_pool, mla.geometry)
    assert_bytes_equal(indexer.bytes(), want.indexer_pool, indexer.geometry)
    tokens = layer.tokens
    for name, expected in (("q_c_out", want.q_c), ("kv_c_out", want.kv_c), ("k_pe_out", want.k_pe)):
        got = backend.to_numpy(arrays[name])
        assert_same_bits(got[:tokens], expected)
        assert np.all(np.isnan(got[tokens:].astype(F32))), name
    filled = backend.to_numpy(topk)
    assert np.all(filled[:tokens] == -1)
    assert np.all(filled[tokens:] == 99)
    for name, values in before.items():
        assert_same_bits(backend.to_numpy(given[name]), values)


INPUTS = (
    "positions",
    "q_c",
    "q_rms_norm_w",
    "kv_c",
    "kv_rms_norm_w",
    "k_pe",
    "k_rope_cos_sin_cache",
    "index_k",
    "index_k_layer_norm_w",
    "index_k_layer_norm_bias",
    "index_k_rope_cos_sin_cache",
    "slot_mapping",
)


# --- bit for bit ----------------------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize("rounding", ["fused", "staged"])
@pytest.mark.parametrize(("fmt", "scale_format"), CACHE_KINDS)
def test_every_byte_is_the_oracles(backend, rng, run, fmt, scale_format, rounding):
    layer = make_layer(
        rng,
        dtype=INPUT_DTYPES[fmt],
        slots=[3, -1, 11, 12, 0],  # padding; beyond the cache
        positions=[15, 2, 16, 3, 0],  # beyond the table
    )
    check_against_oracle(backend, run, layer, fmt, scale_format, rounding=rounding)


@both_ways
@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("index_rope", [2, 64, 128])
def test_the_indexers_rotary_part_leads_in_both_styles(backend, rng, run, index_rope, interleave):
    layer = make_layer(rng, tokens=2, index_rope=index_rope)
    check_against_oracle(backend, run, layer, "bfloat16", index_rope_interleave=interleave)


@pytest.mark.parametrize("q_dim", [1, 3, 127, 128, 129, 511, 512, 513, 1536])
def test_query_widths(backend, rng, q_dim):
    layer = make_layer(rng, tokens=1, q_dim=q_dim)
    check_against_oracle(backend, run_function, layer, "bfloat16")


@pytest.mark.parametrize(("rank", "rope"), [(7, 2), (256, 64), (512, 32), (1, 128), (640, 6)])
@pytest.mark.parametrize("fmt", ["float32", "fp8_e4m3"])
def test_other_sizes_of_the_latent_and_rotary_part(backend, rng, rank, rope, fmt):
    layer = make_layer(rng, tokens=2, rank=rank, rope=rope, dtype=F32)
    mla = make_cache(backend, fmt, 3, 4, rank, rope)
    want = expect(layer, mla, None, scale=scale_of(fmt))
    fused_norm_rope(
        **arguments(
            backend,
            layer,
            mla_kv_cache=mla.array,
            mla_kv_cache_dtype=fmt,
            mla_k_scale=scale_of(fmt),
        )
    )
    assert_bytes_equal(mla.bytes(), want.mla_pool, mla.geometry)


@pytest.mark.parametrize("fmt", ["bfloat16", "float32", "fp8_e4m3", "fp8_ds_mla"])
@pytest.mark.parametrize("rounding", ["fused", "staged"])
def test_any_bits_nan_and_infinity_included(backend, rng, fmt, rounding):
    layer = make_layer(rng, tokens=3, dtype=INPUT_DTYPES[fmt])
    # Rows of any bits are nearly all NaN after a norm, so the others hold single bad elements.
    for name in ("q_c", "kv_c", "k_pe", "index_k"):
        rows = getattr(layer, name)
        rows[0] = random_bits(rng, rows[0].shape, rows.dtype)
        rows[1, 1] = np.inf
        rows[2, 0] = np.nan
    check_against_oracle(backend, run_function, layer, fmt, rounding=rounding)


@pytest.mark.parametrize("fmt", ["bfloat16", "fp8_e4m3", "fp8_ds_mla"])
def test_subnormal_and_zero_rows(backend, fmt):
    layer = make_layer(np.random.default_rng(3), tokens=3)
    layer.kv_eps = layer.q_eps = layer.index_eps = 0.0  # 1 / sqrt(0) is infinite, 0 * inf a NaN
    tiny = np.float32(2.0**-133).astype(oracle.BFLOAT16)
    for rows in (layer.kv_c, layer.q_c, layer.index_k):
        rows[0] = 0
        rows[1] = tiny
        rows[2] = -tiny
        rows[2, 1] = 1
    check_against_oracle(backend, run_function, layer, fmt)


def test_tokens_are_worked_on_in_pieces(backend, rng):
    """More tokens than the NumPy backend takes at a time: rows, errors and counters go on."""
    tokens, rows = 2500, 700
    layer = make_layer(rng, tokens=tokens, q_dim=4, rank=4, rope=2, dtype=F32)
    layer.positions = np.arange(tokens) % 16
    layer.slots = rng.permutation(tokens)
    mla = make_cache(backend, "float32", rows, 4, 4, 2)
    given = arguments(backend, layer, mla_kv_cache=mla.array, has_indexer=False)
    out = backend.to_numpy(fused_norm_rope(**given))
    some = [0, 1023, 1024, 2047, 2048, 2499]
    part = Layer(**{**vars(layer), "slots": layer.slots[some]})
    for name in ("positions", "q_c", "kv_c", "k_pe", "index_k"):
        setattr(part, name, getattr(layer, name)[some])
    want = expect(part, mla, None)
    assert_same_bits(out[some], want.q_c)
    for slot in layer.slots[some]:
        start = mla.geometry.row_at(int(slot))
        assert mla.bytes()[start : start + 24].tobytes() == (
            want.mla_pool[start : start + 24].tobytes()
        )


@given(st.integers(1, 1700), st.integers(0, 2**32 - 1))
def test_the_tree_adds_in_the_order_it_says(width, seed):
    rng = np.random.default_rng(seed)
    terms = (rng.standard_normal(width) * 2.0 ** rng.integers(-30, 30, width)).astype(F32)
    got = norm.tree_sum(terms[None])[0]
    assert got.tobytes() == fused_oracle.tree(list(terms)).tobytes()


@given(st.integers(0, 2**32 - 1), st.sampled_from([8, 40, 520]))
def test_norms_of_any_float32_bits(seed, width):
    rng = np.random.default_rng(seed)
    rows = random_bits(rng, (2, width), F32)
    rows[1] = np.where(np.isfinite(rows[1]), rows[1], F32(1))
    weight, bias = (random_bits(rng, (width,), F32) for _ in range(2))
    with np.errstate(all="ignore"):
        for row in rows:
            got = norm.rms_norm(row[None], weight, 1e-6)[0]
            want = np.array(fused_oracle.rms_norm(list(row), list(weight), 1e-6))
            helpers.assert_values_equal(got, want)
            got = norm.layer_norm(row[None], weight, bias, 1e-6)[0]
            want = np.array(fused_oracle.layer_norm(list(row), list(weight), list(bias), 1e-6))
            helpers.assert_values_equal(got, want)


def test_the_tree_is_not_the_plain_order(rng):
    """The order matters, so the tests above can tell trees apart."""
    terms = (rng.standard_normal(1536) * 2.0 ** rng.integers(-12, 12, 1536)).astype(F32)
    total = F32(0)
    for term in terms:
        total += term
    assert norm.tree_sum(terms[None])[0] != total


# --- within the error of the arithmetic -----------------------------------------------------------


def test_outputs_are_within_one_bfloat16_step_of_float64(backend, rng):
    """Float32 sums of 512 and 1536 terms are off by less than 2^-18, a bfloat16 step is 2^-8.

    So only a value next to a tie may round to the other side: off by one step at most. A rotated
    value may be small by cancellation; its error is that of its two products.
    """
    layer = make_layer(rng, tokens=40, q_dim=1536, table_rows=64)
    for name in ("q_c", "kv_c", "k_pe"):
        rows = getattr(layer, name)
        setattr(layer, name, rng.standard_normal(rows.shape).astype(F32).astype(rows.dtype))
    kv_out, pe_out = (np.empty_like(rows) for rows in (layer.kv_c, layer.k_pe))
    kv_array, pe_array = backend.array(kv_out), backend.array(pe_out)
    given = arguments(backend, layer, kv_c_out=kv_array, k_pe_out=pe_array, has_indexer=False)
    q_out = backend.to_numpy(fused_norm_rope(**given))
    exact = fused_oracle.exact_rms_norm(layer.q_c, layer.q_weight, layer.q_eps)
    assert np.all(np.abs(q_out.astype(np.float64) - exact) <= fused_oracle.bf16_ulp(exact))
    exact = fused_oracle.exact_rms_norm(layer.kv_c, layer.kv_weight, layer.kv_eps)
    got = backend.to_numpy(kv_array).astype(np.float64)
    assert np.all(np.abs(got - exact) <= fused_oracle.bf16_ulp(exact))
    exact = fused_oracle.exact_rope(layer.k_pe, layer.k_table, layer.positions, neox=False)
    magnitude = np.abs(layer.k_pe.astype(np.float64)).max()
    got = backend.to_numpy(pe_array).astype(np.float64)
    bound = fused_oracle.bf16_ulp(exact) / 2 + magnitude * 2.0**-22
    assert np.all(np.abs(got - exact) <= bound)


@pytest.mark.parametrize("interleave", [False, True])
def test_keys_are_within_one_code_of_float64(backend, rng, interleave):
    tokens = 48
    layer = make_layer(rng, tokens=tokens, table_rows=64)
    layer.index_k = rng.standard_normal((tokens, 128)).astype(F32).astype(oracle.BFLOAT16)
    indexer = make_indexer_cache(backend, 12, 4)
    fused_norm_rope(
        **arguments(backend, layer, indexer_k_cache=indexer.array, index_rope_interleave=interleave)
    )
    exact = fused_oracle.exact_rope(
        fused_oracle.exact_layer_norm(
            layer.index_k, layer.index_weight, layer.index_bias, layer.index_eps
        ),
        layer.index_table,
        layer.positions,
        not interleave,
    )
    blocks = indexer.bytes()[256:][: 12 * 528].reshape(12, 528)
    codes = blocks[:, :512].reshape(tokens, 128)
    scales = blocks[:, 512:].copy().view("<f4").reshape(tokens)
    raw = np.abs(exact).max(axis=1) / 448
    boundary = np.abs(np.log2(raw) - np.round(np.log2(raw))) < 1e-5
    assert np.all((scales == 2.0 ** np.ceil(np.log2(raw))) | boundary)
    want = (exact / scales[:, None]).astype(F32).astype(oracle.E4M3).view(np.uint8)
    distance = fused_oracle.code_order(codes) - fused_oracle.code_order(want)
    # A value that cancels to far below its products may be off by more than a code of its own.
    near_zero = np.abs(exact) < 2.0**-9 * np.abs(exact).max()
    assert np.all((np.abs(distance) <= 1) | near_zero)
    assert np.mean(distance == 0) > 0.999


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


# --- what belongs to a layer ----------------------------------------------------------------------


@both_ways
def test_a_layer_without_an_indexer_leaves_its_arrays_alone(backend, rng, run):
    layer = make_layer(rng)
    cache, indexer = make_cache(backend), make_indexer_cache(backend)
    topk = backend.array(np.full((5, 4), 7, np.int32))
    given = arguments(
        backend,
        layer,
        mla_kv_cache=cache.array,
        indexer_k_cache=indexer.array,
        topk_indices_buffer=topk,
        has_indexer=False,
        index_k=None,
        index_k_layer_norm_w=None,
        index_k_layer_norm_bias=None,
        index_k_rope_cos_sin_cache=None,
    )
    want = expect(layer, cache, None)
    run(given)
    assert_bytes_equal(cache.bytes(), want.mla_pool, cache.geometry)
    assert np.all(indexer.bytes() == SENTINEL)
    assert np.all(backend.to_numpy(topk) == 7)


@both_ways
@pytest.mark.parametrize("caches", [False, True])
def test_without_slots_only_the_query_is_made(backend, rng, run, caches):
    layer = make_layer(rng)
    cache, indexer = make_cache(backend), make_indexer_cache(backend)
    topk = backend.array(np.full((5, 4), 7, np.int64))
    changes = {"mla_kv_cache": cache.array, "indexer_k_cache": indexer.array} if caches else {}
    given = arguments(backend, layer, slot_mapping=None, topk_indices_buffer=topk, **changes)
    out = run(given)
    assert_same_bits(backend.to_numpy(out), expect(layer, None, None).q_c)
    assert np.all(cache.bytes() == SENTINEL)
    assert np.all(indexer.bytes() == SENTINEL)
    assert np.all(backend.to_numpy(topk) == -1)


@both_ways
def test_the_indexer_may_have_slots_of_its_own(backend, rng, run):
    layer = make_layer(rng, slots=[3, -1, 5, 6, 0])
    other = np.array([1, 2, -1, 99, 11, 4], np.int32)
    cache, indexer = make_cache(backend), make_indexer_cache(backend)
    want = expect(layer, cache, indexer, indexer_slots=other)
    run(
        arguments(
            backend,
            layer,
            mla_kv_cache=cache.array,
            indexer_k_cache=indexer.array,
            indexer_slot_mapping=backend.array(other),
        )
    )
    assert_bytes_equal(cache.bytes(), want.mla_pool, cache.geometry)
    assert_bytes_equal(indexer.bytes(), want.indexer_pool, indexer.geometry)


@both_ways
@pytest.mark.parametrize("empty", [False, True])
def test_a_model_without_rope(backend, rng, run, empty):
    layer = make_layer(rng, tokens=2)
    cache = make_cache(backend, rope=0)
    layer.k_pe = layer.k_pe[:, :0]
    want = cache.bytes()
    with np.errstate(all="ignore"):
        for token in range(2):
            latent = fused_oracle.rms_norm(
                fused_oracle.widen(layer.kv_c[token]),
                fused_oracle.widen(layer.kv_weight),
                layer.kv_eps,
            )
            row = fused_oracle.narrow(latent, oracle.BFLOAT16).tobytes()
            fused_oracle.put_values(want, cache.geometry, token, row)
    run(
        arguments(
            backend,
            layer,
            k_pe=backend.array(layer.k_pe) if empty else None,
            k_rope_cos_sin_cache=None,
            mla_kv_cache=cache.array,
            has_indexer=False,
        )
    )
    assert_bytes_equal(cache.bytes(), want, cache.geometry)


@both_ways
def test_no_token_at_all(backend, rng, run):
    layer = make_layer(rng, tokens=0)
    cache = make_cache(backend)
    out = run(arguments(backend, layer, mla_kv_cache=cache.array))
    assert backend.to_numpy(out).shape == (0, 24)
    assert np.all(cache.bytes() == SENTINEL)


@both_ways
@pytest.mark.parametrize("fmt", ["bfloat16", "fp8_e4m3", "fp8_ds_mla"])
def test_inputs_inside_larger_buffers(backend, rng, run, fmt):
    layer = make_layer(rng)
    cache, indexer = make_cache(backend, fmt), make_indexer_cache(backend)
    want = expect(layer, cache, indexer, scale=scale_of(fmt))
    strided = {
        "q_c": surrounded(backend, layer.q_c, lead=3, pad=5),
        "kv_c": surrounded(backend, layer.kv_c),
        "k_pe": surrounded(backend, layer.k_pe, pad=1),
        "index_k": surrounded(backend, layer.index_k, lead=1, pad=7),
        "k_rope_cos_sin_cache": surrounded(backend, layer.k_table, pad=3),
        "index_k_rope_cos_sin_cache": surrounded(backend, layer.index_table, pad=1),
        "q_rms_norm_w": surrounded(backend, layer.q_weight),
        "kv_rms_norm_w": surrounded(backend, layer.kv_weight),
    }
    out_room = np.full((5, 40), np.nan, oracle.BFLOAT16)
    room = backend.array(out_room)
    given = arguments(
        backend,
        layer,
        mla_kv_cache=cache.array,
        mla_kv_cache_dtype=fmt,
        mla_k_scale=scale_of(fmt),
        indexer_k_cache=indexer.array,
        q_c_out=room[:, 3:27],
        **strided,
    )
    run(given)
    assert_bytes_equal(cache.bytes(), want.mla_pool, cache.geometry)
    assert_bytes_equal(indexer.bytes(), want.indexer_pool, indexer.geometry)
    written = backend.to_numpy(room)
    assert_same_bits(written[:, 3:27], want.q_c)
    assert np.all(np.isnan(np.delete(written.astype(F32), range(3, 27), axis=1)))


def test_outputs_may_be_the_inputs_themselves(backend, rng):
    layer = make_layer(rng)
    want = expect(layer, None, None)
    arrays = {name: backend.array(getattr(layer, name).copy()) for name in ("q_c", "kv_c", "k_pe")}
    given = arguments(backend, layer, **arrays)
    outs = {f"{name}_out": array for name, array in arrays.items()}
    fused_norm_rope(**given, **outs)
    assert_same_bits(backend.to_numpy(arrays["q_c"]), want.q_c)
    assert_same_bits(backend.to_numpy(arrays["kv_c"]), want.kv_c)
    assert_same_bits(backend.to_numpy(arrays["k_pe"]), want.k_pe)


def test_caches_with_a_head_axis(backend, rng):
    layer = make_layer(rng)
    cache, four = make_cache(backend, "fp8_ds_mla"), make_cache(backend, "fp8_ds_mla", four_d=True)
    indexer, other = make_indexer_cache(backend), make_indexer_cache(backend)
    for mla, keys in ((cache.array, indexer.array), (four.array, other.array[:, :, None])):
        fused_norm_rope(
            **arguments(
                backend,
                layer,
                mla_kv_cache=mla,
                mla_kv_cache_dtype="fp8_ds_mla",
                indexer_k_cache=keys,
            )
        )
    assert_bytes_equal(four.bytes(), cache.bytes(), cache.geometry)
    assert_bytes_equal(other.bytes(), indexer.bytes(), indexer.geometry)


# --- the object -----------------------------------------------------------------------------------


def make_object(backend, layer, **changes):
    given = arguments(backend, layer, **changes)
    return FusedNormRope(**{name: given[name] for name in LAYER_NAMES if name in given}), given


def step(given):
    return {
        name: given[name]
        for name in ("positions", "q_c", "kv_c", "k_pe", "index_k", "slot_mapping")
    }


def test_the_object_counts_what_it_could_not_store(backend, rng):
    layer = make_layer(rng, slots=[3, 99, 5, -1, 98], positions=[0, 1, 77, 88, 2])
    cache, indexer = make_cache(backend), make_indexer_cache(backend)
    op, given = make_object(backend, layer, mla_kv_cache=cache.array, indexer_k_cache=indexer.array)
    op.check()
    op(**step(given), indexer_slot_mapping=backend.array(np.array([0, 1, 2, 3, 50])))
    stats = op.stats()
    assert set(stats) == {"slots_out_of_range", "positions_out_of_range"}
    assert all(values.dtype == np.int64 for values in stats.values())
    assert stats["slots_out_of_range"].tolist() == [2, 1]
    assert stats["positions_out_of_range"].tolist() == [1, 2]
    with pytest.raises(ValueError, match="check: ") as caught:
        op.check()
    text = str(caught.value)
    assert "slots lie beyond the MLA cache" in text
    assert "token 1, slot 99" in text
    assert (
        "positions lie beyond the RoPE table of the indexer cache, first: token 2, slot 2" in text
    )
    op.check()
    op(**step(given))
    assert op.stats()["slots_out_of_range"].tolist() == [4, 3]


def test_the_object_counts_zeros_for_a_cache_it_does_not_have(backend, rng):
    layer = make_layer(rng, slots=[3, 99, 5, -1, 98])
    op, given = make_object(backend, layer, mla_kv_cache=make_cache(backend).array)
    op(**step(given))
    assert op.stats()["slots_out_of_range"].tolist() == [2, 0]


def test_the_object_reads_weights_and_scale_at_each_call(backend, rng):
    layer = make_layer(rng)
    cache = make_cache(backend, "fp8_e4m3")
    scale = np.array([0.05], F32)
    weight = layer.kv_weight.copy()
    op, given = make_object(
        backend,
        layer,
        kv_rms_norm_w=weight,
        mla_kv_cache=cache.array,
        mla_kv_cache_dtype="fp8",
        mla_k_scale=scale,
        has_indexer=False,
    )
    op(**step(given))
    scale[0] = 0.75
    weight[:] = weights(np.random.default_rng(1), 512)
    layer.kv_weight = weight
    want = expect(layer, cache, None, scale=0.75)
    op(**step(given))
    assert_bytes_equal(cache.bytes(), want.mla_pool, cache.geometry)


def test_what_the_object_says_of_itself(backend, rng):
    layer = make_layer(rng)
    op, _ = make_object(
        backend,
        layer,
        mla_kv_cache=make_cache(backend, "fp8_ds_mla").array,
        mla_kv_cache_dtype="fp8_ds_mla",
        indexer_k_cache=make_indexer_cache(backend).array,
    )
    op.warmup()
    assert repr(op).startswith(
        "FusedNormRope(MLA cache as fp8_ds_mla, indexer cache as indexer_fp8, "
    )
    assert "no cache" in repr(make_object(backend, layer)[0])


# --- frameworks -----------------------------------------------------------------------------------


def test_torch_tensors_give_a_torch_tensor(rng):
    torch = pytest.importorskip("torch")
    layer = make_layer(rng)
    cache, indexer = make_cache(helpers.Backend()), make_indexer_cache(helpers.Backend())
    want = expect(layer, cache, indexer)

    def tensor(array):
        if array.dtype == oracle.BFLOAT16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    given = {
        name: tensor(value) if isinstance(value, np.ndarray) else value
        for name, value in arguments(helpers.Backend(), layer).items()
    }
    given["q_rms_norm_w"].requires_grad_()
    mla = torch.full((4, 4, 576), 0, dtype=torch.bfloat16)
    mla.view(torch.uint8).fill_(SENTINEL)
    keys = torch.full((3, 4, 132), SENTINEL, dtype=torch.uint8)
    topk = torch.zeros(5, 3, dtype=torch.int32)
    given.update(mla_kv_cache=mla, indexer_k_cache=keys, topk_indices_buffer=topk)
    out = fused_norm_rope(**given)
    assert isinstance(out, torch.Tensor)
    assert out.dtype == torch.bfloat16
    assert_same_bits(out.view(torch.int16).numpy().view(oracle.BFLOAT16), want.q_c)
    stored = mla.view(torch.uint8).numpy().reshape(-1)
    assert stored.tobytes() == want.mla_pool[256 : 256 + stored.size].tobytes()
    stored = keys.numpy().reshape(-1)
    assert stored.tobytes() == want.indexer_pool[256 : 256 + stored.size].tobytes()
    assert torch.all(topk == -1)


def test_jax_arrays_give_a_jax_array_and_are_no_destination(rng):
    jax = pytest.importorskip("jax")
    layer = make_layer(rng)
    layer.positions, layer.slots = layer.positions.astype(np.int32), layer.slots.astype(np.int32)
    cache = make_cache(helpers.Backend())
    given = {
        name: jax.numpy.asarray(value) if isinstance(value, np.ndarray) else value
        for name, value in arguments(helpers.Backend(), layer).items()
    }
    given["has_indexer"] = False
    out = fused_norm_rope(**given)
    assert isinstance(out, jax.Array)
    assert_same_bits(np.asarray(out), expect(layer, None, None).q_c)
    for name, array in (
        ("mla_kv_cache", jax.numpy.zeros((2, 4, 576), jax.numpy.bfloat16)),
        ("q_c_out", out),
    ):
        with rejected(ValueError, "fused_norm_rope", name, "read-only", caches=[cache]):
            fused_norm_rope(**{**given, name: array})


# --- what is refused ------------------------------------------------------------------------------


def bad(name, make, exception, *fragments, blamed=None, changes=None):
    return pytest.param(
        name, make, exception, fragments, blamed or name, changes or {}, id=f"{name}-{fragments[0]}"
    )


def bf16(*shape):
    return np.zeros(shape, oracle.BFLOAT16)


REFUSED = [
    bad("positions", lambda: np.zeros(5), TypeError, "int32 or int64", "float64"),
    bad("positions", lambda: np.zeros(5, np.uint64), TypeError, "uint64"),
    bad("positions", lambda: np.zeros(4, np.int64), ValueError, "each of the 5 tokens", "[4]"),
    bad("positions", lambda: np.zeros((5, 1), np.int64), ValueError, "[T]", "[5, 1]"),
    bad("positions", lambda: np.zeros(10, np.int64)[::2], ValueError, "stride 1"),
    bad("positions", lambda: None, TypeError, "NoneType"),
    bad("q_c", lambda: bf16(5, 23), ValueError, "[T, 24]", "[5, 23]"),
    bad("q_c", lambda: bf16(4, 24), ValueError, "each of the 5 tokens", "[4, 24]"),
    bad("q_c", lambda: np.zeros((5, 24), np.int16), TypeError, "bfloat16", "int16"),
    bad("q_c", lambda: np.zeros((5, 24), np.float16), TypeError, "q_c", blamed="kv_c"),
    bad("kv_c", lambda: bf16(5, 256), ValueError, "[T, 512]", "[5, 256]"),
    bad("kv_c", lambda: np.zeros((5, 512), F32), TypeError, "dtype of q_c", "float32"),
    bad("kv_c", lambda: bf16(5, 1024)[:, ::2], ValueError, "stride 1", "2"),
    bad("k_pe", lambda: bf16(5, 1, 64), ValueError, "[T, 64]", "[5, 1, 64]"),
    bad("k_pe", lambda: None, TypeError, "array", "NoneType"),
    bad("k_pe", lambda: bf16(5, 62), ValueError, "[T, 64]", "[5, 62]"),
    bad("index_k", lambda: bf16(5, 64), ValueError, "[T, 128]", "[5, 64]"),
    bad("index_k", lambda: None, TypeError, "NoneType"),
    bad("slot_mapping", lambda: np.zeros(5, F32), TypeError, "int32 or int64", "float32"),
    bad("slot_mapping", lambda: np.zeros((1, 5), np.int64), ValueError, "[T]", "[1, 5]"),
    bad("indexer_slot_mapping", lambda: np.zeros(4, np.int64), ValueError, "5 tokens"),
    bad("q_rms_norm_w", lambda: bf16(1, 24), ValueError, "[Q]", "[1, 24]"),
    bad("q_rms_norm_w", lambda: np.zeros(24), TypeError, "float64"),
    bad("q_rms_norm_w", lambda: bf16(0), ValueError, "at least one"),
    bad("kv_rms_norm_w", lambda: None, TypeError, "NoneType"),
    bad("q_rms_eps", lambda: -1e-6, ValueError, "at least 0", "-1e-06"),
    bad("kv_rms_eps", lambda: float("nan"), ValueError, "finite", "nan"),
    bad("kv_rms_eps", lambda: "1e-6", TypeError, "number", "str"),
    bad("index_k_layer_norm_eps", lambda: float("inf"), ValueError, "finite", "inf"),
    bad("k_rope_cos_sin_cache", lambda: np.zeros((4, 63), F32), ValueError, "even", "[4, 63]"),
    bad("k_rope_cos_sin_cache", lambda: np.zeros((4, 64)), TypeError, "float64"),
    bad("k_rope_cos_sin_cache", lambda: np.zeros(64, F32), ValueError, "[positions, P]", "[64]"),
    bad("index_k_rope_cos_sin_cache", lambda: np.zeros((4, 130), F32), ValueError, "at most 128"),
    bad("index_k_rope_cos_sin_cache", lambda: None, TypeError, "NoneType"),
    bad("index_k_layer_norm_w", lambda: bf16(64), ValueError, "[128]", "[64]"),
    bad("index_k_layer_norm_bias", lambda: None, TypeError, "NoneType"),
    bad("mla_kv_cache", lambda: bf16(4, 4, 575), ValueError, "576", "575"),
    bad(
        "mla_kv_cache",
        lambda: np.zeros((4, 4, 576), np.float16),
        TypeError,
        "float16",
        blamed="kv_c",
    ),
    bad("mla_kv_cache", lambda: np.zeros((4, 4, 576), np.uint8), TypeError, "named"),
    bad(
        "mla_kv_cache",
        lambda: np.zeros((4, 4, 576), np.uint8),
        ValueError,
        "scale",
        blamed="mla_k_scale",
        changes={"mla_kv_cache_dtype": "fp8"},
    ),
    bad(
        "mla_k_scale",
        lambda: -1.0,
        ValueError,
        "> 0",
        "-1",
        changes={"mla_kv_cache_dtype": "fp8", "mla_kv_cache": np.zeros((4, 4, 576), np.uint8)},
    ),
    bad("mla_kv_cache_dtype", lambda: "fp7", ValueError, "fp8_ds_mla", blamed="kv_cache_dtype"),
    bad("indexer_k_cache", lambda: np.zeros((4, 4, 128), np.uint8), ValueError, "132", "128"),
    bad("indexer_k_cache", lambda: np.zeros((4, 4, 132), np.int8), TypeError, "uint8", "int8"),
    bad("indexer_k_cache", lambda: np.zeros((4, 8, 132), np.uint8)[:, ::2], ValueError, "gaps"),
    bad("topk_indices_buffer", lambda: np.zeros((5, 4), F32), TypeError, "int32", "float32"),
    bad("topk_indices_buffer", lambda: np.zeros((4, 4), np.int32), ValueError, "5 tokens"),
    bad("topk_indices_buffer", lambda: np.zeros(20, np.int32), ValueError, "[T, K]", "[20]"),
    bad("q_c_out", lambda: np.zeros((5, 24), F32), TypeError, "bfloat16", "float32"),
    bad("q_c_out", lambda: bf16(4, 24), ValueError, "5 tokens"),
    bad("kv_c_out", lambda: np.broadcast_to(bf16(512), (5, 512)), ValueError, "read-only"),
    bad(
        "kv_c_out",
        lambda: np.lib.stride_tricks.as_strided(bf16(1024), (5, 512), (8, 2)),
        ValueError,
        "overlap",
        "8 bytes",
    ),
    bad("k_pe_out", lambda: bf16(5, 32), ValueError, "[T, 64]", "[5, 32]"),
    bad("scale_format", lambda: "e8m0", ValueError, "ue8m0", "e8m0"),
    bad("rounding", lambda: "twice", ValueError, "staged", "twice"),
    bad("stream", lambda: object(), ValueError, "host memory"),
]


@pytest.mark.parametrize(("name", "make", "exception", "fragments", "blamed", "changes"), REFUSED)
def test_what_does_not_fit_is_refused_and_nothing_written(
    rng, name, make, exception, fragments, blamed, changes
):
    backend = helpers.Backend()
    layer = make_layer(rng)
    cache, indexer = make_cache(backend), make_indexer_cache(backend)
    topk = np.full((5, 4), 7, np.int32)
    given = arguments(
        backend,
        layer,
        mla_kv_cache=cache.array,
        indexer_k_cache=indexer.array,
        topk_indices_buffer=topk,
    )
    given.update(changes)
    given[name] = make()
    caches = [cache, indexer]
    with rejected(exception, "fused_norm_rope", blamed, *fragments, caches=caches):
        fused_norm_rope(**given)
    with rejected(exception, "FusedNormRope", blamed, *fragments, caches=caches):
        run_object(given)
    assert np.all(topk == 7)


def test_a_layout_without_a_scale_ignores_it(backend, rng):
    layer = make_layer(rng)
    cache = make_cache(backend)
    want = expect(layer, cache, None)
    fused_norm_rope(
        **arguments(backend, layer, mla_kv_cache=cache.array, mla_k_scale=1.0, has_indexer=False)
    )
    assert_bytes_equal(cache.bytes(), want.mla_pool, cache.geometry)


def test_arrays_of_several_devices_are_refused(rng):
    layer = make_layer(rng)
    given = arguments(helpers.Backend(), layer)
    given["kv_c"] = helpers.FakeDevice((5, 512), "<f2", dtype="torch.bfloat16")
    with rejected(ValueError, "fused_norm_rope", "kv_c", "same CUDA device", "cuda:0"):
        fused_norm_rope(**given)
