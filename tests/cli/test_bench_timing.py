"""The CUDA timer, over a CuPy that writes down what it is asked for."""

from __future__ import annotations

import types
from contextlib import contextmanager

import pytest

from cupy_mla._cuda import timing
from cupy_mla._cuda.device import Arguments
from cupy_mla._cuda.timing import CudaTimer


class FakeCuda:
    """CuPy's streams, events and graphs: a log of what happens, and a clock that it moves.

    A prelude, a graph and a call add to the device's clock what `costs` says.
    """

    def __init__(self):
        self.log = []
        self.clock = 0.0
        outer = self

        class Stream:
            def __init__(self, non_blocking):
                assert non_blocking
                self.ptr = 77

            def __enter__(self):
                outer.log.append("enter stream")

            def __exit__(self, *error):
                outer.log.append("leave stream")

            def synchronize(self):
                outer.log.append("synchronize stream")

            def begin_capture(self):
                outer.log.append("begin capture")

            def end_capture(self):
                outer.log.append("end capture")
                return types.SimpleNamespace(launch=lambda stream: outer.run("graph", 50.0))

        class Event:
            def record(self, stream):
                assert stream.ptr == 77
                self.time = outer.clock
                outer.log.append("record")

            def synchronize(self):
                outer.log.append("synchronize event")

        self.Stream, self.Event = Stream, Event
        self.runtime = types.SimpleNamespace(
            deviceSynchronize=lambda: self.log.append("synchronize device")
        )

    def run(self, name, cost):
        self.log.append(name)
        self.clock += cost

    @staticmethod
    def get_elapsed_time(start, end):
        return (end.time - start.time) / 1e3  # milliseconds


class FakeDevice:
    l2_bytes = 1234

    def __init__(self, cuda):
        self._cuda = cuda
        self.launched = []

    @contextmanager
    def current(self):
        self._cuda.log.append("enter device")
        yield
        self._cuda.log.append("leave device")

    def launch(self, function, grid, block, arguments, stream):
        self.launcher(function, grid, block)(arguments, stream)

    def launcher(self, function, grid, block):
        return lambda arguments, stream: self.launched.append((function, grid, block, stream))

    def stream_getter(self, framework):
        return lambda: f"current stream of {framework}"


@pytest.fixture
def cuda(monkeypatch):
    made = FakeCuda()
    monkeypatch.setattr(timing, "_cupy", lambda: types.SimpleNamespace(cuda=made))
    return made


@pytest.fixture
def device(cuda):
    return FakeDevice(cuda)


@pytest.fixture
def timer(cuda, device):
    made = CudaTimer(device)
    cuda.log.clear()
    return made


def test_a_capture_calls_once_before_and_once_inside(cuda, timer):
    graph = timer.capture([lambda: cuda.log.append("a"), lambda: cuda.log.append("b")])
    inside = ["begin capture", "a", "b", "end capture"]
    assert cuda.log[2:] == ["a", "b", "synchronize stream", *inside, "leave stream", "leave device"]
    assert cuda.log[:2] == ["enter device", "enter stream"]
    cuda.log.clear()
    graph()
    assert cuda.log == ["graph"]


def test_a_capture_that_fails_is_ended(cuda, timer):
    calls = []

    def fail_second():
        calls.append(None)
        if len(calls) == 2:
            raise ValueError("not while capturing")

    with pytest.raises(ValueError, match="not while capturing"):
        timer.capture([fail_second])
    assert "end capture" in cuda.log


def test_a_replay_is_timed_without_its_prelude(cuda, timer, monkeypatch):
    monkeypatch.setattr(timing, "_WARM_SECONDS", 0.0)
    graph = timer.capture([lambda: None])
    cuda.log.clear()
    waits = []

    def prelude(microseconds):
        waits.append(microseconds)
        cuda.run("prelude", 1000.0)

    times = timer.replay(graph, 4, prelude)
    assert times == pytest.approx([50.0] * 4)
    turn = ["prelude", "record", "graph", "record", "synchronize event"]
    assert cuda.log[2:-2] == turn * 7  # three of them before the first one that counts
    assert min(waits) >= 100.0


def test_a_graph_that_is_slow_to_hand_over_is_waited_for_longer(cuda, timer, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timing, "perf_counter", lambda: now[0])

    def graph():
        now[0] += 700e-6

    waits = []
    timer.replay(graph, 2, waits.append)
    assert waits[-2:] == pytest.approx([100.0 + 2 * 700.0] * 2)


