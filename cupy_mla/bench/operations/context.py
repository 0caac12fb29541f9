"""Norm, RoPE and insert of all layers of a step, from one projection, by one launch."""

from __future__ import annotations

import numpy as np

from cupy_mla import GroupedCacheWriter, dtypes
from cupy_mla.bench import oracle, torch_ways
from cupy_mla.bench.machine import Machine
from cupy_mla.bench.model import EPS
from cupy_mla.bench.problem import (
    KV_LORA_RANK,
    ROPE_DIM,
    Alternative,
    Array,
    Arrays,
    Expected,
    Instance,
    Operation,
    Problem,
    new_cache,
    random_values,
    scales_of,
    slots_of,
)
from cupy_mla.bench.traffic import Part, Traffic

from . import insert


def traffic(problem: Problem) -> Traffic:
    """Count what an insert moves, and weights, positions and a table row a token."""
    moved = insert.traffic(problem).parts
    return Traffic.of(
        moved,
        Part("norm_weight", "inputs", problem.input_dtype, problem.layers * KV_LORA_RANK),
        Part("cos_sin_cache", "inputs", dtypes.FLOAT32, problem.tokens * ROPE_DIM),
        Part("positions", "slots", dtypes.INT64, problem.tokens),
    )


def weights(shape: tuple[int, ...], problem: Problem) -> Array:
    """Return weights of a norm: near 1."""
    noise = random_values(shape, dtypes.FLOAT32, seed=1)
    return (1 + np.float32(0.01) * noise).astype(problem.input_dtype)


def rope_table(positions: int) -> Array:
    """Return float32 rows ``[cos half | sin half]``."""
    frequencies = 1e4 ** (-np.arange(ROPE_DIM // 2) / (ROPE_DIM // 2))
    angles = np.arange(positions)[:, None] * frequencies
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def make(problem: Problem, arrays: Arrays, machine: Machine | None = None) -> Instance:
    """Make the buffers of a step, and a writer for them."""
    kv = arrays.to_device(insert.projection_of(problem))
    slots = arrays.to_device(slots_of(problem))
    positions = arrays.to_device(np.arange(problem.tokens))
    weight = arrays.to_device(weights((problem.layers, KV_LORA_RANK), problem))
    table = arrays.to_device(rope_table(problem.tokens))
    caches = [new_cache(problem, arrays) for _ in range(problem.layers)]
    writer = GroupedCacheWriter(caches, problem.layout, scales_of(problem))

    def run() -> None:
        writer.insert_context(kv, positions, slots, weight, table, eps=EPS)

    instance = Instance(
        run=run,
        outputs={f"cache {layer}": cache for layer, cache in enumerate(caches)},
        arrays={
            "kv": kv,
            "positions": positions,
            "slots": slots,
            "weight": weight,
            "table": table,
        },
    )
    instance.host["GroupedCacheWriter.insert_context"] = run
    if machine is not None:
        kv_c, k_pe = insert.split(kv)
        alone = Alternative(writer.bind(kv_c, k_pe, slots), exact=False)
        instance.alternatives["insert alone"] = alone
        if machine.torch is not None:
            instance.alternatives["torch, six steps"] = torch_ways.context(
                problem, instance, machine.torch
            )
    return instance


def expect(problem: Problem, instance: Instance) -> list[tuple[str, Expected]]:
    """Work out the rows in float64."""
    kv, slots = insert.projection_of(problem), slots_of(problem)
    weight = weights((problem.layers, KV_LORA_RANK), problem)
    table, scales = rope_table(problem.tokens), scales_of(problem)
    expected = []
    for layer in range(problem.layers):
        latent = oracle.rms_norm(kv[:, layer, :KV_LORA_RANK], weight[layer], EPS)
        rope = oracle.rotate(kv[:, layer, KV_LORA_RANK:], table)
        rows = np.concatenate([latent, rope], axis=1)
        scale = scales[layer] if scales else None
        expected += oracle.close_rows(f"cache {layer}", problem, slots, rows, scale)
    return expected


OPERATION = Operation(
    name="context",
    summary="norm, RoPE and insert of all layers by one launch",
    formats=("bfloat16", "fp8_e4m3", "fp8_ds_mla"),
    tokens=(1, 64, 256, 1024, 8192, 16384),
    layered=True,
    patterned=True,
    traffic=traffic,
    make=make,
    expect=expect,
)
