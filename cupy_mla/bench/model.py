"""Sizes of DeepSeek-V3.2's sparse attention, beyond those of a cache's rows."""

from __future__ import annotations

from cupy_mla.layouts import CacheLayout

#: Epsilon of all norms.
EPS = 1e-6
#: Latent part of the query.
Q_LORA_RANK = 1536
#: Heads of attention over eight GPUs, and those of the indexer on each.
HEADS = 16
INDEX_HEADS = 64
INDEX_DIM = 128
#: Indices that a token's row of the top-k buffer holds.
TOP_K = 2048
#: What an fp8 query is divided by, and what the weights of the indexer's heads are multiplied by.
Q_SCALE = 0.25
SOFTMAX_SCALE = INDEX_DIM**-0.5
HEAD_SCALE = INDEX_HEADS**-0.5


def takes_fp8_query(layout: CacheLayout) -> bool:
    """Whether attention over caches of a layout takes an fp8 query: over flat e4m3 alone."""
    return layout.name == "fp8_e4m3"
