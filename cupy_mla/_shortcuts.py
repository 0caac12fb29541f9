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

from . import _arrays

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

    def find(self, options: Any, *arrays: Any) -> tuple[Launch, list[int]] | None:
        """Return how such a call is launched and these arrays' addresses, if it is known.

        Parameters
        ----------
        options : hashable
            What a call depends on besides its arrays.
        *arrays : array or None
        """
        if not self._launches:
            return None
        looks = [options]
        addresses = _arrays.read_looks(arrays, looks)
        if addresses is None:
            return None
        try:
            launch = self._launches.get(tuple(looks))
        except TypeError:  # an option that cannot be hashed
            return None
        return None if launch is None else (launch, addresses)

    def run(self, options: Any, *arrays: Any) -> bool:
        """Launch with these arrays' addresses, if such a call is known; say whether it is."""
        found = self.find(options, *arrays)
        if found is None:
            return False
        launch, addresses = found
        launch(*addresses)
        return True

    def run_step(self, kv_c: Any, k_pe: Any, slots: Any) -> bool:
        """Launch as `run` does without options: written out, which saves a microsecond."""
        kind = type(kv_c)
        read = _arrays.STEP_LOOKS.get(kind)
        if read is None or type(k_pe) is not kind or type(slots) is not kind:
            return self.run(None, kv_c, k_pe, slots)
        looks, rows, rope, slot = read(kv_c, k_pe, slots)
        launch = self._launches.get(looks)
        if launch is None:
            return False
        launch(rows, rope, slot)
        return True

    def learn_step(self, launch: Launch | None, kv_c: Any, k_pe: Any, slots: Any) -> None:
        """Remember how `run_step` launches."""
        kind = type(kv_c)
        self.learn(launch, None, kv_c, k_pe, slots)
        read = _arrays.STEP_LOOKS.get(kind)
        if launch is not None and read is not None and type(k_pe) is kind is type(slots):
            self._launches[read(kv_c, k_pe, slots)[0]] = launch

    def learn(self, launch: Launch | None, options: Any, *arrays: Any) -> None:
        """Remember how a call is launched; None is a call with more to do than to launch."""
        if launch is None:
            return
        for obj in arrays:
            _arrays.learn_looks(obj)
        looks = [options]
        if _arrays.read_looks(arrays, looks) is None:
            return
        key = tuple(looks)
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
