"""What a session found, as plain data that ``json.dumps`` takes."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from typing import Any

from .compile_time import CompileRow
from .host_calls import HostRow
from .measure import Row
from .problem import Problem
from .step import StepRow
from .traffic import Traffic
from .verify import Check

#: Raised when names or meanings in the document change.
SCHEMA = 1


@dataclass
class Report:
    """Everything that a session found.

    Attributes
    ----------
    device : str
        Where it ran.
    reason : str
        Why there.
    timed : bool
        Whether anything was measured; False without a GPU.
    machine : dict
        Facts of the machine.
    counted : list of (Problem, Traffic)
        Bytes of the problems that were not measured.
    checks, rows, host, compiled, steps : list
    notes : dict of str to str
        What could not be measured, and why.
    """

    device: str
    reason: str
    timed: bool
    machine: dict[str, Any]
    checks: list[Check] = field(default_factory=list)
    counted: list[tuple[Problem, Traffic]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    host: list[HostRow] = field(default_factory=list)
    compiled: list[CompileRow] = field(default_factory=list)
    steps: list[StepRow] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether nothing that was compared differs."""
        return not any(check.differences for check in self.checks)

    def to_dict(self, command: list[str], settings: dict[str, Any]) -> dict[str, Any]:
        """Return the report as one document.

        Parameters
        ----------
        command : list of str
            The command line.
        settings : dict
            What was asked for, defaults filled in.
        """
        now = datetime.datetime.now(datetime.timezone.utc)
        return {
            "schema": SCHEMA,
            "date": now.isoformat(timespec="seconds"),
            "command": command,
            "settings": settings,
            "device": self.device,
            "reason": self.reason,
            "timed": self.timed,
            "ok": self.ok,
            "machine": self.machine,
            "checks": [check.to_dict() for check in self.checks],
            "counted": [_counted(problem, traffic) for problem, traffic in self.counted],
            "rows": [row.to_dict() for row in self.rows],
            "host": [row.to_dict() for row in self.host],
            "compile": [row.to_dict() for row in self.compiled],
            "steps": [row.to_dict() for row in self.steps],
            "notes": self.notes,
        }


def _counted(problem: Problem, traffic: Traffic) -> dict[str, Any]:
    return {
        "operation": problem.operation,
        "format": problem.layout.name,
        "layers": problem.layers,
        "tokens": problem.tokens,
        "pattern": problem.pattern,
        "bytes": traffic.to_dict(),
    }
