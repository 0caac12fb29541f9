"""Launches that are prepared once for all arrays of a plan; a call fills in addresses.

The arguments of the fused kernels begin with those addresses, one after the other.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from .device import Arguments, Device
from .geometry import LaunchShape

Array = np.ndarray[Any, Any]

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

    __slots__ = ("_block", "_device", "_free", "_function", "_grid", "_head", "_template")

    def __init__(
        self, device: Device, function: Any, shape: LaunchShape, arguments: Array, count: int
    ) -> None:
        self._device, self._function = device, function
        self._grid, self._block = shape.grid, shape.block
        self._template = arguments.tobytes()
        self._head = struct.Struct(f"<{count}Q")
        self._free: list[Arguments] = []

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
        # Taken from the list and put back: no two threads ever fill in the same structure.
        try:
            arguments = self._free.pop()
        except IndexError:
            arguments = Arguments(self._template)
        self._head.pack_into(arguments.buffer, 0, *addresses)
        for offset, address in others:
            struct.pack_into("<Q", arguments.buffer, offset, address)
        self._device.launch(self._function, self._grid, self._block, arguments, stream)
        self._free.append(arguments)


class Known:
    """What was made once for a key, found again by it."""

    __slots__ = ("_lock", "_made")

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return what `make` made for a key."""
        found = self._made.get(key)
        if found is None:
            found = make()
            with self._lock:
                if len(self._made) >= _MOST:
                    self._made.clear()
                self._made[key] = found
        return found
