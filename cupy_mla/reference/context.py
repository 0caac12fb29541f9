"""Norm, RoPE and insert of all layers, from one projection, on NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_mla._plan import CachePlan, ErrorRecord
from cupy_mla._plan_fused import ContextInputs, ContextPlan
from cupy_mla.dtypes import DType
from cupy_mla.layouts import CacheLayout

from . import norm, rows
from .casts import narrow, round_to, widen
from .fp8 import Codes, Floats
from .insert import HostTarget, collect
from .rope import rotate_at
from .store import HostRows

Array = np.ndarray[Any, Any]

#: Rows computed at a time: bounds the float32 temporaries to a few megabytes.
_CHUNK = 1024


def insert_context(plan: ContextPlan, inputs: ContextInputs, target: HostTarget) -> None:
    """Store RMSNorm of the latent part and RoPE of the rotary part in each layer's cache.

    Parameters
    ----------
    plan : ContextPlan
    inputs : ContextInputs
    target : HostTarget
        A row is left out for the first of these reasons: its slot is below 0, its slot is beyond
        the cache, its position is not in the table.
    """
    kv = inputs.kv.host_view()
    if kv.ndim == 2:
        kv = kv.reshape(len(kv), plan.num_layers, plan.kv_lora_rank + plan.rope_dim)
    positions = None if inputs.positions is None else inputs.positions.host_view()
    table = None if inputs.table is None else inputs.table.host_view()
    weights = inputs.weight.host_view()
    for layer in range(plan.num_layers):
        slots = _slots_of(inputs, layer)
        if slots is None:
            continue
        weight = widen(weights[layer])
        for start in range(0, plan.tokens, _CHUNK):
            stop = min(start + _CHUNK, plan.tokens)
            values = widen(kv[start:stop, layer])
            latent = norm.rms_norm(values[:, : plan.kv_lora_rank], weight, plan.eps)
            rotary, found = None, np.ones(stop - start, np.bool_)
            if table is not None and positions is not None:
                rotary, found = rotate_at(
                    values[:, plan.kv_lora_rank :],
                    table,
                    positions[start:stop],
                    is_neox=plan.is_neox,
                )
            if plan.rounding == "staged":
                latent = round_to(latent, plan.input_dtype)
                rotary = None if rotary is None else round_to(rotary, plan.input_dtype)
            store(target, layer, start, slots, found, latent, rotary)


def _slots_of(inputs: ContextInputs, layer: int) -> Array | None:
    if isinstance(inputs.slots, tuple):
        ref = inputs.slots[layer]
        return None if ref is None else ref.host_view()
    slots = inputs.slots.host_view()
    return slots[layer] if slots.ndim == 2 else slots


def store(
    target: HostTarget,
    layer: int,
    start: int,
    slots: Array,
    found: Array,
    latent: Floats,
    rotary: Floats | None,
) -> None:
    """Store float32 rows, rounded once to what the cache holds.

    Parameters
    ----------
    target : HostTarget
    layer : int
    start : int
        Token of the first row.
    slots : int32 or int64 array [tokens]
        Of all tokens.
    found : bool array [n]
        Which rows' positions are in the table.
    latent, rotary : float32 array [n, R], [n, P]
    """
    cache, cache_plan = target.caches[layer]
    wanted = slots.astype(np.int64)
    tokens = admit(target, layer, cache_plan, start, wanted, found)
    if not tokens.size:
        return
    scale = target.scale(layer)
    latent = latent[tokens - start]
    rotary = None if rotary is None else rotary[tokens - start]
    packed = encode_values(cache_plan.layout, latent, rotary, scale)
    HostRows(cache, cache_plan).put(wanted[tokens], packed)
    if target.collect_stats:
        collect(cache_plan, layer, tokens, wanted, latent, rotary, scale, target)


def admit(
    target: HostTarget,
    layer: int,
    cache_plan: CachePlan,
    start: int,
    slots: Array,
    found: Array,
) -> Array:
    """Return the tokens of some rows that are to be stored, and count the others.

    Parameters
    ----------
    target : HostTarget
    layer : int
    cache_plan : CachePlan
    start : int
        Token of the first row.
    slots : int64 array [tokens]
        Of all tokens.
    found : bool array [n]
        Which rows' positions are in the table; looked at only where the slot is in the cache.

    Returns
    -------
    int64 array
        Tokens, counted from 0.
    """
    mine = slots[start : start + found.size]
    padding = mine < 0
    beyond = mine >= cache_plan.num_slots
    lost = ~padding & ~beyond & ~found
    stored = ~padding & ~beyond & found
    target.count(
        layer,
        slots_padding=int(np.count_nonzero(padding)),
        slots_out_of_range=int(np.count_nonzero(beyond)),
        positions_out_of_range=int(np.count_nonzero(lost)),
        rows_written=int(np.count_nonzero(stored)),
    )
    for kind, which in (("slot", beyond), ("position", lost)):
        if which.any():
            token = start + int(np.argmax(which))
            target.record(ErrorRecord(kind, layer, token, int(slots[token])))
    return start + np.flatnonzero(stored)


def encode_values(
    layout: CacheLayout, latent: Floats, rotary: Floats | None, scale: np.float32 | None
) -> Codes:
    """Encode float32 rows: each element is rounded once, to the code or the dtype it is stored as.

    Parameters
    ----------
    layout : CacheLayout
    latent, rotary : float32 array [n, R], [n, P]
    scale : float32 or None
        The layer's scale, for flat fp8.

    Returns
    -------
    uint8 array [n, row_bytes]
    """
    kv_c = _as_stored(latent, layout, "nope")
    k_pe = None if rotary is None else _as_stored(rotary, layout, "rope")
    return rows.encode(layout, kv_c, k_pe, scale)


def _as_stored(values: Floats, layout: CacheLayout, name: str) -> Array:
    """Round to a field's dtype, except to fp8, which needs its scale."""
    field = layout.field(name)
    dtype: DType | None = None if field is None else field.dtype
    return values if dtype is None or dtype.itemsize == 1 else narrow(values, dtype)
