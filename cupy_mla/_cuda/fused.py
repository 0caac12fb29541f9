"""The fused operations of the CUDA backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cupy_mla import dtypes
from cupy_mla._arrays import ArrayRef, describe
from cupy_mla._plan_fused import (
    ContextInputs,
    ContextPlan,
    FusedQInputs,
    FusedQPlan,
    IndexerInsertInputs,
    IndexerInsertPlan,
    NormRopeInputs,
    NormRopeLayer,
    NormRopeLayerPlan,
    NormRopePlan,
)
from cupy_mla.dtypes import DType

from . import context, indexer, norm_rope, query, registry
from .compiler import load
from .context import PreparedContext
from .device import Device, Memory
from .norm_rope import NormRopeTarget
from .prepared import Known, PreparedLaunch
from .target import CudaTarget


class CudaFused(ABC):
    """What `FusedBackend` asks for, by kernels; `CudaBackend` inherits it."""

    device: Device

    def __init__(self) -> None:
        super().__init__()
        self._fused = Known()

    @abstractmethod
    def _run(
        self,
        operation: str,
        launch: Callable[[int], None],
        arrays: Iterable[ArrayRef],
        owner: ArrayRef,
        stream: object,
        made: Iterable[ArrayRef] = (),
    ) -> None:
        """Launch on the right stream, behind the producers of the arrays."""

    def _new(self, shape: tuple[int, ...], dtype: DType, like: ArrayRef) -> ArrayRef:
        """Allocate an output of the framework of `like`, or CuPy's; its owner is the array.

        It comes from a pool, in the order of its framework's current stream. Where the kernel runs
        on another one, `_run` orders and keeps it as it does inputs, and hands it over.
        """
        if dtype == dtypes.FLOAT8_E4M3 and like.framework != "torch":
            dtype = dtypes.UINT8
        array = self.device.empty(shape, dtype, like.framework)
        ref = describe(array)
        if ref is None:
            raise TypeError(f"{type(array).__name__} is no array")
        return ref

    def _stream_of_all(self, arrays: Iterable[ArrayRef]) -> Callable[[], int] | None:
        """Return what finds the stream of a call that has nothing to order; None for others."""
        frameworks = {ref.framework for ref in arrays}
        if frameworks not in ({"cupy"}, {"torch"}):
            return None
        return self.device.stream_getter(frameworks.pop())

    def _context(
        self, plan: ContextPlan, inputs: ContextInputs, target: CudaTarget
    ) -> PreparedContext:
        listed = isinstance(inputs.slots, tuple)
        return target.prepared.get(
            (plan, listed), lambda: context.prepare(self.device, plan, target, listed=listed)
        )

    def insert_context(
        self, plan: ContextPlan, inputs: ContextInputs, target: CudaTarget, stream: object
    ) -> None:
        """Norm, rotate and store one projection in the caches of all layers of a writer."""
        prepared = self._context(plan, inputs, target)
        self._run(
            plan.operation,
            lambda pointer: prepared.run(inputs, pointer),
            [*target.arrays(), *_context_arrays(inputs)],
            target.caches[0],
            stream,
        )

    def context_launcher(
        self, plan: ContextPlan, inputs: ContextInputs, target: CudaTarget
    ) -> Callable[..., None] | None:
        """Return what stores projections by addresses, for all arrays that look like these."""
        stream = self._stream_of_all([*target.arrays(), *_context_arrays(inputs)])
        if stream is None or isinstance(inputs.slots, tuple):
            return None
        return self._context(plan, inputs, target).by_address(stream)

    def warmup_context(self, target: CudaTarget) -> None:
        """Compile what `insert_context` needs, for each input dtype that the layers take."""
        for group in target.groups:
            for dtype in group.layout.input_dtypes:
                special = registry.find("context", group.layout.name, dtype.name)
                load(self.device, special, group.layout)

    def stack(self, rows: Sequence[ArrayRef]) -> ArrayRef:
        """Copy vectors of one length and dtype into a new array ``[len(rows), length]``."""
        stream = self.device.current_stream(rows[0].framework)
        data = np.stack([self._fetch(row, stream) for row in rows])
        out = self._new(data.shape, rows[0].dtype, rows[0])
        self.device.upload(Memory(out.ptr, data.nbytes, out), data, stream)
        return out

    def _fetch(self, vector: ArrayRef, stream: int) -> np.ndarray[Any, Any]:
        """Copy a vector to the host, after waiting for the device."""
        if vector.device is not None and vector.device.kind == "cpu":
            return vector.host_view()
        (count,), (step,) = vector.shape, vector.strides
        low = min(0, (count - 1) * step)
        span = Memory(vector.ptr + low, abs(count - 1) * abs(step) + vector.dtype.itemsize, vector)
        raw = self.device.download(span, stream)
        return np.ndarray((count,), vector.dtype, raw.data, -low, (step,))

    def norm_rope_target(
        self, plan: NormRopeLayerPlan, layer: NormRopeLayer, *, lasting: bool
    ) -> NormRopeTarget:
        """Make the state of a layer; one that is not `lasting` serves one call, counts nothing."""
        return NormRopeTarget(self.device, plan, layer, lasting=lasting)

    def _norm_rope(self, plan: NormRopePlan, target: NormRopeTarget) -> PreparedLaunch | None:
        known = self._fused if target.prepared is None else target.prepared
        found: PreparedLaunch | None = known.get(
            (plan, target.scale_number()),
            lambda: norm_rope.prepare(self.device, plan, target),
        )
        return found

    def norm_rope(
        self, plan: NormRopePlan, inputs: NormRopeInputs, target: NormRopeTarget, stream: object
    ) -> Any:
        """Norm, rotate and store a step; return the normed query."""
        prepared = self._norm_rope(plan, target)
        out, made = inputs.q_c_out, list[ArrayRef]()
        if out is None:
            out = self._new((plan.tokens, plan.q_c.width), plan.input_dtype, inputs.q_c)
            made = [out]
        if prepared is not None:
            addresses = norm_rope.step_addresses(inputs, out) + target.addresses()
            self._run(
                plan.operation,
                lambda pointer: prepared.run(addresses, pointer),
                [*target.arrays(), *norm_rope.step_arrays(inputs), out],
                target.owner(out),
                stream,
                made,
            )
        return out.owner

    def norm_rope_launcher(
        self, plan: NormRopePlan, inputs: NormRopeInputs, target: NormRopeTarget
    ) -> Callable[..., Any] | None:
        """Return what does steps by addresses, for all arrays that look like these."""
        outs = [] if inputs.q_c_out is None else [inputs.q_c_out]
        stream = self._stream_of_all([*target.arrays(), *norm_rope.step_arrays(inputs), *outs])
        prepared = self._norm_rope(plan, target)
        if stream is None or prepared is None:
            return None
        like = replace(inputs.q_c, owner=None)
        return norm_rope.by_address(
            plan,
            prepared,
            stream,
            lambda: self._new((plan.tokens, plan.q_c.width), plan.input_dtype, like),
            None if target.prepared is None else target.array_addresses(),
        )

    def warmup_norm_rope(self, plan: NormRopeLayerPlan, target: Any) -> None:
        """Compile what steps of a layer need, for each input dtype that they may have."""
        given = (
            dtypes.INPUT_DTYPES if plan.mla_cache is None else plan.mla_cache.layout.input_dtypes
        )
        for dtype in given:
            load(self.device, *norm_rope.specialisation(plan, dtype.name))

    def _query(self, plan: FusedQPlan, inputs: FusedQInputs) -> PreparedLaunch | None:
        scale = None if isinstance(inputs.q_scale, ArrayRef) else inputs.q_scale
        found: PreparedLaunch | None = self._fused.get(
            (plan, scale), lambda: query.prepare(self.device, plan, scale)
        )
        return found

    def fused_q(
        self, plan: FusedQPlan, inputs: FusedQInputs, stream: object
    ) -> tuple[Any, Any, Any]:
        """Rotate and quantise queries; return index_q, its weights and mqa_q."""
        prepared = self._query(plan, inputs)
        given_outs = query.given_outputs(inputs)
        outs = [
            self._new(*wanted, inputs.q_pe) if given is None and wanted is not None else given
            for given, wanted in zip(given_outs, query.outputs(plan), strict=True)
        ]
        mqa, index_q, weights = outs
        if prepared is not None and mqa is not None:
            addresses = query.addresses(inputs, mqa, index_q, weights)
            self._run(
                plan.operation,
                lambda pointer: prepared.run(addresses, pointer),
                [*query.arrays(inputs), *(ref for ref in outs if ref is not None)],
                mqa,
                stream,
                [
                    ref
                    for ref, given in zip(outs, given_outs, strict=True)
                    if given is None and ref is not None
                ],
            )
        made = [None if ref is None else ref.owner for ref in (index_q, weights, mqa)]
        return made[0], made[1], made[2]

    def fused_q_launcher(
        self, plan: FusedQPlan, inputs: FusedQInputs
    ) -> Callable[..., tuple[Any, Any, Any]] | None:
        """Return what works on queries by addresses, for all arrays that look like these."""
        outs = [ref for ref in query.given_outputs(inputs) if ref is not None]
        stream = self._stream_of_all([*query.arrays(inputs), *outs])
        prepared = self._query(plan, inputs)
        if stream is None or prepared is None:
            return None
        like = replace(inputs.q_pe, owner=None)
        return query.by_address(plan, prepared, stream, lambda wanted: self._new(*wanted, like))

    def _indexer(self, plan: IndexerInsertPlan) -> PreparedLaunch | None:
        found: PreparedLaunch | None = self._fused.get(
            plan, lambda: indexer.prepare(self.device, plan)
        )
        return found

    def insert_indexer(
        self, plan: IndexerInsertPlan, inputs: IndexerInsertInputs, stream: object
    ) -> None:
        """Store rows in an indexer cache."""
        prepared = self._indexer(plan)
        if prepared is None:
            return
        addresses = indexer.addresses(plan, inputs)
        self._run(
            plan.operation,
            lambda pointer: prepared.run(addresses, pointer),
            [inputs.cache, inputs.k, inputs.slots],
            inputs.cache,
            stream,
        )

    def indexer_launcher(
        self, plan: IndexerInsertPlan, inputs: IndexerInsertInputs
    ) -> Callable[..., None] | None:
        """Return what stores keys by addresses, for all arrays that look like these."""
        stream = self._stream_of_all([inputs.cache, inputs.k, inputs.slots])
        prepared = self._indexer(plan)
        if stream is None or prepared is None:
            return None
        return indexer.by_address(plan, prepared, stream)


def _context_arrays(inputs: ContextInputs) -> list[ArrayRef]:
    """Return the arrays there are."""
    slots = inputs.slots if isinstance(inputs.slots, tuple) else (inputs.slots,)
    given = (inputs.kv, inputs.positions, inputs.weight, inputs.table, *slots)
    return [ref for ref in given if ref is not None]
