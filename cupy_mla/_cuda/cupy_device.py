"""The device seam on CuPy: NVRTC through RawModule, launches through the driver."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import numpy as np

from cupy_mla.dtypes import DType
from cupy_mla.errors import BackendUnavailable, CompileError

from .device import Arguments, Memory

Array = np.ndarray[Any, Any]

#: One tuple for all sources: CuPy pays 25-40 ms for each new one.
OPTIONS = ("--std=c++17",)

_INSTALL = (
    'pip install "cupy-mla[cuda12x]" (CUDA 12) or pip install "cupy-mla[cuda13x]" (CUDA 13); '
    'in a checkout pip install ".[cuda12x]" or ".[cuda13x]"'
)

#: Distributions that all install the module cupy, and overwrite each other.
_WHEELS = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x")


def installed_wheels() -> tuple[str, ...]:
    """Return the distributions that installed CuPy here; more than one break each other."""
    names = {(entry.metadata["Name"] or "").lower() for entry in metadata.distributions()}
    return tuple(name for name in _WHEELS if name in names)


@functools.cache
def _cupy() -> Any:
    """Import CuPy for CUDA, or say what is missing and how to install it."""
    wheels = installed_wheels()
    try:
        import cupy
    except ImportError as error:
        if len(wheels) > 1:
            hint = (
                f"{' and '.join(wheels)} are installed side by side and break each other: "
                f"pip uninstall {' '.join(wheels)}, then install one of them"
            )
        else:
            hint = (
                f"CuPy is needed for arrays on a GPU and cannot be imported ({error}): {_INSTALL}"
            )
        raise BackendUnavailable(hint) from error
    except OSError as error:  # CuPy makes the folder of its kernel cache when it is imported
        raise BackendUnavailable(
            f"CuPy cannot make its kernel cache ({error}): set CUPY_CACHE_DIR to a folder that "
            "can be written"
        ) from error
    if cupy.cuda.runtime.is_hip:
        raise BackendUnavailable(
            "this CuPy is built for HIP (ROCm); cupy_mla's kernels are CUDA: " + _INSTALL
        )
    return cupy


@functools.cache
def device(ordinal: int) -> CupyDevice:
    """Return a device by its number.

    Raises
    ------
    BackendUnavailable
        Where CuPy, a driver or the device is missing.
    """
    cupy = _cupy()
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise BackendUnavailable(
            f"no usable NVIDIA driver or GPU ({error}); the driver must be at least as new as "
            "the CUDA version of the CuPy wheel"
        ) from error
    if not 0 <= ordinal < count:
        raise BackendUnavailable(f"there is no CUDA device {ordinal}: {count} found")
    return CupyDevice(cupy, ordinal)


def pointer_device(ptr: int) -> int:
    """Return the number of the device that owns an address.

    Raises
    ------
    BackendUnavailable
        Where CuPy or a driver is missing.
    """
    runtime = device(0)._runtime
    return int(runtime.pointerGetAttributes(ptr).device)


@contextmanager
def _cache_in_memory() -> Iterator[None]:
    """Keep CuPy from its cache on disk, which it offers by an environment variable alone."""
    before = os.environ.get("CUPY_CACHE_IN_MEMORY")
    os.environ["CUPY_CACHE_IN_MEMORY"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUPY_CACHE_IN_MEMORY"]
        else:
            os.environ["CUPY_CACHE_IN_MEMORY"] = before


class CupyDevice:
    """A CUDA device, driven by CuPy.

    Parameters
    ----------
    cupy : module
    ordinal : int
    """

    def __init__(self, cupy: Any, ordinal: int) -> None:
        self._cupy = cupy
        self._runtime = cupy.cuda.runtime
        driver = cupy.cuda.driver
        self._launch_kernel = driver.launchKernel
        self._get_context, self._set_context = driver.ctxGetCurrent, driver.ctxSetCurrent
        self.ordinal = ordinal
        self.functions: dict[Any, Any] = {}
        self._modules: list[Any] = []
        with self.current():
            self._runtime.free(0)  # a device has no context before its first runtime call
            self._context = self._get_context()
        properties = self._runtime.getDeviceProperties(ordinal)
        self.name = properties["name"].decode()
        self.arch = f"sm_{properties['major']}{properties['minor']}"
        self.sm_count = int(properties["multiProcessorCount"])
        self.l2_bytes = int(properties["l2CacheSize"])

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the device current for a block of code, and what was current again behind it."""
        context, device = self._get_context(), self._runtime.getDevice()
        self._runtime.setDevice(self.ordinal)
        try:
            yield
        finally:
            if context:
                self._set_context(context)
            else:  # a thread without a context
                self._runtime.setDevice(device)

    def compile(self, source: str, entry: str) -> int:
        """Compile and load a source by NVRTC; return the driver's function handle."""
        with self.current():
            try:
                module = self._module(source)
            except OSError as error:
                warnings.warn(
                    f"kernels are compiled anew in each process, since CuPy's cache cannot be "
                    f"written ({error}): set CUPY_CACHE_DIR to a folder that can be",
                    RuntimeWarning,
                    stacklevel=2,
                )
                with _cache_in_memory():
                    module = self._module(source)
            function = module.get_function(entry)
            handle = int(function.kernel.ptr)  # that of the device that is current
        self._modules.append((module, function))
        return handle

    def _module(self, source: str) -> Any:
        module = self._cupy.RawModule(code=source, options=OPTIONS, backend="nvrtc")
        try:
            module.compile()
        except self._cupy.cuda.compiler.CompileException as error:
            raise CompileError(str(error)) from error
        except self._cupy.cuda.driver.CUDADriverError as error:
            raise RuntimeError(
                f"a kernel could not be loaded ({error}); while a graph is captured none may be: "
                "call warmup() before the capture"
            ) from error
        except RuntimeError as error:
            if type(error).__name__ != "DynamicLibNotFoundError":
                raise
            raise BackendUnavailable(f"NVRTC is missing ({error}): {_INSTALL}") from error
        return module

    def launch(
        self, function: Any, grid: int, block: tuple[int, int], arguments: Arguments, stream: int
    ) -> None:
        """Launch a function with one structure as its argument."""
        self.launcher(function, grid, block)(arguments, stream)

    def launcher(
        self, function: Any, grid: int, block: tuple[int, int]
    ) -> Callable[[Arguments, int], None]:
        """Return `launch` for one function and shape."""
        launch_kernel, get_context = self._launch_kernel, self._get_context
        context, (width, height) = self._context, block

        def launch(arguments: Arguments, stream: int) -> None:
            # The driver knows no device but its thread's current context.
            if get_context() == context:
                launch_kernel(
                    function, grid, 1, 1, width, height, 1, 0, stream, arguments.address, 0
                )
            else:
                with self.current():
                    launch_kernel(
                        function, grid, 1, 1, width, height, 1, 0, stream, arguments.address, 0
                    )

        return launch

    def allocate(self, nbytes: int) -> Memory:
        """Allocate memory from the driver, apart from any framework's pool."""
        with self.current():
            owner = self._cupy.cuda.Memory(nbytes)
        return Memory(owner.ptr, nbytes, owner)

    def empty(self, shape: tuple[int, ...], dtype: DType, framework: str) -> Any:
        """Return a new array of torch for torch, else of CuPy."""
        if framework == "torch":
            torch = sys.modules["torch"]
            device = torch.device("cuda", self.ordinal)
            return torch.empty(shape, dtype=getattr(torch, dtype.name), device=device)
        with self.current():
            return self._cupy.ndarray(shape, dtype)

    def upload(self, memory: Memory, data: Array, stream: int) -> None:
        """Copy bytes to memory, in stream order."""
        host = np.ascontiguousarray(data)
        with self.current():
            self._runtime.memcpyAsync(
                memory.ptr,
                host.ctypes.data,
                memory.nbytes,
                self._runtime.memcpyHostToDevice,
                stream,
            )

    def download(self, memory: Memory, stream: int) -> Array:
        """Return a copy of memory, after waiting for the device."""
        host = np.empty(memory.nbytes, np.uint8)
        with self.current():
            self._runtime.deviceSynchronize()
            self._runtime.memcpy(
                host.ctypes.data, memory.ptr, memory.nbytes, self._runtime.memcpyDeviceToHost
            )
        return host

    def stream_getter(self, framework: str) -> Callable[[], int]:
        """Return what finds the current stream of an array framework on this device."""
        ordinal = self.ordinal
        if framework == "torch":
            # torch.cuda.current_stream() builds an object, which takes 8 us.
            return functools.partial(sys.modules["torch"]._C._cuda_getCurrentRawStream, ordinal)
        if framework == "cupy":
            current = self._cupy.cuda.get_current_stream
            return lambda: int(current(ordinal).ptr)
        return int  # no notion of a current stream: the default one

    def current_stream(self, framework: str) -> int:
        """Return the current stream of an array framework; the default one where it has none."""
        return self.stream_getter(framework)()

    def record_event(self, stream: int) -> Any:
        """Return an event behind what was launched on a stream so far."""
        with self.current():
            event = self._cupy.cuda.Event(disable_timing=True)
            self._runtime.eventRecord(event.ptr, stream)
        return event

    def event_is_done(self, event: Any) -> bool:
        """Whether an event has been reached."""
        return bool(event.done)

    def wait_stream(self, stream: int, producer: int) -> None:
        """Make a stream wait for what was launched on another so far."""
        event = self.record_event(producer)
        with self.current():
            self._runtime.streamWaitEvent(stream, event.ptr)

    def is_capturing(self, stream: int) -> bool:
        """Whether a stream is being captured in a graph."""
        return stream != 0 and bool(self._runtime.streamIsCapturing(stream))

    def record_torch_stream(self, tensor: Any, stream: object) -> bool:
        """Tell torch's allocator that a tensor is used on a stream, if that is one of torch's."""
        own = type(stream) is sys.modules["torch"].cuda.Stream
        if own:
            tensor.record_stream(stream)
        return own

    def resolve_stream(self, stream: object) -> int:
        """Return the raw pointer of a stream: an int, or CuPy's, torch's, or __cuda_stream__."""
        if isinstance(stream, int) and not isinstance(stream, bool):
            return stream
        protocol = getattr(stream, "__cuda_stream__", None)
        if protocol is not None:
            return int((protocol() if callable(protocol) else protocol)[1])
        for name in ("ptr", "cuda_stream"):
            pointer = getattr(stream, name, None)
            if isinstance(pointer, int):
                return pointer
        raise TypeError(
            "a CuPy or torch stream, a raw pointer or an object with __cuda_stream__, "
            f"not {type(stream).__name__}"
        )
