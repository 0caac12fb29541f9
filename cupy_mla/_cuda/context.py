"""Launching the context kernel: norm, RoPE and insert of all layers from one projection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cupy_mla._plan_fused import ContextInputs, ContextPlan, Operand

from . import params, params_fused, registry
from .compiler import load
from .device import Device
from .geometry import warp_rows_shape
from .prepared import PreparedLaunch, together
from .target import CudaTarget, LayerGroup

Array = np.ndarray[Any, Any]

_SLOT_ARRAY_BYTES = params.SLOT_ARRAY.dtype.itemsize
_SLOT_LIST_OFFSET = params_fused.CONTEXT_PARAMS.offset("slot_list")
#: kv, positions, slots, weight, table.
_ADDRESSES = 5


class PreparedContext:
    """The launches of an `insert_context`, for all arrays of one plan.

    Parameters
    ----------
    launches : sequence of (PreparedLaunch, tuple of int or None)
        Each with its layers where these have slots of their own.
    """

    __slots__ = ("_launches",)

    def __init__(self, launches: Sequence[tuple[PreparedLaunch, tuple[int, ...] | None]]) -> None:
        self._launches = launches

    def run(self, inputs: ContextInputs, stream: int) -> None:
        """Launch with the addresses of a step's arrays."""
        listed_slots = inputs.slots if isinstance(inputs.slots, tuple) else ()
        addresses = (
            inputs.kv.ptr,
            0 if inputs.positions is None else inputs.positions.ptr,
            0 if isinstance(inputs.slots, tuple) else inputs.slots.ptr,
            inputs.weight.ptr,
            0 if inputs.table is None else inputs.table.ptr,
        )
        for launch, listed in self._launches:
            if listed is None:
                launch.run(addresses, stream)
                continue
            slots = [listed_slots[layer] for layer in listed]
            if any(ref is not None for ref in slots):
                places = [
                    (_SLOT_LIST_OFFSET + place * _SLOT_ARRAY_BYTES, 0 if ref is None else ref.ptr)
                    for place, ref in enumerate(slots)
                ]
                launch.run(addresses, stream, places)

    def by_address(self, current_stream: Callable[[], int]) -> Callable[..., None]:
        """Return what launches by the addresses of kv, positions, slots, weights and table.

        Not for a list of slots.
        """
        return together([launch.by_address(current_stream) for launch, _ in self._launches])


def prepare(
    device: Device, plan: ContextPlan, target: CudaTarget, *, listed: bool
) -> PreparedContext:
    """Prepare inserts into a writer's caches: a launch a group of layers.

    Parameters
    ----------
    device : Device
    plan : ContextPlan
    target : CudaTarget
    listed : bool
        Whether each layer has a slot array of its own, or none.
    """
    if plan.tokens == 0:
        return PreparedContext([])
    arguments = _arguments(plan, target)
    arguments["use_slot_list"] = listed
    launches: list[tuple[PreparedLaunch, tuple[int, ...] | None]] = []
    for group in target.groups:
        launches += _group_launches(device, plan, group, arguments.copy(), listed)
    return PreparedContext(launches)


def number_type(operand: Operand) -> int:
    """Return the ``NumberType`` of an array."""
    return params.ELEMENT_KINDS[operand.dtype.name]


def rope_table(table: Operand | None, *, is_neox: bool) -> tuple[int, ...]:
    """Return a ``RopeTable``; all zeros without a table."""
    if table is None:
        return (0,) * len(params_fused.ROPE_TABLE.dtype.names or ())
    rows, width = table.shape
    pairs = (1, width // 2) if is_neox else (2, 1)
    return table.strides[0], rows, number_type(table), width // 2, *pairs


def _arguments(plan: ContextPlan, target: CudaTarget) -> Array:
    """Fill in what all launches share."""
    arguments = params_fused.CONTEXT_PARAMS.zeros()
    arguments["kv_layer_stride"], arguments["kv_token_stride"] = plan.kv_strides
    arguments["slot_layer_stride"], arguments["slot_token_stride"] = plan.slot_strides
    arguments["slot_list"]["token_stride"] = plan.slot_strides[1]
    arguments["layers"] = target.table_ptr
    arguments["counters"] = target.counters_ptr
    arguments["errors"] = target.errors_ptr
    arguments["collect_stats"] = target.collect_stats
    norm = arguments["norm"]
    norm["weight_stride"] = plan.weight.strides[0]
    norm["weight_type"] = number_type(plan.weight)
    norm["lora_rank"] = plan.kv_lora_rank
    norm["eps"] = plan.eps
    norm["staged"] = plan.rounding == "staged"
    norm["rope"] = rope_table(plan.table, is_neox=plan.is_neox)
    arguments["tokens"] = plan.tokens
    arguments["slot_bytes"] = plan.slot_dtype.itemsize
    if plan.positions is not None:
        arguments["position_bytes"] = plan.positions.dtype.itemsize
    return arguments


def _group_launches(
    device: Device, plan: ContextPlan, group: LayerGroup, arguments: Array, listed: bool
) -> list[tuple[PreparedLaunch, tuple[int, ...] | None]]:
    """Prepare a group's launches: one, or one for every 16 layers with slots of their own."""
    specialisation = registry.find("context", group.layout.name, plan.input_dtype.name)
    function = load(device, specialisation, group.layout)
    count = len(group.layers)
    step = params.SLOT_LIST_LAYERS if listed else count
    arguments["layers_are_mapped"] = group.mapped
    arguments["stream_stores"] = count * plan.tokens * group.layout.row_bytes > device.l2_bytes
    launches: list[tuple[PreparedLaunch, tuple[int, ...] | None]] = []
    for start in range(0, count, step):
        layers = group.layers[start : start + step]
        shape = warp_rows_shape(
            plan.operation, layers=len(layers), tokens=plan.tokens, sm_count=device.sm_count
        )
        arguments["first_layer"] = group.first + start
        arguments["blocks_per_layer"] = params.divisor(shape.blocks_per_layer)
        arguments["block_tokens"] = shape.block_tokens
        launch = PreparedLaunch(device, function, shape, arguments, _ADDRESSES)
        launches.append((launch, layers if listed else None))
    return launches
