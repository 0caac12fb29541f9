"""fused_norm_rope: every bit, and the error of its arithmetic."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_mla import fused_norm_rope
from cupy_mla.reference import norm
from tests import fused_oracle, helpers, oracle
from tests.fused_helpers import (
    CACHE_KINDS,
    Layer,
    arguments,
    assert_same_bits,
    both_ways,
    expect,
    make_indexer_cache,
    make_layer,
    run_function,
    scale_of,
)
from tests.helpers import (
    INPUT_DTYPES,
    assert_bytes_equal,
    make_cache,
    random_bits,
)

F32 = np.float32


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
    before = {name: backend.to_numpy(given[name]).copy() for name in INPUTS}
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
    layer.positions = np.arange(tokens) % 13
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


@pytest.mark.parametrize("rounding", ["fused", "staged"])
@pytest.mark.parametrize(
    ("fmt", "scale_format"),
    [("fp8_e4m3", "float32"), ("fp8_e5m2", "float32"), ("fp8_ds_mla", "float32"),
     ("fp8_ds_mla", "ue8m0")],
)  # fmt: skip
def test_stored_codes_are_within_one_of_float64(backend, rng, fmt, scale_format, rounding):
    """Rows of the MLA cache: codes, and the scales of tiles, worked out in float64 from inputs."""
    tokens, scale = 40, 0.0375
    layer = make_layer(rng, tokens=tokens, table_rows=64)
    for name in ("kv_c", "k_pe"):
        rows = getattr(layer, name)
        setattr(layer, name, rng.standard_normal(rows.shape).astype(F32).astype(rows.dtype))
    tiled = fmt == "fp8_ds_mla"
    cache = backend.array(np.zeros((10, 4, 656 if tiled else 576), np.uint8))
    fused_norm_rope(
        **arguments(backend, layer, mla_kv_cache=cache, has_indexer=False),
        mla_kv_cache_dtype=fmt,
        mla_k_scale=None if tiled else scale,
        scale_format=scale_format,
        rounding=rounding,
    )
    stored = backend.to_numpy(cache).reshape(40, -1)
    latent = fused_oracle.exact_rms_norm(layer.kv_c, layer.kv_weight, layer.kv_eps)
    rope = fused_oracle.exact_rope(layer.k_pe, layer.k_table, layer.positions, neox=False)
    if tiled:
        scales = stored[:, 512:528].copy().view("<f4").astype(np.float64)
        exact = np.abs(latent.reshape(tokens, 4, 128)).max(axis=2) / 448
        # A float32 sum is off by less than 2^-18; half a bfloat16 step is 2^-8 of a value at most.
        slack = 2.0**-17 + (2.0**-8 if rounding == "staged" else 0)
        if scale_format == "ue8m0":
            power = 2.0 ** np.ceil(np.log2(np.maximum(exact, 1e-4)))
            fraction = np.log2(exact) - np.round(np.log2(exact))
            assert np.all((scales == power) | (np.abs(fraction) < 2 * slack))  # log2(e) < 2
        else:
            assert np.all(np.abs(scales - exact) <= slack * exact)
        pe = stored[:, 528:].copy().view(oracle.BFLOAT16).astype(np.float64)
        magnitude = np.abs(layer.k_pe.astype(np.float64)).max()
        bound = fused_oracle.bf16_ulp(rope) / 2 + magnitude * 2.0**-22
        assert np.all(np.abs(pe - rope) <= bound)
        quotients = latent / np.repeat(scales, 128, axis=1)
    else:
        quotients = np.concatenate([latent, rope], axis=1) / scale
    codes = stored[:, : quotients.shape[1]]
    code_dtype = oracle.CODE_DTYPES["fp8_e4m3" if tiled else fmt]
    largest = float(ml_dtypes.finfo(code_dtype).max)
    want = np.clip(quotients, -largest, largest).astype(F32).astype(code_dtype).view(np.uint8)
    distance = fused_oracle.code_order(codes) - fused_oracle.code_order(want)
    near_zero = np.abs(quotients) < 2.0**-9 * np.abs(quotients).max()
    assert np.all((np.abs(distance) <= 1) | near_zero)
    # Codes are 2^-4 of a value apart or more, so an error of 2^-18 takes 2^-13 of them across a
    # tie. bfloat16 has 16 numbers from one e4m3 code to the next: one of them is a tie, and half
    # of what is rounded to that comes from its other side.
    assert np.mean(distance == 0) > (0.9 if rounding == "staged" else 0.999)


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
