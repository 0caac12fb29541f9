"""The operations as torch does them on the buffers of an instance, step by step."""

from __future__ import annotations

from typing import Any

from cupy_mla import GroupedCacheWriter

from . import pipelines
from .model import EPS, HEAD_SCALE, INDEX_DIM, Q_SCALE, SOFTMAX_SCALE, takes_fp8_query
from .problem import (
    KV_LORA_RANK,
    ROPE_DIM,
    Alternative,
    Array,
    Arrays,
    Instance,
    Problem,
    scales_of,
)


def context(problem: Problem, instance: Instance, torch: Any) -> Alternative:
    """Do it in six steps: permute, norm, permute, positions, RoPE, insert.

    The insert is this library's, so that the difference is what fusing is worth.
    """
    caches = [pipelines.tensor(torch, cache) for cache in instance.outputs.values()]
    found = pipelines.tensors(torch, instance.arrays)
    kv, slots, weight, table = (found[name] for name in ("kv", "slots", "weight", "table"))
    writer = GroupedCacheWriter(caches, problem.layout, scales_of(problem))
    layers = problem.layers

    def run() -> None:
        latent = kv[..., :KV_LORA_RANK].transpose(0, 1).contiguous()
        normed = pipelines.rms_norm(latent, weight[:, None], EPS)
        rope = kv[..., KV_LORA_RANK:].transpose(0, 1).contiguous()
        where = found["positions"].repeat(layers)
        rotated = pipelines.rotate(torch, rope.reshape(-1, ROPE_DIM), table[where])
        writer.insert(normed, rotated.reshape(rope.shape), slots)

    return Alternative(run, exact=False, torch=True)


def norm_rope(problem: Problem, instance: Instance, torch: Any) -> Alternative:
    """Norm, rotate, quantise and store one part after the other."""
    found, out = (
        pipelines.tensors(torch, instance.arrays),
        pipelines.tensors(torch, instance.outputs),
    )
    mla = out["mla cache"].view(torch.uint8)
    factors = torch.tensor(scales_of(problem) or [1.0], device=mla.device)
    codes = torch.empty(problem.tokens, INDEX_DIM, dtype=torch.uint8, device=mla.device)
    factor = torch.empty(problem.tokens, dtype=torch.float32, device=mla.device)
    rank = out["q_c_out"].shape[1]
    projection = found["projection"]
    q_c, kv_c = projection[:, :rank], projection[:, rank : rank + KV_LORA_RANK]
    k_pe = projection[:, rank + KV_LORA_RANK :]

    def run() -> None:
        out["q_c_out"].copy_(pipelines.rms_norm(q_c, found["q_weight"], EPS))
        rows = found["table"][found["positions"]]
        latent = pipelines.rms_norm(kv_c, found["kv_weight"], EPS)
        stored = torch.cat([latent, pipelines.rotate(torch, k_pe, rows)], dim=1)
        stored = pipelines.encode_rows(torch, stored, problem.layout, factors[0])
        pipelines.store_rows(mla, found["slots"], stored)
        norm = (found["index_weight"], found["index_bias"], EPS)
        key = pipelines.layer_norm(torch, found["index_k"], *norm)
        rotated = pipelines.rotate(torch, key[:, :ROPE_DIM], rows, is_neox=True)
        quantised = pipelines.index_key(torch, torch.cat([rotated, key[:, ROPE_DIM:]], dim=1))
        codes.copy_(quantised[0])  # a cache of two planes would take two more scatters
        factor.copy_(quantised[1])
        out["topk"].fill_(-1)

    return Alternative(run, exact=False, torch=True)


def query(problem: Problem, instance: Instance, torch: Any) -> Alternative:
    """Rotate and quantise the queries of attention, then those of the indexer."""
    found, out = (
        pipelines.tensors(torch, instance.arrays),
        pipelines.tensors(torch, instance.outputs),
    )

    def run() -> None:
        rows = found["table"][found["positions"]][:, None]
        rotated = pipelines.rotate(torch, found["q_pe"], rows)
        if takes_fp8_query(problem.layout):
            both = torch.cat([found["ql_nope"], rotated], dim=-1).float() / Q_SCALE
            out["mqa_q"].copy_(pipelines.to_fp8(torch, both, "float8_e4m3fn"))
        else:
            out["mqa_q"].copy_(rotated)
        leading, rest = found["index_q"][..., :ROPE_DIM], found["index_q"][..., ROPE_DIM:]
        leading = pipelines.rotate(torch, leading, rows, is_neox=True)
        codes, scales = pipelines.index_key(torch, torch.cat([leading, rest], dim=-1))
        out["index_q_fp8"].copy_(codes)
        weights = found["index_weights"].float() * scales * SOFTMAX_SCALE * HEAD_SCALE
        out["index_weights_out"].copy_(weights)

    return Alternative(run, exact=False, torch=True)


def gather(
    problem: Problem, instance: Instance, torch: Any, arrays: Arrays, slots: Array
) -> Alternative:
    """Index the rows of all requests by slot, and dequantise them."""
    layout = problem.layout
    cache = pipelines.tensor(torch, instance.arrays["cache"]).view(torch.uint8)
    rows = cache.reshape(-1, layout.row_bytes)
    out = pipelines.tensor(torch, instance.outputs["out"])
    named = pipelines.tensor(torch, arrays.to_device(slots))
    scale = torch.tensor((scales_of(problem) or [1.0])[0], device=rows.device)

    def run() -> None:
        out.copy_(pipelines.decode_rows(torch, rows[named], layout, scale))

    return Alternative(run, torch=True)
