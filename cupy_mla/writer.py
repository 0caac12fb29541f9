"""GroupedCacheWriter: the caches of all layers of a model, written together."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from . import _layers, _validate, backends
from ._arrays import ArrayRef
from ._looks import UNKNOWN
from ._plan import InsertInputs, InsertPlan, Target, layers_by_layout
from ._shortcuts import Shortcuts
from .errors import check_flag, reject_type, reject_value
from .layouts import CacheLayout, check_sizes

__all__ = ["GroupedCacheWriter"]


class GroupedCacheWriter:
    """Stores each token in the caches of several layers, one launch for all layers of a layout.

    Everything that does not change from step to step is validated once, here: cache geometry,
    layouts and scales. On a CUDA device they live in tables in device memory, which `rebind` and
    `update_scales` rewrite in place, in stream order; bound callables and captured graphs follow.

    Parameters
    ----------
    kv_caches : list or tuple of L arrays
        ``[num_blocks, block_size, width]`` each, with its own number of blocks, block size and
        strides, all on one device; no two overlap. One and the same cache may serve several
        layers: then slots keep their rows apart, and of two rows for one slot either may stay.
        Their memory is held: give a tensor whose storage was replaced (``.data =``, a reload of
        weights) again by `rebind`, a scale by `update_scales`.
    kv_cache_dtype : str, CacheLayout, or a sequence of L of them
        See `get_layout`; ``auto`` is the dtype of each cache.
    kv_scales : None, sequence of L, or float32 array [L]
        One scale a layer of flat fp8, None for a layer of another layout. Numbers, and host
        arrays for caches on a GPU, are copied; they must be finite and > 0. Arrays on the
        caches' own device (one of [L], or L of one element, such as a layer's ``k_scale``) are
        referenced: each insert reads what they hold then, so they cannot go stale.
    kv_lora_rank, rope_dim : int
        Elements of the latent and of the rotary part; rope_dim 0 for models without RoPE.
    scale_format : {"float32", "ue8m0"}
        How ``fp8_ds_mla`` rounds its tiles' scales; a `CacheLayout` has its own.
    collect_stats : bool
        Whether stored rows, padding, NaN/Inf and saturated elements are counted at each insert.
        Slots beyond a cache are counted always.

    Attributes
    ----------
    layouts : tuple of CacheLayout
        One a layer.
    num_layers : int
    num_launches : int
        Kernel launches an insert takes on a GPU: one a layout.

    Raises
    ------
    ValueError
        For a shape, stride, scale or device that does not fit; the message names the layer.
    TypeError
        For a dtype or a kind of argument that does not fit.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_mla import GroupedCacheWriter, get_layout, read_slots
    >>> caches = [get_layout("fp8").empty(4, 16) for _ in range(5)]
    >>> writer = GroupedCacheWriter(caches, "fp8", [0.5, 1.0, 1.0, 2.0, 2.0])
    >>> kv = np.ones((5, 3, 576), np.float32)
    >>> writer.insert(kv[..., :512], kv[..., 512:], np.array([17, 3, -1]))
    >>> read_slots(caches[4], np.array([17]), "fp8", 2.0)[0, :3]
    array([1., 1., 1.], dtype=float32)
    >>> writer.num_launches
    1
    """

    def __init__(
        self,
        kv_caches: Sequence[Any],
        kv_cache_dtype: str | CacheLayout | Sequence[str | CacheLayout] = "auto",
        kv_scales: Any = None,
        *,
        kv_lora_rank: int = 512,
        rope_dim: int = 64,
        scale_format: str = "float32",
        collect_stats: bool = False,
    ) -> None:
        operation = "GroupedCacheWriter"
        self._sizes = check_sizes(operation, kv_lora_rank, rope_dim)
        arrays = _validate.layer_list(operation, "kv_caches", kv_caches)
        names: Sequence[Any]
        if isinstance(kv_cache_dtype, (str, CacheLayout)):
            names = [kv_cache_dtype] * len(arrays)
        else:
            names = _validate.layer_list(operation, "kv_cache_dtype", kv_cache_dtype, len(arrays))
        caches, plans, self._device = _validate.layer_caches(
            operation, arrays, names, self._sizes, scale_format
        )
        self.layouts = tuple(plan.layout for plan in plans)
        self.num_layers = len(plans)
        self._groups = layers_by_layout(self.layouts)
        self.num_launches = len(self._groups)
        scales = _validate.writer_scales(operation, kv_scales, self.layouts, self._device)
        self._given_scales = _given(kv_scales)
        self._written = _written(caches)
        self._collect_stats = check_flag(operation, "collect_stats", collect_stats)
        self._backend = backends.for_device(self._device)
        self._target = self._backend.target(
            caches, plans, scales, collect_stats=self._collect_stats
        )
        self._shortcuts = Shortcuts()
        self._context = _layers.NO_CONTEXT

    @classmethod
    def from_layers(
        cls,
        layers: Iterable[Any],
        *,
        attributes: Mapping[str, str] | None = None,
        scale_format: str = "float32",
        collect_stats: bool = False,
    ) -> GroupedCacheWriter:
        """Make a writer for the caches of a model's attention layers.

        A layer, or its ``self_attn``, has ``kv_cache``, ``kv_cache_dtype`` ("auto" where it is
        missing), ``kv_lora_rank``, ``rope_dim`` or ``qk_rope_head_dim``, and for flat fp8
        ``k_scale`` or ``_k_scale``. For `insert_context` it may have ``kv_a_layernorm`` with
        ``weight`` and ``variance_epsilon`` or ``eps``, and ``rotary_emb`` with ``cos_sin_cache``
        and ``is_neox_style``.

        Parameters
        ----------
        layers : iterable of L objects
            All of one kv_lora_rank, rope_dim, eps, RoPE table and style.
        attributes : mapping of str to str, optional
            Dotted paths that replace those above, which are then not looked at; each starts at
            the layer or its ``self_attn``: ``{"kv_cache": "mla.cache"}``. Keys are ``kv_cache``,
            ``kv_cache_dtype``, ``k_scale``, ``kv_lora_rank``, ``rope_dim``, ``norm_weight``,
            ``norm_eps``, ``cos_sin_cache`` and ``is_neox``.
        scale_format : {"float32", "ue8m0"}
            How ``fp8_ds_mla`` rounds its tiles' scales; a `CacheLayout` has its own.
        collect_stats : bool
            As for the constructor.

        Returns
        -------
        GroupedCacheWriter
            Scales on the caches' device are referenced, other ones copied, as by the constructor.
            Norm weights are copied; the first layer's RoPE table is referenced.

        Raises
        ------
        ValueError, TypeError
            For a layer that lacks something, has what does not fit or does not go with the first
            one; the message names the layer.

        Examples
        --------
        >>> from types import SimpleNamespace
        >>> import numpy as np
        >>> from cupy_mla import GroupedCacheWriter, get_layout
        >>> layers = [
        ...     SimpleNamespace(
        ...         kv_cache=get_layout("fp8").empty(4, 16), kv_cache_dtype="fp8", k_scale=scale,
        ...         kv_lora_rank=512, qk_rope_head_dim=64)
        ...     for scale in (0.5, 2.0)]
        >>> GroupedCacheWriter.from_layers(layers).kv_scales
        (0.5, 2.0)
        """
        found = _layers.read(layers, attributes)
        writer = cls(
            found.caches,
            found.cache_dtypes,
            found.scales,
            kv_lora_rank=found.kv_lora_rank,
            rope_dim=found.rope_dim,
            scale_format=scale_format,
            collect_stats=collect_stats,
        )
        writer._context = found.context(writer._backend, writer._device)
        return writer

    @property
    def kv_scales(self) -> Any:
        """The scales as they were given: one array, or a tuple with None where a layer has none."""
        return (None,) * self.num_layers if self._given_scales is None else self._given_scales

    def insert(self, kv_c: Any, k_pe: Any, slot_mapping: Any, *, stream: Any = None) -> None:
        """Store each token's row in each layer's cache.

        Parameters
        ----------
        kv_c : array [L, T', R]
            Latent parts; any strides but along the last axis, so slices of one projection
            ``[T, L, R + P]`` too. Rows behind the T-th are padding.
        k_pe : array [L, T', P] or None
            Rotary parts, of the dtype of `kv_c`.
        slot_mapping : array [T] or [L, T], list of L arrays [T], or None
            Rows for the tokens, int32 or int64. One [T] serves all layers; None in a list leaves
            that layer out; None alone does nothing.
        stream : object, optional
            A stream of the caches' device; None for host arrays.

        Raises
        ------
        ValueError, TypeError
            For arrays that do not fit; nothing is written.

        Notes
        -----
        Nothing that is read may share memory with a cache. On a GPU that is looked at when arrays
        of their shapes, strides and dtypes come for the first time, not at each step.
        """
        if slot_mapping is None:
            return
        shortcuts = self._shortcuts
        if stream is None and shortcuts.run_step(kv_c, k_pe, slot_mapping) is not UNKNOWN:
            return
        plan, inputs = self._step("insert", kv_c, k_pe, slot_mapping)
        if self._device.kind == "cpu":
            _validate.host_stream("insert", stream)
        self._backend.insert(plan, inputs, self._target, stream)
        launch = self._backend.launcher(plan, inputs, self._target)
        shortcuts.learn(launch, None, kv_c, k_pe, slot_mapping)

    def bind(self, kv_c: Any, k_pe: Any, slot_mapping: Any) -> Callable[..., None]:
        """Validate fixed buffers once; the returned callable inserts what they hold at each call.

        Parameters
        ----------
        kv_c, k_pe, slot_mapping
            As for `insert`. The buffers are kept alive.

        Returns
        -------
        callable
            Takes an optional ``stream``. It follows `rebind` and `update_scales`.
        """
        if slot_mapping is None:
            reject_type("bind", "slot_mapping", "be an array or a list of arrays", "None")
        plan, inputs = self._step("bind", kv_c, k_pe, slot_mapping)
        return _BoundInsert(self._backend, plan, inputs, self._target)

    def _step(
        self, operation: str, kv_c: Any, k_pe: Any, slot_mapping: Any
    ) -> tuple[InsertPlan, InsertInputs]:
        plan, inputs = _validate.insert_inputs(
            operation,
            kv_c,
            k_pe,
            slot_mapping,
            num_layers=self.num_layers,
            sizes=self._sizes,
            device=self._device,
            owner="kv_caches",
            caches=self._written,
        )
        _validate.storable(plan, self.layouts, "kv_c")
        return plan, inputs

    def insert_context(
        self,
        kv: Any,
        positions: Any,
        slot_mapping: Any,
        norm_weight: Any,
        cos_sin_cache: Any,
        *,
        eps: float = 1e-6,
        is_neox: bool = False,
        rounding: str = "fused",
        stream: Any = None,
    ) -> None:
        """Norm and rotate one projection for all layers, and store it in each layer's cache.

        Parameters
        ----------
        kv : array [T', L, R + P] or [T', L * (R + P)]
            Latent and rotary parts as a projection makes them, bfloat16, float16 or float32; rows
            behind the T-th are padding.
        positions : int32 or int64 array [T'], or None
            Row of the RoPE table for each token; None where rope_dim is 0.
        slot_mapping : array [T] or [L, T], list of L arrays [T], or None
            As for `insert`.
        norm_weight : array [L, R], or None
            Weight of each layer's RMSNorm, bfloat16, float16 or float32. None takes those of the
            layers that the writer was made from, and their eps in place of `eps`.
        cos_sin_cache : array [positions, P], or None
            Rows ``[cos half | sin half]``, bfloat16, float16 or float32; None where rope_dim is
            0. Else None takes that of the layers that the writer was made from, and their style
            in place of `is_neox`.
        eps : float
        is_neox : bool
            Rotates pairs (i, i + P/2) where true, else pairs (2i, 2i + 1).
        rounding : {"fused", "staged"}
            ``fused`` rounds once, to what is stored. ``staged`` rounds to the dtype of `kv` after
            the norm and after RoPE as well, as separate operations do.
        stream : object, optional
            A stream of the caches' device; None for host arrays.

        Raises
        ------
        ValueError, TypeError
            For arrays that do not fit; nothing is written.

        Notes
        -----
        The arithmetic is that of `fused_norm_rope`. The row of a token whose position is not in
        the table is not stored, and counted as ``positions_out_of_range``; where its slot is not
        in the cache either, that alone is counted. With `collect_stats`, NaN, Inf and saturated
        elements are counted among the values that are stored, before their last rounding.

        Examples
        --------
        >>> import numpy as np
        >>> from cupy_mla import GroupedCacheWriter, read_slots
        >>> caches = [np.zeros((1, 4, 6), np.float32) for _ in range(2)]
        >>> writer = GroupedCacheWriter(caches, kv_lora_rank=4, rope_dim=2)
        >>> table = np.array([[1.0, 0.0], [0.0, 1.0]], np.float32)  # angles 0 and 90 degrees
        >>> weight = np.array([[1.0] * 4, [2.0] * 4], np.float32)
        >>> kv = np.full((1, 2, 6), 3.0, np.float32)
        >>> writer.insert_context(kv, np.array([1]), np.array([2]), weight, table)
        >>> read_slots(caches[1], np.array([2])).round(3)
        array([[ 2.,  2.,  2.,  2., -3.,  3.]], dtype=float32)
        """
        if slot_mapping is None:
            return
        own = self._context
        if norm_weight is None and own.norm_weight is not None:
            norm_weight, eps = own.norm_weight.owner, own.eps
        if cos_sin_cache is None and own.cos_sin_cache is not None:
            cos_sin_cache, is_neox = own.cos_sin_cache, own.is_neox
        options = ("insert_context", eps, is_neox, rounding)
        arrays = (kv, positions, slot_mapping, norm_weight, cos_sin_cache)
        if stream is None and self._shortcuts.run(options, *arrays) is not UNKNOWN:
            return
        plan, inputs = _validate.context(
            "insert_context",
            kv,
            positions,
            slot_mapping,
            norm_weight,
            cos_sin_cache,
            eps=eps,
            is_neox=is_neox,
            rounding_rule=rounding,
            num_layers=self.num_layers,
            sizes=self._sizes,
            caches=self._written,
            device=self._device,
        )
        _validate.storable(plan, self.layouts, "kv")
        if plan.device.kind == "cpu":
            _validate.host_stream(plan.operation, stream)
        self._backend.insert_context(plan, inputs, self._target, stream)
        launch = self._backend.context_launcher(plan, inputs, self._target)
        self._shortcuts.learn(launch, options, *arrays)

    def rebind(self, kv_caches: Sequence[Any]) -> None:
        """Write to other caches from now on: bound callables and captured graphs follow.

        Parameters
        ----------
        kv_caches : sequence of L arrays
            Of the same layouts and on the same device; blocks, block sizes and strides may differ.
        """
        operation = "rebind"
        arrays = _validate.layer_list(operation, "kv_caches", kv_caches, self.num_layers)
        caches, plans, device = _validate.layer_caches(
            operation, arrays, self.layouts, self._sizes, "float32"
        )
        if device != self._device:
            reject_value(
                operation, "kv_caches", f"be on the writer's device {self._device}", device
            )
        self._target.rebind(caches, plans)
        self._written = _written(caches)
        self._shortcuts.forget()

    def update_scales(self, kv_scales: Any) -> None:
        """Use other scales from now on: bound callables and captured graphs follow.

        Parameters
        ----------
        kv_scales
            As for the constructor.
        """
        scales = _validate.writer_scales("update_scales", kv_scales, self.layouts, self._device)
        self._target.update_scales(scales)
        self._shortcuts.forget()
        self._given_scales = _given(kv_scales)

    def warmup(self) -> None:
        """Compile and load what inserts need, so that the first one can be captured in a graph.

        What `insert_context` needs, too, where the writer was made from layers with norms.
        """
        self._backend.warmup(self._target)
        if self._context.norm_weight is not None:
            self._backend.warmup_context(self._target)

    def stats(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return the counters since the writer was made, after waiting for the device.

        Returns
        -------
        dict of int64 array [L]
            ``slots_out_of_range`` and ``positions_out_of_range``; with `collect_stats` also
            ``rows_written``, ``slots_padding`` (slots below 0), ``nonfinite_elements`` (NaN or
            Inf among what was stored) and ``saturated_elements`` (fp8 quotients that a cast
            without saturation would turn into NaN or Inf).
        """
        return self._target.counts()

    def check(self) -> None:
        """Raise for the first thing that went wrong since the last check, after waiting.

        Raises
        ------
        ValueError
            For a slot beyond a cache (layer, token, slot), a position beyond the RoPE table, a
            scale that is not finite and > 0 (layer), and, with `collect_stats`, a NaN or Inf
            that was stored (layer, token, slot). Counters stay as they are; the next check
            reports only what happens after this one. Which of several events is the first is
            unspecified on a GPU; on NumPy it is the lowest layer, then token, of the first insert.
        """
        problems = []
        for error in self._target.take_errors():
            where = f"layer {error.layer}, token {error.token}, slot {error.slot}"
            problems.append(
                {
                    "slot": f"slots lie beyond the cache and were not written, first: {where}",
                    "position": f"positions lie beyond the RoPE table, first: {where}",
                    "nonfinite": f"a NaN or Inf was stored, first: {where}",
                }[error.kind]
            )
        for layer, value in enumerate(self._target.scale_values()):
            if self.layouts[layer].needs_scale and not (np.isfinite(value) and value > 0):
                problems.append(f"the scale of layer {layer} must be finite and > 0, got {value}")
        if problems:
            raise ValueError("check: " + "; ".join(problems))

    def explain(self) -> str:
        """Return in words which layers go together in a launch, and why not all do."""
        lines = [
            f"GroupedCacheWriter: {self.num_layers} layers on {self._device}, "
            + self._backend.explain(tuple(self._groups.values()))
            + f"{self.num_launches} launch{'es' if self.num_launches != 1 else ''} an insert"
        ]
        for number, (layout, layers) in enumerate(self._groups.items(), 1):
            names = ", ".join(map(str, layers))
            lines.append(
                f"  launch {number}: layer{'s' if len(layers) > 1 else ''} {names} as "
                f"{layout.name} ({layout.row_bytes}-byte rows)"
            )
        if self.num_launches > 1:
            lines.append(
                "  A kernel is compiled for one layout, so each layout has a launch of its own."
            )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Table of the launches for Jupyter."""
        rows = "".join(
            f"<tr><td>{number}</td><td>{', '.join(map(str, layers))}</td>"
            f"<td>{html.escape(layout.name)}</td><td>{layout.row_bytes}</td>"
            f"<td>{layout.scale_format or ('one a layer' if layout.needs_scale else 'none')}</td>"
            "</tr>"
            for number, (layout, layers) in enumerate(self._groups.items(), 1)
        )
        return (
            f"<table><caption>{html.escape(repr(self))}</caption><tr><th>launch</th><th>layers</th>"
            f"<th>layout</th><th>bytes a row</th><th>scales</th></tr>{rows}</table>"
        )

    def __repr__(self) -> str:
        names = ", ".join(dict.fromkeys(layout.name for layout in self.layouts))
        return f"GroupedCacheWriter({self.num_layers} layers, {names}, {self._device})"


class _BoundInsert:
    """Inserts what fixed buffers hold, at each call."""

    def __init__(
        self, backend: backends.Backend, plan: InsertPlan, inputs: InsertInputs, target: Target
    ) -> None:
        self._backend, self._plan, self._inputs, self._target = backend, plan, inputs, target
        self._framework = target.framework
        self._launch = backend.bound_launcher(plan, inputs, target)

    def __call__(self, stream: Any = None) -> None:
        # Caches of another framework, after a rebind, have another current stream.
        if (
            stream is None
            and self._launch is not None
            and self._target.framework == self._framework
        ):
            self._launch()
            return
        if self._plan.device.kind == "cpu":
            _validate.host_stream(self._plan.operation, stream)
        self._backend.insert(self._plan, self._inputs, self._target, stream)


def _given(kv_scales: Any) -> Any:
    """Return scales as the caller will find them again: his list may change, its copy does not."""
    return tuple(kv_scales) if isinstance(kv_scales, list) else kv_scales


def _written(caches: Sequence[ArrayRef]) -> _validate.Written:
    names = [f"kv_caches[{layer}]" for layer in range(len(caches))]
    return _validate.Written.of(names, caches)
