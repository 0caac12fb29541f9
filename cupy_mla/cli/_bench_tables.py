"""What ``cupy-mla bench`` prints: ratios first, microseconds second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cupy_mla.bench.figures import LAUNCH_BOUND_NODES, Figures
from cupy_mla.bench.measure import Row
from cupy_mla.bench.report import Report
from cupy_mla.bench.step import FRAMEWORK, NOTHING, OURS, StepRow
from cupy_mla.cli._console import Column, print_facts, print_table

if TYPE_CHECKING:
    from rich.console import Console


def show(out: Console, report: Report) -> None:
    """Print everything that a report holds."""
    out.print(f"{report.device} ({report.reason})")
    digest = report.machine["kernel_sources"]
    out.print(f"Kernel sources: {digest['sha256'][:16] if digest else 'missing'}")
    if not report.timed:
        out.print(
            "Without a GPU nothing is timed: bytes are counted, and the reference is checked."
        )
        _counted(out, report)
    for operation in dict.fromkeys(row.problem.operation for row in report.rows):
        _rows(out, [row for row in report.rows if row.problem.operation == operation])
    if report.rows:
        out.print()
        out.print(_legend(report.rows))
    _steps(out, report.steps)
    _host(out, report)
    _compiled(out, report)
    if report.notes:
        out.print()
        print_facts(out, "Not measured", report.notes)
    _checks(out, report)


def microseconds(value: float) -> str:
    """Return a time with three digits."""
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def times(value: float | None) -> str:
    """Return a ratio with three digits, or a dash."""
    return "-" if value is None else f"{microseconds(value)}x"


def _figures(figures: Figures) -> list[str]:
    return [microseconds(value) for value in (figures.median, figures.minimum, figures.p90)]


_FIGURES = (Column("us", "right"), Column("min", "right"), Column("p90", "right"))


def _rows(out: Console, rows: Sequence[Row]) -> None:
    problem = rows[0].problem
    names = list(dict.fromkeys(name for row in rows for name in row.alternatives))
    both = len({row.rotation.cold for row in rows}) > 1
    columns = [
        Column("Format"),
        Column("Tokens", "right"),
        Column("Slots"),
        *([Column("Buffers")] if both else []),
        Column("Of the\nceiling", "right"),
        *(Column(_title(name), "right") for name in names),
        *_FIGURES,
        Column("Copy\nus", "right"),
        Column("GB/s", "right"),
        Column("Above\nempty", "right"),
        Column("Bound"),
    ]
    lines = [
        [
            row.problem.layout.name,
            str(row.problem.tokens),
            row.problem.pattern,
            *([_buffers(row)] if both else []),
            f"{row.percent_of_ceiling:.0f} %",
            *(times(row.ratio(name)) for name in names),
            *_figures(row.figures),
            microseconds(row.ceiling.figures.median),
            f"{row.gigabytes_per_second:.0f}",
            microseconds(max(row.figures.median - row.empty, 0.0)),
            "launch" if row.launch_bound else "bytes",
        ]
        for row in rows
    ]
    facts = [f"{problem.layers} layers"] if problem.layers > 1 else []
    facts += [
        f"blocks of {problem.block_size}",
        *([] if both else [f"{_buffers(rows[0])} buffers"]),
    ]
    out.print()
    out.print(f"{problem.operation}, {', '.join(facts)}", style="bold")
    print_table(out, columns, lines)


def _buffers(row: Row) -> str:
    return "cold" if row.rotation.cold else "warm"


def _legend(rows: Sequence[Row]) -> str:
    return (
        "Of the ceiling: a copy that reads and writes as many bytes takes so many percent of the "
        "time. Ratios: how many times as long the same work takes in other ways. Cold: buffers "
        "lie in device memory; warm: one buffer, in the L2 cache as far as it fits. Launch-bound: "
        f"less than {LAUNCH_BOUND_NODES:.0f} empty kernel nodes ({rows[0].empty:.2f} us each)."
    )


def _title(name: str) -> str:
    return name.replace(", ", ",\n").replace(" ", "\n", 1)


def _steps(out: Console, steps: Sequence[StepRow]) -> None:
    if not steps:
        return
    columns = [
        Column("Format"),
        Column("Tokens", "right"),
        Column("Slots"),
        Column("Added by\ncupy_mla", "right"),
        Column("Added by\nframework", "right"),
        Column("Step with\ncupy_mla", "right"),
        Column("Step with\nframework", "right"),
        Column("Nothing\nstored", "right"),
    ]
    lines = [
        [
            row.problem.layout.name,
            str(row.problem.tokens),
            row.problem.pattern,
            *(_added(row, name) for name in (OURS, FRAMEWORK)),
            *(_median(row, name) for name in (OURS, FRAMEWORK, NOTHING)),
        ]
        for row in steps
    ]
    out.print()
    out.print(
        f"A step in one graph: product ({steps[0].framework}), insert, read of the rows; us",
        style="bold",
    )
    print_table(out, columns, lines)


def _median(row: StepRow, name: str) -> str:
    figures = row.figures.get(name)
    return "-" if figures is None else microseconds(figures.median)


def _added(row: StepRow, name: str) -> str:
    added = row.added(name)
    return "-" if added is None else f"{added:.1f}"


def _host(out: Console, report: Report) -> None:
    if not report.host:
        return
    columns = [Column("Host time of a call"), Column("Format"), Column("Tokens", "right")]
    columns += [Column("Arrays"), *_FIGURES]
    lines = [
        [
            row.name,
            row.problem.layout.name,
            str(row.problem.tokens),
            row.arrays,
            *_figures(row.figures),
        ]
        for row in report.host
    ]
    out.print()
    print_table(out, columns, lines)


def _compiled(out: Console, report: Report) -> None:
    if not report.compiled:
        return
    columns = [Column("First call"), Column("Compiled", "right"), Column("From disk", "right")]
    lines = [
        [row.entry, f"{row.cold * 1e3:.0f} ms", f"{row.cached * 1e3:.1f} ms"]
        for row in report.compiled
    ]
    out.print()
    print_table(out, columns, lines)


def _counted(out: Console, report: Report) -> None:
    columns = [Column("Operation"), Column("Format"), Column("Tokens", "right")]
    columns += [Column(name, "right") for name in ("Read", "Written", "Bytes", "A token")]
    lines = {}
    for problem, traffic in report.counted:  # patterns move the same bytes
        name = (problem.operation, problem.layout.name, str(problem.tokens))
        sizes = [f"{size:,}" for size in (traffic.read, traffic.written, traffic.total)]
        lines[name] = [*name, *sizes, f"{traffic.total / problem.tokens:,.0f}"]
    out.print()
    print_table(out, columns, list(lines.values()))


def _checks(out: Console, report: Report) -> None:
    if not report.checks:
        return
    compared = sum(check.compared for check in report.checks)
    against = ", ".join(dict.fromkeys(check.against for check in report.checks))
    subjects = ", ".join(dict.fromkeys(check.subject for check in report.checks))
    out.print()
    if report.ok:
        text = f"No difference in {compared:,} bytes: {subjects} against {against}."
        out.print(text, style="bold green")
    else:
        wrong = sum(check.differences > 0 for check in report.checks)
        text = f"{wrong} of {len(report.checks)} comparisons found differences ({subjects})."
        out.print(text, style="bold red")
