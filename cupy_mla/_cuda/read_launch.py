"""Launches of the kernels that read rows: gather, copy and convert.

They share one argument structure. What does not change between calls whose arrays look the same
is filled in once; a call then puts in addresses and launches.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cupy_mla._plan import BlockTablePlan, CachePlan
from cupy_mla.dtypes import DType
from cupy_mla.layouts import CacheLayout, get_layout

from . import params, registry
from .compiler import load
from .device import Arguments, Device
from .geometry import LaunchShape, read_shape
from .registry import Specialisation

Array = np.ndarray[Any, Any]

_POINTER = struct.Struct("<Q")
#: An array counts as a cache of one block of so many rows.
_ONE_BLOCK = params.INT32_END - 1
_VECTOR_BYTES = 16
#: Elements that a conversion takes at a time.
_RUN = 16


class Address(NamedTuple):
    """Where one of a call's addresses goes in the argument structure.

    Attributes
    ----------
    offset : int
    argument : int
        Its place among the addresses of a call.
    delta : int
        What is added to it.
    """

    offset: int
    argument: int
    delta: int = 0


class Piece(NamedTuple):
    """A part of each row of a cache that a kernel finds by itself.

    Attributes
    ----------
    start : int
        Bytes from the beginning of a block to the part of its first row.
    stride : int
        Bytes from there to the next row's.
    nbytes : int
    """

    start: int
    stride: int
    nbytes: int


def pieces_of(cache: CachePlan) -> tuple[Piece, ...]:
    """Return the runs of bytes that the rows of a cache consist of."""
    layout = cache.layout
    if layout.is_planar:
        return tuple(
            Piece(plane.start(cache.block_size), plane.nbytes, plane.nbytes)
            for plane in layout.planes
        )
    return (Piece(0, cache.row_stride, layout.row_bytes),)


def parts_of(cache: CachePlan) -> tuple[Piece, ...]:
    """Return what kernels decode: rows or their codes, and the scales that belong to those."""
    pieces = pieces_of(cache)
    scale = cache.layout.field("scale")
    if scale is None or len(pieces) > 1:
        return pieces
    return *pieces, Piece(scale.offset, cache.row_stride, scale.nbytes)


class PreparedRead:
    """A launch, for all arrays of one plan; safe to run from several threads at a time.

    Parameters
    ----------
    device : Device
    function : object
        Of the device.
    shape : LaunchShape or None
        None where there are no rows.
    arguments : numpy array of one element
        All but addresses.
    addresses : sequence of Address
    """

    __slots__ = ("_addresses", "_device", "_free", "_function", "_shape", "_template")

    def __init__(
        self,
        device: Device,
        function: Any,
        shape: LaunchShape | None,
        arguments: Array,
        addresses: Sequence[Address],
    ) -> None:
        self._device, self._function, self._shape = device, function, shape
        self._template = arguments.tobytes()
        self._addresses = tuple(addresses)
        self._free: list[Arguments] = []

    def run(self, addresses: Sequence[int], stream: int) -> None:
        """Launch with the addresses of a call's arrays, 0 for those there are not."""
        if self._shape is None:
            return
        # Taken from the list and put back: no two threads ever fill in the same structure.
        try:
            arguments = self._free.pop()
        except IndexError:
            arguments = Arguments(self._template)
        for offset, argument, delta in self._addresses:
            _POINTER.pack_into(arguments.buffer, offset, addresses[argument] + delta)
        self._device.launch(self._function, self._shape.grid, self._shape.block, arguments, stream)
        self._free.append(arguments)


