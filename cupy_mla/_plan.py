"""What validation hands to a backend: frozen plans, and the arrays that go with them.

A plan holds sizes, dtypes and strides, never a pointer, so that it serves every call whose
arrays look the same. All strides are in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ._arrays import ArrayRef, DeviceId
from .dtypes import DType
from .errors import reject_value
from .layouts import CacheLayout

#: A layer's scale: a number copied into the plan's target, an array read at each use, or none.
Scale = float | ArrayRef | None

_INT64_MAX = 2**63 - 1
#: Bytes that a 64-bit process can have addresses of.
_ADDRESS_SPACE = 2**47

#: Counters of a writer, in the order in which kernels keep them.
COUNTERS_ALWAYS = ("slots_out_of_range", "positions_out_of_range")
COUNTERS_COLLECTED = (
    "rows_written",
    "slots_padding",
    "nonfinite_elements",
    "saturated_elements",
)
COUNTERS = COUNTERS_ALWAYS + COUNTERS_COLLECTED


@dataclass(frozen=True, slots=True)
class CachePlan:
    """One layer's cache ``[num_blocks, block_size, width]``.

    Attributes
    ----------
    layout : CacheLayout
    num_blocks : int or None
        None where only the caller knows it: then no slot can be told to lie beyond the cache.
    block_size : int
        Rows a block.
    block_stride, row_stride : int
        Bytes from a block to the next, and from a row to the next.
    """

    layout: CacheLayout
    num_blocks: int | None
    block_size: int
    block_stride: int
    row_stride: int

    @property
    def num_slots(self) -> int:
        """Rows of the cache; the largest int64 where nobody knows."""
        return _INT64_MAX if self.num_blocks is None else self.num_blocks * self.block_size


@dataclass(frozen=True, slots=True)
class InsertPlan:
    """Storing `tokens` rows in each of `num_layers` caches.

    Attributes
    ----------
    operation : str
        Name for messages.
    device : DeviceId
    num_layers, tokens, kv_lora_rank, rope_dim : int
    input_dtype : numpy.dtype
        Of kv_c and of k_pe.
    kv_c_strides, k_pe_strides, slot_strides : (int, int)
        Bytes a layer and a token; k_pe and a list of slots without meaning hold zeros.
    slot_dtype : numpy.dtype
    slots_listed : bool
        Whether each layer has a slot array of its own, or none.
    """

    operation: str
    device: DeviceId
    num_layers: int
    tokens: int
    kv_lora_rank: int
    rope_dim: int
    input_dtype: DType
    kv_c_strides: tuple[int, int]
    k_pe_strides: tuple[int, int]
    slot_strides: tuple[int, int]
    slot_dtype: DType
    slots_listed: bool


@dataclass(frozen=True, slots=True)
class InsertInputs:
    """A step's arrays.

    `slots` is one array that serves all layers by `InsertPlan.slot_strides`, or an array a layer
    (None leaves the layer out).
    """

    kv_c: ArrayRef
    k_pe: ArrayRef | None
    slots: ArrayRef | tuple[ArrayRef | None, ...]

    def addresses(self) -> tuple[int, int, Any]:
        """Return where the arrays lie: 0 for none, a tuple for slots a layer."""
        slots: Any
        if isinstance(self.slots, tuple):
            slots = tuple(0 if ref is None else ref.ptr for ref in self.slots)
        else:
            slots = self.slots.ptr
        return self.kv_c.ptr, 0 if self.k_pe is None else self.k_pe.ptr, slots

    def arrays(self) -> list[ArrayRef]:
        """Return the arrays there are."""
        slots = self.slots if isinstance(self.slots, tuple) else (self.slots,)
        return [ref for ref in (self.kv_c, self.k_pe, *slots) if ref is not None]


@dataclass(frozen=True, slots=True)
class GroupedPointers:
    """Caches known only by device arrays of pointers and scales, all of one geometry."""

    cache_ptrs: ArrayRef
    scales: ArrayRef | None
    cache: CachePlan

    def arrays(self) -> list[ArrayRef]:
        """Return the arrays there are."""
        return [ref for ref in (self.cache_ptrs, self.scales) if ref is not None]

    def addresses(self) -> tuple[int, int]:
        """Return where both arrays lie, 0 for none."""
        return self.cache_ptrs.ptr, 0 if self.scales is None else self.scales.ptr


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Reading rows back as ``[tokens, kv_lora_rank + rope_dim]`` of `out_dtype`."""

    operation: str
    device: DeviceId
    cache: CachePlan
    tokens: int
    slot_stride: int
    slot_dtype: DType
    out_dtype: DType


