"""Whether what is measured leaves the right bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .machine import Machine
from .problem import Array, Arrays, Operation, Problem, spoil

#: The reference is compared with a second calculation up to so many tokens and layers: it is the
#: same code for more, and takes seconds, and memory, for them.
REFERENCE_TOKENS = 1024
REFERENCE_LAYERS = 64


@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes
    ----------
    problem : Problem
    subject : str
        What was compared: ``reference``, ``cupy_mla`` or the name of an alternative.
    against : str
    compared : int
        Bytes.
    differences : int
        Bytes, or numbers where only numbers can be compared.
    first : str or None
        The first output that differs.
    """

    problem: Problem
    subject: str
    against: str
    compared: int
    differences: int
    first: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as plain data."""
        problem = self.problem
        return {
            "operation": problem.operation,
            "format": problem.layout.name,
            "tokens": problem.tokens,
            "pattern": problem.pattern,
            "subject": self.subject,
            "against": self.against,
            "compared_bytes": self.compared,
            "differences": self.differences,
            "first": self.first,
        }


class HostArrays:
    """Arrays of the host, as `problem.Arrays`."""

    def to_device(self, array: Array) -> Any:
        """Return the array itself."""
        return array

    def to_host(self, array: Any) -> Array:
        """Return the array itself."""
        return np.asarray(array)


def checked_problem(problem: Problem) -> Problem:
    """Return the problem at whose size the reference is checked for another one."""
    return replace(
        problem,
        tokens=min(problem.tokens, REFERENCE_TOKENS),
        layers=min(problem.layers, REFERENCE_LAYERS),
    )


def check_reference(operation: Operation, problem: Problem) -> Check:
    """Compare the NumPy backend with results that are worked out without it."""
    problem = checked_problem(problem)
    instance = operation.make(problem, HostArrays())
    instance.run()
    differences, first = 0, None
    for name, expected in operation.expect(problem, instance):
        wrong = expected.differences(instance.outputs[name])
        differences += wrong
        if wrong and first is None:
            first = name
    compared = sum(array.nbytes for array in instance.outputs.values())
    against = "ml_dtypes and float64"
    return Check(problem, "reference", against, compared, differences, first)


def check_device(operation: Operation, problem: Problem, machine: Machine) -> list[Check]:
    """Compare the operation, and what has to leave the same bytes, with the NumPy backend."""
    reference = operation.make(problem, HostArrays())
    reference.run()
    wanted = {name: _bytes(array) for name, array in reference.outputs.items()}
    instance = operation.make(problem, machine.arrays, machine)
    subjects = {"cupy_mla": instance.run}
    subjects |= {
        name: alternative.call
        for name, alternative in instance.alternatives.items()
        if alternative.exact
    }
    checks = []
    for subject, call in subjects.items():
        spoil(instance.outputs)
        machine.timer.synchronize()
        with machine.timer.scope():
            call()
        machine.timer.synchronize()
        compared, differences, first = compare(machine.arrays, instance.outputs, wanted)
        checks.append(Check(problem, subject, "NumPy reference", compared, differences, first))
    return checks


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def compare(
    arrays: Arrays, outputs: Mapping[str, Any], wanted: Mapping[str, Array]
) -> tuple[int, int, str | None]:
    """Return how many bytes were compared, how many differ, and where the first one lies."""
    compared, differences, first = 0, 0, None
    for name, array in outputs.items():
        found = _bytes(arrays.to_host(array))
        wrong = np.flatnonzero(found != wanted[name])
        compared += found.size
        differences += wrong.size
        if wrong.size and first is None:
            byte = int(wrong[0])
            first = f"{name}, byte {byte}: {found[byte]:02X}, not {wanted[name][byte]:02X}"
    return compared, differences, first
