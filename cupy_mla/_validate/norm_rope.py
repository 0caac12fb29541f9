"""fused_norm_rope: a layer's weights, tables and caches, and a step's arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cupy_mla import dtypes
from cupy_mla._arrays import CPU, ArrayRef
from cupy_mla._plan import CachePlan, Scale
from cupy_mla._plan_fused import (
    NormRopeInputs,
    NormRopeLayer,
    NormRopeLayerPlan,
    NormRopePlan,
    Operand,
)
from cupy_mla.errors import check_flag, reject_value
from cupy_mla.layouts import FIXED_SIZES, INDEXER_LAYOUT, CacheLayout

from .caches import cache
from .checks import array, check_outputs, same_device, shape_text
from .insert import storable
from .operands import (
    Place,
    described,
    destination,
    indices,
    number,
    operand,
    rounding,
    same_dtype,
    table,
)
from .scales import layer_scale

_OWNER = "q_rms_norm_w"
#: Elements of a row: kernels count its bytes, as float32 or int64, in 32 bits.
_MOST_ELEMENTS = 2**28 - 1


@dataclass(frozen=True)
class LayerArguments:
    """What `fused_norm_rope` takes for a layer, unchecked and under the caller's names."""

    q_rms_norm_w: Any
    q_rms_eps: Any
    kv_rms_norm_w: Any
    kv_rms_eps: Any
    k_rope_cos_sin_cache: Any
    index_k_layer_norm_w: Any
    index_k_layer_norm_bias: Any
    index_k_layer_norm_eps: Any
    index_k_rope_cos_sin_cache: Any
    indexer_k_cache: Any
    mla_kv_cache: Any
    mla_kv_cache_dtype: str | CacheLayout
    mla_k_scale: Any
    has_indexer: Any
    index_rope_interleave: Any
    scale_format: str
    rounding: str


@dataclass(frozen=True)
class StepArguments:
    """What `fused_norm_rope` takes for a step, unchecked and under the caller's names."""

    positions: Any
    q_c: Any
    kv_c: Any
    k_pe: Any
    index_k: Any
    topk_indices_buffer: Any
    slot_mapping: Any
    indexer_slot_mapping: Any
    q_c_out: Any
    kv_c_out: Any
    k_pe_out: Any


def norm_rope_layer(
    operation: str, given: LayerArguments, *, live: bool
) -> tuple[NormRopeLayerPlan, NormRopeLayer]:
    """Validate a layer.

    Parameters
    ----------
    operation : str
        For messages.
    given : LayerArguments
    live : bool
        Whether the MLA cache's scale is kept as a writer keeps it, or read by one call.
    """
    has_indexer = check_flag(operation, "has_indexer", given.has_indexer)
    interleave = check_flag(operation, "index_rope_interleave", given.index_rope_interleave)
    q_weight = array(operation, "q_rms_norm_w", given.q_rms_norm_w)
    place = (q_weight.device or CPU, _OWNER)
    q_weight = operand(operation, "q_rms_norm_w", q_weight, ("Q",), place)
    kv_weight = operand(operation, "kv_rms_norm_w", given.kv_rms_norm_w, ("R",), place)
    for argument, ref in (("q_rms_norm_w", q_weight), ("kv_rms_norm_w", kv_weight)):
        if not 1 <= ref.shape[0] <= _MOST_ELEMENTS:
            wanted = f"have 1 to {_MOST_ELEMENTS} elements"
            reject_value(operation, argument, wanted, shape_text(ref.shape))
    k_table = None
    if given.k_rope_cos_sin_cache is not None:
        argument = "k_rope_cos_sin_cache"
        k_table = table(operation, argument, given.k_rope_cos_sin_cache, None, place)
    rope = 0 if k_table is None else k_table.shape[1]
    mla, mla_plan, scale = _mla_cache(operation, given, (kv_weight.shape[0], rope), place, live)
    indexer, indexer_plan = _indexer_cache(operation, given, place)
    weight, bias, index_table, index_eps = _index_norm(operation, given, indexer_plan, place)
    plan = NormRopeLayerPlan(
        operation=operation,
        device=place[0],
        q_weight=Operand.of(q_weight),
        kv_weight=Operand.of(kv_weight),
        q_eps=number(operation, "q_rms_eps", given.q_rms_eps, least=0.0),
        kv_eps=number(operation, "kv_rms_eps", given.kv_rms_eps, least=0.0),
        index_eps=index_eps,
        k_table=described(k_table),
        index_weight=described(weight),
        index_bias=described(bias),
        index_table=described(index_table),
        index_is_neox=not interleave,
        mla_cache=mla_plan,
        indexer_cache=indexer_plan,
        has_indexer=has_indexer,
        rounding=rounding(operation, given.rounding),
    )
    layer = NormRopeLayer(
        q_weight=q_weight,
        kv_weight=kv_weight,
        k_table=k_table,
        index_weight=weight,
        index_bias=bias,
        index_table=index_table,
        mla_cache=mla,
        mla_scale=scale,
        indexer_cache=indexer,
    )
    check_outputs(operation, _cache_names(layer), _layer_names(layer))
    return plan, layer


