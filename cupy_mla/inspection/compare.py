"""Two caches, byte for byte: where they differ first, and how much of each part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from cupy_mla.errors import reject_value
from cupy_mla.layouts import CacheLayout, LayoutField, check_sizes

from ._display import html_table, text_table
from .source import CacheRows, slot_numbers

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Difference:
    """One element that differs.

    Attributes
    ----------
    slot, block, row : int
        Its row in the first cache.
    part : str
        ``nope``, ``scale`` or ``rope``.
    element : int
        Its number in the part.
    first, second : str
        What both caches hold: the value, and its bytes in hexadecimal.
    """

    slot: int
    block: int
    row: int
    part: str
    element: int
    first: str
    second: str

    def __str__(self) -> str:
        place = (
            f"block {self.block}, row {self.row} (slot {self.slot}), {self.part}[{self.element}]"
        )
        return f"{place}: {self.first} and {self.second}"


@dataclass(frozen=True)
class CacheComparison:
    """What `compare_caches` found.

    Attributes
    ----------
    layout : CacheLayout
    rows : int
        Rows that were compared.
    rows_differing : int
    elements_differing : dict of str to int
        By part.
    first : Difference or None
        The one of the lowest slot, then of the first byte.
    """

    layout: CacheLayout
    rows: int
    rows_differing: int
    elements_differing: dict[str, int]
    first: Difference | None

    @property
    def equal(self) -> bool:
        """Whether all rows are the same bytes."""
        return self.rows_differing == 0

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain data that ``json.dumps`` takes."""
        return {
            "layout": self.layout.name,
            "equal": self.equal,
            "rows": self.rows,
            "rows_differing": self.rows_differing,
            "elements_differing": dict(self.elements_differing),
            "first": None if self.first is None else asdict(self.first),
        }

    def facts(self) -> dict[str, str]:
        """Return what was found as names and texts, for display."""
        shown = {"rows": f"{self.rows}, of which {self.rows_differing} differ"}
        if self.first is not None:
            shown["first"] = str(self.first)
            for part, count in self.elements_differing.items():
                shown[part] = f"{count} elements differ"
        return shown

    def __str__(self) -> str:
        return text_table(self.facts())

    def _repr_html_(self) -> str:
        """Table for Jupyter."""
        return html_table(self.facts(), "CacheComparison")


def compare_caches(
    first: Any,
    second: Any,
    kv_cache_dtype: str | CacheLayout,
    *,
    slots: Any = None,
    kv_lora_rank: int = 512,
    rope_dim: int = 64,
) -> CacheComparison:
    """Compare the rows of two caches of one layout byte by byte.

    Parameters
    ----------
    first, second : array [num_blocks, block_size, width]
        As for `audit_cache`; of as many slots, in blocks of any size, and on any device.
    kv_cache_dtype : str or CacheLayout
        See `get_layout`.
    slots : int32 or int64 array [n], or sequence of int, optional
        Rows to compare; those that the caches do not have are passed over. All by default.
    kv_lora_rank, rope_dim : int
        Elements of the latent and of the rotary part, where `kv_cache_dtype` is a name.

    Returns
    -------
    CacheComparison

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_mla import get_layout
    >>> from cupy_mla.inspection import compare_caches
    >>> first = np.zeros((2, 4, 656), np.uint8)
    >>> second = first.copy()
    >>> second[1, 2, 528] = 1
    >>> print(compare_caches(first, second, "fp8_ds_mla").first)
    block 1, row 2 (slot 6), rope[0]: 0 (00 00) and 9.18355e-41 (01 00)
    """
    operation = "compare_caches"
    sizes = check_sizes(operation, kv_lora_rank, rope_dim)
    sides = [
        CacheRows(operation, name, cache, kv_cache_dtype, sizes)
        for name, cache in (("first", first), ("second", second))
    ]
    chosen = None if slots is None else slot_numbers(operation, slots, sides[0])[0]
    return compare_rows(operation, sides[0], sides[1], chosen)


def compare_rows(
    operation: str,
    first: CacheRows,
    second: CacheRows,
    slots: Array | None,
    on_chunk: Callable[[int], None] | None = None,
) -> CacheComparison:
    """Compare rows.

    Parameters
    ----------
    operation : str
        For messages.
    first, second : CacheRows
        Of one layout.
    slots : int64 array or None
        Rising slots that the caches have; None for all.
    on_chunk : callable, optional
        Called with the number of rows seen before each piece of work.
    """
    if first.num_slots != second.num_slots:
        reject_value(
            operation,
            "both caches",
            "have the same number of slots",
            f"{first.num_slots} and {second.num_slots}",
        )
    layout = first.layout
    counts = dict.fromkeys((field.name for field in layout.fields), 0)
    seen = differing = 0
    found: Difference | None = None
    for numbers, packed in first.chunks(slots):
        if on_chunk is not None:
            on_chunk(seen)
        seen += numbers.size
        other = second.take(numbers)
        rows = np.flatnonzero((packed != other).any(axis=1))
        if not rows.size:
            continue
        differing += rows.size
        unequal = packed[rows] != other[rows]
        for field in layout.fields:
            counts[field.name] += int(np.count_nonzero(_elements(unequal, field)))
        if found is None:
            row = int(rows[0])
            found = _first(first, int(numbers[row]), packed[row], other[row])
    return CacheComparison(layout, seen, differing, counts, found)


def _elements(unequal: Array, field: LayoutField) -> Array:
    """Return which elements of a part hold an unequal byte."""
    part = unequal[:, field.offset : field.end]
    elements: Array = np.any(part.reshape(len(part), field.count, -1), axis=2)
    return elements


def _first(rows: CacheRows, slot: int, packed: Array, other: Array) -> Difference:
    byte = int(np.argmax(packed != other))
    field = next(field for field in rows.layout.fields if byte < field.end)
    element = (byte - field.offset) // field.dtype.itemsize
    block, row = divmod(slot, rows.block_size)
    texts = [element_text(bytes_, field, element) for bytes_ in (packed, other)]
    return Difference(slot, block, row, field.name, element, *texts)


def element_text(packed: Array, field: LayoutField, element: int) -> str:
    """Return the value of an element of a row, and its bytes."""
    start = field.offset + element * field.dtype.itemsize
    raw = np.ascontiguousarray(packed[start : start + field.dtype.itemsize])
    value = float(raw.view(field.dtype)[0])
    return f"{value:g} ({raw.tobytes().hex(' ').upper()})"
