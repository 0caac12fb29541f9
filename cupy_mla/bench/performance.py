"""README's section on performance, from the stored results.

``python -m cupy_mla.bench.performance`` prints it, ``... performance README.md`` writes it there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from . import stored
from .step import FRAMEWORK, OURS
from .stored import StoredResult

BEGIN, END = "<!-- performance:begin -->\n", "<!-- performance:end -->"
COMMAND = "python -m cupy_mla.bench.performance README.md"

#: What the operations of the benchmark are called in Python.
_NAMES = {
    "insert": "GroupedCacheWriter.insert",
    "context": "GroupedCacheWriter.insert_context",
    "norm-rope": "fused_norm_rope",
    "q": "fused_q",
    "gather": "gather_cache",
    "convert": "convert_cache",
}
_NOTHING = (
    "Nothing has been measured yet: no results are stored in `cupy_mla/bench/results/`.\n"
    "`cupy-mla bench` measures on the GPU at hand.\n"
)
_HOW = (
    "Device times are of one call: medians of graph replays, over the number of calls in a graph. "
    "Before each replay the L2 cache is filled with other bytes, and the calls take turns with "
    "several sets of buffers, so that none finds its own there. The ceiling is the fastest of "
    "several plain copies that read and write as many bytes, in the same run. Host times are "
    "medians of rounds in which the calls take turns, and in brackets the fastest round's. A "
    "run's first measurements, at few tokens, take 0.3 to 0.4 us less than later ones, the copy's "
    "too; why is not known. "
    "[Notebook 4](notebooks/04_how_fast.ipynb) draws all sizes."
)
#: Other ways to do the work whose names do not say what they are.
_WAYS = {
    "scalar": "one launch for all layers in the published form, 2-byte loads and a block a token",
    "per layer": "a launch of this library for each layer",
    "torch": "torch's own operations",
    "Triton": "kernels of this benchmark in Triton, in sizes that suit many tokens",
    "torch, six steps": "torch for norm and RoPE, then this library's insert",
    "insert alone": "this library's insert, without norm and RoPE",
}


def render(results: Sequence[StoredResult]) -> str:
    """Return the section, without its heading.

    Parameters
    ----------
    results : sequence of StoredResult
        The oldest first.
    """
    if not results:
        return _NOTHING
    parts = [_HOW]
    for gpu in dict.fromkeys(result.gpu for result in results):
        parts += _gpu(gpu, [result for result in results if result.gpu == gpu])
    return "\n\n".join(parts) + "\n"


def _gpu(name: str, results: Sequence[StoredResult]) -> list[str]:
    parts = [f"### {name}", "\n".join(_source(result) for result in results)]
    rows = stored.newest(results, "rows", lambda row: bool(row["cold"]))
    parts += (
        _many_tokens(rows)
        + _few_tokens(rows)
        + _ways(rows)
        + _steps(stored.newest(results, "steps"))
    )
    parts += _host(stored.newest(results, "host")) + _compiled(stored.newest(results, "compile"))
    missing = dict.fromkeys(note for result in results for note in result.document["notes"])
    if missing:
        parts.append(f"Not measured there: {', '.join(missing)}.")
    return parts


def _source(result: StoredResult) -> str:
    """Say what was measured with what, and whether it still holds."""
    machine = result.document["machine"]
    cuda, packages = machine["cuda"] or {}, machine["packages"]
    facts = {
        "driver": cuda.get("driver"),
        "NVRTC": cuda.get("nvrtc"),
        "CuPy": packages["cupy"],
        "torch": packages["torch"],
    }
    known = ", ".join(f"{name} {value}" for name, value in facts.items() if value)
    kernels = (result.digest or "unknown")[:12]
    line = f"- `{result.name}`, {result.date[:10]}: {known}; kernels `{kernels}`."
    if result.is_current:
        return line
    return f"{line} **The kernels have changed since these were measured.**"


def _table(titles: Sequence[str], numbers: int, lines: Iterable[Sequence[str]]) -> str:
    """Make a table whose columns from number `numbers` on are aligned right, but for text."""
    rules = ["---" if column < numbers else "---:" for column in range(len(titles))]
    rows = [titles, rules, *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _us(value: float) -> str:
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def _name(row: dict[str, Any]) -> str:
    layers = f", {row['layers']} layers" if row["layers"] > 1 else ""
    return f"`{_NAMES.get(row['operation'], row['operation'])}`{layers}"


def _format(row: dict[str, Any]) -> str:
    return f"to {row['format']}" if row["operation"] == "convert" else str(row["format"])


def _others(row: dict[str, Any]) -> str:
    found = row["alternatives"].items()
    return ", ".join(f"{name} {_us(other['times'])}x" for name, other in found) or "-"


def _groups(rows: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the rows of each operation and format, in order of tokens."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["operation"], row["format"]), []).append(row)
    return [sorted(group, key=lambda row: row["tokens"]) for group in found.values()]


def _many_tokens(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Show the largest size of each operation and format that is bound by bytes."""
    lines = []
    for group in _groups(row for row in rows if not row["launch_bound"]):
        most = [row for row in group if row["tokens"] == group[-1]["tokens"]]
        percent = {row["pattern"]: f"{row['percent_of_ceiling']:.0f} %" for row in most}
        lines.append(
            [
                _name(most[0]),
                _format(most[0]),
                _others(most[0]),
                f"{most[0]['tokens']:,}",
                _us(most[0]["us"]["median"]),
                percent.get("contiguous", "-"),
                percent.get("random", "-"),
            ]
        )
    titles = ["many tokens", "format", "other ways", "tokens", "us"]
    titles += ["of the ceiling", "random slots"]
    return [_table(titles, 3, lines)] if lines else []


