"""Launching the kernels of ``baselines.cu``, which operations are compared with."""

from __future__ import annotations

import hashlib
import importlib.resources
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from cupy_mla import dtypes
from cupy_mla._arrays import ArrayRef
from cupy_mla._cuda import sources
from cupy_mla._cuda.device import Arguments, Device, Memory
from cupy_mla._cuda.params import Struct
from cupy_mla.layouts import CacheLayout

from .problem import Array, random_values

_FILE = "baselines.cu"
_PTR, _I64, _I32 = "<u8", "<i8", "<i4"


def _struct(name: str, *members: tuple[str, str]) -> Struct:
    return Struct(name, np.dtype(list(members)))


EMPTY_PARAMS = _struct("EmptyParams", ("nothing", _I64))
SPIN_PARAMS = _struct("SpinParams", ("cycles", _I64))
READ_ALL_PARAMS = _struct(
    "ReadAllParams", ("source", _PTR), ("sink", _PTR), ("vectors", _I64), ("key", _I64)
)
COPY_PARAMS = _struct(
    "CopyParams",
    ("source", _PTR),
    ("destination", _PTR),
    ("read_vectors", _I64),
    ("written_vectors", _I64),
    ("tile_reads", _I32),
    ("tile_writes", _I32),
    ("tiles", _I32),
    ("streaming", _I32),
    ("key", _I64),
)
SCALAR_PARAMS = _struct(
    "ScalarParams",
    ("kv_c", _PTR),
    ("kv_c_layer_stride", _I64),
    ("kv_c_token_stride", _I64),
    ("k_pe", _PTR),
    ("k_pe_layer_stride", _I64),
    ("k_pe_token_stride", _I64),
    ("slots", _PTR),
    ("caches", _PTR),
    ("scales", _PTR),
    ("block_stride", _I64),
    ("row_stride", _I64),
    ("tokens", _I32),
    ("block_size", _I32),
    ("lora_rank", _I32),
    ("rope_dim", _I32),
    ("scale_offset", _I32),
    ("rope_offset", _I32),
)
READ_ROWS_PARAMS = _struct(
    "ReadRowsParams",
    ("caches", _PTR),
    ("slots", _PTR),
    ("sink", _PTR),
    ("block_stride", _I64),
    ("row_stride", _I64),
    ("tokens", _I32),
    ("block_size", _I32),
    ("row_vectors", _I32),
    ("key", _I32),
)

#: Vectors that a block of the copy moves at a time, the larger of reads and writes: four a thread.
_COPY_THREADS = 288
_COPY_TILE = 4 * _COPY_THREADS
VECTOR = 16
_READ_LANES, _READ_ROWS = 36, 8
#: No GPU runs faster, so that a wait is never shorter than was asked for.
_CYCLES_A_MICROSECOND = 3000
_ELEMENTS = {"fp8_e4m3": "E4m3", "fp8_e5m2": "E5m2"}
_INPUTS = {"bfloat16": "Bfloat16", "float16": "Float16", "float32": "Float32"}


@cache
def _text() -> str:
    return (importlib.resources.files(__package__) / _FILE).read_text(encoding="utf-8")


def digest() -> str:
    """Return the SHA-256 of ``baselines.cu``."""
    return hashlib.sha256(_text().encode()).hexdigest()


def source(function: str, params: Struct, entry: str) -> str:
    """Return the source of one kernel.

    Parameters
    ----------
    function : str
        Name of the function in namespace ``bench``, template arguments and all.
    params : Struct
        Its only argument.
    entry : str
        Name of the ``extern "C"`` function.
    """
    return (
        f"{sources.flatten(('exact_math.cuh',))}"
        f'#line 1 "{_FILE}"\n'
        f"{_text()}"
        '#line 1 "entry"\n'
        f'static_assert(sizeof(bench::{params.name}) == {params.dtype.itemsize}, "size");\n'
        f'extern "C" __global__ void {entry}(const __grid_constant__ bench::{params.name} p) {{\n'
        f"  bench::{function}(p);\n"
        "}\n"
    )


class CopyVariant(NamedTuple):
    """A way to launch the copy; the fastest one is the ceiling."""

    tiles: int
    streaming: bool

    def __str__(self) -> str:
        stores = "streaming" if self.streaming else "plain"
        return f"{self.tiles} tile{'s' if self.tiles > 1 else ''} a block, {stores} stores"


