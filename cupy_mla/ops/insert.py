"""Storing rows in single caches, by functions named and shaped as vLLM's."""

from __future__ import annotations

from typing import Any

from cupy_mla import _validate, backends
from cupy_mla._arrays import CPU
from cupy_mla._looks import UNKNOWN
from cupy_mla._shortcuts import Shortcuts
from cupy_mla.layouts import CacheLayout

__all__ = ["concat_and_cache_mla", "concat_and_cache_mla_grouped"]

_single_calls = Shortcuts()
_grouped_calls = Shortcuts()


def concat_and_cache_mla(
    kv_c: Any,
    k_pe: Any,
    kv_cache: Any,
    slot_mapping: Any,
    kv_cache_dtype: str | CacheLayout = "auto",
    scale: Any = None,
    *,
    scale_format: str = "float32",
    stream: Any = None,
) -> None:
    """Store the latent rows of tokens in one layer's paged cache.

    Parameters
    ----------
    kv_c : array [T', R]
        Latent part of each token, T' >= T; rows behind the T-th are padding.
    k_pe : array [T', P] or None
        Rotary part, of the dtype of `kv_c`; None for models without RoPE.
    kv_cache : array [num_blocks, block_size, width]
        Destination, also ``[num_blocks, block_size, 1, width]``; blocks and rows may be any
        number of bytes apart. fp8 layouts take uint8 or the matching float8 dtype.
    slot_mapping : int32 or int64 array [T]
        Row of each token: block ``slot // block_size``, row ``slot % block_size``. Rows of
        slots below 0 or beyond the cache are not stored.
    kv_cache_dtype : str or CacheLayout
        See `get_layout`; ``auto`` is the dtype of `kv_cache`.
    scale : float or array of one element, float32 on a device
        The layer's scale, needed for flat fp8 and ignored by the other layouts.
    scale_format : {"float32", "ue8m0"}
        How ``fp8_ds_mla`` rounds its tiles' scales; a `CacheLayout` has its own.
    stream : object, optional
        A stream of the cache's device; by default the current one of the framework that owns the
        cache. None for host arrays.

    Raises
    ------
    ValueError
        For a shape, stride, scale or device that does not fit; nothing is written.
    TypeError
        For a dtype or a kind of argument that does not fit; nothing is written.

    Notes
    -----
    All three arrays have stride 1 along their last axis. 16- and 32-bit rows are bit copies.
    Flat fp8 stores ``sat(RNE(float32(x) / float32(scale)))`` by IEEE division; ``fp8_ds_mla``
    divides by the scale of each tile of 128, ``max(amax / 448, FLT_MIN)`` or the smallest power of
    two that is not below ``max(amax / 448, 1e-4)``, and copies the rotary part. A NaN is stored as
    0x7F. Where two tokens share a slot, NumPy keeps the last; on a GPU the bytes of that row are
    unspecified.
    Nothing that is read may share memory with the cache; on a GPU that is looked at when arrays of
    their shapes, strides and dtypes come for the first time.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_mla import concat_and_cache_mla, read_slots
    >>> cache = np.zeros((2, 4, 6), np.float32)
    >>> rows = np.arange(12, dtype=np.float32).reshape(2, 6)
    >>> concat_and_cache_mla(rows[:, :4], rows[:, 4:], cache, np.array([5, -1]))
    >>> read_slots(cache, np.array([5]))
    array([[0., 1., 2., 3., 4., 5.]], dtype=float32)
    """
    operation = "concat_and_cache_mla"
    number = None if scale is None or hasattr(scale, "shape") else scale
    options = (kv_cache_dtype, type(number), number, scale_format)
    arrays = (kv_c, k_pe, kv_cache, slot_mapping, scale if number is None else None)
    if stream is None and _single_calls.run(options, *arrays) is not UNKNOWN:
        return
    rows = _validate.array(operation, "kv_c", kv_c)
    rotary = None if k_pe is None else _validate.array(operation, "k_pe", k_pe)
    sizes = _validate.row_sizes(operation, rows, rotary, "[T, {}]")
    cache, cache_plan = _validate.cache(
        operation, "kv_cache", kv_cache, kv_cache_dtype, sizes, scale_format
    )
    device = cache.device or rows.device or CPU
    plan, inputs = _validate.insert_inputs(
        operation,
        rows,
        rotary,
        slot_mapping,
        num_layers=None,
        sizes=None,
        device=device,
        owner="kv_cache",
        caches=_validate.Written.of(["kv_cache"], [cache]),
    )
    _validate.storable(plan, [cache_plan.layout], "kv_c")
    layer_scale = _validate.call_scale(operation, scale, cache_plan.layout, device)
    if device.kind == "cpu":
        _validate.host_stream(operation, stream)
    backend = backends.for_device(device)
    target = backend.call_target(cache, cache_plan, layer_scale)
    backend.insert(plan, inputs, target, stream)
    _single_calls.learn(backend.launcher(plan, inputs, target), options, *arrays)


