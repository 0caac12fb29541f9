"""Launches that are prepared once for all arrays of a plan; a call fills in addresses.

The arguments of the fused kernels begin with those addresses, one after the other.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import numpy as np

from .device import Arguments, Device
from .geometry import LaunchShape

Array = np.ndarray[Any, Any]
T = TypeVar("T")

_POINTER = struct.Struct("<Q")
#: Plans that are kept ready; a service sees a few dozen shapes, not thousands at a time.
_MOST = 512


class PreparedLaunch:
    """One launch; safe to run from several threads at a time.

    Parameters
    ----------
    device : Device
    function : object
        Of the device.
    shape : LaunchShape
    arguments : numpy array of one element
        All but the addresses that it begins with.
    count : int
        How many these are.
    """

    __slots__ = ("_count", "_head", "_launch", "_template")

    def __init__(
        self, device: Device, function: Any, shape: LaunchShape, arguments: Array, count: int
    ) -> None:
        self._launch = device.launcher(function, shape.grid, shape.block)
        self._template = arguments.tobytes()
        self._count, self._head = count, struct.Struct(f"<{count}Q")

    def run(
        self, addresses: Sequence[int], stream: int, others: Sequence[tuple[int, int]] = ()
    ) -> None:
        """Fill in addresses and launch.

        Parameters
        ----------
        addresses : sequence of int
            What the arguments begin with.
        stream : int
        others : sequence of (int, int)
            Offsets further behind, and the addresses that go there.
        """
        arguments = Arguments(self._template)
        self._head.pack_into(arguments.buffer, 0, *addresses)
        for offset, address in others:
            _POINTER.pack_into(arguments.buffer, offset, address)
        self._launch(arguments, stream)

    def by_address(
        self, current_stream: Callable[[], int], last: Sequence[int] = ()
    ) -> Callable[..., None]:
        """Return the launch by the addresses that the arguments begin with.

        Parameters
        ----------
        current_stream : callable
        last : sequence of int
            The last ones, where they are the same in each call.
        """
        launch, free = self._launch, list[Arguments]()
        count = self._count - len(last)
        pack = struct.Struct(f"<{count}Q").pack_into
        filled = bytearray(self._template)
        struct.pack_into(f"<{len(last)}Q", filled, count * _POINTER.size, *last)
        template = bytes(filled)

        def run(*addresses: int) -> None:
            # Taken from the list and put back: no two threads ever fill in the same structure.
            try:
                arguments = free.pop()
            except IndexError:
                arguments = Arguments(template)
            pack(arguments.buffer, 0, *addresses)
            launch(arguments, current_stream())
            free.append(arguments)

        return run


def together(runs: list[Callable[..., None]]) -> Callable[..., None]:
    """Return the only one, or all of them one after the other."""
    if len(runs) == 1:
        return runs[0]

    def run(*addresses: int) -> None:
        for one in runs:
            one(*addresses)

    return run


class Known:
    """What was made once for a key, found again by it."""

    __slots__ = ("_lock", "_made")

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` made for a key."""
        found: T | None = self._made.get(key)
        if found is None:
            found = make()
            with self._lock:
                if len(self._made) >= _MOST:
                    self._made.clear()
                self._made[key] = found
        return found
