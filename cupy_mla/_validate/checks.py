"""Checks of single arguments, each with the one message that its failure has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cupy_mla import dtypes
from cupy_mla._arrays import ArrayRef, DeviceId, UnusableArray, describe, memory_view
from cupy_mla.dtypes import DType
from cupy_mla.errors import reject_type, reject_value


def array(operation: str, argument: str, obj: Any, expected: str = "an array") -> ArrayRef:
    """Return `obj` as an array, or raise a TypeError that names what it is instead.

    Parameters
    ----------
    operation, argument : str
        For messages.
    obj : array
    expected : str
        What the argument may be, for messages; ends with an array.
    """
    try:
        ref = describe(obj)
    except UnusableArray as unusable:
        usable, got = unusable.args
        reject_type(operation, argument, usable, got)
    if ref is None:
        reject_type(
            operation,
            argument,
            f"be {expected} (numpy, cupy, torch, jax or anything with DLPack)",
            type(obj).__name__,
        )
    return ref


def shape_text(shape: Sequence[object]) -> str:
    return "[" + ", ".join(str(extent) for extent in shape) + "]"


def check_unit_stride(operation: str, argument: str, ref: ArrayRef) -> None:
    """Require neighbours along the last axis, which kernels read in one piece."""
    if ref.ndim and ref.shape[-1] > 1 and ref.strides[-1] != ref.dtype.itemsize and ref.size:
        step = ref.strides[-1] / ref.dtype.itemsize
        reject_value(operation, argument, "have stride 1 along its last axis", f"{step:g}")


def check_contiguous(operation: str, argument: str, ref: ArrayRef) -> None:
    """Require neighbours along the only axis."""
    if ref.ndim and ref.shape[0] > 1 and ref.strides[0] != ref.dtype.itemsize:
        reject_value(
            operation,
            argument,
            "be contiguous",
            f"a stride of {ref.strides[0]} bytes",
        )


def check_dtype(
    operation: str, argument: str, ref: ArrayRef, allowed: Sequence[DType], why: str = ""
) -> None:
    if ref.dtype not in allowed:
        names = " or ".join(dtype.name for dtype in allowed)
        order = "" if ref.dtype.isnative else ", in native byte order"
        reject_type(operation, argument, f"be {names}{why}{order}", dtypes.text(ref.dtype))


def same_device(operation: str, argument: str, ref: ArrayRef, device: DeviceId, owner: str) -> None:
    """Refuse an array that is not where `owner` is; both names are in the message."""
    if ref.device is not None and ref.device != device:
        reject_value(
            operation,
            argument,
            f"be on the same CUDA device as {owner} ({device}), or both in host memory",
            ref.device,
        )


def check_aligned(operation: str, argument: str, ref: ArrayRef) -> None:
    """Refuse pointers and strides that split elements: no kernel can read those."""
    size = ref.dtype.itemsize
    if ref.size and (
        ref.ptr % size
        or any(
            step % size for step, extent in zip(ref.strides, ref.shape, strict=True) if extent > 1
        )
    ):
        reject_value(
            operation,
            argument,
            f"have addresses and strides that are multiples of its {size}-byte elements",
            f"address {ref.ptr:#x}, strides {ref.strides} bytes",
        )


def overlapping_axis(
    shape: Sequence[int], strides: Sequence[int], axes: Sequence[int], span: int
) -> int | None:
    """Return an axis along which parts of `span` bytes may overlap, None where none can.

    Parts lie apart for certain where each stride reaches beyond everything that the smaller ones
    reach; that holds for slices of any one pool, whatever the order and direction of its axes.
    """
    longer = [axis for axis in axes if shape[axis] > 1]
    for axis in sorted(longer, key=lambda axis: abs(strides[axis])):
        step = abs(strides[axis])
        if step < span:
            return axis
        span += (shape[axis] - 1) * step
    return None


def byte_range(ref: ArrayRef) -> tuple[int, int]:
    """Return the first byte of an array and the one behind its last."""
    low = high = ref.ptr
    for step, extent in zip(ref.strides, ref.shape, strict=True):
        if extent > 1:
            reach = step * (extent - 1)
            low, high = (low, high + reach) if reach > 0 else (low + reach, high)
    return low, high + ref.dtype.itemsize


#: Work that is spent on telling whether interleaved arrays share a byte, as NumPy counts it.
_OVERLAP_WORK: Any = 10_000


def check_disjoint(
    operation: str, argument: str, ref: ArrayRef, other_argument: str, other: ArrayRef
) -> None:
    """Refuse two arrays that share memory, one of them being written.

    Arrays whose byte ranges do not meet are told apart at once. Those that interleave, as layers
    of one pool do, are solved for; where that takes too long they count as sharing.
    """
    if not ref.size or not other.size or ref.device != other.device:
        return
    (low, high), (other_low, other_high) = byte_range(ref), byte_range(other)
    if high <= other_low or other_high <= low or _slices_of_one(ref, other):
        return
    views = [
        memory_view(part.owner, part.ptr, part.shape, part.strides, part.dtype)
        for part in (ref, other)
    ]
    try:  # looks at no element, so device memory is as good
        shared = np.shares_memory(views[0], views[1], max_work=_OVERLAP_WORK)
    except np.exceptions.TooHardError:
        shared = True
    if shared:
        reject_value(
            operation,
            argument,
            f"not share memory with {other_argument}",
            f"bytes [{low:#x}, {high:#x}) and [{other_low:#x}, {other_high:#x})",
        )


def _slices_of_one(ref: ArrayRef, other: ArrayRef) -> bool:
    """Whether two arrays are for certain distinct slices of a larger one, one more axis apart."""
    if ref.shape != other.shape or ref.strides != other.strides or ref.dtype != other.dtype:
        return False
    shape, strides = (*ref.shape, 2), (*ref.strides, other.ptr - ref.ptr)
    return overlapping_axis(shape, strides, range(len(shape)), ref.dtype.itemsize) is None


def check_outputs(
    operation: str,
    outputs: Sequence[tuple[str, ArrayRef | None]],
    inputs: Sequence[tuple[str, object]],
    in_place: Sequence[tuple[str, str]] = (),
) -> None:
    """Refuse outputs that share memory with an input or with each other.

    Parameters
    ----------
    operation : str
        For messages.
    outputs : sequence of (str, ArrayRef or None)
        Names for messages, and what is written; inputs are not compared with each other.
    inputs : sequence of (str, object)
        Anything but an ArrayRef counts as none.
    in_place : sequence of (str, str)
        Outputs and inputs that may be one and the same array.
    """
    present = [(name, ref) for name, ref in outputs if ref is not None]
    for number, (name, ref) in enumerate(present):
        for other_name, other in (*present[:number], *inputs):
            if not isinstance(other, ArrayRef):
                continue
            same = (ref.ptr, ref.strides, ref.dtype) == (other.ptr, other.strides, other.dtype)
            if not (same and (name, other_name) in in_place):
                check_disjoint(operation, name, ref, other_name, other)


def check_indices(
    operation: str, argument: str, ref: ArrayRef, device: DeviceId, owner: str
) -> None:
    check_dtype(operation, argument, ref, dtypes.INDEX_DTYPES)
    same_device(operation, argument, ref, device, owner)
    check_unit_stride(operation, argument, ref)
    check_aligned(operation, argument, ref)


def host_stream(operation: str, stream: object) -> None:
    """Refuse a stream for host arrays: nothing of theirs runs on one."""
    if stream is not None:
        reject_value(operation, "stream", "be None for arrays in host memory", repr(stream))
