"""Fused operations on a GPU: many tokens bit for bit, and new arrays."""

from __future__ import annotations

import contextlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupy_mla import (
    GroupedCacheWriter,
    fused_norm_rope,
    fused_q,
    indexer_k_quant_and_cache,
)
from tests import oracle
from tests.emulator.harness import COMBINATIONS
from tests.gpu import ptx75
from tests.gpu.frameworks import cupy, torch
from tests.gpu.fused_arrays import (
    NORM_ROPE_OUTPUTS,
    assert_same,
    context_step,
    norm_rope_step,
    on_device,
    query_step,
    random,
    slots_of,
    tensor,
)

TOKENS = [1, 4, 17, 512, 4096]
MANY = 70_000
every_combination = pytest.mark.parametrize(("fmt", "dtype"), COMBINATIONS)


@pytest.fixture(params=["own", "sm_75"])
def target(request):
    """The GPU's own instructions, and the software paths of older ones."""
    with ptx75.installed() if request.param == "sm_75" else contextlib.nullcontext():
        yield


# --- insert_context -------------------------------------------------------------------------------


def check_context(rng, fmt: str, dtype: str, tokens: int, **options: Any) -> None:
    host, scales, arrays = context_step(rng, fmt, dtype, tokens)
    device = [tensor(cache) for cache in host]
    stats = []
    for caches, given in ((host, arrays), (device, on_device(arrays))):
        writer = GroupedCacheWriter(caches, fmt, scales, collect_stats=True)
        writer.insert_context(**given, **options)
        stats.append({name: counts.tolist() for name, counts in writer.stats().items()})
    for layer in range(2):
        assert_same(device[layer], host[layer], f"layer {layer}")
    assert stats[1] == stats[0]


@every_combination
@pytest.mark.parametrize("tokens", TOKENS)
def test_context(rng, fmt, dtype, tokens):
    check_context(rng, fmt, dtype, tokens)


@pytest.mark.usefixtures("target")
@every_combination
@pytest.mark.parametrize("rounding", ["fused", "staged"])
@pytest.mark.parametrize("is_neox", [False, True])
def test_context_by_every_path(rng, fmt, dtype, rounding, is_neox):
    check_context(rng, fmt, dtype, 33, rounding=rounding, is_neox=is_neox, eps=1e-5)


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "fp8_ds_mla"])
def test_context_of_many_tokens(rng, fmt):
    check_context(rng, fmt, "bfloat16", MANY)


# --- fused_norm_rope ------------------------------------------------------------------------------


def check_norm_rope(rng, fmt: str, dtype: str, tokens: int, topk: int = 2048, **options) -> None:
    host = norm_rope_step(rng, fmt, dtype, tokens, topk)
    device = on_device(host)
    fused_norm_rope(**host, **options)
    fused_norm_rope(**device, **options)
    for name in NORM_ROPE_OUTPUTS:
        assert_same(device[name], host[name], name)


@every_combination
@pytest.mark.parametrize("tokens", TOKENS)
def test_norm_rope(rng, fmt, dtype, tokens):
    check_norm_rope(rng, fmt, dtype, tokens)


@pytest.mark.usefixtures("target")
@every_combination
@pytest.mark.parametrize("rounding", ["fused", "staged"])
@pytest.mark.parametrize("interleave", [False, True])
def test_norm_rope_by_every_path(rng, fmt, dtype, rounding, interleave):
    options = {"rounding": rounding, "index_rope_interleave": interleave}
    check_norm_rope(rng, fmt, dtype, 33, 7, **options)


@pytest.mark.parametrize(
    ("fmt", "interleave"), [("fp8_ds_mla", False), ("fp8_e4m3", True), ("bfloat16", False)]
)
def test_norm_rope_of_many_tokens(rng, fmt, interleave):
    check_norm_rope(rng, fmt, "bfloat16", MANY, 64, index_rope_interleave=interleave)


