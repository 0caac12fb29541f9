"""Caches known by device pointers alone, for the grouped operation."""

from __future__ import annotations

from typing import Any

from cupy_mla import dtypes
from cupy_mla._arrays import ArrayRef, DeviceId
from cupy_mla._plan import CachePlan, GroupedPointers
from cupy_mla.errors import check_integer, reject_type, reject_value
from cupy_mla.layouts import CacheLayout, build_layout, canonical_name, check_scale_format

from .caches import whole_rows
from .checks import array, check_contiguous, check_dtype, overlapping_axis, same_device, shape_text


def grouped(
    operation: str,
    kv_c: Any,
    kv_cache_ptrs: Any,
    block_size: Any,
    block_stride: Any,
    entry_stride: Any,
    kv_scales: Any,
    kv_cache_dtype: str | CacheLayout,
    num_blocks: Any,
    scale_format: str,
    sizes: tuple[int, int],
) -> GroupedPointers:
    """Validate what describes the caches of the grouped operation.

    Parameters
    ----------
    operation : str
        For messages.
    kv_c : array
        Only its dtype matters here, for "auto".
    kv_cache_ptrs : array
        int64 [L] on the device.
    block_size, block_stride, entry_stride, num_blocks : int
        Rows a block; elements of the cache from a block, and from a row, to the next; blocks of
        each cache, or None.
    kv_scales : array or None
        float32 [L] on the device for flat fp8, else None.
    kv_cache_dtype : str or CacheLayout
    scale_format : str
    sizes : (int, int)
        kv_lora_rank and rope_dim.
    """
    pointers = array(operation, "kv_cache_ptrs", kv_cache_ptrs)
    if pointers.device is not None and pointers.device.kind != "cuda":
        reject_type(
            operation,
            "kv_cache_ptrs",
            "be a CUDA array (host arrays have no device pointers: use GroupedCacheWriter)",
            f"one in host memory ({pointers.framework})",
        )
    check_dtype(operation, "kv_cache_ptrs", pointers, (dtypes.INT64,))
    if pointers.ndim != 1:
        reject_value(operation, "kv_cache_ptrs", "have shape [L]", shape_text(pointers.shape))
    layers = pointers.shape[0]
    check_contiguous(operation, "kv_cache_ptrs", pointers)
    layout = _grouped_layout(operation, kv_c, kv_cache_dtype, sizes, scale_format)
    scales = _grouped_scales(operation, kv_scales, layout, layers, pointers.device)
    rows = check_integer(operation, "block_size", block_size, least=1)
    step = layout.storage_dtype.itemsize
    plan = CachePlan(
        layout,
        None if num_blocks is None else check_integer(operation, "num_blocks", num_blocks, least=0),
        rows,
        check_integer(operation, "block_stride", block_stride) * step,
        check_integer(operation, "entry_stride", entry_stride) * step,
    )
    if rows > 1 and abs(plan.row_stride) < layout.row_bytes:
        reject_value(
            operation,
            "entry_stride",
            f"be at least the {layout.width} elements of a row",
            entry_stride,
        )
    blocks = plan.num_blocks or 0
    strides = (plan.block_stride, plan.row_stride)
    if overlapping_axis((blocks, rows), strides, (0, 1), layout.row_bytes) is not None:
        reject_value(
            operation,
            "block_stride and entry_stride",
            f"keep blocks of {rows} rows and rows of {layout.width} elements apart",
            f"{block_stride} and {entry_stride}",
        )
    return GroupedPointers(pointers, scales, plan)


def _grouped_layout(
    operation: str,
    kv_c: Any,
    kv_cache_dtype: str | CacheLayout,
    sizes: tuple[int, int],
    scale_format: str,
) -> CacheLayout:
    chosen_format = check_scale_format(operation, scale_format)
    if isinstance(kv_cache_dtype, CacheLayout):
        layout = kv_cache_dtype
    else:
        name = canonical_name(operation, kv_cache_dtype, planar=False)
        if name == "auto":
            name = array(operation, "kv_c", kv_c).dtype.name
        layout = build_layout(operation, name, sizes[0], sizes[1], chosen_format)
    whole_rows(operation, layout)
    return layout


def _grouped_scales(
    operation: str,
    kv_scales: Any,
    layout: CacheLayout,
    layers: int,
    device: DeviceId | None,
) -> ArrayRef | None:
    if not layout.needs_scale:
        if kv_scales is not None:
            reject_value(
                operation,
                "kv_scales",
                f"be None: {layout.name} has no scale a layer",
                type(kv_scales).__name__,
            )
        return None
    if kv_scales is None:
        reject_value(operation, "kv_scales", f"be float32 [{layers}] for {layout.name}", None)
    ref = array(operation, "kv_scales", kv_scales)
    if device is not None:
        same_device(operation, "kv_scales", ref, device, "kv_cache_ptrs")
    check_dtype(operation, "kv_scales", ref, (dtypes.FLOAT32,))
    if ref.shape != (layers,):
        reject_value(operation, "kv_scales", f"have shape [{layers}]", shape_text(ref.shape))
    check_contiguous(operation, "kv_scales", ref)
    return ref
