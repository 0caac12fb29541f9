"""fused_q: bits, bounds, strides, outputs, what is refused."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_mla import fused_q
from tests import fused_oracle, helpers, oracle
from tests.fused_helpers import assert_same_bits, cos_sin
from tests.helpers import random_bits, random_rows, rejected, surrounded

F32 = np.float32
DTYPES = [oracle.BFLOAT16, oracle.FLOAT16, oracle.FLOAT32]
any_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
SOFTMAX_SCALE = 128**-0.5
HEAD_SCALE = 3**-0.5


@dataclass
class Query:
    """Inputs of fused_q as plain NumPy values."""

    positions: np.ndarray
    q_pe: np.ndarray
    q_table: np.ndarray
    index_q: np.ndarray
    index_table: np.ndarray
    ql_nope: np.ndarray
    weights: np.ndarray
    scale: float = 0.37


def make_query(
    rng,
    *,
    tokens=4,
    heads=3,
    rank=20,
    rope=8,
    index_heads=3,
    index_dim=128,
    index_rope=64,
    dtype=oracle.BFLOAT16,
    weights_dtype=oracle.FLOAT32,
    positions=None,
) -> Query:
    return Query(
        positions=np.arange(tokens) if positions is None else np.asarray(positions),
        q_pe=random_rows(rng, (tokens, heads, rope), dtype),
        q_table=cos_sin(16, rope),
        index_q=random_rows(rng, (tokens, index_heads, index_dim), dtype),
        index_table=cos_sin(16, index_rope, oracle.BFLOAT16),
        ql_nope=random_rows(rng, (tokens, heads, rank), dtype),
        weights=random_rows(rng, (tokens, index_heads), weights_dtype),
    )


def arguments(backend, query: Query, **changes):
    given = {
        "positions": backend.array(query.positions),
        "q_pe": backend.array(query.q_pe),
        "q_pe_cos_sin_cache": backend.array(query.q_table),
        "index_q": backend.array(query.index_q),
        "index_q_cos_sin_cache": backend.array(query.index_table),
        "ql_nope": backend.array(query.ql_nope),
        "q_scale": query.scale,
        "index_weights": backend.array(query.weights),
        "index_weights_softmax_scale": SOFTMAX_SCALE,
        "index_weights_head_scale": HEAD_SCALE,
    }
    given.update(changes)
    return given


def expect(query: Query, *, quantize=True, interleave=False):
    """Give codes, weights and mqa_q, one number at a time."""
    tokens, heads = query.q_pe.shape[:2]
    tokens = len(query.positions)
    index_heads = query.index_q.shape[1]
    codes, weights, mqa = [], [], []
    with np.errstate(all="ignore"):
        for token in range(tokens):
            position = int(query.positions[token])
            for head in range(heads):
                rotary = fused_oracle.widen(query.q_pe[token, head])
                rotary, _ = fused_oracle.rope(rotary, query.q_table, position, False)
                if quantize:
                    row = np.concatenate([query.ql_nope[token, head].astype(F32), rotary])
                    mqa.append(oracle.encode_fp8(row, query.scale, "fp8_e4m3"))
                else:
                    mqa.append(fused_oracle.narrow(rotary, query.q_pe.dtype))
            for head in range(index_heads):
                values = fused_oracle.widen(query.index_q[token, head])
                values, _ = fused_oracle.rope(values, query.index_table, position, not interleave)
                row, scale = fused_oracle.key_codes(values)
                codes.append(row)
                weight = F32(query.weights[token, head])
                product = ((weight * scale) * F32(SOFTMAX_SCALE)) * F32(HEAD_SCALE)
                weights.append(fused_oracle.narrow([product], oracle.FLOAT32))
    return (
        np.array(codes).reshape(tokens, index_heads, -1),
        np.array(weights).reshape(tokens, index_heads),
        np.array(mqa).reshape(tokens, heads, -1),
    )


def as_codes(array):
    assert array.dtype in (oracle.E4M3, oracle.UINT8)
    return array.view(np.uint8)


def check(backend, query: Query, *, quantize=True, interleave=False, **changes):
    given = arguments(
        backend, query, quantize_mqa=quantize, index_rope_interleave=interleave, **changes
    )
    codes, weights, mqa = (backend.to_numpy(result) for result in fused_q(**given))
    want_codes, want_weights, want_mqa = expect(query, quantize=quantize, interleave=interleave)
    assert_same_bits(as_codes(codes), want_codes)
    assert_same_bits(weights, want_weights)
    assert_same_bits(as_codes(mqa) if quantize else mqa, want_mqa)


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


# --- arrays ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantize", [True, False])
def test_transposed_and_sliced_queries(backend, rng, quantize):
    """ql_nope from a batched product [H, T, R], q_pe the tail of [T, H, 192]."""
    query = make_query(rng, tokens=3, heads=4, rank=512, rope=64)
    base = np.ascontiguousarray(query.ql_nope.transpose(1, 0, 2))
    whole = np.full((3, 4, 192), np.nan, oracle.BFLOAT16)
    whole[..., 128:] = query.q_pe
    changes = {
        "ql_nope": backend.array(base).transpose(1, 0, 2),
        "q_pe": backend.array(whole)[..., 128:],
    }
    check(backend, query, quantize=quantize, **changes)


def test_inputs_inside_larger_buffers(backend, rng):
    query = make_query(rng)
    check(
        backend,
        query,
        q_pe=surrounded(backend, query.q_pe),
        ql_nope=surrounded(backend, query.ql_nope, lead=3, pad=1),
        index_q=surrounded(backend, query.index_q, pad=5),
        index_weights=surrounded(backend, query.weights),
        q_pe_cos_sin_cache=surrounded(backend, query.q_table),
        index_q_cos_sin_cache=surrounded(backend, query.index_table, pad=1),
    )


def test_longer_inputs_are_padding(backend, rng):
    query = make_query(rng, tokens=5)
    query.positions = query.positions[:3]
    check(backend, query)


def test_no_token_at_all(backend, rng):
    query = make_query(rng, tokens=0)
    codes, weights, mqa = fused_q(**arguments(backend, query))
    assert backend.to_numpy(codes).shape == (0, 3, 128)
    assert backend.to_numpy(weights).shape == (0, 3)
    assert backend.to_numpy(mqa).shape == (0, 3, 28)


def test_inputs_stay_as_they_are(backend, rng):
    query = make_query(rng)
    given = arguments(backend, query)
    before = {
        name: backend.to_numpy(value).copy()
        for name, value in given.items()
        if not isinstance(value, float)
    }
    for quantize in (True, False):
        fused_q(**given, quantize_mqa=quantize)
    for name, values in before.items():
        assert_same_bits(backend.to_numpy(given[name]), values)


@pytest.mark.parametrize("code_dtype", [np.uint8, oracle.E4M3])
@pytest.mark.parametrize("quantize", [True, False])
def test_outputs_of_the_caller_are_filled_and_returned(backend, rng, code_dtype, quantize):
    query = make_query(rng)
    want_codes, want_weights, want_mqa = expect(query, quantize=quantize)
    mqa_dtype = code_dtype if quantize else oracle.BFLOAT16
    width = want_mqa.shape[2]
    # A row more than needed, and room behind each row: both stay as they are.
    codes = backend.array(np.full((5, 3, 132), 0xA5, np.uint8).view(code_dtype))
    weights = backend.array(np.full((5, 4), 7, F32))
    mqa = backend.array(np.full((5, 3, width + 4), 3).astype(F32).astype(mqa_dtype))
    outs = {
        "index_q_out": codes[..., :128],
        "index_weights_out": weights[:, :3],
        "mqa_q_out": mqa[..., :width],
    }
    results = fused_q(**arguments(backend, query, quantize_mqa=quantize, **outs))
    assert [result is out for result, out in zip(results, outs.values(), strict=True)] == [True] * 3
    got = backend.to_numpy(codes).view(np.uint8)
    assert_same_bits(got[:4, :, :128], want_codes)
    assert np.all(got[4:] == 0xA5)
    assert np.all(got[:, :, 128:] == 0xA5)
    got = backend.to_numpy(weights)
    assert_same_bits(got[:4, :3], want_weights)
    assert np.all(got[4:] == 7)
    assert np.all(got[:, 3:] == 7)
    got = backend.to_numpy(mqa)
    assert_same_bits(got[:4, :, :width].view(want_mqa.dtype), want_mqa)
    assert np.all(got[4:].astype(F32) == 3)
    assert np.all(got[:, :, width:].astype(F32) == 3)


@pytest.mark.parametrize("quantize", [True, False])
def test_without_an_indexer_its_arguments_are_not_looked_at(backend, rng, quantize):
    query = make_query(rng)
    unused = {
        "index_q": None,
        "index_q_cos_sin_cache": None,
        "index_weights": None,
        "index_weights_softmax_scale": None,
        "index_weights_head_scale": None,
        "index_q_out": backend.array(np.full((4, 3, 128), 0xA5, np.uint8)),
    }
    codes, weights, mqa = fused_q(
        **arguments(backend, query, has_indexer=False, quantize_mqa=quantize, **unused)
    )
    assert codes is None
    assert weights is None
    assert np.all(backend.to_numpy(unused["index_q_out"]) == 0xA5)
    want = expect(query, quantize=quantize)[2]
    got = backend.to_numpy(mqa)
    assert_same_bits(as_codes(got) if quantize else got, want)


def test_an_unquantised_query_needs_neither_scale_nor_latent_part(backend, rng):
    query = make_query(rng)
    check(backend, query, quantize=False, ql_nope=None, q_scale=None)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_positions_of_both_widths(backend, rng, dtype):
    query = make_query(rng)
    query.positions = query.positions.astype(dtype)
    check(backend, query)


@pytest.mark.parametrize(
    "make",
    [float, F32, np.float64, np.asarray, lambda x: np.array([x], F32)],
    ids=["float", "float32", "float64", "0-d array", "[1] array"],
)
def test_kinds_of_scales(backend, rng, make):
    query = make_query(rng)
    query.scale = 0.5
    check(backend, query, q_scale=make(F32(0.5)))


# --- frameworks -----------------------------------------------------------------------------------


def test_torch_gets_torch_float8(rng):
    torch = pytest.importorskip("torch")
    query = make_query(rng)

    def tensor(value):
        if not isinstance(value, np.ndarray):
            return value
        if value.dtype == oracle.BFLOAT16:
            return torch.from_numpy(value.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(value)

    given = {name: tensor(value) for name, value in arguments(helpers.Backend(), query).items()}
    given["q_scale"] = torch.tensor(query.scale)
    codes, weights, mqa = fused_q(**given)
    assert codes.dtype == mqa.dtype == torch.float8_e4m3fn
    assert weights.dtype == torch.float32
    want_codes, want_weights, want_mqa = expect(query)
    assert_same_bits(codes.view(torch.uint8).numpy(), want_codes)
    assert_same_bits(weights.numpy(), want_weights)
    assert_same_bits(mqa.view(torch.uint8).numpy(), want_mqa)
    _, _, plain = fused_q(**given, quantize_mqa=False)
    assert plain.dtype == torch.bfloat16


def test_jax_gets_jax_float8(rng):
    jax = pytest.importorskip("jax")
    query = make_query(rng)
    query.positions = query.positions.astype(np.int32)
    given = {
        name: jax.numpy.asarray(value) if isinstance(value, np.ndarray) else value
        for name, value in arguments(helpers.Backend(), query).items()
    }
    results = fused_q(**given)
    assert all(isinstance(result, jax.Array) for result in results)
    assert results[0].dtype == results[2].dtype == jax.numpy.float8_e4m3fn
    want_codes, want_weights, want_mqa = expect(query)
    assert_same_bits(np.asarray(results[0]).view(np.uint8), want_codes)
    assert_same_bits(np.asarray(results[1]), want_weights)
    assert_same_bits(np.asarray(results[2]).view(np.uint8), want_mqa)


def test_numpy_gets_ml_dtypes_float8(rng):
    codes, _, mqa = fused_q(**arguments(helpers.Backend(), make_query(rng)))
    assert codes.dtype == mqa.dtype == oracle.E4M3


# --- what is refused ------------------------------------------------------------------------------


def bf16(*shape):
    return np.zeros(shape, oracle.BFLOAT16)


REFUSED = [
    ("positions", np.zeros(4), TypeError, ["int32 or int64", "float64"]),
    ("positions", np.zeros((4, 1), np.int64), ValueError, ["[T]", "[4, 1]"]),
    ("q_pe", bf16(4, 24), ValueError, ["[T, H, P]", "[4, 24]"]),
    ("q_pe", bf16(3, 3, 8), ValueError, ["4 tokens", "[3, 3, 8]"]),
    ("q_pe", bf16(4, 3, 16)[..., ::2], ValueError, ["stride 1"]),
    ("q_pe", np.zeros((4, 3, 8), np.int16), TypeError, ["bfloat16", "int16"]),
    ("q_pe_cos_sin_cache", np.zeros((16, 6), F32), ValueError, ["[positions, 8]", "[16, 6]"]),
    ("q_pe_cos_sin_cache", np.zeros((16, 8), np.int32), TypeError, ["float32", "int32"]),
    ("q_pe_cos_sin_cache", None, TypeError, ["NoneType"]),
    ("ql_nope", bf16(4, 2, 20), ValueError, ["[T, 3, R]", "[4, 2, 20]"]),
    ("ql_nope", np.zeros((4, 3, 20), F32), TypeError, ["dtype of q_pe (bfloat16)", "float32"]),
    ("ql_nope", None, TypeError, ["NoneType"]),
    ("q_scale", None, ValueError, ["scale", "None"]),
    ("q_scale", 0.0, ValueError, ["> 0", "0.0"]),
    ("q_scale", np.ones(2, F32), ValueError, ["one element", "[2]"]),
    ("q_scale", "1", TypeError, ["str"]),
    ("index_q", bf16(4, 128), ValueError, ["[T, I, D]", "[4, 128]"]),
    ("index_q", np.zeros((4, 3, 128), F32), TypeError, ["dtype of q_pe", "float32"]),
    ("index_q", None, TypeError, ["NoneType"]),
    ("index_q_cos_sin_cache", np.zeros((16, 130), F32), ValueError, ["at most 128", "130"]),
    ("index_q_cos_sin_cache", np.zeros((16, 7), F32), ValueError, ["even", "[16, 7]"]),
    ("index_q_cos_sin_cache", np.zeros((16, 0), F32), ValueError, ["above 0", "[16, 0]"]),
    ("index_weights", np.zeros((4, 2), F32), ValueError, ["[T, 3]", "[4, 2]"]),
    ("index_weights", np.zeros((4, 3)), TypeError, ["float64"]),
    ("index_weights_softmax_scale", None, TypeError, ["number", "NoneType"]),
    ("index_weights_head_scale", float("nan"), ValueError, ["finite", "nan"]),
    ("index_weights_head_scale", 1e39, ValueError, ["finite", "1e+39"]),
    ("mqa_q_out", np.zeros((4, 3, 27), np.uint8), ValueError, ["[T, 3, 28]", "[4, 3, 27]"]),
    ("mqa_q_out", bf16(4, 3, 28), TypeError, ["uint8 or float8_e4m3fn", "bfloat16"]),
    ("index_q_out", np.zeros((3, 3, 128), np.uint8), ValueError, ["4 tokens"]),
    ("index_q_out", np.zeros((4, 3, 128), oracle.E5M2), TypeError, ["float8_e5m2"]),
    ("index_weights_out", np.zeros((4, 3), oracle.BFLOAT16), TypeError, ["float32", "bfloat16"]),
    ("index_weights_out", np.broadcast_to(np.zeros(3, F32), (4, 3)), ValueError, ["read-only"]),
    ("stream", object(), ValueError, ["host memory"]),
    (
        "ql_nope",
        helpers.FakeDevice((4, 3, 20), "<f2", dtype="torch.bfloat16"),
        ValueError,
        ["same CUDA device", "cuda:0"],
    ),
]


@pytest.mark.parametrize(
    ("name", "value", "exception", "fragments"),
    REFUSED,
    ids=[f"{case[0]}-{number}" for number, case in enumerate(REFUSED)],
)
def test_what_does_not_fit_is_refused_and_nothing_written(rng, name, value, exception, fragments):
    query = make_query(rng)
    mqa = np.full((4, 3, 28), 0xA5, np.uint8)
    given = arguments(helpers.Backend(), query, mqa_q_out=mqa)
    given[name] = value
    with rejected(exception, "fused_q", name, *fragments):
        fused_q(**given)
    assert np.all(mqa == 0xA5)


def test_an_unquantised_output_has_the_inputs_dtype(rng):
    query = make_query(rng)
    given = arguments(helpers.Backend(), query, quantize_mqa=False)
    with rejected(TypeError, "fused_q", "mqa_q_out", "bfloat16", "uint8"):
        fused_q(**given, mqa_q_out=np.zeros((4, 3, 8), np.uint8))
