"""Reading the rows of requests through their block table, dequantised."""

from __future__ import annotations

import numpy as np

from cupy_mla import dtypes, gather_cache
from cupy_mla.bench import oracle, torch_ways
from cupy_mla.bench.machine import Machine
from cupy_mla.bench.problem import (
    KV_LORA_RANK,
    ROPE_DIM,
    Array,
    Arrays,
    Expected,
    Instance,
    Operation,
    Problem,
    new_output,
    random_values,
    scales_of,
)
from cupy_mla.bench.traffic import Part, Traffic, cache_rows

#: Tokens a request; fewer make one shorter request.
REQUEST_TOKENS = 2048
_WIDTH = KV_LORA_RANK + ROPE_DIM
_DTYPE = dtypes.BFLOAT16
#: Rows that a cache repeats: a prime number, so that no two blocks are alike.
_DISTINCT_ROWS = 1021


def _lengths(problem: Problem) -> Array:
    """Return the tokens of each request."""
    whole, rest = divmod(problem.tokens, REQUEST_TOKENS)
    return np.array([REQUEST_TOKENS] * whole + [rest] * (rest > 0))


def _blocks_per_request(problem: Problem) -> int:
    return -(-min(problem.tokens, REQUEST_TOKENS) // problem.block_size)


def _pool_blocks(problem: Problem) -> int:
    named = len(_lengths(problem)) * _blocks_per_request(problem)
    return named if problem.pattern == "contiguous" else 2 * named


def traffic(problem: Problem) -> Traffic:
    """Count rows and the entries of the block table that name them; rows out."""
    blocks = int(sum(-(-length // problem.block_size) for length in _lengths(problem)))
    return Traffic.of(
        cache_rows(problem.layout, problem.tokens, "inputs"),
        Part("block_table", "slots", dtypes.INT32, blocks),
        Part("cu_seq_lens", "slots", dtypes.INT32, len(_lengths(problem)) + 1),
        Part("scale", "scales", dtypes.FLOAT32, int(problem.layout.needs_scale)),
        Part("out", "outputs", _DTYPE, problem.tokens * _WIDTH),
    )


def filled_cache(problem: Problem, blocks: int) -> Array:
    """Return a cache of random rows, ``[blocks, block_size, width]``."""
    layout, scales = problem.layout, scales_of(problem)
    rows = random_values((_DISTINCT_ROWS, _WIDTH), problem.input_dtype)
    stored = oracle.stored_rows(layout, rows, scales[0] if scales else None)
    places = np.arange(blocks * problem.block_size) % _DISTINCT_ROWS
    cache = stored[places].view(layout.storage_dtype)
    return cache.reshape(blocks, problem.block_size, layout.width)


def _block_table(problem: Problem) -> Array:
    shape = len(_lengths(problem)), _blocks_per_request(problem)
    count = shape[0] * shape[1]
    blocks = np.arange(count)
    if problem.pattern == "random":
        blocks = np.random.default_rng(0).permutation(_pool_blocks(problem))[:count]
    return blocks.astype(np.int32).reshape(shape)


def _named_slots(problem: Problem) -> Array:
    """Return the slots of all requests' rows, in order."""
    within = np.arange(problem.block_size)
    slots = (_block_table(problem)[..., None] * problem.block_size + within).reshape(
        len(_lengths(problem)), -1
    )
    lengths = zip(slots, _lengths(problem), strict=True)
    return np.concatenate([row[:length] for row, length in lengths])


def make(problem: Problem, arrays: Arrays, machine: Machine | None = None) -> Instance:
    """Make a filled cache, a block table and room for the rows."""
    ends = np.concatenate([[0], np.cumsum(_lengths(problem))]).astype(np.int32)
    found = {
        "cache": arrays.to_device(filled_cache(problem, _pool_blocks(problem))),
        "table": arrays.to_device(_block_table(problem)),
        "ends": arrays.to_device(ends),
    }
    out = new_output((problem.tokens, _WIDTH), _DTYPE, arrays)
    scales = scales_of(problem)
    scale = scales[0] if scales else None
    layout, tokens = problem.layout, problem.tokens

    def run() -> None:
        arguments = found["cache"], found["table"], found["ends"]
        gather_cache(*arguments, layout, scale, num_tokens=tokens, out=out)

    instance = Instance(run=run, outputs={"out": out}, arrays=found)
    instance.host["gather_cache"] = run
    if machine is not None and machine.torch is not None:
        slots = _named_slots(problem)
        way = torch_ways.gather(problem, instance, machine.torch, arrays, slots)
        instance.alternatives["torch"] = way
    return instance


def expect(problem: Problem, instance: Instance) -> list[tuple[str, Expected]]:
    """Work out the rows by ml_dtypes casts alone."""
    layout, scales = problem.layout, scales_of(problem)
    stored = filled_cache(problem, _pool_blocks(problem)).view(np.uint8)
    rows = stored.reshape(-1, layout.row_bytes)[_named_slots(problem)]
    read = oracle.read_rows(layout, rows, scales[0] if scales else None)
    return [("out", Expected(read.astype(_DTYPE).view(np.uint8)))]


OPERATION = Operation(
    name="gather",
    summary="rows of requests of 2048 tokens through a block table, as bfloat16",
    formats=("bfloat16", "fp8_e4m3", "fp8_ds_mla"),
    tokens=(64, 2048, 16384, 131072),
    layered=False,
    patterned=True,
    traffic=traffic,
    make=make,
    expect=expect,
)
