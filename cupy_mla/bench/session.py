"""Runs what was asked for, on a GPU or without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cupy_mla.layouts import get_layout

from . import compile_time, step, verify
from .host_calls import BATCH, ROUNDS
from .host_calls import measure as measure_host
from .machine import Machine
from .measure import Bench
from .operations import OPERATIONS
from .problem import KV_LORA_RANK, PATTERNS, ROPE_DIM, Operation, Problem
from .report import Report

#: What a session can measure.
SECTIONS = ("gpu", "host", "compile")

#: Kernels of the registry that the first call of an operation may have to compile.
_KERNELS = {
    "insert": ("insert",),
    "context": ("context",),
    "norm-rope": ("norm_rope",),
    "q": ("query", "fused_q"),
    "gather": ("gather", "copy"),
    "convert": ("convert", "gather"),
}


@dataclass(frozen=True)
class Settings:
    """What is asked for.

    Attributes
    ----------
    operations : tuple of str
    layers : int
    tokens : tuple of int
        Empty for each operation's own.
    formats : tuple of str
        Empty for each operation's own.
    patterns : tuple of str
    block_size : int
    cold, warm : bool
        Buffers in device memory, and in the L2 cache.
    check : bool
    step : bool
    sections : tuple of str
    repeats : int
        Replays of each graph.
    host_batch, host_rounds : int
        Calls between two looks at the clock, and how often.
    """

    operations: tuple[str, ...] = ("insert",)
    layers: int = 5
    tokens: tuple[int, ...] = ()
    formats: tuple[str, ...] = ()
    patterns: tuple[str, ...] = PATTERNS
    block_size: int = 64
    cold: bool = True
    warm: bool = False
    check: bool = False
    step: bool = False
    sections: tuple[str, ...] = SECTIONS
    repeats: int = 30
    host_batch: int = BATCH
    host_rounds: int = ROUNDS

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain data."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }


def problems(settings: Settings, operation: Operation) -> list[Problem]:
    """Return the problems of an operation; those of one token have no pattern to choose."""
    found: dict[Problem, None] = {}
    patterns = settings.patterns if operation.patterned else PATTERNS[:1]
    for name in settings.formats or operation.formats:
        for wanted in settings.tokens or operation.tokens:
            block = settings.block_size if operation.whole_blocks else 1
            tokens = -(-wanted // block) * block
            for pattern in patterns if tokens > 1 else patterns[:1]:
                layout = get_layout(name, kv_lora_rank=KV_LORA_RANK, rope_dim=ROPE_DIM)
                layers = settings.layers if operation.layered else 1
                sizes = (layers, tokens, settings.block_size, pattern)
                found[Problem(operation.name, layout, *sizes)] = None
    return list(found)


def tasks(settings: Settings, *, timed: bool) -> int:
    """Return how many steps a session takes, for a progress bar."""
    return sum(1 for _ in _tasks(settings, timed=timed))


@dataclass(frozen=True)
class _Task:
    label: str
    operation: Operation
    problem: Problem
    kind: str


def _tasks(settings: Settings, *, timed: bool) -> Iterator[_Task]:
    for name in settings.operations:
        operation = OPERATIONS[name]
        found = problems(settings, operation)
        for problem in found:
            if not timed:
                yield _Task(problem.label, operation, problem, "reference")
                continue
            if settings.check:
                yield _Task(f"{problem.label}, check", operation, problem, "check")
            if "gpu" in settings.sections:
                if settings.cold:
                    yield _Task(f"{problem.label}, cold", operation, problem, "cold")
                if settings.warm:
                    yield _Task(f"{problem.label}, warm", operation, problem, "warm")
            if settings.step and name == "insert":
                yield _Task(f"{problem.label}, step", operation, problem, "step")
        if timed and "host" in settings.sections:
            yield _Task(f"{name}, host", operation, found[0], "host")
        if timed and "compile" in settings.sections:
            yield _Task(f"{name}, compilation", operation, found[0], "compile")


def _of_each_size(found: Sequence[Problem]) -> list[Problem]:
    """Return one problem for each number of tokens, the fewest first: the host's work is alike."""
    sizes = {problem.tokens: problem for problem in reversed(found)}
    return [sizes[tokens] for tokens in sorted(sizes)]


def without_gpu(settings: Settings, report: Report, begin: Callable[[str], None]) -> None:
    """Check the reference, and count the bytes of each problem."""
    checked = set()
    for task in _tasks(settings, timed=False):
        begin(task.label)
        report.counted.append((task.problem, task.operation.traffic(task.problem)))
        problem = verify.checked_problem(task.problem)
        if problem not in checked:
            checked.add(problem)
            report.checks.append(verify.check_reference(task.operation, problem))


class GpuSession:
    """Measures everything that is asked for.

    Parameters
    ----------
    settings : Settings
    machine : Machine
    report : Report
        Gets what is found.
    """

    def __init__(self, settings: Settings, machine: Machine, report: Report) -> None:
        self._settings, self._machine, self._report = settings, machine, report
        self._bench = Bench(machine, settings.repeats)
        report.notes = machine.notes

    def run(self, begin: Callable[[str], None]) -> None:
        """Run all tasks; `begin` is told the name of each."""
        runners = {
            "check": self._check,
            "cold": self._cold,
            "warm": self._warm,
            "step": self._step,
            "host": self._host,
            "compile": self._compile,
        }
        for task in _tasks(self._settings, timed=True):
            begin(task.label)
            runners[task.kind](task.operation, task.problem)

    def _check(self, operation: Operation, problem: Problem) -> None:
        self._report.checks += verify.check_device(operation, problem, self._machine)

    def _cold(self, operation: Operation, problem: Problem) -> None:
        self._report.rows.append(self._bench.row(operation, problem, cold=True))

    def _warm(self, operation: Operation, problem: Problem) -> None:
        self._report.rows.append(self._bench.row(operation, problem, cold=False))

    def _step(self, operation: Operation, problem: Problem) -> None:
        row = step.measure(problem, self._machine, self._bench)
        if row is None:
            self._report.notes[f"step, {problem.layout.name}"] = "needs torch, which is not at hand"
        else:
            self._report.steps.append(row)

    def _host(self, operation: Operation, problem: Problem) -> None:
        settings = self._settings
        self._report.host += measure_host(
            operation,
            _of_each_size(problems(settings, operation)),
            self._machine,
            batch=settings.host_batch,
            rounds=settings.host_rounds,
        )

    def _compile(self, operation: Operation, problem: Problem) -> None:
        formats = self._settings.formats or operation.formats
        wanted = compile_time.entries(_KERNELS[operation.name], formats)
        self._report.compiled += compile_time.measure(wanted)