COPY_VARIANTS = tuple(
    CopyVariant(tiles, streaming) for tiles in (1, 4) for streaming in (False, True)
)


class Strided(NamedTuple):
    """Rows in device memory: an address, and bytes from a layer and from a token to the next."""

    data: int
    layer_stride: int
    token_stride: int


class Caches(NamedTuple):
    """The caches of all layers, alike but for their addresses; strides in bytes."""

    layout: CacheLayout
    addresses: Sequence[int]
    block_size: int
    block_stride: int
    row_stride: int
    scales: Sequence[float] | None = None

    @classmethod
    def of(cls, layout: CacheLayout, refs: Sequence[ArrayRef], scales: Any = None) -> Caches:
        """Describe caches of one shape."""
        first = refs[0]
        block_stride, row_stride = first.strides[:2]
        addresses = [ref.ptr for ref in refs]
        return cls(layout, addresses, first.shape[1], block_stride, row_stride, scales)


@dataclass(frozen=True, eq=False)
class Launch:
    """A prepared launch, to be called.

    Attributes
    ----------
    owner : Baselines
    function : object
        Of the device.
    grid, block
        As a device takes them.
    arguments : Arguments
    keep : tuple
        What has to live as long.
    """

    owner: Baselines
    function: Any
    grid: int
    block: tuple[int, int]
    arguments: Arguments
    keep: tuple[Any, ...] = ()

    def __call__(self) -> None:
        """Launch on the current stream."""
        stream = self.owner.stream()
        self.owner.device.launch(self.function, self.grid, self.block, self.arguments, stream)


