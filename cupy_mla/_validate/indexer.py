"""indexer_k_quant_and_cache: keys, slots and the indexer's cache."""

from __future__ import annotations

from typing import Any

from cupy_mla._arrays import CPU
from cupy_mla._plan_fused import IndexerInsertInputs, IndexerInsertPlan, Operand
from cupy_mla.errors import check_integer, reject_value
from cupy_mla.layouts import check_scale_format

from .checks import array, check_outputs
from .norm_rope import indexer_cache
from .operands import indices, operand


def indexer_insert(
    operation: str, k: Any, kv_cache: Any, slot_mapping: Any, quant_block_size: Any, scale_fmt: Any
) -> tuple[IndexerInsertPlan, IndexerInsertInputs]:
    """Validate keys that go to an indexer cache as they are."""
    scale_fmt = check_scale_format(operation, scale_fmt, "scale_fmt")
    keys = array(operation, "k", k)
    cache, plan = indexer_cache(operation, "kv_cache", kv_cache, scale_fmt, None)
    width = plan.layout.kv_lora_rank
    if check_integer(operation, "quant_block_size", quant_block_size) != width:
        reject_value(
            operation,
            "quant_block_size",
            f"be {width}: a row of the indexer's cache has one scale",
            quant_block_size,
        )
    place = (cache.device or keys.device or CPU, "kv_cache")
    slots = indices(operation, "slot_mapping", slot_mapping, place)
    tokens = slots.shape[0]
    keys = operand(operation, "k", keys, ("T", width), place, tokens=tokens)
    check_outputs(operation, [("kv_cache", cache)], [("k", keys), ("slot_mapping", slots)])
    return (
        IndexerInsertPlan(operation, place[0], tokens, Operand.of(keys), Operand.of(slots), plan),
        IndexerInsertInputs(keys, slots, cache),
    )
