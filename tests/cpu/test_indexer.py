"""indexer_k_quant_and_cache: bytes of the block, scales, slots, what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_mla import indexer_k_quant_and_cache
from tests import fused_oracle, helpers, oracle
from tests.fused_helpers import make_indexer_cache
from tests.helpers import SENTINEL, assert_bytes_equal, random_bits, random_rows, rejected

F32 = np.float32
SCALE_FORMATS = ["ue8m0", "float32"]
any_scale = pytest.mark.parametrize("scale_fmt", SCALE_FORMATS)


def check(backend, k, slots, scale_fmt="ue8m0", *, k_array=None, **geometry):
    cache = make_indexer_cache(backend, **geometry)
    want = cache.bytes()
    with np.errstate(all="ignore"):
        for token, slot in enumerate(slots.tolist()):
            if 0 <= slot < cache.geometry.capacity:
                row = fused_oracle.widen(k[token])
                fused_oracle.put_key(want, cache.geometry, slot, row, scale_fmt)
    given = backend.array(k) if k_array is None else k_array
    slots = backend.array(slots)
    assert indexer_k_quant_and_cache(given, cache.array, slots, 128, scale_fmt) is None
    assert_bytes_equal(cache.bytes(), want, cache.geometry)


@any_scale
@pytest.mark.parametrize("dtype", [oracle.BFLOAT16, oracle.FLOAT16, oracle.FLOAT32], ids=str)
@pytest.mark.parametrize("block_pad", [0, 4, 132, 1000])
def test_every_byte_is_the_oracles(backend, rng, scale_fmt, dtype, block_pad):
    k = random_rows(rng, (6, 128), dtype)
    slots = np.array([11, 0, -1, 12, 5, -(2**40)])
    check(backend, k, slots, scale_fmt, block_pad=block_pad)


@pytest.mark.parametrize("block_size", [1, 3, 64])
def test_block_sizes(backend, rng, block_size):
    k = random_rows(rng, (5, 128), oracle.BFLOAT16)
    places = [0, block_size - 1, block_size, 2 * block_size, 3 * block_size]
    slots = np.unique(places)  # blocks of one row have them twice
    check(backend, k, slots, block_size=block_size)


def test_where_the_bytes_of_a_block_lie(backend):
    """A block of 64 rows: codes at 128 * row, scales at 8192 + 4 * row."""
    cache = make_indexer_cache(backend, 2, 64)
    k = np.zeros((1, 128), F32)
    k[0, :3] = [448, -448, 1]
    indexer_k_quant_and_cache(backend.array(k), cache.array, backend.array(np.array([64 + 5])))
    block = cache.bytes()[256 + 8448 : 256 + 2 * 8448]
    assert block[640:644].tobytes().hex() == "7efe3800"
    assert block[8192 + 20 : 8192 + 24].view("<f4")[0] == 1.0
    untouched = np.delete(block, [*range(640, 768), *range(8212, 8216)])
    assert np.all(untouched == SENTINEL)


@pytest.mark.parametrize(
    ("amax", "scale_fmt", "bits"),
    [
        (448.0, "ue8m0", 0x3F800000),  # 1: on the boundary, not above it
        (450.0, "ue8m0", 0x40000000),
        (0.0, "ue8m0", 0x34800000),  # 2^-22, from 1e-4 / 448 = 1.87 * 2^-23
        (1e-6, "ue8m0", 0x34800000),
        (np.inf, "ue8m0", 0x7F800000),
        (336.0, "float32", 0x3F400000),
        (1.015625, "float32", 0x3B149249),  # times 1 / 448 would give ...4A
        (0.0, "float32", 0x346FACAD),
        (np.inf, "float32", 0x7F800000),
    ],
)
def test_scales(backend, amax, scale_fmt, bits):
    cache = make_indexer_cache(backend, 1, 1)
    k = np.zeros((1, 128), F32)
    k[0, 77] = -amax
    indexer_k_quant_and_cache(
        backend.array(k), cache.array, backend.array(np.array([0])), 128, scale_fmt
    )
    row = cache.bytes()[256 : 256 + 132]
    assert row[128:].view("<u4")[0] == bits
    assert row[77] == oracle.encode_fp8(k[0, 77:78], row[128:].view("<f4")[0], "fp8_e4m3")[0]
    assert np.all(np.delete(row[:128], 77) == 0)


@any_scale
def test_nan_is_7f_and_does_not_decide_the_scale(backend, scale_fmt):
    k = np.full((1, 128), 2, F32)
    k[0, 3], k[0, 4] = np.nan, -np.nan
    cache = make_indexer_cache(backend, 1, 1)
    indexer_k_quant_and_cache(
        backend.array(k), cache.array, backend.array(np.array([0])), 128, scale_fmt
    )
    row = cache.bytes()[256 : 256 + 132]
    assert row[3] == row[4] == 0x7F
    scale = row[128:].view("<f4")[0]
    assert scale == (F32(2) / F32(448) if scale_fmt == "float32" else F32(2.0**-7))
    check(backend, k, np.array([0]), scale_fmt)


@given(st.integers(0, 2**32 - 1), st.sampled_from(SCALE_FORMATS))
def test_any_bits(seed, scale_fmt):
    rng = np.random.default_rng(seed)
    k = random_bits(rng, (3, 128), F32)
    k[1] = np.where(np.isnan(k[1]), F32(0), k[1])
    k[2] = (rng.standard_normal(128) * 2.0 ** rng.integers(-30, 30)).astype(F32)
    check(helpers.Backend(), k, np.array([7, 2, 0]), scale_fmt)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_slots_of_both_widths_and_fewer_than_rows(backend, rng, dtype):
    k = random_rows(rng, (6, 128), oracle.BFLOAT16)
    check(backend, k, np.array([5, -1, 2], dtype))


def test_rows_inside_a_larger_buffer(backend, rng):
    k = random_rows(rng, (4, 128), oracle.BFLOAT16)
    check(backend, k, np.arange(4), k_array=helpers.surrounded(backend, k))


def test_the_last_of_equal_slots_stays(backend, rng):
    if not backend.last_duplicate_wins:
        return
    check(backend, random_rows(rng, (3, 128), oracle.BFLOAT16), np.array([4, 4, 4]))


def test_many_rows(backend, rng):
    k = random_rows(rng, (1500, 128), oracle.BFLOAT16)
    slots = np.full(1500, -1)
    slots[[0, 1023, 1024, 1499]] = [3, 1, 2, 0]
    check(backend, k, slots)


def test_float8_and_head_axis(rng):
    backend = helpers.Backend()
    k = backend.array(random_rows(rng, (2, 128), oracle.BFLOAT16))
    slots = backend.array(np.arange(2))
    plain, other = make_indexer_cache(backend), make_indexer_cache(backend)
    indexer_k_quant_and_cache(k, plain.array, slots)
    indexer_k_quant_and_cache(k, other.array.view(oracle.E4M3)[:, :, None], slots)
    assert_bytes_equal(other.bytes(), plain.bytes(), plain.geometry)


def test_torch_tensors(rng):
    torch = pytest.importorskip("torch")
    k = rng.standard_normal((2, 128)).astype(F32)
    cache = torch.zeros(2, 4, 132, dtype=torch.float8_e4m3fn)
    indexer_k_quant_and_cache(torch.from_numpy(k), cache, torch.tensor([5, 0]))
    want = make_indexer_cache(helpers.Backend(), 2, 4)
    want.buffer[:] = 0
    indexer_k_quant_and_cache(k, want.array, np.array([5, 0]))
    stored = cache.view(torch.uint8).numpy().tobytes()
    assert stored == want.bytes()[256 : 256 + 1056].tobytes()


REFUSED = [
    ("k", np.zeros((3, 64), F32), ValueError, ["[T, 128]", "[3, 64]"]),
    ("k", np.zeros((2, 128), F32), ValueError, ["3 tokens", "[2, 128]"]),
    ("k", np.zeros((3, 128)), TypeError, ["float64"]),
    ("k", np.zeros((3, 256), F32)[:, ::2], ValueError, ["stride 1"]),
    ("k", None, TypeError, ["NoneType"]),
    ("kv_cache", np.zeros((3, 4, 131), np.uint8), ValueError, ["132", "131"]),
    ("kv_cache", np.zeros((12, 132), np.uint8), ValueError, ["[12, 132]"]),
    ("kv_cache", np.zeros((3, 4, 132), F32), TypeError, ["uint8", "float32"]),
    ("kv_cache", np.zeros((3, 4, 136), np.uint8)[..., :132], ValueError, ["gaps", "136"]),
    ("kv_cache", np.broadcast_to(np.zeros(132, np.uint8), (3, 4, 132)), ValueError, ["got"]),
    ("slot_mapping", np.zeros(3, np.uint64), TypeError, ["int32 or int64", "uint64"]),
    ("slot_mapping", np.zeros((3, 1), np.int64), ValueError, ["[T]", "[3, 1]"]),
    ("quant_block_size", 64, ValueError, ["128", "64"]),
    ("quant_block_size", 128.0, TypeError, ["integer", "float"]),
    ("scale_fmt", "e8m0", ValueError, ["ue8m0", "'e8m0'"]),
    ("scale_fmt", None, ValueError, ["ue8m0", "None"]),
    ("stream", object(), ValueError, ["host memory"]),
    ("k", helpers.FakeDevice((3, 128), "<f4"), ValueError, ["same CUDA device", "cuda:0"]),
]


@pytest.mark.parametrize(
    ("name", "value", "exception", "fragments"),
    REFUSED,
    ids=[f"{case[0]}-{number}" for number, case in enumerate(REFUSED)],
)
def test_what_does_not_fit_is_refused_and_nothing_written(name, value, exception, fragments):
    cache = make_indexer_cache(helpers.Backend())
    given = {
        "k": np.zeros((3, 128), F32),
        "kv_cache": cache.array,
        "slot_mapping": np.arange(3),
    }
    given[name] = value
    operation = "indexer_k_quant_and_cache"
    with rejected(exception, operation, name, *fragments, caches=[cache]):
        indexer_k_quant_and_cache(**given)


def test_a_read_only_cache_is_refused():
    cache = np.zeros((3, 4, 132), np.uint8)
    cache.flags.writeable = False
    with rejected(ValueError, "indexer_k_quant_and_cache", "kv_cache", "read-only"):
        indexer_k_quant_and_cache(np.zeros((3, 128), F32), cache, np.arange(3))
