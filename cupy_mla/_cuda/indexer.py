"""Launching the indexer kernel: keys quantised as they are."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cupy_mla._plan import CachePlan
from cupy_mla._plan_fused import IndexerInsertInputs, IndexerInsertPlan

from . import params_fused, registry
from .compiler import load
from .device import Device
from .geometry import warp_rows_shape
from .prepared import PreparedLaunch
from .target import layer_entry

_ADDRESSES = 4


def index_cache(plan: CachePlan) -> tuple[np.void, np.void]:
    """Return an ``IndexCache`` without its addresses: an entry a plane."""
    entries = []
    for plane in plan.layout.planes:
        entry = layer_entry(0, plan, None, 0)
        entry["row_stride"] = plane.nbytes
        entries.append(entry[0])
    return entries[0], entries[1]


def plane_starts(plan: CachePlan) -> tuple[int, int]:
    """Return where the planes of block 0 begin, from the address of the cache."""
    codes, scales = plan.layout.planes
    return codes.start(plan.block_size), scales.start(plan.block_size)


def prepare(device: Device, plan: IndexerInsertPlan) -> PreparedLaunch | None:
    """Prepare an insert; None where there is nothing to do."""
    if plan.tokens == 0:
        return None
    shape = warp_rows_shape(plan.operation, layers=1, tokens=plan.tokens, sm_count=device.sm_count)
    arguments = params_fused.INDEXER_PARAMS.zeros()
    arguments["k_stride"] = plan.k.strides[0]
    arguments["cache"] = index_cache(plan.cache)
    arguments["tokens"] = plan.tokens
    arguments["slot_bytes"] = plan.slots.dtype.itemsize
    arguments["block_tokens"] = shape.block_tokens
    arguments["ue8m0"] = plan.cache.layout.scale_format == "ue8m0"
    layout = plan.cache.layout
    special = registry.find("indexer", layout.name, plan.k.dtype.name)
    return PreparedLaunch(device, load(device, special, layout), shape, arguments, _ADDRESSES)


def addresses(plan: IndexerInsertPlan, inputs: IndexerInsertInputs) -> tuple[int, ...]:
    """Return where the arrays lie, in the order of the kernel's arguments."""
    codes, scales = plane_starts(plan.cache)
    return inputs.k.ptr, inputs.slots.ptr, inputs.cache.ptr + codes, inputs.cache.ptr + scales


def by_address(
    plan: IndexerInsertPlan, prepared: PreparedLaunch, current_stream: Callable[[], int]
) -> Callable[[int, int, int], None]:
    """Return the launch by the addresses of k, cache and slots."""
    launch = prepared.by_address(current_stream)
    codes, scales = plane_starts(plan.cache)
    return lambda k, cache, slots: launch(k, slots, cache + codes, cache + scales)
