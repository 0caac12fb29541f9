"""The CUDA backend: plans and arrays in device memory become kernel launches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from cupy_mla._arrays import ArrayRef, DeviceId
from cupy_mla._plan import CachePlan, GroupedPointers, InsertInputs, InsertPlan, Scale
from cupy_mla.errors import reject_type

from . import cupy_device, insert, registry
from .compiler import load
from .device import Device
from .streams import Keeper, hold, wait_for_producers
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
        self._keeper = Keeper(device)
        self._calls: dict[Any, insert.PreparedInsert] = {}

    def _stream(self, operation: str, stream: object, owner: ArrayRef) -> int:
        if stream is None:
            return self.device.current_stream(owner.framework)
        try:
            return self.device.resolve_stream(stream)
        except TypeError as error:
            reject_type(operation, "stream", f"be {error}", repr(stream))

    def _run(
        self,
        operation: str,
        launch: Callable[[int], None],
        arrays: Iterable[ArrayRef],
        owner: ArrayRef,
        stream: object,
    ) -> None:
        """Launch on the right stream, behind the producers of the arrays."""
        pointer = self._stream(operation, stream, owner)
        present = [ref for ref in arrays if ref.ptr]
        foreign = wait_for_producers(self.device, present, pointer)
        launch(pointer)
        if foreign:
            hold(self.device, self._keeper, foreign, stream, pointer)

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

    def prepare(self, plan: InsertPlan, target: CudaTarget) -> insert.PreparedInsert:
        """Prepare the launches of a writer's inserts, once for all arrays that look the same."""
        prepared = target.prepared.get(plan)
        if prepared is None:
            prepared = insert.prepare(self.device, plan, target)
            _remember(target.prepared, plan, prepared)
        return prepared

    def insert(self, plan: InsertPlan, inputs: InsertInputs, target: Any, stream: object) -> None:
        """Store rows."""
        kv_c, k_pe, slots = inputs.addresses()
        if isinstance(target, CallTarget):
            key = (plan, target.plan)
            prepared = self._calls.get(key)
            if prepared is None:
                prepared = insert.prepare(self.device, plan, target)
                _remember(self._calls, key, prepared)
            entry: bytes | None = target.entry.tobytes()
        else:
            prepared, entry = self.prepare(plan, target), None
        rows = prepared
        self._run(
            plan.operation,
            lambda pointer: rows.run(kv_c, k_pe, slots, pointer, entry),
            [*target.arrays(), *inputs.arrays()],
            target.caches[0],
            stream,
        )

    def ready(
        self, plan: InsertPlan, inputs: InsertInputs, target: CudaTarget
    ) -> Callable[[int, int, int], None] | None:
        """Return what launches with the addresses of kv_c, k_pe and slots alone, if that is all."""
        if isinstance(inputs.slots, tuple):
            return None
        arrays = [*target.arrays(), *inputs.arrays()]
        if len({ref.framework for ref in arrays}) > 1 or arrays[0].framework not in (
            "cupy",
            "torch",
        ):
            return None
        run = self.prepare(plan, target).run
        current_stream = self.device.stream_getter(arrays[0].framework)

        def ready(kv_c: int, k_pe: int, slots: int) -> None:
            run(kv_c, k_pe, slots, current_stream())

        return ready

    def insert_grouped(
        self, plan: InsertPlan, inputs: InsertInputs, pointers: GroupedPointers, stream: object
    ) -> None:
        """Store rows in caches that are known by device pointers alone."""
        prepared = insert.prepare_grouped(self.device, plan, pointers)
        kv_c, k_pe, slots = inputs.addresses()
        self._run(
            plan.operation,
            lambda pointer: prepared.run(kv_c, k_pe, slots, pointer),
            [
                *inputs.arrays(),
                pointers.cache_ptrs,
                *([pointers.scales] if pointers.scales else []),
            ],
            inputs.kv_c,
            stream,
        )

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


#: Plans that are kept ready; a service sees a few dozen shapes, not thousands at a time.
_MOST_PREPARED = 512


def _remember(known: dict[Any, Any], key: Any, value: Any) -> None:
    if len(known) >= _MOST_PREPARED:
        known.clear()
    known[key] = value
