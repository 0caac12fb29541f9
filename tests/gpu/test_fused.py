"""Fused operations on a GPU: many tokens bit for bit, graphs, streams, new arrays, memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupy_mla import (
    FusedNormRope,
    GroupedCacheWriter,
    fused_norm_rope,
    fused_q,
    indexer_k_quant_and_cache,
)
from tests import helpers, oracle
from tests.emulator.harness import COMBINATIONS
from tests.fused_helpers import cos_sin, weights
from tests.gpu import ptx75
from tests.gpu.frameworks import cupy, torch
from tests.gpu.test_graphs_and_streams import busy

F32 = np.float32
ROWS = 4096  # of the RoPE tables
TOKENS = [1, 4, 17, 512, 4096]
MANY = 70_000
every_combination = pytest.mark.parametrize(("fmt", "dtype"), COMBINATIONS)


@pytest.fixture(params=["own", "sm_75"])
def target(request):
    """The GPU's own instructions, and the software paths of older ones."""
    with ptx75.installed() if request.param == "sm_75" else contextlib.nullcontext():
        yield


# --- arrays of both sides -------------------------------------------------------------------------


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


# --- insert_context -------------------------------------------------------------------------------


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


def test_norm_rope_of_many_tokens(rng):
    check_norm_rope(rng, "fp8_ds_mla", "bfloat16", MANY, 64)


# --- fused_q and the indexer's keys ---------------------------------------------------------------


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


def check_query(rng, dtype: Any, tokens: int, options: Any = None, **sizes: int) -> None:
    host = query_step(rng, dtype, tokens, **sizes)
    options = options or {}
    for got, want in zip(
        fused_q(**on_device(host), **options), fused_q(**host, **options), strict=True
    ):
        assert_same(got, want)


@pytest.mark.parametrize("dtype", list(oracle.DTYPES))
@pytest.mark.parametrize("tokens", [1, 4, 17, 512])
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


# --- graphs ---------------------------------------------------------------------------------------


