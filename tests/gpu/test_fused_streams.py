"""Fused operations in graphs, on streams, and without taking memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupy_mla import (
    FusedNormRope,
    GroupedCacheWriter,
    fused_norm_rope,
    fused_q,
    indexer_k_quant_and_cache,
)
from tests import oracle
from tests.gpu.frameworks import cupy, torch
from tests.gpu.fused_arrays import (
    F32,
    NORM_ROPE_OUTPUTS,
    NORM_ROPE_STEP,
    assert_same,
    context_step,
    norm_rope_step,
    on_device,
    query_step,
    random,
    tensor,
)
from tests.gpu.test_graphs_and_streams import busy

# --- graphs ---------------------------------------------------------------------------------------


def capture(run: Callable[[], Any], warmup: Callable[[], Any] | None = None) -> Any:
    """Capture what a function launches, after one call of it, or after a warmup."""
    (warmup or run)()
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


@pytest.mark.parametrize("fmt", ["bfloat16", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla"])
@pytest.mark.parametrize("kind", ["object", "function"])
def test_norm_rope_in_a_graph(rng, kind, fmt):
    """A scale on the device is read at each replay."""
    device = on_device(norm_rope_step(rng, fmt, "bfloat16", 40, 64))
    has_scale = device["mla_k_scale"] is not None
    if has_scale:
        device["mla_k_scale"] = torch.ones(1, device="cuda")
    if kind == "object":
        step = {name: device[name] for name in NORM_ROPE_STEP}
        layer = FusedNormRope(**{name: device[name] for name in device if name not in step})
        graph = capture(lambda: layer(**step), layer.warmup)
    else:
        graph = capture(lambda: fused_norm_rope(**device))
    for turn in range(3):
        fresh = norm_rope_step(rng, fmt, "bfloat16", 40, 64)
        if has_scale:
            fresh["mla_k_scale"] = np.array([0.07 * (turn + 1)], F32)
        check_replay(graph, device, fresh)
        fused_norm_rope(**fresh)
        for name in NORM_ROPE_OUTPUTS:
            assert_same(device[name], fresh[name], name)


def query_outputs(tokens: int, *, quantised: bool = True) -> dict[str, np.ndarray]:
    """Make outputs of fused_q for 16 and 64 heads."""
    mqa = (576, np.uint8) if quantised else (64, oracle.BFLOAT16)
    return {
        "index_q_out": np.full((tokens, 64, 128), 3, np.uint8),
        "index_weights_out": np.full((tokens, 64), 3, F32),
        "mqa_q_out": np.full((tokens, 16, mqa[0]), 3).astype(mqa[1]),
    }


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize("has_indexer", [True, False])
def test_query_in_a_graph(rng, quantised, has_indexer):
    outs = query_outputs(12, quantised=quantised)
    options = {"quantize_mqa": quantised, "has_indexer": has_indexer}
    device = on_device(query_step(rng, oracle.BFLOAT16, 12) | outs)
    graph = capture(lambda: fused_q(**device, **options))
    for _ in range(3):
        fresh = query_step(rng, oracle.BFLOAT16, 12) | query_outputs(12, quantised=quantised)
        check_replay(graph, device, fresh)
        fused_q(**fresh, **options)
        for name in outs:
            assert_same(device[name], fresh[name], name)


def index_step(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Make the arguments of indexer_k_quant_and_cache."""
    return {
        "k": random(rng, (8, 128), oracle.BFLOAT16),
        "kv_cache": np.zeros((1, 64, 132), np.uint8),
        "slot_mapping": rng.permutation(64)[:8],
    }


@pytest.mark.parametrize("scale_format", ["ue8m0", "float32"])
def test_index_keys_in_a_graph(rng, scale_format):
    device = on_device(index_step(rng))
    graph = capture(lambda: indexer_k_quant_and_cache(**device, scale_fmt=scale_format))
    for _ in range(3):
        fresh = index_step(rng)
        check_replay(graph, device, fresh)
        indexer_k_quant_and_cache(**fresh, scale_fmt=scale_format)
        assert_same(device["kv_cache"], fresh["kv_cache"])


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


LAYER_TOKENS = 24


