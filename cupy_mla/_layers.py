"""What GroupedCacheWriter.from_layers takes from a model's attention layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from . import _validate, backends, dtypes
from ._arrays import CPU, ArrayRef, DeviceId
from .errors import reject_type, reject_value
from .layouts import CacheLayout, build_layout, canonical_name, check_sizes

_OPERATION = "from_layers"

#: Where a layer, or its ``self_attn``, has what is needed: dotted paths, the first one found wins.
ATTRIBUTES: Mapping[str, tuple[str, ...]] = {
    "kv_cache": ("kv_cache",),
    "kv_cache_dtype": ("kv_cache_dtype",),
    "k_scale": ("k_scale", "_k_scale"),
    "kv_lora_rank": ("kv_lora_rank",),
    "rope_dim": ("rope_dim", "qk_rope_head_dim"),
    "norm_weight": ("kv_a_layernorm.weight",),
    "norm_eps": ("kv_a_layernorm.variance_epsilon", "kv_a_layernorm.eps"),
    "cos_sin_cache": ("rotary_emb.cos_sin_cache",),
    "is_neox": ("rotary_emb.is_neox_style",),
}

_MISSING = object()


@dataclass(frozen=True)
class LayerContext:
    """What `insert_context` uses where its caller gives no weight or no table.

    Attributes
    ----------
    norm_weight : ArrayRef or None
        ``[L, R]``, a copy of the layers' weights.
    eps : float
        Of all layers' norms.
    cos_sin_cache : array or None
        Table of the first layer, as it is.
    is_neox : bool
    """

    norm_weight: ArrayRef | None
    eps: float
    cos_sin_cache: Any
    is_neox: bool


NO_CONTEXT = LayerContext(None, 0.0, None, False)


class _Stacks(Protocol):
    """A backend, which can copy vectors into one array."""

    def stack(self, rows: Sequence[ArrayRef]) -> ArrayRef: ...


@dataclass(frozen=True)
class Layers:
    """What was found in a model's layers, one entry a layer in each list."""

    caches: list[Any]
    cache_dtypes: list[Any]
    scales: list[Any]
    kv_lora_rank: int
    rope_dim: int
    norm_weights: list[ArrayRef] | None
    eps: float
    tables: list[Any]
    is_neox: bool

    def context(self, backend: _Stacks, device: DeviceId) -> LayerContext:
        """Copy the norms' weights, so that the layers may change or go.

        Tables of several layers have to hold the same; those that are not one array are compared,
        which waits for the device. Weights are where the caches are (`device`), or on the host.
        """
        for layer, ref in enumerate(self.norm_weights or ()):
            if ref.device not in (None, CPU):
                argument = f"layers[{layer}].norm_weight"
                _validate.same_device(_OPERATION, argument, ref, device, "the caches")
        _check_tables(self.tables)
        weight = None if self.norm_weights is None else backend.stack(self.norm_weights)
        table = self.tables[0] if self.tables else None
        return LayerContext(weight, self.eps, table, self.is_neox)


def read(layers: object, attributes: object) -> Layers:
    """Take caches, dtypes, scales, sizes and norms out of layers, without copying anything.

    Parameters
    ----------
    layers : iterable of objects
    attributes : mapping or None
        Dotted paths that replace those of `ATTRIBUTES`, by the names there.
    """
    if not isinstance(layers, Iterable):
        reject_type(_OPERATION, "layers", "be a sequence of layers", type(layers).__name__)
    found = list(layers)
    if not found:
        reject_value(_OPERATION, "layers", "have at least one layer", "none")
    paths = dict(ATTRIBUTES)
    if attributes is not None and not isinstance(attributes, Mapping):
        got = type(attributes).__name__
        reject_type(_OPERATION, "attributes", "be a mapping of names to dotted paths", got)
    for name, path in ({} if attributes is None else attributes).items():
        if name not in ATTRIBUTES:
            known = ", ".join(ATTRIBUTES)
            reject_value(_OPERATION, "attributes", f"have keys among {known}", repr(name))
        if not isinstance(path, str):
            reject_type(_OPERATION, f"attributes[{name!r}]", "be a dotted path", repr(path))
        paths[name] = (path,)
    rank, rope = _shared_sizes(found, paths)
    names = [_get(layer, paths["kv_cache_dtype"], "auto") for layer in found]
    weights, eps = _norms(found, paths, rank)
    tables, is_neox = _rotary(found, paths) if rope else ([], False)
    return Layers(
        [_cache(layer, number, paths) for number, layer in enumerate(found)],
        names,
        [
            _scale(layer, number, paths, name, (rank, rope))
            for number, (layer, name) in enumerate(zip(found, names, strict=True))
        ],
        rank,
        rope,
        weights,
        eps,
        tables,
        is_neox,
    )


def _get(layer: Any, paths: Sequence[str], default: Any = _MISSING) -> Any:
    """Return the first attribute that the layer or its ``self_attn`` has."""
    for root in (layer, getattr(layer, "self_attn", None)):
        for path in paths:
            value = root
            for name in path.split("."):
                value = getattr(value, name, _MISSING)
            if value is not _MISSING:
                return value
    return default


def _need(layer: Any, number: int, paths: Mapping[str, Sequence[str]], name: str) -> Any:
    value = _get(layer, paths[name])
    if value is _MISSING:
        places = " or ".join(paths[name])
        reject_type(
            _OPERATION,
            f"layers[{number}]",
            f"have the attribute {places} (see the argument attributes)",
            f"{type(layer).__name__} without it",
        )
    return value


