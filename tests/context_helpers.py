"""Inputs of GroupedCacheWriter.insert_context, and their expected results."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_mla import GroupedCacheWriter
from tests import fused_oracle, helpers
from tests.fused_helpers import cos_sin, expect_row, weights
from tests.helpers import (
    INPUT_DTYPES,
    assert_bytes_equal,
    make_cache,
    random_rows,
)

F32 = np.float32
ROWS = 16  # of the RoPE table


class Step:
    """Caches of L layers, and the arrays of a step as plain NumPy values."""

    def __init__(
        self,
        backend: helpers.Backend,
        rng: np.random.Generator,
        fmt: Any = "bfloat16",
        *,
        layers: int = 3,
        tokens: int = 4,
        rank: int = 512,
        rope: int = 64,
        slots: Any = None,
        positions: Any = None,
        dtype: Any = None,
        scale_format: str = "float32",
    ) -> None:
        self.backend, self.rank, self.rope = backend, rank, rope
        self.formats = [fmt] * layers if isinstance(fmt, str) else list(fmt)
        self.scale_format = scale_format
        self.dtype = np.dtype(INPUT_DTYPES[self.formats[0]] if dtype is None else dtype)
        # Each layer has its own geometry.
        self.caches = [
            make_cache(backend, name, 3 + i, 4 + i, rank, rope, row_pad=16 * i, block_pad=32)
            for i, name in enumerate(self.formats)
        ]
        self.scales = helpers.default_scales(self.formats, len(self.formats))
        self.kv = random_rows(rng, (tokens, len(self.formats), rank + rope), self.dtype)
        self.weight = weights(rng, (len(self.formats), rank))
        self.table = cos_sin(ROWS, rope) if rope else None
        self.positions = np.arange(tokens) if positions is None else np.asarray(positions)
        self.slots = np.arange(tokens)[::-1].copy() if slots is None else np.asarray(slots)

    def writer(self, **options: Any) -> GroupedCacheWriter:
        """Make a writer for the caches."""
        return GroupedCacheWriter(
            [cache.array for cache in self.caches],
            self.formats,
            self.scales,
            kv_lora_rank=self.rank,
            rope_dim=self.rope,
            scale_format=self.scale_format,
            **options,
        )

    def arguments(self, **changes: Any) -> dict[str, Any]:
        """Give the arguments of insert_context by name, as the backend's arrays."""
        array = self.backend.array
        given = {
            "kv": array(self.kv),
            "positions": array(self.positions),
            "slot_mapping": array(self.slots),
            "norm_weight": array(self.weight),
            "cos_sin_cache": None if self.table is None else array(self.table),
        }
        given.update(changes)
        return given

    def expected(
        self, *, eps: float = 1e-6, neox: bool = False, staged: bool = False, slots: Any = None
    ) -> list[np.ndarray]:
        """Give every pool afterwards, one number at a time."""
        slots = self.slots if slots is None else slots
        pools = []
        for layer, cache in enumerate(self.caches):
            pool = cache.bytes()
            own = slots[layer] if isinstance(slots, list) or slots.ndim == 2 else slots
            for token, slot in enumerate([] if own is None else own.tolist()):
                if not 0 <= slot < cache.geometry.capacity:
                    continue
                with np.errstate(all="ignore"):
                    latent, rotary, found = expect_row(
                        self.kv[token, layer, : self.rank],
                        self.weight[layer],
                        eps,
                        self.kv[token, layer, self.rank :],
                        self.table,
                        int(self.positions[token]) if self.rope else 0,
                        staged=staged,
                        neox=neox,
                    )
                    if found:
                        scale = None if self.scales is None else self.scales[layer]
                        row = fused_oracle.encode_values(
                            latent, rotary, cache.fmt, scale, self.scale_format
                        )
                        fused_oracle.put_values(pool, cache.geometry, slot, row)
            pools.append(pool)
        return pools

    def check(self, want: list[np.ndarray]) -> None:
        """Compare every byte of the caches' pools."""
        for cache, pool in zip(self.caches, want, strict=True):
            assert_bytes_equal(cache.bytes(), pool, cache.geometry)
