"""What the commands print with: tables for people, JSON for programs, progress on stderr.

rich is imported inside the functions, so that ``cupy-mla --help`` and ``--json`` do without it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TextIO

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Column:
    """A column of a table; a column that wraps is the one that gives way on a narrow terminal."""

    title: str
    justify: Literal["left", "right"] = "left"
    wrap: bool = False


def console(file: TextIO | None = None) -> Console:
    """Return a console for `file`, stdout by default, that takes no text for markup."""
    from rich.console import Console

    class PlainConsole(Console):
        def on_broken_pipe(self) -> None:
            raise  # rich calls this while it handles the BrokenPipeError

    return PlainConsole(file=file or sys.stdout, markup=False, highlight=False, emoji=False)


def print_json(document: Any) -> None:
    """Write `document` to stdout as one JSON document."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


def print_table(out: Console, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Print `rows` as a table, or as a list of records where the terminal is too narrow for it.

    Parameters
    ----------
    out : rich.console.Console
        Where to print.
    columns : sequence of Column
        Titles and alignment.
    rows : sequence of sequence of str
        One text a cell, exactly as long as `columns`.
    """
    from rich import box
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE, pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(
            column.title, justify=column.justify, no_wrap=not column.wrap, overflow="fold"
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    if Measurement.get(out, out.options, table).minimum <= out.width:
        out.print(table)
        return
    width = max(len(column.title) for column in columns)
    for number, row in enumerate(rows):
        if number:
            out.print()
        for column, cell in zip(columns, row, strict=True):
            out.print(f"{column.title:<{width}}  {cell}", soft_wrap=False)


@contextmanager
def progress(description: str, total: int) -> Iterator[Callable[[str], None]]:
    """Show a progress bar on stderr while the block runs, where stderr is a terminal.

    Parameters
    ----------
    description : str
        What is done, in one or two words.
    total : int
        Number of steps.

    Yields
    ------
    callable
        ``step(name)`` finishes one step and shows the name of the next one.
    """
    if not sys.stderr.isatty():
        yield lambda name: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        console=console(sys.stderr),
        transient=True,
    )
    with bar:
        task = bar.add_task(description, total=total)
        yield lambda name: bar.update(task, advance=1, description=f"{description} {name}")
