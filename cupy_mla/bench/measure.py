"""Measuring one problem: the operation, the ceiling, and everything it is compared with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import rotation
from .baselines import COPY_VARIANTS
from .figures import Figures, gigabytes_per_second, is_launch_bound
from .machine import Machine, guarded
from .problem import Call, Instance, Operation, Problem
from .rotation import Rotation
from .traffic import Traffic


@dataclass(frozen=True)
class Ceiling:
    """The fastest copy of as many bytes, read and written.

    Attributes
    ----------
    figures : Figures
        Microseconds.
    variant : str
        How it was launched.
    """

    figures: Figures
    variant: str


@dataclass(frozen=True)
class Row:
    """What was measured of one problem. Times are of one call, in microseconds.

    Attributes
    ----------
    problem : Problem
    traffic : Traffic
    rotation : Rotation
    figures : Figures
    empty : float
        An empty kernel node, in a graph of as many.
    ceiling : Ceiling
    alternatives : dict of str to Figures
    """

    problem: Problem
    traffic: Traffic
    rotation: Rotation
    figures: Figures
    empty: float
    ceiling: Ceiling
    alternatives: dict[str, Figures] = field(default_factory=dict)

    @property
    def percent_of_ceiling(self) -> float:
        """Return how near the operation comes to the copy."""
        return 100 * self.ceiling.figures.median / self.figures.median

    @property
    def launch_bound(self) -> bool:
        """Whether the time says more about launching than about moving bytes."""
        return is_launch_bound(self.figures.median, self.empty)

    @property
    def gigabytes_per_second(self) -> float:
        """Return the rate at which the fewest bytes were moved."""
        return gigabytes_per_second(self.traffic.total, self.figures.median)

    def ratio(self, name: str) -> float | None:
        """Return how many times as long an alternative takes; None where it was not measured."""
        other = self.alternatives.get(name)
        return None if other is None else other.median / self.figures.median

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain data."""
        problem = self.problem
        return {
            "operation": problem.operation,
            "format": problem.layout.name,
            "scale_format": problem.layout.scale_format,
            "input": problem.input_dtype.name,
            "layers": problem.layers,
            "tokens": problem.tokens,
            "block_size": problem.block_size,
            "pattern": problem.pattern,
            "cold": self.rotation.cold,
            "rotation": self.rotation.to_dict(),
            "bytes": self.traffic.to_dict(),
            "us": self.figures.to_dict(),
            "us_above_empty_node": self.figures.median - self.empty,
            "empty_node_us": self.empty,
            "launch_bound": self.launch_bound,
            "gb_per_s": self.gigabytes_per_second,
            "percent_of_ceiling": self.percent_of_ceiling,
            "ceiling": {
                "us": self.ceiling.figures.to_dict(),
                "gb_per_s": gigabytes_per_second(self.traffic.total, self.ceiling.figures.median),
                "variant": self.ceiling.variant,
            },
            "alternatives": {
                name: {"us": figures.to_dict(), "times": self.ratio(name)}
                for name, figures in self.alternatives.items()
            },
        }


class Bench:
    """Measures problems on a machine, and remembers what several of them share.

    Parameters
    ----------
    machine : Machine
    repeats : int
        Replays of each graph.
    """

    def __init__(self, machine: Machine, repeats: int) -> None:
        self._machine = machine
        self._repeats = repeats
        self._empty: dict[int, float] = {}
        self._ceilings: dict[tuple[int, int, Rotation], Ceiling] = {}
        with machine.timer.scope():
            self._flush = machine.baselines.flush(rotation.L2_TIMES * machine.timer.l2_bytes)

    def row(self, operation: Operation, problem: Problem, *, cold: bool) -> Row:
        """Measure a problem with all of its alternatives."""
        machine = self._machine
        traffic = operation.traffic(problem)
        turns = rotation.choose(traffic.total, machine.timer.l2_bytes, cold=cold)
        with machine.timer.scope():
            instances = [
                operation.make(problem, machine.arrays, machine) for _ in range(turns.buffers)
            ]
            machine.timer.synchronize()
        figures = self.time([instance.run for instance in instances], turns)
        return Row(
            problem,
            traffic,
            turns,
            figures,
            self.empty(turns.calls),
            self.ceiling(traffic, turns),
            self._alternatives(instances, turns),
        )

    def _alternatives(self, instances: Sequence[Instance], turns: Rotation) -> dict[str, Figures]:
        found = {}
        for name, first in instances[0].alternatives.items():
            if not all(name in instance.alternatives for instance in instances):
                continue  # it failed on the way, which was noted
            calls = [instance.alternatives[name].call for instance in instances]
            if first.torch:  # foreign code: what fails is noted, and the rest goes on
                timed = functools.partial(self.time_torch, calls, turns)
                figures = guarded(self._machine.notes, name, timed)
            else:
                figures = self.time(calls, turns)
            if figures is not None:
                found[name] = figures
        return found

    def time(self, calls: Sequence[Call], turns: Rotation) -> Figures:
        """Measure calls that take turns."""
        graph = self._machine.timer.capture(_repeated(calls, turns.calls))
        return self._replayed(graph, turns)

    def time_torch(self, calls: Sequence[Call], turns: Rotation) -> Figures:
        """Measure calls of torch that take turns."""
        torch = self._machine.torch
        if torch is None:
            raise ValueError("time_torch: torch must be at hand")
        graph = self._machine.timer.capture_torch(torch, _repeated(calls, turns.calls))
        return self._replayed(graph, turns)

    def _replayed(self, graph: Any, turns: Rotation) -> Figures:
        times = self._machine.timer.replay(graph, self._repeats, self.prelude(turns.cold))
        return Figures.of([time / turns.calls for time in times])

    def prelude(self, cold: bool) -> Callable[[float], None]:
        """Return what comes before each replay: an emptied L2 cache, and time for the host."""
        spin = self._machine.baselines.spin

        def launch(microseconds: float) -> None:
            if cold:
                self._flush()
            spin(microseconds)()

        return launch

    def empty(self, calls: int) -> float:
        """Return the time of an empty kernel node in a graph of so many."""
        if calls not in self._empty:
            with self._machine.timer.scope():
                node = self._machine.baselines.empty()
            turns = Rotation(1, calls, False, 0)
            self._empty[calls] = self.time([node], turns).median
        return self._empty[calls]

    def ceiling(self, traffic: Traffic, turns: Rotation) -> Ceiling:
        """Return the fastest copy of as many bytes, with as many sets of buffers."""
        read, written = max(traffic.read, 1), max(traffic.written, 1)
        key = read, written, turns
        if key not in self._ceilings:
            baselines = self._machine.baselines
            with self._machine.timer.scope():
                buffers = [baselines.copy_buffers(read, written) for _ in range(turns.buffers)]
            found = []
            for variant in COPY_VARIANTS:
                copies = [baselines.copy(pair, read, written, variant) for pair in buffers]
                found.append(Ceiling(self.time(copies, turns), str(variant)))
            self._ceilings[key] = min(found, key=lambda ceiling: ceiling.figures.median)
        return self._ceilings[key]


def _repeated(calls: Sequence[Call], count: int) -> list[Call]:
    return [calls[turn % len(calls)] for turn in range(count)]
