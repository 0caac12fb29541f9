"""Looking into caches: what they hold, how they were written, where two differ, what they take."""

from __future__ import annotations

from .accounting import CacheMemory, LayerMemory, cache_memory
from .audit import CacheAudit, ScaleEvidence, audit_cache
from .compare import CacheComparison, Difference, compare_caches
from .files import open_cache

__all__ = [
    "CacheAudit",
    "CacheComparison",
    "CacheMemory",
    "Difference",
    "LayerMemory",
    "ScaleEvidence",
    "audit_cache",
    "cache_memory",
    "compare_caches",
    "open_cache",
]
