"""indexer_k_quant_and_cache: keys that are ready, quantised to the indexer's cache."""

from __future__ import annotations

from typing import Any

from cupy_mla import _validate, backends
from cupy_mla._looks import UNKNOWN
from cupy_mla._shortcuts import Shortcuts

__all__ = ["indexer_k_quant_and_cache"]

_calls = Shortcuts()


def indexer_k_quant_and_cache(
    k: Any,
    kv_cache: Any,
    slot_mapping: Any,
    quant_block_size: int = 128,
    scale_fmt: str = "ue8m0",
    *,
    stream: Any = None,
) -> None:
    """Quantise the indexer's keys and store them in its paged cache.

    Parameters
    ----------
    k : array [T', 128]
        Keys after norm and RoPE, bfloat16, float16 or float32; rows behind the T-th are padding.
    kv_cache : array [num_blocks, block_size, 132]
        uint8 or float8_e4m3fn, also ``[num_blocks, block_size, 1, 132]``. A block holds the 128
        codes of each of its rows, then their float32 scales; blocks may be any number of bytes
        apart.
    slot_mapping : int32 or int64 array [T]
        Row of each token. Rows of slots below 0 or beyond the cache are not stored.
    quant_block_size : int
        128: a row has one scale.
    scale_fmt : {"ue8m0", "float32"}
        The scale s is ``max(amax, 1e-4) / 448``, or with ``ue8m0`` the smallest power of two that
        is not below it.
    stream : object, optional
        A stream of the cache's device; by default the current one of the framework that owns the
        cache. None for host arrays.

    Raises
    ------
    ValueError
        For a shape, stride or device that does not fit; nothing is written.
    TypeError
        For a dtype or a kind of argument that does not fit; nothing is written.

    Notes
    -----
    Codes are ``sat(RNE(x / s))`` by IEEE division. amax is the largest magnitude of the row that
    is no NaN; a NaN is stored as 0x7F. Nothing that is read may share memory with the cache; on a
    GPU that is looked at when arrays of these shapes, strides and dtypes come for the first time.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_mla import indexer_k_quant_and_cache
    >>> cache = np.zeros((1, 64, 132), np.uint8)
    >>> indexer_k_quant_and_cache(np.full((1, 128), 448.0, np.float32), cache, np.array([2]))
    >>> block = cache.reshape(-1)
    >>> hex(block[2 * 128]), block[64 * 128 :].view(np.float32)[2]
    ('0x7e', np.float32(1.0))
    """
    options, arrays = (quant_block_size, scale_fmt), (k, kv_cache, slot_mapping)
    if stream is None and _calls.run(options, *arrays) is not UNKNOWN:
        return
    plan, inputs = _validate.indexer_insert(
        "indexer_k_quant_and_cache", k, kv_cache, slot_mapping, quant_block_size, scale_fmt
    )
    if plan.device.kind == "cpu":
        _validate.host_stream(plan.operation, stream)
    backend = backends.for_device(plan.device)
    backend.insert_indexer(plan, inputs, stream)
    _calls.learn(backend.indexer_launcher(plan, inputs), options, *arrays)
