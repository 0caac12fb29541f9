"""fused_norm_rope: a layer's norms and RoPE, written straight to its caches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from cupy_mla import _validate, backends
from cupy_mla._looks import UNKNOWN
from cupy_mla._plan_fused import NormRopeLayerPlan
from cupy_mla._shortcuts import Launch, Shortcuts, by_kind
from cupy_mla.layouts import CacheLayout

__all__ = ["FusedNormRope", "fused_norm_rope"]

_calls = Shortcuts()

#: What the places of counters and error records of `FusedNormRope` are.
_CACHES = ("MLA cache", "indexer cache")


class FusedNormRope:
    """One layer's weights, tables and caches; called with a step's arrays.

    Does what `fused_norm_rope` does and says there, with the layer validated once. Weights,
    tables, caches and a scale on their device are referenced: each call reads what they hold then.
    Like a writer it counts the tokens whose rows it could not store.

    Parameters
    ----------
    q_rms_norm_w : array [Q]
        Weight of the query's RMSNorm. All arrays are where this one is.
    q_rms_eps : float
    kv_rms_norm_w : array [R]
        Weight of the latent part's RMSNorm.
    kv_rms_eps : float
    k_rope_cos_sin_cache : array [positions, P] or None
        Rows ``[cos half | sin half]``; None for models without RoPE.
    index_k_layer_norm_w, index_k_layer_norm_bias : array [128], optional
        LayerNorm of the indexer's keys; needed where an indexer cache is written.
    index_k_layer_norm_eps : float
    index_k_rope_cos_sin_cache : array [positions, P'], optional
        Table for the leading P' elements of the indexer's keys.
    indexer_k_cache : array [num_blocks, block_size, 132], optional
    mla_kv_cache : array [num_blocks, block_size, width], optional
    mla_kv_cache_dtype : str or CacheLayout
        See `get_layout`.
    mla_k_scale : float or array of one float32, optional
        Scale of a flat fp8 cache; an array on the device of the caches is read at each call.
    has_indexer : bool
        Whether the layer has an indexer of its own.
    index_rope_interleave : bool
        Whether the indexer rotates pairs (2i, 2i + 1) instead of halves.
    scale_format : {"float32", "ue8m0"}
        How ``fp8_ds_mla`` rounds its tiles' scales.
    rounding : {"fused", "staged"}

    Raises
    ------
    ValueError
        For a shape, stride, scale or device that does not fit.
    TypeError
        For a dtype or a kind of argument that does not fit.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_mla import FusedNormRope, read_slots
    >>> table = np.array([[1.0, 0.0], [0.0, 1.0]], np.float32)  # angles 0 and 90 degrees
    >>> cache = np.zeros((2, 4, 6), np.float32)
    >>> layer = FusedNormRope(
    ...     np.ones(8, np.float32), 1e-6, np.full(4, 2.0, np.float32), 1e-6, table,
    ...     mla_kv_cache=cache, has_indexer=False)
    >>> rows = np.ones((1, 8), np.float32)
    >>> q = layer(np.array([1]), rows, rows[:, :4], rows[:, :2], slot_mapping=np.array([5]))
    >>> read_slots(cache, np.array([5])).round(3)
    array([[ 2.,  2.,  2.,  2., -1.,  1.]], dtype=float32)
    """

    def __init__(
        self,
        q_rms_norm_w: Any,
        q_rms_eps: float,
        kv_rms_norm_w: Any,
        kv_rms_eps: float,
        k_rope_cos_sin_cache: Any,
        index_k_layer_norm_w: Any = None,
        index_k_layer_norm_bias: Any = None,
        index_k_layer_norm_eps: float = 1e-6,
        index_k_rope_cos_sin_cache: Any = None,
        *,
        indexer_k_cache: Any = None,
        mla_kv_cache: Any = None,
        mla_kv_cache_dtype: str | CacheLayout = "auto",
        mla_k_scale: Any = None,
        has_indexer: bool = True,
        index_rope_interleave: bool = False,
        scale_format: str = "float32",
        rounding: str = "fused",
    ) -> None:
        given = _validate.LayerArguments(
            q_rms_norm_w=q_rms_norm_w,
            q_rms_eps=q_rms_eps,
            kv_rms_norm_w=kv_rms_norm_w,
            kv_rms_eps=kv_rms_eps,
            k_rope_cos_sin_cache=k_rope_cos_sin_cache,
            index_k_layer_norm_w=index_k_layer_norm_w,
            index_k_layer_norm_bias=index_k_layer_norm_bias,
            index_k_layer_norm_eps=index_k_layer_norm_eps,
            index_k_rope_cos_sin_cache=index_k_rope_cos_sin_cache,
            indexer_k_cache=indexer_k_cache,
            mla_kv_cache=mla_kv_cache,
            mla_kv_cache_dtype=mla_kv_cache_dtype,
            mla_k_scale=mla_k_scale,
            has_indexer=has_indexer,
            index_rope_interleave=index_rope_interleave,
            scale_format=scale_format,
            rounding=rounding,
        )
        self._prepare("FusedNormRope", given, lasting=True)

    def _prepare(self, operation: str, given: _validate.LayerArguments, *, lasting: bool) -> None:
        self._plan: NormRopeLayerPlan
        self._plan, self._layer = _validate.norm_rope_layer(operation, given, live=lasting)
        self._backend = backends.for_device(self._plan.device)
        self._target = self._backend.norm_rope_target(self._plan, self._layer, lasting=lasting)
        self._shortcuts = Shortcuts()

    @classmethod
    def _for_one_call(cls, operation: str, given: _validate.LayerArguments) -> FusedNormRope:
        """Make one whose messages name `operation`, and which need not count."""
        made = cls.__new__(cls)
        made._prepare(operation, given, lasting=False)
        return made

    def __call__(
        self,
        positions: Any,
        q_c: Any,
        kv_c: Any,
        k_pe: Any,
        index_k: Any = None,
        topk_indices_buffer: Any = None,
        slot_mapping: Any = None,
        *,
        indexer_slot_mapping: Any = None,
        q_c_out: Any = None,
        kv_c_out: Any = None,
        k_pe_out: Any = None,
        stream: Any = None,
    ) -> Any:
        """Norm, rotate and store a step's tokens; all as for `fused_norm_rope`.

        Parameters
        ----------
        positions : int32 or int64 array [T']
        q_c, kv_c, k_pe : array [T', Q], [T', R], [T', P]
        index_k : array [T', 128], optional
        topk_indices_buffer : int32 or int64 array [T', K], optional
        slot_mapping : int32 or int64 array [T], optional
        indexer_slot_mapping : int32 or int64 array [T'], optional
        q_c_out, kv_c_out, k_pe_out : array, optional
        stream : object, optional

        Returns
        -------
        array [T, Q]
            `q_c_out`, or a new array.
        """
        arrays = (
            positions,
            q_c,
            kv_c,
            k_pe,
            index_k,
            topk_indices_buffer,
            slot_mapping,
            indexer_slot_mapping,
            q_c_out,
            kv_c_out,
            k_pe_out,
        )
        made = UNKNOWN if stream is not None else self._shortcuts.run(None, *arrays)
        if made is UNKNOWN:
            made, learned = self._run(arrays, stream)
            self._shortcuts.learn(learned, None, *arrays)
        return made if q_c_out is None else q_c_out

    def _run(self, arrays: Sequence[Any], stream: Any) -> tuple[Any, Launch | None]:
        """Do a step; return the normed query, and what does the same by addresses."""
        plan, inputs = _validate.norm_rope_step(
            self._plan, self._layer, _validate.StepArguments(*arrays)
        )
        if plan.layer.device.kind == "cpu":
            _validate.host_stream(plan.operation, stream)
        made = self._backend.norm_rope(plan, inputs, self._target, stream)
        return made, self._backend.norm_rope_launcher(plan, inputs, self._target)

    def warmup(self) -> None:
        """Compile and load what calls need, so that the first one can be captured in a graph."""
        self._backend.warmup_norm_rope(self._plan, self._target)

    def stats(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return the counters since the object was made, after waiting for the device.

        Returns
        -------
        dict of int64 array [2]
            For the MLA cache and the indexer cache, ``slots_out_of_range`` and
            ``positions_out_of_range``: tokens whose row was not stored for that reason.
        """
        return self._target.counts()

    def check(self) -> None:
        """Raise for the first row that could not be stored since the last check, after waiting.

        Raises
        ------
        ValueError
            For a slot beyond a cache or a position beyond its RoPE table (the message names
            cache, token and slot), and for a scale that is not finite and > 0.
        """
        texts = {
            "slot": "slots lie beyond the {cache} and were not written",
            "position": "positions lie beyond the RoPE table of the {cache}",
        }
        problems = [
            texts[error.kind].format(cache=_CACHES[error.layer])
            + f", first: token {error.token}, slot {error.slot}"
            for error in self._target.take_errors()
        ]
        scale = self._target.scale_value()
        if scale is not None and not (math.isfinite(scale) and scale > 0):
            problems.append(f"the scale of the MLA cache must be finite and > 0, got {scale}")
        if problems:
            raise ValueError("check: " + "; ".join(problems))

    def __repr__(self) -> str:
        plan = self._plan
        caches = [
            f"{name} as {cache.layout.name}"
            for name, cache in zip(_CACHES, (plan.mla_cache, plan.indexer_cache), strict=True)
            if cache is not None
        ]
        return f"FusedNormRope({', '.join(caches) or 'no cache'}, {plan.device})"


def fused_norm_rope(
    positions: Any,
    q_c: Any,
    q_rms_norm_w: Any,
    q_rms_eps: float,
    kv_c: Any,
    kv_rms_norm_w: Any,
    kv_rms_eps: float,
    k_pe: Any,
    k_rope_cos_sin_cache: Any,
    index_k: Any,
    index_k_layer_norm_w: Any,
    index_k_layer_norm_bias: Any,
    index_k_layer_norm_eps: float,
    index_k_rope_cos_sin_cache: Any,
    topk_indices_buffer: Any,
    slot_mapping: Any = None,
    indexer_k_cache: Any = None,
    mla_kv_cache: Any = None,
    mla_kv_cache_dtype: str | CacheLayout = "auto",
    mla_k_scale: Any = None,
    has_indexer: bool = True,
    index_rope_interleave: bool = False,
    q_c_out: Any = None,
    *,
    indexer_slot_mapping: Any = None,
    scale_format: str = "float32",
    rounding: str = "fused",
    kv_c_out: Any = None,
    k_pe_out: Any = None,
    stream: Any = None,
) -> Any:
    """Norm and rotate a layer's projections, and store them in its caches, in one launch.

    The query's latent part is normed. The key's latent part is normed, its rotary part rotated,
    and both are stored in the MLA cache. The indexer's key is normed, rotated, quantised and
    stored in the indexer cache. The inputs stay as they are.

    Parameters
    ----------
    positions : int32 or int64 array [T']
        Row of the RoPE tables for each token.
    q_c : array [T', Q]
        Latent part of the query, bfloat16, float16 or float32.
    q_rms_norm_w : array [Q]
        Weights may be bfloat16, float16 or float32, each of its own.
    q_rms_eps : float
    kv_c : array [T', R]
        Latent part of the key, of the dtype of `q_c`.
    kv_rms_norm_w : array [R]
    kv_rms_eps : float
    k_pe : array [T', P] or None
        Rotary part of the key, of the dtype of `q_c`, rotated in pairs (2i, 2i + 1).
    k_rope_cos_sin_cache : array [positions, P] or None
        Rows ``[cos half | sin half]``, bfloat16, float16 or float32.
    index_k : array [T', 128] or None
        The indexer's key, of the dtype of `q_c`. Needed, as the four arguments behind it, where
        `has_indexer` is true and `indexer_k_cache` is given; else not looked at.
    index_k_layer_norm_w, index_k_layer_norm_bias : array [128] or None
    index_k_layer_norm_eps : float
    index_k_rope_cos_sin_cache : array [positions, P'] or None
        Table for the leading P' elements of the indexer's key.
    topk_indices_buffer : int32 or int64 array [T', K] or None
        Its first T rows are filled with -1 where `has_indexer` is true.
    slot_mapping : int32 or int64 array [T] or None
        Row of each token in both caches. None stores nothing, as in a profiling run, but for
        the indexer's key where that has an `indexer_slot_mapping`.
    indexer_k_cache : array [num_blocks, block_size, 132] or None
        uint8 or float8_e4m3fn; a block holds the codes of all its rows, then their scales.
    mla_kv_cache : array [num_blocks, block_size, width] or None
    mla_kv_cache_dtype : str or CacheLayout
        See `get_layout`; ``auto`` is the dtype of `mla_kv_cache`. Without a cache nobody looks at
        this, nor at `mla_k_scale` and `scale_format`.
    mla_k_scale : float or array of one element, optional
        The layer's scale, float32 on a device; needed for flat fp8, ignored by other layouts.
    has_indexer : bool
        False for a layer that reuses the top-k indices of an earlier one.
    index_rope_interleave : bool
        The indexer rotates pairs (2i, 2i + 1) where true (GLM-5.2), else pairs (i, i + P'/2)
        (DeepSeek-V3.2).
    q_c_out : array [T', Q], optional
        Gets the normed query, of the dtype of `q_c`; may be `q_c` itself. Else what is written
        shares no memory with anything that is given.
    indexer_slot_mapping : int32 or int64 array [T'], optional
        Rows in the indexer cache where they are not those of `slot_mapping`.
    scale_format : {"float32", "ue8m0"}
        How ``fp8_ds_mla`` rounds its tiles' scales. The indexer's are always powers of two.
    rounding : {"fused", "staged"}
        ``fused`` rounds once, to what is stored. ``staged`` rounds to the inputs' dtype after
        each norm and after RoPE as well, as separate operations do.
    kv_c_out, k_pe_out : array [T', R], [T', P], optional
        Get the normed and the rotated part of the key, of the dtype of `q_c`; may be `kv_c` and
        `k_pe` themselves.
    stream : object, optional
        A stream of the arrays' device; by default the current one of the framework that owns the
        caches, or the normed query where there are none. None for host arrays.

    Returns
    -------
    array [T, Q]
        A new array of the framework of `q_c`; or `q_c_out` as it was given, rows behind the T-th
        included.

    Raises
    ------
    ValueError
        For a shape, stride, scale or device that does not fit; nothing is written.
    TypeError
        For a dtype or a kind of argument that does not fit; nothing is written.

    Notes
    -----
    T is the number of slots, or of positions where there are none; rows behind the T-th of longer
    inputs are padding. For a slot below 0 or beyond a cache that cache keeps its bytes, and for a
    position that is not in the table too; the outputs are computed for every token, and a rotated
    part without a position is zero. Rows have fewer than 2**28 elements.

    All arithmetic is float32, each operation rounded by itself, sums in the order of a fixed tree,
    so that all backends store the same bytes. In a row of 512 elements or more, lane l of 32 takes
    elements ``[16 * l, 16 * l + 16)`` of each 512, in a narrower one ``[4 * l, 4 * l + 4)`` of each
    128, and adds its own in rising order; then lane l adds the sum of lane ``l ^ 16``, then those
    of ``l ^ 8``, ``l ^ 4``, ``l ^ 2`` and ``l ^ 1``.

    - RMSNorm: ``(x * r) * w`` with ``r = 1 / sqrt(sum(x * x) / W + eps)``.
    - LayerNorm: ``((d * r) * w) + b`` with ``d = x - sum(x) / W`` and r of d as above.
    - RoPE: ``(a * cos - b * sin, b * cos + a * sin)``.
    - Indexer: ``sat(RNE(x / s))`` in e4m3 with ``s = 2^ceil(log2(max(amax, 1e-4) / 448))``, amax
      the largest magnitude of the row that is no NaN.

    The MLA cache then gets what `concat_and_cache_mla` would store of these values. A NaN is
    0x7F in fp8, 0x7FFF in 16 bits.

    Whether arrays share memory is on a GPU looked at when arrays of these shapes, strides and
    dtypes come for the first time.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_mla import fused_norm_rope
    >>> ones, table = np.ones(8, np.float32), np.array([[1.0, 0.0]], np.float32)
    >>> q_c = np.array([[1, 3] * 4], np.float32)
    >>> q = fused_norm_rope(
    ...     np.array([0]), q_c, ones, 1e-6, q_c[:, :4], ones[:4], 1e-6, q_c[:, :2], table,
    ...     None, None, None, 1e-6, None, None, has_indexer=False)
    >>> q.round(3)[0, :2]
    array([0.447, 1.342], dtype=float32)
    """
    scale, scale_array = by_kind(mla_k_scale)
    options = (
        q_rms_eps,
        kv_rms_eps,
        index_k_layer_norm_eps,
        mla_kv_cache_dtype,
        scale,
        has_indexer,
        index_rope_interleave,
        scale_format,
        rounding,
    )
    step = (
        positions,
        q_c,
        kv_c,
        k_pe,
        index_k,
        topk_indices_buffer,
        slot_mapping,
        indexer_slot_mapping,
        q_c_out,
        kv_c_out,
        k_pe_out,
    )
    arrays = (
        *step,
        q_rms_norm_w,
        kv_rms_norm_w,
        k_rope_cos_sin_cache,
        index_k_layer_norm_w,
        index_k_layer_norm_bias,
        index_k_rope_cos_sin_cache,
        mla_kv_cache,
        scale_array,
        indexer_k_cache,
    )
    made = UNKNOWN if stream is not None else _calls.run(options, *arrays)
    if made is not UNKNOWN:
        return made if q_c_out is None else q_c_out
    layer = FusedNormRope._for_one_call(
        "fused_norm_rope",
        _validate.LayerArguments(
            q_rms_norm_w=q_rms_norm_w,
            q_rms_eps=q_rms_eps,
            kv_rms_norm_w=kv_rms_norm_w,
            kv_rms_eps=kv_rms_eps,
            k_rope_cos_sin_cache=k_rope_cos_sin_cache,
            index_k_layer_norm_w=index_k_layer_norm_w,
            index_k_layer_norm_bias=index_k_layer_norm_bias,
            index_k_layer_norm_eps=index_k_layer_norm_eps,
            index_k_rope_cos_sin_cache=index_k_rope_cos_sin_cache,
            indexer_k_cache=indexer_k_cache,
            mla_kv_cache=mla_kv_cache,
            mla_kv_cache_dtype=mla_kv_cache_dtype,
            mla_k_scale=mla_k_scale,
            has_indexer=has_indexer,
            index_rope_interleave=index_rope_interleave,
            scale_format=scale_format,
            rounding=rounding,
        ),
    )
    made, learned = layer._run(step, stream)
    _calls.learn(learned, options, *arrays)
    return made if q_c_out is None else q_c_out
