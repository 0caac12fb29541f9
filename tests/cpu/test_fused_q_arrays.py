"""fused_q: strides, outputs, frameworks, what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_mla import fused_q
from tests import helpers, oracle
from tests.fused_helpers import assert_same_bits
from tests.helpers import rejected, surrounded
from tests.query_helpers import (
    arguments,
    as_codes,
    check,
    expect,
    make_query,
)

F32 = np.float32


# --- arrays ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantize", [True, False])
def test_transposed_and_sliced_queries(backend, rng, quantize):
    """ql_nope from a batched product [H, T, R], q_pe the tail of [T, H, 192]."""
    query = make_query(rng, tokens=3, heads=4, rank=512, rope=64)
    base = np.ascontiguousarray(query.ql_nope.transpose(1, 0, 2))
    whole = np.full((3, 4, 192), np.nan, oracle.BFLOAT16)
    whole[..., 128:] = query.q_pe
    changes = {
        "ql_nope": backend.array(base.transpose(1, 0, 2)),
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
    scale = make(F32(0.5))
    check(backend, query, q_scale=backend.array(scale) if isinstance(scale, np.ndarray) else scale)


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
    ("ql_nope", bf16(4, 3, 0), ValueError, ["R of at least 1", "[4, 3, 0]"]),
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
