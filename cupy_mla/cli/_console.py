"""What the commands print with: tables for people, JSON for programs, progress on stderr.

rich is imported inside the functions, so that ``cupy-mla --help`` and ``--json`` do without it.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TextIO

if TYPE_CHECKING:
    from rich.console import Console

#: Blanks between two columns: the padding and the divider.
_GAP = 2
#: A column that wraps is at least this wide, if its text is.
_LEAST_WRAPPED = 16


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes
    ----------
    title : str
        May have several lines, and a word divided between them by a hyphen.
    justify : {"left", "right"}
    wrap : bool
        Whether the column gives way on a narrow terminal.
    """

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
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    rule = box.SIMPLE
    if out.options.ascii_only:  # rich would draw dividers too
        rule = box.Box(str(rule).replace("\N{BOX DRAWINGS LIGHT HORIZONTAL}", "-"), ascii=True)
    table = Table(box=rule, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    needed = _GAP * (len(columns) - 1)
    for number, column in enumerate(columns):
        lines = [*column.title.split("\n"), *(row[number] for row in rows)]
        width = max(cell_len(line) for line in lines)
        if column.wrap:
            width = min(width, _LEAST_WRAPPED)
        needed += width
        table.add_column(
            Text(column.title),
            justify=column.justify,
            vertical="top",
            min_width=width,
            no_wrap=not column.wrap,
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    if needed <= out.width:
        out.print(table)
        return
    titles = [column.title.replace("-\n", "").replace("\n", " ") for column in columns]
    for number, row in enumerate(rows):
        if number:
            out.print()
        _print_pairs(out, dict(zip(titles, row, strict=True)))


def print_facts(out: Console, title: str, facts: Mapping[str, str]) -> None:
    """Print a title and, indented below it, names and values; long values wrap."""
    out.print(title, style="bold")
    _print_pairs(out, {f"  {name}": value for name, value in facts.items()})


def _print_pairs(out: Console, pairs: Mapping[str, str]) -> None:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in pairs.items():
        grid.add_row(Text(name), Text(value))
    out.print(grid)


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
        ``begin(name)``, to be called as each step begins.
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
    done = itertools.count()
    with bar:
        task = bar.add_task(description, total=total)
        yield lambda name: bar.update(
            task, completed=next(done), description=f"{description} {name}", refresh=True
        )
