"""Rows to be read back."""

from __future__ import annotations

from typing import Any

from cupy_mla import dtypes
from cupy_mla._arrays import ArrayRef
from cupy_mla._plan import CachePlan, ReadPlan
from cupy_mla.dtypes import DType
from cupy_mla.errors import reject_type, reject_value

from .checks import array, check_indices, shape_text


def out_dtype(operation: str, value: Any) -> DType:
    """Return the dtype that rows are to be read as."""
    found = dtypes.of(value)
    if found is None or found not in dtypes.INPUT_DTYPES:
        reject_type(operation, "out_dtype", "be bfloat16, float16 or float32", repr(value))
    return found


def read_slots(
    operation: str,
    cache_ref: ArrayRef,
    cache_plan: CachePlan,
    slots: Any,
    out: Any,
) -> tuple[ReadPlan, ArrayRef]:
    """Validate slots to be read back from a cache."""
    ref = array(operation, "slots", slots)
    if ref.ndim != 1:
        reject_value(operation, "slots", "have shape [n]", shape_text(ref.shape))
    device = cache_ref.device or ref.device
    if device is None:
        reject_value(operation, "kv_cache", "hold at least one block", "an empty array")
    check_indices(operation, "slots", ref, device, "kv_cache")
    plan = ReadPlan(
        operation,
        device,
        cache_plan,
        ref.shape[0],
        ref.strides[0],
        ref.dtype,
        out_dtype(operation, out),
    )
    return plan, ref