def capture(run: Callable[[], Any]) -> Any:
    """Capture what a function launches, after one call of it."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def check_replay(graph: Any, device: dict[str, Any], fresh: dict[str, Any]) -> None:
    """Put other numbers in the inputs and replay."""
    for name, value in fresh.items():
        if isinstance(value, np.ndarray):
            device[name].copy_(tensor(value))
    graph.replay()
    torch.cuda.synchronize()


@pytest.mark.parametrize("fmt", ["bfloat16", "fp8_e4m3", "fp8_ds_mla"])
def test_context_in_a_graph(rng, fmt):
    host, scales, arrays = context_step(rng, fmt, "bfloat16", 40)
    caches, device = [tensor(cache) for cache in host], on_device(arrays)
    writer = GroupedCacheWriter(caches, fmt, scales)
    graph = capture(lambda: writer.insert_context(**device))
    for _ in range(3):
        fresh, _, arrays = context_step(rng, fmt, "bfloat16", 40)
        for cache, values in zip(caches, fresh, strict=True):
            cache.copy_(tensor(values))
        check_replay(graph, device, arrays)
        GroupedCacheWriter(fresh, fmt, scales).insert_context(**arrays)
        for layer in range(2):
            assert_same(caches[layer], fresh[layer])


@pytest.mark.parametrize("kind", ["object", "function"])
def test_norm_rope_in_a_graph(rng, kind):
    device = on_device(norm_rope_step(rng, "fp8_ds_mla", "bfloat16", 40, 64))
    run = lambda: fused_norm_rope(**device)  # noqa: E731
    if kind == "object":
        step = {name: device[name] for name in NORM_ROPE_STEP}
        layer = FusedNormRope(**{name: device[name] for name in device if name not in step})
        layer.warmup()
        run = lambda: layer(**step)  # noqa: E731
    graph = capture(run)
    for _ in range(3):
        fresh = norm_rope_step(rng, "fp8_ds_mla", "bfloat16", 40, 64)
        check_replay(graph, device, fresh)
        fused_norm_rope(**fresh)
        for name in NORM_ROPE_OUTPUTS:
            assert_same(device[name], fresh[name], name)


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


def query_outputs(tokens: int) -> dict[str, np.ndarray]:
    """Make outputs of fused_q for 16 and 64 heads."""
    return {
        "index_q_out": np.full((tokens, 64, 128), 3, np.uint8),
        "index_weights_out": np.full((tokens, 64), 3, F32),
        "mqa_q_out": np.full((tokens, 16, 576), 3, np.uint8),
    }


def test_query_in_a_graph(rng):
    device = on_device(query_step(rng, oracle.BFLOAT16, 12) | query_outputs(12))
    graph = capture(lambda: fused_q(**device))
    for _ in range(3):
        fresh = query_step(rng, oracle.BFLOAT16, 12) | query_outputs(12)
        check_replay(graph, device, fresh)
        fused_q(**fresh)
        for name in query_outputs(0):
            assert_same(device[name], fresh[name], name)


# --- streams --------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [True, False])
def test_the_right_stream(given):
    """The rows are made late, on the stream that counts; 100 of 100 calls see them."""
    tokens = 24
    caches = [torch.zeros(4, 16, 576, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    writer = GroupedCacheWriter(caches)
    kv = torch.zeros(tokens, 2, 576, dtype=torch.bfloat16, device="cuda")
    weight = torch.ones(2, 512, dtype=torch.bfloat16, device="cuda")
    table = torch.zeros(8, 64, device="cuda")
    table[:, :32] = 1
    index = torch.arange(tokens, device="cuda")
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    producer = torch.cuda.current_stream() if given else side
    for turn in range(100):
        with torch.cuda.stream(producer):
            busy(producer, 0.3)
            kv[..., 512:].fill_(turn + 1)
            options = {"stream": side} if given else {}
            writer.insert_context(kv, index % 8, index, weight, table, **options)
        side.synchronize()
        stored = caches[1].view(-1, 576)[:tokens, 512:]
        assert int((stored == turn + 1).sum()) == tokens * 64


def test_new_outputs_on_a_given_stream(rng):
    """They are allocated on the current stream, and kept and ordered for the other one."""
    host = query_step(rng, oracle.BFLOAT16, 7)
    want = fused_q(**host)
    device = on_device(host)
    side = torch.cuda.Stream()
    for _ in range(30):
        made = fused_q(**device, stream=side)
        torch.cuda.current_stream().wait_stream(side)
        for got, expected in zip(made, want, strict=True):
            assert_same(got, expected)


# --- memory ---------------------------------------------------------------------------------------


def test_no_call_with_outputs_takes_memory(rng):
    step = on_device(norm_rope_step(rng, "fp8_e4m3", "bfloat16", 8, 16))
    query = on_device(query_step(rng, oracle.BFLOAT16, 8) | query_outputs(8))
    keys = on_device(
        {
            "k": random(rng, (8, 128), oracle.BFLOAT16),
            "kv_cache": np.zeros((1, 64, 132), np.uint8),
            "slot_mapping": np.arange(8),
        }
    )
    host, scales, arrays = context_step(rng, "fp8_e4m3", "bfloat16", 8)
    writer = GroupedCacheWriter([tensor(cache) for cache in host], "fp8_e4m3", scales)
    context = on_device(arrays)
    layer = FusedNormRope(**{name: step[name] for name in step if name not in NORM_ROPE_STEP})
    calls = (
        lambda: fused_norm_rope(**step),
        lambda: layer(**{name: step[name] for name in NORM_ROPE_STEP}),
        lambda: fused_q(**query),
        lambda: indexer_k_quant_and_cache(**keys),
        lambda: writer.insert_context(**context),
    )
    for call in calls:
        call()
        torch.cuda.synchronize()
        pool = cupy.get_default_memory_pool()
        before = torch.cuda.memory_stats()["allocation.all.allocated"], pool.used_bytes()
        call()
        after = torch.cuda.memory_stats()["allocation.all.allocated"], pool.used_bytes()
        assert after == before
