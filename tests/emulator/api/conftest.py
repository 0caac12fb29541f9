"""Device arrays without a device: host memory that says it belongs to CUDA device 0."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from cupy_mla._cuda import backend as cuda_backend
from tests import helpers
from tests.emulator.device import EmulatorDevice

#: Cases that read rows back, left out while the CUDA backend has no kernel for it.
READS_BACK = {
    "test_e5m2_reads_back_as_e5m2",
    "test_forms_of_the_scale_of_one_layer",
    "test_other_widths_are_exact_and_read_back",
    "test_rows_without_a_rotary_part",
    "test_zeros_read_back_as_zeros",
}
#: Which of several tokens wins a slot is unspecified on a GPU.
LAST_WINS = {"test_last_of_interleaved_duplicates_wins"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the cases that do not hold here."""
    out = set(LAST_WINS)
    if not hasattr(cuda_backend.CudaBackend, "read_slots"):
        out |= READS_BACK
    gone = [
        item for item in items if "tests/emulator/api/" in item.path.as_posix() and _out(item, out)
    ]
    if gone:
        items[:] = [item for item in items if item not in gone]
        config.hook.pytest_deselected(items=gone)


def _out(item: pytest.Item, names: set[str]) -> bool:
    callspec = getattr(item, "callspec", None)
    duplicates = callspec is not None and callspec.params.get("duplicates", False)
    return duplicates or getattr(item, "originalname", item.name) in names


class DeviceArray:
    """What a device array of a framework that nobody knows looks like."""

    def __init__(self, host: np.ndarray, owner: Any = None) -> None:
        self.host = host
        self.owner = owner

    @property
    def dtype(self) -> np.dtype:
        return self.host.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.host.shape

    @property
    def ndim(self) -> int:
        return self.host.ndim

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": self.host.shape,
            "strides": self.host.strides,
            "typestr": f"|V{self.host.itemsize}",  # the dtype attribute says more
            "data": (self.host.__array_interface__["data"][0], False),
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __getitem__(self, index: Any) -> Any:
        part = self.host[index]
        return DeviceArray(np.asarray(part), self)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.host[index] = value.host if isinstance(value, DeviceArray) else value


class DeviceBackend(helpers.Backend):
    """Emulated device arrays."""

    name = "emulator"
    last_duplicate_wins = False

    def array(self, values: np.ndarray) -> DeviceArray:
        return DeviceArray(values)

    def to_numpy(self, array: Any) -> np.ndarray:
        return array.host

    def buffer(self, data: np.ndarray) -> DeviceArray:
        return DeviceArray(super().buffer(data))

    def view(
        self, buffer: Any, shape: Sequence[int], dtype: Any, strides: Sequence[int], offset: int = 0
    ) -> DeviceArray:
        return DeviceArray(super().view(buffer.host, shape, dtype, strides, offset), buffer)


@pytest.fixture
def backend() -> DeviceBackend:
    """Emulated device arrays."""
    return DeviceBackend()


@pytest.fixture(autouse=True)
def emulated(device: EmulatorDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatorDevice]:
    """Put the emulator in place of CUDA device 0."""
    empty = device.empty
    monkeypatch.setattr(cuda_backend, "_backends", {})
    monkeypatch.setattr(device, "empty", lambda *how: DeviceArray(empty(*how)))
    cuda_backend.install(device)
    yield device
