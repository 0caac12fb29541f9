"""Converting a cache to another layout."""

from __future__ import annotations

from typing import Any

from cupy_mla import _validate, backends
from cupy_mla.layouts import CacheLayout

__all__ = ["convert_cache"]


def convert_cache(
    src: Any,
    dst: Any,
    src_dtype: str | CacheLayout,
    dst_dtype: str | CacheLayout,
    *,
    src_scale: Any = None,
    dst_scale: Any = None,
    scale_format: str = "float32",
    slots: Any = None,
) -> None:
    """Write the rows of a cache to the same slots of a cache of another layout.

    Parameters
    ----------
    src : array [num_blocks, block_size, width]
        Source, also ``[num_blocks, block_size, 1, width]``; may be read-only.
    dst : array [num_blocks', block_size', width']
        Destination, of as many slots and on the same device; it shares no memory with `src`.
        Blocks may be of another size.
    src_dtype, dst_dtype : str or CacheLayout
        Layouts of both, see `get_layout`. A name of a flat layout takes the width as it is.
    src_scale, dst_scale : float or array of one element, float32 on a device
        The layer's scales, each needed where its cache is flat fp8.
    scale_format : {"float32", "ue8m0"}
        How a destination of ``fp8_ds_mla`` rounds its tiles' scales; a `CacheLayout` has its own.
    slots : int32 or int64 array [n], optional
        Slots to convert; those below 0 or beyond the caches are passed over. All by default.

    Raises
    ------
    ValueError
        For a shape, stride, scale or device that does not fit, and for caches that share memory;
        nothing is written.
    TypeError
        For a dtype or a kind of argument that does not fit; nothing is written.

    Notes
    -----
    Where layout, scale format and scale are the same in both, rows are copied byte for byte. A
    source called ``fp8_ds_mla`` counts as one of "float32" scales, which powers of two are as
    well: pass ``get_layout("fp8_ds_mla", scale_format="ue8m0")`` to have them computed again.

    Else every element becomes the float32 value that it stands for, ``float32(code) * scale``
    rounded once, and is stored as the destination's writer does: flat fp8 and the latent part of
    ``fp8_ds_mla`` are quantised from that value; 16- and 32-bit elements, the rotary part of
    ``fp8_ds_mla`` among them, are the value rounded once, or a copy of the bits where their dtype
    is the same. No more than a few megabytes are held at a time.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_mla import convert_cache, get_layout, read_slots
    >>> src = np.full((2, 4, 576), 3.0, np.float32)
    >>> dst = get_layout("fp8_ds_mla").empty(1, 8)  # the same 8 slots in one block
    >>> convert_cache(src, dst, "float32", "fp8_ds_mla", scale_format="ue8m0")
    >>> read_slots(dst, np.array([7]), "fp8_ds_mla")[0, :3]
    array([3., 3., 3.], dtype=float32)
    """
    plan, source, destination, wanted = _validate.convert(
        "convert_cache",
        src,
        dst,
        src_dtype,
        dst_dtype,
        src_scale,
        dst_scale,
        scale_format,
        slots,
    )
    backend = backends.for_device(plan.device)
    backend.convert(
        plan,
        wanted,
        backend.call_target(source[0], plan.source, source[1]),
        backend.call_target(destination[0], plan.destination, destination[1]),
        None,
    )
