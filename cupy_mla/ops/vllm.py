"""Gathers with the names and arguments that vLLM's have."""

from __future__ import annotations

from typing import Any

from cupy_mla import _validate, backends
from cupy_mla.errors import reject_type
from cupy_mla.layouts import CacheLayout

__all__ = [
    "cp_gather_and_upconvert_fp8_kv_cache",
    "cp_gather_indexer_k_quant_cache",
    "gather_and_maybe_dequant_cache",
]


def gather_and_maybe_dequant_cache(
    src_cache: Any,
    dst: Any,
    block_table: Any,
    cu_seq_lens: Any,
    token_to_seq: Any,
    num_tokens: int,
    kv_cache_dtype: str | CacheLayout,
    scale: Any,
    seq_starts: Any = None,
) -> None:
    """Read the rows of requests into `dst`, the request of each output row being given.

    Parameters
    ----------
    src_cache : array [num_blocks, block_size, width]
        Source.
    dst : bfloat16, float16 or float32 array [num_tokens or more, R + P]
        Destination; rows of no request, and rows behind `num_tokens`, stay as they are.
    block_table : int32 or int64 array [n_seq, max_blocks]
        Blocks of each request.
    cu_seq_lens : int32 or int64 array [n_seq + 1]
        Output row at which each request begins, and behind the last one.
    token_to_seq : int32 or int64 array [num_tokens or more]
        Request of each output row. A row that lies outside the rows of its request is left alone.
    num_tokens : int
        Output rows that are looked at.
    kv_cache_dtype : str or CacheLayout
        See `get_layout`.
    scale : float or array of one element, float32 on a device
        The layer's scale; layouts without one ignore it.
    seq_starts : int32 or int64 array [n_seq], optional
        Position at which each request is read from, also within a block.

    Raises
    ------
    ValueError
        For a shape, stride, scale or device that does not fit; nothing is written.
    TypeError
        For a dtype or a kind of argument that does not fit; nothing is written.

    See Also
    --------
    gather_cache : Finds the requests itself, and can make the output.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_mla import gather_and_maybe_dequant_cache
    >>> cache = np.arange(16, dtype=np.float32).reshape(4, 2, 2)
    >>> dst = np.full((4, 2), -1, np.float32)
    >>> table, lengths, owner = np.array([[3], [1]]), np.array([0, 2, 3]), np.array([0, 0, 1])
    >>> gather_and_maybe_dequant_cache(cache, dst, table, lengths, owner, 3, "auto", None)
    >>> dst[:, 0]
    array([12., 14.,  4., -1.], dtype=float32)
    """
    operation = "gather_and_maybe_dequant_cache"
    cache, cache_plan = _validate.cache(
        operation,
        "src_cache",
        src_cache,
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
        num_tokens=_validate.integer(operation, "num_tokens", num_tokens, least=0),
        out=_required(operation, dst),
        new_dtype=None,
        names=("src_cache", "dst"),
        token_to_seq=token_to_seq,
    )
    layer_scale = _validate.call_scale(
        operation, scale, cache_plan.layout, plan.device, owner="src_cache"
    )
    backend = backends.for_device(plan.device)
    target = backend.call_target(cache, cache_plan, layer_scale)
    backend.gather(plan, arrays, target, destination, cache, None)