def _mla_cache(
    operation: str, given: LayerArguments, sizes: tuple[int, int], place: Place, live: bool
) -> tuple[ArrayRef | None, CachePlan | None, Scale]:
    if given.mla_kv_cache is None:
        return None, None, None
    argument = "mla_kv_cache"
    _check_rotary_width(operation, given.mla_kv_cache_dtype, sizes)
    rank, rope = sizes
    table_text = f"has rows of {rope}" if rope else "is None"
    ref, plan = cache(
        operation,
        argument,
        given.mla_kv_cache,
        given.mla_kv_cache_dtype,
        sizes,
        given.scale_format,
        name_argument="mla_kv_cache_dtype",
        sizes_text=f"kv_rms_norm_w has {rank}, k_rope_cos_sin_cache {table_text}",
    )
    same_device(operation, argument, ref, *place)
    if not plan.layout.needs_scale:
        return ref, plan, None
    if given.mla_k_scale is None:
        reject_value(operation, "mla_k_scale", f"be the layer's scale for {plan.layout.name}", None)
    scale = layer_scale(
        operation, "mla_k_scale", given.mla_k_scale, place[0], owner=argument, live=live
    )
    return ref, plan, scale


def _check_rotary_width(operation: str, kv_cache_dtype: object, sizes: tuple[int, int]) -> None:
    """Refuse a table of another width than the rotary part of a layout that says its own."""
    own = None
    if isinstance(kv_cache_dtype, CacheLayout):
        own = (kv_cache_dtype.kv_lora_rank, kv_cache_dtype.rope_dim)
    elif isinstance(kv_cache_dtype, str):
        own = FIXED_SIZES.get(kv_cache_dtype)
    if own is not None and own[0] == sizes[0] and own[1] != sizes[1]:
        reject_value(
            operation,
            "k_rope_cos_sin_cache",
            (f"have rows of {own[1]} elements" if own[1] else "be None")
            + f" (the rope_dim of mla_kv_cache_dtype is {own[1]})",
            f"rows of {sizes[1]}" if sizes[1] else None,
        )


def _indexer_cache(
    operation: str, given: LayerArguments, place: Place
) -> tuple[ArrayRef | None, CachePlan | None]:
    if given.indexer_k_cache is None or not given.has_indexer:
        return None, None
    argument = "indexer_k_cache"
    return indexer_cache(operation, argument, given.indexer_k_cache, "ue8m0", place)


def indexer_cache(
    operation: str, argument: str, obj: Any, scale_format: str, place: Place | None
) -> tuple[ArrayRef, CachePlan]:
    """Validate an indexer cache ``[num_blocks, block_size, 132]`` that is written."""
    ref, plan = cache(operation, argument, obj, INDEXER_LAYOUT, None, scale_format, planar=True)
    if place is not None:
        same_device(operation, argument, ref, *place)
    return ref, plan


