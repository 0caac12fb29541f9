"""Launching the query kernel: RoPE and fp8 of queries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cupy_mla import dtypes
from cupy_mla._arrays import ArrayRef, packed_strides
from cupy_mla._plan_fused import FusedQInputs, FusedQPlan, Operand
from cupy_mla.dtypes import DType
from cupy_mla.layouts import get_layout

from . import params, params_fused, registry
from .compiler import load
from .context import number_type, rope_table
from .device import Device
from .geometry import QueryShape, query_shape
from .prepared import PreparedLaunch

Array = np.ndarray[Any, Any]

_ADDRESSES = 11
#: What the kernel is built for: its codes, whatever it is launched for.
_LAYOUT = get_layout("fp8_e4m3")

#: Shape and dtype of an output.
Output = tuple[tuple[int, ...], DType]


def outputs(plan: FusedQPlan) -> tuple[Output, Output | None, Output | None]:
    """Return shape and dtype of mqa_q, of index_q and of the indexer's weights."""
    mqa = (plan.mqa_shape, dtypes.FLOAT8_E4M3 if plan.quantize_mqa else plan.input_dtype)
    if plan.index_q is None:
        return mqa, None, None
    shape = (plan.tokens, *plan.index_q.shape[1:])
    return mqa, (shape, dtypes.FLOAT8_E4M3), (shape[:2], dtypes.FLOAT32)


def addresses(
    inputs: FusedQInputs, mqa: ArrayRef, index_q: ArrayRef | None, weights: ArrayRef | None
) -> tuple[int, ...]:
    """Return where the arrays lie, in the order of the kernel's arguments."""
    scale = inputs.q_scale
    return (
        inputs.positions.ptr,
        inputs.q_pe.ptr,
        inputs.q_table.ptr,
        _address(inputs.ql_nope),
        scale.ptr if isinstance(scale, ArrayRef) else 0,
        _address(inputs.index_q),
        _address(inputs.index_table),
        _address(inputs.index_weights),
        mqa.ptr,
        _address(index_q),
        _address(weights),
    )


def _address(ref: ArrayRef | None) -> int:
    return 0 if ref is None else ref.ptr


def given_outputs(
    inputs: FusedQInputs,
) -> tuple[ArrayRef | None, ArrayRef | None, ArrayRef | None]:
    """Return the caller's mqa_q, index_q and weights."""
    return inputs.mqa_q_out, inputs.index_q_out, inputs.index_weights_out


def arrays(inputs: FusedQInputs) -> list[ArrayRef]:
    """Return the arrays that are read."""
    parts = (
        inputs.positions,
        inputs.q_pe,
        inputs.q_table,
        inputs.ql_nope,
        inputs.q_scale,
        inputs.index_q,
        inputs.index_table,
        inputs.index_weights,
    )
    return [ref for ref in parts if isinstance(ref, ArrayRef)]


def by_address(
    plan: FusedQPlan,
    prepared: PreparedLaunch,
    current_stream: Callable[[], int],
    new_output: Callable[[Output], ArrayRef],
) -> Callable[..., tuple[Any, Any, Any]]:
    """Return the launch by the addresses of the inputs, then of index_q, its weights and mqa_q.

    It returns these three as new arrays where no address is given for them.
    """
    launch = prepared.by_address(current_stream)
    mqa_output, index_output, weights_output = outputs(plan)
    is_quantised, has_indexer = plan.ql_nope is not None, plan.index_q is not None

    def fill(address: int, output: Output | None) -> tuple[int, Any]:
        if address or output is None:
            return address, None
        ref = new_output(output)
        return ref.ptr, ref.owner

    def run(
        positions: int,
        q_pe: int,
        q_table: int,
        index_q: int,
        index_table: int,
        ql_nope: int,
        q_scale: int,
        index_weights: int,
        index_q_out: int,
        weights_out: int,
        mqa_out: int,
    ) -> tuple[Any, Any, Any]:
        # What a call has no use for may be given all the same.
        if not is_quantised:
            ql_nope = q_scale = 0
        index: tuple[int, int, int] = (index_q, index_table, index_weights)
        if not has_indexer:
            index, index_q_out, weights_out = (0, 0, 0), 0, 0
        mqa_out, mqa = fill(mqa_out, mqa_output)
        index_q_out, codes = fill(index_q_out, index_output)
        weights_out, weights = fill(weights_out, weights_output)
        launch(
            positions, q_pe, q_table, ql_nope, q_scale, *index, mqa_out, index_q_out, weights_out
        )
        return codes, weights, mqa

    return run


