"""Figures of a report: percent of the ceiling as bars, microseconds over tokens as lines."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from cupy_mla.errors import BackendUnavailable

from .measure import Row
from .problem import PATTERNS

_BAR_INCHES, _LEAST_INCHES, _HEIGHT = 0.3, 7.0, 4.5
_LEGEND_INCHES = 2.5


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


def check_path(path: str) -> None:
    """Raise for a file whose ending names no kind of picture.

    Raises
    ------
    ValueError
        With the endings that there are.
    """
    kinds = matplotlib().Figure().canvas.get_supported_filetypes()
    if os.path.splitext(path)[1].removeprefix(".").lower() not in kinds:
        known = ", ".join(f".{kind}" for kind in sorted(kinds))
        raise ValueError(f"--plot must name a file that ends in one of {known}, got {path!r}")


def _group(row: Row) -> str:
    buffers = "" if row.rotation.cold else ", warm"
    return f"{row.problem.layout.name}, {row.problem.pattern}{buffers}"


def series(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each format, pattern and temperature, in order of tokens."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(_group(row), []).append(row)
    return {name: sorted(part, key=lambda row: row.problem.tokens) for name, part in found.items()}


def _looks(groups: dict[str, list[Row]]) -> dict[str, dict[str, Any]]:
    """Return colour, opacity, marker and line of each group: a format has one colour."""
    formats = list(dict.fromkeys(part[0].problem.layout.name for part in groups.values()))
    return {
        name: {
            "color": f"C{formats.index(part[0].problem.layout.name)}",
            "alpha": 1.0 if part[0].problem.pattern == PATTERNS[0] else 0.5,
            "marker": "o" if part[0].rotation.cold else "s",
            "linestyle": "-" if part[0].problem.pattern == PATTERNS[0] else "--",
        }
        for name, part in groups.items()
    }


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
    width = 2 * max(_LEAST_INCHES, _BAR_INCHES * most) + _LEGEND_INCHES
    figure = matplotlib().Figure(figsize=(width, _HEIGHT * len(operations)), layout="constrained")
    axes = figure.subplots(len(operations), 2, squeeze=False)
    for (bars, lines), name in zip(axes, operations, strict=True):
        groups = series([row for row in rows if row.problem.operation == name])
        looks = _looks(groups)
        _draw_bars(bars, groups, looks)
        _draw_lines(lines, groups, looks)
        bars.set_title(f"{name}: percent of the copy ceiling (hatched: launch-bound)")
        lines.set_title(f"{name}: time of a call (dotted: the copy)")
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def _draw_bars(axis: Any, groups: dict[str, list[Row]], looks: dict[str, dict[str, Any]]) -> None:
    sizes = sorted({row.problem.tokens for part in groups.values() for row in part})
    width = 0.8 / len(groups)
    for number, (name, part) in enumerate(groups.items()):
        shift = (number - (len(groups) - 1) / 2) * width
        bars = axis.bar(
            [sizes.index(row.problem.tokens) + shift for row in part],
            [row.percent_of_ceiling for row in part],
            width,
            color=looks[name]["color"],
            alpha=looks[name]["alpha"],
        )
        for bar, row in zip(bars, part, strict=True):
            if row.launch_bound:
                bar.set_hatch("///")
    axis.axhline(100, color="black", linewidth=0.8)
    axis.set_xticks(range(len(sizes)), [f"{size:,}" for size in sizes])
    axis.set_xlabel("tokens")
    axis.set_ylabel("percent of the ceiling")


def _draw_lines(axis: Any, groups: dict[str, list[Row]], looks: dict[str, dict[str, Any]]) -> None:
    with_copy = set()
    for name, part in groups.items():
        tokens = [row.problem.tokens for row in part]
        axis.plot(tokens, [row.figures.median for row in part], label=name, **looks[name])
        color = looks[name]["color"]
        if color not in with_copy:  # patterns move as many bytes
            with_copy.add(color)
            ceiling = [row.ceiling.figures.median for row in part]
            axis.plot(tokens, ceiling, linestyle=":", color=color)
    sizes = sorted({row.problem.tokens for part in groups.values() for row in part})
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=30)
    ticker = importlib.import_module("matplotlib.ticker")
    axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.minorticks_off()
    axis.grid(axis="y", alpha=0.3)
    axis.set_xlabel("tokens")
    axis.set_ylabel("microseconds")
    axis.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.02, 1.0))
