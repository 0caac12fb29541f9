"""What GroupedCacheWriter.from_layers takes from a model's attention layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from . import _validate, backends, dtypes
from ._arrays import CPU, ArrayRef, DeviceId
from .errors import reject_type, reject_value
from .layouts import check_sizes

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


class _Found(NamedTuple):
    """Something of a layer, and where it was found: the start of messages about it."""

    layer: str
    path: str
    value: Any


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
    norm_weights: list[_Found] | None
    eps: float
    tables: list[_Found]
    is_neox: bool

    def context(self, backend: _Stacks, device: DeviceId) -> LayerContext:
        """Copy the norms' weights, so that the layers may change or go.

        Tables of several layers have to hold the same; those that are not one array are compared,
        which waits for the device. Weights are where the caches are (`device`), or on the host.
        """
        weight, table = None, None
        if self.norm_weights is not None:
            for layer, path, ref in self.norm_weights:
                if ref.device != CPU:
                    _validate.same_device(layer, path, ref, device, "the caches")
            weight = backend.stack([found.value for found in self.norm_weights])
        if self.tables:
            _check_tables(self.tables, self.rope_dim, device)
            table = self.tables[0].value
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
    caches, names, scales = _caches(found, paths, (rank, rope))
    weights, eps = _norms(found, paths, rank)
    tables, is_neox = _rotary(found, paths) if rope else ([], False)
    return Layers(caches, names, scales, rank, rope, weights, eps, tables, is_neox)


def _operation(number: int) -> str:
    """Name the operation and the layer, for messages about one of the layer's attributes."""
    return f"{_OPERATION}: layers[{number}]"


def _get(layer: Any, number: int, paths: Sequence[str]) -> _Found | None:
    """Return the first attribute that the layer or its ``self_attn`` has."""
    for prefix in ("", "self_attn."):
        for path in paths:
            value = layer
            for name in (prefix + path).split("."):
                value = getattr(value, name, _MISSING)
            if value is not _MISSING:
                return _Found(_operation(number), prefix + path, value)
    return None


def _need(layer: Any, number: int, paths: Mapping[str, Sequence[str]], name: str) -> _Found:
    found = _get(layer, number, paths[name])
    if found is None:
        places = " or ".join(paths[name])
        reject_type(
            _OPERATION,
            f"layers[{number}]",
            f"have the attribute {places} (see the argument attributes)",
            f"{type(layer).__name__} without it",
        )
    return found


def _caches(
    layers: Sequence[Any], paths: Mapping[str, Sequence[str]], sizes: tuple[int, int]
) -> tuple[list[Any], list[Any], list[Any]]:
    """Return caches, dtypes and scales; the scale is None where a layout has none of its own.

    The writer checks them too, but only here is it known where each was found.
    """
    caches, names, refs, plans = [], [], [], []
    for number, layer in enumerate(layers):
        found = _need(layer, number, paths, "kv_cache")
        if isinstance(found.value, (list, tuple)) and len(found.value) == 1:
            # Some engines keep a list with the one cache of each pipeline stage.
            found = found._replace(value=found.value[0])
        name = _get(layer, number, paths["kv_cache_dtype"])
        name = name or _Found(found.layer, "kv_cache_dtype", "auto")
        ref, plan = _validate.cache(*found, name.value, sizes, "float32", name_argument=name.path)
        caches.append(found)
        names.append(name.value)
        refs.append(ref)
        plans.append(plan)
    device = next((ref.device for ref in refs if ref.device is not None), CPU)
    scales: list[Any] = []
    for number, (layer, found) in enumerate(zip(layers, caches, strict=True)):
        _validate.same_device(found.layer, found.path, refs[number], device, "the other layers")
        scale = None
        if plans[number].layout.needs_scale:
            given = _need(layer, number, paths, "k_scale")
            _validate.layer_scale(*given, device, owner="the caches", live=True)
            scale = given.value
        scales.append(scale)
    _validate.distinct_caches(_OPERATION, "layers", refs)
    return [found.value for found in caches], names, scales


