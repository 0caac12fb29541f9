"""The GPU's fixtures: every test here carries the marker `gpu` and skips without a device."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests import helpers

ML_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2")

# JAX would take three quarters of a GPU's memory for itself, which other frameworks and processes
# need here.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def _missing() -> str | None:
    """Say what is missing for these tests, or None."""
    try:
        import cupy
    except ImportError:
        return "CuPy is not installed"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no CUDA driver or device ({error})"
    return None if count else "no CUDA device"


REASON = _missing()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what lies in this folder, whichever module its body is imported from."""
    for item in items:
        if "tests/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            if REASON is not None:
                item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {REASON}"))


class CupyBackend(helpers.Backend):
    """CuPy arrays in device memory."""

    name = "cupy"
    last_duplicate_wins = False

    def buffer(self, data: np.ndarray) -> Any:
        import cupy

        return cupy.asarray(data)

    def view(
        self, buffer: Any, shape: Sequence[int], dtype: Any, strides: Sequence[int], offset: int = 0
    ) -> Any:
        import cupy

        return cupy.ndarray(
            tuple(shape), np.dtype(dtype), buffer.data + offset, strides=tuple(strides)
        )

    def array(self, values: np.ndarray) -> Any:
        contiguous = np.ascontiguousarray(values)
        if contiguous.strides == values.strides:
            buffer = self.buffer(contiguous.reshape(-1).view(np.uint8))
            return self.view(buffer, values.shape, values.dtype, contiguous.strides)
        return _same_strides(self, values)

    def to_numpy(self, array: Any) -> np.ndarray:
        import cupy

        dtype = np.dtype(array.dtype)
        raw = array.view(f"u{dtype.itemsize}") if dtype.name in ML_DTYPES else array
        return cupy.asnumpy(raw).view(dtype)


def _same_strides(backend: helpers.Backend, values: np.ndarray) -> Any:
    """Copy an array with the strides it has: broadcast and reversed axes stay so."""
    low, high = np.lib.array_utils.byte_bounds(values)
    start = values.__array_interface__["data"][0]
    span = (ctypes.c_uint8 * (high - low)).from_address(low)
    buffer = backend.buffer(np.frombuffer(span, np.uint8).copy())
    return backend.view(buffer, values.shape, values.dtype, values.strides, start - low)


class TorchBackend(CupyBackend):
    """torch tensors on the device; negative strides and odd addresses do not exist there."""

    name = "torch"

    def buffer(self, data: np.ndarray) -> Any:
        import torch

        return torch.from_numpy(np.ascontiguousarray(data)).cuda()

    def view(
        self, buffer: Any, shape: Sequence[int], dtype: Any, strides: Sequence[int], offset: int = 0
    ) -> Any:
        import torch

        dtype = np.dtype(dtype)
        size = dtype.itemsize
        if offset % size or any(step % size or step < 0 for step in strides):
            pytest.skip("torch has no such strides")
        whole = buffer[: buffer.numel() // size * size].view(getattr(torch, dtype.name))
        return torch.as_strided(
            whole, tuple(shape), tuple(step // size for step in strides), offset // size
        )

    def to_numpy(self, array: Any) -> np.ndarray:
        import torch

        host = array.detach().cpu().contiguous()
        name = str(host.dtype).partition(".")[2]
        if name in ML_DTYPES:
            raw = host.view(torch.uint8 if host.itemsize == 1 else torch.int16)
            return raw.numpy().view(getattr(ml_dtypes, name))
        return host.numpy()


BACKENDS = {"cupy": CupyBackend, "torch": TorchBackend, "ptx75": CupyBackend}


@pytest.fixture(params=list(BACKENDS))
def backend(request: pytest.FixtureRequest) -> Iterator[helpers.Backend]:
    """Arrays on the device, made by each framework in turn; and kernels as an sm_75 has them."""
    if request.param == "torch":
        pytest.importorskip("torch")
    if request.param == "ptx75":
        from tests.gpu import ptx75

        with ptx75.installed():
            yield CupyBackend()
    else:
        yield BACKENDS[request.param]()
