"""How many sets of buffers a measurement takes turns with, and how many calls a graph holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: Buffers together are as many times the L2 cache, so that none is left when its turn comes again.
L2_TIMES = 5
#: More sets than these are not made. Where they are too small together, a call that reads as much
#: as `L2_TIMES` caches hold comes before each replay, and no set has two turns in a graph.
MOST_BUFFERS = 64
#: Calls a graph: so many that what it takes to start a graph does not count.
_CALLS = 64
_CALLS_OF_LARGE = 20
_LARGE_BYTES = 32 << 20


@dataclass(frozen=True)
class Rotation:
    """The calls of one graph.

    Attributes
    ----------
    buffers : int
        Sets of buffers.
    calls : int
        Kernel calls in a graph, a multiple of `buffers`.
    cold : bool
        Whether every call finds its buffers in device memory rather than in the L2 cache.
    footprint : int
        Bytes that all sets together touch.
    """

    buffers: int
    calls: int
    cold: bool
    footprint: int

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {"buffers": self.buffers, "calls": self.calls, "footprint": self.footprint}


def choose(call_bytes: int, l2_bytes: int, *, cold: bool) -> Rotation:
    """Choose buffers and calls.

    Parameters
    ----------
    call_bytes : int
        Bytes that one call touches.
    l2_bytes : int
        Size of the L2 cache.
    cold : bool
        False for one set of buffers, over and over.

    Examples
    --------
    >>> choose(140_000_000, 60_000_000, cold=True)
    Rotation(buffers=4, calls=20, cold=True, footprint=560000000)
    >>> choose(8_000, 60_000_000, cold=True)
    Rotation(buffers=64, calls=64, cold=True, footprint=512000)
    >>> choose(8_000, 60_000_000, cold=False)
    Rotation(buffers=1, calls=64, cold=False, footprint=8000)
    """
    wanted = _CALLS_OF_LARGE if call_bytes >= _LARGE_BYTES else _CALLS
    if not cold:
        return Rotation(1, wanted, cold, call_bytes)
    # One more than covers the caches: a set is not counted when its own turn comes.
    buffers = min(MOST_BUFFERS, -(-L2_TIMES * l2_bytes // max(call_bytes, 1)) + 1)
    calls = -(-wanted // buffers) * buffers
    return Rotation(buffers, calls, cold, buffers * call_bytes)
