"""Byte maps of row layouts for people: lines of text, and a picture with a table for Jupyter."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .layouts import CacheLayout, LayoutField

__all__ = ["as_html", "as_text", "place", "title"]

_COLOURS = {"nope": "#4c78a8", "scale": "#f58518", "rope": "#54a24b"}


def title(layout: CacheLayout) -> str:
    """Return a line about all of a row."""
    scales = f", {layout.scale_format} scales" if layout.scale_format else ""
    place = ", row r in a block of B rows" if layout.is_planar else ""
    return (
        f"{layout.name}: {layout.row_bytes} bytes a row{place} "
        f"(kv_lora_rank {layout.kv_lora_rank}, rope_dim {layout.rope_dim}{scales})"
    )


def place(layout: CacheLayout, field: LayoutField) -> str:
    """Say where a part begins: in the row, or in a block of B rows of which this is row r."""
    if not layout.is_planar:
        return str(field.offset)
    plane = layout.planes[field.plane]
    start = f"{plane.offset}*B + " if plane.offset else ""
    shift = f" + {field.offset - plane.offset}" if field.offset > plane.offset else ""
    return f"{start}{plane.nbytes}*r{shift}"


def as_text(layout: CacheLayout) -> str:
    """Return the byte map as plain text."""
    table = _rows(layout)
    widths = [max(len(row[i]) for row in table) for i in range(3)]
    lines = [
        "  " + "  ".join([*(row[i].ljust(widths[i]) for i in range(3)), row[3]]) for row in table
    ]
    return "\n".join([title(layout), *lines])


def as_html(layout: CacheLayout) -> str:
    """Return a bar to scale, and the table of the parts."""
    bar = "".join(
        f'<div title="{field.name} [{field.offset}, {field.end})" style="width:'
        f'{100 * field.nbytes / layout.row_bytes:.2f}%;background:{_COLOURS[field.name]}"></div>'
        for field in layout.fields
    )
    cells = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in _rows(layout)
    )
    return (
        f"<div><b>{html.escape(title(layout))}</b>"
        f'<div style="display:flex;height:1.2em;max-width:40em">{bar}</div>'
        "<table><tr><th>bytes</th><th>part</th><th>elements</th><th>read as</th></tr>"
        f"{cells}</table></div>"
    )


def _rows(layout: CacheLayout) -> list[tuple[str, str, str, str]]:
    return [
        (
            place(layout, field) if layout.is_planar else f"[{field.offset}, {field.end})",
            field.name,
            f"{field.count} x {field.dtype.name}",
            field.note,
        )
        for field in layout.fields
    ]