def cp_gather_and_upconvert_fp8_kv_cache(
    src_cache: Any,
    dst: Any,
    block_table: Any,
    workspace_starts: Any,
    batch_size: int,
    seq_starts: Any = None,
) -> None:
    """Read the ``fp8_ds_mla`` rows of requests into a bfloat16 workspace.

    Parameters
    ----------
    src_cache : uint8 array [num_blocks, block_size, 656]
        Source.
    dst : bfloat16 array [tokens, 576]
        Destination. A request goes on to where the next one begins, the last one to the end;
        rows before the first request stay as they are.
    block_table : int32 or int64 array [batch_size or more, max_blocks]
        Blocks of each request. Rows of a request beyond its blocks become zeros.
    workspace_starts : int32 or int64 array [batch_size or more]
        Row of `dst` at which each request begins; they must not decrease, which nothing checks.
    batch_size : int
        Requests.
    seq_starts : int32 or int64 array [batch_size or more], optional
        Position at which each request is read from, also within a block.

    Raises
    ------
    ValueError
        For a shape, stride or device that does not fit; nothing is written.
    TypeError
        For a dtype or a kind of argument that does not fit; nothing is written.

    Examples
    --------
    >>> import ml_dtypes, numpy as np
    >>> from cupy_mla import cp_gather_and_upconvert_fp8_kv_cache, get_layout
    >>> layout = get_layout("fp8_ds_mla")
    >>> cache = np.zeros((2, 4, 656), np.uint8)
    >>> row = cache.view(layout.row_dtype())[1, 2]
    >>> row["nope"], row["scale"] = 448, 0.5
    >>> dst = np.zeros((3, 576), ml_dtypes.bfloat16)
    >>> cp_gather_and_upconvert_fp8_kv_cache(cache, dst, np.array([[1]]), np.array([0]), 1)
    >>> dst[:, 0].astype(np.float32)
    array([  0.,   0., 224.], dtype=float32)
    """
    operation = "cp_gather_and_upconvert_fp8_kv_cache"
    cache, cache_plan = _validate.cache(
        operation, "src_cache", src_cache, "fp8_ds_mla", None, "float32", writable=False
    )
    plan, arrays, destination = _validate.gather(
        operation,
        cache,
        cache_plan,
        block_table,
        workspace_starts,
        seq_starts=seq_starts,
        num_tokens=None,
        out=_required(operation, dst),
        new_dtype=None,
        names=("src_cache", "dst"),
        num_seqs=_validate.integer(operation, "batch_size", batch_size, least=0),
        open_ended=True,
        first_name="workspace_starts",
    )
    if plan.out_dtype.name != "bfloat16":
        reject_type(operation, "dst", "be bfloat16", plan.out_dtype.name)
    backend = backends.for_device(plan.device)
    target = backend.call_target(cache, cache_plan, None)
    backend.gather(plan, arrays, target, destination, cache, None)


def _required(operation: str, dst: Any) -> Any:
    if dst is None:
        reject_type(operation, "dst", "be an array", None)
    return dst


def cp_gather_indexer_k_quant_cache(
    kv_cache: Any, dst_k: Any, dst_scale: Any, block_table: Any, cu_seq_lens: Any
) -> None:
    """Copy the indexer keys of requests out of their cache, codes and scales apart.

    Parameters
    ----------
    kv_cache : uint8 or float8_e4m3fn array [num_blocks, block_size, 132]
        Source, of layout ``indexer_fp8``: a block holds all its codes, then all its scales.
    dst_k : uint8 or float8_e4m3fn array [tokens, 128]
        Destination of the codes; rows of no request stay as they are.
    dst_scale : float32 array [tokens, 1], or bytes [tokens, 4] (uint8 or float8_e4m3fn)
        Destination of the scales, the four bytes of a float32 each.
    block_table : int32 or int64 array [n_seq, max_blocks]
        Blocks of each request.
    cu_seq_lens : int32 or int64 array [n_seq + 1]
        Output row at which each request begins, and behind the last one.

    Raises
    ------
    ValueError
        For a shape, stride or device that does not fit; nothing is written.
    TypeError
        For a dtype or a kind of argument that does not fit; nothing is written.

    Notes
    -----
    Codes and scale of a row are zero where its position lies outside the block table, or its
    block is none of the cache.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_mla import cp_gather_indexer_k_quant_cache
    >>> cache = np.zeros((1, 2, 132), np.uint8)  # 2 x 128 codes, then 2 scales
    >>> block = cache.reshape(264)
    >>> block[128:256], block[260:264].view(np.float32)[:] = 0x38, 0.25
    >>> keys, scales = np.zeros((2, 128), np.uint8), np.zeros((2, 1), np.float32)
    >>> cp_gather_indexer_k_quant_cache(cache, keys, scales, np.array([[0]]), np.array([0, 2]))
    >>> keys[:, 0], scales[:, 0]
    (array([ 0, 56], dtype=uint8), array([0.  , 0.25], dtype=float32))
    """
    operation = "cp_gather_indexer_k_quant_cache"
    cache, cache_plan = _validate.cache(
        operation, "kv_cache", kv_cache, "indexer_fp8", None, "float32", writable=False, planar=True
    )
    plan, arrays, codes, scales = _validate.gather_indexer(
        operation, cache, cache_plan, dst_k, dst_scale, block_table, cu_seq_lens
    )
    backend = backends.for_device(plan.device)
    target = backend.call_target(cache, cache_plan, None)
    backend.gather_indexer(plan, arrays, target, codes, scales, None)
