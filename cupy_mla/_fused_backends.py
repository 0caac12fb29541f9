"""What a backend does for the fused operations, and how NumPy does it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from . import _arrays, dtypes
from ._arrays import ArrayRef
from ._plan import ErrorRecord
from ._plan_fused import (
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
from .reference import context, fused, indexer
from .reference.insert import HostTarget

Array = np.ndarray[Any, Any]


class NormRopeTarget(Protocol):
    """A layer of `fused_norm_rope` as a backend keeps it.

    Counters and errors have two places: 0 for the MLA cache, 1 for the indexer cache.
    """

    def counts(self) -> dict[str, Array]:
        """Return a copy of the counters, int64 [2] each, zeros for a cache that is missing."""

    def take_errors(self) -> list[ErrorRecord]:
        """Return what was recorded since the last call, and arm the records again."""

    def scale_value(self) -> float | None:
        """Return the scale of the MLA cache as it is now, None where it has none."""


class FusedBackend(Protocol):
    """What a backend does for the fused operations."""

    def norm_rope_target(
        self, plan: NormRopeLayerPlan, layer: NormRopeLayer, *, lasting: bool
    ) -> NormRopeTarget:
        """Make the state of a layer; one that is not `lasting` serves one call and counts nothing.

        A scale that is an array is read at each call.
        """

    def norm_rope(
        self, plan: NormRopePlan, inputs: NormRopeInputs, target: Any, stream: object
    ) -> Any:
        """Norm, rotate and store a step.

        Returns the normed query as a new array of the framework of q_c; what comes back where
        the inputs have a q_c_out is not looked at.
        """

    def norm_rope_launcher(
        self, plan: NormRopePlan, inputs: NormRopeInputs, target: Any
    ) -> Callable[..., Any] | None:
        """Return what does steps by addresses alone, for all arrays that look like these.

        It takes the addresses of a step's arrays in the order of `NormRopeInputs`, and those of
        `NormRopeLayer` (cache before scale) too if the target serves one call; 0 for none. It
        returns the normed query as a new array where there is no address for it. None where a
        step has more to do than to launch.
        """

    def warmup_norm_rope(self, plan: NormRopeLayerPlan, target: Any) -> None:
        """Make everything ready that a first call would otherwise have to."""

    def fused_q(
        self, plan: FusedQPlan, inputs: FusedQInputs, stream: object
    ) -> tuple[Any, Any, Any]:
        """Rotate and quantise queries.

        Returns index_q, index_weights and mqa_q as new arrays of the framework of q_pe, None for
        the first two without an indexer; what comes back in the place of an output that the
        inputs have is not looked at.
        """

    def fused_q_launcher(
        self, plan: FusedQPlan, inputs: FusedQInputs
    ) -> Callable[..., tuple[Any, Any, Any]] | None:
        """Return what works on queries by addresses alone, for all arrays that look like these.

        It takes the addresses of positions, q_pe, its table, index_q, its table, ql_nope, q_scale
        and index_weights, then of the outputs that `fused_q` returns; 0 for none. It returns new
        arrays for those without an address.
        """

    def insert_indexer(
        self, plan: IndexerInsertPlan, inputs: IndexerInsertInputs, stream: object
    ) -> None:
        """Store rows in an indexer cache."""

    def indexer_launcher(
        self, plan: IndexerInsertPlan, inputs: IndexerInsertInputs
    ) -> Callable[..., None] | None:
        """Return what stores keys by the addresses of k, the cache and slots."""

    def insert_context(
        self, plan: ContextPlan, inputs: ContextInputs, target: Any, stream: object
    ) -> None:
        """Norm, rotate and store one projection in the caches of all layers of a writer."""

    def context_launcher(
        self, plan: ContextPlan, inputs: ContextInputs, target: Any
    ) -> Callable[..., None] | None:
        """Return what stores projections by the addresses of the arrays of `ContextInputs`.

        None where slots are a list, too.
        """

    def warmup_context(self, target: Any) -> None:
        """Make everything ready that a first `insert_context` would otherwise have to."""

    def stack(self, rows: Sequence[ArrayRef]) -> ArrayRef:
        """Copy vectors of one length and dtype into a new array ``[len(rows), length]``."""


class NumpyFused:
    """The fused operations on host arrays, by the reference."""

    def norm_rope_target(
        self, plan: NormRopeLayerPlan, layer: NormRopeLayer, *, lasting: bool
    ) -> fused.NormRopeTarget:
        """Make the state of a layer."""
        return fused.NormRopeTarget(plan, layer)

    def norm_rope(
        self, plan: NormRopePlan, inputs: NormRopeInputs, target: Any, stream: object
    ) -> Any:
        """Norm, rotate and store a step."""
        out = _output(inputs.q_c_out, (plan.tokens, plan.q_c.width), plan.input_dtype)
        fused.norm_rope(plan, inputs, target, out)
        return None if inputs.q_c_out else _arrays.in_framework_of(out, inputs.q_c)

    def norm_rope_launcher(self, plan: NormRopePlan, inputs: NormRopeInputs, target: Any) -> None:
        """Nothing is launched here."""

    def warmup_norm_rope(self, plan: NormRopeLayerPlan, target: Any) -> None:
        """Nothing is compiled here."""

    def fused_q(
        self, plan: FusedQPlan, inputs: FusedQInputs, stream: object
    ) -> tuple[Any, Any, Any]:
        """Rotate and quantise queries."""
        mqa_dtype = dtypes.FLOAT8_E4M3 if plan.quantize_mqa else plan.input_dtype
        mqa = _output(inputs.mqa_q_out, plan.mqa_shape, mqa_dtype)
        index, weights = None, None
        if plan.index_q is not None:
            shape = (plan.tokens, *plan.index_q.shape[1:])
            index = _output(inputs.index_q_out, shape, dtypes.FLOAT8_E4M3)
            weights = _output(inputs.index_weights_out, shape[:2], dtypes.FLOAT32)
        fused.fused_q(
            plan,
            inputs,
            mqa.view(np.uint8) if plan.quantize_mqa else mqa,
            None if index is None else index.view(np.uint8),
            weights,
        )
        made = [
            None if out is None or given else _arrays.in_framework_of(out, inputs.q_pe)
            for out, given in (
                (index, inputs.index_q_out),
                (weights, inputs.index_weights_out),
                (mqa, inputs.mqa_q_out),
            )
        ]
        return made[0], made[1], made[2]

    def fused_q_launcher(self, plan: FusedQPlan, inputs: FusedQInputs) -> None:
        """Nothing is launched here."""

    def indexer_launcher(self, plan: IndexerInsertPlan, inputs: IndexerInsertInputs) -> None:
        """Nothing is launched here."""

    def context_launcher(self, plan: ContextPlan, inputs: ContextInputs, target: Any) -> None:
        """Nothing is launched here."""

    def insert_indexer(
        self, plan: IndexerInsertPlan, inputs: IndexerInsertInputs, stream: object
    ) -> None:
        """Store rows in an indexer cache."""
        target = HostTarget([inputs.cache], [plan.cache], [None])
        indexer.insert_indexer(plan, inputs, target)

    def insert_context(
        self, plan: ContextPlan, inputs: ContextInputs, target: Any, stream: object
    ) -> None:
        """Norm, rotate and store one projection in the caches of all layers of a writer."""
        context.insert_context(plan, inputs, target)

    def warmup_context(self, target: Any) -> None:
        """Nothing is compiled here."""

    def stack(self, rows: Sequence[ArrayRef]) -> ArrayRef:
        """Copy vectors into a new array."""
        made = np.stack([row.host_view() for row in rows])
        ref = _arrays.describe(made)
        if ref is None:
            raise TypeError("a NumPy array is an array")
        return ref


def _output(given: ArrayRef | None, shape: tuple[int, ...], dtype: dtypes.DType) -> Array:
    """Return the array that was given, or a new one."""
    return np.empty(shape, dtype) if given is None else given.host_view()
