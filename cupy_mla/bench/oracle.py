"""What the reference must leave, worked out a second time: ml_dtypes casts, and float64."""

from __future__ import annotations

from collections.abc import Callable
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


def close(
    values: Array,
    dtype: DType,
    scale: Array | float = 1.0,
    *,
    rotated: bool = False,
    decode: Callable[[Array], Array] = lambda output: output.astype(np.float64),
) -> Expected:
    """Expect what float64 values become when they are divided by a scale and rounded once.

    Parameters
    ----------
    values : numpy.ndarray
        float64 ``[..., W]``.
    dtype : numpy.dtype
        To which they are rounded.
    scale : float or numpy.ndarray
    rotated : bool
        Whether a value may be a small difference of the large ones in its row.
    decode : callable
        As `Expected.decode`.
    """
    step, least = _HALF_STEPS[dtype]
    floor = least * np.asarray(scale)
    if rotated:
        floor = np.maximum(floor, np.abs(values).max(axis=-1, keepdims=True) * 2.0**-6)
    # Twice half a step: relative to the smaller end of a binade.
    return Expected(values, 2 * step * (1 + 2.0**-7) + _MORE, floor, decode)


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
            stored = row_bytes(layout, cache)[slots]
            return read_rows(layout, stored, scale)[:, part].astype(np.float64)

        return decode

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
    return [
        (name, close(rows[:, latent], code, step, decode=decoded(latent))),
        (name, close(rows[:, rope], rope_dtype, rope_step, rotated=True, decode=decoded(rope))),
        (name, untouched(problem, slots)),
    ]


def row_bytes(layout: CacheLayout, cache: Array) -> Array:
    """Return all rows of a cache as bytes ``[slots, row_bytes]``, parts behind one another."""
    blocks, size = cache.shape[:2]
    raw = cache.view(np.uint8).reshape(blocks, -1)
    starts = [(plane.start(size), plane.nbytes) for plane in layout.planes]
    pieces = [raw[:, start : start + size * width].reshape(-1, width) for start, width in starts]
    return np.concatenate(pieces, axis=1)


def untouched(problem: Problem, slots: Array) -> Expected:
    """Expect all rows of a cache but some to be as they were."""
    layout = problem.layout
    others = problem.pool_blocks * problem.block_size - len(slots)
    kept = np.full((others, layout.row_bytes), SENTINEL, np.uint8)
    return Expected(kept, decode=lambda cache: np.delete(row_bytes(layout, cache), slots, axis=0))


def indexer_rows(layout: CacheLayout, cache: Array, slots: Array) -> Array:
    """Return rows of a cache of indexer keys as numbers."""
    rows = row_bytes(layout, cache)[slots].view(layout.row_dtype())[:, 0]
    codes, scale = (rows[field.name].astype(np.float64) for field in layout.fields)
    return np.asarray(codes * scale)


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
