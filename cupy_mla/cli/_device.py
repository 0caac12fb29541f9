"""Where a command runs: on the GPU through CuPy, or on NumPy, and why.

CuPy is never imported here. The CUDA backend imports it, and says what is missing; what is shown
of a GPU is then read from the module that it left in ``sys.modules``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from cupy_mla import backends
from cupy_mla._arrays import DeviceId
from cupy_mla.errors import BackendUnavailable

DEVICES = ("auto", "cpu", "cuda")

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_DRIVER_VERSION = re.compile(r"\b\d{3,}\.\d+(?:\.\d+)?\b")


@dataclass(frozen=True)
class Device:
    """A device to run on.

    Attributes
    ----------
    backend : str
        ``NumPy`` or ``CUDA``.
    name : str
        The processor, in words.
    reason : str
        Why this one.
    xp : module
        ``numpy`` or ``cupy``.
    repeats : int
        How often a timed call is repeated.
    """

    backend: str
    name: str
    reason: str
    xp: ModuleType
    repeats: int

    def to_device(self, array: np.ndarray[Any, Any]) -> Any:
        """Return a host array's values on the device, dtype and all."""
        if self.xp is np:
            return array
        return self.xp.asarray(array.view(np.uint8)).view(array.dtype)

    def to_host(self, array: Any) -> np.ndarray[Any, Any]:
        """Return an array of the device as a host array."""
        if self.xp is np:
            return np.asarray(array)
        host: np.ndarray[Any, Any] = self.xp.asnumpy(array.view(np.uint8)).view(array.dtype)
        return host

    def synchronize(self) -> None:
        """Wait until the device has done what it was told."""
        if self.xp is not np:
            self.xp.cuda.get_current_stream().synchronize()


def select(request: str) -> Device:
    """Return the device that ``--device`` asks for.

    Parameters
    ----------
    request : {"auto", "cpu", "cuda"}
        ``auto`` is the GPU where it can be used.

    Raises
    ------
    BackendUnavailable
        For ``cuda`` where CUDA cannot be used; the text says why.
    """
    if request == "cpu":
        return _host("asked for by --device cpu")
    missing = cuda_missing()
    if missing is None:
        cupy = sys.modules["cupy"]
        why = "asked for by --device cuda" if request == "cuda" else "CuPy finds a CUDA device"
        name = _gpus(cupy)[cupy.cuda.runtime.getDevice()]["name"]
        return Device("CUDA", name, why, cupy, repeats=20)
    if request == "cuda":
        raise BackendUnavailable(f"--device cuda: {missing}")
    return _host(missing)


def _host(reason: str) -> Device:
    return Device("NumPy", "the CPU", reason, np, repeats=3)


def installed(module: str) -> bool:
    """Return whether a module can be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # it is in sys.modules, without a spec
        return True


def cuda_missing() -> str | None:
    """Return why the CUDA backend cannot be used here, or None where it can."""
    if not installed("cupy"):
        return "CuPy is not installed; pip install 'cupy-mla[cuda12x]' or 'cupy-mla[cuda13x]'"
    try:
        backends.cuda(DeviceId("cuda", 0))
    except (BackendUnavailable, ImportError) as error:
        return str(error)
    return None


def cuda_facts() -> dict[str, Any] | None:
    """Return what CuPy tells of GPUs, driver and compiler, or None where there is no CuPy.

    Call it after `cuda_missing`. A fact that CuPy cannot tell is None.
    """
    cupy = sys.modules.get("cupy")
    if cupy is None:
        return None
    runtime = cupy.cuda.runtime
    return {
        "gpus": _told(lambda: _gpus(cupy)) or [],
        "driver": _driver(),
        "driver_cuda": _told(lambda: _cuda_version(runtime.driverGetVersion())),
        "runtime_cuda": _told(lambda: _cuda_version(runtime.runtimeGetVersion())),
        "nvrtc": _told(lambda: ".".join(str(part) for part in cupy.cuda.nvrtc.getVersion())),
        "kernel_cache_dir": _kernel_cache_dir(),
    }


def _kernel_cache_dir() -> str | None:
    """Return where CuPy keeps compiled kernels; None for in memory only."""
    if os.environ.get("CUPY_CACHE_IN_MEMORY") == "1":
        return None
    # Not expanded: it goes into stored results, which are no place for somebody's home.
    return os.environ.get("CUPY_CACHE_DIR") or "~/.cupy/kernel_cache"


def _gpus(cupy: ModuleType) -> list[dict[str, Any]]:
    gpus = []
    for index in range(cupy.cuda.runtime.getDeviceCount()):
        properties = cupy.cuda.runtime.getDeviceProperties(index)
        gpus.append(
            {
                "index": index,
                "name": properties["name"].decode(),
                "compute_capability": f"{properties['major']}.{properties['minor']}",
                "memory_bytes": int(properties["totalGlobalMem"]),
                "multiprocessors": int(properties["multiProcessorCount"]),
            }
        )
    return gpus


def _told(ask: Callable[[], Any]) -> Any:
    """Return what `ask` returns, or None: a report is no place to fail for want of a library."""
    with contextlib.suppress(Exception):
        return ask()
    return None


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _driver() -> str | None:
    """Return the version of the NVIDIA kernel driver."""
    try:
        found = _DRIVER_VERSION.search(_DRIVER_FILE.read_text())
    except OSError:
        return None
    return found.group() if found else None
