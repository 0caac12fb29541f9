"""Which backend runs a plan: NumPy for host memory, CUDA for device memory.

A backend takes plans and the arrays that belong to them; it validates nothing. The CUDA backend
is imported when the first device array comes, never before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from . import _arrays, reference
from ._arrays import ArrayRef, DeviceId
from ._plan import CachePlan, InsertInputs, InsertPlan, ReadPlan, Scale, Target

if TYPE_CHECKING:
    from ._cuda.backend import CudaBackend


class Backend(Protocol):
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

    def call_target(self, cache: ArrayRef, plan: CachePlan, scale: Scale) -> Target:
        """Make the passing state of a single call."""

    def insert(
        self, plan: InsertPlan, inputs: InsertInputs, target: Target, stream: object
    ) -> None:
        """Store rows."""

    def read_slots(
        self, plan: ReadPlan, slots: ArrayRef, target: Target, like: ArrayRef, stream: object
    ) -> Any:
        """Read rows back into a new array of the framework of `like`."""

    def warmup(self, target: Target) -> None:
        """Make everything ready that a first insert would otherwise have to."""

    def explain(self, groups: Sequence[tuple[int, ...]]) -> str:
        """Say in a line how groups of layers of one layout are written."""


class NumpyBackend:
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

    def read_slots(
        self, plan: ReadPlan, slots: ArrayRef, target: Any, like: ArrayRef, stream: object
    ) -> Any:
        """Read rows back into a new array of the framework of `like`."""
        return _arrays.in_framework_of(reference.read_slots(plan, slots, target), like)

    def warmup(self, target: Any) -> None:
        """Nothing is compiled here."""

    def explain(self, groups: Sequence[tuple[int, ...]]) -> str:
        """Say how layers are written."""
        return "written by NumPy, one layer after the other; on a GPU: "


_NUMPY = NumpyBackend()


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
