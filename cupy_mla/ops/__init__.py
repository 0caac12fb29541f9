"""Operations on single caches, on arrays of any framework."""

from __future__ import annotations

from .convert import convert_cache
from .insert import concat_and_cache_mla, concat_and_cache_mla_grouped
from .read import gather_cache, read_slots
from .vllm import (
    cp_gather_and_upconvert_fp8_kv_cache,
    cp_gather_indexer_k_quant_cache,
    gather_and_maybe_dequant_cache,
)

__all__ = [
    "concat_and_cache_mla",
    "concat_and_cache_mla_grouped",
    "convert_cache",
    "cp_gather_and_upconvert_fp8_kv_cache",
    "cp_gather_indexer_k_quant_cache",
    "gather_and_maybe_dequant_cache",
    "gather_cache",
    "read_slots",
]
