"""A device as the benchmark sees it: arrays, a timer, baseline kernels."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol

from cupy_mla._cuda.timing import RecordedLaunch

from .baselines import Baselines
from .problem import Arrays, Call


class Timer(Protocol):
    """Measures calls on a device. Times are in microseconds."""

    #: Size of the L2 cache in bytes.
    l2_bytes: int

    def capture(self, calls: Sequence[Call]) -> Any:
        """Return a graph of calls that run on the current CuPy stream; each was called before."""

    def capture_torch(self, torch: ModuleType, calls: Sequence[Call]) -> Any:
        """Return a graph of calls that run on torch's current stream."""

    def replay(self, graph: Any, repeats: int, prelude: Callable[[float], None]) -> list[float]:
        """Return the device time of each replay, with a prelude that is not counted before it.

        The prelude keeps the device busy for at least the time that it is given, so that the host
        has handed the whole graph over when the device comes to it.
        """

    def host(self, calls: Sequence[Call], *, batch: int, rounds: int) -> list[list[float]]:
        """Return the host times of each call, one mean of `batch` calls a round.

        The calls take turns, so that what slows the host down for a while slows down all of them.
        """

    def synchronize(self) -> None:
        """Wait for the device."""

    def raw_kernel_call(self) -> Call:
        """Return a launch of an empty ``cupy.RawKernel`` with 15 arguments."""

    def launch_steps(self, launch: RecordedLaunch, framework: str) -> dict[str, Call]:
        """Return what an insert does once it has found its launch, each step by itself."""

    def recorded_launch(self, call: Call) -> RecordedLaunch:
        """Return the one launch that a call prepares and makes, with what the call returns."""

    def scope(self) -> Any:
        """Return a context in which everything is launched on the timer's own stream."""


@dataclass
class Machine:
    """What a session needs of a device.

    Attributes
    ----------
    arrays : Arrays
    timer : Timer
    baselines : Baselines
    torch : module or None
        torch, where it is importable and has the device.
    torch_device : str
        What torch calls the device.
    torch_baselines : Baselines
        The kernels on torch's current stream; those of `baselines` where there is no torch.
    notes : dict of str to str
        What could not be compared with, and why.
    """

    arrays: Arrays
    timer: Timer
    baselines: Baselines
    torch: ModuleType | None
    torch_device: str
    torch_baselines: Baselines
    notes: dict[str, str] = field(default_factory=dict)


def optional(name: str, notes: dict[str, str], shown: str | None = None) -> ModuleType | None:
    """Import a module where it can be, else note why not.

    Parameters
    ----------
    name : str
    notes : dict
        Gets an entry where the import fails.
    shown : str, optional
        Name of the entry.
    """
    try:
        return importlib.import_module(name)
    except Exception as error:  # an extension of another build raises what it likes
        notes[shown or name] = f"not importable ({_first_line(error)})"
        return None


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def guarded(notes: dict[str, str], name: str, make: Callable[[], Any]) -> Any:
    """Return what `make` returns, or None with a note where it fails.

    For code of other libraries alone, whose signatures differ between versions.
    """
    try:
        return make()
    except Exception as error:
        notes[name] = f"failed ({_first_line(error)})"
        return None
