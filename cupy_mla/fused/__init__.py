"""What a layer of sparse MLA does around its caches, one launch each: norm, RoPE, fp8, insert."""

from __future__ import annotations

from .indexer import indexer_k_quant_and_cache
from .norm_rope import FusedNormRope, fused_norm_rope
from .query import fused_q

__all__ = ["FusedNormRope", "fused_norm_rope", "fused_q", "indexer_k_quant_and_cache"]
