"""Which backend runs a plan: NumPy for host memory, CUDA for device memory.

A backend takes plans and the arrays that belong to them; it validates nothing. The CUDA backend
is imported when the first device array comes, never before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from . import _arrays, reference
from ._arrays import ArrayRef, DeviceId
from ._fused_backends import FusedBackend, NumpyFused
from ._plan import (
    BlockTable,
    CachePlan,
    ConvertPlan,
    GatherPlan,
    IndexerGatherPlan,
    InsertInputs,
    InsertPlan,
    ReadPlan,
    Scale,
    Target,
)

if TYPE_CHECKING:
    from ._cuda.backend import CudaBackend


class Backend(FusedBackend, Protocol):
    """What a backend does."""

    def target(
        self,
        caches: Sequence[ArrayRef],
        plans: Sequence[CachePlan],
        scales: Sequence[Scale],
        *,
        collect_stats: bool,
    ) -> Target:
        """Make the lasting state of a writer."""

    def call_target(self, cache: ArrayRef, plan: CachePlan, scale: Scale) -> Any:
        """Make the passing state of a single call, which only the backend looks into."""

    def insert(
        self, plan: InsertPlan, inputs: InsertInputs, target: Target, stream: object
    ) -> None:
        """Store rows."""

    def launcher(
        self, plan: InsertPlan, inputs: InsertInputs, target: Target
    ) -> Callable[..., None] | None:
        """Return what stores rows by addresses alone, for all arrays that look like these.

        It takes the addresses of kv_c, k_pe and slots; those of the cache and of its scale too if
        the target is a single call's. None where an insert has more to do than to launch: arrays
        of several frameworks, or of the host.
        """

    def bound_launcher(
        self, plan: InsertPlan, inputs: InsertInputs, target: Target
    ) -> Callable[[], None] | None:
        """Return what stores what these arrays hold, at each call; None as for `launcher`."""

    def read_slots(
        self, plan: ReadPlan, slots: ArrayRef, target: Target, like: ArrayRef, stream: object
    ) -> Any:
        """Read rows back into a new array of the framework of `like`."""

    def gather(
        self,
        plan: GatherPlan,
        arrays: BlockTable,
        target: Target,
        out: ArrayRef | None,
        like: ArrayRef,
        stream: object,
    ) -> Any:
        """Read the rows that a block table names into `out`, or a new array as `like` is."""

    def gather_indexer(
        self,
        plan: IndexerGatherPlan,
        arrays: BlockTable,
        target: Target,
        codes: ArrayRef,
        scales: ArrayRef,
        stream: object,
    ) -> None:
        """Copy the codes and scales of the indexer keys that a block table names."""

    def convert(
        self,
        plan: ConvertPlan,
        slots: ArrayRef | None,
        source: Target,
        destination: Target,
        stream: object,
    ) -> None:
        """Write rows of one cache to the same slots of another."""

    def host_rows(self, target: Target, slots: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Copy rows to the host as they are: uint8 ``[n, row_bytes]``, after waiting.

        The parts of a row are one behind the other, wherever a block keeps them. `slots` is an
        int64 array in host memory; the cache has them all.
        """

    def host_copy(self, array: ArrayRef) -> np.ndarray[Any, Any]:
        """Return an array as a host array, after waiting; host arrays themselves."""

    def warmup(self, target: Target) -> None:
        """Make everything ready that a first insert would otherwise have to."""

    def explain(self, groups: Sequence[tuple[int, ...]]) -> str:
        """Say in a line how groups of layers of one layout are written."""


class NumpyBackend(NumpyFused):
    """Host arrays, by the reference."""

    def target(
        self,
        caches: Sequence[ArrayRef],
        plans: Sequence[CachePlan],
        scales: Sequence[Scale],
        *,
        collect_stats: bool,
    ) -> reference.HostTarget:
        """Make the lasting state of a writer."""
        return reference.HostTarget(caches, plans, scales, collect_stats=collect_stats)

    def call_target(self, cache: ArrayRef, plan: CachePlan, scale: Scale) -> reference.HostTarget:
        """Make the passing state of a single call."""
        return reference.HostTarget([cache], [plan], [scale])

    def insert(self, plan: InsertPlan, inputs: InsertInputs, target: Any, stream: object) -> None:
        """Store rows."""
        reference.insert(plan, inputs, target)

    def launcher(self, plan: InsertPlan, inputs: InsertInputs, target: Any) -> None:
        """Nothing is launched here."""

    def bound_launcher(self, plan: InsertPlan, inputs: InsertInputs, target: Any) -> None:
        """Nothing is launched here."""

    def read_slots(
        self, plan: ReadPlan, slots: ArrayRef, target: Any, like: ArrayRef, stream: object
    ) -> Any:
        """Read rows back into a new array of the framework of `like`."""
        return _arrays.in_framework_of(reference.read_slots(plan, slots, target), like)

    def gather(
        self,
        plan: GatherPlan,
        arrays: BlockTable,
        target: Any,
        out: ArrayRef | None,
        like: ArrayRef,
        stream: object,
    ) -> Any:
        """Read the rows that a block table names into `out`, or a new array as `like` is."""
        return _arrays.in_framework_of(reference.gather(plan, arrays, target, out), like)

    def gather_indexer(
        self,
        plan: IndexerGatherPlan,
        arrays: BlockTable,
        target: Any,
        codes: ArrayRef,
        scales: ArrayRef,
        stream: object,
    ) -> None:
        """Copy the codes and scales of the indexer keys that a block table names."""
        reference.gather_indexer(plan, arrays, target, codes, scales)

    def convert(
        self,
        plan: ConvertPlan,
        slots: ArrayRef | None,
        source: Any,
        destination: Any,
        stream: object,
    ) -> None:
        """Write rows of one cache to the same slots of another."""
        reference.convert(plan, slots, source, destination)

    def host_rows(self, target: Any, slots: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Copy rows as they are: uint8 ``[n, row_bytes]``."""
        return reference.host_rows(target, slots)

    def host_copy(self, array: ArrayRef) -> np.ndarray[Any, Any]:
        """Return a host array as it is."""
        return array.host_view()

    def warmup(self, target: Any) -> None:
        """Nothing is compiled here."""

    def explain(self, groups: Sequence[tuple[int, ...]]) -> str:
        """Say how layers are written."""
        return "written by NumPy, one layer after the other; on a GPU: "


_NUMPY = NumpyBackend()


def _pointer_device(ptr: int) -> int:
    """Return the number of the CUDA device that owns an address."""
    from ._cuda import cupy_device

    return cupy_device.pointer_device(ptr)


_arrays.pointer_device = _pointer_device


def for_device(device: DeviceId) -> Backend:
    """Return the backend of a device.

    Raises
    ------
    BackendUnavailable
        For a CUDA device where CuPy or a driver is missing.
    """
    return _NUMPY if device.kind == "cpu" else cuda(device)


def cuda(device: DeviceId) -> CudaBackend:
    """Return the CUDA backend of a device, which can do what only makes sense there."""
    from ._cuda import backend

    return backend.for_device(device)
