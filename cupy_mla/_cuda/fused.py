"""The fused operations of the CUDA backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from cupy_mla._arrays import ArrayRef
from cupy_mla._plan_fused import ContextInputs, ContextPlan

from . import context
from .device import Device
from .target import CudaTarget


class CudaFused(ABC):
    """What `FusedBackend` asks for, by kernels; `CudaBackend` inherits it."""

    device: Device

    @abstractmethod
    def _run(
        self,
        operation: str,
        launch: Callable[[int], None],
        arrays: Iterable[ArrayRef],
        owner: ArrayRef,
        stream: object,
    ) -> None:
        """Launch on the right stream, behind the producers of the arrays."""

    def insert_context(
        self, plan: ContextPlan, inputs: ContextInputs, target: CudaTarget, stream: object
    ) -> None:
        """Norm, rotate and store one projection in the caches of all layers of a writer."""
        listed = isinstance(inputs.slots, tuple)
        prepared = target.prepared.get((plan, listed))
        if prepared is None:
            prepared = context.prepare(self.device, plan, target, listed=listed)
            target.prepared[plan, listed] = prepared
        slots = inputs.slots if isinstance(inputs.slots, tuple) else (inputs.slots,)
        given = (inputs.kv, inputs.positions, inputs.weight, inputs.table, *slots)
        self._run(
            plan.operation,
            lambda pointer: prepared.run(inputs, pointer),
            [*target.arrays(), *(ref for ref in given if ref is not None)],
            target.caches[0],
            stream,
        )
