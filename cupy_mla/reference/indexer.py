"""The indexer's keys and queries in fp8, each row with a scale of its own, on NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_mla._plan_fused import IndexerInsertInputs, IndexerInsertPlan
from cupy_mla.dtypes import FLOAT8_E4M3, FP8_FORMATS
from cupy_mla.layouts import CacheLayout

from .casts import widen
from .context import admit
from .fp8 import Codes, Floats, largest, quantize
from .insert import HostTarget
from .store import HostRows

Array = np.ndarray[Any, Any]

_E4M3_MAX = np.float32(FP8_FORMATS[FLOAT8_E4M3].max)
_LEAST_AMAX = np.float32(1e-4)
_CHUNK = 1024


def row_scales(x: Floats, scale_format: str) -> Floats:
    """Return the float32 scale of each row.

    Parameters
    ----------
    x : float32 array [..., D]
    scale_format : {"float32", "ue8m0"}
        ``max(amax, 1e-4) / 448``, or the smallest power of two that is not below it.

    Returns
    -------
    float32 array [...]
        The largest magnitude of a row ignores NaN.
    """
    with np.errstate(all="ignore"):
        amax = largest(np.abs(x))
        raw: Floats = np.divide(np.maximum(amax, _LEAST_AMAX), _E4M3_MAX, dtype=np.float32)
    if scale_format == "float32":
        return raw
    # Any mantissa bit carries into the exponent.
    bits = (raw.view(np.uint32) + np.uint32(0x7FFFFF)) & np.uint32(0x7F800000)
    powers: Floats = bits.view(np.float32)
    return powers


def quantize_rows(x: Floats, scale_format: str) -> tuple[Codes, Floats]:
    """Return e4m3 codes ``sat(RNE(x / s))`` and the scale s of each row."""
    scales = row_scales(x, scale_format)
    return quantize(x, scales[..., None], FLOAT8_E4M3), scales


def insert_indexer(
    plan: IndexerInsertPlan, inputs: IndexerInsertInputs, target: HostTarget
) -> None:
    """Store rows in an indexer cache, quantised as they are."""
    k = inputs.k.host_view()
    slots = inputs.slots.host_view()
    for start in range(0, plan.tokens, _CHUNK):
        values = widen(k[start : min(start + _CHUNK, plan.tokens)])
        store_indexer(target, 0, start, slots, np.ones(values.shape[0], np.bool_), values)


def store_indexer(
    target: HostTarget, layer: int, start: int, slots: Array, found: Array, values: Floats
) -> None:
    """Store float32 rows in an indexer cache.

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
    values : float32 array [n, 128]
    """
    cache, cache_plan = target.caches[layer]
    wanted = slots.astype(np.int64)
    tokens = admit(target, layer, cache_plan, start, wanted, found)
    if tokens.size:
        packed = encode_keys(cache_plan.layout, values[tokens - start])
        HostRows(cache, cache_plan).put(wanted[tokens], packed)


def encode_keys(layout: CacheLayout, values: Floats) -> Codes:
    """Encode float32 rows of an indexer cache.

    Parameters
    ----------
    layout : CacheLayout
    values : float32 array [n, 128]

    Returns
    -------
    uint8 array [n, row_bytes]
        The parts of a row one behind the other.
    """
    codes, scales = quantize_rows(values, str(layout.scale_format))
    rows = np.empty((values.shape[0], layout.row_bytes), np.uint8)
    for field in layout.fields:
        part = scales[:, None].view(np.uint8) if field.name == "scale" else codes
        rows[:, field.offset : field.end] = part
    return rows