def _shared_sizes(layers: Sequence[Any], paths: Mapping[str, Sequence[str]]) -> tuple[int, int]:
    sizes = [
        check_sizes(
            _operation(number),
            _need(layer, number, paths, "kv_lora_rank").value,
            _need(layer, number, paths, "rope_dim").value,
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


def _norms(
    layers: Sequence[Any], paths: Mapping[str, Sequence[str]], rank: int
) -> tuple[list[_Found] | None, float]:
    """Return the norms' weights and their one eps; None where no layer has a norm."""
    if not any(_get(layer, number, paths["norm_weight"]) for number, layer in enumerate(layers)):
        return None, 0.0
    weights: list[_Found] = []
    given: list[Any] = []
    numbers: list[float] = []
    for number, layer in enumerate(layers):
        where, path, weight = _need(layer, number, paths, "norm_weight")
        ref = _validate.array(where, path, weight)
        if ref.shape != (rank,):
            reject_value(where, path, f"have shape [{rank}]", list(ref.shape))
        if ref.dtype not in dtypes.INPUT_DTYPES:
            names = " or ".join(dtype.name for dtype in dtypes.INPUT_DTYPES)
            reject_type(where, path, f"be {names}", ref.dtype.name)
        if weights and ref.dtype != weights[0].value.dtype:
            first = weights[0].value.dtype.name
            reject_type(where, path, f"be {first} as that of layer 0", ref.dtype)
        weights.append(_Found(where, path, ref))
        where, path, eps = _need(layer, number, paths, "norm_eps")
        given.append(eps)
        numbers.append(_validate.number(where, path, eps, least=0))
        if numbers[number] != numbers[0]:
            _reject_different(number, "eps", given[0], eps)
    return weights, numbers[0]


def _rotary(layers: Sequence[Any], paths: Mapping[str, Sequence[str]]) -> tuple[list[_Found], bool]:
    """Return the RoPE table of each layer, unless none has one, and the style of all."""
    found = [_get(layer, number, paths["cos_sin_cache"]) for number, layer in enumerate(layers)]
    tables = [None if table is None or table.value is None else table for table in found]
    styles: list[bool] = []
    for number, layer in enumerate(layers):
        # First: where all of the rotary part is missing, so is the style.
        if (tables[number] is None) is not (tables[0] is None):
            texts = [
                "none" if table is None else "a table" for table in (tables[0], tables[number])
            ]
            _reject_different(number, "cos_sin_cache", *texts)
        style = _get(layer, number, paths["is_neox"])
        styles.append(style is not None and _validate.flag(*style))
        if styles[number] != styles[0]:
            own = "none" if style is None else styles[number]
            _reject_different(number, "is_neox", styles[0], own)
    return [table for table in tables if table is not None], styles[0]


def _check_tables(tables: Sequence[_Found], rope_dim: int, device: DeviceId) -> None:
    """Refuse a RoPE table that does not fit, or is another one than that of the first layer."""
    first = _validate.table(*tables[0], rope_dim, (device, "the caches"))
    host: bytes | None = None
    for number, (where, path, table) in enumerate(tables):
        if table is tables[0].value:
            continue
        ref = _validate.array(where, path, table)
        if ref.looks() == first.looks():
            continue
        looks = [f"{each.dtype.name} {list(each.shape)}" for each in (first, ref)]
        if looks[0] != looks[1]:
            _reject_different(number, "cos_sin_cache", *looks)
        host = host or _host_bytes(first)
        if _host_bytes(ref) != host:
            _reject_different(number, "cos_sin_cache", looks[0], "one of other values")


def _host_bytes(ref: ArrayRef) -> bytes:
    return backends.for_device(ref.device or CPU).host_copy(ref).tobytes()
