"""fused_norm_rope and FusedNormRope: what they refuse, and in which words."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_mla import FusedNormRope, fused_norm_rope, get_layout
from tests import helpers, oracle
from tests.fused_helpers import (
    LAYER_NAMES,
    arguments,
    cos_sin,
    expect,
    make_indexer_cache,
    make_layer,
    run_object,
)
from tests.helpers import (
    assert_bytes_equal,
    make_cache,
    rejected,
)

F32 = np.float32


def bad(name, make, exception, *fragments, blamed=None, changes=None):
    return pytest.param(
        name, make, exception, fragments, blamed or name, changes or {}, id=f"{name}-{fragments[0]}"
    )


def bf16(*shape):
    return np.zeros(shape, oracle.BFLOAT16)


def wide(dtype):
    """Give more elements than a row may have; nothing touches them."""
    return np.empty(2**28, dtype)


REFUSED = [
    bad("positions", lambda: np.zeros(5), TypeError, "int32 or int64", "float64"),
    bad("positions", lambda: np.zeros(5, np.uint64), TypeError, "uint64"),
    bad("positions", lambda: np.zeros(4, np.int64), ValueError, "each of the 5 tokens", "[4]"),
    bad("positions", lambda: np.zeros((5, 1), np.int64), ValueError, "[T]", "[5, 1]"),
    bad("positions", lambda: np.zeros(10, np.int64)[::2], ValueError, "stride 1"),
    bad("positions", lambda: None, TypeError, "NoneType"),
    bad("q_c", lambda: bf16(5, 23), ValueError, "[T, 24]", "[5, 23]"),
    bad("q_c", lambda: bf16(4, 24), ValueError, "each of the 5 tokens", "[4, 24]"),
    bad("q_c", lambda: np.zeros((5, 24), np.int16), TypeError, "bfloat16", "int16"),
    bad("q_c", lambda: np.zeros((5, 24), np.float16), TypeError, "q_c", blamed="kv_c"),
    bad("kv_c", lambda: bf16(5, 256), ValueError, "[T, 512]", "[5, 256]"),
    bad("kv_c", lambda: np.zeros((5, 512), F32), TypeError, "dtype of q_c", "float32"),
    bad("kv_c", lambda: bf16(5, 1024)[:, ::2], ValueError, "stride 1", "2"),
    bad("k_pe", lambda: bf16(5, 1, 64), ValueError, "[T, 64]", "[5, 1, 64]"),
    bad("k_pe", lambda: None, TypeError, "array", "NoneType"),
    bad("k_pe", lambda: bf16(5, 62), ValueError, "[T, 64]", "[5, 62]"),
    bad("index_k", lambda: bf16(5, 64), ValueError, "[T, 128]", "[5, 64]"),
    bad("index_k", lambda: None, TypeError, "NoneType"),
    bad("slot_mapping", lambda: np.zeros(5, F32), TypeError, "int32 or int64", "float32"),
    bad("slot_mapping", lambda: np.zeros((1, 5), np.int64), ValueError, "[T]", "[1, 5]"),
    bad("indexer_slot_mapping", lambda: np.zeros(4, np.int64), ValueError, "5 tokens"),
    bad("q_rms_norm_w", lambda: bf16(1, 24), ValueError, "[Q]", "[1, 24]"),
    bad("q_rms_norm_w", lambda: np.zeros(24), TypeError, "float64"),
    bad("q_rms_norm_w", lambda: bf16(0), ValueError, "1 to 268435455 elements", "[0]"),
    bad("q_rms_norm_w", lambda: wide(np.float16), ValueError, "1 to 268435455", "[268435456]"),
    bad("kv_rms_norm_w", lambda: wide(np.float16), ValueError, "1 to 268435455", "[268435456]"),
    bad("kv_rms_norm_w", lambda: None, TypeError, "NoneType"),
    bad("q_rms_eps", lambda: -1e-6, ValueError, "at least 0", "-1e-06"),
    bad("kv_rms_eps", lambda: float("nan"), ValueError, "finite", "nan"),
    bad("kv_rms_eps", lambda: "1e-6", TypeError, "number", "str"),
    bad("index_k_layer_norm_eps", lambda: float("inf"), ValueError, "finite", "inf"),
    bad("k_rope_cos_sin_cache", lambda: np.zeros((4, 63), F32), ValueError, "even", "[4, 63]"),
    bad("k_rope_cos_sin_cache", lambda: np.zeros((4, 64)), TypeError, "float64"),
    bad("k_rope_cos_sin_cache", lambda: np.zeros(64, F32), ValueError, "[positions, P]", "[64]"),
    bad("index_k_rope_cos_sin_cache", lambda: np.zeros((4, 130), F32), ValueError, "at most 128"),
    bad("index_k_rope_cos_sin_cache", lambda: None, TypeError, "NoneType"),
    bad("index_k_layer_norm_w", lambda: bf16(64), ValueError, "[128]", "[64]"),
    bad("index_k_layer_norm_bias", lambda: None, TypeError, "NoneType"),
    bad("mla_kv_cache", lambda: bf16(4, 4, 575), ValueError, "576", "575"),
    bad(
        "mla_kv_cache",
        lambda: np.zeros((4, 4, 576), np.float16),
        TypeError,
        "float16",
        blamed="kv_c",
    ),
    bad("mla_kv_cache", lambda: np.zeros((4, 4, 576), np.uint8), TypeError, "named"),
    bad(
        "mla_kv_cache",
        lambda: np.zeros((4, 4, 576), np.uint8),
        ValueError,
        "scale",
        blamed="mla_k_scale",
        changes={"mla_kv_cache_dtype": "fp8"},
    ),
    bad(
        "mla_k_scale",
        lambda: -1.0,
        ValueError,
        "> 0",
        "-1",
        changes={"mla_kv_cache_dtype": "fp8", "mla_kv_cache": np.zeros((4, 4, 576), np.uint8)},
    ),
    *(
        bad(
            "mla_k_scale",
            make,
            TypeError,
            "a number or an array",
            kind,
            changes={"mla_kv_cache_dtype": "fp8", "mla_kv_cache": np.zeros((4, 4, 576), np.uint8)},
        )
        for make, kind in ((lambda: "1", "str"), (lambda: [1.0], "list"))
    ),
    # The table that is missing, or of another width, is in the message.
    bad(
        "k_rope_cos_sin_cache",
        lambda: None,
        ValueError,
        "k_rope_cos_sin_cache is None",
        "got 576",
        blamed="mla_kv_cache",
    ),
    bad(
        "k_rope_cos_sin_cache",
        lambda: np.zeros((4, 32), F32),
        ValueError,
        "k_rope_cos_sin_cache has rows of 32",
        "got 576",
        blamed="mla_kv_cache",
    ),
    bad(
        "k_rope_cos_sin_cache",
        lambda: None,
        ValueError,
        "rows of 64 elements (the rope_dim",
        "got None",
        changes={"mla_kv_cache_dtype": "fp8_ds_mla"},
    ),
    bad(
        "k_rope_cos_sin_cache",
        lambda: np.zeros((4, 32), F32),
        ValueError,
        "rows of 64 elements",
        "got rows of 32",
        changes={"mla_kv_cache_dtype": get_layout("bfloat16")},
    ),
    bad(
        "k_rope_cos_sin_cache",
        lambda: cos_sin(4, 64),
        ValueError,
        "be None",
        "got rows of 64",
        changes={"mla_kv_cache_dtype": get_layout("bfloat16", rope_dim=0)},
    ),
    bad(
        "k_rope_cos_sin_cache",
        lambda: None,
        ValueError,
        "[T, 0] (k_rope_cos_sin_cache is None)",
        "[5, 64]",
        blamed="k_pe",
        changes={"mla_kv_cache": None},
    ),
    bad(
        "k_rope_cos_sin_cache",
        lambda: np.zeros((4, 32), F32),
        ValueError,
        "[T, 32] (k_rope_cos_sin_cache has rows of 32)",
        "[5, 64]",
        blamed="k_pe",
        changes={"mla_kv_cache": None},
    ),
    bad("has_indexer", lambda: "no", TypeError, "bool", "str"),
    bad("has_indexer", lambda: np.array([True, False]), TypeError, "be a bool", "ndarray"),
    bad("has_indexer", lambda: None, TypeError, "be a bool", "NoneType"),
    bad("index_rope_interleave", lambda: "no", TypeError, "bool", "str"),
    bad("mla_kv_cache_dtype", lambda: "fp7", ValueError, "fp8_ds_mla"),
    bad("indexer_k_cache", lambda: np.zeros((4, 4, 128), np.uint8), ValueError, "132", "128"),
    bad("indexer_k_cache", lambda: np.zeros((4, 4, 132), np.int8), TypeError, "uint8", "int8"),
    bad("indexer_k_cache", lambda: np.zeros((4, 8, 132), np.uint8)[:, ::2], ValueError, "gaps"),
    bad("topk_indices_buffer", lambda: np.zeros((5, 4), F32), TypeError, "int32", "float32"),
    bad("topk_indices_buffer", lambda: np.zeros((4, 4), np.int32), ValueError, "5 tokens"),
    bad("topk_indices_buffer", lambda: np.zeros(20, np.int32), ValueError, "[T, K]", "[20]"),
    bad("q_c_out", lambda: np.zeros((5, 24), F32), TypeError, "bfloat16", "float32"),
    bad("q_c_out", lambda: bf16(4, 24), ValueError, "5 tokens"),
    bad("kv_c_out", lambda: np.broadcast_to(bf16(512), (5, 512)), ValueError, "read-only"),
    bad(
        "kv_c_out",
        lambda: np.lib.stride_tricks.as_strided(bf16(1024), (5, 512), (8, 2)),
        ValueError,
        "overlap",
        "8 bytes",
    ),
    bad("k_pe_out", lambda: bf16(5, 32), ValueError, "[T, 64]", "[5, 32]"),
    bad("scale_format", lambda: "e8m0", ValueError, "ue8m0", "e8m0"),
    bad("rounding", lambda: "twice", ValueError, "staged", "twice"),
    bad("stream", lambda: object(), ValueError, "host memory"),
]


@pytest.mark.parametrize(("name", "make", "exception", "fragments", "blamed", "changes"), REFUSED)
def test_what_does_not_fit_is_refused_and_nothing_written(
    rng, name, make, exception, fragments, blamed, changes
):
    backend = helpers.Backend()
    layer = make_layer(rng)
    cache, indexer = make_cache(backend), make_indexer_cache(backend)
    topk = np.full((5, 4), 7, np.int32)
    given = arguments(
        backend,
        layer,
        mla_kv_cache=cache.array,
        indexer_k_cache=indexer.array,
        topk_indices_buffer=topk,
    )
    given.update(changes)
    given[name] = make()
    caches = [cache, indexer]
    with rejected(exception, "fused_norm_rope", blamed, *fragments, caches=caches):
        fused_norm_rope(**given)
    with rejected(exception, "FusedNormRope", blamed, *fragments, caches=caches):
        run_object(given)
    assert np.all(topk == 7)


def test_more_columns_of_indices_than_a_row_may_have_are_refused(rng):
    backend, layer = helpers.Backend(), make_layer(rng, tokens=1)
    given = arguments(backend, layer, topk_indices_buffer=wide(np.int32)[None])
    expected = "have at most 268435455 columns, got [1, 268435456]"
    with rejected(ValueError, "fused_norm_rope", "topk_indices_buffer", expected):
        fused_norm_rope(**given)


def test_a_layout_without_a_scale_ignores_it(backend, rng):
    layer = make_layer(rng)
    cache = make_cache(backend)
    want = expect(layer, cache, None)
    fused_norm_rope(
        **arguments(backend, layer, mla_kv_cache=cache.array, mla_k_scale=1.0, has_indexer=False)
    )
    assert_bytes_equal(cache.bytes(), want.mla_pool, cache.geometry)


def test_arrays_of_several_devices_are_refused(rng):
    layer = make_layer(rng)
    given = arguments(helpers.Backend(), layer)
    given["kv_c"] = helpers.FakeDevice((5, 512), "<f2", dtype="torch.bfloat16")
    with rejected(ValueError, "fused_norm_rope", "kv_c", "same CUDA device", "cuda:0"):
        fused_norm_rope(**given)


def test_flags_may_be_numpy_booleans(rng):
    backend, layer = helpers.Backend(), make_layer(rng)
    indexer = make_indexer_cache(backend)
    flags = {"has_indexer": np.True_, "index_rope_interleave": np.True_}
    want = expect(layer, None, indexer, interleave=True)
    fused_norm_rope(**arguments(backend, layer, indexer_k_cache=indexer.array, **flags))
    assert_bytes_equal(indexer.bytes(), want.indexer_pool, indexer.geometry)


@pytest.mark.parametrize("dtype", [float, int])
def test_one_call_reads_a_host_scale_of_any_dtype(rng, dtype):
    backend, layer = helpers.Backend(), make_layer(rng)
    cache = make_cache(backend, "fp8_e4m3")
    given = arguments(
        backend,
        layer,
        mla_kv_cache=cache.array,
        mla_kv_cache_dtype="fp8",
        mla_k_scale=np.array([2], dtype),
        has_indexer=False,
    )
    want = expect(layer, cache, None, scale=2.0)
    with rejected(TypeError, "FusedNormRope", "mla_k_scale", "float32 to be read in place"):
        FusedNormRope(**{name: given[name] for name in LAYER_NAMES if name in given})
    fused_norm_rope(**given)
    assert_bytes_equal(cache.bytes(), want.mla_pool, cache.geometry)
