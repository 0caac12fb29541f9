"""Reading rows back from caches on NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_mla._arrays import ArrayRef
from cupy_mla._plan import ReadPlan

from . import rows
from .insert import HostTarget
from .store import HostRows

Array = np.ndarray[Any, Any]

#: Rows decoded at a time: bounds the float32 temporaries to a few megabytes.
CHUNK = 1024


def read_slots(plan: ReadPlan, slots: ArrayRef, target: HostTarget) -> Array:
    """Return the rows of slots as ``[n, R + P]``; slots that the cache does not have: zeros."""
    cache, cache_plan = target.caches[0]
    layout = cache_plan.layout
    store = HostRows(cache, cache_plan)
    wanted = slots.host_view().astype(np.int64)
    out = np.zeros((plan.tokens, layout.kv_lora_rank + layout.rope_dim), plan.out_dtype)
    found = np.flatnonzero(store.valid(wanted))
    for start in range(0, found.size, CHUNK):
        chosen = found[start : start + CHUNK]
        packed = store.take(wanted[chosen])
        out[chosen] = rows.decode(layout, packed, target.scale(0), plan.out_dtype)
    return out


def host_rows(target: HostTarget, slots: Array) -> Array:
    """Return the rows of slots that the cache has as they are, uint8 ``[n, row_bytes]``."""
    return HostRows(*target.caches[0]).take(slots)