def _cache(layer: Any, number: int, paths: Mapping[str, Sequence[str]]) -> Any:
    value = _need(layer, number, paths, "kv_cache")
    # Some engines keep a list with the one cache of each pipeline stage.
    return value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value


def _shared_sizes(layers: Sequence[Any], paths: Mapping[str, Sequence[str]]) -> tuple[int, int]:
    sizes = [
        check_sizes(
            f"{_OPERATION}: layer {number}",
            _need(layer, number, paths, "kv_lora_rank"),
            _need(layer, number, paths, "rope_dim"),
        )
        for number, layer in enumerate(layers)
    ]
    for number, (rank, rope) in enumerate(sizes):
        for name, own, first in (
            ("kv_lora_rank", rank, sizes[0][0]),
            ("rope_dim", rope, sizes[0][1]),
        ):
            if own != first:
                _reject_different(number, name, first, own)
    return sizes[0]


def _reject_different(number: int, name: str, first: object, own: object) -> None:
    reject_value(_OPERATION, f"layers[{number}]", f"have the {name} of layer 0 ({first})", own)


def _scale(
    layer: Any,
    number: int,
    paths: Mapping[str, Sequence[str]],
    cache_dtype: Any,
    sizes: tuple[int, int],
) -> Any:
    """Return the layer's scale, None where its layout has none of its own."""
    layout = cache_dtype
    if not isinstance(layout, CacheLayout):
        name = canonical_name(f"{_OPERATION}: layer {number}", layout)
        if name == "auto":
            return None
        layout = build_layout(f"{_OPERATION}: layer {number}", name, *sizes, "float32")
    return _need(layer, number, paths, "k_scale") if layout.needs_scale else None


def _norms(
    layers: Sequence[Any], paths: Mapping[str, Sequence[str]], rank: int
) -> tuple[list[ArrayRef] | None, float]:
    """Return the norms' weights and their one eps; None where no layer has a norm."""
    if all(_get(layer, paths["norm_weight"]) is _MISSING for layer in layers):
        return None, 0.0
    weights: list[ArrayRef] = []
    numbers: list[float] = []
    for number, layer in enumerate(layers):
        where = f"layers[{number}]"
        ref = _validate.array(_OPERATION, where, _need(layer, number, paths, "norm_weight"))
        if ref.shape != (rank,):
            reject_value(
                _OPERATION, where, f"have a norm weight of shape [{rank}]", list(ref.shape)
            )
        if ref.dtype not in dtypes.INPUT_DTYPES:
            names = " or ".join(dtype.name for dtype in dtypes.INPUT_DTYPES)
            reject_type(_OPERATION, where, f"have a norm weight of {names}", ref.dtype.name)
        if weights and ref.dtype != weights[0].dtype:
            first = weights[0].dtype.name
            reject_type(_OPERATION, where, f"have a norm weight of {first} as layer 0", ref.dtype)
        given = _need(layer, number, paths, "norm_eps")
        eps = _validate.number(_OPERATION, f"eps of {where}", given, least=0)
        if numbers and eps != numbers[0]:
            _reject_different(number, "eps", _get(layers[0], paths["norm_eps"]), given)
        weights.append(ref)
        numbers.append(eps)
    return weights, numbers[0]


def _rotary(layers: Sequence[Any], paths: Mapping[str, Sequence[str]]) -> tuple[list[Any], bool]:
    """Return the RoPE table of each layer, as it is, and the style of all."""
    styles: list[bool] = []
    for number, layer in enumerate(layers):
        style = _get(layer, paths["is_neox"], False)
        if not isinstance(style, (bool, np.bool_, int)):
            got = type(style).__name__
            reject_type(_OPERATION, f"layers[{number}]", "have a boolean is_neox", got)
        styles.append(bool(style))
        if styles[number] != styles[0]:
            _reject_different(number, "is_neox", styles[0], styles[number])
    return [_get(layer, paths["cos_sin_cache"], None) for layer in layers], styles[0]


def _check_tables(tables: Sequence[Any]) -> None:
    """Refuse layers whose RoPE table is another one than that of the first layer."""
    first: ArrayRef | None = None
    host: bytes | None = None
    for number, table in enumerate(tables):
        where = f"layers[{number}]"
        if (table is None) is not (tables[0] is None):
            texts = ["none" if each is None else "a table" for each in (tables[0], table)]
            _reject_different(number, "cos_sin_cache", *texts)
        if table is None or (number and table is tables[0]):
            continue
        ref = _validate.array(_OPERATION, f"{where}'s cos_sin_cache", table)
        if first is None:
            first = ref
            continue
        if (ref.ptr, ref.shape, ref.strides, ref.dtype) == (
            first.ptr,
            first.shape,
            first.strides,
            first.dtype,
        ):
            continue
        looks = [f"{each.dtype.name} {list(each.shape)}" for each in (first, ref)]
        if looks[0] != looks[1]:
            _reject_different(number, "cos_sin_cache", *looks)
        host = host or _host_bytes(first)
        if _host_bytes(ref) != host:
            _reject_different(number, "cos_sin_cache", looks[0], "one of other values")


def _host_bytes(ref: ArrayRef) -> bytes:
    return backends.for_device(ref.device or CPU).host_copy(ref).tobytes()
