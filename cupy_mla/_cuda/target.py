"""The caches that inserts go to, as a kernel finds them: tables in device memory, or one entry.

A writer's tables are made once and rewritten in place, in stream order, so that bound callables
and captured graphs follow. A single call passes its one entry by value.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_mla._arrays import ArrayRef
from cupy_mla._plan import (
    COUNTERS,
    COUNTERS_ALWAYS,
    ERROR_KINDS,
    CachePlan,
    ErrorRecord,
    Scale,
    layers_by_layout,
)
from cupy_mla.layouts import CacheLayout

from . import params
from .device import Device, Memory
from .prepared import Known

Array = np.ndarray[Any, Any]

_INT64_MAX = 2**63 - 1


def layer_entry(ref_ptr: int, plan: CachePlan, scale: Scale, source_layer: int) -> Array:
    """Return a cache as a ``LayerEntry``."""
    entry = params.LAYER_ENTRY.zeros()
    entry["cache"] = ref_ptr
    entry["block_stride"] = plan.block_stride
    entry["row_stride"] = plan.row_stride
    entry["num_slots"] = plan.num_slots
    entry["block_size"] = params.divisor(plan.block_size)
    entry["source_layer"] = source_layer
    entry["scale_ue8m0"] = plan.layout.scale_format == "ue8m0"
    if isinstance(scale, ArrayRef):
        entry["scale"] = scale.ptr
    elif scale is not None:
        entry["scale_value"] = scale
    return entry


@dataclass(frozen=True)
class LayerGroup:
    """Layers that one launch stores: those of one row format.

    Attributes
    ----------
    layout : CacheLayout
        Of the first layer; the others differ at most in what kernels take at run time.
    layers : tuple of int
        In the caller's order.
    first : int
        Place of the first of them in the table.
    """

    layout: CacheLayout
    layers: tuple[int, ...]
    first: int

    @property
    def mapped(self) -> bool:
        """Whether a layer's place in the table is not its place in the inputs."""
        return self.layers != tuple(range(self.first, self.first + len(self.layers)))


def group_layers(layouts: Sequence[CacheLayout]) -> tuple[LayerGroup, ...]:
    """Put the layers of each layout together, in the order in which layouts first appear."""
    result = []
    first = 0
    for layout, layers in layers_by_layout(layouts).items():
        result.append(LayerGroup(layout, layers, first))
        first += len(layers)
    return tuple(result)


class CallTarget:
    """One cache, for one call."""

    collect_stats = False
    table_ptr = counters_ptr = errors_ptr = 0

    def __init__(self, cache: ArrayRef, plan: CachePlan, scale: Scale) -> None:
        self.groups = (LayerGroup(plan.layout, (0,), 0),)
        self.entry = layer_entry(cache.ptr, plan, scale, 0)
        self.plan = plan
        self.caches = (cache,)
        self.framework = cache.framework
        self._scale = scale

    def arrays(self) -> list[ArrayRef]:
        """Return what a kernel reads or writes through this target."""
        return [*self.caches, *([self._scale] if isinstance(self._scale, ArrayRef) else [])]

    def looks(self) -> tuple[Any, ...]:
        """Return what an insert into this target depends on besides addresses."""
        number = None if isinstance(self._scale, ArrayRef) else self._scale
        return self.plan, number

    def addresses(self) -> tuple[int, int]:
        """Return where the cache lies, and its scale; 0 where that is no array."""
        scale = self._scale.ptr if isinstance(self._scale, ArrayRef) else 0
        return self.caches[0].ptr, scale


