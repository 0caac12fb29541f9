"""A machine for the benchmark without a GPU: NumPy arrays, emulated kernels, made-up times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np

from cupy_mla._cuda.timing import RecordedLaunch
from cupy_mla.bench import baselines
from cupy_mla.bench.machine import Machine
from cupy_mla.bench.verify import HostArrays
from tests.emulator.device import EmulatorDevice

L2_BYTES = 1 << 12
#: Microseconds of a call, by the kernel that it launches or else by what its function is called.
EMPTY, COPY, OURS = 0.5, 8.0, 10.0
PRICES = {
    "bench_empty": EMPTY,
    "bench_scalar": 75.0,
    "per_layer": 25.0,
    "all_layers": 400.0,
}
#: What each further copy takes; the fastest is the third one that is measured.
COPY_PRICES = {(1, 0): 9.0, (1, 1): 8.5, (4, 0): COPY, (4, 1): 8.25}


def price(call: Callable[[], Any]) -> float:
    """Return what a call takes."""
    if isinstance(call, baselines.Launch):
        entry = call.function[0]
        if entry == "bench_copy":
            values = np.frombuffer(call.arguments.buffer, baselines.COPY_PARAMS.dtype)[0]
            return COPY_PRICES[int(values["tiles"]), int(values["streaming"])]
        return next(price for name, price in PRICES.items() if entry.startswith(name))
    name = getattr(call, "__qualname__", type(call).__qualname__).rpartition(".")[2]
    return PRICES.get(name, OURS)


class FakeTimer:
    """Runs every call that it measures once, and says what `price` says.

    Attributes
    ----------
    replays : list of (int, float)
        Calls of each graph that was replayed, and how long its prelude was to wait.
    """

    l2_bytes = L2_BYTES

    def __init__(self) -> None:
        self.replays: list[tuple[int, float]] = []
        self.scopes = 0

    def capture(self, calls: Sequence[Callable[[], Any]]) -> Any:
        for call in dict.fromkeys(calls):
            call()
        return list(calls)

    def capture_torch(self, torch: ModuleType, calls: Sequence[Callable[[], Any]]) -> Any:
        return self.capture(calls)

    def replay(self, graph: Any, repeats: int, prelude: Callable[[float], None]) -> list[float]:
        prelude(1.0)
        self.replays.append((len(graph), 1.0))
        total = sum(price(call) for call in graph)
        return [total * (1 + 0.01 * turn) for turn in range(repeats)]

    def host(
        self, calls: Sequence[Callable[[], Any]], *, batch: int, rounds: int
    ) -> list[list[float]]:
        for call in calls:
            call()
        return [[5.0 + turn for turn in range(rounds)] for _ in calls]

    def synchronize(self) -> None:
        pass

    def raw_kernel_call(self) -> Callable[[], Any]:
        return lambda: None

    def launch_steps(self, launch: RecordedLaunch, framework: str) -> dict[str, Any]:
        return {f"kernel launched with {framework}": lambda: None}

    def recorded_launch(self, call: Callable[[], Any]) -> RecordedLaunch:
        return RecordedLaunch(1, 1, (32, 1), bytes(600), call())

    @contextmanager
    def scope(self) -> Iterator[None]:
        self.scopes += 1
        yield


def make_machine(torch: ModuleType | None = None) -> Machine:
    """Return the machine; with torch's host tensors where torch is given."""
    kernels = baselines.Baselines(EmulatorDevice(l2_bytes=L2_BYTES))
    notes = {} if torch is not None else {"torch": "not wanted here"}
    timer: Any = FakeTimer()
    return Machine(HostArrays(), timer, kernels, torch, "cpu", kernels, notes)
