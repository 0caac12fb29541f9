"""The seam between launch code and a device: compile, launch, and small tables in device memory.

The product has one implementation, on CuPy (`cupy_device`). Tests have another that compiles the
same source for the CPU, so that kernels and host launch code run where there is no GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cupy_mla.dtypes import DType

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Memory:
    """Device memory that lives as long as this object.

    Attributes
    ----------
    ptr : int
        Its address.
    nbytes : int
    owner : object
        What frees it.
    """

    ptr: int
    nbytes: int
    owner: Any


class Arguments:
    """One kernel argument: a structure's bytes, and the array of pointers that a driver wants.

    Parameters
    ----------
    structure : bytes
        What they are at first.

    Attributes
    ----------
    buffer : ctypes array of char
        The bytes; ``struct.pack_into`` may change them between launches.
    address : int
        Of an array of one pointer, which points to the buffer.
    """

    __slots__ = ("_pointers", "address", "buffer")

    def __init__(self, structure: bytes) -> None:
        self.buffer = (ctypes.c_char * len(structure)).from_buffer_copy(structure)
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.buffer))
        self.address = ctypes.addressof(self._pointers)


class Device(Protocol):
    """What launch code needs of a device. Every stream is a raw pointer, 0 the default one."""

    #: Number of the CUDA device.
    ordinal: int
    #: What people call it.
    name: str
    #: Architecture, as ``sm_90``.
    arch: str
    #: Multiprocessors.
    sm_count: int
    #: Size of the L2 cache.
    l2_bytes: int
    #: Loaded functions, by what `compiler.load` knows them by.
    functions: dict[Any, Any]

    def compile(self, source: str, entry: str) -> Any:
        """Compile and load a source; return the handle of its ``extern "C"`` function.

        Raises
        ------
        CompileError
            With the compiler's log, where it does not compile.
        """

    def launch(
        self, function: Any, grid: int, block: tuple[int, int], arguments: Arguments, stream: int
    ) -> None:
        """Launch a function with one structure as its argument, which is copied at once."""

    def launcher(
        self, function: Any, grid: int, block: tuple[int, int]
    ) -> Callable[[Arguments, int], None]:
        """Return `launch` for one function and shape, with little before the driver."""

    def allocate(self, nbytes: int) -> Memory:
        """Allocate memory; its content is unspecified."""

    def empty(self, shape: tuple[int, ...], dtype: DType, framework: str) -> Any:
        """Return a new array of a framework, or CuPy's for one without arrays of its own here.

        It is allocated in the order of the framework's current stream; its content is unspecified.
        """

    def upload(self, memory: Memory, data: Array, stream: int) -> None:
        """Copy bytes to memory, in stream order; `data` may change once this returns."""

    def download(self, memory: Memory, stream: int) -> Array:
        """Return a copy of memory as uint8, after waiting for the stream."""

    def stream_getter(self, framework: str) -> Callable[[], int]:
        """Return what finds the current stream of an array framework on this device."""

    def record_event(self, stream: int) -> Any:
        """Return an event behind what was launched on a stream so far."""

    def event_is_done(self, event: Any) -> bool:
        """Whether an event has been reached."""

    def wait_stream(self, stream: int, producer: int) -> None:
        """Make a stream wait for what was launched on another so far."""

    def is_capturing(self, stream: int) -> bool:
        """Whether a stream is being captured in a graph."""

    def record_torch_stream(self, tensor: Any, stream: object) -> bool:
        """Tell torch's allocator that a tensor is used on a stream, if that is one of torch's."""

    def current_stream(self, framework: str) -> int:
        """Return the current stream of an array framework on this device."""

    def resolve_stream(self, stream: object) -> int:
        """Return the raw pointer of a stream that a caller gave.

        Raises
        ------
        TypeError
            For what is no stream.
        """
