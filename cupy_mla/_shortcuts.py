"""Calls that were validated once, found again by what their arrays look like.

On a GPU a call whose arrays look like those of an earlier one reads attributes, compares one key,
packs addresses and launches. Arrays of equal looks (shape, strides, dtype, device) differ in
nothing but their address, which the key has modulo 8: what was validated for some is valid for
the others. Whether they share memory depends on addresses, and is looked at the first time alone.
CuPy's and torch's arrays have looks that are cheap to read; calls with anything else are validated
each time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from . import _looks
from ._looks import UNKNOWN, known

Launch = Callable[..., Any]

#: A service sees a few dozen shapes at a time, not thousands.
_MOST = 4096


_all: weakref.WeakSet[Shortcuts] = weakref.WeakSet()


def forget_all() -> None:
    """Forget every call there is: a device was replaced by another implementation."""
    for shortcuts in list(_all):
        shortcuts.forget()


def by_kind(value: Any) -> tuple[float | None, Any]:
    """Return what may be a number or an array as both: one of them is None."""
    return (value, None) if type(value) is float else (None, value)


class Shortcuts:
    """Launches by the looks of their arrays and by whatever else a call says."""

    __slots__ = ("__weakref__", "_launches")

    def __init__(self) -> None:
        self._launches: dict[Any, Launch] = {}
        _all.add(self)

    def run(self, options: Any, *arrays: Any) -> Any:
        """Launch with these arrays' addresses, and return what that returns.

        Parameters
        ----------
        options : hashable
            What a call depends on besides its arrays.
        *arrays : array or None

        Returns
        -------
        object
            `UNKNOWN` for a call that is not known.
        """
        call = known.get(tuple(map(type, arrays)))
        return UNKNOWN if call is None else call(self._launches, options, *arrays)

    def run_step(self, kv_c: Any, k_pe: Any, slots: Any) -> Any:
        """Launch as `run` does without options: written out, which saves half a microsecond."""
        call = known.get((type(kv_c), type(k_pe), type(slots)))
        return UNKNOWN if call is None else call(self._launches, None, kv_c, k_pe, slots)

    def learn(self, launch: Launch | None, options: Any, *arrays: Any) -> None:
        """Remember how a call is launched; None is a call with more to do than to launch."""
        looks = None if launch is None else _looks.learn(arrays)
        if launch is None or looks is None:
            return
        key = looks.key(options, *arrays)
        try:
            hash(key)
        except TypeError:  # an option that cannot be hashed
            return
        if len(self._launches) >= _MOST:
            self._launches.clear()
        self._launches[key] = launch

    def forget(self) -> None:
        """Forget every call."""
        self._launches.clear()
