"""Compiled kernels: each specialisation once a device, found again without any hashing of text."""

from __future__ import annotations

import threading
from typing import Any

from cupy_mla import _kernel_files
from cupy_mla.errors import CompileError
from cupy_mla.layouts import CacheLayout

from . import sources
from .device import Device
from .registry import Specialisation

_lock = threading.Lock()


def digest() -> str:
    """Return the SHA-256 of all kernel sources together."""
    return _kernel_files.digest()


def load(device: Device, specialisation: Specialisation, layout: CacheLayout) -> Any:
    """Return the function of a specialisation on a device, compiled when it is first asked for.

    Raises
    ------
    CompileError
        With kernel, layout, architecture and the compiler's log.
    """
    functions: dict[Any, Any] = device.functions
    key = (specialisation, layout)
    function = functions.get(key)
    if function is None:
        with _lock:
            function = functions.get(key)
            if function is None:
                function = functions[key] = _compile(device, specialisation, layout)
    return function


def _compile(device: Device, specialisation: Specialisation, layout: CacheLayout) -> Any:
    source = sources.build(specialisation, layout)
    by_text = device.functions.get(source.digest)
    if by_text is None:
        try:
            by_text = device.compile(source.text, source.entry)
        except CompileError as error:
            raise CompileError(
                f"{specialisation} does not compile for {device.arch} ({device.name}):\n{error}"
            ) from error
        device.functions[source.digest] = by_text
    return by_text
