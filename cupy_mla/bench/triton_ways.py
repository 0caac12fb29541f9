"""The fused operations as kernels of Triton do them on the buffers of an instance.

A program does one part of one token, or a few heads of it, which is how serving engines write such
kernels. Needs Triton, so `operations` import this module where it is to be had.
"""

from __future__ import annotations

import functools
from typing import Any

import triton
import triton.language as tl

from . import pipelines
from .model import (
    EPS,
    HEAD_SCALE,
    INDEX_DIM,
    Q_LORA_RANK,
    Q_SCALE,
    SOFTMAX_SCALE,
    TOP_K,
    takes_fp8_query,
)
from .problem import KV_LORA_RANK, ROPE_DIM, Alternative, Instance, Problem, scales_of

#: Parts of a token, as `_norm_rope` numbers them.
_PARTS = 4
#: Heads that a program of `_query` takes of attention, and of the indexer.
_HEADS, _INDEX_HEADS = 2, 8
#: Warps of a program. On an H200 in fp8, at 1, 1024 and 8192 tokens: one warp was the fastest of 1,
#: 2, 4 and 8 for `_norm_rope` at all of them. For `_query` these were the fastest of nine choices
#: from 1024 tokens on; at one token, a head and a warp a program took 2.4 us where these take 2.9.
_WARPS, _QUERY_WARPS = 1, 2


@triton.jit
def _to_fp8(values):
    return tl.clamp(values, -448.0, 448.0).to(tl.float8e4nv)


@triton.jit
def _power_of_two(amax):
    return tl.exp2(tl.ceil(tl.log2(tl.maximum(amax, 1e-4) / 448.0)))


@triton.jit
def _norm_query(x, weight, out, eps, Q: tl.constexpr, Q_BLOCK: tl.constexpr):
    lanes = tl.arange(0, Q_BLOCK)
    values = tl.load(x + lanes, lanes < Q, 0.0).to(tl.float32)
    weights = tl.load(weight + lanes, lanes < Q, 0.0).to(tl.float32)
    normed = values * tl.rsqrt(tl.sum(values * values) / Q + eps) * weights
    tl.store(out + lanes, normed.to(out.dtype.element_ty), lanes < Q)


