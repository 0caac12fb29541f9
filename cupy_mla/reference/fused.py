"""fused_norm_rope and fused_q on NumPy: what one kernel launch each does on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_mla._arrays import ArrayRef
from cupy_mla._plan import COUNTERS_ALWAYS, ErrorRecord, Scale
from cupy_mla._plan_fused import (
    FusedQInputs,
    FusedQPlan,
    NormRopeInputs,
    NormRopeLayer,
    NormRopeLayerPlan,
    NormRopePlan,
)
from cupy_mla.dtypes import FLOAT8_E4M3

from . import norm
from .casts import narrow, round_to, widen
from .context import store
from .fp8 import quantize
from .indexer import quantize_rows, store_indexer
from .insert import HostTarget
from .rope import rotate_at

Array = np.ndarray[Any, Any]

#: Tokens of fused_norm_rope at a time, and elements of a query of fused_q: both bound the float32
#: temporaries to a few megabytes.
_CHUNK = 1024
_CHUNK_ELEMENTS = 1 << 20


class NormRopeTarget:
    """One layer's weights, tables, caches and counters in host memory.

    Counters and errors have two places: 0 for the MLA cache, 1 for the indexer cache.
    """

    def __init__(self, plan: NormRopeLayerPlan, layer: NormRopeLayer) -> None:
        self.layer = layer
        self.mla: HostTarget | None = None
        self.indexer: HostTarget | None = None
        if layer.mla_cache is not None and plan.mla_cache is not None:
            self.mla = HostTarget([layer.mla_cache], [plan.mla_cache], [layer.mla_scale])
        if layer.indexer_cache is not None and plan.indexer_cache is not None:
            self.indexer = HostTarget([layer.indexer_cache], [plan.indexer_cache], [None])

    def counts(self) -> dict[str, Array]:
        """Return a copy of the counters, int64 [2] each; a cache that is missing counts 0."""
        parts = [None if part is None else part.counts() for part in (self.mla, self.indexer)]
        return {
            name: np.array([0 if part is None else part[name][0] for part in parts], np.int64)
            for name in COUNTERS_ALWAYS
        }

    def take_errors(self) -> list[ErrorRecord]:
        """Return what was recorded since the last call, and arm the records again."""
        return [
            ErrorRecord(error.kind, place, error.token, error.slot)
            for place, part in enumerate((self.mla, self.indexer))
            if part is not None
            for error in part.take_errors()
        ]

    def scale_value(self) -> float | None:
        """Return the scale of the MLA cache as it is now, None where it has none."""
        scale = None if self.mla is None else self.mla.scale(0)
        return None if scale is None else float(scale)


def norm_rope(
    plan: NormRopePlan, inputs: NormRopeInputs, target: NormRopeTarget, q_c_out: Array
) -> None:
    """Norm, rotate and store a step's tokens.

    Parameters
    ----------
    plan : NormRopePlan
    inputs : NormRopeInputs
    target : NormRopeTarget
    q_c_out : array [T', Q]
        Gets RMSNorm of q_c, of every token whatever its slot and position.
    """
    for start in range(0, plan.tokens, _CHUNK):
        rows = slice(start, min(start + _CHUNK, plan.tokens))
        _norm_q(plan, inputs, target.layer, rows, q_c_out)
        _norm_rope_kv(plan, inputs, target, rows)
        _norm_rope_index(plan, inputs, target, rows)
        if inputs.topk is not None:
            inputs.topk.host_view()[rows] = -1


def _norm_q(
    plan: NormRopePlan, inputs: NormRopeInputs, layer: NormRopeLayer, rows: slice, out: Array
) -> None:
    values = widen(inputs.q_c.host_view()[rows])
    weight = widen(layer.q_weight.host_view())
    out[rows] = narrow(norm.rms_norm(values, weight, plan.layer.q_eps), plan.input_dtype)


def _norm_rope_kv(
    plan: NormRopePlan, inputs: NormRopeInputs, target: NormRopeTarget, rows: slice
) -> None:
    stored = target.mla is not None and inputs.slots is not None
    if not stored and inputs.kv_c_out is None and inputs.k_pe_out is None:
        return
    layer = target.layer
    dtype = plan.input_dtype
    weight = widen(layer.kv_weight.host_view())
    latent = norm.rms_norm(widen(inputs.kv_c.host_view()[rows]), weight, plan.layer.kv_eps)
    rotary = None
    found = np.ones(latent.shape[0], np.bool_)
    if inputs.k_pe is not None and layer.k_table is not None:
        rotary, found = rotate_at(
            widen(inputs.k_pe.host_view()[rows]),
            layer.k_table.host_view(),
            inputs.positions.host_view()[rows],
            is_neox=False,
        )
    if plan.layer.rounding == "staged":
        latent = round_to(latent, dtype)
        rotary = None if rotary is None else round_to(rotary, dtype)
    if inputs.kv_c_out is not None:
        inputs.kv_c_out.host_view()[rows] = narrow(latent, dtype)
    if inputs.k_pe_out is not None and rotary is not None:
        inputs.k_pe_out.host_view()[rows] = narrow(rotary, dtype)
    if target.mla is not None and inputs.slots is not None:
        store(target.mla, 0, rows.start, inputs.slots.host_view(), found, latent, rotary)


def _norm_rope_index(
    plan: NormRopePlan, inputs: NormRopeInputs, target: NormRopeTarget, rows: slice
) -> None:
    layer = target.layer
    if (
        target.indexer is None
        or inputs.indexer_slots is None
        or inputs.index_k is None
        or layer.index_weight is None
        or layer.index_bias is None
        or layer.index_table is None
    ):
        return
    staged = plan.layer.rounding == "staged"
    values = norm.layer_norm(
        widen(inputs.index_k.host_view()[rows]),
        widen(layer.index_weight.host_view()),
        widen(layer.index_bias.host_view()),
        plan.layer.index_eps,
    )
    if staged:
        values = round_to(values, plan.input_dtype)
    values, found = rotate_at(
        values,
        layer.index_table.host_view(),
        inputs.positions.host_view()[rows],
        is_neox=plan.layer.index_is_neox,
    )
    if staged:
        values = round_to(values, plan.input_dtype)
    slots = inputs.indexer_slots.host_view()
    store_indexer(target.indexer, 0, rows.start, slots, found, values)


def fused_q(
    plan: FusedQPlan,
    inputs: FusedQInputs,
    mqa_q: Array,
    index_q_out: Array | None,
    index_weights_out: Array | None,
) -> None:
    """Rotate and quantise queries.

    Parameters
    ----------
    plan : FusedQPlan
    inputs : FusedQInputs
    mqa_q : array
        ``[T', H, R + P]`` of uint8 for codes, or ``[T', H, P]`` of the inputs' dtype.
    index_q_out : uint8 array [T', I, D] or None
    index_weights_out : float32 array [T', I] or None
    """
    elements = max(1, int(np.prod(plan.mqa_shape[1:])))
    if plan.index_q is not None:
        elements = max(elements, int(np.prod(plan.index_q.shape[1:])))
    step = max(1, _CHUNK_ELEMENTS // elements)
    for start in range(0, plan.tokens, step):
        rows = slice(start, min(start + step, plan.tokens))
        _mqa_query(plan, inputs, rows, mqa_q)
        if index_q_out is not None and index_weights_out is not None:
            _index_query(plan, inputs, rows, index_q_out, index_weights_out)


def _mqa_query(plan: FusedQPlan, inputs: FusedQInputs, rows: slice, out: Array) -> None:
    rotary, _ = rotate_at(
        widen(inputs.q_pe.host_view()[rows]),
        inputs.q_table.host_view(),
        inputs.positions.host_view()[rows],
        is_neox=False,
    )
    if inputs.ql_nope is None:
        out[rows] = narrow(rotary, plan.input_dtype)
        return
    scale = scale_now(inputs.q_scale)
    rank = inputs.ql_nope.shape[-1]
    latent = widen(inputs.ql_nope.host_view()[rows])
    out[rows, :, :rank] = quantize(latent, scale, FLOAT8_E4M3)
    out[rows, :, rank:] = quantize(rotary, scale, FLOAT8_E4M3)


def _index_query(
    plan: FusedQPlan, inputs: FusedQInputs, rows: slice, out: Array, weights_out: Array
) -> None:
    if inputs.index_q is None or inputs.index_table is None or inputs.index_weights is None:
        return
    values, _ = rotate_at(
        widen(inputs.index_q.host_view()[rows]),
        inputs.index_table.host_view(),
        inputs.positions.host_view()[rows],
        is_neox=plan.index_is_neox,
    )
    codes, scales = quantize_rows(values, "ue8m0")
    out[rows] = codes
    weights = widen(inputs.index_weights.host_view()[rows])
    with np.errstate(all="ignore"):
        weights = (weights * scales) * np.float32(plan.softmax_scale)
        weights_out[rows] = narrow(weights * np.float32(plan.head_scale), weights_out.dtype)


def scale_now(scale: Scale) -> np.float32:
    """Return a scale as it is now."""
    if isinstance(scale, ArrayRef):
        return np.float32(scale.host_view().reshape(())[()])
    if scale is None:
        raise ValueError("fp8 queries need their scale")
    return np.float32(scale)
