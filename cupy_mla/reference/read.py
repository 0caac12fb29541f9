"""Reading rows back from caches on NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_mla._arrays import ArrayRef
from cupy_mla._plan import ReadPlan

from . import rows
from .insert import HostTarget

Array = np.ndarray[Any, Any]

#: Rows decoded at a time: bounds the float32 temporaries to a few megabytes.
_CHUNK = 1024


def read_slots(plan: ReadPlan, slots: ArrayRef, target: HostTarget) -> Array:
    """Return the rows of slots as ``[n, R + P]``; slots that the cache does not have: zeros."""
    cache, cache_plan = target.caches[0]
    layout = cache_plan.layout
    wanted = slots.host_view().astype(np.int64)
    out = np.zeros((plan.tokens, layout.kv_lora_rank + layout.rope_dim), plan.out_dtype)
    found = np.flatnonzero((wanted >= 0) & (wanted < cache_plan.num_slots))
    for start in range(0, found.size, _CHUNK):
        chosen = found[start : start + _CHUNK]
        block, row = np.divmod(wanted[chosen], cache_plan.block_size)
        out[chosen] = rows.decode(layout, cache[block, row], target.scale(0), plan.out_dtype)
    return out
