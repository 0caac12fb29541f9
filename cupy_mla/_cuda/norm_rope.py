"""Launching the norm_rope kernel, and what a layer keeps on a device for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cupy_mla._arrays import ArrayRef
from cupy_mla._plan import COUNTERS, COUNTERS_ALWAYS, ERROR_KINDS, ErrorRecord
from cupy_mla._plan_fused import (
    NormRopeInputs,
    NormRopeLayer,
    NormRopeLayerPlan,
    NormRopePlan,
    Operand,
)
from cupy_mla.layouts import CacheLayout, get_layout

from . import params, params_fused, registry
from .compiler import load
from .context import number_type, rope_table
from .device import Device, Memory
from .geometry import warp_rows_shape
from .indexer import index_cache, plane_starts
from .prepared import Known, PreparedLaunch
from .registry import Specialisation
from .target import layer_entry

Array = np.ndarray[Any, Any]

#: Places of counters and error records: the MLA cache's and the indexer cache's.
_PLACES = 2
#: Addresses that the kernel's arguments begin with: a step's, then a layer's.
_STEP, _ADDRESSES = (
    (params_fused.NORM_ROPE_PARAMS.dtype.names or ()).index(behind)
    for behind in ("q_weight", "counters")
)


class NormRopeTarget:
    """One layer's weights, tables, caches and, where it lasts, counters.

    Parameters
    ----------
    device : Device
    plan : NormRopeLayerPlan
    layer : NormRopeLayer
    lasting : bool
        Whether it is called more than once, and counts.
    """

    def __init__(
        self, device: Device, plan: NormRopeLayerPlan, layer: NormRopeLayer, *, lasting: bool
    ) -> None:
        self.device, self.plan, self.layer = device, plan, layer
        self.counters_ptr = self.errors_ptr = 0
        #: Launches by plan; a target that does not last has none of its own.
        self.prepared: Known | None = None
        if not lasting:
            return
        self.prepared = Known()
        self._counters = device.allocate(_PLACES * len(COUNTERS) * 8)
        self._errors = device.allocate(
            _PLACES * len(ERROR_KINDS) * params.ERROR_RECORD.dtype.itemsize
        )
        self.counters_ptr, self.errors_ptr = self._counters.ptr, self._errors.ptr
        for memory in (self._counters, self._errors):
            device.upload(memory, np.zeros(memory.nbytes, np.uint8), self.stream())

    def arrays(self) -> list[ArrayRef]:
        """Return what a kernel reads or writes through this target."""
        return [ref for ref in self._parts() if isinstance(ref, ArrayRef)]

    def _parts(self) -> tuple[ArrayRef | float | None, ...]:
        layer = self.layer
        return (
            layer.q_weight,
            layer.kv_weight,
            layer.k_table,
            layer.index_weight,
            layer.index_bias,
            layer.index_table,
            layer.mla_cache,
            layer.mla_scale,
            layer.indexer_cache,
        )

    def array_addresses(self) -> tuple[int, ...]:
        """Return where the layer's arrays lie, 0 for what is none."""
        return tuple(part.ptr if isinstance(part, ArrayRef) else 0 for part in self._parts())

    def owner(self, *outputs: ArrayRef) -> ArrayRef:
        """Return the array on whose framework's current stream a step runs.

        That is a cache, else an output, of a framework that has current streams.
        """
        given = (self.layer.mla_cache, self.layer.indexer_cache, *outputs, self.layer.q_weight)
        present = [ref for ref in given if ref is not None]
        return next((ref for ref in present if ref.framework in ("cupy", "torch")), present[0])

    def stream(self) -> int:
        """Return the current stream on which the counters are read and written."""
        return self.device.current_stream(self.owner().framework)

    def scale_number(self) -> float | None:
        """Return the scale of the MLA cache where it is no array."""
        scale = self.layer.mla_scale
        return None if isinstance(scale, ArrayRef) else scale

    def scale_value(self) -> float | None:
        """Return the scale of the MLA cache as it is now, None where it has none."""
        scale = self.layer.mla_scale
        if not isinstance(scale, ArrayRef):
            return scale
        raw = self.device.download(Memory(scale.ptr, 4, scale), self.stream())
        return float(raw.view(np.float32)[0])

    def addresses(self) -> tuple[int, ...]:
        """Return where the layer's arrays lie, as the kernel wants it."""
        return _kernel_addresses(self.plan)(self.array_addresses())

    def counts(self) -> dict[str, Array]:
        """Return a copy of the counters, int64 [2] each."""
        raw = self.device.download(self._counters, self.stream()).view(np.int64)
        table = raw.reshape(_PLACES, len(COUNTERS))
        return {name: table[:, COUNTERS.index(name)].copy() for name in COUNTERS_ALWAYS}

    def take_errors(self) -> list[ErrorRecord]:
        """Return what was recorded since the last call, and arm the records again."""
        raw = self.device.download(self._errors, self.stream()).view(params.ERROR_RECORD.dtype)
        found = [
            ErrorRecord(kind, int(record["layer"]), int(record["token"]), int(record["slot"]))
            for kind, record in zip(ERROR_KINDS * _PLACES, raw, strict=True)
            if record["claimed"]
        ]
        if found:
            empty = np.zeros(self._errors.nbytes, np.uint8)
            self.device.upload(self._errors, empty, self.stream())
        return found


