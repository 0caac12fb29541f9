"""Launching the insert kernel: a plan and a target become argument structures and grids.

What does not change between calls whose arrays look the same is prepared once; a call then
fills in pointers and launches.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from cupy_mla._plan import CachePlan, InsertPlan

from . import params, registry
from .compiler import load
from .device import Arguments, Device
from .geometry import insert_shape
from .prepared import together
from .target import CallTarget, CudaTarget, LayerGroup, layer_entry

Array = np.ndarray[Any, Any]

#: What the arguments begin with: kv_c, k_pe and slots, each with its strides.
HEAD = struct.Struct("<QqqQqqQqq")
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
    launch : callable
        Of the device, for function and shape.
    arguments : numpy array of one element
        All but the pointers of a step's arrays.
    listed : tuple of int or None
        Layers of this launch, where each has slots of its own.
    """

    __slots__ = ("_free", "_launch", "_strides", "_template", "listed")

    def __init__(
        self,
        launch: Callable[[Arguments, int], None],
        arguments: Array,
        listed: tuple[int, ...] | None,
    ) -> None:
        self._launch, self.listed = launch, listed
        self._template = arguments.tobytes()
        self._strides = [
            int(arguments[name][0][stride])
            for name in ("kv_c", "k_pe", "slots")
            for stride in ("layer_stride", "token_stride")
        ]
        self._free: list[Arguments] = []

    def by_address(self, current_stream: Callable[[], int]) -> Callable[[int, int, int], None]:
        """Return the launch by the addresses of kv_c, k_pe and slots, written out for speed."""
        free, template, launch, pack = self._free, self._template, self._launch, HEAD.pack_into
        a, b, c, d, e, f = self._strides

        def run(kv_c: int, k_pe: int, slots: int) -> None:
            # Taken from the list and put back: no two threads ever fill in the same structure.
            try:
                arguments = free.pop()
            except IndexError:
                arguments = Arguments(template)
            # Pointers and the strides between them in one go.
            pack(arguments.buffer, 0, kv_c, a, b, k_pe, c, d, slots, e, f)
            launch(arguments, current_stream())
            free.append(arguments)

        return run

    def with_pair(
        self, current_stream: Callable[[], int], offset: int
    ) -> Callable[[int, int, int, int, int], None]:
        """Return the launch by the addresses of kv_c, k_pe, caches, slots and scales.

        `offset` is `ONE_CACHE` or `ALL_CACHES`.
        """
        free, template, launch = self._free, self._template, self._launch
        pack, pack_pair = HEAD.pack_into, _PAIR.pack_into
        a, b, c, d, e, f = self._strides

        def run(kv_c: int, k_pe: int, caches: int, slots: int, scales: int) -> None:
            try:
                arguments = free.pop()
            except IndexError:
                arguments = Arguments(template)
            pack(arguments.buffer, 0, kv_c, a, b, k_pe, c, d, slots, e, f)
            pack_pair(arguments.buffer, offset, caches, scales)
            launch(arguments, current_stream())
            free.append(arguments)

        return run

    def fixed(
        self, current_stream: Callable[[], int], addresses: tuple[int, int, int]
    ) -> Callable[[], None]:
        """Return the launch with these addresses, which nothing is left to be filled in for."""
        launch = self._launch
        arguments = Arguments(self._template)
        kv_c, k_pe, slots = addresses
        a, b, c, d, e, f = self._strides
        HEAD.pack_into(arguments.buffer, 0, kv_c, a, b, k_pe, c, d, slots, e, f)
        return lambda: launch(arguments, current_stream())

    def run(
        self,
        kv_c: int,
        k_pe: int,
        slots: Any,
        stream: int,
        pair: tuple[int, int, int] | None,
    ) -> None:
        """Fill in all pointers there are and launch."""
        listed = self.listed
        if listed is not None and not any(slots[layer] for layer in listed):
            return
        arguments = Arguments(self._template)
        a, b, c, d, e, f = self._strides
        shared = slots if listed is None else 0
        HEAD.pack_into(arguments.buffer, 0, kv_c, a, b, k_pe, c, d, shared, e, f)
        if listed is not None:
            for place, layer in enumerate(listed):
                start = _SLOT_LIST_OFFSET + place * _SLOT_ARRAY_BYTES
                _POINTER.pack_into(arguments.buffer, start, slots[layer])
        if pair is not None:
            _PAIR.pack_into(arguments.buffer, *pair)
        self._launch(arguments, stream)


class PreparedInsert:
    """The launches of an insert, for all arrays of one plan.

    Parameters
    ----------
    launches : list
    """

    __slots__ = ("_launches",)

    def __init__(self, launches: list[_Launch]) -> None:
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
            launch.run(kv_c, k_pe, slots, stream, pair)

    def by_address(self, current_stream: Callable[[], int]) -> Callable[[int, int, int], None]:
        """Return what launches by the addresses of kv_c, k_pe and slots, which is no list."""
        return together([launch.by_address(current_stream) for launch in self._launches])

    def with_pair(
        self, current_stream: Callable[[], int], offset: int
    ) -> Callable[[int, int, int, int, int], None]:
        """Return what launches by the addresses of kv_c, k_pe, caches, slots and scales."""
        return together([launch.with_pair(current_stream, offset) for launch in self._launches])

    def fixed(
        self, current_stream: Callable[[], int], addresses: tuple[int, int, int]
    ) -> Callable[[], None]:
        """Return what launches with these addresses, without a list of slots."""
        return together([launch.fixed(current_stream, addresses) for launch in self._launches])


def prepare(device: Device, plan: InsertPlan, target: CudaTarget | CallTarget) -> PreparedInsert:
    """Prepare inserts into a target: a launch a group of layers."""
    if plan.tokens == 0:
        return PreparedInsert([])
    arguments = _arguments(plan)
    arguments["layers"] = target.table_ptr
    arguments["counters"] = target.counters_ptr
    arguments["errors"] = target.errors_ptr
    arguments["collect_stats"] = target.collect_stats
    arguments["layer"] = target.entry
    launches: list[_Launch] = []
    for group in target.groups:
        launches += _group_launches(device, plan, group, arguments)
    return PreparedInsert(launches)


def prepare_grouped(device: Device, plan: InsertPlan, cache: CachePlan) -> PreparedInsert:
    """Prepare an insert into caches that are known by device pointers alone."""
    if plan.tokens == 0 or plan.num_layers == 0:
        return PreparedInsert([])
    arguments = _arguments(plan)
    arguments["layer"] = layer_entry(0, cache, None, 0)
    group = LayerGroup(cache.layout, tuple(range(plan.num_layers)), 0)
    return PreparedInsert(_group_launches(device, plan, group, arguments))


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
        launch = device.launcher(function, shape.grid, shape.block)
        launches.append(_Launch(launch, arguments, listed))
    return launches