class Target(Protocol):
    """The caches that inserts go to, with scales and counters, as a backend keeps them."""

    #: Of the caches.
    framework: str

    def rebind(self, caches: Sequence[ArrayRef], plans: Sequence[CachePlan]) -> None:
        """Put other arrays in place of the caches."""

    def update_scales(self, scales: Sequence[Scale]) -> None:
        """Put other scales in place of the scales."""

    def scale_values(self) -> np.ndarray[Any, Any]:
        """Return the scales as float32 [L], NaN where a layer has none."""

    def counts(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return a copy of the counters, int64 [L] each."""

    def take_errors(self) -> list[ErrorRecord]:
        """Return what was recorded since the last call, and arm the records again."""


#: Kinds of `ErrorRecord`, in the order in which they are told; the values of ``ErrorKind``.
ERROR_KINDS = ("slot", "position", "nonfinite")


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """The first event of its kind: ``slot`` (out of range), ``position`` or ``nonfinite``."""

    kind: str
    layer: int
    token: int
    slot: int


@dataclass(frozen=True, slots=True)
class BlockTablePlan:
    """Which row of a cache each output row is, by requests' lengths and their block table.

    Output row `t` belongs to request `i` where ``first[i] <= t < first[i + 1]``; its position is
    ``t - first[i] + start[i]``, its block ``table[i, position // block_size]``. A position below
    0 or beyond the table's columns, and a block that the cache does not have, name no row.

    Attributes
    ----------
    num_seqs, max_blocks : int
        Requests, and columns of the block table.
    table_strides : (int, int)
        Bytes a request and a column.
    table_dtype : numpy.dtype
    first_stride : int
    first_dtype : numpy.dtype
        Of the first output row of each request: ``num_seqs + 1`` entries that do not decrease, or
        ``num_seqs`` where `open_ended`. Of several requests that begin at one row the last has it.
    start_stride : int
    start_dtype : numpy.dtype
        Of each request's position at its first output row; without an array all are 0.
    owner_stride : int
    owner_dtype : numpy.dtype
        Of the request of each output row where the caller gives it; without an array it is
        searched for. An owner that is no request, or whose rows do not hold `t`, owns nothing.
    open_ended : bool
        Whether the last request goes on to the last output row; never with owners.
    """

    num_seqs: int
    max_blocks: int
    table_strides: tuple[int, int]
    table_dtype: DType
    first_stride: int
    first_dtype: DType
    start_stride: int
    start_dtype: DType
    owner_stride: int
    owner_dtype: DType
    open_ended: bool


@dataclass(frozen=True, slots=True)
class BlockTable:
    """The arrays of a `BlockTablePlan`; None where the caller gave none."""

    table: ArrayRef
    first: ArrayRef
    start: ArrayRef | None
    owner: ArrayRef | None


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """Reading the rows that a block table names, as ``[tokens, kv_lora_rank + rope_dim]``.

    Attributes
    ----------
    operation : str
        Name for messages.
    device : DeviceId
    cache : CachePlan
    rows : BlockTablePlan
    tokens : int or None
        Output rows. None is the last entry of `BlockTable.first`: reading it waits for the device.
    out_stride : int
        Bytes from an output row to the next.
    out_dtype : numpy.dtype
    zero_unowned : bool
        Whether output rows of no request become zeros (new arrays) or stay as they are. Rows of
        a request that name no row of the cache become zeros always.
    """

    operation: str
    device: DeviceId
    cache: CachePlan
    rows: BlockTablePlan
    tokens: int | None
    out_stride: int
    out_dtype: DType
    zero_unowned: bool

    def counted(self, last: int) -> int:
        """Return the last entry of `BlockTable.first` as output rows, or raise for what is none."""
        if last < 0:
            reject_value(self.operation, "cu_seq_lens", "end with the number of tokens", last)
        self.check_room("cu_seq_lens", last)
        return last

    def check_room(self, argument: str, tokens: int) -> None:
        """Refuse more output rows than any machine has memory for."""
        if tokens * self.out_stride >= _ADDRESS_SPACE:
            expected = f"name output rows of {self.out_stride} bytes that fit into memory"
            reject_value(self.operation, argument, expected, tokens)


@dataclass(frozen=True, slots=True)
class IndexerGatherPlan:
    """Copying the codes and scales of the indexer keys that a block table names.

    Attributes
    ----------
    operation : str
        Name for messages.
    device : DeviceId
    cache : CachePlan
    rows : BlockTablePlan
    tokens : int
        Output rows. Those of no request stay as they are; those of a request that name no row of
        the cache become zeros, codes and scale.
    code_stride, scale_stride : int
        Bytes from an output row to the next.
    """

    operation: str
    device: DeviceId
    cache: CachePlan
    rows: BlockTablePlan
    tokens: int
    code_stride: int
    scale_stride: int


@dataclass(frozen=True, slots=True)
class ConvertPlan:
    """Writing rows of one cache to the same slots of another, of another layout or scale.

    Attributes
    ----------
    operation : str
        Name for messages.
    device : DeviceId
    source, destination : CachePlan
        Of equal `num_slots`.
    count : int
        Slots to convert: all of the cache in order where `slot_dtype` is None, else an array.
    slot_stride : int
    slot_dtype : numpy.dtype or None
    copies : bool
        Whether rows are the same bytes in both, so that they are copied.
    """

    operation: str
    device: DeviceId
    source: CachePlan
    destination: CachePlan
    count: int
    slot_stride: int
    slot_dtype: DType | None
    copies: bool


def layers_by_layout(layouts: Sequence[CacheLayout]) -> dict[CacheLayout, tuple[int, ...]]:
    """Return the layers of each layout, in the order in which layouts first appear."""
    groups: dict[CacheLayout, tuple[int, ...]] = {}
    for layer, layout in enumerate(layouts):
        groups[layout] = (*groups.get(layout, ()), layer)
    return groups