def test_a_device_is_kept_busy_until_its_clocks_have_risen(cuda, timer, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timing, "perf_counter", lambda: now[0])

    def prelude(microseconds):
        now[0] += 1e-3

    waits = []
    timer.replay(lambda: waits.append(now[0]), 5, prelude)
    assert len(waits) == 1 + 10 + 5


def test_host_times_are_means_of_calls_that_take_turns(cuda, timer, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timing, "perf_counter", lambda: now[0])
    log = []

    def rest(seconds):
        log.append("rest")
        now[0] += seconds

    monkeypatch.setattr(timing, "sleep", rest)

    def call(name, seconds):
        log.append((name, timing.gc.isenabled()))
        now[0] += seconds

    calls = [lambda: call("a", 3e-6), lambda: call("b", 5e-6)]
    times = timer.host(calls, batch=50, rounds=4)
    assert times == [pytest.approx([3.0] * 4), pytest.approx([5.0] * 4)]
    # Before those that count there are a few of each that do not; no garbage is collected.
    each = (len(log) // 4 - 1) // 2
    assert each > 50
    assert log == ["rest", *[("a", False)] * each, *[("b", False)] * each] * 4
    assert timing.gc.isenabled()
    assert cuda.log.count("synchronize device") == 4 * 2 * 2


@pytest.mark.parametrize("prepared", [False, True])
def test_a_launch_is_recorded_and_made(device, timer, prepared):
    arguments = Arguments(bytes(range(16)))

    def call():
        if prepared:
            device.launcher("f", 3, (36, 8))(arguments, 5)
        else:
            device.launch("f", 3, (36, 8), arguments, 5)
        return "kept"

    found = timer.recorded_launch(call)
    assert (found.function, found.grid, found.block, found.keep) == ("f", 3, (36, 8), "kept")
    assert found.arguments == bytes(range(16))
    assert device.launched == [("f", 3, (36, 8), 5)]
    device.launch("g", 1, (1, 1), arguments, 0)  # and no longer recorded
    assert len(device.launched) == 2


def test_the_steps_of_a_launch_are_calls_of_their_own(device, timer):
    recorded = timing.RecordedLaunch("f", 3, (36, 8), bytes(600), None)
    steps = timer.launch_steps(recorded, "torch")
    assert list(steps) == ["addresses filled in", "current stream", "kernel launched"]
    assert steps["current stream"]() == "current stream of torch"
    steps["addresses filled in"]()
    assert device.launched == []
    steps["kernel launched"]()
    assert [launch[:3] for launch in device.launched] == [("f", 3, (36, 8))]


@pytest.mark.parametrize("count", [0, 2])
def test_more_or_less_than_one_launch_cannot_be_recorded(device, timer, count):
    def call():
        for _ in range(count):
            device.launch("f", 1, (1, 1), Arguments(bytes(8)), 0)

    with pytest.raises(RuntimeError, match=f"made {count} launches"):
        timer.recorded_launch(call)
    assert "launcher" not in vars(device)


def test_the_raw_kernel_has_fifteen_arguments(cuda, monkeypatch, device):
    made = []

    class RawKernel:
        def __init__(self, source, name):
            made.append((source, name))

        def __call__(self, grid, block, arguments):
            made.append((grid, block, len(arguments)))

    cupy = types.SimpleNamespace(
        cuda=cuda, RawKernel=RawKernel, uint8="u1", int64=int, zeros=lambda size, dtype: [0] * size
    )
    monkeypatch.setattr(timing, "_cupy", lambda: cupy)
    CudaTimer(device).raw_kernel_call()()
    (source, name), launch = made
    assert f"void {name}(" in source
    assert source.count(",") == 14
    assert launch == ((1,), (32,), 15)


def test_torch_captures_its_own_graph_and_replays_on_the_timer_s_stream(cuda, timer):
    log = cuda.log

    @contextmanager
    def scope(name):
        log.append(f"enter {name}")
        yield
        log.append(f"leave {name}")

    graph = types.SimpleNamespace(replay=lambda: log.append("replay"))
    torch = types.SimpleNamespace(
        cuda=types.SimpleNamespace(
            ExternalStream=lambda ptr: ptr,
            stream=lambda stream: scope(f"torch stream {stream}"),
            CUDAGraph=lambda: graph,
            graph=lambda made: scope("torch graph"),
        )
    )
    launch = timer.capture_torch(torch, [lambda: log.append("a")])
    before = ["enter torch stream 77", "a", "leave torch stream 77"]
    assert log[1:4] == before
    assert "synchronize device" in log[4:]
    assert log[-4:] == ["enter torch graph", "a", "leave torch graph", "leave device"]
    log.clear()
    launch()
    assert log == ["enter torch stream 77", "replay", "leave torch stream 77"]
