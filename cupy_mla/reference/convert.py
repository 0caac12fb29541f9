"""Writing the rows of one cache to another of another layout or scale on NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_mla import dtypes
from cupy_mla._arrays import ArrayRef
from cupy_mla._plan import ConvertPlan
from cupy_mla.dtypes import DType
from cupy_mla.layouts import CacheLayout, LayoutField

from . import rows
from .fp8 import Codes
from .insert import HostTarget
from .read import CHUNK
from .store import HostRows

Array = np.ndarray[Any, Any]


def convert(
    plan: ConvertPlan, slots: ArrayRef | None, source: HostTarget, destination: HostTarget
) -> None:
    """Convert the rows of `slots`, or of the whole cache; slots that it does not have: nothing."""
    taken = HostRows(source.caches[0][0], plan.source)
    put = HostRows(destination.caches[0][0], plan.destination)
    wanted = None if slots is None else slots.host_view()
    for begin in range(0, plan.count, CHUNK):
        end = min(begin + CHUNK, plan.count)
        if wanted is None:
            chosen = np.arange(begin, end)
        else:
            chosen = wanted[begin:end].astype(np.int64)
            chosen = chosen[taken.valid(chosen)]
        packed = taken.take(chosen)
        if not plan.copies:
            packed = transcode(
                plan.source.layout,
                packed,
                source.scale(0),
                plan.destination.layout,
                destination.scale(0),
            )
        put.put(chosen, packed)


def transcode(
    source: CacheLayout,
    packed: Codes,
    source_scale: np.float32 | None,
    destination: CacheLayout,
    destination_scale: np.float32 | None,
) -> Codes:
    """Return rows in another layout.

    Parts stored in fp8 are quantised from the decoded float32 values; others are what decoding
    to their dtype gives: bit copies of their own dtype, else the float32 value rounded once.

    Parameters
    ----------
    source, destination : CacheLayout
        Of as many elements a row.
    packed : uint8 array [n, source.row_bytes]
    source_scale, destination_scale : float32 or None
        The layers' scales, for flat fp8.
    """

    def part(field: LayoutField, start: int) -> Array:
        dtype: DType = dtypes.FLOAT32 if field.dtype.itemsize == 1 else field.dtype
        return rows.decode(source, packed, source_scale, dtype, start, start + field.count)

    nope, rope = destination.fields[0], destination.field("rope")
    return rows.encode(
        destination,
        part(nope, 0),
        None if rope is None else part(rope, nope.count),
        destination_scale,
    )
