"""Checks of the fused operations' arrays and numbers, one message each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np

from cupy_mla import dtypes
from cupy_mla._arrays import ArrayRef, DeviceId
from cupy_mla._plan_fused import ROUNDINGS, Operand, Rounding
from cupy_mla.dtypes import DType
from cupy_mla.errors import reject_type, reject_value

from .checks import (
    array,
    check_aligned,
    check_dtype,
    check_unit_stride,
    overlapping_axis,
    same_device,
    shape_text,
)
from .scales import single_of

#: Where an array has to be, and whose device that is (for messages).
Place = tuple[DeviceId, str]


def number(operation: str, argument: str, value: Any, *, least: float | None = None) -> float:
    """Return a finite number as the float32 that kernels take; -0.0 as the 0.0 it is equal to.

    Calls and plans are known again by equality.
    """
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, Real):
        reject_type(operation, argument, "be a real number", type(value).__name__)
    single = single_of(value)
    if not math.isfinite(single) or (least is not None and single < least):
        wanted = "be finite" if least is None else f"be finite and at least {least:g}"
        reject_value(operation, argument, f"{wanted} (as float32)", value)
    return single + 0.0


def rounding(operation: str, value: object) -> Rounding:
    """Return where values are rounded, or raise for what is no such rule."""
    for known in ROUNDINGS:
        if isinstance(value, str) and value == known:
            return known
    reject_value(operation, "rounding", 'be "fused" or "staged"', repr(value))


def operand(
    operation: str,
    argument: str,
    obj: Any,
    shape: Sequence[str | int],
    place: Place,
    *,
    tokens: int | None = None,
    allowed: Sequence[DType] = dtypes.INPUT_DTYPES,
) -> ArrayRef:
    """Validate one array.

    Parameters
    ----------
    operation, argument : str
        For messages.
    obj : array
    shape : sequence of str or int
        Extents that must be so, and names of those that may be anything.
    place : (DeviceId, str)
    tokens : int or None
        How many rows the first axis must have at least.
    allowed : sequence of numpy.dtype
    """
    ref = array(operation, argument, obj)
    if ref.ndim != len(shape) or any(
        isinstance(wanted, int) and wanted != extent
        for wanted, extent in zip(shape, ref.shape, strict=True)
    ):
        reject_value(operation, argument, f"have shape {shape_text(shape)}", shape_text(ref.shape))
    if tokens is not None and ref.shape[0] < tokens:
        reject_value(
            operation,
            argument,
            f"have a row for each of the {tokens} tokens ({shape_text(shape)})",
            shape_text(ref.shape),
        )
    check_dtype(operation, argument, ref, allowed)
    same_device(operation, argument, ref, *place)
    check_unit_stride(operation, argument, ref)
    check_aligned(operation, argument, ref)
    return ref


def indices(
    operation: str, argument: str, obj: Any, place: Place, *, tokens: int | None = None
) -> ArrayRef:
    """Validate positions or slots: int32 or int64 ``[T]``."""
    shape = ("T",)
    return operand(
        operation, argument, obj, shape, place, tokens=tokens, allowed=dtypes.INDEX_DTYPES
    )


def same_dtype(operation: str, argument: str, ref: ArrayRef, dtype: DType, owner: str) -> None:
    """Require the dtype of another array."""
    if ref.dtype != dtype:
        reject_type(
            operation, argument, f"have the dtype of {owner} ({dtype.name})", dtypes.text(ref.dtype)
        )


def destination(
    operation: str,
    argument: str,
    obj: Any,
    shape: Sequence[str | int],
    place: Place,
    *,
    tokens: int,
    allowed: Sequence[DType],
) -> ArrayRef:
    """Validate one array that is written."""
    ref = operand(operation, argument, obj, shape, place, tokens=tokens, allowed=allowed)
    if not ref.writable:
        reject_value(operation, argument, "be writable", "a read-only array")
    axis = overlapping_axis(ref.shape, ref.strides, range(ref.ndim), ref.dtype.itemsize)
    if axis is not None and ref.size:
        reject_value(
            operation,
            argument,
            "have elements that do not overlap",
            f"a stride of {ref.strides[axis]} bytes along axis {axis}",
        )
    return ref


def table(operation: str, argument: str, obj: Any, width: int | None, place: Place) -> ArrayRef:
    """Validate a cos/sin table ``[positions, P]`` with an even P.

    Parameters
    ----------
    operation, argument : str
        For messages.
    obj : array
    width : int or None
        What P must be; None takes any even one.
    place : (DeviceId, str)
    """
    shape = ("positions", "P" if width is None else width)
    ref = operand(operation, argument, obj, shape, place)
    if ref.shape[1] % 2 or not ref.shape[1]:
        reject_value(
            operation,
            argument,
            "have rows of cos half and sin half, an even number of elements above 0",
            shape_text(ref.shape),
        )
    return ref


def described(ref: ArrayRef | None) -> Operand | None:
    """Describe an array that may be missing."""
    return None if ref is None else Operand.of(ref)
