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