class CudaTarget:
    """The tables of a writer in device memory.

    Parameters
    ----------
    device : Device
    caches, plans, scales
        One a layer; scales in place are kept alive.
    stream : int
        On which the tables are written first.
    collect_stats : bool
        Whether kernels count rows, padding, NaN/Inf and saturation too.
    """

    def __init__(
        self,
        device: Device,
        caches: Sequence[ArrayRef],
        plans: Sequence[CachePlan],
        scales: Sequence[Scale],
        *,
        collect_stats: bool,
    ) -> None:
        self.device = device
        self.collect_stats = collect_stats
        self.groups = group_layers([plan.layout for plan in plans])
        self._order = [layer for group in self.groups for layer in group.layers]
        self._lock = threading.Lock()
        self._num_layers = len(plans)
        self._table = device.allocate(len(plans) * params.LAYER_ENTRY.dtype.itemsize)
        self._counters = device.allocate(len(plans) * len(COUNTERS) * 8)
        self._errors = device.allocate(len(ERROR_KINDS) * params.ERROR_RECORD.dtype.itemsize)
        self.entry = params.LAYER_ENTRY.zeros()
        self.caches, self._plans, self._scales = tuple(caches), tuple(plans), tuple(scales)
        self.framework = self.caches[0].framework
        #: Launches by plan, and the writer's shortcut to them.
        self.prepared = Known()
        self._write_table()
        zeros = np.zeros(max(self._counters.nbytes, self._errors.nbytes), np.uint8)
        for memory in (self._counters, self._errors):
            device.upload(memory, zeros[: memory.nbytes], self.stream())

    @property
    def table_ptr(self) -> int:
        """Address of the table of layers."""
        return self._table.ptr

    @property
    def counters_ptr(self) -> int:
        """Address of the counters."""
        return self._counters.ptr

    @property
    def errors_ptr(self) -> int:
        """Address of the error records."""
        return self._errors.ptr

    def arrays(self) -> list[ArrayRef]:
        """Return what a kernel reads or writes through this target."""
        return [*self.caches, *(ref for ref in self._scales if isinstance(ref, ArrayRef))]

    def stream(self) -> int:
        """Return the current stream of the framework that owns the caches."""
        return self.device.current_stream(self.caches[0].framework)

    def _write_table(self) -> None:
        if self.device.is_capturing(self.stream()):
            raise RuntimeError(
                "a writer's tables cannot be written while a graph is captured: make the writer, "
                "rebind it and update its scales before the capture or after it"
            )
        entries = [
            layer_entry(self.caches[layer].ptr, self._plans[layer], self._scales[layer], layer)
            for layer in self._order
        ]
        self.device.upload(self._table, np.concatenate(entries).view(np.uint8), self.stream())

    def rebind(self, caches: Sequence[ArrayRef], plans: Sequence[CachePlan]) -> None:
        """Put other arrays in place of the caches."""
        with self._lock:
            self.caches, self._plans = tuple(caches), tuple(plans)
            self.framework = self.caches[0].framework
            self._write_table()

    def update_scales(self, scales: Sequence[Scale]) -> None:
        """Put other scales in place of the scales."""
        with self._lock:
            self._scales = tuple(scales)
            self._write_table()

    def scale_values(self) -> Array:
        """Return the scales as float32 [L], NaN where a layer has none."""
        values = np.full(self._num_layers, np.nan, np.float32)
        for layer, scale in enumerate(self._scales):
            if isinstance(scale, ArrayRef):
                raw = self.device.download(Memory(scale.ptr, 4, scale), self.stream())
                values[layer] = raw.view(np.float32)[0]
            elif scale is not None:
                values[layer] = scale
        return values

    def counts(self) -> dict[str, Array]:
        """Return a copy of the counters, int64 [L] each."""
        raw = self.device.download(self._counters, self.stream()).view(np.int64)
        table = raw.reshape(self._num_layers, len(COUNTERS))
        names = COUNTERS if self.collect_stats else COUNTERS_ALWAYS
        return {name: table[:, COUNTERS.index(name)].copy() for name in names}

    def take_errors(self) -> list[ErrorRecord]:
        """Return what was recorded since the last call, and arm the records again."""
        raw = self.device.download(self._errors, self.stream()).view(params.ERROR_RECORD.dtype)
        found = [
            ErrorRecord(kind, int(record["layer"]), int(record["token"]), int(record["slot"]))
            for kind, record in zip(ERROR_KINDS, raw, strict=True)
            if record["claimed"]
        ]
        if found:
            empty = np.zeros(self._errors.nbytes, np.uint8)
            self.device.upload(self._errors, empty, self.stream())
        return found