def _few_tokens(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Show the smallest size of each operation and format, where there are several."""
    lines = []
    for group in _groups(rows):
        if group[0]["tokens"] == group[-1]["tokens"]:
            continue
        row = group[0]
        lines.append(
            [
                _name(row),
                _format(row),
                _others(row),
                f"{row['tokens']:,}",
                _us(row["us"]["median"]),
                _us(row["empty_node_us"]),
                _us(row["ceiling"]["us"]["median"]),
            ]
        )
    titles = ["fewest tokens", "format", "other ways", "tokens", "us"]
    titles += ["an empty kernel, us", "the copy, us"]
    return [_table(titles, 3, lines)] if lines else []


def _ways(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Explain the other ways that were measured."""
    measured = dict.fromkeys(name for row in rows for name in row["alternatives"])
    known = [f"{name}: {_WAYS[name]}" for name in measured if name in _WAYS]
    text = f"Other ways take so many times as long. {'; '.join(known)}."
    return [text] if known else []


def _steps(steps: Iterable[dict[str, Any]]) -> list[str]:
    lines = []
    for row in steps:
        added = [row["steps"].get(name, {}).get("added_us") for name in (OURS, FRAMEWORK)]
        times = ["-" if value is None else _us(max(value, 0.0)) for value in added]
        lines.append(
            [row["format"], row["pattern"], row["framework"], f"{row['tokens']:,}", *times]
        )
    titles = ["added to a step of product, insert and read", "slots", "framework", "tokens"]
    titles += ["by cupy_mla, us", "by the framework, us"]
    return [_table(titles, 3, lines)] if lines else []


def _host(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Show the host time of each call at the fewest and the most tokens, by framework.

    With that of the fastest round: processors that other work shares are slow for seconds on end.
    """
    frameworks = list(dict.fromkeys(row["arrays"] for row in rows))
    calls: dict[tuple[str, str], dict[int, dict[str, str]]] = {}
    for row in rows:
        name = row["name"]
        if any(other["name"] == name and other["operation"] != row["operation"] for other in rows):
            name += f", as `{_NAMES.get(row['operation'], row['operation'])}`"
        sizes = calls.setdefault((name, row["format"]), {})
        times = f"{_us(row['us']['median'])} ({_us(row['us']['min'])})"
        sizes.setdefault(row["tokens"], {})[row["arrays"]] = times
    lines = [
        [name, layout, f"{tokens:,}", *(sizes[tokens].get(which, "-") for which in frameworks)]
        for (name, layout), sizes in calls.items()
        for tokens in sorted({min(sizes), max(sizes)})
    ]
    titles = ["host time of a call", "format", "tokens"]
    titles += [f"{name} arrays, us" for name in frameworks]
    return [_table(titles, 2, lines)] if lines else []


def _compiled(rows: Sequence[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    cold = sorted(1e3 * row["cold_s"] for row in rows)
    cached = sorted(1e3 * row["cached_s"] for row in rows)
    operations = dict.fromkeys(row["kernel"].partition("_")[0] for row in rows)
    return [
        f"The first call of a kernel waits {cold[0]:.0f} to {cold[-1]:.0f} ms for NVRTC, and "
        f"{cached[0]:.0f} to {cached[-1]:.0f} ms where CuPy's folder of compiled kernels has it "
        f"({len(rows)} kernels of {', '.join(operations)})."
    ]


def write(path: Path, section: str) -> None:
    """Put a section between its marks in a file.

    Raises
    ------
    ValueError
        For a file without the marks.
    """
    head, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"write: {path} must hold {BEGIN.strip()} and {END}, got none")
    path.write_text(f"{head}{begin}\n{section}\n{end}{tail}", encoding="utf-8")


def main(arguments: Sequence[str]) -> None:
    """Print the section, or write it to the file that is named."""
    section = render(stored.load())
    if arguments:
        write(Path(arguments[0]), section)
    else:
        sys.stdout.write(section)


if __name__ == "__main__":
    main(sys.argv[1:])
