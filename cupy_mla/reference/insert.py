"""Storing rows in caches on NumPy, and the state that a writer keeps for it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from cupy_mla._arrays import ArrayRef, byte_view
from cupy_mla._plan import (
    COUNTERS,
    COUNTERS_ALWAYS,
    ERROR_KINDS,
    CachePlan,
    ErrorRecord,
    InsertInputs,
    InsertPlan,
    Scale,
)

from . import rows

Array = np.ndarray[Any, Any]

#: Rows encoded at a time: bounds the float32 temporaries to a few megabytes.
_CHUNK = 1024


class HostTarget:
    """Caches, scales and counters in host memory.

    Parameters
    ----------
    caches : sequence of ArrayRef
    plans : sequence of CachePlan
    scales : sequence of float, ArrayRef or None
        An ArrayRef is read at each insert.
    collect_stats : bool
        Whether rows, padding, NaN/Inf and saturation are counted too.
    """

    def __init__(
        self,
        caches: Sequence[ArrayRef],
        plans: Sequence[CachePlan],
        scales: Sequence[Scale],
        *,
        collect_stats: bool = False,
    ) -> None:
        self._lock = threading.Lock()
        self.collect_stats = collect_stats
        names = COUNTERS if collect_stats else COUNTERS_ALWAYS
        self._counts = {name: np.zeros(len(caches), np.int64) for name in names}
        self._errors: dict[str, ErrorRecord] = {}
        self.framework = "numpy"  # whatever it was: nothing here depends on it
        self.rebind(caches, plans)
        self.update_scales(scales)

    def rebind(self, caches: Sequence[ArrayRef], plans: Sequence[CachePlan]) -> None:
        """Put other arrays in place of the caches."""
        self.caches = tuple(
            (byte_view(ref, plan.layout.row_bytes), plan)
            for ref, plan in zip(_without_head(caches), plans, strict=True)
        )

    def update_scales(self, scales: Sequence[Scale]) -> None:
        """Put other scales in place of the scales."""
        self._scales = tuple(scales)

    def scale(self, layer: int) -> np.float32 | None:
        """Return the scale of a layer as it is now."""
        value = self._scales[layer]
        if isinstance(value, ArrayRef):
            return np.float32(value.host_view().reshape(())[()])
        return None if value is None else np.float32(value)

    def scale_values(self) -> Array:
        """Return the scales as float32 [L], NaN where a layer has none."""
        values = [self.scale(layer) for layer in range(len(self._scales))]
        return np.array([np.nan if value is None else value for value in values], np.float32)

    def count(self, layer: int, **amounts: int) -> None:
        """Add to counters of a layer; those not kept are passed over."""
        with self._lock:
            for name, amount in amounts.items():
                if name in self._counts:
                    self._counts[name][layer] += amount

    def record(self, error: ErrorRecord) -> None:
        """Keep the first error of a kind."""
        with self._lock:
            self._errors.setdefault(error.kind, error)

    def counts(self) -> dict[str, Array]:
        """Return a copy of the counters, int64 [L] each."""
        with self._lock:
            return {name: values.copy() for name, values in self._counts.items()}

    def take_errors(self) -> list[ErrorRecord]:
        """Return what was recorded since the last call, and arm the records again."""
        with self._lock:
            errors, self._errors = self._errors, {}
        return sorted(errors.values(), key=lambda error: ERROR_KINDS.index(error.kind))


def _without_head(caches: Sequence[ArrayRef]) -> list[ArrayRef]:
    """Drop the head axis of ``[N, B, 1, width]`` caches."""
    return [ref.without_axis(2) if ref.ndim == 4 else ref for ref in caches]


def insert(plan: InsertPlan, inputs: InsertInputs, target: HostTarget) -> None:
    """Store each token's row in each layer's cache.

    Parameters
    ----------
    plan : InsertPlan
    inputs : InsertInputs
    target : HostTarget
        Of duplicate slots the last token's row stays. Rows of slots below 0 or beyond the cache
        are not stored.
    """
    kv_c = inputs.kv_c.host_view()
    k_pe = None if inputs.k_pe is None else inputs.k_pe.host_view()
    for layer in range(plan.num_layers):
        slots = _slots_of(plan, inputs, layer)
        if slots is not None:
            source = kv_c[layer] if kv_c.ndim == 3 else kv_c
            rotary = k_pe if k_pe is None or k_pe.ndim == 2 else k_pe[layer]
            _insert_layer(plan, layer, source, rotary, slots, target)


def _slots_of(plan: InsertPlan, inputs: InsertInputs, layer: int) -> Array | None:
    if isinstance(inputs.slots, tuple):
        ref = inputs.slots[layer]
        return None if ref is None else ref.host_view()
    slots = inputs.slots.host_view()
    return slots[layer] if slots.ndim == 2 else slots


def _insert_layer(
    plan: InsertPlan,
    layer: int,
    kv_c: Array,
    k_pe: Array | None,
    slot_mapping: Array,
    target: HostTarget,
) -> None:
    cache, cache_plan = target.caches[layer]
    scale = target.scale(layer)
    slots = slot_mapping.astype(np.int64)
    beyond = slots >= cache_plan.num_slots
    target.count(
        layer,
        slots_out_of_range=int(np.count_nonzero(beyond)),
        slots_padding=int(np.count_nonzero(slots < 0)),
    )
    if beyond.any():
        token = int(np.argmax(beyond))
        target.record(ErrorRecord("slot", layer, token, int(slots[token])))
    tokens = np.flatnonzero((slots >= 0) & ~beyond)
    target.count(layer, rows_written=tokens.size)
    for start in range(0, tokens.size, _CHUNK):
        chosen = tokens[start : start + _CHUNK]
        part_c = kv_c[chosen]
        part_pe = None if k_pe is None else k_pe[chosen]
        block, row = np.divmod(slots[chosen], cache_plan.block_size)
        cache[block, row] = rows.encode(cache_plan.layout, part_c, part_pe, scale)
        if target.collect_stats:
            collect(cache_plan, layer, chosen, slots, part_c, part_pe, scale, target)


def collect(
    cache_plan: CachePlan,
    layer: int,
    tokens: Array,
    slots: Array,
    kv_c: Array,
    k_pe: Array | None,
    scale: np.float32 | None,
    target: HostTarget,
) -> None:
    """Count NaN, Inf and saturation among the stored rows of `tokens`."""
    nonfinite = rows.count_nonfinite(kv_c, k_pe)
    target.count(
        layer,
        nonfinite_elements=int(nonfinite.sum()),
        saturated_elements=rows.count_saturated(cache_plan.layout, kv_c, k_pe, scale),
    )
    if nonfinite.any():
        token = int(tokens[np.argmax(nonfinite > 0)])
        target.record(ErrorRecord("nonfinite", layer, token, int(slots[token])))
