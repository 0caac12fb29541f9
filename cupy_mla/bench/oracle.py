"""What the reference must leave, worked out a second time: ml_dtypes casts, and float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_mla import dtypes
from cupy_mla.cli._rows import decode_rows, encode_rows
from cupy_mla.dtypes import DType
from cupy_mla.layouts import CacheLayout

from .problem import SENTINEL, Array, Expected, Problem


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


#: Half a step of each element type relative to its value, and the magnitude below which steps are
#: even. A little more than that is left for float32 sums of some hundred terms.
_HALF_STEPS: dict[DType, tuple[float, float]] = {
    dtypes.BFLOAT16: (2.0**-9, 2.0**-126),
    dtypes.FLOAT16: (2.0**-12, 2.0**-14),
    dtypes.FLOAT32: (2.0**-25, 2.0**-126),
    dtypes.FLOAT8_E4M3: (2.0**-5, 2.0**-6),
    dtypes.FLOAT8_E5M2: (2.0**-4, 2.0**-14),
}
_MORE = 2.0**-16
_LARGEST: dict[DType, float] = {dtypes.FLOAT8_E4M3: 448.0, dtypes.FLOAT8_E5M2: 57344.0}


def close(values: Array, dtype: DType, scale: Array | float = 1.0, **options: Any) -> Expected:
    """Expect what float64 values become when they are divided by a scale and rounded once."""
    step, least = _HALF_STEPS[dtype]
    # Twice half a step: relative to the smaller end of a binade.
    return Expected(values, 2 * step * (1 + 2.0**-7) + _MORE, least * np.asarray(scale), **options)


def close_rows(
    name: str, problem: Problem, slots: Array, rows: Array, scale: float | None
) -> list[tuple[str, Expected]]:
    """Expect rows of a cache near float64 ones, and all other rows as they were.

    Parameters
    ----------
    name : str
        Of the output.
    problem : Problem
    slots : numpy.ndarray
        int64 ``[n]``.
    rows : numpy.ndarray
        ``[n, R + P]``.
    scale : float or None
        The layer's scale where the format needs one.
    """
    layout = problem.layout

    def decoded(part: slice) -> Any:
        def decode(cache: Array) -> Array:
            stored = cache.view(np.uint8).reshape(-1, layout.row_bytes)[slots]
            return read_rows(layout, stored, scale)[:, part].astype(np.float64)

        return decode

    def untouched(cache: Array) -> Array:
        stored = cache.view(np.uint8).reshape(-1, layout.row_bytes)
        return np.delete(stored, slots, axis=0)

    latent, rope = slice(0, layout.kv_lora_rank), slice(layout.kv_lora_rank, None)
    step: Array | float = 1.0
    code = layout.code_dtype
    if layout.needs_scale:
        step = float(np.float32(scale))
        rows = np.clip(rows, -step * _LARGEST[code], step * _LARGEST[code])
    elif layout.tile:
        tiles = np.abs(rows[:, latent]).reshape(len(rows), -1, layout.tile).max(axis=-1)
        step = np.repeat(tiles / _LARGEST[code], layout.tile, axis=1)
    rope_dtype = code if layout.needs_scale else problem.input_dtype
    rope_step = step if layout.needs_scale else 1.0
    others = problem.pool_blocks * problem.block_size - len(slots)
    kept = np.full((others, layout.row_bytes), SENTINEL, np.uint8)
    return [
        (name, close(rows[:, latent], code, step, decode=decoded(latent))),
        (name, close(rows[:, rope], rope_dtype, rope_step, decode=decoded(rope))),
        (name, Expected(kept, decode=untouched)),
    ]


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
