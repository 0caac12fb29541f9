"""Casts to fp8 and back, and the scales of a tile, as float32 arithmetic without shortcuts."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_mla.dtypes import FLOAT8_E4M3, FP8_FORMATS, FP8_NAN_CODE, DType

Floats = np.ndarray[Any, np.dtype[np.float32]]
Codes = np.ndarray[Any, np.dtype[np.uint8]]

_E4M3_MAX = np.float32(FP8_FORMATS[FLOAT8_E4M3].max)
_FLT_MIN = np.float32(1.1754944e-38)
_UE8M0_LEAST = np.float32(1e-4)


def quantize(x: Floats, scale: Floats | np.float32, dtype: DType) -> Codes:
    """Return ``sat(RNE(x / scale))`` as codes: IEEE division, then one rounding.

    Parameters
    ----------
    x : float32 array
    scale : float32, or float32 array that broadcasts against `x`
    dtype : numpy.dtype
        float8_e4m3fn or float8_e5m2.

    Returns
    -------
    uint8 array
        Codes of the shape of `x`. What is beyond the largest finite value, Inf too, becomes it;
        the sign of zero is kept; a NaN becomes 0x7F in both formats.
    """
    limit = np.float32(FP8_FORMATS[dtype].max)
    with np.errstate(all="ignore"):
        quotient = np.divide(x, scale, dtype=np.float32)
        nan = np.isnan(quotient)
        # ml_dtypes does not saturate, so clip first; clipping keeps NaN and the sign of zero.
        codes = np.clip(quotient, -limit, limit, out=quotient).astype(dtype).view(np.uint8)
    codes[nan] = FP8_NAN_CODE
    return codes


def saturates(x: Floats, scale: Floats | np.float32, dtype: DType) -> int:
    """Count quotients that a cast without saturation would turn into NaN or Inf; NaN are none."""
    limits = FP8_FORMATS[dtype]
    with np.errstate(all="ignore"):
        magnitude = np.abs(np.divide(x, scale, dtype=np.float32))
        beyond = (
            magnitude >= limits.overflow
            if limits.overflow_inclusive
            else magnitude > limits.overflow
        )
    return int(np.count_nonzero(beyond))


def largest(magnitudes: Floats) -> Floats:
    """Return the largest number along the last axis, 0 where there is none but NaN.

    Not by ``fmax``, which hands a signalling NaN on.
    """
    found: Floats = np.where(np.isnan(magnitudes), np.float32(0), magnitudes).max(
        axis=-1, initial=0
    )
    return found


def tile_scales(x: Floats, tile: int, scale_format: str) -> Floats:
    """Return the float32 scale of each tile of a row.

    Parameters
    ----------
    x : float32 array [n, width]
    tile : int
        Elements a tile.
    scale_format : {"float32", "ue8m0"}
        ``max(amax / 448, FLT_MIN)``, or ``2^ceil(log2(max(amax / 448, 1e-4)))`` by exponent bits.

    Returns
    -------
    float32 array [n, width / tile]
        The largest magnitude of a tile ignores NaN.
    """
    tiles = np.abs(x.reshape(x.shape[0], x.shape[1] // tile, tile))
    with np.errstate(all="ignore"):
        amax = largest(tiles)
        raw = amax / _E4M3_MAX
        if scale_format == "float32":
            floored: Floats = np.maximum(raw, _FLT_MIN)
            return floored
        bits = np.maximum(raw, _UE8M0_LEAST).view(np.uint32)
    # Any mantissa bit carries into the exponent: the smallest power of two not below.
    powers: Floats = ((bits + np.uint32(0x7FFFFF)) & np.uint32(0x7F800000)).view(np.float32)
    return powers
