"""One token's row: encoded to bytes and decoded from bytes, for every layout."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_mla.dtypes import DType
from cupy_mla.layouts import CacheLayout

from . import fp8
from .casts import narrow

Array = np.ndarray[Any, Any]


def encode(
    layout: CacheLayout, kv_c: Array, k_pe: Array | None, scale: np.float32 | None
) -> fp8.Codes:
    """Encode rows.

    Parameters
    ----------
    layout : CacheLayout
    kv_c, k_pe : array [n, R], [n, P]
        Both of one dtype that the layout takes; k_pe is None where P is 0.
    scale : float32 or None
        The layer's scale, for flat fp8.

    Returns
    -------
    uint8 array [n, row_bytes]
    """
    rows = np.empty((kv_c.shape[0], layout.row_bytes), np.uint8)
    for name, source in (("nope", kv_c), ("rope", k_pe)):
        field = layout.field(name)
        if field is None or source is None:
            continue
        part = rows[:, field.offset : field.end]
        if field.dtype == source.dtype:
            part[:] = np.ascontiguousarray(source).view(np.uint8)
            continue
        values = source.astype(np.float32)
        scale_field = layout.field("scale")
        if scale_field is None:
            part[:] = fp8.quantize(values, _known(scale), field.dtype)
        else:
            scales = fp8.tile_scales(values, layout.tile, str(layout.scale_format))
            rows[:, scale_field.offset : scale_field.end] = scales.view(np.uint8)
            part[:] = fp8.quantize(values, np.repeat(scales, layout.tile, axis=1), field.dtype)
    return rows


def _known(scale: np.float32 | None) -> np.float32:
    """Return the layer's scale, which validation has made sure of for flat fp8."""
    if scale is None:
        raise ValueError("flat fp8 rows need their layer's scale")
    return scale


def decode(
    layout: CacheLayout,
    rows: fp8.Codes,
    scale: np.float32 | None,
    out_dtype: DType,
    start: int = 0,
    stop: int | None = None,
) -> Array:
    """Decode rows, or some elements of them.

    Parameters
    ----------
    layout : CacheLayout
    rows : uint8 array [n, row_bytes]
    scale : float32 or None
        The layer's scale, for flat fp8.
    out_dtype : numpy.dtype
        bfloat16, float16 or float32.
    start, stop : int
        The elements wanted, of the R + P of a row; all by default.

    Returns
    -------
    array [n, stop - start]
        ``RNE(float32(code) * scale)`` for fp8 parts; 16- and 32-bit parts are bit copies where
        `out_dtype` is their own, else converted by one rounding. A NaN that is no bit copy becomes
        the one code of `casts.narrow`.
    """
    stop = layout.kv_lora_rank + layout.rope_dim if stop is None else stop
    out = np.empty((rows.shape[0], stop - start), out_dtype)
    structured = np.ascontiguousarray(rows).view(layout.row_dtype())[:, 0]
    for name, first in (("nope", 0), ("rope", layout.kv_lora_rank)):
        field = layout.field(name)
        if field is None:
            continue
        begin, end = max(start, first), min(stop, first + field.count)
        if begin >= end:
            continue
        part = out[:, begin - start : end - start]
        stored = structured[name][:, begin - first : end - first]
        if field.dtype == out_dtype:
            part.view(np.uint8)[:] = np.ascontiguousarray(stored).view(np.uint8)
            continue
        values = stored.astype(np.float32)
        if field.dtype.itemsize == 1:
            factor: Any = scale
            if layout.field("scale") is not None:
                factor = np.repeat(structured["scale"], layout.tile, axis=1)[:, begin:end]
            with np.errstate(all="ignore"):
                values = np.multiply(values, factor, dtype=np.float32)
        part[:] = narrow(values, out_dtype)
    return out


def count_nonfinite(kv_c: Array, k_pe: Array | None) -> Array:
    """Return how many elements of each row are NaN or Inf."""
    counts = np.zeros(kv_c.shape[0], np.int64)
    for source in (kv_c, k_pe):
        if source is not None:
            counts += np.count_nonzero(~np.isfinite(source.astype(np.float32)), axis=1)
    return counts


def count_saturated(
    layout: CacheLayout, kv_c: Array, k_pe: Array | None, scale: np.float32 | None
) -> int:
    """Return how many elements of fp8 parts lie beyond what their format can hold."""
    total = 0
    for name, source in (("nope", kv_c), ("rope", k_pe)):
        field = layout.field(name)
        if field is None or source is None or field.dtype.itemsize != 1:
            continue
        values = source.astype(np.float32)
        factor: Any = scale
        if layout.tile:
            scales = fp8.tile_scales(values, layout.tile, str(layout.scale_format))
            factor = np.repeat(scales, layout.tile, axis=1)
        total += fp8.saturates(values, factor, field.dtype)
    return total
