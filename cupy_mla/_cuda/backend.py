"""The CUDA backend: plans and arrays in device memory become kernel launches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from cupy_mla import _shortcuts
from cupy_mla._arrays import ArrayRef, DeviceId
from cupy_mla._plan import CachePlan, GroupedPointers, InsertInputs, InsertPlan, Scale
from cupy_mla.errors import reject_type

from . import cupy_device, registry
from .compiler import load
from .device import Device
from .fused import CudaFused
from .insert import ALL_CACHES, ONE_CACHE, PreparedInsert, prepare, prepare_grouped
from .prepared import Known
from .read import CudaReads
from .streams import Keeper, hand_over, hold, wait_for_producers
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
    _shortcuts.forget_all()  # those of calls launch what the former one had loaded


class CudaBackend(CudaFused, CudaReads):
    """Device arrays, by kernels.

    Parameters
    ----------
    device : Device
    """

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device
        self._keeper = Keeper(device)
        self._calls = Known()

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
        made: Iterable[ArrayRef] = (),
    ) -> None:
        """Launch on the right stream, behind the producers of the arrays.

        That is the one which is given, else the current one of the framework of `owner`; arrays
        that are new and returned are ready on the current one of their own, too.
        """
        pointer = self._stream(operation, stream, owner)
        present = [ref for ref in arrays if ref.ptr]
        foreign = wait_for_producers(self.device, present, pointer)
        launch(pointer)
        if stream is None:
            hand_over(self.device, made, pointer)
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

    def _prepared(self, plan: InsertPlan, target: CudaTarget | CallTarget) -> PreparedInsert:
        """Prepare the launches of inserts, once for all arrays that look the same."""
        if isinstance(target, CallTarget):
            return self._calls.get(
                (plan, target.looks()),
                lambda: prepare(self.device, plan, target),
            )
        return target.prepared.get(plan, lambda: prepare(self.device, plan, target))

    def insert(
        self,
        plan: InsertPlan,
        inputs: InsertInputs,
        target: Any,
        stream: object,
    ) -> None:
        """Store rows."""
        run = self._prepared(plan, target).run
        addresses = inputs.addresses()
        pair = (ONE_CACHE, *target.addresses()) if isinstance(target, CallTarget) else None
        self._run(
            plan.operation,
            lambda pointer: run(*addresses, pointer, pair),
            [*target.arrays(), *inputs.arrays()],
            target.caches[0],
            stream,
        )

    def launcher(
        self, plan: InsertPlan, inputs: InsertInputs, target: Any
    ) -> Callable[..., None] | None:
        """Return what stores rows by addresses alone, for all arrays that look like these."""
        arrays = [*target.arrays(), *inputs.arrays()]
        current_stream = self._only_stream(inputs, arrays)
        if current_stream is None:
            return None
        prepared = self._prepared(plan, target)
        if isinstance(target, CallTarget):
            return prepared.with_pair(current_stream, ONE_CACHE)
        return prepared.by_address(current_stream)

    def bound_launcher(
        self, plan: InsertPlan, inputs: InsertInputs, target: Any
    ) -> Callable[[], None] | None:
        """Return what stores what these arrays hold, at each call."""
        current_stream = self._only_stream(inputs, [*target.arrays(), *inputs.arrays()])
        if current_stream is None:
            return None
        return self._prepared(plan, target).fixed(current_stream, inputs.addresses())

    def _only_stream(
        self, inputs: InsertInputs, arrays: Iterable[ArrayRef]
    ) -> Callable[[], int] | None:
        """Return what finds the stream of a call that has nothing to order; None for others."""
        frameworks = {ref.framework for ref in arrays}
        if isinstance(inputs.slots, tuple) or frameworks not in ({"cupy"}, {"torch"}):
            return None
        return self.device.stream_getter(frameworks.pop())

    def _prepared_grouped(self, plan: InsertPlan, pointers: GroupedPointers) -> PreparedInsert:
        return self._calls.get(
            (plan, pointers.cache),
            lambda: prepare_grouped(self.device, plan, pointers.cache),
        )

    def insert_grouped(
        self, plan: InsertPlan, inputs: InsertInputs, pointers: GroupedPointers, stream: object
    ) -> None:
        """Store rows in caches that are known by device pointers alone."""
        run = self._prepared_grouped(plan, pointers).run
        addresses = inputs.addresses()
        pair = (ALL_CACHES, *pointers.addresses())
        self._run(
            plan.operation,
            lambda pointer: run(*addresses, pointer, pair),
            [*inputs.arrays(), *pointers.arrays()],
            inputs.kv_c,
            stream,
        )

    def grouped_launcher(
        self, plan: InsertPlan, inputs: InsertInputs, pointers: GroupedPointers
    ) -> Callable[..., None] | None:
        """Return what stores rows by addresses alone, for all arrays that look like these."""
        current_stream = self._only_stream(inputs, [*inputs.arrays(), *pointers.arrays()])
        if current_stream is None:
            return None
        return self._prepared_grouped(plan, pointers).with_pair(current_stream, ALL_CACHES)

    def warmup(self, target: Any) -> None:
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
