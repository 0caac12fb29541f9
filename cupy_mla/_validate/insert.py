"""A step's arrays: rows to store, and the slots they go to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from cupy_mla import dtypes
from cupy_mla._arrays import ArrayRef, DeviceId
from cupy_mla._plan import InsertInputs, InsertPlan
from cupy_mla.dtypes import DType
from cupy_mla.errors import reject_type, reject_value
from cupy_mla.layouts import CacheLayout

from .caches import Written
from .checks import (
    array,
    check_aligned,
    check_dtype,
    check_indices,
    check_unit_stride,
    same_device,
    shape_text,
)


def row_sizes(operation: str, kv_c: ArrayRef, k_pe: ArrayRef | None, shape: str) -> tuple[int, int]:
    """Return kv_lora_rank and rope_dim of rows, whose layout is found by them.

    Parameters
    ----------
    operation : str
        For messages.
    kv_c, k_pe : ArrayRef
    shape : str
        The shape they must have, with ``{}`` for the last axis.
    """
    axes = shape.count(",") + 1
    for argument, symbol, ref in (("kv_c", "R", kv_c), ("k_pe", "P", k_pe)):
        if ref is not None and (ref.ndim != axes or (ref is kv_c and ref.shape[-1] < 1)):
            reject_value(
                operation,
                argument,
                f"have shape {shape.format(symbol)}",
                shape_text(ref.shape),
            )
    check_dtype(operation, "kv_c", kv_c, dtypes.INPUT_DTYPES)
    return kv_c.shape[-1], 0 if k_pe is None else k_pe.shape[-1]


def insert_inputs(
    operation: str,
    kv_c: Any,
    k_pe: Any,
    slot_mapping: Any,
    *,
    num_layers: int | None,
    sizes: tuple[int, int] | None,
    device: DeviceId,
    owner: str,
    caches: Written | None,
) -> tuple[InsertPlan, InsertInputs]:
    """Validate a step's arrays.

    Parameters
    ----------
    operation : str
        For messages.
    kv_c, k_pe : array
        ``[L, T', R]`` and ``[L, T', P]``; without the layer axis where `num_layers` is None.
    slot_mapping : array or list of arrays
    num_layers : int or None
        None for the single-layer operation.
    sizes : (int, int) or None
        kv_lora_rank and rope_dim of the caches; None takes them from kv_c and k_pe.
    device : DeviceId
        The caches' device.
    owner : str
        Name of the caches' argument, for messages.
    caches : Written or None
        None where only addresses are known.
    """
    layers = 1 if num_layers is None else num_layers
    slots, slot_dtype, tokens, slot_strides = slots_of(
        operation, slot_mapping, num_layers, device, owner
    )
    rank = None if sizes is None else sizes[0]
    rope = None if sizes is None else sizes[1]
    kv_ref = array(operation, "kv_c", kv_c)
    _check_rows(operation, "kv_c", kv_ref, num_layers, tokens, rank, device, owner)
    check_dtype(operation, "kv_c", kv_ref, dtypes.INPUT_DTYPES)
    pe_ref = None
    if k_pe is None:
        if rope:
            reject_value(operation, "k_pe", f"be an array (rope_dim is {rope})", None)
    else:
        pe_ref = array(operation, "k_pe", k_pe)
        _check_rows(operation, "k_pe", pe_ref, num_layers, tokens, rope, device, owner)
        if pe_ref.dtype != kv_ref.dtype:
            reject_type(
                operation,
                "k_pe",
                f"have the dtype of kv_c ({kv_ref.dtype.name})",
                dtypes.text(pe_ref.dtype),
            )
        if pe_ref.shape[-1] == 0:
            pe_ref = None
    if caches is not None:
        caches.check_apart(operation, ("kv_c", kv_ref), ("k_pe", pe_ref), *slot_names(slots))
    plan = InsertPlan(
        operation,
        device,
        layers,
        tokens,
        kv_ref.shape[-1],
        pe_ref.shape[-1] if pe_ref is not None else 0,
        kv_ref.dtype,
        _layer_token_strides(kv_ref),
        _layer_token_strides(pe_ref) if pe_ref is not None else (0, 0),
        slot_strides,
        slot_dtype,
        isinstance(slots, tuple),
    )
    return plan, InsertInputs(kv_ref, pe_ref, slots)


def slot_names(slots: ArrayRef | tuple[ArrayRef | None, ...]) -> list[tuple[str, ArrayRef | None]]:
    """Return the arrays of slots with their name, for messages."""
    several = slots if isinstance(slots, tuple) else (slots,)
    return [("slot_mapping", ref) for ref in several]


def _layer_token_strides(ref: ArrayRef) -> tuple[int, int]:
    return (ref.strides[0] if ref.ndim == 3 else 0, ref.strides[-2])


def _check_rows(
    operation: str,
    argument: str,
    ref: ArrayRef,
    num_layers: int | None,
    tokens: int,
    width: int | None,
    device: DeviceId,
    owner: str,
) -> None:
    """Check kv_c or k_pe: ``[L, T', width]`` with T' >= tokens."""
    leading: tuple[object, ...] = () if num_layers is None else (num_layers,)
    symbol = "R" if argument == "kv_c" else "P"
    expected = shape_text((*leading, "T", symbol if width is None else width))
    if (
        ref.ndim != len(leading) + 2
        or (num_layers is not None and ref.shape[0] != num_layers)
        or (width is not None and ref.shape[-1] != width)
        or (argument == "kv_c" and ref.shape[-1] < 1)
    ):
        reject_value(operation, argument, f"have shape {expected}", shape_text(ref.shape))
    if ref.shape[-2] < tokens:
        reject_value(
            operation,
            argument,
            f"have a row for each of the {tokens} slots ({expected})",
            shape_text(ref.shape),
        )
    same_device(operation, argument, ref, device, owner)
    check_unit_stride(operation, argument, ref)
    check_aligned(operation, argument, ref)


def slots_of(
    operation: str,
    slot_mapping: Any,
    num_layers: int | None,
    device: DeviceId,
    owner: str,
) -> tuple[ArrayRef | tuple[ArrayRef | None, ...], DType, int, tuple[int, int]]:
    """Return slots, their dtype, T, and the strides of a layer and a token."""
    if num_layers is not None and isinstance(slot_mapping, (list, tuple)):
        return _slot_list(operation, slot_mapping, num_layers, device, owner)
    ref = array(operation, "slot_mapping", slot_mapping)
    shapes = "[T]" if num_layers is None else f"[T] or [{num_layers}, T]"
    if ref.ndim != 1 and (num_layers is None or ref.ndim != 2 or ref.shape[0] != num_layers):
        reject_value(operation, "slot_mapping", f"have shape {shapes}", shape_text(ref.shape))
    check_indices(operation, "slot_mapping", ref, device, owner)
    layer_stride = ref.strides[0] if ref.ndim == 2 else 0
    return ref, ref.dtype, ref.shape[-1], (layer_stride, ref.strides[-1])


def _slot_list(
    operation: str,
    slot_mapping: Sequence[Any],
    num_layers: int,
    device: DeviceId,
    owner: str,
) -> tuple[tuple[ArrayRef | None, ...], DType, int, tuple[int, int]]:
    """Validate a list of slots: ``[T]`` a layer, None for a layer to be left out."""
    if len(slot_mapping) != num_layers:
        reject_value(
            operation,
            "slot_mapping",
            f"hold one array or None for each of the {num_layers} layers",
            len(slot_mapping),
        )
    refs: list[ArrayRef | None] = []
    first: ArrayRef | None = None
    for layer, obj in enumerate(slot_mapping):
        if obj is None:
            refs.append(None)
            continue
        argument = f"slot_mapping[{layer}]"
        ref = array(operation, argument, obj)
        if ref.ndim != 1:
            reject_value(operation, argument, "have shape [T]", shape_text(ref.shape))
        check_indices(operation, argument, ref, device, owner)
        if first is None:
            first = ref
        elif ref.shape != first.shape:
            reject_value(
                operation,
                argument,
                f"have as many slots as the other layers ({first.shape[0]})",
                ref.shape[0],
            )
        elif ref.dtype != first.dtype:
            reject_type(
                operation, argument, f"be {first.dtype.name} as the other layers are", ref.dtype
            )
        refs.append(ref)
    if first is None:
        return tuple(refs), dtypes.INT64, 0, (0, 8)
    return tuple(refs), first.dtype, first.shape[0], (0, first.dtype.itemsize)


class _Storing(Protocol):
    """A plan that stores rows."""

    @property
    def operation(self) -> str: ...
    @property
    def input_dtype(self) -> DType: ...


def storable(plan: _Storing, layouts: Sequence[CacheLayout], argument: str) -> None:
    """Refuse rows of a dtype that a layer's layout does not take."""
    for layer, layout in enumerate(layouts):
        if plan.input_dtype not in layout.input_dtypes:
            names = " or ".join(dtype.name for dtype in layout.input_dtypes)
            where = f" of layer {layer}" if len(layouts) > 1 else ""
            reject_type(
                plan.operation,
                argument,
                f"be {names} to be stored in the {layout.name} cache{where}",
                plan.input_dtype.name,
            )
