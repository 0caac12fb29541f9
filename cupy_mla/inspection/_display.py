"""Names and values as text and as HTML."""

from __future__ import annotations

import html
from collections.abc import Mapping


def text_table(facts: Mapping[str, str], title: str = "") -> str:
    """Return names and values in two columns, indented below a title if there is one."""
    width = max(map(len, facts))
    indent = "  " if title else ""
    lines = [f"{indent}{name.ljust(width)}  {value}" for name, value in facts.items()]
    return "\n".join([title, *lines] if title else lines)


def html_table(facts: Mapping[str, str], title: str) -> str:
    """Return names and values as a table for Jupyter."""
    cells = "".join(
        f'<tr><th style="text-align:left">{html.escape(name)}</th>'
        f'<td style="text-align:left">{html.escape(value)}</td></tr>'
        for name, value in facts.items()
    )
    return f"<table><caption>{html.escape(title)}</caption>{cells}</table>"
