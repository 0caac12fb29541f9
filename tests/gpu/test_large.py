"""Many tokens, and caches whose offsets need more than 32 bits."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_mla import GroupedCacheWriter
from tests import helpers, oracle
from tests.gpu.frameworks import torch


@pytest.mark.parametrize("fmt", ["bfloat16", "fp8_e4m3", "fp8_ds_mla"])
@pytest.mark.parametrize("tokens", [65536, 70000])
def test_more_tokens_than_a_grid_has_rows(fmt, tokens):
    """Every token is stored, compared with the NumPy backend over the whole cache."""
    rng = np.random.default_rng(tokens)
    rank, rope = (512, 64) if fmt == "fp8_ds_mla" else (16, 4)
    kv_c = helpers.random_rows(rng, (1, tokens, rank), oracle.BFLOAT16)
    k_pe = helpers.random_rows(rng, (1, tokens, rope), oracle.BFLOAT16)
    slots = rng.permutation(tokens + 3)[:tokens]
    width = oracle.row_bytes(fmt, rank, rope) // helpers.STORAGE_DTYPES[fmt].itemsize
    blocks = tokens // 16 + 1
    host = np.zeros((blocks, 16, width), helpers.STORAGE_DTYPES[fmt])
    raw = torch.zeros(host.nbytes, dtype=torch.uint8, device="cuda")
    device = raw.view(getattr(torch, host.dtype.name)).view(host.shape)
    scales = [0.25] if fmt == "fp8_e4m3" else None
    sizes = {"kv_lora_rank": rank, "rope_dim": rope}

    def to_device(values):
        bits = torch.from_numpy(values.view(np.int16)).cuda()
        return bits.view(torch.bfloat16)

    GroupedCacheWriter([device], fmt, scales, **sizes).insert(
        to_device(kv_c), to_device(k_pe), torch.from_numpy(slots).cuda()
    )
    GroupedCacheWriter([host], fmt, scales, **sizes).insert(kv_c, k_pe, slots)
    assert np.array_equal(raw.cpu().numpy(), host.reshape(-1).view(np.uint8))
    assert host.view(np.uint8).any()


@pytest.mark.parametrize("slot_dtype", ["int32", "int64"])
@pytest.mark.parametrize("fmt", ["bfloat16", "fp8_e4m3", "fp8_ds_mla"])
def test_rows_beyond_four_gibibytes(fmt, slot_dtype):
    width = {"bfloat16": 576, "fp8_e4m3": 576, "fp8_ds_mla": 656}[fmt]
    dtype = torch.bfloat16 if fmt == "bfloat16" else torch.uint8
    size = width * (2 if fmt == "bfloat16" else 1)
    blocks = (9 << 29) // (16 * size) + 1  # 4.5 GiB
    cache = torch.full((blocks, 16, width), 0, dtype=dtype, device="cuda")
    last = blocks * 16 - 1
    middle = (1 << 32) // size + 1
    kv = torch.full((1, 4, 576), 3.0, dtype=torch.bfloat16, device="cuda")
    slots = torch.tensor(
        [0, middle, last, last + 1], dtype=getattr(torch, slot_dtype), device="cuda"
    )
    writer = GroupedCacheWriter([cache], fmt, [1.0] if fmt == "fp8_e4m3" else None)
    writer.insert(kv[..., :512], kv[..., 512:], slots)
    rows = cache.view(blocks * 16, width)
    written = rows.view(torch.uint8).ne(0).any(dim=1).nonzero().flatten().tolist()
    assert written == [0, middle, last]
    assert torch.equal(rows[0], rows[last])
    assert writer.stats()["slots_out_of_range"].tolist() == [1]


def test_one_token_in_a_large_padded_view_allocates_nothing():
    pool = torch.zeros(2000, 70, 16384, dtype=torch.uint8, device="cuda")  # 2.3 GB
    cache = pool[:, :64, :576]
    kv = torch.ones(1, 1, 576, dtype=torch.bfloat16, device="cuda")
    writer = GroupedCacheWriter([cache], "fp8", [1.0])
    slot = torch.tensor([64 * 1999 + 3], device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    writer.insert(kv[..., :512], kv[..., 512:], slot)
    assert torch.cuda.max_memory_allocated() == before
    assert cache[1999, 3].ne(0).all()