def late_layer() -> tuple[dict[str, Any], dict[str, Any]]:
    """Make a layer's and a step's arguments in which whatever is stored is `k_pe`."""
    step = {
        "positions": torch.zeros(LAYER_TOKENS, dtype=torch.int64, device="cuda"),
        "q_c": torch.ones(LAYER_TOKENS, 1536, dtype=torch.bfloat16, device="cuda"),
        "kv_c": torch.zeros(LAYER_TOKENS, 512, dtype=torch.bfloat16, device="cuda"),
        "k_pe": torch.zeros(LAYER_TOKENS, 64, dtype=torch.bfloat16, device="cuda"),
        "slot_mapping": torch.arange(LAYER_TOKENS, device="cuda"),
    }
    table = np.zeros((1, 64), F32)
    table[:, :32] = 1
    layer = {
        "q_rms_norm_w": np.ones(1536, F32),
        "q_rms_eps": 1e-6,
        "kv_rms_norm_w": np.ones(512, F32),
        "kv_rms_eps": 1e-6,
        "k_rope_cos_sin_cache": table,
        "mla_kv_cache": torch.zeros(2, 16, 576, dtype=torch.bfloat16, device="cuda"),
        "has_indexer": False,
    }
    return layer, step


@pytest.mark.parametrize("kind", ["object", "function"])
@pytest.mark.parametrize("weights_of", ["torch", "cupy"])
@pytest.mark.parametrize("given", [True, False])
def test_a_layer_on_the_right_stream(kind, weights_of, given):
    """That of the framework of its cache, whoever made the weights, or the one that is given."""
    layer, step = late_layer()
    place = tensor if weights_of == "torch" else cupy.asarray
    layer |= {name: place(v) for name, v in layer.items() if isinstance(v, np.ndarray)}
    if kind == "object":
        run: Callable[..., Any] = FusedNormRope(**layer)
    else:
        nothing = dict.fromkeys(INDEXER_ARGUMENTS) | {"index_k_layer_norm_eps": 1e-6}
        run = lambda **more: fused_norm_rope(**(nothing | layer | more))  # noqa: E731
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    producer = torch.cuda.current_stream() if given else side
    options = {"stream": side} if given else {}
    for turn in range(50):
        with torch.cuda.stream(producer):
            busy(producer, 0.3)
            step["q_c"].fill_(turn + 1)
            step["k_pe"].fill_(turn + 1)
            made = run(**step, **options)
        with torch.cuda.stream(side):
            stored = layer["mla_kv_cache"].view(-1, 576)[:LAYER_TOKENS, 512:]
            right = (stored == turn + 1).sum() + (made == 1).sum()
        side.synchronize()
        assert int(right) == LAYER_TOKENS * (64 + 1536)


INDEXER_ARGUMENTS = (
    "index_k",
    "index_k_layer_norm_w",
    "index_k_layer_norm_bias",
    "index_k_rope_cos_sin_cache",
    "topk_indices_buffer",
)


@pytest.mark.parametrize("given", [True, False])
def test_index_keys_on_the_right_stream(given):
    device = {
        "k": torch.zeros(8, 128, dtype=torch.bfloat16, device="cuda"),
        "kv_cache": torch.zeros(1, 64, 132, dtype=torch.uint8, device="cuda"),
        "slot_mapping": torch.arange(8, device="cuda"),
    }
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    producer = torch.cuda.current_stream() if given else side
    for turn in range(50):
        with torch.cuda.stream(producer):
            busy(producer, 0.3)
            device["k"].fill_(448 * 2.0 ** (turn % 8))
            indexer_k_quant_and_cache(**device, **({"stream": side} if given else {}))
        with torch.cuda.stream(side):
            scales = device["kv_cache"].view(-1)[64 * 128 :].view(torch.float32)[:8]
            right = (scales == 2.0 ** (turn % 8)).sum()
        side.synchronize()
        assert int(right) == 8


def test_a_new_query_is_ready_where_its_framework_works():
    """The cache is torch's, the new query CuPy's: it is made on torch's stream."""
    layer, step = late_layer()
    place = {name: cupy.asarray(v) for name, v in layer.items() if isinstance(v, np.ndarray)}
    step["q_c"] = cupy.ones((LAYER_TOKENS, 1536), np.float16)
    step |= {name: step[name].half() for name in ("kv_c", "k_pe")}
    layer["mla_kv_cache"] = layer["mla_kv_cache"].half()
    run = FusedNormRope(**(layer | place))
    side, own = torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    torch.cuda.synchronize()
    for turn in range(50):
        with torch.cuda.stream(side), own:
            step["q_c"][...] = turn + 1
            busy(side, 0.3)
            made = run(**step)
            assert isinstance(made, cupy.ndarray)
            right = int((made == 1).sum())  # waits for CuPy's stream alone
            made.fill(0)  # the next one may lie where this one did
        assert right == LAYER_TOKENS * 1536
        side.synchronize()


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
    keys = on_device(index_step(rng))
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
