"""On which stream a fused call runs, and who waits for whom: seen at the seam, without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupy_mla import FusedNormRope, fused_q
from cupy_mla._cuda import backend as cuda_backend
from tests.emulator.api.conftest import DeviceArray
from tests.emulator.device import EmulatorDevice
from tests.emulator.test_fused_shortcuts import CupyLike

CUPY, TORCH, OTHER = 1111, 2222, 0
STREAMS = {"cupy": CUPY, "torch": TORCH}
TOKENS = 3


class TorchLike:
    """A host array with the attributes by which torch's tensors are known."""

    def __init__(self, host: np.ndarray) -> None:
        self.host, self.shape = host, host.shape
        self.dtype, self.layout = f"torch.{host.dtype.name}", "torch.strided"
        self.device = SimpleNamespace(type="cuda", index=0)

    def data_ptr(self) -> int:
        return self.host.ctypes.data

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.host.itemsize for step in self.host.strides)

    def detach(self) -> TorchLike:
        return self

    def get_device(self) -> int:
        return 0

    def is_neg(self) -> bool:
        return False

    is_conj = is_neg


TorchLike.__module__ = "torch"


class Log(list):
    """What was launched on which stream, and which stream waited for which."""

    def launched(self) -> list[int]:
        return [entry[1] for entry in self if entry[0] == "launch"]

    def waits_behind_the_launch(self) -> list[tuple[int, int]]:
        last = max(place for place, entry in enumerate(self) if entry[0] == "launch")
        return [entry[1:] for entry in self[last:] if entry[0] == "wait"]


@pytest.fixture
def log(device: EmulatorDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    """Give the device a current stream for each framework, and write down what it is told."""
    found = Log()
    launch, empty = device.launch, device.empty

    def launch_on(function: Any, grid: Any, block: Any, arguments: Any, stream: int) -> None:
        found.append(("launch", stream))
        launch(function, grid, block, arguments, stream)

    def empty_of(shape: Any, dtype: Any, framework: str) -> Any:
        return (TorchLike if framework == "torch" else CupyLike)(empty(shape, dtype, framework))

    def current_stream(framework: str) -> int:
        return STREAMS.get(framework, OTHER)

    def stream_getter(framework: str) -> Callable[[], int]:
        return lambda: current_stream(framework)

    monkeypatch.setattr(cuda_backend, "_backends", {})
    monkeypatch.setattr(device, "launch", launch_on)
    monkeypatch.setattr(device, "empty", empty_of)
    monkeypatch.setattr(device, "current_stream", current_stream)
    monkeypatch.setattr(device, "stream_getter", stream_getter)
    monkeypatch.setattr(device, "wait_stream", lambda *streams: found.append(("wait", *streams)))
    monkeypatch.setattr(device, "is_capturing", lambda stream: stream in found.capturing)
    found.capturing = set()
    cuda_backend.install(device)
    yield found


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def step(weights: type, query: type, cache: type, **options: Any) -> Any:
    """Do a step of a layer whose arrays are of several frameworks; return the new query."""
    layer = FusedNormRope(
        weights(ones(8)), 1e-6, weights(ones(4)), 1e-6, weights(ones(8, 2)),
        mla_kv_cache=cache(np.zeros((2, 4, 6), np.float32)), has_indexer=False,
    )  # fmt: skip
    index = cache(np.arange(TOKENS))
    rows = (query(ones(TOKENS, 8)), cache(ones(TOKENS, 4)), cache(ones(TOKENS, 2)))
    return layer(index, *rows, slot_mapping=index, **options)


@pytest.mark.parametrize("weights", [TorchLike, CupyLike, DeviceArray])
@pytest.mark.parametrize(("cache", "stream"), [(TorchLike, TORCH), (CupyLike, CUPY)])
def test_a_step_runs_where_its_cache_is_used(log, weights, cache, stream):
    made = step(weights, cache, cache)
    assert type(made) is cache
    assert log.launched() == [stream]
    assert log.waits_behind_the_launch() == []


def test_a_step_without_current_streams_runs_where_its_query_is_used(log):
    assert type(step(DeviceArray, DeviceArray, DeviceArray)) is CupyLike
    assert log.launched() == [CUPY]


def test_a_new_query_of_another_framework_is_handed_over(log):
    assert type(step(TorchLike, CupyLike, TorchLike)) is CupyLike
    assert log.launched() == [TORCH]
    assert log.waits_behind_the_launch() == [(CUPY, TORCH)]


def test_nothing_waits_while_the_call_is_captured(log):
    log.capturing.add(TORCH)
    step(TorchLike, CupyLike, TorchLike)
    assert log == [("launch", TORCH)]


def test_a_new_query_is_not_handed_to_a_stream_that_is_captured(log):
    log.capturing.add(CUPY)
    step(TorchLike, CupyLike, TorchLike)
    assert log.launched() == [TORCH]
    assert log.waits_behind_the_launch() == []


def test_a_given_stream_is_the_callers_to_order(log):
    step(CupyLike, CupyLike, TorchLike, stream=77)
    assert log.launched() == [77]
    assert log.waits_behind_the_launch() == []


def queries(kind: type, **outs: Any) -> tuple[Any, Any, Any]:
    """Call fused_q with queries of one framework."""
    return fused_q(
        kind(np.arange(TOKENS)), kind(ones(TOKENS, 2, 2)), kind(ones(8, 2)), None, None,
        kind(ones(TOKENS, 2, 4)), 1.0, None, 1.0, 1.0, False, **outs,
    )  # fmt: skip


def test_queries_run_where_their_output_is_used(log):
    assert type(queries(DeviceArray)[2]) is CupyLike
    room = TorchLike(np.zeros((TOKENS, 2, 6), np.uint8))
    assert queries(DeviceArray, mqa_q_out=room)[2] is room
    queries(TorchLike)
    assert log.launched() == [CUPY, TORCH, TORCH]


def test_an_object_without_caches_counts_nothing(log):
    layer = FusedNormRope(CupyLike(ones(8)), 1e-6, CupyLike(ones(4)), 1e-6, None, has_indexer=False)
    host = FusedNormRope(ones(8), 1e-6, ones(4), 1e-6, None, has_indexer=False)
    for one in (layer, host):
        counts = {name: values.tolist() for name, values in one.stats().items()}
        assert counts == {"slots_out_of_range": [0, 0], "positions_out_of_range": [0, 0]}