class Baselines:
    """The kernels, on a device.

    Parameters
    ----------
    device : Device
    framework : str
        Whose current stream they run on.
    """

    def __init__(self, device: Device, framework: str = "cupy") -> None:
        self.device = device
        self.stream = device.stream_getter(framework)
        self._functions: dict[str, Any] = {}

    def _prepare(
        self,
        name: str,
        params: Struct,
        values: Array,
        grid: int,
        block: tuple[int, int],
        *,
        entry: str | None = None,
        keep: tuple[Any, ...] = (),
    ) -> Launch:
        """Compile a kernel when it is first asked for, and prepare a launch of it."""
        entry = entry or f"bench_{name}"
        function = self._functions.get(entry)
        if function is None:
            text = source(name, params, entry)
            function = self._functions[entry] = self.device.compile(text, entry)
        return Launch(self, function, grid, block, Arguments(values.tobytes()), keep)

    def _table(self, values: Array) -> Memory:
        """Put an array in device memory."""
        memory = self.device.allocate(values.nbytes)
        self.device.upload(memory, values.view(np.uint8), self.stream())
        return memory

    def empty(self) -> Launch:
        """Return a kernel that does nothing."""
        return self._prepare("empty", EMPTY_PARAMS, EMPTY_PARAMS.zeros(), 1, (32, 1))

    def spin(self, microseconds: float) -> Launch:
        """Return a kernel that keeps the device busy for some time, or a little longer."""
        values = SPIN_PARAMS.zeros()
        values["cycles"] = int(microseconds * _CYCLES_A_MICROSECOND)
        return self._prepare("spin", SPIN_PARAMS, values, 1, (1, 1))

    def flush(self, nbytes: int) -> Launch:
        """Return a kernel that reads so many bytes which are used for nothing else."""
        buffer, sink = self.device.allocate(nbytes), self.device.allocate(1)
        values = READ_ALL_PARAMS.zeros()
        values["source"], values["sink"] = buffer.ptr, sink.ptr
        values["vectors"], values["key"] = nbytes // VECTOR, 1
        grid = 8 * self.device.sm_count
        return self._prepare(
            "read_all", READ_ALL_PARAMS, values, grid, (256, 1), keep=(buffer, sink)
        )

    def copy_buffers(self, read: int, written: int) -> tuple[Memory, Memory]:
        """Return buffers to copy from and to, the first of random bytes."""
        sizes = [-(-nbytes // VECTOR) * VECTOR for nbytes in (read, written)]
        buffers = self.device.allocate(sizes[0]), self.device.allocate(sizes[1])
        values = random_values((sizes[0] // 2,), dtypes.BFLOAT16)
        self.device.upload(buffers[0], values.view(np.uint8), self.stream())
        return buffers

    def copy(
        self, buffers: tuple[Memory, Memory], read: int, written: int, variant: CopyVariant
    ) -> Launch:
        """Return a copy that reads and writes given numbers of bytes.

        Parameters
        ----------
        buffers : (Memory, Memory)
            From `copy_buffers`.
        read, written : int
            Bytes, at least one of each; rounded up to whole vectors.
        variant : CopyVariant
        """
        reads, writes = (-(-nbytes // VECTOR) for nbytes in (read, written))
        more = max(reads, writes)
        values = COPY_PARAMS.zeros()
        values["source"], values["destination"] = buffers[0].ptr, buffers[1].ptr
        values["read_vectors"], values["written_vectors"] = reads, writes
        values["tile_reads"] = -(-_COPY_TILE * reads // more)
        values["tile_writes"] = -(-_COPY_TILE * writes // more)
        values["tiles"], values["streaming"], values["key"] = variant.tiles, variant.streaming, 1
        grid = -(-more // (_COPY_TILE * variant.tiles))
        return self._prepare("copy", COPY_PARAMS, values, grid, (_COPY_THREADS, 1), keep=buffers)

    def scalar_insert(
        self, caches: Caches, input_name: str, kv_c: Strided, k_pe: Strided, slots: int, tokens: int
    ) -> Launch:
        """Return a grouped insert in the published shape.

        Parameters
        ----------
        caches : Caches
        input_name : str
            Dtype of the rows.
        kv_c, k_pe : Strided
        slots : int
            Address of int64 ``[tokens]``, for all layers.
        tokens : int
        """
        layout = caches.layout
        values = SCALAR_PARAMS.zeros()
        for name, rows in (("kv_c", kv_c), ("k_pe", k_pe)):
            values[name] = rows.data
            values[f"{name}_layer_stride"] = rows.layer_stride
            values[f"{name}_token_stride"] = rows.token_stride
        keep = self._fill_caches(values, caches, slots, tokens)
        values["lora_rank"], values["rope_dim"] = layout.kv_lora_rank, layout.rope_dim
        offsets = {field.name: field.offset for field in layout.fields}
        values["scale_offset"] = offsets.get("scale", 0)
        values["rope_offset"] = offsets.get("rope", 0)
        if caches.scales is not None:
            scales = self._table(np.array(caches.scales, np.float32))
            values["scales"] = scales.ptr
            keep = (*keep, scales)
        if layout.tile:
            name, threads = "scalar_ds_mla", 96
        else:
            element = f"bench::{_ELEMENTS.get(layout.name, 'Same')}"
            name = f"scalar_insert<{element}<bench::{_INPUTS[input_name]}>>"
            threads = min(layout.kv_lora_rank, 512)
        return self._prepare(
            name,
            SCALAR_PARAMS,
            values,
            len(caches.addresses) * tokens,
            (threads, 1),
            entry=f"bench_scalar_{layout.name}_{input_name}",
            keep=keep,
        )

    def read_rows(self, caches: Caches, slots: int, tokens: int) -> Launch:
        """Return a kernel that reads rows as attention does.

        Parameters
        ----------
        caches : Caches
            Of rows of whole vectors.
        slots : int
            Address of int64 ``[tokens]``, for all layers.
        tokens : int
        """
        values = READ_ROWS_PARAMS.zeros()
        sink = self.device.allocate(1)
        values["sink"] = sink.ptr
        values["row_vectors"] = caches.layout.row_bytes // VECTOR
        values["key"] = 1
        keep = (*self._fill_caches(values, caches, slots, tokens), sink)
        grid = len(caches.addresses) * -(-tokens // _READ_ROWS)
        block = (_READ_LANES, _READ_ROWS)
        return self._prepare("read_rows", READ_ROWS_PARAMS, values, grid, block, keep=keep)

    def _fill_caches(
        self, values: Array, caches: Caches, slots: int, tokens: int
    ) -> tuple[Memory, ...]:
        addresses = self._table(np.array(caches.addresses, np.uint64))
        values["caches"], values["slots"] = addresses.ptr, slots
        values["block_stride"], values["row_stride"] = caches.block_stride, caches.row_stride
        values["tokens"], values["block_size"] = tokens, caches.block_size
        return (addresses,)
