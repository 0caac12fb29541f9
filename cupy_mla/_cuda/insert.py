"""Launching the insert kernel: a plan and a target become argument structures and grids."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_mla._plan import GroupedPointers, InsertInputs, InsertPlan

from . import params, registry
from .compiler import load
from .device import Device
from .geometry import insert_shape
from .target import CallTarget, CudaTarget, LayerGroup, layer_entry

Array = np.ndarray[Any, Any]


def insert(
    device: Device,
    plan: InsertPlan,
    inputs: InsertInputs,
    target: CudaTarget | CallTarget,
    stream: int,
) -> None:
    """Store rows: a launch a group of layers, more where each layer has slots of its own."""
    if plan.tokens == 0:
        return
    arguments = _arguments(plan, inputs)
    arguments["layers"] = target.table_ptr
    arguments["counters"] = target.counters_ptr
    arguments["errors"] = target.errors_ptr
    arguments["collect_stats"] = target.collect_stats
    arguments["layer"] = target.entry
    for group in target.groups:
        _launch_group(device, plan, inputs, group, arguments.copy(), stream)


def insert_grouped(
    device: Device,
    plan: InsertPlan,
    inputs: InsertInputs,
    pointers: GroupedPointers,
    stream: int,
) -> None:
    """Store rows in caches that are known by device pointers alone."""
    if plan.tokens == 0 or plan.num_layers == 0:
        return
    arguments = _arguments(plan, inputs)
    arguments["cache_ptrs"] = pointers.cache_ptrs.ptr
    arguments["scales"] = pointers.scales.ptr if pointers.scales is not None else 0
    arguments["layer"] = layer_entry(0, pointers.cache, None, 0)
    group = LayerGroup(pointers.cache.layout, tuple(range(plan.num_layers)), 0)
    _launch_group(device, plan, inputs, group, arguments, stream)


def _arguments(plan: InsertPlan, inputs: InsertInputs) -> Array:
    """Fill in what all launches of an insert share."""
    arguments = params.INSERT_PARAMS.zeros()
    arguments["kv_c"] = (inputs.kv_c.ptr, *plan.kv_c_strides)
    if inputs.k_pe is not None:
        arguments["k_pe"] = (inputs.k_pe.ptr, *plan.k_pe_strides)
    if not isinstance(inputs.slots, tuple):
        arguments["slots"] = (inputs.slots.ptr, *plan.slot_strides)
    arguments["tokens"] = plan.tokens
    arguments["slot_bytes"] = plan.slot_dtype.itemsize
    arguments["lora_rank"] = plan.kv_lora_rank
    arguments["rope_dim"] = plan.rope_dim
    return arguments


def _launch_group(
    device: Device,
    plan: InsertPlan,
    inputs: InsertInputs,
    group: LayerGroup,
    arguments: Array,
    stream: int,
) -> None:
    specialisation = registry.find("insert", group.layout.name, plan.input_dtype.name)
    function = load(device, specialisation, group.layout)
    by_list = isinstance(inputs.slots, tuple)
    count = len(group.layers)
    step = params.SLOT_LIST_LAYERS if by_list else count
    written = count * plan.tokens * group.layout.row_bytes
    arguments["layers_are_mapped"] = group.mapped
    arguments["stream_stores"] = written > device.l2_bytes
    for start in range(0, count, step):
        layers = group.layers[start : start + step]
        if by_list and not _fill_slots(arguments, inputs, plan, layers):
            continue
        shape = insert_shape(
            specialisation,
            layers=len(layers),
            tokens=plan.tokens,
            lora_rank=plan.kv_lora_rank,
            rope_dim=plan.rope_dim,
            sm_count=device.sm_count,
        )
        arguments["first_layer"] = group.first + start
        arguments["blocks_per_layer"] = params.divisor(shape.blocks_per_layer)
        device.launch(function, shape.grid, shape.block, arguments, stream)


def _fill_slots(
    arguments: Array, inputs: InsertInputs, plan: InsertPlan, layers: tuple[int, ...]
) -> bool:
    """Put the slots of these layers into the arguments; say whether any layer has some."""
    arguments["use_slot_list"] = 1
    found = False
    for place, layer in enumerate(layers):
        ref = inputs.slots[layer] if isinstance(inputs.slots, tuple) else inputs.slots
        pointer = 0 if ref is None else ref.ptr
        arguments["slot_list"][0, place] = (pointer, plan.slot_strides[1])
        found = found or ref is not None
    return found
