"""What is in a cache: NaN and Inf by place, scales, magnitudes, and how it was written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from cupy_mla import dtypes
from cupy_mla.dtypes import DType
from cupy_mla.layouts import CacheLayout, LayoutField, ScaleFormat, check_sizes

from ._display import html_table, text_table
from .source import CacheRows, slot_numbers

Array = np.ndarray[Any, Any]

#: Places of NaN and Inf that an audit keeps; it counts all of them.
NONFINITE_KEPT = 10_000


@dataclass(frozen=True)
class _FloatBits:
    """A float format by its bits: magnitudes compare as integers."""

    unsigned: DType
    magnitude: int
    nonfinite: int  # the least magnitude that is Inf or NaN


_BITS: dict[DType, _FloatBits] = {
    dtypes.BFLOAT16: _FloatBits(np.dtype(np.uint16), 0x7FFF, 0x7F80),
    dtypes.FLOAT16: _FloatBits(np.dtype(np.uint16), 0x7FFF, 0x7C00),
    dtypes.FLOAT32: _FloatBits(np.dtype(np.uint32), 0x7FFFFFFF, 0x7F800000),
    dtypes.FLOAT8_E4M3: _FloatBits(dtypes.UINT8, 0x7F, 0x7F),
    dtypes.FLOAT8_E5M2: _FloatBits(dtypes.UINT8, 0x7F, 0x7C),
}
_FLT_MIN_BITS = 0x00800000
_MANTISSA = 0x007FFFFF


@dataclass(frozen=True)
class ScaleEvidence:
    """How many tiles tell in which format their scales were written.

    A writer of float32 scales divides by ``amax / 448``, so the largest element of each of its
    tiles is stored as 448, or, where the tile is zero, beside the least float32 scale. A writer of
    ue8m0 scales stores powers of two alone.

    Attributes
    ----------
    float32 : int
        Tiles whose scale is no power of two, or the least normal float32.
    ue8m0 : int
        Tiles whose scale is a power of two and whose largest element is below 448.
    either : int
        Tiles whose scale is a power of two and whose largest element is 448: both formats would
        have written them.
    neither : int
        Tiles whose scale is zero, subnormal, negative, NaN or Inf.
    """

    float32: int = 0
    ue8m0: int = 0
    either: int = 0
    neither: int = 0

    @property
    def tiles(self) -> int:
        """Tiles that were seen."""
        return self.float32 + self.ue8m0 + self.either + self.neither

    @property
    def scale_format(self) -> ScaleFormat | None:
        """The format that the tiles have in common; None where none or both are proved."""
        if bool(self.float32) == bool(self.ue8m0):
            return None
        return "float32" if self.float32 else "ue8m0"

    def __str__(self) -> str:
        seen = f"{self.tiles} tiles seen"
        counts = (
            f"{self.float32} only float32 scales leave, {self.ue8m0} only ue8m0 scales, "
            f"{self.either} either, {self.neither} neither"
        )
        if self.scale_format is not None:
            return f"{self.scale_format} ({seen}: {counts})"
        if self.float32:
            return f"mixed, written with both formats ({seen}: {counts})"
        return f"cannot be told ({seen}: {counts})"


@dataclass(frozen=True)
class CacheAudit:
    """What `audit_cache` found.

    Attributes
    ----------
    layout : CacheLayout
    rows : int
        Rows that were looked at.
    slots_skipped : int
        Given slots that are below 0 or beyond the cache.
    scale_format : {"float32", "ue8m0"} or None
        How the scales inside the rows were written, as far as `scale_evidence` proves it; None
        where it does not, and for layouts without such scales.
    scale_evidence : ScaleEvidence or None
        None for layouts without scales inside their rows.
    nonfinite : list of (slot, part, element)
        Places of NaN and Inf by slot: `part` is ``nope``, ``scale`` or ``rope``, `element` counts
        within the part. At most 10 000 of them.
    nonfinite_count : int
        All of them.
    zero_scales, denormal_scales, negative_scales : int
        Scales inside rows that are 0, below the least normal float32, or below 0.
    saturated : int
        fp8 elements of the largest finite magnitude (448, 57344): in a flat layout those that
        were cut off, or nearly so. The largest element of a tile with a float32 scale is one
        always.
    amax : dict of str to tuple of float
        Largest finite magnitude of each part: of each tile's elements, of each tile's scale, of
        all others. Elements of ``nope`` are multiplied by the scale in their row; those of flat fp8
        are as stored, since the layer's scale is outside the cache.

    Examples
    --------
    >>> import numpy as np
    >>> from cupy_mla import audit_cache
    >>> cache = np.zeros((2, 4, 576), np.float32)
    >>> cache[1, 2, 512] = np.inf
    >>> print(audit_cache(cache, "float32"))
    CacheAudit
      layout        float32, 2304 bytes a row (kv_lora_rank 512, rope_dim 64)
      rows          8
      NaN or Inf    1: slot 6 rope[0]
      amax of nope  0
      amax of rope  0
    """

    layout: CacheLayout
    rows: int
    slots_skipped: int
    scale_format: ScaleFormat | None
    scale_evidence: ScaleEvidence | None
    nonfinite: list[tuple[int, str, int]]
    nonfinite_count: int
    zero_scales: int
    denormal_scales: int
    negative_scales: int
    saturated: int
    amax: dict[str, tuple[float, ...]]

    def to_dict(self) -> dict[str, Any]:
        """Return the audit as plain data that ``json.dumps`` takes."""
        return {
            "layout": self.layout.name,
            "rows": self.rows,
            "slots_skipped": self.slots_skipped,
            "scale_format": self.scale_format,
            "scale_evidence": None if self.scale_evidence is None else asdict(self.scale_evidence),
            "nonfinite": [
                {"slot": slot, "part": part, "element": element}
                for slot, part, element in self.nonfinite
            ],
            "nonfinite_count": self.nonfinite_count,
            "zero_scales": self.zero_scales,
            "denormal_scales": self.denormal_scales,
            "negative_scales": self.negative_scales,
            "saturated": self.saturated,
            "amax": {part: list(values) for part, values in self.amax.items()},
        }

    def facts(self) -> dict[str, str]:
        """Return what was found as names and texts, for display."""
        layout = self.layout
        shown = {
            "layout": f"{layout.name}, {layout.row_bytes} bytes a row (kv_lora_rank "
            f"{layout.kv_lora_rank}, rope_dim {layout.rope_dim})",
            "rows": str(self.rows),
            "NaN or Inf": _places(self.nonfinite, self.nonfinite_count),
        }
        if self.slots_skipped:
            shown["slots outside"] = f"{self.slots_skipped} of those given"
        if self.scale_evidence is not None:
            shown["scale format"] = str(self.scale_evidence)
            shown["odd scales"] = (
                f"{self.zero_scales} zero, {self.denormal_scales} subnormal, "
                f"{self.negative_scales} negative"
            )
        if self.layout.is_fp8:
            shown["largest code"] = f"{self.saturated} elements"
        for part, values in self.amax.items():
            text = ", ".join(f"{value:g}" for value in values)
            unit = " as stored, before the layer's scale" if self.layout.needs_scale else ""
            shown[f"amax of {part}"] = f"{text}{unit}"
        return shown

    def __str__(self) -> str:
        return text_table(self.facts(), "CacheAudit")

    def _repr_html_(self) -> str:
        """Table for Jupyter."""
        return html_table(self.facts(), "CacheAudit")


def _places(found: list[tuple[int, str, int]], count: int, most: int = 5) -> str:
    if not count:
        return "none"
    first = ", ".join(f"slot {slot} {part}[{element}]" for slot, part, element in found[:most])
    return f"{count}: {first}" + (", ..." if count > most else "")


def audit_cache(
    kv_cache: Any,
    kv_cache_dtype: str | CacheLayout,
    *,
    slots: Any = None,
    kv_lora_rank: int = 512,
    rope_dim: int = 64,
) -> CacheAudit:
    """Look through a cache for NaN, Inf and odd scales, and tell how it was written.

    Parameters
    ----------
    kv_cache : array [num_blocks, block_size, width]
        The cache, also ``[num_blocks, block_size, 1, width]``; host, device or memory-mapped, in
        which case it may be larger than memory. Rows on a device are copied to the host.
    kv_cache_dtype : str or CacheLayout
        See `get_layout`.
    slots : int32 or int64 array [n], or sequence of int, optional
        Rows to look at, each once; -1 and other slots that the cache does not have are counted. By
        default all, those that nobody has written among them.
    kv_lora_rank, rope_dim : int
        Elements of the latent and of the rotary part, where `kv_cache_dtype` is a name.

    Returns
    -------
    CacheAudit

    Raises
    ------
    ValueError
        For a shape or stride that does not fit.
    TypeError
        For a dtype or a kind of argument that does not fit.

    Examples
    --------
    >>> import ml_dtypes, numpy as np
    >>> from cupy_mla import audit_cache, concat_and_cache_mla, get_layout
    >>> cache = get_layout("fp8_ds_mla").empty(2, 4)
    >>> rows = np.full((1, 576), 3.0, ml_dtypes.bfloat16)
    >>> rows[0, 515] = np.nan
    >>> args = rows[:, :512], rows[:, 512:], cache, np.array([5]), "fp8_ds_mla"
    >>> concat_and_cache_mla(*args, scale_format="ue8m0")
    >>> audit = audit_cache(cache, "fp8_ds_mla", slots=[5])
    >>> audit.nonfinite, audit.scale_format
    ([(5, 'rope', 3)], 'ue8m0')
    >>> print(audit.scale_evidence)
    ue8m0 (4 tiles seen: 0 only float32 scales leave, 4 only ue8m0 scales, 0 either, 0 neither)
    """
    operation = "audit_cache"
    sizes = check_sizes(operation, kv_lora_rank, rope_dim)
    rows = CacheRows(operation, "kv_cache", kv_cache, kv_cache_dtype, sizes)
    chosen, skipped = (None, 0) if slots is None else slot_numbers(operation, slots, rows)
    return audit_rows(rows, chosen, skipped)


def audit_rows(
    rows: CacheRows,
    slots: Array | None,
    skipped: int = 0,
    on_chunk: Callable[[int], None] | None = None,
) -> CacheAudit:
    """Look through rows.

    Parameters
    ----------
    rows : CacheRows
    slots : int64 array or None
        Rising slots that the cache has; None for all.
    skipped : int
        Slots that were asked for and that the cache does not have.
    on_chunk : callable, optional
        Called with the number of rows seen before each piece of work.
    """
    tally = _Tally(rows.layout)
    for numbers, packed in rows.chunks(slots):
        if on_chunk is not None:
            on_chunk(tally.rows)
        tally.add(numbers, packed)
    return tally.result(skipped)


@dataclass
class _Tally:
    """What was found so far."""

    layout: CacheLayout
    rows: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    places: list[tuple[int, str, int]] = field(default_factory=list)
    amax: dict[str, Array] = field(default_factory=dict)

    def add(self, slots: Array, packed: Array) -> None:
        """Look at the rows of rising slots."""
        self.rows += slots.size
        parts = np.ascontiguousarray(packed).view(self.layout.row_dtype())[:, 0]
        scales = parts["scale"] if self.layout.tile else None
        bad: dict[str, Array] = {}
        for part in self.layout.fields:
            magnitudes, bad[part.name] = _magnitudes(parts[part.name], part.dtype)
            if part.name == "nope":
                self._elements(part, magnitudes, scales)
            elif part.name == "scale":
                self._maximum(part.name, _values(magnitudes, part.dtype).max(axis=0))
            else:
                self._maximum(part.name, _values(magnitudes.max(axis=(0, 1)), part.dtype))
                self._count_saturated(part, magnitudes)
        self._keep(slots, bad)

    def _elements(self, part: LayoutField, magnitudes: Array, scales: Array | None) -> None:
        """Look at the latent part: the largest of each tile, and how its scale was made."""
        self._count_saturated(part, magnitudes)
        if scales is None:
            self._maximum(part.name, _values(magnitudes.max(axis=(0, 1)), part.dtype))
            return
        largest = magnitudes.reshape(len(magnitudes), -1, self.layout.tile).max(axis=2)
        usable = np.where(np.isfinite(scales), np.abs(scales), 0)
        self._maximum(part.name, (_values(largest, part.dtype) * usable).max(axis=0))
        self._weigh(scales, largest == _BITS[part.dtype].nonfinite - 1)

    def _weigh(self, scales: Array, full: Array) -> None:
        """Count odd scales, and which format could have left each."""
        bits = np.ascontiguousarray(scales).view(np.uint32)
        magnitude = bits & np.uint32(0x7FFFFFFF)
        finite = magnitude < 0x7F800000
        negative = (bits != magnitude) & (magnitude > 0) & finite
        zero = magnitude == 0
        denormal = (magnitude > 0) & (magnitude < _FLT_MIN_BITS)
        usable = finite & ~negative & ~zero & ~denormal
        power = (bits & np.uint32(_MANTISSA) == 0) & (bits != _FLT_MIN_BITS)
        for name, found in (
            ("zero", zero),
            ("denormal", denormal),
            ("negative", negative),
            ("float32", usable & ~power),
            ("ue8m0", usable & power & ~full),
            ("either", usable & power & full),
            ("neither", ~usable),
        ):
            self._count(name, found)

    def _count(self, name: str, found: Array) -> None:
        self.counts[name] = self.counts.get(name, 0) + int(np.count_nonzero(found))

    def _count_saturated(self, part: LayoutField, magnitudes: Array) -> None:
        if part.dtype.itemsize == 1:
            self._count("saturated", magnitudes == _BITS[part.dtype].nonfinite - 1)

    def _maximum(self, name: str, values: Array) -> None:
        values = np.atleast_1d(values)
        self.amax[name] = np.maximum(self.amax[name], values) if name in self.amax else values

    def _keep(self, slots: Array, bad: dict[str, Array]) -> None:
        """Count NaN and Inf, and keep their places in the order of the rows' bytes."""
        room = NONFINITE_KEPT - len(self.places)
        names = list(bad)
        found: list[tuple[int, int, int]] = []
        for number, where in enumerate(bad.values()):
            self._count("nonfinite", where)
            if room and where.any():
                row, element = (index[:room] for index in np.nonzero(where))
                parts = [number] * row.size
                found += zip(slots[row].tolist(), parts, element.tolist(), strict=True)
        self.places += [
            (slot, names[part], element) for slot, part, element in sorted(found)[:room]
        ]

    def result(self, skipped: int) -> CacheAudit:
        """Return what was found."""
        evidence = None
        if self.layout.tile:
            names = ("float32", "ue8m0", "either", "neither")
            evidence = ScaleEvidence(**{name: self.counts.get(name, 0) for name in names})
        empty = {
            part.name: np.zeros(self.layout.kv_lora_rank // self.layout.tile)
            if self.layout.tile and part.name != "rope"
            else np.zeros(1)
            for part in self.layout.fields
        }
        return CacheAudit(
            self.layout,
            self.rows,
            skipped,
            evidence.scale_format if evidence is not None else None,
            evidence,
            self.places,
            self.counts.get("nonfinite", 0),
            self.counts.get("zero", 0),
            self.counts.get("denormal", 0),
            self.counts.get("negative", 0),
            self.counts.get("saturated", 0),
            {name: tuple(map(float, values)) for name, values in (empty | self.amax).items()},
        )


def _magnitudes(stored: Array, dtype: DType) -> tuple[Array, Array]:
    """Return magnitudes as integers, 0 in place of NaN and Inf, and where those are."""
    bits = _BITS[dtype]
    magnitudes = np.ascontiguousarray(stored).view(bits.unsigned) & bits.unsigned.type(
        bits.magnitude
    )
    bad = magnitudes >= bits.nonfinite
    magnitudes[bad] = 0
    return magnitudes, bad


def _values(magnitudes: Array, dtype: DType) -> Array:
    """Return what integer magnitudes stand for, as float64, which all products fit."""
    bits = _BITS[dtype]
    values: Array = np.asarray(magnitudes, bits.unsigned).view(dtype).astype(np.float64)
    return values
