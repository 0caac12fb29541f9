"""Rotary position embedding in float32.

A table row is ``[cos half | sin half]``. Each product, difference and sum is rounded by itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .casts import widen
from .fp8 import Floats

Array = np.ndarray[Any, Any]


def rotate(x: Floats, cos: Floats, sin: Floats, *, is_neox: bool) -> Floats:
    """Rotate the pairs of the leading rotary part, and keep what is behind it.

    A pair (a, b) becomes ``(a * cos - b * sin, b * cos + a * sin)``.

    Parameters
    ----------
    x : float32 array [..., D]
    cos, sin : float32 array [..., half]
        Broadcast against `x`; ``2 * half <= D``.
    is_neox : bool
        Pairs are (i, i + half) where true, else (2i, 2i + 1).

    Returns
    -------
    float32 array [..., D]

    Examples
    --------
    >>> x = np.array([1, 2, 3, 4], np.float32)
    >>> cos, sin = np.array([0, 1], np.float32), np.array([1, 0], np.float32)
    >>> rotate(x, cos, sin, is_neox=False)
    array([-2.,  1.,  3.,  4.], dtype=float32)
    >>> rotate(x, cos, sin, is_neox=True)
    array([-3.,  2.,  1.,  4.], dtype=float32)
    """
    half = cos.shape[-1]
    first, second = (
        (slice(0, half), slice(half, 2 * half))
        if is_neox
        else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    )
    a, b = x[..., first], x[..., second]
    out = x.copy()
    with np.errstate(all="ignore"):
        out[..., first] = a * cos - b * sin
        out[..., second] = b * cos + a * sin
    return out


def table_rows(table: Array, positions: Array) -> tuple[Floats, Floats, Array]:
    """Look positions up in a cos/sin table, without touching a row that it does not have.

    Parameters
    ----------
    table : array [rows, 2 * half]
    positions : int32 or int64 array [n]

    Returns
    -------
    cos, sin : float32 array [n, half]
        Zeros for a position that the table does not have.
    found : bool array [n]
    """
    half = table.shape[1] // 2
    wanted = positions.astype(np.int64)
    found = (wanted >= 0) & (wanted < table.shape[0])
    values = np.zeros((wanted.size, 2 * half), np.float32)
    values[found] = widen(table[wanted[found]])
    return values[:, :half], values[:, half:], found


def rotate_at(x: Floats, table: Array, positions: Array, *, is_neox: bool) -> tuple[Floats, Array]:
    """Rotate rows by their positions; the rotary part is +0 where the table has no such position.

    Parameters
    ----------
    x : float32 array [n, D] or [n, heads, D]
    table : array [rows, 2 * half]
    positions : int32 or int64 array [n]
    is_neox : bool

    Returns
    -------
    rotated : float32 array
        Of the shape of `x`.
    found : bool array [n]
        Which positions the table has.
    """
    cos, sin, found = table_rows(table, positions)
    axes = (slice(None),) + (None,) * (x.ndim - 2)
    out = rotate(x, cos[axes], sin[axes], is_neox=is_neox)
    out[~found, ..., : table.shape[1]] = 0
    return out, found
