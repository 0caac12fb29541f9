"""fused_q: queries, tables, weights and outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cupy_mla import dtypes
from cupy_mla._arrays import CPU, ArrayRef
from cupy_mla._plan import Scale
from cupy_mla._plan_fused import FusedQInputs, FusedQPlan, Operand
from cupy_mla.dtypes import DType
from cupy_mla.errors import check_flag, reject_value

from .checks import array, check_outputs, shape_text
from .operands import (
    Place,
    described,
    destination,
    indices,
    number,
    operand,
    same_dtype,
    table,
)
from .scales import layer_scale

_OWNER = "q_pe"


@dataclass(frozen=True)
class QueryArguments:
    """What `fused_q` takes, unchecked and under the caller's names."""

    positions: Any
    q_pe: Any
    q_pe_cos_sin_cache: Any
    index_q: Any
    index_q_cos_sin_cache: Any
    ql_nope: Any
    q_scale: Any
    index_weights: Any
    index_weights_softmax_scale: Any
    index_weights_head_scale: Any
    has_indexer: Any
    index_rope_interleave: Any
    quantize_mqa: Any
    index_q_out: Any
    index_weights_out: Any
    mqa_q_out: Any


def fused_q(operation: str, given: QueryArguments) -> tuple[FusedQPlan, FusedQInputs]:
    """Validate the arrays of `fused_q`."""
    quantize_mqa = check_flag(operation, "quantize_mqa", given.quantize_mqa)
    has_indexer = check_flag(operation, "has_indexer", given.has_indexer)
    interleave = check_flag(operation, "index_rope_interleave", given.index_rope_interleave)
    q_pe = array(operation, "q_pe", given.q_pe)
    place = (q_pe.device or CPU, _OWNER)
    positions = indices(operation, "positions", given.positions, place)
    tokens = positions.shape[0]
    q_pe = operand(operation, "q_pe", q_pe, ("T", "H", "P"), place, tokens=tokens)
    q_table = table(operation, "q_pe_cos_sin_cache", given.q_pe_cos_sin_cache, q_pe.shape[2], place)
    ql_nope, q_scale, mqa_q_out = _mqa(operation, given, place, tokens, q_pe)
    index = _index(operation, given, place, tokens, q_pe)
    plan = FusedQPlan(
        operation=operation,
        device=place[0],
        tokens=tokens,
        input_dtype=q_pe.dtype,
        quantize_mqa=quantize_mqa,
        has_indexer=has_indexer,
        index_is_neox=not interleave,
        softmax_scale=index.softmax_scale,
        head_scale=index.head_scale,
        positions=Operand.of(positions),
        q_pe=Operand.of(q_pe),
        q_table=Operand.of(q_table),
        ql_nope=described(ql_nope),
        index_q=described(index.q),
        index_table=described(index.table),
        index_weights=described(index.weights),
        mqa_q_out=described(mqa_q_out),
        index_q_out=described(index.q_out),
        index_weights_out=described(index.weights_out),
    )
    inputs = FusedQInputs(
        positions=positions,
        q_pe=q_pe,
        q_table=q_table,
        ql_nope=ql_nope,
        q_scale=q_scale,
        index_q=index.q,
        index_table=index.table,
        index_weights=index.weights,
        mqa_q_out=mqa_q_out,
        index_q_out=index.q_out,
        index_weights_out=index.weights_out,
    )
    check_outputs(
        operation,
        [
            ("index_q_out", index.q_out),
            ("index_weights_out", index.weights_out),
            ("mqa_q_out", mqa_q_out),
        ],
        [
            ("positions", positions),
            ("q_pe", q_pe),
            ("q_pe_cos_sin_cache", q_table),
            ("index_q", index.q),
            ("index_q_cos_sin_cache", index.table),
            ("ql_nope", ql_nope),
            ("q_scale", q_scale),
            ("index_weights", index.weights),
        ],
    )
    return plan, inputs


def _mqa(
    operation: str, given: QueryArguments, place: Place, tokens: int, q_pe: ArrayRef
) -> tuple[ArrayRef | None, Scale, ArrayRef | None]:
    """Validate what mqa_q is made of; ql_nope and q_scale only where they are quantised."""
    heads, rope = q_pe.shape[1:]
    ql_nope, scale, width = None, None, rope
    allowed: tuple[DType, ...] = (q_pe.dtype,)
    if given.quantize_mqa:
        shape = ("T", heads, "R")
        ql_nope = operand(operation, "ql_nope", given.ql_nope, shape, place, tokens=tokens)
        same_dtype(operation, "ql_nope", ql_nope, q_pe.dtype, "q_pe")
        if not ql_nope.shape[2]:
            expected = f"have shape [T, {heads}, R] with R of at least 1"
            reject_value(operation, "ql_nope", expected, list(ql_nope.shape))
        if given.q_scale is None:
            reject_value(operation, "q_scale", "be the scale of the fp8 query", None)
        scale = layer_scale(operation, "q_scale", given.q_scale, place[0], owner=_OWNER, live=False)
        width += ql_nope.shape[2]
        allowed = (dtypes.UINT8, dtypes.FLOAT8_E4M3)
    out = None
    if given.mqa_q_out is not None:
        out = destination(
            operation,
            "mqa_q_out",
            given.mqa_q_out,
            ("T", heads, width),
            place,
            tokens=tokens,
            allowed=allowed,
        )
    return ql_nope, scale, out


@dataclass(frozen=True)
class _Index:
    softmax_scale: float = 0.0
    head_scale: float = 0.0
    q: ArrayRef | None = None
    table: ArrayRef | None = None
    weights: ArrayRef | None = None
    q_out: ArrayRef | None = None
    weights_out: ArrayRef | None = None


def _index(
    operation: str, given: QueryArguments, place: Place, tokens: int, q_pe: ArrayRef
) -> _Index:
    """Validate the indexer's part; without an indexer nothing of it is looked at."""
    if not given.has_indexer:
        return _Index()
    q = operand(operation, "index_q", given.index_q, ("T", "I", "D"), place, tokens=tokens)
    same_dtype(operation, "index_q", q, q_pe.dtype, "q_pe")
    heads, width = q.shape[1:]
    argument = "index_q_cos_sin_cache"
    rotary = table(operation, argument, given.index_q_cos_sin_cache, None, place)
    if rotary.shape[1] > width:
        reject_value(
            operation, argument, f"have at most {width} elements a row", shape_text(rotary.shape)
        )
    argument = "index_weights"
    weights = operand(operation, argument, given.index_weights, ("T", heads), place, tokens=tokens)
    q_out, weights_out = None, None
    if given.index_q_out is not None:
        q_out = destination(
            operation,
            "index_q_out",
            given.index_q_out,
            ("T", heads, width),
            place,
            tokens=tokens,
            allowed=(dtypes.UINT8, dtypes.FLOAT8_E4M3),
        )
    if given.index_weights_out is not None:
        weights_out = destination(
            operation,
            "index_weights_out",
            given.index_weights_out,
            ("T", heads),
            place,
            tokens=tokens,
            allowed=(dtypes.FLOAT32,),
        )
    softmax = number(operation, "index_weights_softmax_scale", given.index_weights_softmax_scale)
    head = number(operation, "index_weights_head_scale", given.index_weights_head_scale)
    return _Index(softmax, head, q, rotary, weights, q_out, weights_out)
