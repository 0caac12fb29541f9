"""Timing on a CUDA device: graphs captured on a CuPy stream and replayed between events."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter, sleep
from types import ModuleType
from typing import Any

from .cupy_device import CupyDevice, _cupy
from .device import Arguments
from .insert import HEAD as _INSERT_HEAD

Call = Callable[[], Any]

#: Replays before the first one that counts, and how long they go on at least: the first uploads
#: the graph, and the clocks of a device that was idle rise within milliseconds.
_WARM_REPLAYS = 3
_WARM_SECONDS = 0.01
#: Calls before those that count: code and data of the others have taken the caches' place.
_WARM_CALLS = 20
#: Seconds that the host rests between two rounds of calls: a thread that wakes up is given an idle
#: core, so that one which is slow for a while, shared with others, shows in a few rounds alone.
_REST = 0.02
#: Microseconds that the device waits at least before a replay.
_LEAST_WAIT = 100.0

_RAW_ARGUMENTS = 15
_RAW_KERNEL = 'extern "C" __global__ void raw_kernel({parameters}) {{}}'


@dataclass(frozen=True)
class RecordedLaunch:
    """A launch as the device was given it.

    Attributes
    ----------
    function : object
    grid : int
    block : (int, int)
    arguments : bytes
        The only argument, a structure.
    keep : object
        What the launch refers to.
    """

    function: Any
    grid: int
    block: tuple[int, int]
    arguments: bytes
    keep: Any


class CudaTimer:
    """Implements `cupy_mla.bench.machine.Timer`.

    Parameters
    ----------
    device : CupyDevice
    """

    def __init__(self, device: CupyDevice) -> None:
        self._cupy = _cupy()
        self._device = device
        self.l2_bytes = device.l2_bytes
        with device.current():
            self._stream = self._cupy.cuda.Stream(non_blocking=True)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Make the device and the timer's stream current."""
        with self._device.current(), self._stream:
            yield

    def synchronize(self) -> None:
        """Wait for all of the device's streams."""
        with self._device.current():
            self._cupy.cuda.runtime.deviceSynchronize()

    def capture(self, calls: Sequence[Call]) -> Callable[[], None]:
        """Capture calls on the timer's stream; return what launches the graph there."""
        stream = self._stream
        with self.scope():
            for call in calls:  # loads modules and fills memory pools, which a capture cannot
                call()
            stream.synchronize()
            stream.begin_capture()
            try:
                for call in calls:
                    call()
            finally:
                graph = stream.end_capture()
        return lambda: graph.launch(stream)

    def capture_torch(self, torch: ModuleType, calls: Sequence[Call]) -> Callable[[], None]:
        """Capture calls of torch; return what launches the graph on the timer's stream."""
        with self._device.current():
            external = torch.cuda.ExternalStream(self._stream.ptr)
            with torch.cuda.stream(external):
                for call in calls:
                    call()
            self.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for call in calls:
                    call()

        def launch() -> None:
            with torch.cuda.stream(external):
                graph.replay()

        return launch

    def replay(
        self, graph: Callable[[], None], repeats: int, prelude: Callable[[float], None]
    ) -> list[float]:
        """Return the microseconds of each replay, without its prelude."""
        cuda = self._cupy.cuda
        with self.scope():
            start, end = cuda.Event(), cuda.Event()

            def once(wait: float) -> tuple[float, float]:
                """Return the microseconds of the device, and of the host for handing it over."""
                prelude(wait)
                start.record(self._stream)
                begin = perf_counter()
                graph()
                handed_over = 1e6 * (perf_counter() - begin)
                end.record(self._stream)
                end.synchronize()
                return 1e3 * float(cuda.get_elapsed_time(start, end)), handed_over

            once(_LEAST_WAIT)
            begin, slowest, turns = perf_counter(), 0.0, 1
            while turns < _WARM_REPLAYS or perf_counter() - begin < _WARM_SECONDS:
                slowest = max(slowest, once(_LEAST_WAIT)[1])
                turns += 1
            return [once(_LEAST_WAIT + 2 * slowest)[0] for _ in range(repeats)]

    def host(self, calls: Sequence[Call], *, batch: int, rounds: int) -> list[list[float]]:
        """Return the microseconds that the host takes each call, a mean a batch of each round."""
        times: list[list[float]] = [[] for _ in calls]

        def several(call: Call, count: int) -> float:
            begin = perf_counter()
            for _ in range(count):
                call()
            seconds = perf_counter() - begin
            self.synchronize()
            return 1e6 * seconds / count

        with self.scope():
            collecting = gc.isenabled()
            gc.disable()
            try:
                for _ in range(rounds):
                    sleep(_REST)
                    for call, found in zip(calls, times, strict=True):
                        several(call, _WARM_CALLS)
                        found.append(several(call, batch))
            finally:
                if collecting:
                    gc.enable()
        return times

    def raw_kernel_call(self) -> Call:
        """Return a launch of an empty ``cupy.RawKernel`` with 15 arguments, 8 of them arrays."""
        cupy = self._cupy
        parameters = ", ".join(
            f"{'char*' if i < 8 else 'long long'} a{i}" for i in range(_RAW_ARGUMENTS)
        )
        with self.scope():
            kernel = cupy.RawKernel(_RAW_KERNEL.format(parameters=parameters), "raw_kernel")
            arrays = [cupy.zeros(16, cupy.uint8) for _ in range(8)]
        numbers = [cupy.int64(i) for i in range(_RAW_ARGUMENTS - len(arrays))]
        arguments = (*arrays, *numbers)
        return lambda: kernel((1,), (32,), arguments)

    def launch_steps(self, launch: RecordedLaunch, framework: str) -> dict[str, Call]:
        """Return what an insert does once it has found its launch, each step by itself.

        Parameters
        ----------
        launch : RecordedLaunch
        framework : str
            Of the arrays.
        """
        arguments = Arguments(launch.arguments)
        run = self._device.launcher(launch.function, launch.grid, launch.block)
        stream = int(self._stream.ptr)
        head = _INSERT_HEAD.unpack_from(launch.arguments)
        return {
            "addresses filled in": lambda: _INSERT_HEAD.pack_into(arguments.buffer, 0, *head),
            "current stream": self._device.stream_getter(framework),
            "kernel launched": lambda: run(arguments, stream),
        }

    def recorded_launch(self, call: Call) -> RecordedLaunch:
        """Return the one launch that a call prepares and makes; it is made, too.

        Parameters
        ----------
        call : callable
            Returns what has to live as long as the launch may be repeated.
        """
        device: Any = self._device
        launcher = device.launcher
        found: list[tuple[Any, int, tuple[int, int], bytes]] = []

        def recording(function: Any, grid: int, block: tuple[int, int]) -> Callable[..., None]:
            launch = launcher(function, grid, block)

            def record(arguments: Arguments, stream: int) -> None:
                found.append((function, grid, block, bytes(arguments.buffer)))
                launch(arguments, stream)

            return record

        device.launcher = recording  # in front of the method, for the time of the call
        try:
            with self.scope():
                keep = call()
        finally:
            del device.launcher
        if len(found) != 1:
            raise RuntimeError(f"the call made {len(found)} launches, not one")
        return RecordedLaunch(*found[0], keep)
