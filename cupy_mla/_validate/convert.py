"""Two caches of which one is written from the other."""

from __future__ import annotations

from typing import Any

from cupy_mla._arrays import CPU, ArrayRef
from cupy_mla._plan import CachePlan, ConvertPlan, Scale
from cupy_mla.errors import reject_value
from cupy_mla.layouts import CacheLayout

from .caches import cache, whole_rows
from .checks import array, check_disjoint, check_indices, same_device, shape_text
from .scales import call_scale


def convert(
    operation: str,
    src: Any,
    dst: Any,
    src_dtype: str | CacheLayout,
    dst_dtype: str | CacheLayout,
    src_scale: Any,
    dst_scale: Any,
    scale_format: str,
    slots: Any,
) -> tuple[ConvertPlan, tuple[ArrayRef, Scale], tuple[ArrayRef, Scale], ArrayRef | None]:
    """Validate a conversion; return its plan, both caches with their scales, and the slots."""
    source, source_plan = cache(
        operation,
        "src",
        src,
        src_dtype,
        None,
        "float32",
        writable=False,
        planar=True,
        name_argument="src_dtype",
    )
    destination, plan = cache(
        operation,
        "dst",
        dst,
        dst_dtype,
        None,
        scale_format,
        planar=True,
        name_argument="dst_dtype",
    )
    _same_rows(operation, source_plan, plan, src_dtype, dst_dtype)
    device = destination.device or source.device or CPU
    same_device(operation, "src", source, device, "dst")
    check_disjoint(operation, "dst", destination, "src", source)
    scales = [
        call_scale(operation, value, cache_plan.layout, device, argument=argument, owner="dst")
        for value, cache_plan, argument in (
            (src_scale, source_plan, "src_scale"),
            (dst_scale, plan, "dst_scale"),
        )
    ]
    copies = _same_bytes(source_plan.layout, plan.layout) and _same_scale(*scales)
    if not copies:
        whole_rows(operation, plan.layout, "dst_dtype")
    count, slots_ref = plan.num_slots, None
    if slots is not None:
        slots_ref = array(operation, "slots", slots)
        if slots_ref.ndim != 1:
            reject_value(operation, "slots", "have shape [n]", shape_text(slots_ref.shape))
        check_indices(operation, "slots", slots_ref, device, "dst")
        count = slots_ref.shape[0]
    result = ConvertPlan(
        operation,
        device,
        source_plan,
        plan,
        count,
        0 if slots_ref is None else slots_ref.strides[0],
        None if slots_ref is None else slots_ref.dtype,
        copies,
    )
    return result, (source, scales[0]), (destination, scales[1]), slots_ref


def _same_rows(
    operation: str,
    source: CachePlan,
    destination: CachePlan,
    src_dtype: str | CacheLayout,
    dst_dtype: str | CacheLayout,
) -> None:
    """Require equal rows and equal numbers of slots."""
    sizes = []
    for plan, given in ((source, src_dtype), (destination, dst_dtype)):
        layout = plan.layout
        # A flat layout called by its name has no border between latent and rotary part.
        border = isinstance(given, CacheLayout) or layout.tile
        sizes.append((layout.kv_lora_rank + layout.rope_dim, layout.kv_lora_rank if border else 0))
    (width, border), (other_width, other_border) = sizes
    if width != other_width or (border and other_border and border != other_border):
        reject_value(
            operation,
            "src and dst",
            "have rows of the same elements",
            f"{_row_text(source, border)} and {_row_text(destination, other_border)}",
        )
    if source.num_slots != destination.num_slots:
        reject_value(
            operation,
            "src and dst",
            "have the same number of slots",
            f"{source.num_blocks} blocks of {source.block_size} and "
            f"{destination.num_blocks} blocks of {destination.block_size}",
        )


def _row_text(plan: CachePlan, border: int) -> str:
    layout = plan.layout
    width = layout.kv_lora_rank + layout.rope_dim
    if not border:
        return f"{width} elements of {layout.name}"
    return f"{layout.kv_lora_rank} + {layout.rope_dim} elements of {layout.name}"


def _same_bytes(source: CacheLayout, destination: CacheLayout) -> bool:
    """Whether equal rows are equal bytes in both layouts, their scales being equal."""
    return (source.name, source.row_bytes, source.scale_format) == (
        destination.name,
        destination.row_bytes,
        destination.scale_format,
    )


def _same_scale(source: Scale, destination: Scale) -> bool:
    """Whether both layers have one scale; arrays are not read, so they have to be the same one."""
    if isinstance(source, ArrayRef) and isinstance(destination, ArrayRef):
        return source.ptr == destination.ptr
    if isinstance(source, ArrayRef) or isinstance(destination, ArrayRef):
        return False
    return source == destination
