"""Reading rows back from caches, dequantised."""

from __future__ import annotations

from typing import Any

from cupy_mla import _validate, backends
from cupy_mla.layouts import CacheLayout

__all__ = ["gather_cache", "read_slots"]


def gather_cache(
    kv_cache: Any,
    block_table: Any,
    cu_seq_lens: Any,
    kv_cache_dtype: str | CacheLayout = "auto",
    scale: Any = None,
    *,
    seq_starts: Any = None,
    num_tokens: int | None = None,
    out: Any = None,
    out_dtype: Any = "bfloat16",
    stream: Any = None,
) -> Any:
    """Read the rows of requests through their block table, dequantised, one request after another.

    Parameters
    ----------
    kv_cache : array [num_blocks, block_size, width]
        Source, also ``[num_blocks, block_size, 1, width]``; may be read-only.
    block_table : int32 or int64 array [n_seq, max_blocks]
        Blocks of each request, in the order of its positions; a slice of a larger table, with any
        strides.
    cu_seq_lens : int32 or int64 array [n_seq + 1]
        Output row at which each request begins, and behind the last one. They must not decrease,
        which nothing checks, since on a GPU that would wait: rows of a request that ends before it
        begins are another's or nobody's.
    kv_cache_dtype : str or CacheLayout
        See `get_layout`. A name of a flat layout takes the width as it is.
    scale : float or array of one element, float32 on a device
        The layer's scale, needed for flat fp8.
    seq_starts : int32 or int64 array [n_seq], optional
        Position at which each request is read from, also within a block; 0 by default.
    num_tokens : int, optional
        Output rows. By default those of `out`, or without `out` what `cu_seq_lens` ends with: a
        GPU has to be waited for to read that, and no graph can be captured then.
    out : array [num_tokens or more, R + P], optional
        Where to write, of bfloat16, float16 or float32 whatever `out_dtype` says; rows may be any
        number of bytes apart.
    out_dtype : str or dtype
        bfloat16, float16 or float32, for a new array.
    stream : object, optional
        A stream of the cache's device; by default the current one of the framework that owns the
        cache. None for host arrays.

    Returns
    -------
    array [num_tokens, R + P]
        `out`, or a new array of the framework that owns `kv_cache`. Codes become
        ``float32(code) * scale``, rounded once. A row of a request whose position lies outside
        the block table, or whose block the cache does not have, is zero. Rows of no request are
        zero in a new array, and stay as they are in `out`.

    Raises
    ------
    ValueError
        For a shape, stride, scale or device that does not fit; nothing is written.
    TypeError
        For a dtype or a kind of argument that does not fit; nothing is written.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_mla import gather_cache
    >>> cache = np.arange(32, dtype=np.float32).reshape(4, 4, 2)  # 4 blocks of 4 rows
    >>> table = np.array([[2, 0, 3], [1, -1, -1]], np.int32)
    >>> rows = gather_cache(
    ...     cache, table, np.array([0, 4, 6]), seq_starts=np.array([5, 3]), out_dtype="float32"
    ... )
    >>> rows[:, 0]  # block 0 from row 1 on, then block 3; block 1's last row, then no block
    array([ 2.,  4.,  6., 24., 14.,  0.], dtype=float32)
    """
    operation = "gather_cache"
    cache, cache_plan = _validate.cache(
        operation,
        "kv_cache",
        kv_cache,
        kv_cache_dtype,
        None,
        "float32",
        writable=False,
        planar=True,
    )
    plan, arrays, destination = _validate.gather(
        operation,
        cache,
        cache_plan,
        block_table,
        cu_seq_lens,
        seq_starts=seq_starts,
        num_tokens=num_tokens,
        out=out,
        new_dtype=out_dtype,
    )
    layer_scale = _validate.call_scale(operation, scale, cache_plan.layout, plan.device)
    if plan.device.kind == "cpu":
        _validate.host_stream(operation, stream)
    backend = backends.for_device(plan.device)
    target = backend.call_target(cache, cache_plan, layer_scale)
    result = backend.gather(plan, arrays, target, destination, cache, stream)
    return result if out is None else out


def read_slots(
    kv_cache: Any,
    slots: Any,
    kv_cache_dtype: str | CacheLayout = "auto",
    scale: Any = None,
    *,
    out_dtype: Any = "float32",
) -> Any:
    """Read rows back from a cache, dequantised.

    Parameters
    ----------
    kv_cache : array [num_blocks, block_size, width]
        Source, also ``[num_blocks, block_size, 1, width]``; may be read-only.
    slots : int32 or int64 array [n]
        Rows to read.
    kv_cache_dtype : str or CacheLayout
        See `get_layout`. A name of a flat layout takes the width as it is.
    scale : float or array of one element, float32 on a device
        The layer's scale, needed for flat fp8.
    out_dtype : str or dtype
        bfloat16, float16 or float32.

    Returns
    -------
    array [n, R + P]
        A new array of the framework that owns `kv_cache`; zeros for slots below 0 or beyond the
        cache. Codes become ``float32(code) * scale``, rounded once to `out_dtype`.

    Raises
    ------
    ValueError
        For a shape, stride, scale or device that does not fit.
    TypeError
        For a dtype or a kind of argument that does not fit.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_mla import read_slots
    >>> cache = np.arange(24, dtype=np.float32).reshape(2, 4, 3)
    >>> read_slots(cache, np.array([5, -1]))
    array([[15., 16., 17.],
           [ 0.,  0.,  0.]], dtype=float32)
    """
    operation = "read_slots"
    cache, cache_plan = _validate.cache(
        operation,
        "kv_cache",
        kv_cache,
        kv_cache_dtype,
        None,
        "float32",
        writable=False,
        planar=True,
    )
    plan, wanted = _validate.read_slots(operation, cache, cache_plan, slots, out_dtype)
    layer_scale = _validate.call_scale(operation, scale, cache_plan.layout, plan.device)
    backend = backends.for_device(plan.device)
    target = backend.call_target(cache, cache_plan, layer_scale)
    return backend.read_slots(plan, wanted, target, cache, None)
