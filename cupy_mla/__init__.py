"""Write, read, convert and inspect paged MLA KV caches on the GPU, from any array framework.

The same functions run on NumPy arrays without a GPU. See `GroupedCacheWriter` for the caches of
all layers at once, `concat_and_cache_mla` for one, and `get_layout` for what is in a row.
"""

from __future__ import annotations

from ._version import __version__
from .errors import BackendUnavailable, CompileError
from .fused import FusedNormRope, fused_norm_rope, fused_q, indexer_k_quant_and_cache
from .inspection import CacheAudit, CacheMemory, audit_cache, cache_memory
from .layouts import CacheLayout, LayoutField, get_layout
from .ops import (
    concat_and_cache_mla,
    concat_and_cache_mla_grouped,
    convert_cache,
    cp_gather_and_upconvert_fp8_kv_cache,
    cp_gather_indexer_k_quant_cache,
    gather_and_maybe_dequant_cache,
    gather_cache,
    read_slots,
)
from .policy import CachePolicy, register_backend, select_cache_policy
from .writer import GroupedCacheWriter

__all__ = [
    "BackendUnavailable",
    "CacheAudit",
    "CacheLayout",
    "CacheMemory",
    "CachePolicy",
    "CompileError",
    "FusedNormRope",
    "GroupedCacheWriter",
    "LayoutField",
    "__version__",
    "audit_cache",
    "cache_memory",
    "concat_and_cache_mla",
    "concat_and_cache_mla_grouped",
    "convert_cache",
    "cp_gather_and_upconvert_fp8_kv_cache",
    "cp_gather_indexer_k_quant_cache",
    "fused_norm_rope",
    "fused_q",
    "gather_and_maybe_dequant_cache",
    "gather_cache",
    "get_layout",
    "indexer_k_quant_and_cache",
    "read_slots",
    "register_backend",
    "select_cache_policy",
]
