"""Inputs of the fused operations, and their expected results from the scalar oracle."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from cupy_mla import FusedNormRope, fused_norm_rope
from tests import fused_oracle, helpers, oracle
from tests.helpers import Backend, Cache

INDEX_DIM = 128


def cos_sin(rows: int, width: int, dtype: Any = np.float32) -> np.ndarray:
    """Make a RoPE table [rows, width] of the usual angles."""
    half = width // 2
    angles = np.arange(rows)[:, None] * 10000.0 ** (-np.arange(half) / max(half, 1))
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    return table.astype(np.float32).astype(dtype)


def weights(rng: np.random.Generator, shape: Any, dtype: Any = oracle.BFLOAT16) -> np.ndarray:
    """Norm weights around 1."""
    return (1 + 0.2 * rng.standard_normal(shape)).astype(np.float32).astype(dtype)


def odd_address(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Make zeros whose first byte has an odd address, which no kernel can read."""
    dtype = np.dtype(dtype)
    room = np.zeros(int(np.prod(shape)) * dtype.itemsize + 65, np.uint8)
    start = -room.ctypes.data % 64 + 1
    return np.ndarray(shape, dtype, room, start)


def make_indexer_cache(
    backend: Backend, num_blocks: int = 3, block_size: int = 4, *, block_pad: int = 0
) -> Cache:
    """Make an indexer cache among sentinel bytes."""
    return helpers.make_cache(
        backend,
        "fp8_e4m3",
        num_blocks,
        block_size,
        row_bytes=132,
        block_pad=block_pad,
        dtype=np.uint8,
    )


@dataclass
class Layer:
    """A layer's weights, tables and caches as plain NumPy values, and a step's arrays."""

    positions: np.ndarray
    q_c: np.ndarray
    q_weight: np.ndarray
    kv_c: np.ndarray
    kv_weight: np.ndarray
    k_pe: np.ndarray
    k_table: np.ndarray
    index_k: np.ndarray
    index_weight: np.ndarray
    index_bias: np.ndarray
    index_table: np.ndarray
    slots: np.ndarray
    q_eps: float = 1e-6
    kv_eps: float = 1e-5
    index_eps: float = 1e-6
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Number of slots."""
        return len(self.slots)


def make_layer(
    rng: np.random.Generator,
    *,
    tokens: int = 5,
    q_dim: int = 24,
    rank: int = 512,
    rope: int = 64,
    index_rope: int = 64,
    table_rows: int = 16,
    dtype: Any = oracle.BFLOAT16,
    slots: Any = None,
    positions: Any = None,
) -> Layer:
    """Random inputs of fused_norm_rope; weights and tables of several dtypes."""

    def rows(width: int) -> np.ndarray:
        return helpers.random_rows(rng, (tokens, width), dtype)

    return Layer(
        positions=np.arange(tokens) if positions is None else np.asarray(positions),
        q_c=rows(q_dim),
        q_weight=weights(rng, q_dim),
        kv_c=rows(rank),
        kv_weight=weights(rng, rank),
        k_pe=rows(rope),
        k_table=cos_sin(table_rows, rope),
        index_k=rows(INDEX_DIM),
        index_weight=weights(rng, INDEX_DIM, np.float32),
        index_bias=(0.1 * rng.standard_normal(INDEX_DIM)).astype(np.float32),
        index_table=cos_sin(table_rows, index_rope, oracle.BFLOAT16),
        slots=np.arange(tokens) if slots is None else np.asarray(slots),
    )


@dataclass
class Expected:
    """What the oracle says of a step."""

    q_c: np.ndarray
    kv_c: np.ndarray
    k_pe: np.ndarray
    mla_pool: np.ndarray | None
    indexer_pool: np.ndarray | None


def expect(
    layer: Layer,
    mla: Cache | None,
    indexer: Cache | None,
    *,
    scale: float | None = None,
    scale_format: str = "float32",
    staged: bool = False,
    interleave: bool = False,
    indexer_slots: np.ndarray | None = None,
) -> Expected:
    """Compute a step of fused_norm_rope one number at a time."""
    dtype = layer.q_c.dtype
    tokens = layer.tokens
    mla_pool = None if mla is None else mla.bytes()
    indexer_pool = None if indexer is None else indexer.bytes()
    indexer_slots = layer.slots if indexer_slots is None else indexer_slots
    q_out, kv_out, pe_out = [], [], []
    with np.errstate(all="ignore"):
        for token in range(tokens):
            q_out.append(
                fused_oracle.narrow(
                    fused_oracle.rms_norm(
                        fused_oracle.widen(layer.q_c[token]),
                        fused_oracle.widen(layer.q_weight),
                        layer.q_eps,
                    ),
                    dtype,
                )
            )
            latent, rotary, found = expect_row(
                layer.kv_c[token],
                layer.kv_weight,
                layer.kv_eps,
                layer.k_pe[token],
                layer.k_table,
                int(layer.positions[token]),
                staged=staged,
            )
            kv_out.append(fused_oracle.narrow(latent, dtype))
            pe_out.append(fused_oracle.narrow(rotary, dtype))
            slot = int(layer.slots[token])
            if mla is not None and found and 0 <= slot < mla.geometry.capacity:
                row = fused_oracle.encode_values(latent, rotary, mla.fmt, scale, scale_format)
                fused_oracle.put_values(mla_pool, mla.geometry, slot, row)
            key, found = expect_key(layer, token, staged=staged, interleave=interleave)
            slot = int(indexer_slots[token])
            if indexer is not None and found and 0 <= slot < indexer.geometry.capacity:
                fused_oracle.put_key(indexer_pool, indexer.geometry, slot, key)
    shapes = [(tokens, layer.q_c.shape[1]), layer.kv_c[:tokens].shape, layer.k_pe[:tokens].shape]
    outs = [
        np.array(out, dtype).reshape(shape)
        for out, shape in zip((q_out, kv_out, pe_out), shapes, strict=True)
    ]
    return Expected(*outs, mla_pool, indexer_pool)


def expect_row(
    kv_c: np.ndarray,
    weight: np.ndarray,
    eps: float,
    k_pe: np.ndarray,
    table: np.ndarray | None,
    position: int,
    *,
    staged: bool = False,
    neox: bool = False,
) -> tuple[list[np.float32], list[np.float32], bool]:
    """Give the latent and the rotary part of a row, and whether the table has the position."""
    latent = fused_oracle.rms_norm(fused_oracle.widen(kv_c), fused_oracle.widen(weight), eps)
    rotary, found = fused_oracle.widen(k_pe), True
    if table is not None:
        rotary, found = fused_oracle.rope(rotary, table, position, neox)
    if staged:
        latent = fused_oracle.rounded(latent, kv_c.dtype)
        rotary = fused_oracle.rounded(rotary, kv_c.dtype)
    return latent, rotary, found


def expect_key(
    layer: Layer, token: int, *, staged: bool, interleave: bool
) -> tuple[list[np.float32], bool]:
    """Give the indexer's key before it is quantised."""
    dtype = layer.index_k.dtype
    key = fused_oracle.layer_norm(
        fused_oracle.widen(layer.index_k[token]),
        fused_oracle.widen(layer.index_weight),
        fused_oracle.widen(layer.index_bias),
        layer.index_eps,
    )
    if staged:
        key = fused_oracle.rounded(key, dtype)
    key, found = fused_oracle.rope(
        key, layer.index_table, int(layer.positions[token]), not interleave
    )
    return fused_oracle.rounded(key, dtype) if staged else key, found


