"""The grouped insert: rows of all layers of a step, stored by one launch."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_mla import GroupedCacheWriter, concat_and_cache_mla, concat_and_cache_mla_grouped, dtypes
from cupy_mla._arrays import CPU, ArrayRef, describe
from cupy_mla.bench import oracle
from cupy_mla.bench.baselines import Caches, Launch, Strided
from cupy_mla.bench.machine import Machine
from cupy_mla.bench.peers import add_insert_peers
from cupy_mla.bench.problem import (
    KV_LORA_RANK,
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
from cupy_mla.bench.traffic import Part, Traffic, cache_rows


def traffic(problem: Problem) -> Traffic:
    """Count rows in, rows out, one slot a token, and one scale a layer where there is one."""
    layout, rows = problem.layout, problem.layers * problem.tokens
    return Traffic.of(
        Part("kv_c", "inputs", problem.input_dtype, rows * layout.kv_lora_rank),
        Part("k_pe", "inputs", problem.input_dtype, rows * layout.rope_dim),
        Part("slots", "slots", dtypes.INT64, problem.tokens),
        Part("scales", "scales", dtypes.FLOAT32, problem.layers * layout.needs_scale),
        cache_rows(layout, rows, "outputs"),
    )


def projection_of(problem: Problem) -> Array:
    """Return the rows of a step as a projection of all layers leaves them, ``[T, L, R + P]``."""
    layout = problem.layout
    shape = (problem.tokens, problem.layers, layout.kv_lora_rank + layout.rope_dim)
    return random_values(shape, problem.input_dtype)


def split(projection: Any) -> tuple[Any, Any]:
    """Return kv_c ``[L, T, R]`` and k_pe ``[L, T, P]`` as views of a projection."""
    by_layer = projection.swapaxes(0, 1)
    return by_layer[..., :KV_LORA_RANK], by_layer[..., KV_LORA_RANK:]


def make(problem: Problem, arrays: Arrays, machine: Machine | None = None) -> Instance:
    """Make the buffers of a step, and a writer for them."""
    projection = arrays.to_device(projection_of(problem))
    slots = arrays.to_device(slots_of(problem))
    caches = [new_cache(problem, arrays) for _ in range(problem.layers)]
    writer = GroupedCacheWriter(caches, problem.layout, scales_of(problem))
    kv_c, k_pe = split(projection)
    instance = Instance(
        run=writer.bind(kv_c, k_pe, slots),
        outputs={f"cache {layer}": cache for layer, cache in enumerate(caches)},
        arrays={"projection": projection, "slots": slots, "caches": caches},
    )
    instance.host["bind()"] = instance.run
    instance.host["GroupedCacheWriter.insert"] = lambda: writer.insert(kv_c, k_pe, slots)
    _add_functions(problem, instance, arrays)
    if machine is not None:
        launch = scalar_launch(problem, instance, machine)
        instance.alternatives["scalar"] = Alternative(launch)
        add_insert_peers(problem, instance, machine)
    return instance


def _add_functions(problem: Problem, instance: Instance, arrays: Arrays) -> None:
    """Add the operations without a writer: a layer at a time, and all layers by pointers."""
    caches, slots = instance.arrays["caches"], instance.arrays["slots"]
    layout, scales = problem.layout, scales_of(problem)
    kv_c, k_pe = split(instance.arrays["projection"])
    steps = [
        (kv_c[layer], k_pe[layer], cache, slots, layout, None if scales is None else scales[layer])
        for layer, cache in enumerate(caches)
    ]

    def per_layer() -> None:
        for step in steps:
            concat_and_cache_mla(*step)

    instance.alternatives["per layer"] = Alternative(per_layer)
    instance.host["concat_and_cache_mla, one layer"] = lambda: concat_and_cache_mla(*steps[0])
    refs = [_described(cache) for cache in caches]
    if refs[0].device == CPU:
        return  # the grouped function takes device pointers
    pointers = arrays.to_device(np.array([ref.ptr for ref in refs], np.int64))
    factors = None if scales is None else arrays.to_device(np.array(scales, np.float32))
    block, row = (step // refs[0].dtype.itemsize for step in refs[0].strides[:2])
    sizes = (problem.block_size, block, row)
    instance.host["concat_and_cache_mla_grouped"] = lambda: concat_and_cache_mla_grouped(
        kv_c, k_pe, pointers, slots, *sizes, factors, layout, num_blocks=problem.pool_blocks
    )


def _described(array: Any) -> ArrayRef:
    ref = describe(array)
    if ref is None:
        raise TypeError(f"no array: {type(array)}")
    return ref


def address_of(array: Any) -> int:
    """Return where an array lies."""
    return _described(array).ptr


def caches_at(problem: Problem, caches: list[Any]) -> Caches:
    """Describe caches for the baseline kernels."""
    return Caches.of(problem.layout, [_described(cache) for cache in caches], scales_of(problem))


def scalar_launch(problem: Problem, instance: Instance, machine: Machine) -> Launch:
    """Prepare the published shape of the insert on the buffers of an instance."""
    rows = [_described(part) for part in split(instance.arrays["projection"])]
    kv_c, k_pe = (Strided(ref.ptr, *ref.strides[:2]) for ref in rows)
    return machine.baselines.scalar_insert(
        caches_at(problem, instance.arrays["caches"]),
        problem.input_dtype.name,
        kv_c,
        k_pe,
        address_of(instance.arrays["slots"]),
        problem.tokens,
    )


def expect(problem: Problem, instance: Instance) -> list[tuple[str, Expected]]:
    """Work out the caches by ml_dtypes casts alone."""
    rows, slots, scales = projection_of(problem), slots_of(problem), scales_of(problem)
    expected = []
    for layer in range(problem.layers):
        scale = scales[layer] if scales else None
        stored = oracle.stored_rows(problem.layout, rows[:, layer], scale)
        expected.append((f"cache {layer}", Expected(oracle.cache_bytes(problem, slots, stored))))
    return expected


OPERATION = Operation(
    name="insert",
    summary="all layers of a step by one launch",
    formats=("bfloat16", "fp8_e4m3", "fp8_ds_mla"),
    tokens=(1, 64, 256, 1024, 8192, 16384),
    layered=True,
    patterned=True,
    traffic=traffic,
    make=make,
    expect=expect,
)
