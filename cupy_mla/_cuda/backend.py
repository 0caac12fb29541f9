"""The CUDA backend: plans and arrays in device memory become kernel launches."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from cupy_mla._arrays import ArrayRef, DeviceId
from cupy_mla._plan import CachePlan, GroupedPointers, InsertInputs, InsertPlan, Scale
from cupy_mla.errors import reject_type

from . import cupy_device, insert, registry
from .compiler import load
from .device import Device
from .target import CallTarget, CudaTarget

_backends: dict[int, CudaBackend] = {}
_lock = threading.Lock()


def for_device(device: DeviceId) -> CudaBackend:
    """Return the backend of a CUDA device.

    Raises
    ------
    BackendUnavailable
        Where CuPy, a driver or the device is missing.
    """
    found = _backends.get(device.index)
    if found is None:
        with _lock:
            found = _backends.setdefault(
                device.index, CudaBackend(cupy_device.device(device.index))
            )
    return found


def install(device: Device) -> None:
    """Put another implementation of the seam in place of a CUDA device; for tests."""
    with _lock:
        _backends[device.ordinal] = CudaBackend(device)


class CudaBackend:
    """Device arrays, by kernels.

    Parameters
    ----------
    device : Device
    """

    def __init__(self, device: Device) -> None:
        self.device = device

    def _stream(self, operation: str, stream: object, owner: ArrayRef) -> int:
        if stream is None:
            return self.device.current_stream(owner.framework)
        try:
            return self.device.resolve_stream(stream)
        except TypeError as error:
            reject_type(operation, "stream", f"be {error}", repr(stream))

    def target(
        self,
        caches: Sequence[ArrayRef],
        plans: Sequence[CachePlan],
        scales: Sequence[Scale],
        *,
        collect_stats: bool,
    ) -> CudaTarget:
        """Make the tables of a writer."""
        return CudaTarget(self.device, caches, plans, scales, collect_stats=collect_stats)

    def call_target(self, cache: ArrayRef, plan: CachePlan, scale: Scale) -> CallTarget:
        """Make the one entry of a single call."""
        return CallTarget(cache, plan, scale)

    def insert(self, plan: InsertPlan, inputs: InsertInputs, target: Any, stream: object) -> None:
        """Store rows."""
        pointer = self._stream(plan.operation, stream, target.caches[0])
        insert.insert(self.device, plan, inputs, target, pointer)

    def insert_grouped(
        self, plan: InsertPlan, inputs: InsertInputs, pointers: GroupedPointers, stream: object
    ) -> None:
        """Store rows in caches that are known by device pointers alone."""
        pointer = self._stream(plan.operation, stream, inputs.kv_c)
        insert.insert_grouped(self.device, plan, inputs, pointers, pointer)

    def warmup(self, target: CudaTarget) -> None:
        """Compile what inserts into these layers need, for each input dtype that they take."""
        for group in target.groups:
            for dtype in group.layout.input_dtypes:
                load(
                    self.device,
                    registry.find("insert", group.layout.name, dtype.name),
                    group.layout,
                )

    def explain(self, groups: Sequence[tuple[int, ...]]) -> str:
        """Say how layers are written."""
        return f"written by {self.device.name}: "
