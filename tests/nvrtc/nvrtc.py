"""NVRTC by ctypes: compiles for any architecture, with the options that CuPy passes.

The library is that of the wheel nvidia-cuda-nvrtc-cu12, or whichever the system finds.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata

from cupy_mla._cuda import cupy_device
from tests import build_cache

_NAMES = ("libnvrtc.so.12", "libnvrtc.so.13")
_WHEELS = ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc")


class NvrtcError(RuntimeError):
    """A source did not compile; the text is the compiler's log."""


@dataclass(frozen=True)
class Compiled:
    """What came out of a compilation.

    Attributes
    ----------
    ptx : str
    registers : int
    stack_bytes, spill_bytes : int
        Local memory of a thread: its stack, and what was stored for want of registers.
    shared_bytes : int
    log : str
        Of NVRTC and ptxas.
    """

    ptx: str
    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int
    log: str


@functools.cache
def library() -> ctypes.CDLL | None:
    """Load NVRTC, or return None where there is none."""
    paths = list(_NAMES)
    for wheel in _WHEELS:
        try:
            files = metadata.files(wheel) or []
        except metadata.PackageNotFoundError:
            continue
        paths[:0] = [str(file.locate()) for file in files if file.name in _NAMES]
    for path in paths:
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    return None


#: CuPy passes it, and nothing here relies on it.
DEVICE_BY_DEFAULT = "--device-as-default-execution-space"


def options(arch: str) -> tuple[str, ...]:
    """Return what CuPy 14 compiles our sources with, and the report of ptxas.

    CuPy puts -ftz=true behind the caller's options, then the architecture, then this last one.
    """
    return (
        *cupy_device.OPTIONS,
        "-ftz=true",
        f"-arch={arch}",
        DEVICE_BY_DEFAULT,
        *(("--ptxas-options=--verbose",) if arch.startswith("sm_") else ()),
    )


def compile_source(source: str, arch: str, *, without: str | None = None) -> Compiled:
    """Compile a source that needs no include path.

    Parameters
    ----------
    source : str
    arch : str
        As ``sm_90``; with ``compute_75`` there is PTX alone, and no report of ptxas.
    without : str, optional
        An option that is left out.
    """
    nvrtc = library()
    if nvrtc is None:
        raise NvrtcError('NVRTC is missing: pip install "cupy-mla[emulator]"')
    given = [option for option in options(arch) if option != without]
    kept = build_cache.path_of("nvrtc.json", _identity(nvrtc), given, source)
    if kept.exists():
        return Compiled(**json.loads(kept.read_text(encoding="utf-8")))
    compiled = _compile(nvrtc, source, arch, given)
    with tempfile.NamedTemporaryFile("w", dir=kept.parent, encoding="utf-8", delete=False) as file:
        json.dump(asdict(compiled), file)
    os.replace(file.name, kept)  # at once, also beside another process that compiles the same
    return compiled


def _identity(nvrtc: ctypes.CDLL) -> tuple[object, ...]:
    """Return what tells one NVRTC from another."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    size = os.path.getsize(nvrtc._name) if os.path.exists(nvrtc._name) else 0
    return major.value, minor.value, size


def _compile(nvrtc: ctypes.CDLL, source: str, arch: str, given: Sequence[str]) -> Compiled:
    program = ctypes.c_void_p()
    _check(nvrtc.nvrtcCreateProgram(_ref(program), source.encode(), b"kernel.cu", 0, None, None))
    try:
        arguments = [option.encode() for option in given]
        array = (ctypes.c_char_p * len(arguments))(*arguments)
        failed = nvrtc.nvrtcCompileProgram(program, len(arguments), array)
        log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        if failed:
            raise NvrtcError(f"{arch}: {log}")
        ptx = _text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
    finally:
        _check(nvrtc.nvrtcDestroyProgram(_ref(program)))
    if not arch.startswith("sm_"):
        return Compiled(ptx, 0, 0, 0, 0, log)
    stack, spills = _numbers(r"(\d+) bytes stack frame, (\d+) bytes spill stores", log)
    (registers,) = _numbers(r"Used (\d+) registers", log)
    shared = re.search(r"(\d+) bytes smem", log)
    return Compiled(ptx, registers, stack, spills, int(shared[1]) if shared else 0, log)


def _ref(value: ctypes.c_void_p) -> object:
    return ctypes.byref(value)


def _check(status: int) -> None:
    if status:
        raise NvrtcError(f"NVRTC answered {status}")


def _text(size_of: object, content_of: object, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    _check(size_of(program, ctypes.byref(size)))  # type: ignore[operator]
    buffer = ctypes.create_string_buffer(size.value)
    _check(content_of(program, buffer))  # type: ignore[operator]
    return buffer.value.decode()


def _numbers(pattern: str, log: str) -> tuple[int, ...]:
    found = re.search(pattern, log)
    if found is None:
        raise NvrtcError(f"no {pattern!r} in the report of ptxas:\n{log}")
    return tuple(map(int, found.groups()))