def arguments(backend: Backend, layer: Layer, **changes: Any) -> dict[str, Any]:
    """Give the arguments of fused_norm_rope by name, as the backend's arrays."""
    given: dict[str, Any] = {
        "positions": backend.array(layer.positions),
        "q_c": backend.array(layer.q_c),
        "q_rms_norm_w": backend.array(layer.q_weight),
        "q_rms_eps": layer.q_eps,
        "kv_c": backend.array(layer.kv_c),
        "kv_rms_norm_w": backend.array(layer.kv_weight),
        "kv_rms_eps": layer.kv_eps,
        "k_pe": backend.array(layer.k_pe),
        "k_rope_cos_sin_cache": backend.array(layer.k_table),
        "index_k": backend.array(layer.index_k),
        "index_k_layer_norm_w": backend.array(layer.index_weight),
        "index_k_layer_norm_bias": backend.array(layer.index_bias),
        "index_k_layer_norm_eps": layer.index_eps,
        "index_k_rope_cos_sin_cache": backend.array(layer.index_table),
        "topk_indices_buffer": None,
        "slot_mapping": backend.array(layer.slots),
    }
    given.update(changes)
    return given


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    """Compare arrays bit by bit, NaN included."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    bits = f"u{expected.dtype.itemsize}"
    got, want = (np.ascontiguousarray(array).view(bits) for array in (actual, expected))
    wrong = np.argwhere(got != want)
    if wrong.size:
        where = tuple(wrong[0])
        raise AssertionError(
            f"{len(wrong)} of {want.size} elements differ, first at {where}: "
            f"{got[where]:x} instead of {want[where]:x}"
        )


# --- calling fused_norm_rope ----------------------------------------------------------------------

#: Layouts of MLA caches, with the formats of the scales inside their rows.
CACHE_KINDS = [
    ("bfloat16", "float32"),
    ("float16", "float32"),
    ("float32", "float32"),
    ("fp8_e4m3", "float32"),
    ("fp8_e5m2", "float32"),
    ("fp8_ds_mla", "float32"),
    ("fp8_ds_mla", "ue8m0"),
]
#: Scale of flat fp8 caches.
SCALE = 0.05
#: Arguments of `fused_norm_rope` that belong to the layer.
LAYER_NAMES = (
    "q_rms_norm_w",
    "q_rms_eps",
    "kv_rms_norm_w",
    "kv_rms_eps",
    "k_rope_cos_sin_cache",
    "index_k_layer_norm_w",
    "index_k_layer_norm_bias",
    "index_k_layer_norm_eps",
    "index_k_rope_cos_sin_cache",
    "indexer_k_cache",
    "mla_kv_cache",
    "mla_kv_cache_dtype",
    "mla_k_scale",
    "has_indexer",
    "index_rope_interleave",
    "scale_format",
    "rounding",
)


def run_function(given: dict[str, Any]) -> Any:
    """Call the function."""
    return fused_norm_rope(**given)


def run_object(given: dict[str, Any]) -> Any:
    """Make the object and call it."""
    given = dict(given)
    layer = FusedNormRope(**{name: given.pop(name) for name in LAYER_NAMES if name in given})
    return layer(**given)


both_ways = pytest.mark.parametrize("run", [run_function, run_object], ids=["function", "object"])


def scale_of(fmt: str) -> float | None:
    """Give the scale of a cache that needs one."""
    return SCALE if fmt in helpers.SCALED_FORMATS else None
