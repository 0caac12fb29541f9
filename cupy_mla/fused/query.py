"""fused_q: RoPE and fp8 of the attention's and the indexer's queries."""

from __future__ import annotations

from typing import Any

from cupy_mla import _validate, backends
from cupy_mla._looks import UNKNOWN
from cupy_mla._shortcuts import Shortcuts, by_kind

__all__ = ["fused_q"]

_calls = Shortcuts()


def fused_q(
    positions: Any,
    q_pe: Any,
    q_pe_cos_sin_cache: Any,
    index_q: Any,
    index_q_cos_sin_cache: Any,
    ql_nope: Any,
    q_scale: Any,
    index_weights: Any,
    index_weights_softmax_scale: float,
    index_weights_head_scale: float,
    has_indexer: bool = True,
    index_rope_interleave: bool = False,
    quantize_mqa: bool = True,
    *,
    index_q_out: Any = None,
    index_weights_out: Any = None,
    mqa_q_out: Any = None,
    stream: Any = None,
) -> tuple[Any, Any, Any]:
    """Rotate the queries of attention and indexer and quantise them, in one launch.

    Parameters
    ----------
    positions : int32 or int64 array [T]
        Row of the RoPE tables for each token.
    q_pe : array [T', H, P]
        Rotary part of each head's query, bfloat16, float16 or float32, rotated in pairs
        (2i, 2i + 1). Tokens and heads may be any number of bytes apart.
    q_pe_cos_sin_cache : array [positions, P]
        Rows ``[cos half | sin half]``, bfloat16, float16 or float32.
    index_q : array [T', I, D] or None
        The indexer's queries, of the dtype of `q_pe`. Not looked at without an indexer, as the
        other arguments of the indexer.
    index_q_cos_sin_cache : array [positions, P'] or None
        Table for the leading P' elements of the indexer's queries.
    ql_nope : array [T', H, R]
        Latent part of each head's query, of the dtype of `q_pe`; any strides but along the last
        axis, so a transposed ``[H, T, R]`` too. Looked at only where `quantize_mqa` is true.
    q_scale : float or array of one element, float32 on a device
        What the fp8 query is divided by. Looked at only where `quantize_mqa` is true.
    index_weights : array [T', I] or None
        Weight of each head of the indexer, bfloat16, float16 or float32.
    index_weights_softmax_scale, index_weights_head_scale : float
    has_indexer : bool
    index_rope_interleave : bool
        The indexer rotates pairs (2i, 2i + 1) where true (GLM-5.2), else pairs (i, i + P'/2)
        (DeepSeek-V3.2).
    quantize_mqa : bool
        True for backends that take one fp8 query ``[ql_nope | RoPE(q_pe)]``, False for those that
        take the pair of `ql_nope` and ``RoPE(q_pe)``; see `select_cache_policy`.
    index_q_out : uint8 or float8_e4m3fn array [T', I, D], optional
    index_weights_out : float32 array [T', I], optional
    mqa_q_out : array, optional
        ``[T', H, R + P]`` of uint8 or float8_e4m3fn, or ``[T', H, P]`` of the dtype of `q_pe`.
        No output shares memory with another one or with an input.
    stream : object, optional
        A stream of the arrays' device; by default the current one of the framework of `mqa_q`.
        None for host arrays.

    Returns
    -------
    index_q_fp8 : array [T, I, D] or None
        Codes; None without an indexer.
    index_weights_out : float32 array [T, I] or None
        Weights that make up for what the codes were divided by; None without an indexer.
    mqa_q : array [T, H, R + P] or [T, H, P]
        New arrays are of the framework of `q_pe`, codes of its float8 where it has one, else
        uint8.

    Raises
    ------
    ValueError
        For a shape, stride, scale or device that does not fit; nothing is written.
    TypeError
        For a dtype or a kind of argument that does not fit; nothing is written.

    Notes
    -----
    T is the number of positions; rows behind the T-th of longer inputs are padding. Where a
    position is not in its table, rotated elements are zero.

    All arithmetic is float32, each operation rounded by itself; nothing is rounded to the inputs'
    dtype in between:

    - RoPE: ``(a * cos - b * sin, b * cos + a * sin)``.
    - ``mqa_q = sat(RNE(x / q_scale))`` in e4m3, or RoPE(q_pe) rounded once.
    - ``index_q_fp8 = sat(RNE(x / s))`` in e4m3 with ``s = 2^ceil(log2(max(amax, 1e-4) / 448))``
      of each head, amax the largest magnitude that is no NaN.
    - ``index_weights_out = ((w * s) * softmax_scale) * head_scale``.

    Whether arrays share memory is on a GPU looked at when arrays of these shapes, strides and
    dtypes come for the first time.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_mla import fused_q
    >>> table = np.array([[1.0, 0.0], [0.0, 1.0]], np.float32)  # angles 0 and 90 degrees
    >>> q_pe = np.array([[[1.0, 2.0]]], np.float32)
    >>> _, _, rotated = fused_q(
    ...     np.array([1]), q_pe, table, None, None, None, None, None, 1.0, 1.0,
    ...     has_indexer=False, quantize_mqa=False)
    >>> rotated
    array([[[-2.,  1.]]], dtype=float32)
    """
    scale, scale_array = by_kind(q_scale)
    options = (
        scale,
        index_weights_softmax_scale,
        index_weights_head_scale,
        has_indexer,
        index_rope_interleave,
        quantize_mqa,
    )
    arrays = (
        positions,
        q_pe,
        q_pe_cos_sin_cache,
        index_q,
        index_q_cos_sin_cache,
        ql_nope,
        scale_array,
        index_weights,
        index_q_out,
        index_weights_out,
        mqa_q_out,
    )
    wanted = (index_q_out, index_weights_out, mqa_q_out)
    made = UNKNOWN if stream is not None else _calls.run(options, *arrays)
    if made is not UNKNOWN:
        return _results(made, wanted, has_indexer)
    plan, inputs = _validate.fused_q(
        "fused_q",
        _validate.QueryArguments(
            positions=positions,
            q_pe=q_pe,
            q_pe_cos_sin_cache=q_pe_cos_sin_cache,
            index_q=index_q,
            index_q_cos_sin_cache=index_q_cos_sin_cache,
            ql_nope=ql_nope,
            q_scale=q_scale,
            index_weights=index_weights,
            index_weights_softmax_scale=index_weights_softmax_scale,
            index_weights_head_scale=index_weights_head_scale,
            has_indexer=has_indexer,
            index_rope_interleave=index_rope_interleave,
            quantize_mqa=quantize_mqa,
            index_q_out=index_q_out,
            index_weights_out=index_weights_out,
            mqa_q_out=mqa_q_out,
        ),
    )
    if plan.device.kind == "cpu":
        _validate.host_stream(plan.operation, stream)
    backend = backends.for_device(plan.device)
    made = backend.fused_q(plan, inputs, stream)
    _calls.learn(backend.fused_q_launcher(plan, inputs), options, *arrays)
    return _results(made, wanted, has_indexer)


def _results(
    made: tuple[Any, Any, Any], wanted: tuple[Any, Any, Any], has_indexer: bool
) -> tuple[Any, Any, Any]:
    """Return the caller's arrays where there are any, else the new ones."""
    codes, weights, mqa = made
    codes_out, weights_out, mqa_out = wanted
    if has_indexer:  # without one its arrays may be given all the same
        codes = codes if codes_out is None else codes_out
        weights = weights if weights_out is None else weights_out
    return codes, weights, mqa if mqa_out is None else mqa_out