class ReadLaunch:
    """The argument structure of a launch as it comes together.

    Parameters
    ----------
    device : Device
    rows : int
        Rows of the operation.
    """

    def __init__(self, device: Device, rows: int) -> None:
        self._device = device
        self._rows = rows
        self._addresses: list[Address] = []
        self.arguments = params.READ_PARAMS.zeros()
        self.arguments["row_count"] = rows

    def cache(
        self,
        member: str,
        entry: Array,
        plan: CachePlan,
        pieces: Sequence[Piece],
        argument: int,
        scale_argument: int,
    ) -> None:
        """Fill in ``source`` or ``destination`` with a cache.

        Parameters
        ----------
        member : str
        entry : numpy array of one element
            The cache as a ``LayerEntry``.
        plan : CachePlan
        pieces : sequence of Piece
            One or two.
        argument, scale_argument : int
            Places of the addresses of the cache and of its scale.
        """
        for place in range(2):
            piece = pieces[min(place, len(pieces) - 1)]
            self._entry(member, place, entry, argument, piece.start)
            target = self.arguments[member]
            # A step that no row takes tells nothing about alignment.
            target["row_stride"][0, place] = piece.stride if plan.block_size > 1 else 0
            if plan.num_blocks == 1:
                target["block_stride"][0, place] = 0
        offset = self._offset(member, 0) + params.LAYER_ENTRY.offset("scale")
        self._addresses.append(Address(offset, scale_argument))

    def array(self, place: int, stride: int, argument: int, start: int = 0) -> None:
        """Fill in a piece of ``destination`` with an array whose rows are `stride` bytes apart."""
        entry = params.LAYER_ENTRY.zeros()
        entry["row_stride"] = stride if self._rows > 1 else 0
        entry["num_slots"] = self._rows
        entry["block_size"] = params.divisor(_ONE_BLOCK)
        self._entry("destination", place, entry, argument, start)

    def _offset(self, member: str, place: int) -> int:
        return params.READ_PARAMS.offset(member) + place * params.LAYER_ENTRY.dtype.itemsize

    def _entry(self, member: str, place: int, entry: Array, argument: int, start: int) -> None:
        self.arguments[member][0, place] = entry[0]
        offset = self._offset(member, place) + params.LAYER_ENTRY.offset("cache")
        self._addresses.append(Address(offset, argument, start))

    def slots(self, stride: int, dtype: DType, argument: int) -> None:
        """Take the slots of an array as rows."""
        self.arguments["rows"]["kind"] = params.LISTED_SLOTS
        self._indices("slots", stride, dtype, argument)

    def every_slot(self) -> None:
        """Take all slots of the cache as rows."""
        self.arguments["rows"]["kind"] = params.EVERY_SLOT

    def table(self, plan: BlockTablePlan, cache: CachePlan, argument: int) -> None:
        """Take the rows that a block table names.

        The addresses of its arrays begin at `argument`, in the order of `BlockTable`.
        """
        rows = self.arguments["rows"]
        rows["kind"] = params.BLOCK_TABLE
        rows["num_seqs"] = plan.num_seqs
        rows["open_ended"] = plan.open_ended
        rows["request_stride"] = plan.table_strides[0]
        rows["positions"] = plan.max_blocks * cache.block_size
        rows["num_blocks"] = cache.num_blocks or 0
        self._indices("blocks", plan.table_strides[1], plan.table_dtype, argument)
        self._indices("first", plan.first_stride, plan.first_dtype, argument + 1)
        self._indices("start", plan.start_stride, plan.start_dtype, argument + 2)
        self._indices("owner", plan.owner_stride, plan.owner_dtype, argument + 3)

    def _indices(self, name: str, stride: int, dtype: DType, argument: int) -> None:
        target = self.arguments["rows"][name]
        target["stride"], target["bytes"] = stride, dtype.itemsize
        offset = params.READ_PARAMS.offset("rows") + params.ROW_INDEX.offset(name)
        self._addresses.append(Address(offset + params.INDEX_ARRAY.offset("data"), argument))

    def copy(self, pieces: Sequence[Piece]) -> PreparedRead:
        """Finish a launch that copies the pieces of rows as they are."""
        special = registry.find("copy", "indexer_fp8" if len(pieces) > 1 else "bfloat16", "uint8")
        self.arguments["width"] = pieces[0].nbytes
        self.arguments["second_bytes"] = sum(piece.nbytes for piece in pieces[1:])
        # One program serves all layouts, so it is compiled with the constants of the same one.
        layout = get_layout(special.format.layout)
        written = sum(piece.nbytes for piece in pieces)
        return self._finish(special, layout, pieces[0].nbytes, _VECTOR_BYTES, written)

    def decode(self, layout: CacheLayout, dtype: DType) -> PreparedRead:
        """Finish a launch that decodes rows of a layout to rows of another dtype."""
        special = registry.find("gather", layout.name, dtype.name)
        width = layout.kv_lora_rank + layout.rope_dim
        self.arguments["width"] = width
        unit = _VECTOR_BYTES // dtype.itemsize
        return self._finish(special, layout, width, unit, width * dtype.itemsize)

    def encode(self, source: CacheLayout, destination: CacheLayout) -> PreparedRead:
        """Finish a launch that decodes rows of any layout and encodes them as fp8."""
        special = registry.find("convert", destination.name, "float32")
        width = source.kv_lora_rank + source.rope_dim
        arguments = self.arguments
        arguments["width"] = arguments["rope_first"] = width
        arguments["element"] = params.ELEMENT_KINDS[source.code_dtype.name]
        if source.tile:
            arguments["tile_shift"] = source.tile.bit_length() - 1
            rope = source.field("rope")
            if rope is not None:
                arguments["rope_first"] = source.kv_lora_rank
                arguments["rope_offset"] = rope.offset
        return self._finish(special, destination, width, _RUN, destination.row_bytes)

    def _finish(
        self,
        special: Specialisation,
        layout: CacheLayout,
        size: int,
        unit: int,
        written: int,
    ) -> PreparedRead:
        device = self._device
        shape = None
        function = None
        if self._rows:
            function = load(device, special, layout)
            shape = read_shape(
                special, rows=self._rows, size=size, unit=unit, sm_count=device.sm_count
            )
            self.arguments["block_rows"] = shape.block_tokens
            self.arguments["stream_stores"] = self._rows * written > device.l2_bytes
        return PreparedRead(device, function, shape, self.arguments, self._addresses)