def _index_norm(
    operation: str, given: LayerArguments, indexer_plan: CachePlan | None, place: Place
) -> tuple[ArrayRef | None, ArrayRef | None, ArrayRef | None, float]:
    """Validate what makes an indexer row; without an indexer cache nothing of it is looked at."""
    if indexer_plan is None:
        return None, None, None, 0.0
    width = indexer_plan.layout.kv_lora_rank
    refs = []
    for argument, obj in (
        ("index_k_layer_norm_w", given.index_k_layer_norm_w),
        ("index_k_layer_norm_bias", given.index_k_layer_norm_bias),
    ):
        refs.append(operand(operation, argument, obj, (width,), place))
    argument = "index_k_rope_cos_sin_cache"
    rotary = table(operation, argument, given.index_k_rope_cos_sin_cache, None, place)
    if rotary.shape[1] > width:
        reject_value(
            operation, argument, f"have at most {width} elements a row", shape_text(rotary.shape)
        )
    eps = number(operation, "index_k_layer_norm_eps", given.index_k_layer_norm_eps, least=0.0)
    return refs[0], refs[1], rotary, eps


def norm_rope_step(
    layer: NormRopeLayerPlan, lasting: NormRopeLayer, given: StepArguments
) -> tuple[NormRopePlan, NormRopeInputs]:
    """Validate a step's arrays against a layer, of which `lasting` are the arrays."""
    operation, place = layer.operation, (layer.device, _OWNER)
    slots, tokens = None, None
    if given.slot_mapping is not None:
        slots = indices(operation, "slot_mapping", given.slot_mapping, place)
        tokens = slots.shape[0]
    positions = indices(operation, "positions", given.positions, place, tokens=tokens)
    if tokens is None:
        tokens = positions.shape[0]
    q_c = operand(operation, "q_c", given.q_c, ("T", layer.q_weight.width), place, tokens=tokens)
    kv_c, k_pe, index_k = _rows(layer, given, place, tokens, q_c)
    topk = None
    if layer.has_indexer and given.topk_indices_buffer is not None:
        topk = destination(
            operation,
            "topk_indices_buffer",
            given.topk_indices_buffer,
            ("T", "K"),
            place,
            tokens=tokens,
            allowed=dtypes.INDEX_DTYPES,
        )
        if topk.shape[1] > _MOST_ELEMENTS:
            reject_value(
                operation,
                "topk_indices_buffer",
                f"have at most {_MOST_ELEMENTS} columns",
                shape_text(topk.shape),
            )
    indexer_slots = None
    if layer.indexer_cache is not None:
        indexer_slots = slots
        if given.indexer_slot_mapping is not None:
            argument = "indexer_slot_mapping"
            indexer_slots = indices(
                operation, argument, given.indexer_slot_mapping, place, tokens=tokens
            )
    outs = _outs(layer, given, place, tokens, q_c)
    mla_slots = slots if layer.mla_cache is not None else None
    plan = NormRopePlan(
        layer=layer,
        tokens=tokens,
        input_dtype=q_c.dtype,
        positions=Operand.of(positions),
        q_c=Operand.of(q_c),
        kv_c=Operand.of(kv_c),
        k_pe=described(k_pe),
        index_k=described(index_k),
        topk=described(topk),
        slots=described(mla_slots),
        indexer_slots=described(indexer_slots),
        q_c_out=described(outs[0]),
        kv_c_out=described(outs[1]),
        k_pe_out=described(outs[2]),
    )
    if layer.mla_cache is not None:
        storable(plan, [layer.mla_cache.layout], "kv_c")
    inputs = NormRopeInputs(
        positions=positions,
        q_c=q_c,
        kv_c=kv_c,
        k_pe=k_pe,
        index_k=index_k,
        topk=topk,
        slots=mla_slots,
        indexer_slots=indexer_slots,
        q_c_out=outs[0],
        kv_c_out=outs[1],
        k_pe_out=outs[2],
    )
    _check_sharing(operation, inputs, lasting)
    return plan, inputs


