"""Scales of flat fp8: numbers that are copied, arrays that are read in place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np

from cupy_mla import dtypes
from cupy_mla._arrays import ArrayRef, DeviceId
from cupy_mla._plan import Scale
from cupy_mla.errors import reject_type, reject_value
from cupy_mla.layouts import CacheLayout

from .checks import array, check_aligned, check_contiguous, check_dtype, same_device, shape_text


def number_scale(operation: str, argument: str, value: Any) -> float:
    """Return a host number as a float32 scale that is finite and above 0."""
    if not _is_real(value):
        reject_type(operation, argument, "be a number or an array", type(value).__name__)
    single = single_of(value)
    if not (math.isfinite(single) and single > 0.0):
        reject_value(operation, argument, "be finite and > 0 (as float32)", value)
    return single


def single_of(value: Any) -> float:
    """Return a real number as the nearest float32, infinity for one that is too large."""
    try:
        with np.errstate(all="ignore"):
            return float(np.float32(value))
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _is_number(value: Any) -> bool:
    """Whether a value is given by itself, not as an array."""
    return isinstance(value, (Real, np.generic))


def _is_real(value: Any) -> bool:
    if isinstance(value, np.generic) and value.dtype in _SMALL_FLOATS:
        return True
    return isinstance(value, Real) and not isinstance(value, (bool, np.bool_))


_SMALL_FLOATS = (dtypes.BFLOAT16, dtypes.FLOAT8_E4M3, dtypes.FLOAT8_E5M2)


def layer_scale(
    operation: str, argument: str, value: Any, device: DeviceId, *, owner: str, live: bool
) -> float | ArrayRef:
    """Validate one layer's scale.

    Parameters
    ----------
    operation, argument : str
        For messages.
    value : number or array
        A number, or an array of one element.
    device : DeviceId
        The caches' device.
    owner : str
        Whose device that is, for messages.
    live : bool
        True for a writer: arrays on `device` are referenced, arrays elsewhere in host memory are
        copied. False for a single call: host arrays are read, and must be where the cache is.
    """
    if _is_number(value):
        return number_scale(operation, argument, value)
    ref = array(operation, argument, value, "a number or an array")
    if ref.size != 1:
        reject_value(operation, argument, "hold one element for one layer", shape_text(ref.shape))
    on_host = ref.device is not None and ref.device.kind == "cpu"
    if live and on_host and device.kind != "cpu":
        return number_scale(operation, argument, ref.host_view().reshape(())[()])
    same_device(operation, argument, ref, device, owner)
    if on_host:
        number = number_scale(operation, argument, ref.host_view().reshape(())[()])
        if not live:
            return number
    check_dtype(operation, argument, ref, (dtypes.FLOAT32,), " to be read in place")
    check_aligned(operation, argument, ref)
    return ref


def writer_scales(
    operation: str, kv_scales: Any, layouts: Sequence[CacheLayout], device: DeviceId
) -> tuple[Scale, ...]:
    """Validate the scales of all layers of a writer.

    Parameters
    ----------
    operation : str
        For messages.
    kv_scales : None, number, sequence, or array of float32 [L]
        One scale a layer, None where its layout needs none.
    layouts : sequence of CacheLayout
    device : DeviceId
        The caches' device.
    """
    per_layer = _split_scales(operation, kv_scales, len(layouts), device)
    scales: list[Scale] = []
    for layer, (value, layout) in enumerate(zip(per_layer, layouts, strict=True)):
        argument = f"kv_scales[{layer}]"
        if layout.needs_scale:
            if value is None:
                reject_value(
                    operation,
                    argument,
                    f"be the scale of layer {layer}, whose layout {layout.name} needs one",
                    None,
                )
            scales.append(
                layer_scale(operation, argument, value, device, owner="kv_caches", live=True)
            )
        elif value is not None:
            reject_value(
                operation,
                argument,
                f"be None: layer {layer} is {layout.name}, which has no scale of its own",
                value if _is_number(value) else type(value).__name__,
            )
        else:
            scales.append(None)
    return tuple(scales)


def _split_scales(operation: str, kv_scales: Any, num_layers: int, device: DeviceId) -> list[Any]:
    """Return one entry a layer: None, a number, or an array of one element."""
    if kv_scales is None:
        return [None] * num_layers
    expected = f"hold one scale for each of the {num_layers} layers"
    if _is_number(kv_scales):
        if num_layers != 1:
            reject_value(operation, "kv_scales", expected, f"one number ({kv_scales})")
        return [kv_scales]
    if isinstance(kv_scales, (list, tuple)):
        if len(kv_scales) != num_layers:
            reject_value(operation, "kv_scales", expected, f"{len(kv_scales)}")
        return list(kv_scales)
    ref = array(operation, "kv_scales", kv_scales, "a list of scales or an array")
    if ref.shape != (num_layers,) and not (num_layers == 1 and ref.size == 1):
        reject_value(operation, "kv_scales", expected, shape_text(ref.shape))
    if ref.device is not None and ref.device.kind == "cpu" and device.kind != "cpu":
        return list(ref.host_view().reshape(num_layers))
    same_device(operation, "kv_scales", ref, device, "kv_caches")
    check_dtype(operation, "kv_scales", ref, (dtypes.FLOAT32,), " to be read in place")
    check_contiguous(operation, "kv_scales", ref)
    check_aligned(operation, "kv_scales", ref)
    return [ref.element(layer) for layer in range(num_layers)]


def call_scale(
    operation: str,
    value: Any,
    layout: CacheLayout,
    device: DeviceId,
    *,
    argument: str = "scale",
    owner: str = "kv_cache",
) -> Scale:
    """Validate the scale of a single call; layouts without one ignore it."""
    if not layout.needs_scale:
        return None
    if value is None:
        reject_value(operation, argument, f"be the layer's scale for {layout.name}", None)
    return layer_scale(operation, argument, value, device, owner=owner, live=False)
