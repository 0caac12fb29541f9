"""fused_q: every bit, and the error of its arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_mla import fused_q
from tests import fused_oracle, helpers, oracle
from tests.fused_helpers import assert_same_bits, cos_sin
from tests.helpers import random_bits
from tests.query_helpers import (
    HEAD_SCALE,
    SOFTMAX_SCALE,
    Query,
    arguments,
    as_codes,
    check,
    expect,
    make_query,
)

F32 = np.float32
DTYPES = [oracle.BFLOAT16, oracle.FLOAT16, oracle.FLOAT32]
any_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


# --- bit for bit ----------------------------------------------------------------------------------


@any_dtype
@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize("interleave", [True, False])
def test_every_bit_is_the_oracles(backend, rng, dtype, quantize, interleave):
    query = make_query(rng, dtype=dtype, positions=[15, -1, 16, 2])  # two beyond the table
    check(backend, query, quantize=quantize, interleave=interleave)


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("index_heads", [1, 3, 8])
def test_any_number_of_heads(backend, rng, heads, index_heads):
    check(backend, make_query(rng, tokens=2, heads=heads, index_heads=index_heads))


@pytest.mark.parametrize(("rank", "rope"), [(512, 64), (1, 2), (513, 128), (33, 6)])
@pytest.mark.parametrize("quantize", [True, False])
def test_sizes_of_the_attention_query(backend, rng, rank, rope, quantize):
    check(backend, make_query(rng, tokens=2, rank=rank, rope=rope), quantize=quantize)


@pytest.mark.parametrize(("dim", "rope"), [(128, 2), (128, 128), (64, 64), (5, 4), (300, 30)])
@pytest.mark.parametrize("interleave", [True, False])
def test_sizes_of_the_indexers_query(backend, rng, dim, rope, interleave):
    query = make_query(rng, tokens=2, index_dim=dim, index_rope=rope)
    check(backend, query, interleave=interleave)


@any_dtype
def test_weights_of_each_dtype(backend, rng, dtype):
    check(backend, make_query(rng, weights_dtype=dtype))


@given(st.integers(0, 2**32 - 1), st.booleans(), st.booleans())
def test_any_bits(seed, quantize, interleave):
    rng = np.random.default_rng(seed)
    query = make_query(rng, tokens=2, rank=6, index_dim=16, index_rope=8)
    query.q_pe = random_bits(rng, query.q_pe.shape, oracle.BFLOAT16)
    query.ql_nope = random_bits(rng, query.ql_nope.shape, oracle.BFLOAT16)
    query.index_q = random_bits(rng, query.index_q.shape, oracle.BFLOAT16)
    query.index_q[0] = np.where(np.isfinite(query.index_q[0].astype(F32)), query.index_q[0], 1)
    query.weights = random_bits(rng, query.weights.shape, F32)
    check(helpers.Backend(), query, quantize=quantize, interleave=interleave)


def test_many_tokens_are_worked_on_in_pieces(backend, rng):
    query = make_query(rng, tokens=70, heads=64, rank=512, rope=64, index_heads=2)
    query.positions = query.positions % 13
    codes, weights, mqa = (
        backend.to_numpy(result) for result in fused_q(**arguments(backend, query))
    )
    some = [0, 28, 29, 69]
    part = Query(**vars(query))
    for name in ("positions", "q_pe", "index_q", "ql_nope", "weights"):
        setattr(part, name, getattr(query, name)[some])
    part.q_pe, part.ql_nope = part.q_pe[:, 60:], part.ql_nope[:, 60:]
    want_codes, want_weights, want_mqa = expect(part)
    assert_same_bits(as_codes(codes)[some], want_codes)
    assert_same_bits(weights[some], want_weights)
    assert_same_bits(as_codes(mqa)[some][:, 60:], want_mqa)


# --- within the error of the arithmetic -----------------------------------------------------------


def test_results_are_within_one_step_of_float64(backend, rng):
    """One rounding of a float32 value: at most one code, or one bfloat16 step, beside float64."""
    query = make_query(rng, tokens=16, heads=4, rank=512, rope=64, index_heads=4)
    for name in ("q_pe", "index_q", "ql_nope"):
        shape = getattr(query, name).shape
        setattr(query, name, rng.standard_normal(shape).astype(F32).astype(oracle.BFLOAT16))
    query.scale = 0.01
    exact_pe = fused_oracle.exact_rope(query.q_pe, query.q_table, query.positions, neox=False)
    codes, weights, mqa = (
        backend.to_numpy(result) for result in fused_q(**arguments(backend, query))
    )
    both = np.concatenate([query.ql_nope.astype(np.float64), exact_pe], axis=-1)
    exact = np.clip(both / float(F32(query.scale)), -448, 448)
    assert_within_one_code(as_codes(mqa), exact)
    _, _, plain = fused_q(**arguments(backend, query, quantize_mqa=False))
    error = np.abs(backend.to_numpy(plain).astype(np.float64) - exact_pe)
    largest = np.abs(query.q_pe.astype(np.float64)).max()
    assert np.all(error <= fused_oracle.bf16_ulp(exact_pe) / 2 + largest * 2.0**-22)

    exact_index = fused_oracle.exact_rope(
        query.index_q, query.index_table, query.positions, neox=True
    )
    raw = np.abs(exact_index).max(axis=-1) / 448
    scale = 2.0 ** np.ceil(np.log2(raw))
    assert np.all(np.abs(np.log2(raw) - np.round(np.log2(raw))) > 1e-6)  # none on the boundary
    assert_within_one_code(as_codes(codes), exact_index / scale[..., None])
    want = query.weights.astype(np.float64) * scale * SOFTMAX_SCALE * HEAD_SCALE
    np.testing.assert_allclose(weights, want, rtol=3 * 2.0**-24)


def assert_within_one_code(codes, exact):
    want = exact.astype(F32).astype(oracle.E4M3).view(np.uint8)
    distance = np.abs(fused_oracle.code_order(codes) - fused_oracle.code_order(want))
    # Below 2^-6 codes are 2^-9 apart: far more than what is lost where two products cancel.
    assert distance.max() <= 1
    assert np.mean(distance == 0) > 0.999


# --- numbers --------------------------------------------------------------------------------------


def rotate_one(backend, index_interleave=None):
    """Rotate [1, 2, 3, 4] by cos [0, 1] and sin [1, 0]."""
    x = np.array([[[1, 2, 3, 4]]], F32)
    table = np.array([[0, 1, 1, 0]], F32)
    query = Query(np.array([0]), x, table, x * 64, table, x, np.ones((1, 1), F32), 1.0)
    options = {} if index_interleave is None else {"index_rope_interleave": index_interleave}
    codes, weights, mqa = fused_q(**arguments(backend, query, **options))
    values = [backend.to_numpy(array) for array in (codes, weights, mqa)]
    return [
        array.view(oracle.E4M3).astype(F32) if array.dtype.itemsize == 1 else array
        for array in values
    ]


def test_pairs_and_halves(backend):
    _, _, mqa = rotate_one(backend)
    assert mqa[0, 0].tolist() == [1, 2, 3, 4, -2, 1, 3, 4]
    codes, weights, _ = rotate_one(backend, index_interleave=True)
    assert codes[0, 0].tolist() == [-128, 64, 192, 256]  # amax 256: s = 2^ceil(-0.8) = 1
    assert weights[0, 0] == (F32(1) * F32(SOFTMAX_SCALE)) * F32(HEAD_SCALE)
    codes, _, _ = rotate_one(backend, index_interleave=False)
    assert codes[0, 0].tolist() == [-192, 128, 64, 256]
    default, _, _ = rotate_one(backend)
    assert default.tolist() == codes.tolist()


@pytest.mark.parametrize(
    ("amax", "scale"),
    [(448.0, 1.0), (450.0, 2.0), (224.0, 0.5), (0.0, 2.0**-22), (1e-4, 2.0**-22), (57344.0, 128.0)],
)
def test_scales_of_an_indexer_query(backend, rng, amax, scale):
    query = make_query(rng, tokens=1, dtype=F32)
    query.index_q = np.zeros((1, 3, 128), F32)
    query.index_q[..., 100] = -amax  # behind the rotary part
    query.weights = np.ones((1, 3), F32)
    given = arguments(backend, query, index_weights_softmax_scale=1.0, index_weights_head_scale=1.0)
    codes, weights, _ = fused_q(**given)
    assert np.all(backend.to_numpy(weights) == scale)
    code = as_codes(backend.to_numpy(codes))[..., 100]
    assert np.all(code == oracle.encode_fp8(np.array([-amax], F32), scale, "fp8_e4m3"))


def test_factors_that_are_equal_give_equal_weights(backend, rng):
    """Calls are known again by equality, and 0.0 == -0.0: the sign of a zero must not matter."""
    query = make_query(rng, tokens=2, dtype=F32)
    bits = []
    for factor in (0.0, -0.0):
        given = arguments(backend, query, index_weights_head_scale=factor)
        bits.append(backend.to_numpy(fused_q(**given)[1]).view(np.uint32).tolist())
    assert bits[0] == bits[1]
    assert {0, 1 << 31} >= set(np.ravel(bits[0]).tolist())


def test_nan_does_not_decide_the_scale(backend, rng):
    query = make_query(rng, tokens=1, index_heads=1, dtype=F32)
    query.index_q = np.ones((1, 1, 128), F32)
    query.index_q[0, 0, 127] = np.nan
    query.index_table = cos_sin(16, 2)
    codes, weights, _ = fused_q(**arguments(backend, query))
    codes = as_codes(backend.to_numpy(codes))[0, 0]
    assert codes[127] == 0x7F
    assert np.all(codes[:127] == oracle.encode_fp8(np.ones(1, F32), 2.0**-8, "fp8_e4m3"))
    assert np.all(np.isfinite(backend.to_numpy(weights)))


@pytest.mark.parametrize("position", [-1, 16, 2**40, -(2**63)])
def test_a_position_outside_the_table_gives_zeros_where_it_would_rotate(backend, rng, position):
    query = make_query(rng, tokens=2, positions=[3, position])
    codes, _, mqa = (backend.to_numpy(array) for array in fused_q(**arguments(backend, query)))
    assert np.all(as_codes(mqa)[1, :, 20:] == 0)
    assert np.all(as_codes(codes)[1, :, :64] == 0)
    assert np.any(as_codes(mqa)[1, :, :20] != 0)
    _, _, plain = fused_q(**arguments(backend, query, quantize_mqa=False))
    assert np.all(backend.to_numpy(plain)[1].view(np.uint16) == 0)
    assert np.any(backend.to_numpy(plain)[0].view(np.uint16) != 0)
