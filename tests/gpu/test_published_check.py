"""The published check of the grouped operation, and what it must refuse."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_mla import concat_and_cache_mla, concat_and_cache_mla_grouped
from tests import helpers
from tests.gpu.frameworks import torch

LAYERS, TOKENS, BLOCK, BLOCKS, RANK, ROPE = 5, 42, 16, 8, 512, 64


def make_step(dtype, shared: bool):
    """Inputs of 42 tokens for 5 layers; the last slot is padding."""
    generator = torch.Generator(device="cuda").manual_seed(7)
    kv_c = torch.randn(LAYERS, TOKENS, RANK, generator=generator, device="cuda").to(dtype)
    k_pe = torch.randn(LAYERS, TOKENS, ROPE, generator=generator, device="cuda").to(dtype)
    orders = [
        torch.randperm(BLOCK * BLOCKS, generator=generator, device="cuda")[:TOKENS]
        for _ in range(LAYERS)
    ]
    slots = torch.stack(orders)
    slots[:, -1] = -1
    return kv_c, k_pe, slots[:1].expand(LAYERS, TOKENS) if shared else slots


def make_caches(fp8: bool, dtype):
    storage = torch.uint8 if fp8 else dtype
    generator = torch.Generator(device="cuda").manual_seed(11)
    shape = (LAYERS, BLOCKS, BLOCK, RANK + ROPE)
    if fp8:
        pool = torch.randint(0, 256, shape, generator=generator, device="cuda", dtype=torch.uint8)
    else:
        pool = torch.randn(shape, generator=generator, device="cuda").to(storage)
    return pool, list(pool)


def pointers_of(caches):
    return torch.tensor([cache.data_ptr() for cache in caches], dtype=torch.int64, device="cuda")


@pytest.mark.parametrize("shared", [True, False], ids=["shared slots", "slots a layer"])
@pytest.mark.parametrize("name", ["auto", "fp8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_grouped_equals_a_call_a_layer(name, shared, dtype):
    fp8 = name != "auto"
    dtype = getattr(torch, dtype)
    kv_c, k_pe, slots = make_step(dtype, shared)
    scales = torch.linspace(0.05, 0.25, LAYERS, dtype=torch.float32, device="cuda")
    pool, caches = make_caches(fp8, dtype)
    expected = pool.clone()
    concat_and_cache_mla_grouped(
        kv_c,
        k_pe,
        pointers_of(caches),
        slots,
        BLOCK,
        caches[0].stride(0),
        caches[0].stride(1),
        scales if fp8 else None,
        name,
    )
    for layer, cache in enumerate(expected):
        concat_and_cache_mla(
            kv_c[layer], k_pe[layer], cache, slots[layer], name, scales[layer] if fp8 else None
        )
    assert torch.equal(pool.view(torch.uint8), expected.view(torch.uint8))
    assert not torch.equal(pool.view(torch.uint8), make_caches(fp8, dtype)[0].view(torch.uint8))


def grouped_arguments():
    kv_c, k_pe, slots = make_step(torch.bfloat16, True)
    pool, caches = make_caches(True, torch.bfloat16)
    return pool, {
        "kv_c": kv_c,
        "k_pe": k_pe,
        "kv_cache_ptrs": pointers_of(caches),
        "slot_mapping": slots,
        "block_size": BLOCK,
        "block_stride": caches[0].stride(0),
        "entry_stride": caches[0].stride(1),
        "kv_scales": torch.full((LAYERS,), 0.1, device="cuda"),
        "kv_cache_dtype": "fp8",
    }


REFUSED = {
    "slots on the host": (
        "slot_mapping",
        "same CUDA device",
        lambda: {"slot_mapping": np.zeros(TOKENS, np.int64)},
    ),
    "scales on the host": (
        "kv_scales",
        "same CUDA device",
        lambda: {"kv_scales": torch.full((LAYERS,), 0.1)},
    ),
    "scales with a stride": (
        "kv_scales",
        "must be contiguous",
        lambda: {"kv_scales": torch.full((2 * LAYERS,), 0.1, device="cuda")[::2]},
    ),
    "pointers with a stride": (
        "kv_cache_ptrs",
        "must be contiguous",
        lambda: {"kv_cache_ptrs": torch.zeros(2 * LAYERS, dtype=torch.int64, device="cuda")[::2]},
    ),
    "no scales": ("kv_scales", "float32", lambda: {"kv_scales": None}),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_refused_before_the_launch(case):
    argument, text, change = REFUSED[case]
    pool, arguments = grouped_arguments()
    before = pool.clone()
    with pytest.raises(ValueError) as caught:
        concat_and_cache_mla_grouped(**{**arguments, **change()})
    helpers.assert_message(str(caught.value), "concat_and_cache_mla_grouped", [argument], text)
    torch.cuda.synchronize()
    assert torch.equal(pool, before)
    concat_and_cache_mla_grouped(**arguments)
    torch.cuda.synchronize()
    assert not torch.equal(pool, before)


def test_known_number_of_blocks_bounds_the_slots():
    pool, arguments = grouped_arguments()
    before = pool.clone()
    slots = torch.full((TOKENS,), BLOCK * BLOCKS, dtype=torch.int64, device="cuda")
    slots[1::2] = 2**40 + 17
    concat_and_cache_mla_grouped(**{**arguments, "slot_mapping": slots}, num_blocks=BLOCKS)
    assert torch.equal(pool, before)


def test_host_arrays_are_no_pointers():
    with pytest.raises(TypeError, match="kv_cache_ptrs"):
        concat_and_cache_mla_grouped(
            np.zeros((1, 1, 512), np.float32),
            np.zeros((1, 1, 64), np.float32),
            np.zeros(1, np.int64),
            np.zeros(1, np.int64),
            16,
            16 * 576,
            576,
        )
