"""Row layouts of MLA caches as data: the only place of the product where a byte offset is written.

A layout yields the fields of a row, the size of a block, NumPy structured views, the text that
documentation shows, and the constants printed in front of a CUDA source.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from . import _byte_map, dtypes
from .dtypes import DType
from .errors import check_integer, reject_type, reject_value

__all__ = ["LAYOUT_NAMES", "CacheLayout", "LayoutField", "get_layout"]

ScaleFormat = Literal["float32", "ue8m0"]
SCALE_FORMATS: tuple[ScaleFormat, ...] = ("float32", "ue8m0")

#: The layouts' own names, in the order in which tables show them.
LAYOUT_NAMES: tuple[str, ...] = (
    "bfloat16",
    "float16",
    "float32",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp8_ds_mla",
)
_ALIASES = {"fp8": "fp8_e4m3"}
#: Keys of the sparse indexer: one fp8 row a token, and its scale behind all rows of the block.
INDEXER_LAYOUT = "indexer_fp8"

_PLAIN: dict[str, DType] = {
    "bfloat16": dtypes.BFLOAT16,
    "float16": dtypes.FLOAT16,
    "float32": dtypes.FLOAT32,
}
_FLAT_FP8: dict[str, DType] = {
    "fp8_e4m3": dtypes.FLOAT8_E4M3,
    "fp8_e5m2": dtypes.FLOAT8_E5M2,
}

#: DeepSeek-V3.2's row as FlashMLA reads it: one size only, tiles of 128 elements.
_DS_MLA_RANK = 512
_DS_MLA_ROPE = 64
_DS_MLA_TILE = 128

#: Sizes of the layouts that have one only: kv_lora_rank and rope_dim.
FIXED_SIZES = {"fp8_ds_mla": (_DS_MLA_RANK, _DS_MLA_ROPE)}
#: Bytes of DeepSeek-V4's rows, which keep their scales behind the block: no layout here.
BLOCK_PLANAR_WIDTH = 584

#: DeepSeek-V3.2's indexer keys as DeepGEMM reads them.
_INDEXER_DIM = 128


@dataclass(frozen=True)
class LayoutField:
    """One part of a row.

    Attributes
    ----------
    name : str
        ``nope`` (the latent kv_c), ``scale`` (a tile's own scales) or ``rope`` (k_pe).
    offset : int
        First byte in the row; in a layout of several planes, the parts of a row one behind the
        other.
    dtype : numpy.dtype
        Type of one element.
    count : int
        Number of elements.
    note : str
        How an element is to be read.
    plane : int
        Number of the plane of a block that holds the part; 0 in layouts of whole rows.
    """

    name: str
    offset: int
    dtype: DType
    count: int
    note: str
    plane: int = 0

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.count * self.dtype.itemsize

    @property
    def end(self) -> int:
        """First byte behind the field."""
        return self.offset + self.nbytes


@dataclass(frozen=True)
class Plane:
    """A piece of every row of a block, all rows' pieces together.

    Attributes
    ----------
    offset : int
        First byte of the piece in the row, its parts taken one behind the other.
    nbytes : int
        Bytes of the piece; in a block of several planes also the step from a row's piece to the
        next one's.
    """

    offset: int
    nbytes: int

    def start(self, block_size: int) -> int:
        """First byte of the plane in a block of `block_size` rows."""
        return self.offset * block_size


@dataclass(frozen=True)
class CacheLayout:
    """How one token's row lies in a paged MLA cache.

    Made by `get_layout`; compared and hashed by value, and taken by every function that takes a
    ``kv_cache_dtype``.

    Attributes
    ----------
    name : str
        One of `LAYOUT_NAMES`, or ``indexer_fp8``.
    kv_lora_rank, rope_dim : int
        Elements of the latent part and of the rotary part (0 for models without RoPE).
    storage_dtype : numpy.dtype
        Element type of the cache array; uint8 for all fp8 layouts (the matching float8 dtype is
        taken for a flat one too).
    fields : tuple of LayoutField
        The row's parts in byte order; empty parts are left out.
    row_bytes : int
        Size of a row in bytes.
    scale_format : {"float32", "ue8m0"} or None
        How the scales inside a row were rounded; None where a row holds no scale.
    tile : int
        Elements that share one scale inside the row; 0 where a row holds no scale.
    """

    name: str
    kv_lora_rank: int
    rope_dim: int
    storage_dtype: DType
    fields: tuple[LayoutField, ...]
    row_bytes: int
    scale_format: ScaleFormat | None = None
    tile: int = 0

    @property
    def width(self) -> int:
        """Elements of `storage_dtype` in a row: the last axis of a cache array."""
        return self.row_bytes // self.storage_dtype.itemsize

    @property
    def planes(self) -> tuple[Plane, ...]:
        """The planes of a block in byte order; a layout of whole rows has one.

        The piece of row `r` in plane `p` begins at byte ``p.start(block_size) + r * p.nbytes`` of
        its block. With one plane, that is the row, and a cache may keep its rows further apart.
        """
        pieces: dict[int, list[LayoutField]] = {}
        for field in self.fields:
            pieces.setdefault(field.plane, []).append(field)
        return tuple(
            Plane(part[0].offset, part[-1].end - part[0].offset) for part in pieces.values()
        )

    @property
    def is_planar(self) -> bool:
        """Whether a block keeps parts of its rows apart, so that its rows cannot be spread."""
        return any(field.plane for field in self.fields)

    def offset_in_block(self, name: str, row: int, block_size: int) -> int:
        """Return where a part of a row begins in its block, rows being as close as they can.

        Parameters
        ----------
        name : str
            Name of a part that the layout has.
        row, block_size : int
            Row in the block, and rows a block.

        Examples
        --------
        >>> get_layout("fp8_ds_mla").offset_in_block("scale", 3, 64)
        2480
        >>> get_layout("indexer_fp8").offset_in_block("scale", 3, 64)
        8204
        """
        rows = check_integer("offset_in_block", "block_size", block_size, 1)
        if not 0 <= check_integer("offset_in_block", "row", row) < rows:
            reject_value("offset_in_block", "row", f"be one of the {rows} rows of a block", row)
        field = self.field(name)
        if field is None:
            known = " or ".join(part.name for part in self.fields)
            reject_value("offset_in_block", "name", f"be {known} for {self.name}", repr(name))
        plane = self.planes[field.plane]
        return plane.start(rows) + int(row) * plane.nbytes + field.offset - plane.offset

    @property
    def is_fp8(self) -> bool:
        """Whether the latent part is stored in fp8."""
        return self.storage_dtype == dtypes.UINT8

    @property
    def needs_scale(self) -> bool:
        """Whether one scale a layer, kept outside the cache, is needed to write and read it."""
        return self.name in _FLAT_FP8

    @property
    def code_dtype(self) -> DType:
        """Element type of the latent part."""
        return _FLAT_FP8.get(self.name) or (dtypes.FLOAT8_E4M3 if self.tile else self.storage_dtype)

    @property
    def accepted_dtypes(self) -> tuple[DType, ...]:
        """Dtypes that a cache array of this layout may have."""
        if self.name in _FLAT_FP8:
            return (dtypes.UINT8, _FLAT_FP8[self.name])
        if self.name == INDEXER_LAYOUT:
            return (dtypes.UINT8, dtypes.FLOAT8_E4M3)
        return (self.storage_dtype,)

    @property
    def input_dtypes(self) -> tuple[DType, ...]:
        """Dtypes that kv_c and k_pe may have; 16- and 32-bit rows are copied bit for bit."""
        if self.name in _FLAT_FP8 or self.name == INDEXER_LAYOUT:
            return dtypes.INPUT_DTYPES
        return (dtypes.BFLOAT16,) if self.tile else (self.storage_dtype,)

    def field(self, name: str) -> LayoutField | None:
        """Return the field called `name`, or None where the row has none."""
        return next((field for field in self.fields if field.name == name), None)

    def block_bytes(self, block_size: int) -> int:
        """Bytes of a block of `block_size` rows, without padding between blocks.

        Parameters
        ----------
        block_size : int
            Rows a block, at least 1.
        """
        return check_integer("block_bytes", "block_size", block_size, 1) * self.row_bytes

    def row_dtype(self) -> DType:
        """Structured NumPy dtype of a row, one field a part, for looking into raw bytes.

        In a layout of several planes it fits a row whose parts were put one behind the other.
        """
        return np.dtype(
            {
                "names": [field.name for field in self.fields],
                "formats": [(field.dtype, (field.count,)) for field in self.fields],
                "offsets": [field.offset for field in self.fields],
                "itemsize": self.row_bytes,
            }
        )

    def empty(self, num_blocks: int, block_size: int, xp: Any = np) -> Any:
        """Allocate an uninitialised cache ``[num_blocks, block_size, width]``.

        Parameters
        ----------
        num_blocks, block_size : int
            Blocks, and rows a block.
        xp : module
            ``numpy`` (default) or ``cupy``.

        Returns
        -------
        array
            Of `storage_dtype`, C-contiguous.
        """
        blocks = check_integer("empty", "num_blocks", num_blocks, 1)
        rows = check_integer("empty", "block_size", block_size, 1)
        if not callable(getattr(xp, "empty", None)):
            reject_type("empty", "xp", "be numpy or cupy", repr(xp))
        most = np.iinfo(np.intp).max // self.block_bytes(rows)
        if blocks > most:
            reject_value("empty", "num_blocks", f"be at most {most} of {rows} rows each", blocks)
        return xp.empty((blocks, rows, self.width), dtype=self.storage_dtype)

    def to_dict(self) -> dict[str, Any]:
        """Return the layout as plain data that ``json.dumps`` takes."""
        return {
            "name": self.name,
            "kv_lora_rank": self.kv_lora_rank,
            "rope_dim": self.rope_dim,
            "row_bytes": self.row_bytes,
            "storage_dtype": self.storage_dtype.name,
            "width": self.width,
            "scale_format": self.scale_format,
            "tile": self.tile,
            "fields": [
                {
                    "name": field.name,
                    "offset": field.offset,
                    "nbytes": field.nbytes,
                    "dtype": field.dtype.name,
                    "count": field.count,
                    "note": field.note,
                    "plane": field.plane,
                    "place": _byte_map.place(self, field),
                }
                for field in self.fields
            ],
        }

    def describe(self) -> str:
        """Return the byte map as plain text.

        Examples
        --------
        >>> print(get_layout("fp8_ds_mla").describe())
        fp8_ds_mla: 656 bytes a row (kv_lora_rank 512, rope_dim 64, float32 scales)
          [0, 512)    nope   512 x float8_e4m3fn  multiplied by its tile's scale
          [512, 528)  scale  4 x float32          one a tile of 128
          [528, 656)  rope   64 x bfloat16        as it is
        """
        return _byte_map.as_text(self)

    def _repr_html_(self) -> str:
        """Byte map for Jupyter."""
        return _byte_map.as_html(self)

    def cuda_constants(self) -> str:
        """Return the C++ constants that are printed in front of a kernel's source.

        Flat layouts take their sizes at run time, so that one specialisation serves them all:
        for those, all constants but the element size are 0 and the offsets -1. In a layout of
        several planes, the offset of a part times the rows of a block is where its plane begins.
        """
        fixed = self.tile > 0

        def offset(name: str) -> int:
            field = self.field(name)
            return field.offset if fixed and field else -1

        values = {
            "kRowBytes": self.row_bytes if fixed else 0,
            "kLoraRank": self.kv_lora_rank if fixed else 0,
            "kRopeDim": self.rope_dim if fixed else 0,
            "kTile": self.tile,
            "kTiles": self.kv_lora_rank // self.tile if fixed else 0,
            "kNopeOffset": offset("nope"),
            "kScaleOffset": offset("scale"),
            "kRopeOffset": offset("rope"),
        }
        lines = [f"constexpr int {name} = {value};" for name, value in values.items()]
        return "\n".join(["namespace layout {", *lines, "}  // namespace layout", ""])


def _packed(
    *parts: tuple[str, DType, int, str], planar: bool = False
) -> tuple[tuple[LayoutField, ...], int]:
    """Put parts one behind the other; return the fields that hold anything, and the row size.

    With `planar`, a block keeps each part of its rows in a plane of its own.
    """
    fields: list[LayoutField] = []
    offset = 0
    for name, dtype, count, note in parts:
        if count:
            plane = len(fields) if planar else 0
            fields.append(LayoutField(name, offset, dtype, count, note, plane))
            offset = fields[-1].end
    return tuple(fields), offset


def check_scale_format(
    operation: str, scale_format: object, argument: str = "scale_format"
) -> ScaleFormat:
    """Return `scale_format`, or raise for what is none; `argument` is its name in messages."""
    for known in SCALE_FORMATS:
        if isinstance(scale_format, str) and scale_format == known:
            return known
    reject_value(operation, argument, 'be the str "float32" or "ue8m0"', repr(scale_format))


def canonical_name(
    operation: str, name: object, argument: str = "kv_cache_dtype", *, planar: bool = True
) -> str:
    """Return the layout's own name for `name` (``auto`` stays), or raise for what is none.

    Without `planar` a message does not offer the layouts that keep the parts of rows apart.
    """
    if not isinstance(name, str):
        reject_type(operation, argument, "be a name or a CacheLayout", type(name).__name__)
    found = _ALIASES.get(name, name)
    if found not in ("auto", *LAYOUT_NAMES, INDEXER_LAYOUT):
        known = ", ".join(("auto", "fp8", *LAYOUT_NAMES, *([INDEXER_LAYOUT] if planar else [])))
        reject_value(operation, argument, f"be one of {known}", repr(name))
    return found


def build_layout(
    operation: str, name: str, kv_lora_rank: int, rope_dim: int, scale_format: ScaleFormat
) -> CacheLayout:
    """Make the layout called `name` (not ``auto``); errors speak of `operation`."""
    rank, rope = kv_lora_rank, rope_dim
    if name in _PLAIN:
        stored = _PLAIN[name]
        note = "as it is"
        fields, size = _packed(("nope", stored, rank, note), ("rope", stored, rope, note))
        return CacheLayout(name, rank, rope, stored, fields, size)
    if name in _FLAT_FP8:
        code = _FLAT_FP8[name]
        note = "multiplied by the layer's scale"
        fields, size = _packed(("nope", code, rank, note), ("rope", code, rope, note))
        return CacheLayout(name, rank, rope, dtypes.UINT8, fields, size)
    if name == INDEXER_LAYOUT:
        return _indexer(scale_format)
    if (rank, rope) != (_DS_MLA_RANK, _DS_MLA_ROPE):
        reject_value(
            operation,
            "kv_lora_rank and rope_dim",
            f"be {_DS_MLA_RANK} and {_DS_MLA_ROPE} for fp8_ds_mla (656-byte rows)",
            f"{rank} and {rope}",
        )
    fields, size = _packed(
        ("nope", dtypes.FLOAT8_E4M3, rank, "multiplied by its tile's scale"),
        ("scale", dtypes.FLOAT32, rank // _DS_MLA_TILE, f"one a tile of {_DS_MLA_TILE}"),
        ("rope", dtypes.BFLOAT16, rope, "as it is"),
    )
    return CacheLayout(name, rank, rope, dtypes.UINT8, fields, size, scale_format, _DS_MLA_TILE)


def _indexer(scale_format: ScaleFormat) -> CacheLayout:
    fields, size = _packed(
        ("nope", dtypes.FLOAT8_E4M3, _INDEXER_DIM, "the key, multiplied by its scale"),
        ("scale", dtypes.FLOAT32, 1, "one a row"),
        planar=True,
    )
    return CacheLayout(
        INDEXER_LAYOUT, _INDEXER_DIM, 0, dtypes.UINT8, fields, size, scale_format, _INDEXER_DIM
    )


def check_sizes(operation: str, kv_lora_rank: object, rope_dim: object) -> tuple[int, int]:
    """Return both sizes as ints, or raise for what is no size."""
    sizes = []
    for argument, value, least in (("kv_lora_rank", kv_lora_rank, 1), ("rope_dim", rope_dim, 0)):
        sizes.append(check_integer(operation, argument, value, least))
    return sizes[0], sizes[1]


def get_layout(
    kv_cache_dtype: str | CacheLayout,
    *,
    kv_lora_rank: int = 512,
    rope_dim: int = 64,
    scale_format: str = "float32",
    dtype: Any = "bfloat16",
) -> CacheLayout:
    """Return the row layout of a cache dtype.

    Parameters
    ----------
    kv_cache_dtype : str or CacheLayout
        ``auto`` (rows of `dtype`), ``bfloat16``, ``float16``, ``float32``, ``fp8`` (the same as
        ``fp8_e4m3``), ``fp8_e5m2`` or ``fp8_ds_mla``. A layout is returned as it is. Also
        ``indexer_fp8``, the keys of the sparse indexer: 128 codes and one scale a row, all codes
        of a block before all its scales; the sizes below are not its own.
    kv_lora_rank : int
        Elements of the latent part, at least 1. ``fp8_ds_mla`` has 512.
    rope_dim : int
        Elements of the rotary part, 0 for models without RoPE. ``fp8_ds_mla`` has 64.
    scale_format : {"float32", "ue8m0"}
        How a row's own scales are rounded; flat layouts ignore it.
    dtype : str or dtype
        The rows' dtype for ``auto``; a framework's own is taken too.

    Returns
    -------
    CacheLayout

    Raises
    ------
    ValueError
        For an unknown name, or a size that the layout does not have.
    TypeError
        For a kv_cache_dtype that is neither a name nor a layout.

    Examples
    --------
    >>> get_layout("fp8").row_bytes
    576
    >>> [field.offset for field in get_layout("fp8_ds_mla").fields]
    [0, 512, 528]
    """
    return resolve_layout("get_layout", kv_cache_dtype, kv_lora_rank, rope_dim, scale_format, dtype)


def resolve_layout(
    operation: str,
    kv_cache_dtype: str | CacheLayout,
    kv_lora_rank: int,
    rope_dim: int,
    scale_format: str = "float32",
    dtype: Any = "bfloat16",
) -> CacheLayout:
    """Do what `get_layout` does; errors speak of `operation`."""
    if isinstance(kv_cache_dtype, CacheLayout):
        return kv_cache_dtype
    name = canonical_name(operation, kv_cache_dtype)
    rank, rope = check_sizes(operation, kv_lora_rank, rope_dim)
    if name == "auto":
        found = dtypes.of(dtype)
        name = "" if found is None else found.name
        if name not in _PLAIN:
            reject_value(operation, "dtype", "be bfloat16, float16 or float32", repr(dtype))
    return build_layout(operation, name, rank, rope, check_scale_format(operation, scale_format))
