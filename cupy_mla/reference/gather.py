"""Reading the rows of requests through their block tables on NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_mla._arrays import ArrayRef, byte_view
from cupy_mla._plan import BlockTable, BlockTablePlan, CachePlan, GatherPlan, IndexerGatherPlan

from . import rows
from .insert import HostTarget
from .read import CHUNK
from .store import HostRows

Array = np.ndarray[Any, Any]


def locate(
    plan: BlockTablePlan, cache: CachePlan, arrays: BlockTable, tokens: Array
) -> tuple[Array, Array]:
    """Return which output rows a request owns, and the slot of each: -1 for no row of the cache.

    Parameters
    ----------
    plan : BlockTablePlan
    cache : CachePlan
    arrays : BlockTable
    tokens : int64 array [n]
        Numbers of output rows.
    """
    nothing = np.full(tokens.shape, -1, np.int64)
    if plan.num_seqs == 0:
        return np.zeros(tokens.shape, bool), nothing
    first = arrays.first.host_view().astype(np.int64)
    if arrays.owner is None:
        owner = np.searchsorted(first[: plan.num_seqs], tokens, side="right") - 1
    else:
        owner = arrays.owner.host_view()[tokens].astype(np.int64)
    known = (owner >= 0) & (owner < plan.num_seqs)
    owner = np.where(known, owner, 0)
    offset = tokens - first[owner]
    owned = known & (offset >= 0)
    if not plan.open_ended:  # else the request found is the last that begins here or before
        owned &= tokens < first[owner + 1]
    if plan.max_blocks == 0:
        return owned, nothing
    position = offset
    if arrays.start is not None:
        position = offset + arrays.start.host_view()[owner]
    column, row = np.divmod(position, cache.block_size)
    inside = owned & (column >= 0) & (column < plan.max_blocks)
    block = arrays.table.host_view()[owner, np.where(inside, column, 0)].astype(np.int64)
    found = inside & (block >= 0) & (block < (cache.num_blocks or 0))
    return owned, np.where(found, np.where(found, block, 0) * cache.block_size + row, -1)


def gather(plan: GatherPlan, arrays: BlockTable, target: HostTarget, out: ArrayRef | None) -> Array:
    """Write the rows into `out`, or into a new array, and return it."""
    cache = plan.cache
    layout = cache.layout
    store = HostRows(target.caches[0][0], cache)
    scale = target.scale(0)
    tokens = _count(plan, arrays)
    if out is None:
        values = np.empty((tokens, layout.kv_lora_rank + layout.rope_dim), plan.out_dtype)
    else:
        values = out.host_view()
    for begin in range(0, tokens, CHUNK):
        numbers = np.arange(begin, min(begin + CHUNK, tokens))
        owned, slots = locate(plan.rows, cache, arrays, numbers)
        found = slots >= 0
        part = values[begin : begin + numbers.size]
        part[found] = rows.decode(layout, store.take(slots[found]), scale, plan.out_dtype)
        part[~found if plan.zero_unowned else owned & ~found] = 0
    return values


def _count(plan: GatherPlan, arrays: BlockTable) -> int:
    if plan.tokens is not None:
        return plan.tokens
    return plan.counted(int(arrays.first.host_view()[-1]))


def gather_indexer(
    plan: IndexerGatherPlan,
    arrays: BlockTable,
    target: HostTarget,
    codes: ArrayRef,
    scales: ArrayRef,
) -> None:
    """Write the codes and the scales of the rows, as they are."""
    store = HostRows(target.caches[0][0], plan.cache)
    parts = [
        (field, byte_view(ref, field.nbytes))
        for field, ref in zip(plan.cache.layout.fields, (codes, scales), strict=True)
    ]
    for begin in range(0, plan.tokens, CHUNK):
        numbers = np.arange(begin, min(begin + CHUNK, plan.tokens))
        owned, slots = locate(plan.rows, plan.cache, arrays, numbers)
        found = slots >= 0
        packed = store.take(slots[found])
        for field, out in parts:
            part = out[begin : begin + numbers.size]
            part[found] = packed[:, field.offset : field.end]
            part[owned & ~found] = 0
