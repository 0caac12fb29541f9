"""Rows of a cache in host memory as packed bytes, wherever a block keeps their parts."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_mla._plan import CachePlan

from .fp8 import Codes

Array = np.ndarray[Any, Any]


class HostRows:
    """Reads and writes rows by slot, the parts of a row one behind the other.

    Parameters
    ----------
    blocks : uint8 array [num_blocks, block_size, row_bytes]
        View of the cache.
    plan : CachePlan
    """

    def __init__(self, blocks: Codes, plan: CachePlan) -> None:
        layout = plan.layout
        self.layout = layout
        self.num_slots = plan.num_slots
        self._block_size = plan.block_size
        if not layout.is_planar:
            self._pieces: tuple[tuple[Codes, slice], ...] = ((blocks, slice(None)),)
            return
        # Blocks of such a layout have no gaps, so each is one run of bytes: this takes views.
        count, size = blocks.shape[:2]
        runs = blocks.reshape(count, size * layout.row_bytes)
        self._pieces = tuple(
            (
                runs[:, plane.start(size) :][:, : size * plane.nbytes].reshape(
                    count, size, plane.nbytes
                ),
                slice(plane.offset, plane.offset + plane.nbytes),
            )
            for plane in layout.planes
        )

    def take(self, slots: Array) -> Codes:
        """Return the rows of slots that the cache has, as uint8 ``[n, row_bytes]``."""
        block, row = np.divmod(slots, self._block_size)
        rows = np.empty((slots.size, self.layout.row_bytes), np.uint8)
        for piece, where in self._pieces:
            rows[:, where] = piece[block, row]
        return rows

    def put(self, slots: Array, rows: Codes) -> None:
        """Write the rows of slots that the cache has."""
        block, row = np.divmod(slots, self._block_size)
        for piece, where in self._pieces:
            piece[block, row] = rows[:, where]

    def valid(self, slots: Array) -> Array:
        """Return which slots the cache has."""
        found: Array = (slots >= 0) & (slots < self.num_slots)
        return found
