"""The device seam on the CPU: compiles kernels with g++ and runs them thread by thread."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cupy_mla._cuda.device import Arguments, Memory
from cupy_mla.errors import CompileError
from tests import build_cache

RUNTIME = Path(__file__).with_name("emulator.hpp")
#: Set in the process that the test of sanitizers starts.
SANITIZE = "CUPY_MLA_EMULATOR_SANITIZE"

_FLAGS = (
    "-std=c++17",
    "-O1",
    "-fPIC",
    "-shared",
    "-ffp-contract=off",  # a multiplication and an addition are two roundings
    "-fno-strict-aliasing",
    "-fno-gnu-unique",  # else all libraries would share the statics of the first one
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",  # unroll
    "-Wno-maybe-uninitialized",
)
# Compiled without optimisation in half the time, which running them does not lose again.
_SANITIZERS = ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g1")
_ERROR_BYTES = 4096


class EmulatorError(RuntimeError):
    """A kernel did what a GPU leaves undefined."""


@functools.cache
def compiler() -> tuple[str, str]:
    """Return the path of g++ and its version."""
    path = shutil.which(os.environ.get("CXX", "g++"))
    if path is None:
        raise CompileError("the emulator needs g++ (Debian: apt-get install g++)")
    version = subprocess.run([path, "--version"], check=True, capture_output=True, text=True)
    return path, version.stdout.partition("\n")[0]


def build(source: str, entry: str, *, sanitize: bool | None = None) -> Path:
    """Compile a source to a shared library, or find the one compiled before.

    Parameters
    ----------
    source : str
        CUDA C++ without includes.
    entry : str
        Its ``extern "C"`` kernel.
    sanitize : bool or None
        Whether to build with address and undefined-behaviour sanitizers; by default as the
        environment says.
    """
    if sanitize is None:
        sanitize = bool(os.environ.get(SANITIZE))
    path, version = compiler()
    flags = _FLAGS + (_SANITIZERS if sanitize else ())
    text = f"{source}EMULATOR_ENTRY({entry})\n"
    library = build_cache.path_of(f"{entry}.so", version, flags, RUNTIME.read_text(), text)
    if library.exists():
        return library
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        code = Path(folder, f"{entry}.cc")
        code.write_text(text, encoding="utf-8")
        built = Path(folder, library.name)
        done = subprocess.run(
            [path, *flags, "-include", str(RUNTIME), str(code), "-o", str(built)],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise CompileError(done.stderr)
        os.replace(built, library)  # at once, also beside another process that builds the same
    return library


class EmulatorDevice:
    """Host memory and g++ in place of a GPU; implements `cupy_mla._cuda.device.Device`.

    Attributes
    ----------
    launches : list of (str, int, (int, int))
        Entry, grid and block of every launch so far.
    """

    ordinal = 0
    name = "CPU emulator"
    arch = "emulator"

    def __init__(self, *, sm_count: int = 4, l2_bytes: int = 1 << 20) -> None:
        self.sm_count = sm_count
        self.l2_bytes = l2_bytes
        self.functions: dict[Any, Any] = {}
        self.launches: list[tuple[str, int, tuple[int, int]]] = []
        self.compiled: list[str] = []
        self._lock = threading.Lock()  # a library's threads share one state

    def compile(self, source: str, entry: str) -> Any:
        """Compile and load a source."""
        function = ctypes.CDLL(str(build(source, entry))).emulator_entry
        function.argtypes = (
            *(ctypes.c_uint,) * 3,
            ctypes.c_void_p,
            ctypes.c_char_p,
            ctypes.c_size_t,
        )
        self.compiled.append(entry)
        return entry, function

    def launch(
        self, function: Any, grid: int, block: tuple[int, int], arguments: Arguments, stream: int
    ) -> None:
        """Run a kernel to its end."""
        entry, run = function
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        with self._lock:
            self.launches.append((entry, grid, block))
            failed = run(grid, *block, arguments.buffer, error, _ERROR_BYTES)
        if failed:
            raise EmulatorError(f"{entry}: {error.value.decode()}")

    def launcher(
        self, function: Any, grid: int, block: tuple[int, int]
    ) -> Callable[[Arguments, int], None]:
        """Return `launch` for one function and shape."""
        return functools.partial(self.launch, function, grid, block)

    def allocate(self, nbytes: int) -> Memory:
        """Allocate memory that is aligned as a GPU's, and full of a pattern."""
        room = np.full(nbytes + 256, 0xCD, np.uint8)
        start = -room.ctypes.data % 256
        memory = room[start : start + nbytes]
        return Memory(memory.ctypes.data, nbytes, memory)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], framework: str) -> Any:
        """Return a NumPy array, full of a pattern."""
        count = int(np.prod(shape, dtype=np.int64))
        memory = self.allocate(count * dtype.itemsize).owner
        return memory.view(dtype).reshape(shape)

    def upload(self, memory: Memory, data: np.ndarray[Any, Any], stream: int) -> None:
        """Copy bytes to memory."""
        ctypes.memmove(memory.ptr, np.ascontiguousarray(data).ctypes.data, memory.nbytes)

    def download(self, memory: Memory, stream: int) -> np.ndarray[Any, Any]:
        """Return a copy of memory."""
        return np.frombuffer(ctypes.string_at(memory.ptr, memory.nbytes), np.uint8).copy()

    def stream_getter(self, framework: str) -> Callable[[], int]:
        """There is one stream."""
        return int

    def current_stream(self, framework: str) -> int:
        """There is one stream."""
        return 0

    def record_event(self, stream: int) -> Any:
        """Everything has been done when a launch returns."""
        return stream

    def event_is_done(self, event: Any) -> bool:
        """Everything has been done when a launch returns."""
        return True

    def wait_stream(self, stream: int, producer: int) -> None:
        """Everything has been done when a launch returns."""

    def is_capturing(self, stream: int) -> bool:
        """There are no graphs."""
        return False

    def record_torch_stream(self, tensor: Any, stream: object) -> bool:
        """There are no torch streams."""
        return False

    def resolve_stream(self, stream: object) -> int:
        """Take raw pointers only."""
        if isinstance(stream, int) and not isinstance(stream, bool):
            return stream
        raise TypeError(f"a raw pointer, not {type(stream).__name__}")


def run_source(
    source: str, entry: str, grid: int, block: tuple[int, int], fields: Sequence[Any]
) -> None:
    """Compile a small kernel whose argument is a structure of 8-byte fields, and run it."""
    device = EmulatorDevice()
    arguments = Arguments(np.array(fields, np.uint64).tobytes())
    device.launch(device.compile(source, entry), grid, block, arguments, 0)
