"""One row in full: its parts with their bytes and values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_mla.layouts import LayoutField

from .source import CacheRows

#: Elements on a line by their size in bytes.
_PER_LINE = {1: 8, 2: 8, 4: 4}


@dataclass(frozen=True)
class RowPart:
    """One part of a row.

    Attributes
    ----------
    field : LayoutField
    start : int
        First byte in the row; in a layout that keeps the parts of rows apart, in the block.
    raw : bytes
    values : tuple of float
        What the elements stand for: codes multiplied by their scale where that is known.
    """

    field: LayoutField
    start: int
    raw: bytes
    values: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the part as plain data that ``json.dumps`` takes; NaN and Inf become text."""
        return {
            "name": self.field.name,
            "offset": self.start,
            "nbytes": len(self.raw),
            "dtype": self.field.dtype.name,
            "bytes": self.raw.hex(),
            "values": [value if math.isfinite(value) else str(value) for value in self.values],
        }

    def lines(self) -> Iterator[list[str]]:
        """Yield name, element, byte, bytes and values of a few elements at a time."""
        size = self.field.dtype.itemsize
        step = _PER_LINE[size]
        for first in range(0, self.field.count, step):
            begin = first * size
            yield [
                self.field.name,
                str(first),
                str(self.start + begin),
                self.raw[begin : begin + step * size].hex(" ", size).upper(),
                " ".join(f"{value:g}" for value in self.values[first : first + step]),
            ]


def row_parts(rows: CacheRows, slot: int, scale: float | None = None) -> list[RowPart]:
    """Return the parts of a row in byte order.

    Parameters
    ----------
    rows : CacheRows
    slot : int
        A slot that the cache has.
    scale : float or None
        The layer's scale of a flat fp8 cache; None leaves its elements as they are stored.
    """
    layout = rows.layout
    packed = rows.take(np.array([slot], np.int64))
    structured = np.ascontiguousarray(packed).view(layout.row_dtype())[0, 0]
    parts = []
    for field in layout.fields:
        values = structured[field.name].astype(np.float32)
        with np.errstate(all="ignore"):
            if field.name == "nope" and layout.tile:
                values = values * np.repeat(structured["scale"], layout.tile)
            elif layout.needs_scale and scale is not None:
                values = values * np.float32(scale)
        start = field.offset
        if layout.is_planar:
            start = layout.offset_in_block(field.name, slot % rows.block_size, rows.block_size)
        raw = packed[0, field.offset : field.end].tobytes()
        parts.append(RowPart(field, start, raw, tuple(values.tolist())))
    return parts
