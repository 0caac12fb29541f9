"""Converting all rows of a cache to another format."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cupy_mla import convert_cache, dtypes, get_layout
from cupy_mla.bench import oracle
from cupy_mla.bench.machine import Machine
from cupy_mla.bench.problem import (
    Arrays,
    Expected,
    Instance,
    Operation,
    Problem,
    new_cache,
    scales_of,
)
from cupy_mla.bench.traffic import Part, Traffic, cache_rows

from .gather import filled_cache


def source_of(problem: Problem) -> Problem:
    """Return what is converted: a bfloat16 cache, or fp8_ds_mla where that is the destination."""
    name = "fp8_ds_mla" if problem.layout.name == "bfloat16" else "bfloat16"
    return replace(problem, layout=get_layout(name))


def traffic(problem: Problem) -> Traffic:
    """Count all rows of both caches, which are whole blocks."""
    rows = problem.pool_blocks * problem.block_size
    source = source_of(problem).layout
    scales = int(source.needs_scale) + int(problem.layout.needs_scale)
    return Traffic.of(
        cache_rows(source, rows, "inputs", "source"),
        Part("scales", "scales", dtypes.FLOAT32, scales),
        cache_rows(problem.layout, rows, "outputs", "destination"),
    )


def make(problem: Problem, arrays: Arrays, machine: Machine | None = None) -> Instance:
    """Make a filled cache, and room for the other one."""
    source = source_of(problem)
    src = arrays.to_device(filled_cache(source, problem.pool_blocks))
    dst = new_cache(problem, arrays)
    scales = scales_of(problem)
    scale = scales[0] if scales else None

    def run() -> None:
        convert_cache(src, dst, source.layout, problem.layout, dst_scale=scale)

    instance = Instance(run=run, outputs={"destination": dst}, arrays={"source": src})
    instance.host["convert_cache"] = run
    return instance


def expect(problem: Problem, instance: Instance) -> list[tuple[str, Expected]]:
    """Work out the rows by ml_dtypes casts alone."""
    source, scales = source_of(problem).layout, scales_of(problem)
    stored = filled_cache(source_of(problem), problem.pool_blocks).view(np.uint8)
    rows = oracle.read_rows(source, stored.reshape(-1, source.row_bytes), None)
    rows = rows.astype(problem.input_dtype)
    converted = oracle.stored_rows(problem.layout, rows, scales[0] if scales else None)
    shape = (problem.pool_blocks, problem.block_size, problem.layout.row_bytes)
    return [("destination", Expected(converted.reshape(shape)))]


OPERATION = Operation(
    name="convert",
    summary="all rows of a bfloat16 cache to another format, or of fp8_ds_mla to bfloat16",
    formats=("fp8_e4m3", "fp8_ds_mla", "bfloat16"),
    tokens=(2048, 16384, 131072),
    layered=False,
    patterned=False,
    traffic=traffic,
    make=make,
    expect=expect,
    whole_blocks=True,
)
