"""Rows of a cache worked out a second time, with NumPy and ml_dtypes casts alone.

The demo compares the library with these, so nothing of the library computes here: a fault of its
reference cannot hide itself. Names and offsets of a row's parts are all that a layout gives.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_mla.layouts import CacheLayout

Array = np.ndarray[Any, Any]


def encode_rows(layout: CacheLayout, rows: Array, scale: float | None) -> Array:
    """Return the bytes ``[n, row_bytes]`` that `rows` ``[n, R + P]`` become.

    Parameters
    ----------
    layout : CacheLayout
        Names and offsets of the parts of a row.
    rows : numpy.ndarray
        Latent and rotary part side by side.
    scale : float or None
        The layer's scale, for layouts without scales of their own.
    """
    stored = np.zeros((len(rows), layout.row_bytes), np.uint8)
    rank = layout.kv_lora_rank
    parts = {"nope": rows[:, :rank], "rope": rows[:, rank:]}
    if layout.tile:
        tiles = parts["nope"].astype(np.float32).reshape(len(rows), -1, layout.tile)
        parts["scale"] = _tile_scales(tiles, layout.scale_format)
        parts["nope"] = _to_fp8(tiles, parts["scale"][:, :, None], layout, "nope")
    elif layout.needs_scale:
        for name in ("nope", "rope"):
            parts[name] = _to_fp8(parts[name].astype(np.float32), np.float32(scale), layout, name)
    for field in layout.fields:
        part = np.ascontiguousarray(parts[field.name]).view(np.uint8)
        stored[:, field.offset : field.offset + field.nbytes] = part.reshape(len(rows), -1)
    return stored


def _tile_scales(tiles: Array, scale_format: str | None) -> Array:
    magnitude = np.abs(tiles)
    amax = np.where(np.isnan(magnitude), np.float32(0), magnitude).max(axis=-1)
    exact: Array = amax / np.float32(448)
    if scale_format == "float32":
        return np.maximum(exact, np.finfo(np.float32).tiny)
    mantissa, exponent = np.frexp(np.maximum(exact, np.float32(1e-4)))  # mantissa in [0.5, 1)
    up = np.ldexp(np.float32(1), np.where(mantissa == 0.5, exponent - 1, exponent))
    return np.where(np.isinf(exact), exact, up).astype(np.float32)


def _to_fp8(values: Array, scale: Any, layout: CacheLayout, name: str) -> Array:
    field = layout.field(name)
    if field is None:  # a model without RoPE
        return values.astype(np.uint8)
    largest = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}[field.dtype.name]
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        quotient = values / scale
        codes = np.clip(quotient, -largest, largest).astype(field.dtype).view(np.uint8)
    return np.where(np.isnan(quotient), np.uint8(0x7F), codes)


def decode_rows(layout: CacheLayout, stored: Array, scale: float | None) -> Array:
    """Return the float32 rows ``[n, R + P]`` that the bytes ``[n, row_bytes]`` stand for."""
    parts = {
        field.name: np.ascontiguousarray(stored[:, field.offset : field.offset + field.nbytes])
        .view(field.dtype)
        .astype(np.float32)
        for field in layout.fields
    }
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        if layout.tile:
            tiles = parts["nope"].reshape(len(stored), -1, layout.tile)
            parts["nope"] = (tiles * parts["scale"][:, :, None]).reshape(len(stored), -1)
        elif layout.needs_scale:
            for name in ("nope", "rope"):
                if name in parts:
                    parts[name] = parts[name] * np.float32(scale)
    return np.concatenate([parts[name] for name in ("nope", "rope") if name in parts], axis=1)