def address(ref: ArrayRef | None) -> int:
    """Return where an array lies, 0 for none."""
    return 0 if ref is None else ref.ptr


def step_addresses(inputs: NormRopeInputs, q_c_out: ArrayRef) -> tuple[int, ...]:
    """Return where a step's arrays lie, in the order of the kernel's arguments."""
    return (
        inputs.positions.ptr,
        inputs.q_c.ptr,
        inputs.kv_c.ptr,
        address(inputs.k_pe),
        address(inputs.index_k),
        address(inputs.topk),
        address(inputs.slots),
        address(inputs.indexer_slots),
        q_c_out.ptr,
        address(inputs.kv_c_out),
        address(inputs.k_pe_out),
    )


def step_arrays(inputs: NormRopeInputs) -> list[ArrayRef]:
    """Return a step's arrays, but for the normed query."""
    parts = (
        inputs.positions,
        inputs.q_c,
        inputs.kv_c,
        inputs.k_pe,
        inputs.index_k,
        inputs.topk,
        inputs.slots,
        inputs.indexer_slots,
        inputs.kv_c_out,
        inputs.k_pe_out,
    )
    return [ref for ref in parts if ref is not None]


def by_address(
    plan: NormRopePlan,
    prepared: PreparedLaunch,
    current_stream: Callable[[], int],
    new_output: Callable[[], ArrayRef],
    layer: tuple[int, ...] | None,
) -> Callable[..., Any]:
    """Return the launch by the addresses of a step, then the layer's unless these are given.

    It returns the normed query as a new array where no address is given for it.
    """
    kernel_addresses = _kernel_addresses(plan.layer)
    last = () if layer is None else kernel_addresses(layer)
    launch = prepared.by_address(current_stream, last)
    # What a layer has no use for may be given all the same: its address becomes 0.
    rope, key, indices, mla, indexer = (
        0 if part is None else -1
        for part in (plan.k_pe, plan.index_k, plan.topk, plan.slots, plan.indexer_slots)
    )

    def run(
        positions: int,
        q_c: int,
        kv_c: int,
        k_pe: int,
        index_k: int,
        topk: int,
        slots: int,
        index_slots: int,
        q_c_out: int,
        kv_c_out: int,
        k_pe_out: int,
        *layer: int,
    ) -> Any:
        made = None
        if not q_c_out:
            ref = new_output()
            q_c_out, made = ref.ptr, ref.owner
        launch(
            positions,
            q_c,
            kv_c,
            k_pe & rope,
            index_k & key,
            topk & indices,
            slots & mla,
            (index_slots or slots) & indexer,
            q_c_out,
            kv_c_out,
            k_pe_out,
            *layer,
        )
        return made

    if layer is not None:
        return run
    return lambda *given: run(*given[:_STEP], *kernel_addresses(given[_STEP:]))


def _kernel_addresses(plan: NormRopeLayerPlan) -> Callable[[Sequence[int]], tuple[int, ...]]:
    """Return what turns a layer's addresses into the kernel's: of each plane of its last cache."""
    cache = plan.indexer_cache
    if cache is None:
        return lambda layer: (*layer[:-1], 0, 0)
    codes, scales = plane_starts(cache)
    return lambda layer: (*layer[:-1], layer[-1] + codes, layer[-1] + scales)


def specialisation(plan: NormRopeLayerPlan, dtype: str) -> tuple[Specialisation, CacheLayout]:
    """Return the kernel for a layer and an input dtype, and the layout that it is built for."""
    layout = get_layout(dtype) if plan.mla_cache is None else plan.mla_cache.layout
    return registry.find("norm_rope", layout.name, dtype), layout


