"""Arguments of the fused operations on a GPU and on the host, and comparison of their bytes."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests import helpers, oracle
from tests.fused_helpers import cos_sin, weights
from tests.gpu.frameworks import cupy, torch

F32 = np.float32
ROWS = 4096  # of the RoPE tables


def tensor(array: Any) -> Any:
    """Copy a NumPy array to the device as a tensor; anything else stays as it is."""
    if not isinstance(array, np.ndarray):
        return array
    bits = {"bfloat16": np.int16, "float8_e4m3fn": np.uint8, "float8_e5m2": np.uint8}
    name = array.dtype.name
    raw = np.ascontiguousarray(array)
    if name in bits:
        return torch.from_numpy(raw.view(bits[name])).cuda().view(getattr(torch, name))
    return torch.from_numpy(raw).cuda()


def raw(array: Any) -> np.ndarray:
    """Give the bytes of an array of either side."""
    if isinstance(array, np.ndarray):
        return np.ascontiguousarray(array).view(np.uint8)
    if isinstance(array, torch.Tensor):
        return array.contiguous().view(torch.uint8).cpu().numpy()
    return cupy.asnumpy(cupy.ascontiguousarray(array).view(cupy.uint8))


def on_device(arrays: dict[str, Any]) -> dict[str, Any]:
    """Copy all arrays to the device."""
    return {name: tensor(value) for name, value in arrays.items()}


def assert_same(device: Any, host: Any, what: str = "") -> None:
    """Compare bytes."""
    got, want = raw(device), raw(host)
    wrong = np.argwhere(got != want)
    assert not len(wrong), f"{what}: {len(wrong)} bytes differ, first at {wrong[0]}"


def random(rng: np.random.Generator, shape: Any, dtype: Any) -> np.ndarray:
    """Make numbers of a wide range, quickly."""
    values = rng.standard_normal(shape, F32) * np.exp2(rng.integers(-6, 6, shape[0])).reshape(
        -1, *[1] * (len(shape) - 1)
    )
    return values.astype(dtype)


def empty_cache(fmt: str, rows: int) -> np.ndarray:
    """Make a cache of sentinel bytes with blocks of 16."""
    size, dtype = oracle.row_bytes(fmt, 512, 64), helpers.STORAGE_DTYPES[fmt]
    blocks = -(-rows // 16)
    return np.full(blocks * 16 * size, 0xA5, np.uint8).view(dtype).reshape(blocks, 16, -1)


def slots_of(rng: np.random.Generator, tokens: int) -> np.ndarray:
    """Make slots in no order, a few of them padding or beyond the cache."""
    slots = rng.permutation(tokens + 3)[:tokens]
    slots[rng.random(tokens) < 0.02] = -1
    return slots


def positions_of(rng: np.random.Generator, tokens: int) -> np.ndarray:
    """Make positions, a few of them beyond the table."""
    return rng.integers(0, int(ROWS * 1.01), tokens)


def context_step(rng: np.random.Generator, fmt: str, dtype: str, tokens: int, layers: int = 2):
    """Make caches, scales and the arguments of insert_context."""
    caches = [empty_cache(fmt, tokens) for _ in range(layers)]
    scales = helpers.default_scales(fmt, layers)
    arrays = {
        "kv": random(rng, (tokens, layers, 576), oracle.DTYPES[dtype]),
        "positions": positions_of(rng, tokens),
        "slot_mapping": np.stack([slots_of(rng, tokens) for _ in range(layers)]),
        "norm_weight": weights(rng, (layers, 512)),
        "cos_sin_cache": cos_sin(ROWS, 64),
    }
    return caches, scales, arrays


def norm_rope_step(rng: np.random.Generator, fmt: str, dtype: str, tokens: int, topk: int):
    """Make all arguments of fused_norm_rope, outputs and caches included."""
    number = oracle.DTYPES[dtype]
    return {
        "positions": positions_of(rng, tokens),
        "q_c": random(rng, (tokens, 1536), number),
        "q_rms_norm_w": weights(rng, 1536),
        "q_rms_eps": 1e-6,
        "kv_c": random(rng, (tokens, 512), number),
        "kv_rms_norm_w": weights(rng, 512),
        "kv_rms_eps": 1e-6,
        "k_pe": random(rng, (tokens, 64), number),
        "k_rope_cos_sin_cache": cos_sin(ROWS, 64),
        "index_k": random(rng, (tokens, 128), number),
        "index_k_layer_norm_w": weights(rng, 128, F32),
        "index_k_layer_norm_bias": weights(rng, 128, F32) - 1,
        "index_k_layer_norm_eps": 1e-6,
        "index_k_rope_cos_sin_cache": cos_sin(ROWS, 64),
        "topk_indices_buffer": np.full((tokens, topk), 5, np.int32),
        "slot_mapping": slots_of(rng, tokens),
        "indexer_k_cache": np.full((-(-tokens // 64), 64, 132), 0xA5, np.uint8),
        "mla_kv_cache": empty_cache(fmt, tokens),
        "mla_kv_cache_dtype": fmt,
        "mla_k_scale": 0.05 if fmt in helpers.SCALED_FORMATS else None,
        "q_c_out": np.full((tokens, 1536), 3).astype(number),
        "kv_c_out": np.full((tokens, 512), 3).astype(number),
        "k_pe_out": np.full((tokens, 64), 3).astype(number),
    }


NORM_ROPE_OUTPUTS = (
    "topk_indices_buffer",
    "indexer_k_cache",
    "mla_kv_cache",
    "q_c_out",
    "kv_c_out",
    "k_pe_out",
)


NORM_ROPE_STEP = {
    "positions",
    "q_c",
    "kv_c",
    "k_pe",
    "index_k",
    "topk_indices_buffer",
    "slot_mapping",
    "q_c_out",
    "kv_c_out",
    "k_pe_out",
}


def query_step(rng, dtype: Any, tokens: int, heads: int = 16, index_heads: int = 64):
    """Make the inputs of fused_q."""
    return {
        "positions": positions_of(rng, tokens),
        "q_pe": random(rng, (tokens, heads, 64), dtype),
        "q_pe_cos_sin_cache": cos_sin(ROWS, 64),
        "index_q": random(rng, (tokens, index_heads, 128), dtype),
        "index_q_cos_sin_cache": cos_sin(ROWS, 64),
        "ql_nope": random(rng, (tokens, heads, 512), dtype),
        "q_scale": 0.37,
        "index_weights": random(rng, (tokens, index_heads), F32),
        "index_weights_softmax_scale": 128**-0.5,
        "index_weights_head_scale": 64**-0.5,
    }
