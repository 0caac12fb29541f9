"""Figures of a report: percent of the ceiling as bars, microseconds over tokens as lines."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from cupy_mla.errors import BackendUnavailable

from .measure import Row

_BAR_INCHES, _LEAST_INCHES, _HEIGHT = 0.3, 8.0, 4.5


def matplotlib() -> ModuleType:
    """Return ``matplotlib.figure``.

    Raises
    ------
    BackendUnavailable
        Where it is not installed; the text says what installs it.
    """
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise BackendUnavailable(
            f"--plot needs matplotlib, which cannot be imported ({error}): pip install matplotlib, "
            "or pip install 'cupy-mla[notebooks]'"
        ) from error


def _group(row: Row) -> str:
    buffers = "" if row.rotation.cold else ", warm"
    return f"{row.problem.layout.name}, {row.problem.pattern}{buffers}"


def series(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each format, pattern and temperature, in order of tokens."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(_group(row), []).append(row)
    return {name: sorted(part, key=lambda row: row.problem.tokens) for name, part in found.items()}


def draw(rows: Sequence[Row], title: str, path: str) -> None:
    """Draw the rows of one operation or several, and write the figure to a file.

    Parameters
    ----------
    rows : sequence of Row
        At least one.
    title : str
    path : str
        Its ending says what kind of file it becomes.
    """
    operations = list(dict.fromkeys(row.problem.operation for row in rows))
    most = max(sum(row.problem.operation == name for row in rows) for name in operations)
    width = max(_LEAST_INCHES, _BAR_INCHES * most)
    figure = matplotlib().Figure(figsize=(2 * width, _HEIGHT * len(operations)), layout="tight")
    axes = figure.subplots(len(operations), 2, squeeze=False)
    for (bars, lines), name in zip(axes, operations, strict=True):
        groups = series([row for row in rows if row.problem.operation == name])
        _draw_bars(bars, groups)
        _draw_lines(lines, groups)
        bars.set_title(f"{name}: percent of the copy ceiling (hatched: launch-bound)")
        lines.set_title(f"{name}: time of a call")
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def _draw_bars(axis: Any, groups: dict[str, list[Row]]) -> None:
    sizes = sorted({row.problem.tokens for part in groups.values() for row in part})
    width = 0.8 / len(groups)
    for number, (name, part) in enumerate(groups.items()):
        shift = (number - (len(groups) - 1) / 2) * width
        bars = axis.bar(
            [sizes.index(row.problem.tokens) + shift for row in part],
            [row.percent_of_ceiling for row in part],
            width,
            label=name,
        )
        for bar, row in zip(bars, part, strict=True):
            if row.launch_bound:
                bar.set_hatch("///")
    axis.axhline(100, color="black", linewidth=0.8)
    axis.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axis.set_xlabel("tokens")
    axis.set_ylabel("percent of the ceiling")
    axis.legend(fontsize="small", loc="lower right")


def _draw_lines(axis: Any, groups: dict[str, list[Row]]) -> None:
    for name, part in groups.items():
        tokens = [row.problem.tokens for row in part]
        (line,) = axis.plot(tokens, [row.figures.median for row in part], marker="o", label=name)
        ceiling = [row.ceiling.figures.median for row in part]
        axis.plot(tokens, ceiling, linestyle=":", color=line.get_color())
    sizes = sorted({row.problem.tokens for part in groups.values() for row in part})
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.minorticks_off()
    axis.set_xlabel("tokens")
    axis.set_ylabel("us (dotted: the copy)")
    axis.legend(fontsize="small")
