"""Checks of single arguments, each with the one message that its failure has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cupy_mla import dtypes
from cupy_mla._arrays import ArrayRef, DeviceId, UnusableArray, describe, memory_view
from cupy_mla.dtypes import DType
from cupy_mla.errors import reject_type, reject_value


def array(operation: str, argument: str, obj: Any) -> ArrayRef:
    """Return `obj` as an array, or raise a TypeError that names what it is instead."""
    try:
        ref = describe(obj)
    except UnusableArray as unusable:
        expected, got = unusable.args
        reject_type(operation, argument, expected, got)
    if ref is None:
        reject_type(
            operation,
            argument,
            "be an array (numpy, cupy, torch, jax or anything with DLPack)",
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
            "be contiguous: it must be contiguous in device memory",
            f"a stride of {ref.strides[0]} bytes",
        )


def check_dtype(
    operation: str, argument: str, ref: ArrayRef, allowed: Sequence[DType], why: str = ""
) -> None:
    if ref.dtype not in allowed:
        names = " or ".join(dtype.name for dtype in allowed)
        reject_type(operation, argument, f"be {names}{why}", ref.dtype.name)


def same_device(operation: str, argument: str, ref: ArrayRef, device: DeviceId, owner: str) -> None:
    """Refuse an array that is not where `owner` is; both names are in the message."""
    if ref.device is not None and ref.device != device:
        reject_value(
            operation,
            argument,
            f"be on the same CUDA device as {owner}, or like it in host memory ({device})",
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


def _byte_range(ref: ArrayRef) -> tuple[int, int]:
    """Return the first byte of an array and the one behind its last."""
    reach = [
        step * (extent - 1) for step, extent in zip(ref.strides, ref.shape, strict=True) if extent
    ]
    low = ref.ptr + sum(step for step in reach if step < 0)
    return low, ref.ptr + sum(step for step in reach if step > 0) + ref.dtype.itemsize


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
    (low, high), (other_low, other_high) = _byte_range(ref), _byte_range(other)
    if high <= other_low or other_high <= low:
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


def check_indices(
    operation: str, argument: str, ref: ArrayRef, device: DeviceId, owner: str
) -> None:
    check_dtype(operation, argument, ref, dtypes.INDEX_DTYPES)
    same_device(operation, argument, ref, device, owner)
    check_unit_stride(operation, argument, ref)
    check_aligned(operation, argument, ref)


def integer(operation: str, argument: str, value: Any, least: int | None = None) -> int:
    """Return `value` as an int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        reject_type(operation, argument, "be an integer", type(value).__name__)
    if least is not None and value < least:
        reject_value(operation, argument, f"be at least {least}", value)
    return int(value)


def host_stream(operation: str, stream: object) -> None:
    """Refuse a stream for host arrays: nothing of theirs runs on one."""
    if stream is not None:
        reject_value(operation, "stream", "be None for arrays in host memory", repr(stream))
