"""GroupedCacheWriter.insert_context: one projection for all layers."""

from __future__ import annotations

from typing import Any

from cupy_mla._arrays import ArrayRef, DeviceId
from cupy_mla._plan_fused import ContextInputs, ContextPlan, Operand
from cupy_mla.errors import check_flag, reject_value

from .caches import Written
from .checks import array, shape_text
from .insert import slot_names, slots_of
from .operands import Place, described, indices, number, operand, rounding, table


def context(
    operation: str,
    kv: Any,
    positions: Any,
    slot_mapping: Any,
    norm_weight: Any,
    cos_sin_cache: Any,
    *,
    eps: Any,
    is_neox: Any,
    rounding_rule: str,
    num_layers: int,
    sizes: tuple[int, int],
    caches: Written,
    device: DeviceId,
) -> tuple[ContextPlan, ContextInputs]:
    """Validate a projection of all layers and what it is normed and rotated with.

    Parameters
    ----------
    operation : str
        For messages.
    kv, positions, slot_mapping, norm_weight, cos_sin_cache : array
    eps : float
    is_neox : bool
    rounding_rule : str
    num_layers : int
    sizes : (int, int)
        kv_lora_rank and rope_dim of the caches.
    caches : Written
        What is written.
    device : DeviceId
        The caches' device.
    """
    rank, rope = sizes
    place = (device, "kv_caches")
    slots, slot_dtype, tokens, slot_strides = slots_of(
        operation, slot_mapping, num_layers, device, "kv_caches"
    )
    source, kv_strides = _projection(operation, kv, num_layers, rank + rope, place, tokens)
    weight = operand(operation, "norm_weight", norm_weight, (num_layers, rank), place)
    rotary, where = None, None
    if rope:
        if cos_sin_cache is None:
            reject_value(operation, "cos_sin_cache", f"be a table (rope_dim is {rope})", None)
        rotary = table(operation, "cos_sin_cache", cos_sin_cache, rope, place)
        where = indices(operation, "positions", positions, place, tokens=tokens)
    elif cos_sin_cache is not None:
        reject_value(
            operation, "cos_sin_cache", "be None where rope_dim is 0", type(cos_sin_cache).__name__
        )
    plan = ContextPlan(
        operation=operation,
        device=device,
        num_layers=num_layers,
        tokens=tokens,
        kv_lora_rank=rank,
        rope_dim=rope,
        input_dtype=source.dtype,
        kv_strides=kv_strides,
        slot_strides=slot_strides,
        slot_dtype=slot_dtype,
        positions=described(where),
        weight=Operand.of(weight),
        table=described(rotary),
        eps=number(operation, "eps", eps, least=0.0),
        is_neox=check_flag(operation, "is_neox", is_neox),
        rounding=rounding(operation, rounding_rule),
    )
    inputs = ContextInputs(kv=source, positions=where, slots=slots, weight=weight, table=rotary)
    caches.check_apart(
        operation,
        ("kv", source),
        ("positions", where),
        ("norm_weight", weight),
        ("cos_sin_cache", rotary),
        *slot_names(slots),
    )
    return plan, inputs


def _projection(
    operation: str, kv: Any, num_layers: int, width: int, place: Place, tokens: int
) -> tuple[ArrayRef, tuple[int, int]]:
    """Return kv, and the strides of a layer and a token."""
    ref = array(operation, "kv", kv)
    shapes = (("T", num_layers, width), ("T", num_layers * width))
    if ref.ndim == 2 and ref.shape[1] == num_layers * width:
        ref = operand(operation, "kv", ref, shapes[1], place, tokens=tokens)
        return ref, (width * ref.dtype.itemsize, ref.strides[0])
    if ref.ndim != 3:
        expected = " or ".join(shape_text(shape) for shape in shapes)
        reject_value(operation, "kv", f"have shape {expected}", shape_text(ref.shape))
    ref = operand(operation, "kv", ref, shapes[0], place, tokens=tokens)
    return ref, (ref.strides[1], ref.strides[0])