# --- fused_q and the indexer's keys ---------------------------------------------------------------


def check_query(rng, dtype: Any, tokens: int, options: Any = None, **sizes: int) -> None:
    host = query_step(rng, dtype, tokens, **sizes)
    options = options or {}
    for got, want in zip(
        fused_q(**on_device(host), **options), fused_q(**host, **options), strict=True
    ):
        assert_same(got, want)


@pytest.mark.parametrize("dtype", list(oracle.DTYPES))
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("quantise", [True, False])
def test_query(rng, dtype, tokens, quantise):
    check_query(rng, oracle.DTYPES[dtype], tokens, {"quantize_mqa": quantise})


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("dtype", list(oracle.DTYPES))
@pytest.mark.parametrize("interleave", [True, False])
def test_query_by_every_path(rng, dtype, interleave):
    options = {"index_rope_interleave": interleave}
    check_query(rng, oracle.DTYPES[dtype], 9, options)
    check_query(rng, oracle.DTYPES[dtype], 9, options, heads=3, index_heads=5)


def test_query_of_many_tokens(rng):
    check_query(rng, oracle.BFLOAT16, MANY, heads=2, index_heads=3)


def test_a_live_query_scale(rng):
    host = query_step(rng, oracle.BFLOAT16, 5)
    device = on_device(host)
    device["q_scale"] = torch.tensor([1.0], device="cuda")
    for scale in (0.25, 7.0):
        device["q_scale"].fill_(scale)
        host["q_scale"] = scale
        assert_same(fused_q(**device)[2], fused_q(**host)[2])


@pytest.mark.parametrize("dtype", list(oracle.DTYPES))
@pytest.mark.parametrize("tokens", [1, 17, 4096, MANY])
@pytest.mark.parametrize("scale_format", ["ue8m0", "float32"])
def test_indexer(rng, dtype, tokens, scale_format):
    host = {
        "k": random(rng, (tokens, 128), oracle.DTYPES[dtype]),
        "kv_cache": np.full((-(-tokens // 64), 64, 132), 0xA5, np.uint8),
        "slot_mapping": slots_of(rng, tokens),
    }
    device = on_device(host)
    indexer_k_quant_and_cache(**host, scale_fmt=scale_format)
    indexer_k_quant_and_cache(**device, scale_fmt=scale_format)
    assert_same(device["kv_cache"], host["kv_cache"])


# --- new arrays -----------------------------------------------------------------------------------


def test_new_arrays_are_of_the_callers_framework(rng):
    host = query_step(rng, oracle.BFLOAT16, 3)
    codes, index_weights, mqa = fused_q(**on_device(host))
    assert codes.dtype == mqa.dtype == torch.float8_e4m3fn
    assert index_weights.dtype == torch.float32
    assert {array.device.type for array in (codes, index_weights, mqa)} == {"cuda"}
    step = on_device(norm_rope_step(rng, "bfloat16", "bfloat16", 3, 4)) | {"q_c_out": None}
    made = fused_norm_rope(**step)
    assert (type(made), made.dtype, tuple(made.shape)) == (torch.Tensor, torch.bfloat16, (3, 1536))


def cupy_array(array: Any) -> Any:
    """Copy a NumPy array to the device as CuPy's."""
    if not isinstance(array, np.ndarray):
        return array
    memory = cupy.asarray(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return cupy.ndarray(array.shape, array.dtype, memory.data)


def test_cupy_gets_bytes_for_codes(rng):
    host = query_step(rng, oracle.BFLOAT16, 3)
    given = {name: cupy_array(value) for name, value in host.items()}
    for got, want in zip(fused_q(**given), fused_q(**host), strict=True):
        assert isinstance(got, cupy.ndarray)
        assert_same(got, want)
        assert got.dtype == (np.float32 if want.dtype == np.float32 else np.uint8)
    _, _, plain = fused_q(**given, quantize_mqa=False)
    assert plain.dtype == ml_dtypes.bfloat16