def prepare(device: Device, plan: FusedQPlan, scale: float | None) -> PreparedLaunch | None:
    """Prepare a call; None where there is nothing to do.

    Parameters
    ----------
    device : Device
    plan : FusedQPlan
    scale : float or None
        That of mqa_q where it is no array.
    """
    heads = plan.q_pe.shape[1]
    index_heads = 0 if plan.index_q is None else plan.index_q.shape[1]
    if plan.tokens * (heads + index_heads) == 0:
        return None
    shape = query_shape(
        plan.operation,
        tokens=plan.tokens,
        heads=heads,
        index_heads=index_heads,
        has_latents=plan.quantize_mqa,
        sm_count=device.sm_count,
    )
    arguments = _arguments(plan, shape)
    if scale is not None:
        arguments["scale_value"] = scale
    written = sum(
        int(np.prod(size)) * dtype.itemsize for size, dtype in filter(None, outputs(plan))
    )
    arguments["stream_stores"] = written > device.l2_bytes
    special = registry.find("query", _LAYOUT.name, plan.input_dtype.name)
    function = load(device, special, _LAYOUT)
    return PreparedLaunch(device, function, shape.launch, arguments, _ADDRESSES)


def _strides(operand: Operand | None, output: Output | None = None) -> tuple[int, ...]:
    """Return the strides of a token and a head; of a packed output where none was given."""
    if operand is not None:
        return operand.strides[:-1]
    return packed_strides(output[0], output[1].itemsize)[:-1] if output is not None else (0, 0)


def _arguments(plan: FusedQPlan, shape: QueryShape) -> Array:
    """Fill in all but addresses and the scale."""
    arguments = params_fused.QUERY_PARAMS.zeros()
    mqa, index_q, weights = outputs(plan)
    arguments["q_pe_strides"] = _strides(plan.q_pe)
    arguments["ql_nope_strides"] = _strides(plan.ql_nope)
    arguments["mqa_strides"] = _strides(plan.mqa_q_out, mqa)
    arguments["rope"] = rope_table(plan.q_table, is_neox=False)
    arguments["position_bytes"] = plan.positions.dtype.itemsize
    arguments["heads"] = plan.q_pe.shape[1]
    arguments["lora_rank"] = 0 if plan.ql_nope is None else plan.ql_nope.width
    if plan.index_q is not None and plan.index_weights is not None:
        arguments["index_q_strides"] = _strides(plan.index_q)
        arguments["index_strides"] = _strides(plan.index_q_out, index_q)
        arguments["weights_stride"] = plan.index_weights.strides[0]
        arguments["weights_out_stride"] = _strides(plan.index_weights_out, weights)[0]
        arguments["index_rope"] = rope_table(plan.index_table, is_neox=plan.index_is_neox)
        arguments["index_heads"], arguments["index_width"] = plan.index_q.shape[1:]
        arguments["weights_type"] = number_type(plan.index_weights)
        arguments["softmax_scale"] = plan.softmax_scale
        arguments["head_scale"] = plan.head_scale
    arguments["token_blocks"] = params.divisor(shape.token_blocks)
    arguments["mqa_blocks"] = shape.mqa_blocks
    arguments["mqa_block_heads"] = shape.mqa_block_heads
    arguments["index_block_heads"] = shape.index_block_heads
    return arguments