def _check_sharing(operation: str, step: NormRopeInputs, layer: NormRopeLayer) -> None:
    """Refuse outputs that share memory with something else, but for inputs in place."""
    check_outputs(
        operation,
        [*_cache_names(layer), *_out_names(step)],
        [
            ("positions", step.positions),
            ("q_c", step.q_c),
            ("kv_c", step.kv_c),
            ("k_pe", step.k_pe),
            ("index_k", step.index_k),
            ("slot_mapping", step.slots),
            ("indexer_slot_mapping", step.indexer_slots),
        ],
        in_place=[("q_c_out", "q_c"), ("kv_c_out", "kv_c"), ("k_pe_out", "k_pe")],
    )
    check_outputs(operation, _out_names(step), _layer_names(layer))


def _out_names(step: NormRopeInputs) -> list[tuple[str, ArrayRef | None]]:
    return [
        ("q_c_out", step.q_c_out),
        ("kv_c_out", step.kv_c_out),
        ("k_pe_out", step.k_pe_out),
        ("topk_indices_buffer", step.topk),
    ]


def _cache_names(layer: NormRopeLayer) -> list[tuple[str, ArrayRef | None]]:
    return [("mla_kv_cache", layer.mla_cache), ("indexer_k_cache", layer.indexer_cache)]


def _layer_names(layer: NormRopeLayer) -> list[tuple[str, object]]:
    return [
        ("q_rms_norm_w", layer.q_weight),
        ("kv_rms_norm_w", layer.kv_weight),
        ("k_rope_cos_sin_cache", layer.k_table),
        ("index_k_layer_norm_w", layer.index_weight),
        ("index_k_layer_norm_bias", layer.index_bias),
        ("index_k_rope_cos_sin_cache", layer.index_table),
        ("mla_k_scale", layer.mla_scale),
    ]


def _rows(
    layer: NormRopeLayerPlan, given: StepArguments, place: Place, tokens: int, q_c: ArrayRef
) -> tuple[ArrayRef, ArrayRef | None, ArrayRef | None]:
    """Validate kv_c, k_pe and index_k."""

    def rows(argument: str, obj: Any, width: int) -> ArrayRef:
        ref = operand(layer.operation, argument, obj, ("T", width), place, tokens=tokens)
        same_dtype(layer.operation, argument, ref, q_c.dtype, "q_c")
        return ref

    kv_c = rows("kv_c", given.kv_c, layer.kv_weight.width)
    k_pe, index_k = None, None
    if layer.k_table is not None or given.k_pe is not None:
        rope = 0 if layer.k_table is None else layer.k_table.width
        ref = array(layer.operation, "k_pe", given.k_pe)
        if ref.ndim == 2 and ref.shape[1] != rope:
            reject_value(
                layer.operation,
                "k_pe",
                f"have shape [T, {rope}] (k_rope_cos_sin_cache "
                + (f"has rows of {rope})" if rope else "is None)"),
                shape_text(ref.shape),
            )
        ref = rows("k_pe", ref, rope)
        k_pe = ref if rope else None
    if layer.index_weight is not None:
        index_k = rows("index_k", given.index_k, layer.index_weight.width)
    return kv_c, k_pe, index_k


def _outs(
    layer: NormRopeLayerPlan, given: StepArguments, place: Place, tokens: int, q_c: ArrayRef
) -> tuple[ArrayRef | None, ArrayRef | None, ArrayRef | None]:
    """Validate q_c_out, kv_c_out and k_pe_out."""
    rope = 0 if layer.k_table is None else layer.k_table.width
    outs: list[ArrayRef | None] = []
    for argument, obj, width in (
        ("q_c_out", given.q_c_out, layer.q_weight.width),
        ("kv_c_out", given.kv_c_out, layer.kv_weight.width),
        ("k_pe_out", given.k_pe_out, rope),
    ):
        if obj is None:
            outs.append(None)
            continue
        outs.append(
            destination(
                layer.operation,
                argument,
                obj,
                ("T", width),
                place,
                tokens=tokens,
                allowed=(q_c.dtype,),
            )
        )
    return outs[0], outs[1], outs[2]
