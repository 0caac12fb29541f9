"""Kernel arguments as NumPy dtypes: one structure a kernel, passed by value.

The C++ structures in ``kernels_src`` are written by hand, with comments; `layout_checks` prints
assertions that make a compilation fail when size or offset of any member differs from here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

DType = np.dtype[Any]
Array = np.ndarray[Any, Any]

_PTR = "<u8"
_I64 = "<i8"
_I32 = "<i4"
_U32 = "<u4"
_F32 = "<f4"

#: Layers of one launch that can have a slot array each.
SLOT_LIST_LAYERS = 16
#: Divisors, tokens and blocks of a grid are below this.
INT32_END = 2**31


@dataclass(frozen=True)
class Struct:
    """A C++ structure of ``kernels_src`` and the NumPy dtype that has the same bytes.

    Attributes
    ----------
    name : str
        Name in namespace ``cupy_mla``.
    dtype : numpy.dtype
        Structured, without holes.
    """

    name: str
    dtype: DType

    def __post_init__(self) -> None:
        end = 0
        for member, (dtype, offset) in _members(self.dtype):
            if offset != end:
                raise TypeError(f"{self.name} has a hole in front of {member}")
            end = offset + dtype.itemsize
        if end != self.dtype.itemsize:
            raise TypeError(f"{self.name} has a hole at its end")

    def layout_checks(self) -> str:
        """Return ``static_assert`` lines about the size and the offset of every member."""
        lines = [
            f"static_assert(sizeof(cupy_mla::{self.name}) == {self.dtype.itemsize}, "
            f'"size of {self.name}");'
        ]
        lines += [
            f"static_assert(CUPY_MLA_OFFSETOF(cupy_mla::{self.name}, {member}) == {offset}, "
            f'"offset of {self.name}::{member}");'
            for member, (_, offset) in _members(self.dtype)
        ]
        return "\n".join(lines) + "\n"

    def offset(self, member: str) -> int:
        """Return the first byte of a member."""
        return dict(_members(self.dtype))[member][1]

    def zeros(self) -> Array:
        """Return one structure of zeros, as an array of one element."""
        return np.zeros(1, self.dtype)


def _members(dtype: DType) -> Iterator[tuple[str, tuple[DType, int]]]:
    for member, field in (dtype.fields or {}).items():
        yield member, (field[0], field[1])


def _packed(*members: tuple[Any, ...]) -> DType:
    return np.dtype(list(members))


_DIVISOR = _packed(("value", _U32), ("multiplier", _U32), ("shift", _U32))
_STRIDED_ROWS = _packed(("data", _PTR), ("layer_stride", _I64), ("token_stride", _I64))
_SLOT_ARRAY = _packed(("data", _PTR), ("token_stride", _I64))
_LAYER_ENTRY = _packed(
    ("cache", _PTR),
    ("scale", _PTR),
    ("block_stride", _I64),
    ("row_stride", _I64),
    ("num_slots", _I64),
    ("block_size", _DIVISOR),
    ("source_layer", _I32),
    ("scale_value", _F32),
    ("scale_ue8m0", _I32),
)
_INSERT_PARAMS = _packed(
    ("kv_c", _STRIDED_ROWS),
    ("k_pe", _STRIDED_ROWS),
    ("slots", _STRIDED_ROWS),
    ("layers", _PTR),
    ("cache_ptrs", _PTR),
    ("scales", _PTR),
    ("counters", _PTR),
    ("errors", _PTR),
    ("tokens", _I32),
    ("slot_bytes", _I32),
    ("lora_rank", _I32),
    ("rope_dim", _I32),
    ("first_layer", _I32),
    ("layers_are_mapped", _I32),
    ("blocks_per_layer", _DIVISOR),
    ("block_tokens", _I32),
    ("use_slot_list", _I32),
    ("collect_stats", _I32),
    ("stream_stores", _I32),
    ("reserved", _I32, (3,)),
    ("layer", _LAYER_ENTRY),
    ("slot_list", _SLOT_ARRAY, (SLOT_LIST_LAYERS,)),
)

_INDEX_ARRAY = _packed(("data", _PTR), ("stride", _I64), ("bytes", _I64))
_ROW_INDEX = _packed(
    ("slots", _INDEX_ARRAY),
    ("blocks", _INDEX_ARRAY),
    ("first", _INDEX_ARRAY),
    ("start", _INDEX_ARRAY),
    ("owner", _INDEX_ARRAY),
    ("request_stride", _I64),
    ("positions", _I64),
    ("num_blocks", _I64),
    ("kind", _I32),
    ("num_seqs", _I32),
    ("open_ended", _I32),
    ("reserved", _I32),
)
_READ_PARAMS = _packed(
    ("source", _LAYER_ENTRY, (2,)),
    ("destination", _LAYER_ENTRY, (2,)),
    ("rows", _ROW_INDEX),
    ("row_count", _I32),
    ("block_rows", _I32),
    ("width", _I32),
    ("second_bytes", _I32),
    ("to_slots", _I32),
    ("zero_missing", _I32),
    ("zero_unowned", _I32),
    ("stream_stores", _I32),
    ("element", _I32),
    ("tile_shift", _I32),
    ("rope_first", _I32),
    ("rope_offset", _I32),
)

DIVISOR = Struct("Divisor", _DIVISOR)
STRIDED_ROWS = Struct("StridedRows", _STRIDED_ROWS)
SLOT_ARRAY = Struct("SlotArray", _SLOT_ARRAY)
LAYER_ENTRY = Struct("LayerEntry", _LAYER_ENTRY)
ERROR_RECORD = Struct(
    "ErrorRecord",
    _packed(("claimed", _U32), ("layer", _I32), ("token", _I64), ("slot", _I64)),
)
INSERT_PARAMS = Struct("InsertParams", _INSERT_PARAMS)
INDEX_ARRAY = Struct("IndexArray", _INDEX_ARRAY)
ROW_INDEX = Struct("RowIndex", _ROW_INDEX)
READ_PARAMS = Struct("ReadParams", _READ_PARAMS)

#: Values of ``RowIndex::kind``.
EVERY_SLOT, LISTED_SLOTS, BLOCK_TABLE = range(3)
#: Values of ``ReadParams::element``, by the name of the dtype.
ELEMENT_KINDS = {
    "bfloat16": 0,
    "float16": 1,
    "float32": 2,
    "float8_e4m3fn": 3,
    "float8_e5m2": 4,
}


def divisor(value: int) -> tuple[int, int, int]:
    """Return the members of a ``Divisor``: exact for all dividends below 2**31.

    Parameters
    ----------
    value : int
        1 to 2**31 - 1.

    Examples
    --------
    >>> _, multiplier, shift = divisor(48)
    >>> n = 2**31 - 1
    >>> ((n * multiplier >> 32) + n >> shift) == n // 48
    True
    """
    if not 1 <= value < INT32_END:
        raise ValueError(f"divisor: value must be between 1 and 2**31 - 1, got {value}")
    shift = (value - 1).bit_length()
    return value, ((1 << 32) * ((1 << shift) - value)) // value + 1, shift
