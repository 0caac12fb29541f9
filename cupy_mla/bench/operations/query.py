"""RoPE and quantisation of the queries of attention and indexer, by one launch."""

from __future__ import annotations

import numpy as np

from cupy_mla import dtypes, fused_q
from cupy_mla.bench import oracle, peers, torch_ways
from cupy_mla.bench.machine import Machine
from cupy_mla.bench.model import (
    HEAD_SCALE,
    HEADS,
    INDEX_DIM,
    INDEX_HEADS,
    Q_SCALE,
    SOFTMAX_SCALE,
    takes_fp8_query,
)
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
)
from cupy_mla.bench.traffic import Part, Traffic

from .context import rope_table

_E4M3_LARGEST = 448.0


def traffic(problem: Problem) -> Traffic:
    """Count queries in and out; the latent part only where it is quantised."""
    tokens, dtype = problem.tokens, problem.input_dtype
    fp8, rows = takes_fp8_query(problem.layout), tokens * HEADS
    width = KV_LORA_RANK + ROPE_DIM if fp8 else ROPE_DIM
    return Traffic.of(
        Part("ql_nope, q_pe", "inputs", dtype, rows * width),
        Part("index_q", "inputs", dtype, tokens * INDEX_HEADS * INDEX_DIM),
        Part("index_weights", "inputs", dtype, tokens * INDEX_HEADS),
        Part("cos_sin_caches", "inputs", dtypes.FLOAT32, 2 * tokens * ROPE_DIM),
        Part("positions", "slots", dtypes.INT64, tokens),
        Part("q_scale", "scales", dtypes.FLOAT32, int(fp8)),
        Part("mqa_q", "outputs", dtypes.FLOAT8_E4M3 if fp8 else dtype, rows * width),
        Part("index_q_fp8", "outputs", dtypes.FLOAT8_E4M3, tokens * INDEX_HEADS * INDEX_DIM),
        Part("index_weights_out", "outputs", dtypes.FLOAT32, tokens * INDEX_HEADS),
    )


def _inputs(problem: Problem) -> dict[str, Array]:
    tokens, dtype = problem.tokens, problem.input_dtype
    return {
        "positions": np.arange(tokens),
        "table": rope_table(tokens),
        "q_pe": random_values((tokens, HEADS, ROPE_DIM), dtype),
        "ql_nope": random_values((tokens, HEADS, KV_LORA_RANK), dtype, seed=1),
        "index_q": random_values((tokens, INDEX_HEADS, INDEX_DIM), dtype, seed=2),
        "index_weights": random_values((tokens, INDEX_HEADS), dtype, seed=3),
    }


def make(problem: Problem, arrays: Arrays, machine: Machine | None = None) -> Instance:
    """Make the buffers of a step; outputs too, so that a call allocates nothing."""
    found = {name: arrays.to_device(values) for name, values in _inputs(problem).items()}
    tokens, fp8 = problem.tokens, takes_fp8_query(problem.layout)
    width = KV_LORA_RANK + ROPE_DIM if fp8 else ROPE_DIM
    code = dtypes.UINT8 if fp8 else problem.input_dtype
    index_shape = (tokens, INDEX_HEADS, INDEX_DIM)
    outputs = {
        "index_q_fp8": new_output(index_shape, dtypes.UINT8, arrays),
        "index_weights_out": new_output((tokens, INDEX_HEADS), dtypes.FLOAT32, arrays),
        "mqa_q": new_output((tokens, HEADS, width), code, arrays),
    }
    table = found["table"]
    arguments = (
        found["positions"], found["q_pe"], table, found["index_q"], table, found["ql_nope"],
        Q_SCALE, found["index_weights"], SOFTMAX_SCALE, HEAD_SCALE,
    )  # fmt: skip

    def run() -> None:
        fused_q(
            *arguments,
            quantize_mqa=fp8,
            index_q_out=outputs["index_q_fp8"],
            index_weights_out=outputs["index_weights_out"],
            mqa_q_out=outputs["mqa_q"],
        )

    instance = Instance(run=run, outputs=outputs, arrays=found)
    instance.host["fused_q"] = run
    if machine is not None and machine.torch is not None:
        instance.alternatives["torch"] = torch_ways.query(problem, instance, machine.torch)
        peers.add_triton("query", problem, instance, machine)
    return instance


def expect(problem: Problem, instance: Instance) -> list[tuple[str, Expected]]:
    """Work out the queries in float64."""
    found, e4m3 = _inputs(problem), dtypes.FLOAT8_E4M3
    table = found["table"][:, None]
    query = oracle.rotate(found["q_pe"], table)
    if takes_fp8_query(problem.layout):
        query = np.concatenate([found["ql_nope"].astype(np.float64), query], axis=-1)
        query = np.clip(query / Q_SCALE, -_E4M3_LARGEST, _E4M3_LARGEST)

        def codes(output: Array) -> Array:
            return output.view(e4m3).astype(np.float64)

        mqa = oracle.close(query, e4m3, rotated=True, decode=codes)
    else:
        mqa = oracle.close(query, problem.input_dtype, rotated=True)
    index = found["index_q"].astype(np.float64)
    index[..., :ROPE_DIM] = oracle.rotate(index[..., :ROPE_DIM], table, is_neox=True)
    exact = np.maximum(np.abs(index).max(axis=-1), 1e-4) / _E4M3_LARGEST
    scale = np.exp2(np.ceil(np.log2(exact)))
    weights = found["index_weights"].astype(np.float64) * scale * SOFTMAX_SCALE * HEAD_SCALE

    def keys(output: Array) -> Array:
        return np.asarray(output.view(e4m3).astype(np.float64) * scale[..., None])

    return [
        ("mqa_q", mqa),
        ("index_q_fp8", oracle.close(index, e4m3, scale[..., None], rotated=True, decode=keys)),
        ("index_weights_out", oracle.close(weights, dtypes.FLOAT32)),
    ]


OPERATION = Operation(
    name="q",
    summary="RoPE and fp8 of the queries of attention and indexer by one launch",
    formats=("bfloat16", "fp8_e4m3"),
    tokens=(1, 64, 256, 1024, 8192),
    layered=False,
    patterned=False,
    traffic=traffic,
    make=make,
    expect=expect,
)
