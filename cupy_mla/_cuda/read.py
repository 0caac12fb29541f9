"""Reading rows back on a device: to arrays, to other caches, and to the host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cupy_mla._arrays import ArrayRef, describe
from cupy_mla._plan import (
    BlockTable,
    CachePlan,
    ConvertPlan,
    GatherPlan,
    IndexerGatherPlan,
    ReadPlan,
)
from cupy_mla.dtypes import INT64, DType
from cupy_mla.errors import reject_value

from .convert import prepare_convert
from .device import Device, Memory
from .prepared import Known
from .read_launch import PreparedRead, ReadLaunch, parts_of, pieces_of
from .target import CallTarget

Array = np.ndarray[Any, Any]

#: Bytes of rows that go to the host at a time.
_CHUNK_BYTES = 4 << 20

# Places of a call's addresses; a block table has four from `_ROWS` on, slots have one.
_CACHE, _SCALE, _OUT, _SECOND_OUT, _ROWS = range(5)


def _launch_from(device: Device, target: CallTarget, rows: int, *, whole: bool) -> ReadLaunch:
    """Begin a launch that reads a cache: its rows as they are, or what is decoded of them."""
    launch = ReadLaunch(device, rows)
    pieces = pieces_of(target.plan) if whole else parts_of(target.plan)
    launch.cache("source", target.entry, target.plan, pieces, _CACHE, _SCALE)
    return launch


def _are_bits(plan: CachePlan, dtype: DType) -> bool:
    """Whether rows read as `dtype` are what the cache holds."""
    return plan.layout.storage_dtype == dtype


def _to_array(
    device: Device, target: CallTarget, rows: int, stride: int, dtype: DType
) -> ReadLaunch:
    """Begin a launch that reads rows as numbers."""
    launch = _launch_from(device, target, rows, whole=_are_bits(target.plan, dtype))
    launch.array(0, stride, _OUT)
    launch.arguments["zero_missing"] = 1
    return launch


def _finish(launch: ReadLaunch, plan: CachePlan, dtype: DType) -> PreparedRead:
    if _are_bits(plan, dtype):
        return launch.copy(pieces_of(plan))
    return launch.decode(plan.layout, dtype)


def prepare_read_slots(device: Device, plan: ReadPlan, target: CallTarget) -> PreparedRead:
    """Prepare reading slots into a new array."""
    stride = _width(plan.cache) * plan.out_dtype.itemsize
    launch = _to_array(device, target, plan.tokens, stride, plan.out_dtype)
    launch.slots(plan.slot_stride, plan.slot_dtype, _ROWS)
    return _finish(launch, plan.cache, plan.out_dtype)


def prepare_gather(device: Device, plan: GatherPlan, target: CallTarget) -> PreparedRead:
    """Prepare a gather whose number of rows is known."""
    launch = _to_array(device, target, plan.tokens or 0, plan.out_stride, plan.out_dtype)
    launch.table(plan.rows, plan.cache, _ROWS)
    launch.arguments["zero_unowned"] = plan.zero_unowned
    return _finish(launch, plan.cache, plan.out_dtype)


def prepare_gather_indexer(
    device: Device, plan: IndexerGatherPlan, target: CallTarget
) -> PreparedRead:
    """Prepare copying codes and scales to arrays of their own."""
    launch = _launch_from(device, target, plan.tokens, whole=True)
    launch.array(0, plan.code_stride, _OUT)
    launch.array(1, plan.scale_stride, _SECOND_OUT)
    launch.table(plan.rows, plan.cache, _ROWS)
    launch.arguments["zero_missing"] = 1
    return launch.copy(pieces_of(plan.cache))


def prepare_host_rows(device: Device, target: CallTarget, rows: int) -> PreparedRead:
    """Prepare copying rows of listed slots, the pieces of a row one behind the other."""
    launch = _launch_from(device, target, rows, whole=True)
    layout = target.plan.layout
    for place, plane in enumerate(layout.planes):
        launch.array(place, layout.row_bytes, _OUT, plane.offset)
    launch.slots(INT64.itemsize, INT64, _ROWS)
    return launch.copy(pieces_of(target.plan))


def _width(cache: CachePlan) -> int:
    return cache.layout.kv_lora_rank + cache.layout.rope_dim


def _addresses(arrays: BlockTable) -> list[int]:
    refs = (arrays.table, arrays.first, arrays.start, arrays.owner)
    return [0 if ref is None else ref.ptr for ref in refs]


def _present(arrays: BlockTable) -> list[ArrayRef]:
    refs = (arrays.table, arrays.first, arrays.start, arrays.owner)
    return [ref for ref in refs if ref is not None]


class CudaReads(ABC):
    """What the CUDA backend reads."""

    device: Device

    def __init__(self) -> None:
        super().__init__()
        self._reads = Known()

    @abstractmethod
    def _stream(self, operation: str, stream: object, owner: ArrayRef) -> int:
        """Return the raw pointer of the stream that a call runs on."""

    @abstractmethod
    def _run(
        self,
        operation: str,
        launch: Callable[[int], None],
        arrays: Iterable[ArrayRef],
        owner: ArrayRef,
        stream: object,
    ) -> None:
        """Launch on the right stream, behind the producers of the arrays."""

    def _launch(
        self,
        operation: str,
        prepared: PreparedRead,
        addresses: Sequence[int],
        arrays: Iterable[ArrayRef],
        owner: ArrayRef,
        stream: object,
    ) -> None:
        self._run(
            operation, lambda pointer: prepared.run(addresses, pointer), arrays, owner, stream
        )

    def _empty(self, tokens: int, cache: CachePlan, dtype: DType, like: ArrayRef) -> ArrayRef:
        """Allocate an output of the framework of `like`, or CuPy's; its owner is the array.

        It comes from a pool, in the order of its framework's current stream. That is where the
        kernel runs; on any other stream `_run` orders and keeps it, as it does inputs.
        """
        array = self.device.empty((tokens, _width(cache)), dtype, like.framework)
        ref = describe(array)
        if ref is None:
            raise TypeError(f"{type(array).__name__} is no array")
        return ref

    def read_slots(
        self, plan: ReadPlan, slots: ArrayRef, target: Any, like: ArrayRef, stream: object
    ) -> Any:
        """Read rows back into a new array of the framework of `like`, or CuPy's."""
        prepared = self._reads.get(
            (plan, target.looks()), lambda: prepare_read_slots(self.device, plan, target)
        )
        out = self._empty(plan.tokens, plan.cache, plan.out_dtype, like)
        addresses = [*target.addresses(), out.ptr, 0, slots.ptr]
        used = [*target.arrays(), slots, out]
        self._launch(plan.operation, prepared, addresses, used, out, stream)
        return out.owner

    def gather(
        self,
        plan: GatherPlan,
        arrays: BlockTable,
        target: Any,
        out: ArrayRef | None,
        like: ArrayRef,
        stream: object,
    ) -> Any:
        """Read the rows that a block table names into `out`, or a new array as `like` is."""
        if plan.tokens is None:
            plan = replace(plan, tokens=self._count_tokens(plan, arrays, like, stream))
        prepared = self._reads.get(
            (plan, target.looks()), lambda: prepare_gather(self.device, plan, target)
        )
        owner = like
        if out is None:
            out = owner = self._empty(plan.tokens or 0, plan.cache, plan.out_dtype, like)
        addresses = [*target.addresses(), out.ptr, 0, *_addresses(arrays)]
        used = [*target.arrays(), *_present(arrays), out]
        self._launch(plan.operation, prepared, addresses, used, owner, stream)
        return out.owner

    def _count_tokens(
        self, plan: GatherPlan, arrays: BlockTable, like: ArrayRef, stream: object
    ) -> int:
        """Return what the requests' lengths end with, after waiting for the device."""
        pointer = self._stream(plan.operation, stream, like)
        if self.device.is_capturing(pointer):
            reject_value(
                plan.operation,
                "num_tokens or out",
                "be given while a graph is captured: the device would have to be waited for",
                None,
            )
        first, rows = arrays.first, plan.rows
        place = first.ptr + rows.num_seqs * rows.first_stride
        raw = self.device.download(Memory(place, rows.first_dtype.itemsize, first), pointer)
        return plan.counted(int(raw.view(rows.first_dtype)[0]))

    def gather_indexer(
        self,
        plan: IndexerGatherPlan,
        arrays: BlockTable,
        target: Any,
        codes: ArrayRef,
        scales: ArrayRef,
        stream: object,
    ) -> None:
        """Copy the codes and scales of the indexer keys that a block table names."""
        prepared = self._reads.get(
            (plan, target.looks()), lambda: prepare_gather_indexer(self.device, plan, target)
        )
        addresses = [*target.addresses(), codes.ptr, scales.ptr, *_addresses(arrays)]
        used = [*target.arrays(), *_present(arrays), codes, scales]
        self._launch(plan.operation, prepared, addresses, used, target.caches[0], stream)

    def convert(
        self,
        plan: ConvertPlan,
        slots: ArrayRef | None,
        source: Any,
        destination: Any,
        stream: object,
    ) -> None:
        """Write rows of one cache to the same slots of another."""
        prepared = self._reads.get(
            (plan, source.looks(), destination.looks()),
            lambda: prepare_convert(self.device, plan, source, destination),
        )
        addresses = [
            *source.addresses(),
            *destination.addresses(),
            0 if slots is None else slots.ptr,
        ]
        used = [*destination.arrays(), *source.arrays(), *([] if slots is None else [slots])]
        self._launch(plan.operation, prepared, addresses, used, destination.caches[0], stream)

    def host_rows(self, target: Any, slots: Array) -> Array:
        """Copy rows to the host as they are: uint8 ``[n, row_bytes]``, after waiting."""
        layout, cache = target.plan.layout, target.caches[0]
        rows = np.empty((slots.size, layout.row_bytes), np.uint8)
        step = max(1, min(slots.size, _CHUNK_BYTES // layout.row_bytes))
        stream = self.device.current_stream(cache.framework)
        numbers = self.device.allocate(step * INT64.itemsize)
        packed = self.device.allocate(step * layout.row_bytes)
        for begin in range(0, slots.size, step):
            part = np.ascontiguousarray(slots[begin : begin + step], INT64)
            self.device.upload(Memory(numbers.ptr, part.nbytes, numbers), part, stream)
            prepared = self._prepare_chunk(target, part.size)
            addresses = [*target.addresses(), packed.ptr, packed.ptr, numbers.ptr]
            self._launch("host_rows", prepared, addresses, target.arrays(), cache, None)
            size = part.size * layout.row_bytes
            raw = self.device.download(Memory(packed.ptr, size, packed), stream)
            rows[begin : begin + part.size] = raw.reshape(part.size, layout.row_bytes)
        return rows

    def _prepare_chunk(self, target: CallTarget, rows: int) -> PreparedRead:
        return self._reads.get(
            ("host_rows", target.looks(), rows),
            lambda: prepare_host_rows(self.device, target, rows),
        )

    def host_copy(self, array: ArrayRef) -> Array:
        """Return an array as a host array, after waiting."""
        if not array.size:
            return np.empty(array.shape, array.dtype)
        reach = [
            step * (extent - 1) for step, extent in zip(array.strides, array.shape, strict=True)
        ]
        low = sum(step for step in reach if step < 0)
        high = sum(step for step in reach if step > 0) + array.dtype.itemsize
        raw = self.device.download(
            Memory(array.ptr + low, high - low, array.owner),
            self.device.current_stream(array.framework),
        )
        return np.ndarray(array.shape, array.dtype, raw, -low, array.strides)
