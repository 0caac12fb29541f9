"""What a writer is made of: one entry a layer."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from cupy_mla._arrays import CPU, ArrayRef, DeviceId, UnusableArray, describe
from cupy_mla._plan import CachePlan
from cupy_mla.errors import reject_type, reject_value
from cupy_mla.layouts import CacheLayout

from .caches import cache, distinct_caches
from .checks import same_device


def layer_list(
    operation: str, argument: str, value: Any, num_layers: int | None = None
) -> list[Any]:
    """Return one entry a layer."""
    entries = None
    # A set has no order, and the first axis of one array is as likely its blocks as its layers.
    if not (isinstance(value, (set, frozenset, dict, str)) or _is_array(value)):
        with contextlib.suppress(TypeError):
            entries = list(value)
    if entries is None:
        reject_type(
            operation, argument, "be a list or tuple with one entry a layer", type(value).__name__
        )
    if num_layers is not None and len(entries) != num_layers:
        reject_value(
            operation, argument, f"have one entry for each of {num_layers} layers", len(entries)
        )
    if not entries:
        reject_value(operation, argument, "have at least one layer", "none")
    return entries


def _is_array(value: Any) -> bool:
    try:
        return describe(value) is not None
    except UnusableArray:  # a sparse tensor, say
        return True


def layer_caches(
    operation: str,
    arrays: Sequence[Any],
    names: Sequence[str | CacheLayout],
    sizes: tuple[int, int],
    scale_format: str,
) -> tuple[list[ArrayRef], list[CachePlan], DeviceId]:
    """Return the caches of all layers, what they look like, and the device that all are on."""
    refs, plans = [], []
    device: DeviceId | None = None
    for layer, (obj, name) in enumerate(zip(arrays, names, strict=True)):
        argument = f"kv_caches[{layer}]"
        ref, plan = cache(operation, argument, obj, name, sizes, scale_format)
        device = device or ref.device
        if device is not None:
            same_device(operation, argument, ref, device, "the other layers")
        refs.append(ref)
        plans.append(plan)
    distinct_caches(operation, "kv_caches", refs)
    return refs, plans, device or CPU