@triton.jit
def _store_key(
    kv_c,
    k_pe,
    weight,
    angles,
    scale,
    latent,
    tile_scales,
    rope,
    eps,
    R: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
    NEEDS_SCALE: tl.constexpr,
):
    lanes = tl.arange(0, R)
    both = tl.arange(0, 2 * HALF)
    pairs = tl.arange(0, HALF)
    x = tl.load(kv_c + lanes).to(tl.float32)
    weights = tl.load(weight + lanes).to(tl.float32)
    a, b = tl.split(tl.reshape(tl.load(k_pe + both).to(tl.float32), (HALF, 2)))
    cos = tl.load(angles + pairs)
    sin = tl.load(angles + HALF + pairs)
    normed = x * tl.rsqrt(tl.sum(x * x) / R + eps) * weights
    rotated = tl.interleave(a * cos - b * sin, b * cos + a * sin)
    if NEEDS_SCALE:
        factor = tl.load(scale)
        tl.store(latent + lanes, _to_fp8(normed / factor))
        tl.store(rope + both, _to_fp8(rotated / factor))
    else:
        if TILE:
            tiles = tl.reshape(normed, (R // TILE, TILE))
            factors = tl.maximum(tl.max(tl.abs(tiles), axis=1) / 448.0, 1.1754944e-38)
            tl.store(latent + lanes, _to_fp8(tl.reshape(tiles / factors[:, None], (R,))))
            tl.store(tile_scales + tl.arange(0, R // TILE), factors)
        else:
            tl.store(latent + lanes, normed.to(latent.dtype.element_ty))
        tl.store(rope + both, rotated.to(rope.dtype.element_ty))


@triton.jit
def _store_index_key(
    key, weight, bias, angles, codes, scale_out, eps, HALF: tl.constexpr, D: tl.constexpr
):
    pairs = tl.arange(0, HALF)
    rest = 2 * HALF + tl.arange(0, D - 2 * HALF)
    x = tl.load(key + tl.arange(0, D)).to(tl.float32)
    cos = tl.load(angles + pairs)
    sin = tl.load(angles + HALF + pairs)
    mean = tl.sum(x) / D
    r = tl.rsqrt(tl.sum((x - mean) * (x - mean)) / D + eps)
    a = (tl.load(key + pairs).to(tl.float32) - mean) * r
    a = a * tl.load(weight + pairs) + tl.load(bias + pairs)
    b = (tl.load(key + HALF + pairs).to(tl.float32) - mean) * r
    b = b * tl.load(weight + HALF + pairs) + tl.load(bias + HALF + pairs)
    c = (tl.load(key + rest).to(tl.float32) - mean) * r
    c = c * tl.load(weight + rest) + tl.load(bias + rest)
    first = a * cos - b * sin
    second = b * cos + a * sin
    amax = tl.maximum(tl.max(tl.abs(first)), tl.max(tl.abs(second)))
    factor = _power_of_two(tl.maximum(amax, tl.max(tl.abs(c))))
    tl.store(codes + pairs, _to_fp8(first / factor))
    tl.store(codes + HALF + pairs, _to_fp8(second / factor))
    tl.store(codes + rest, _to_fp8(c / factor))
    tl.store(scale_out, factor)


@triton.jit
def _norm_rope(
    positions,
    q_c,
    kv_c,
    k_pe,
    stride,
    q_weight,
    kv_weight,
    table,
    index_k,
    index_weight,
    index_bias,
    slots,
    scale,
    q_out,
    topk,
    latent,
    tile_scales,
    rope,
    latent_stride,
    tile_stride,
    rope_stride,
    index_codes,
    index_scales,
    eps,
    Q: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    R: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
    NEEDS_SCALE: tl.constexpr,
    D: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if part == 0:
        _norm_query(q_c + token * stride, q_weight, q_out + token * Q, eps, Q, Q_BLOCK)
    elif part == 1:
        slot = tl.load(slots + token)
        angles = table + tl.load(positions + token) * (2 * HALF)
        if slot >= 0:
            _store_key(
                kv_c + token * stride,
                k_pe + token * stride,
                kv_weight,
                angles,
                scale,
                latent + slot * latent_stride,
                tile_scales + slot * tile_stride,
                rope + slot * rope_stride,
                eps,
                R,
                HALF,
                TILE,
                NEEDS_SCALE,
            )
    elif part == 2:
        slot = tl.load(slots + token)
        angles = table + tl.load(positions + token) * (2 * HALF)
        if slot >= 0:
            block = slot // BLOCK_SIZE
            row = slot % BLOCK_SIZE
            codes = index_codes + block * (BLOCK_SIZE * (D + 4)) + row * D
            scales = index_scales + block * (BLOCK_SIZE * (D // 4 + 1)) + BLOCK_SIZE * (D // 4)
            key = index_k + token * D
            _store_index_key(
                key, index_weight, index_bias, angles, codes, scales + row, eps, HALF, D
            )
    else:
        tl.store(topk + token * TOPK + tl.arange(0, TOPK), tl.full((TOPK,), -1, tl.int32))


@triton.jit
def _rotate_heads(
    q_pe,
    ql_nope,
    cos,
    sin,
    mqa,
    heads,
    q_scale,
    BLOCK: tl.constexpr,
    R: tl.constexpr,
    HALF: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    both = tl.arange(0, 2 * HALF)[None, :]
    x = tl.load(q_pe + heads * (2 * HALF) + both).to(tl.float32)
    a, b = tl.split(tl.reshape(x, (BLOCK, HALF, 2)))
    rotated = tl.interleave(a * cos - b * sin, b * cos + a * sin)
    if IS_FP8:
        latents = tl.arange(0, R)[None, :]
        nope = tl.load(ql_nope + heads * R + latents).to(tl.float32)
        rows = mqa + heads * (R + 2 * HALF)
        tl.store(rows + latents, _to_fp8(nope / q_scale))
        tl.store(rows + R + both, _to_fp8(rotated / q_scale))
    else:
        tl.store(mqa + heads * (2 * HALF) + both, rotated.to(mqa.dtype.element_ty))


@triton.jit
def _quantise_heads(
    index_q,
    index_weights,
    cos,
    sin,
    codes_out,
    weights_out,
    heads,
    weight_scale,
    HALF: tl.constexpr,
    D: tl.constexpr,
):
    pairs = tl.arange(0, HALF)[None, :]
    rest = 2 * HALF + tl.arange(0, D - 2 * HALF)[None, :]
    rows = index_q + heads[:, None] * D
    a = tl.load(rows + pairs).to(tl.float32)
    b = tl.load(rows + HALF + pairs).to(tl.float32)
    c = tl.load(rows + rest).to(tl.float32)
    first = a * cos - b * sin
    second = b * cos + a * sin
    amax = tl.maximum(tl.max(tl.abs(first), axis=1), tl.max(tl.abs(second), axis=1))
    factor = _power_of_two(tl.maximum(amax, tl.max(tl.abs(c), axis=1)))
    codes = codes_out + heads[:, None] * D
    tl.store(codes + pairs, _to_fp8(first / factor[:, None]))
    tl.store(codes + HALF + pairs, _to_fp8(second / factor[:, None]))
    tl.store(codes + rest, _to_fp8(c / factor[:, None]))
    weights = tl.load(index_weights + heads).to(tl.float32)
    tl.store(weights_out + heads, weights * factor * weight_scale)


@triton.jit
def _query(
    positions,
    q_pe,
    ql_nope,
    table,
    index_q,
    index_weights,
    mqa,
    codes_out,
    weights_out,
    q_scale,
    weight_scale,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    INDEX_HEADS: tl.constexpr,
    INDEX_BLOCK: tl.constexpr,
    R: tl.constexpr,
    HALF: tl.constexpr,
    D: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    angles = table + tl.load(positions + token) * (2 * HALF) + tl.arange(0, HALF)
    cos = tl.load(angles)[None, :]
    sin = tl.load(angles + HALF)[None, :]
    blocks: tl.constexpr = HEADS // BLOCK
    if part < blocks:
        heads = (token * HEADS + part * BLOCK + tl.arange(0, BLOCK))[:, None]
        _rotate_heads(q_pe, ql_nope, cos, sin, mqa, heads, q_scale, BLOCK, R, HALF, IS_FP8)
    else:
        first = token * INDEX_HEADS + (part - blocks) * INDEX_BLOCK
        index_heads = first + tl.arange(0, INDEX_BLOCK)
        _quantise_heads(
            index_q,
            index_weights,
            cos,
            sin,
            codes_out,
            weights_out,
            index_heads,
            weight_scale,
            HALF,
            D,
        )


def norm_rope(problem: Problem, instance: Instance, torch: Any) -> Alternative:
    """Norm, rotate, quantise and store: a program a token and part, one launch."""
    found, out = (
        pipelines.tensors(torch, instance.arrays),
        pipelines.tensors(torch, instance.outputs),
    )
    layout, projection = problem.layout, found["projection"]
    scale = torch.tensor(scales_of(problem) or [1.0], device=projection.device)
    raw = out["mla cache"].view(torch.uint8).reshape(-1, layout.row_bytes)
    fields = {
        field.name: raw[:, field.offset : field.end].view(getattr(torch, field.dtype.name))
        for field in layout.fields
    }
    latent, rope = fields["nope"], fields["rope"]
    tile_scales = fields.get("scale", latent)
    indexer = out["indexer cache"].view(torch.uint8).reshape(problem.pool_blocks, -1)
    codes, scales = indexer.view(torch.float8_e4m3fn), indexer.view(torch.float32)
    arguments = (
        found["positions"],
        projection,
        projection[:, Q_LORA_RANK:],
        projection[:, Q_LORA_RANK + KV_LORA_RANK :],
        projection.stride(0),
        *(found[name] for name in ("q_weight", "kv_weight", "table", "index_k")),
        *(found[name] for name in ("index_weight", "index_bias", "slots")),
        scale, out["q_c_out"], out["topk"], latent, tile_scales, rope,
        *(part.stride(0) for part in (latent, tile_scales, rope)),
        codes, scales, EPS,
        Q_LORA_RANK, triton.next_power_of_2(Q_LORA_RANK), KV_LORA_RANK, ROPE_DIM // 2,
        layout.tile, layout.needs_scale, INDEX_DIM, TOP_K, problem.block_size,
    )  # fmt: skip
    launch = _norm_rope[(problem.tokens, _PARTS)]
    run = functools.partial(launch, *arguments, num_warps=_WARPS)
    return Alternative(run, exact=False, torch=True)


def query(problem: Problem, instance: Instance, torch: Any) -> Alternative:
    """Rotate and quantise the queries of attention and indexer: a program some heads of a token."""
    found, out = (
        pipelines.tensors(torch, instance.arrays),
        pipelines.tensors(torch, instance.outputs),
    )
    is_fp8 = takes_fp8_query(problem.layout)
    mqa, codes = out["mqa_q"], out["index_q_fp8"].view(torch.float8_e4m3fn)
    heads, index_heads = mqa.shape[1], codes.shape[1]
    arguments = (
        *(found[name] for name in ("positions", "q_pe", "ql_nope", "table", "index_q")),
        found["index_weights"],
        mqa.view(torch.float8_e4m3fn) if is_fp8 else mqa,
        codes, out["index_weights_out"], Q_SCALE, SOFTMAX_SCALE * HEAD_SCALE,
        heads, _HEADS, index_heads, _INDEX_HEADS, KV_LORA_RANK, ROPE_DIM // 2, INDEX_DIM, is_fp8,
    )  # fmt: skip
    launch = _query[(problem.tokens, heads // _HEADS + index_heads // _INDEX_HEADS)]
    run = functools.partial(launch, *arguments, num_warps=_QUERY_WARPS)
    return Alternative(run, exact=False, torch=True)