def concat_and_cache_mla_grouped(
    kv_c: Any,
    k_pe: Any,
    kv_cache_ptrs: Any,
    slot_mapping: Any,
    block_size: int,
    block_stride: int,
    entry_stride: int,
    kv_scales: Any = None,
    kv_cache_dtype: str | CacheLayout = "auto",
    *,
    num_blocks: int | None = None,
    scale_format: str = "float32",
    stream: Any = None,
) -> None:
    """Store the latent rows of tokens in the caches of L layers by one kernel launch.

    The caches are known by device pointers alone, all of one geometry; `GroupedCacheWriter`
    takes the arrays themselves, each with its own.

    Parameters
    ----------
    kv_c : array [L, T', R]
        Latent parts on a CUDA device; rows behind the T-th are padding.
    k_pe : array [L, T', P] or None
        Rotary parts.
    kv_cache_ptrs : int64 array [L]
        Address of each layer's cache, in device memory and contiguous.
    slot_mapping : int32 or int64 array [T] or [L, T]
        Row of each token.
    block_size : int
        Rows a block.
    block_stride, entry_stride : int
        Elements of the cache (of the layout's `storage_dtype`) from a block to the next, and
        from a row to the next.
    kv_scales : float32 array [L] or None
        Scales for flat fp8, in device memory and contiguous.
    kv_cache_dtype : str or CacheLayout
        See `get_layout`; ``auto`` is the dtype of `kv_c`.
    num_blocks : int, optional
        Blocks of each cache. Without it a slot beyond the cache cannot be told, and is written.
    scale_format : {"float32", "ue8m0"}
        How ``fp8_ds_mla`` rounds its tiles' scales; a `CacheLayout` has its own.
    stream : object, optional
        A stream of the device; by default the current one of the framework that owns `kv_c`.

    Raises
    ------
    ValueError
        For a shape, stride or device that does not fit; nothing is written.
    TypeError
        For a dtype that does not fit, and for host arrays.
    """
    operation = "concat_and_cache_mla_grouped"
    geometry = (block_size, block_stride, entry_stride, num_blocks)
    options = (geometry, tuple(map(type, geometry)), kv_cache_dtype, scale_format)
    arrays = (kv_c, k_pe, kv_cache_ptrs, slot_mapping, kv_scales)
    if stream is None and _grouped_calls.run(options, *arrays) is not UNKNOWN:
        return
    rows = _validate.array(operation, "kv_c", kv_c)
    rotary = None if k_pe is None else _validate.array(operation, "k_pe", k_pe)
    sizes = _validate.row_sizes(operation, rows, rotary, "[L, T, {}]")
    pointers = _validate.grouped(
        operation,
        rows,
        kv_cache_ptrs,
        block_size,
        block_stride,
        entry_stride,
        kv_scales,
        kv_cache_dtype,
        num_blocks,
        scale_format,
        sizes,
    )
    device = pointers.cache_ptrs.device or rows.device
    if device is None:  # no layer and no token: nothing to store
        return
    plan, inputs = _validate.insert_inputs(
        operation,
        rows,
        rotary,
        slot_mapping,
        num_layers=pointers.cache_ptrs.shape[0],
        sizes=None,
        device=device,
        owner="kv_cache_ptrs",
        caches=None,
    )
    _validate.storable(plan, [pointers.cache.layout], "kv_c")
    backend = backends.cuda(device)
    backend.insert_grouped(plan, inputs, pointers, stream)
    _grouped_calls.learn(backend.grouped_launcher(plan, inputs, pointers), options, *arrays)
