"""What the reference must leave, worked out a second time: ml_dtypes casts, and float64."""

from __future__ import annotations

import numpy as np

from cupy_mla.cli._rows import decode_rows, encode_rows
from cupy_mla.layouts import CacheLayout

from .problem import SENTINEL, Array, Problem


def stored_rows(layout: CacheLayout, rows: Array, scale: float | None) -> Array:
    """Return the bytes ``[n, row_bytes]`` that rows ``[n, R + P]`` become."""
    return encode_rows(layout, rows, scale)


def read_rows(layout: CacheLayout, stored: Array, scale: float | None) -> Array:
    """Return the float32 rows that bytes stand for."""
    return decode_rows(layout, stored, scale)


def cache_bytes(problem: Problem, slots: Array, stored: Array) -> Array:
    """Return the bytes of a cache in which nothing but some rows was written."""
    layout = problem.layout
    pool = problem.pool_blocks * problem.block_size
    cache = np.full((pool, layout.row_bytes), SENTINEL, np.uint8)
    cache[slots] = stored
    return cache.reshape(problem.pool_blocks, problem.block_size, layout.row_bytes)


def rms_norm(rows: Array, weight: Array, eps: float) -> Array:
    """Norm rows ``[..., W]`` in float64."""
    x, w = rows.astype(np.float64), weight.astype(np.float64)
    return np.asarray(x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * w)


def layer_norm(rows: Array, weight: Array, bias: Array, eps: float) -> Array:
    """Norm rows ``[..., W]`` in float64, around their mean."""
    x = rows.astype(np.float64)
    centred = x - x.mean(axis=-1, keepdims=True)
    normed = centred / np.sqrt((centred * centred).mean(axis=-1, keepdims=True) + eps)
    return np.asarray(normed * weight.astype(np.float64) + bias.astype(np.float64))


def rotate(rows: Array, cos_sin: Array, *, is_neox: bool = False) -> Array:
    """Rotate rows ``[..., P]`` in float64 by table rows ``[..., P]``."""
    x, table = rows.astype(np.float64), cos_sin.astype(np.float64)
    half = x.shape[-1] // 2
    cos, sin = table[..., :half], table[..., half:]
    first = (..., slice(0, half)) if is_neox else (..., slice(0, None, 2))
    second = (..., slice(half, None)) if is_neox else (..., slice(1, None, 2))
    out = np.empty_like(x)
    out[first] = x[first] * cos - x[second] * sin
    out[second] = x[second] * cos + x[first] * sin
    return out
