"""A layer's norms and RoPE, and the inserts in its two caches, by one launch."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np

from cupy_mla import FusedNormRope, dtypes, fused_norm_rope, get_layout
from cupy_mla.bench import oracle, peers, torch_ways
from cupy_mla.bench.machine import Machine
from cupy_mla.bench.model import EPS, INDEX_DIM, Q_LORA_RANK, TOP_K
from cupy_mla.bench.problem import (
    KV_LORA_RANK,
    ROPE_DIM,
    Array,
    Arrays,
    Expected,
    Instance,
    Operation,
    Problem,
    new_cache,
    new_output,
    random_values,
    scales_of,
    slots_of,
)
from cupy_mla.bench.traffic import Part, Traffic, cache_rows
from cupy_mla.layouts import INDEXER_LAYOUT

from .context import rope_table, weights

_INDEXER = get_layout(INDEXER_LAYOUT)
_WIDTHS = (Q_LORA_RANK, KV_LORA_RANK, ROPE_DIM)


def traffic(problem: Problem) -> Traffic:
    """Count inputs and weights, two table rows a token, query, cache rows and top-k indices."""
    tokens, dtype = problem.tokens, problem.input_dtype
    weight = Q_LORA_RANK + KV_LORA_RANK + 2 * INDEX_DIM
    return Traffic.of(
        Part("q_c, kv_c, k_pe, index_k", "inputs", dtype, tokens * (sum(_WIDTHS) + INDEX_DIM)),
        Part("weights", "inputs", dtype, weight),
        Part("cos_sin_caches", "inputs", dtypes.FLOAT32, 2 * tokens * ROPE_DIM),
        Part("positions, slots", "slots", dtypes.INT64, 2 * tokens),
        Part("scale", "scales", dtypes.FLOAT32, int(problem.layout.needs_scale)),
        Part("q_c_out", "outputs", dtype, tokens * Q_LORA_RANK),
        Part("topk_indices_buffer", "outputs", dtypes.INT32, tokens * TOP_K),
        cache_rows(problem.layout, tokens, "outputs", "mla"),
        cache_rows(_INDEXER, tokens, "outputs", "indexer"),
    )


def _inputs(problem: Problem) -> dict[str, Array]:
    tokens, dtype = problem.tokens, problem.input_dtype
    return {
        "projection": random_values((tokens, sum(_WIDTHS)), dtype),
        "index_k": random_values((tokens, INDEX_DIM), dtype, seed=2),
        "q_weight": weights((Q_LORA_RANK,), problem),
        "kv_weight": weights((KV_LORA_RANK,), problem),
        "index_weight": weights((INDEX_DIM,), problem),
        "index_bias": random_values((INDEX_DIM,), dtype, seed=3),
        "table": rope_table(tokens),
        "positions": np.arange(tokens),
        "slots": slots_of(problem),
    }


def _parts(projection: Any) -> list[Any]:
    ends = [0, *itertools.accumulate(_WIDTHS)]
    return [projection[:, begin:end] for begin, end in itertools.pairwise(ends)]


def make(problem: Problem, arrays: Arrays, machine: Machine | None = None) -> Instance:
    """Make the buffers of a step, and a layer for them."""
    found = {name: arrays.to_device(values) for name, values in _inputs(problem).items()}
    q_c, kv_c, k_pe = _parts(found["projection"])
    outputs = {
        "q_c_out": new_output((problem.tokens, Q_LORA_RANK), problem.input_dtype, arrays),
        "topk": new_output((problem.tokens, TOP_K), dtypes.INT32, arrays),
        "mla cache": new_cache(problem, arrays),
        "indexer cache": new_cache(_indexer(problem), arrays),
    }
    scales = scales_of(problem)
    layer_weights = (found["q_weight"], EPS, found["kv_weight"], EPS, found["table"])
    index_norm = (found["index_weight"], found["index_bias"], EPS, found["table"])
    caches: dict[str, Any] = {
        "indexer_k_cache": outputs["indexer cache"],
        "mla_kv_cache": outputs["mla cache"],
        "mla_kv_cache_dtype": problem.layout,
        "mla_k_scale": scales[0] if scales else None,
    }
    layer = FusedNormRope(*layer_weights, *index_norm, **caches)
    positions, slots, index_k = found["positions"], found["slots"], found["index_k"]
    topk, out = outputs["topk"], outputs["q_c_out"]

    def run() -> None:
        layer(positions, q_c, kv_c, k_pe, index_k, topk, slots, q_c_out=out)

    def function() -> None:
        fused_norm_rope(
            positions, q_c, *layer_weights[:2], kv_c, *layer_weights[2:4], k_pe,
            layer_weights[4], index_k, *index_norm, topk, slots, q_c_out=out, **caches,
        )  # fmt: skip

    instance = Instance(run=run, outputs=outputs, arrays=found)
    instance.host |= {"FusedNormRope call": run, "fused_norm_rope": function}
    if machine is not None and machine.torch is not None:
        instance.alternatives["torch"] = torch_ways.norm_rope(problem, instance, machine.torch)
        peers.add_triton("norm_rope", problem, instance, machine)
    return instance


def _indexer(problem: Problem) -> Problem:
    return replace(problem, layout=_INDEXER)


def expect(problem: Problem, instance: Instance) -> list[tuple[str, Expected]]:
    """Work out query and rows in float64."""
    found, slots, scales = _inputs(problem), slots_of(problem), scales_of(problem)
    q_c, kv_c, k_pe = _parts(found["projection"])
    latent = oracle.rms_norm(kv_c, found["kv_weight"], EPS)
    rows = np.concatenate([latent, oracle.rotate(k_pe, found["table"])], axis=1)
    key = oracle.layer_norm(found["index_k"], found["index_weight"], found["index_bias"], EPS)
    key[:, :ROPE_DIM] = oracle.rotate(key[:, :ROPE_DIM], found["table"], is_neox=True)

    def keys(cache: Array) -> Array:
        return oracle.indexer_rows(_INDEXER, cache, slots)

    step = np.abs(key).max(axis=1, keepdims=True) / 448 * 2  # a scale is at most twice as large
    query = oracle.close(oracle.rms_norm(q_c, found["q_weight"], EPS), problem.input_dtype)
    filled = np.full((problem.tokens, TOP_K), -1, np.int32).view(np.uint8)
    return [
        ("q_c_out", query),
        ("topk", Expected(filled)),
        *oracle.close_rows("mla cache", problem, slots, rows, scales[0] if scales else None),
        ("indexer cache", oracle.close(key, dtypes.FLOAT8_E4M3, step, rotated=True, decode=keys)),
        ("indexer cache", oracle.untouched(_indexer(problem), slots)),
    ]


OPERATION = Operation(
    name="norm-rope",
    summary="norms, RoPE and both inserts of a sparse layer by one launch",
    formats=("bfloat16", "fp8_e4m3", "fp8_ds_mla"),
    tokens=(1, 64, 256, 1024, 8192),
    layered=False,
    patterned=True,
    traffic=traffic,
    make=make,
    expect=expect,
)
