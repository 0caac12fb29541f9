"""What a call costs the host: operations on arrays of each framework, and other launches."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from cupy_mla import _looks
from cupy_mla._cuda.timing import RecordedLaunch

from . import torch_op
from .figures import Figures
from .machine import Machine, guarded
from .operations.insert import split
from .problem import Array, Arrays, Call, Instance, Operation, Problem

#: Calls between two looks at the clock, and how often.
BATCH, ROUNDS = 100, 40

#: Alternatives of one launch a layer or fewer, whose host time is of interest.
_OTHERS = ("vLLM", "vLLM grouped", "Triton")


@dataclass(frozen=True)
class HostRow:
    """The host time of a call.

    Attributes
    ----------
    problem : Problem
    name : str
    arrays : str
        Framework of the arrays; "" where there are none.
    figures : Figures
        Microseconds a call.
    """

    problem: Problem
    name: str
    arrays: str
    figures: Figures

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain data."""
        return {
            "operation": self.problem.operation,
            "format": self.problem.layout.name,
            "layers": self.problem.layers,
            "tokens": self.problem.tokens,
            "name": self.name,
            "arrays": self.arrays,
            "us": self.figures.to_dict(),
        }


class TorchArrays:
    """Arrays of torch, as `problem.Arrays`.

    Parameters
    ----------
    torch : module
    device : str
    """

    def __init__(self, torch: ModuleType, device: str = "cuda") -> None:
        self.torch, self._device = torch, device

    def to_device(self, array: Array) -> Any:
        """Return a host array's values as a tensor on the device."""
        raw = self.torch.from_numpy(np.ascontiguousarray(array).view(np.uint8))
        return raw.to(self._device).view(getattr(self.torch, array.dtype.name))

    def to_host(self, array: Any) -> Array:
        """Return a tensor's bytes as a host array."""
        raw: Array = array.contiguous().view(self.torch.uint8).cpu().numpy()
        return raw


@dataclass(frozen=True)
class _Way:
    """A way to call an operation."""

    problem: Problem
    name: str
    arrays: str
    call: Call


def measure(
    operation: Operation,
    problems: Sequence[Problem],
    machine: Machine,
    *,
    batch: int,
    rounds: int,
) -> list[HostRow]:
    """Measure all ways to call an operation, and other ways to launch what does its work.

    Parameters
    ----------
    operation : Operation
    problems : sequence of Problem
        Of any size: the device's queue holds more calls than are made between two waits for it.
        Other ways to launch are measured for the first one.
    machine : Machine
    batch, rounds : int
        Calls between two looks at the clock, and how often.
    """
    ways = [
        way
        for i, problem in enumerate(problems)
        for way in _ways(operation, problem, machine, others=i == 0)
    ]
    times = machine.timer.host([way.call for way in ways], batch=batch, rounds=rounds)
    return [
        HostRow(way.problem, way.name, way.arrays, Figures.of(values))
        for way, values in zip(ways, times, strict=True)
    ]


def _ways(operation: Operation, problem: Problem, machine: Machine, *, others: bool) -> list[_Way]:
    timer = machine.timer
    ways: list[_Way] = []

    def add(name: str, arrays: str, call: Call) -> None:
        ways.append(_Way(problem, name, arrays, call))

    with timer.scope():
        instance = operation.make(problem, machine.arrays, machine if others else None)
    for name, call in instance.host.items():
        add(name, "CuPy", call)
    is_insert = others and operation.name == "insert"
    if is_insert:
        launch = _recorded(operation, problem, machine.arrays, machine)
        for name, call in _steps(launch, machine, "cupy").items():
            add(name, "CuPy", call)
    torch = machine.torch
    if torch is not None:
        arrays = TorchArrays(torch, machine.torch_device)
        for_torch = operation.make(problem, arrays)
        for name, call in for_torch.host.items():
            add(name, "torch", call)
        if is_insert:
            launch = _recorded(operation, problem, arrays, machine)
            for name, call in _steps(launch, machine, "torch").items():
                add(name, "torch", call)
            make = functools.partial(_torch_op, problem, arrays, launch)
            same_kernel = guarded(machine.notes, "torch custom op", make)
            for name, call in (same_kernel or {}).items():
                add(name, "torch", call)
    if is_insert:
        add("cupy.RawKernel, 15 arguments", "CuPy", timer.raw_kernel_call())
    if others:
        timer.synchronize()
        for name in _OTHERS:
            other = instance.alternatives.get(name)
            if other is None:
                continue
            run = functools.partial(_ran, other.call)
            if guarded(machine.notes, f"{name}, host times", run):
                add(name, "torch", other.call)
    return ways


def _ran(call: Call) -> bool:
    call()
    return True


def _recorded(
    operation: Operation, problem: Problem, arrays: Arrays, machine: Machine
) -> RecordedLaunch:
    """Return the launch of an insert; it keeps its instance."""

    def first_insert() -> Instance:
        made = operation.make(problem, arrays)
        made.run()
        return made

    return machine.timer.recorded_launch(first_insert)


def _rows(instance: Instance) -> tuple[Any, Any, Any]:
    """Return the arrays of an insert."""
    return (*split(instance.arrays["projection"]), instance.arrays["slots"])


def _steps(launch: RecordedLaunch, machine: Machine, framework: str) -> dict[str, Call]:
    """Return what `GroupedCacheWriter.insert` does, in its order, each step as a call."""
    rows = _rows(launch.keep)
    steps: dict[str, Call] = {}
    looks = _looks.learn(rows)
    if looks is not None:
        key = looks.key(None, *rows)
        steps["looks of the arrays"] = functools.partial(looks.key, None, *rows)
        steps["launch found by looks"] = functools.partial({key: launch}.get, key)
    steps |= machine.timer.launch_steps(launch, framework)
    return {f"insert by step: {name}": call for name, call in steps.items()}


def _torch_op(problem: Problem, arrays: TorchArrays, launch: RecordedLaunch) -> dict[str, Call]:
    """Return compiled operations that launch what an insert launches; each was called once."""
    rows = _rows(launch.keep)
    calls = {"torch custom op, same kernel": torch_op.call(arrays.torch, rows, launch)}
    layout = problem.layout
    if not layout.tile:  # the published operation knows flat rows alone
        name = layout.name if layout.needs_scale else "auto"
        calls["torch custom op, published arguments"] = torch_op.published_call(
            arrays.torch, rows, launch.keep.arrays["caches"], launch, name
        )
    for call in calls.values():
        call()
    return calls
