"""Launching the insert kernel: a plan and a target become argument structures and grids.

What does not change between calls whose arrays look the same is prepared once; a call then
fills in pointers and launches.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from cupy_mla._plan import CachePlan, InsertPlan

from . import params, registry
from .compiler import load
from .device import Arguments, Device
from .geometry import insert_shape
from .target import CallTarget, CudaTarget, LayerGroup, layer_entry

Array = np.ndarray[Any, Any]

_HEAD = struct.Struct("<QqqQqqQqq")  # kv_c, k_pe, slots
_POINTER = struct.Struct("<Q")
_SLOT_ARRAY_BYTES = params.SLOT_ARRAY.dtype.itemsize
_SLOT_LIST_OFFSET = params.INSERT_PARAMS.offset("slot_list")
_PAIR = struct.Struct("<QQ")
#: Pairs of pointers that single and grouped calls fill in too: a cache and its scale, or the
#: arrays of all caches and scales.
ONE_CACHE = params.INSERT_PARAMS.offset("layer") + params.LAYER_ENTRY.offset("cache")
ALL_CACHES = params.INSERT_PARAMS.offset("cache_ptrs")


class _Launch:
    """One launch of a prepared insert; safe to run from several threads at a time.

    Parameters
    ----------
    function : object
        Of the device.
    grid, block
        As geometry chose them.
    arguments : numpy array of one element
        All but the pointers of a step's arrays.
    listed : tuple of int or None
        Layers of this launch, where each has slots of its own.
    """

    __slots__ = ("_free", "_head", "_template", "block", "function", "grid", "listed")

    def __init__(
        self,
        function: Any,
        grid: int,
        block: tuple[int, int],
        arguments: Array,
        listed: tuple[int, ...] | None,
    ) -> None:
        self.function, self.grid, self.block, self.listed = function, grid, block, listed
        self._template = arguments.tobytes()
        self._head = [
            (int(arguments[name][0]["layer_stride"]), int(arguments[name][0]["token_stride"]))
            for name in ("kv_c", "k_pe", "slots")
        ]
        self._free: list[Arguments] = []

    def run(
        self,
        device: Device,
        kv_c: int,
        k_pe: int,
        slots: Any,
        stream: int,
        pair: tuple[int, int, int] | None,
    ) -> None:
        """Fill in the pointers and launch."""
        listed = self.listed
        if listed is not None and not any(slots[layer] for layer in listed):
            return
        # Taken from the list and put back: no two threads ever fill in the same structure.
        try:
            arguments = self._free.pop()
        except IndexError:
            arguments = Arguments(self._template)
        rows, rope, slot = self._head
        shared = slots if listed is None else 0
        # Pointers and the strides between them in one go.
        _HEAD.pack_into(arguments.buffer, 0, kv_c, *rows, k_pe, *rope, shared, *slot)
        if listed is not None:
            for place, layer in enumerate(listed):
                start = _SLOT_LIST_OFFSET + place * _SLOT_ARRAY_BYTES
                _POINTER.pack_into(arguments.buffer, start, slots[layer])
        if pair is not None:
            _PAIR.pack_into(arguments.buffer, *pair)
        device.launch(self.function, self.grid, self.block, arguments, stream)
        self._free.append(arguments)


class PreparedInsert:
    """The launches of an insert, for all arrays of one plan.

    Parameters
    ----------
    device : Device
    launches : list
    """

    __slots__ = ("_device", "_launches")

    def __init__(self, device: Device, launches: list[_Launch]) -> None:
        self._device = device
        self._launches = launches

    def run(
        self,
        kv_c: int,
        k_pe: int,
        slots: Any,
        stream: int,
        pair: tuple[int, int, int] | None = None,
    ) -> None:
        """Launch with the addresses of a step's arrays.

        Parameters
        ----------
        kv_c, k_pe : int
            0 for no k_pe.
        slots : int or sequence of int
            An address a layer where the plan has a list of slots; 0 leaves the layer out.
        stream : int
        pair : (int, int, int), optional
            `ONE_CACHE` or `ALL_CACHES`, and the two addresses that go there.
        """
        for launch in self._launches:
            launch.run(self._device, kv_c, k_pe, slots, stream, pair)


def prepare(device: Device, plan: InsertPlan, target: CudaTarget | CallTarget) -> PreparedInsert:
    """Prepare inserts into a target: a launch a group of layers."""
    if plan.tokens == 0:
        return PreparedInsert(device, [])
    arguments = _arguments(plan)
    arguments["layers"] = target.table_ptr
    arguments["counters"] = target.counters_ptr
    arguments["errors"] = target.errors_ptr
    arguments["collect_stats"] = target.collect_stats
    arguments["layer"] = target.entry
    launches: list[_Launch] = []
    for group in target.groups:
        launches += _group_launches(device, plan, group, arguments)
    return PreparedInsert(device, launches)


def prepare_grouped(device: Device, plan: InsertPlan, cache: CachePlan) -> PreparedInsert:
    """Prepare an insert into caches that are known by device pointers alone."""
    if plan.tokens == 0 or plan.num_layers == 0:
        return PreparedInsert(device, [])
    arguments = _arguments(plan)
    arguments["layer"] = layer_entry(0, cache, None, 0)
    group = LayerGroup(cache.layout, tuple(range(plan.num_layers)), 0)
    return PreparedInsert(device, _group_launches(device, plan, group, arguments))


def _arguments(plan: InsertPlan) -> Array:
    """Fill in what all launches of an insert share."""
    arguments = params.INSERT_PARAMS.zeros()
    arguments["kv_c"] = (0, *plan.kv_c_strides)
    arguments["k_pe"] = (0, *plan.k_pe_strides)
    arguments["slots"] = (0, *plan.slot_strides)
    arguments["slot_list"]["token_stride"] = plan.slot_strides[1]
    arguments["use_slot_list"] = plan.slots_listed
    arguments["tokens"] = plan.tokens
    arguments["slot_bytes"] = plan.slot_dtype.itemsize
    arguments["lora_rank"] = plan.kv_lora_rank
    arguments["rope_dim"] = plan.rope_dim
    return arguments


def _group_launches(
    device: Device, plan: InsertPlan, group: LayerGroup, arguments: Array
) -> list[_Launch]:
    """Prepare a group's launches: one, or one for every 16 layers with slots of their own."""
    specialisation = registry.find("insert", group.layout.name, plan.input_dtype.name)
    function = load(device, specialisation, group.layout)
    count = len(group.layers)
    step = params.SLOT_LIST_LAYERS if plan.slots_listed else count
    arguments["layers_are_mapped"] = group.mapped
    arguments["stream_stores"] = count * plan.tokens * group.layout.row_bytes > device.l2_bytes
    launches = []
    for start in range(0, count, step):
        layers = group.layers[start : start + step]
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
        arguments["block_tokens"] = shape.block_tokens
        listed = layers if plan.slots_listed else None
        launches.append(_Launch(function, shape.grid, shape.block, arguments, listed))
    return launches