def prepare(device: Device, plan: NormRopePlan, target: NormRopeTarget) -> PreparedLaunch | None:
    """Prepare a step; None where there is nothing to do."""
    if plan.tokens == 0:
        return None
    arguments = _arguments(plan, target)
    parts = _parts(plan)
    # A token a warp, which the kernel counts on: keeping place for a second one takes registers.
    shape = warp_rows_shape(
        plan.operation,
        layers=len(parts),
        tokens=plan.tokens,
        sm_count=device.sm_count,
        most_turns=1,
    )
    arguments["parts"] = params.divisor(len(parts))
    arguments["part_kinds"] = sum(part << 8 * place for place, part in enumerate(parts))
    arguments["stream_stores"] = _written_bytes(plan) > device.l2_bytes
    special, layout = specialisation(plan.layer, plan.input_dtype.name)
    function = load(device, special, layout)
    return PreparedLaunch(device, function, shape, arguments, _ADDRESSES)


def _parts(plan: NormRopePlan) -> list[int]:
    """Return what thread blocks have to do."""
    parts = [params_fused.QUERY_PART]
    if any(part is not None for part in (plan.slots, plan.kv_c_out, plan.k_pe_out)):
        parts.append(params_fused.KEY_PART)
    if plan.indexer_slots is not None:
        parts.append(params_fused.INDEX_PART)
    if plan.topk is not None:
        parts.append(params_fused.TOPK_PART)
    return parts


def _row_bytes(operand: Operand | None) -> int:
    return 0 if operand is None else operand.width * operand.dtype.itemsize


def _written_bytes(plan: NormRopePlan) -> int:
    row = _row_bytes(plan.q_c)
    row += sum(_row_bytes(part) for part in (plan.topk, plan.kv_c_out, plan.k_pe_out))
    for slots, cache in (
        (plan.slots, plan.layer.mla_cache),
        (plan.indexer_slots, plan.layer.indexer_cache),
    ):
        if slots is not None and cache is not None:
            row += cache.layout.row_bytes
    return row * plan.tokens


def _stride(operand: Operand | None) -> int:
    return 0 if operand is None else operand.strides[0]


def _arguments(plan: NormRopePlan, target: NormRopeTarget) -> Array:
    """Fill in all but addresses and grid."""
    layer = plan.layer
    arguments = params_fused.NORM_ROPE_PARAMS.zeros()
    arguments["counters"] = target.counters_ptr
    arguments["errors"] = target.errors_ptr
    for name in ("q_c", "kv_c", "k_pe", "index_k", "topk", "q_c_out", "kv_c_out", "k_pe_out"):
        arguments[f"{name}_stride"] = _stride(getattr(plan, name))
    if plan.q_c_out is None:
        arguments["q_c_out_stride"] = _row_bytes(plan.q_c)
    key = arguments["key"]
    key["weight_type"] = number_type(layer.kv_weight)
    key["lora_rank"] = layer.kv_weight.width
    key["eps"] = layer.kv_eps
    key["staged"] = layer.rounding == "staged"
    key["rope"] = rope_table(layer.k_table, is_neox=False)
    arguments["index_rope"] = rope_table(layer.index_table, is_neox=layer.index_is_neox)
    if layer.mla_cache is not None:
        arguments["mla"] = layer_entry(0, layer.mla_cache, target.scale_number(), 0)
    if layer.indexer_cache is not None:
        arguments["index"] = index_cache(layer.indexer_cache)
    arguments["tokens"] = plan.tokens
    arguments["position_bytes"] = plan.positions.dtype.itemsize
    for name, slots in (("slot_bytes", plan.slots), ("index_slot_bytes", plan.indexer_slots)):
        if slots is not None:
            arguments[name] = slots.dtype.itemsize
    arguments["q_width"] = plan.q_c.width
    arguments["q_weight_type"] = number_type(layer.q_weight)
    arguments["q_eps"] = layer.q_eps
    if layer.index_weight is not None and layer.index_bias is not None:
        arguments["index_weight_type"] = number_type(layer.index_weight)
        arguments["index_bias_type"] = number_type(layer.index_bias)
        arguments["index_eps"] = layer.index_eps
    arguments["topk_bytes"] = _row_bytes(plan.topk)
    return arguments
