"""Inputs of fused_q, and their expected results from the scalar oracle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_mla import fused_q
from tests import fused_oracle, helpers, oracle
from tests.fused_helpers import assert_same_bits, cos_sin
from tests.helpers import random_rows

F32 = np.float32
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
    rng: np.random.Generator,
    *,
    tokens: int = 4,
    heads: int = 3,
    rank: int = 20,
    rope: int = 8,
    index_heads: int = 3,
    index_dim: int = 128,
    index_rope: int = 64,
    dtype: Any = oracle.BFLOAT16,
    weights_dtype: Any = oracle.FLOAT32,
    positions: Any = None,
) -> Query:
    """Random inputs of fused_q; weights and tables of several dtypes."""
    return Query(
        positions=np.arange(tokens) if positions is None else np.asarray(positions),
        q_pe=random_rows(rng, (tokens, heads, rope), dtype),
        q_table=cos_sin(16, rope),
        index_q=random_rows(rng, (tokens, index_heads, index_dim), dtype),
        index_table=cos_sin(16, index_rope, oracle.BFLOAT16),
        ql_nope=random_rows(rng, (tokens, heads, rank), dtype),
        weights=random_rows(rng, (tokens, index_heads), weights_dtype),
    )


def arguments(backend: helpers.Backend, query: Query, **changes: Any) -> dict[str, Any]:
    """Give the arguments of fused_q by name, as the backend's arrays."""
    given: dict[str, Any] = {
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


def expect(
    query: Query, *, quantize: bool = True, interleave: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
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


def as_codes(array: np.ndarray) -> np.ndarray:
    """View codes as bytes."""
    assert array.dtype in (oracle.E4M3, oracle.UINT8)
    return array.view(np.uint8)


def check(
    backend: helpers.Backend,
    query: Query,
    *,
    quantize: bool = True,
    interleave: bool = False,
    **changes: Any,
) -> None:
    """Call fused_q and compare every bit with the scalar oracle."""
    given = arguments(
        backend, query, quantize_mqa=quantize, index_rope_interleave=interleave, **changes
    )
    codes, weights, mqa = (backend.to_numpy(result) for result in fused_q(**given))
    want_codes, want_weights, want_mqa = expect(query, quantize=quantize, interleave=interleave)
    assert_same_bits(as_codes(codes), want_codes)
    assert_same_bits(weights, want_weights)
    assert_same_bits(as_codes(mqa) if quantize else mqa, want_mqa)
