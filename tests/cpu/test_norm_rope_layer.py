"""fused_norm_rope and FusedNormRope: what a layer has, counters, strides, frameworks."""

from __future__ import annotations

import re

import numpy as np
import pytest

from cupy_mla import FusedNormRope, fused_norm_rope
from tests import fused_oracle, helpers, oracle
from tests.fused_helpers import (
    LAYER_NAMES,
    arguments,
    assert_same_bits,
    both_ways,
    expect,
    make_indexer_cache,
    make_layer,
    scale_of,
    weights,
)
from tests.helpers import (
    SENTINEL,
    assert_bytes_equal,
    make_cache,
    rejected,
    surrounded,
)

F32 = np.float32


# --- what belongs to a layer ----------------------------------------------------------------------


@both_ways
def test_a_layer_without_an_indexer_leaves_its_arrays_alone(backend, rng, run):
    layer = make_layer(rng)
    cache, indexer = make_cache(backend), make_indexer_cache(backend)
    topk = backend.array(np.full((5, 4), 7, np.int32))
    given = arguments(
        backend,
        layer,
        mla_kv_cache=cache.array,
        indexer_k_cache=indexer.array,
        topk_indices_buffer=topk,
        has_indexer=False,
        index_k=None,
        index_k_layer_norm_w=None,
        index_k_layer_norm_bias=None,
        index_k_rope_cos_sin_cache=None,
    )
    want = expect(layer, cache, None)
    run(given)
    assert_bytes_equal(cache.bytes(), want.mla_pool, cache.geometry)
    assert np.all(indexer.bytes() == SENTINEL)
    assert np.all(backend.to_numpy(topk) == 7)


@both_ways
@pytest.mark.parametrize("caches", [False, True])
def test_without_slots_only_the_query_is_made(backend, rng, run, caches):
    layer = make_layer(rng)
    cache, indexer = make_cache(backend), make_indexer_cache(backend)
    topk = backend.array(np.full((5, 4), 7, np.int64))
    changes = {"mla_kv_cache": cache.array, "indexer_k_cache": indexer.array} if caches else {}
    given = arguments(backend, layer, slot_mapping=None, topk_indices_buffer=topk, **changes)
    out = run(given)
    assert_same_bits(backend.to_numpy(out), expect(layer, None, None).q_c)
    assert np.all(cache.bytes() == SENTINEL)
    assert np.all(indexer.bytes() == SENTINEL)
    assert np.all(backend.to_numpy(topk) == -1)


@both_ways
def test_the_indexer_may_have_slots_of_its_own(backend, rng, run):
    layer = make_layer(rng, slots=[3, -1, 5, 6, 0])
    other = np.array([1, 2, -1, 99, 11, 4], np.int32)
    cache, indexer = make_cache(backend), make_indexer_cache(backend)
    want = expect(layer, cache, indexer, indexer_slots=other)
    run(
        arguments(
            backend,
            layer,
            mla_kv_cache=cache.array,
            indexer_k_cache=indexer.array,
            indexer_slot_mapping=backend.array(other),
        )
    )
    assert_bytes_equal(cache.bytes(), want.mla_pool, cache.geometry)
    assert_bytes_equal(indexer.bytes(), want.indexer_pool, indexer.geometry)


@both_ways
@pytest.mark.parametrize("empty", [False, True])
def test_a_model_without_rope(backend, rng, run, empty):
    layer = make_layer(rng, tokens=2)
    cache = make_cache(backend, rope=0)
    layer.k_pe = layer.k_pe[:, :0]
    want = cache.bytes()
    with np.errstate(all="ignore"):
        for token in range(2):
            latent = fused_oracle.rms_norm(
                fused_oracle.widen(layer.kv_c[token]),
                fused_oracle.widen(layer.kv_weight),
                layer.kv_eps,
            )
            row = fused_oracle.narrow(latent, oracle.BFLOAT16).tobytes()
            fused_oracle.put_values(want, cache.geometry, token, row)
    run(
        arguments(
            backend,
            layer,
            k_pe=backend.array(layer.k_pe) if empty else None,
            k_rope_cos_sin_cache=None,
            mla_kv_cache=cache.array,
            has_indexer=False,
        )
    )
    assert_bytes_equal(cache.bytes(), want, cache.geometry)


@both_ways
def test_no_token_at_all(backend, rng, run):
    layer = make_layer(rng, tokens=0)
    cache = make_cache(backend)
    out = run(arguments(backend, layer, mla_kv_cache=cache.array))
    assert backend.to_numpy(out).shape == (0, 24)
    assert np.all(cache.bytes() == SENTINEL)


@both_ways
@pytest.mark.parametrize("fmt", ["bfloat16", "fp8_e4m3", "fp8_ds_mla"])
def test_inputs_inside_larger_buffers(backend, rng, run, fmt):
    layer = make_layer(rng)
    cache, indexer = make_cache(backend, fmt), make_indexer_cache(backend)
    want = expect(layer, cache, indexer, scale=scale_of(fmt))
    strided = {
        "q_c": surrounded(backend, layer.q_c, lead=3, pad=5),
        "kv_c": surrounded(backend, layer.kv_c),
        "k_pe": surrounded(backend, layer.k_pe, pad=1),
        "index_k": surrounded(backend, layer.index_k, lead=1, pad=7),
        "k_rope_cos_sin_cache": surrounded(backend, layer.k_table, pad=3),
        "index_k_rope_cos_sin_cache": surrounded(backend, layer.index_table, pad=1),
        "q_rms_norm_w": surrounded(backend, layer.q_weight),
        "kv_rms_norm_w": surrounded(backend, layer.kv_weight),
    }
    out_room = np.full((5, 40), np.nan, oracle.BFLOAT16)
    room = backend.array(out_room)
    given = arguments(
        backend,
        layer,
        mla_kv_cache=cache.array,
        mla_kv_cache_dtype=fmt,
        mla_k_scale=scale_of(fmt),
        indexer_k_cache=indexer.array,
        q_c_out=room[:, 3:27],
        **strided,
    )
    run(given)
    assert_bytes_equal(cache.bytes(), want.mla_pool, cache.geometry)
    assert_bytes_equal(indexer.bytes(), want.indexer_pool, indexer.geometry)
    written = backend.to_numpy(room)
    assert_same_bits(written[:, 3:27], want.q_c)
    assert np.all(np.isnan(np.delete(written.astype(F32), range(3, 27), axis=1)))


def test_outputs_may_be_the_inputs_themselves(backend, rng):
    layer = make_layer(rng)
    want = expect(layer, None, None)
    arrays = {name: backend.array(getattr(layer, name).copy()) for name in ("q_c", "kv_c", "k_pe")}
    given = arguments(backend, layer, **arrays)
    outs = {f"{name}_out": array for name, array in arrays.items()}
    fused_norm_rope(**given, **outs)
    assert_same_bits(backend.to_numpy(arrays["q_c"]), want.q_c)
    assert_same_bits(backend.to_numpy(arrays["kv_c"]), want.kv_c)
    assert_same_bits(backend.to_numpy(arrays["k_pe"]), want.k_pe)


def test_caches_with_a_head_axis(backend, rng):
    layer = make_layer(rng)
    cache, four = make_cache(backend, "fp8_ds_mla"), make_cache(backend, "fp8_ds_mla", four_d=True)
    indexer, other = make_indexer_cache(backend), make_indexer_cache(backend)
    for mla, keys in ((cache.array, indexer.array), (four.array, other.array[:, :, None])):
        fused_norm_rope(
            **arguments(
                backend,
                layer,
                mla_kv_cache=mla,
                mla_kv_cache_dtype="fp8_ds_mla",
                indexer_k_cache=keys,
            )
        )
    assert_bytes_equal(four.bytes(), cache.bytes(), cache.geometry)
    assert_bytes_equal(other.bytes(), indexer.bytes(), indexer.geometry)


# --- the object -----------------------------------------------------------------------------------


def make_object(backend, layer, **changes):
    given = arguments(backend, layer, **changes)
    return FusedNormRope(**{name: given[name] for name in LAYER_NAMES if name in given}), given


def step(given):
    return {
        name: given[name]
        for name in ("positions", "q_c", "kv_c", "k_pe", "index_k", "slot_mapping")
    }


def assert_first(text, problem, places, anywhere):
    """Assert that a message names the first of some tokens and slots, or any of them."""
    (part,) = [part for part in text.split("; ") if problem in part]
    found = re.search(r"token (\d+), slot (\d+)", part)
    assert tuple(map(int, found.groups())) in places[: len(places) if anywhere else 1]


def test_the_object_counts_what_it_could_not_store(backend, rng):
    layer = make_layer(rng, slots=[3, 99, 5, -1, 98], positions=[0, 1, 77, 88, 2])
    cache, indexer = make_cache(backend), make_indexer_cache(backend)
    op, given = make_object(backend, layer, mla_kv_cache=cache.array, indexer_k_cache=indexer.array)
    op.check()
    op(**step(given), indexer_slot_mapping=backend.array(np.array([0, 1, 2, 3, 50])))
    stats = op.stats()
    assert set(stats) == {"slots_out_of_range", "positions_out_of_range"}
    assert all(values.dtype == np.int64 for values in stats.values())
    assert stats["slots_out_of_range"].tolist() == [2, 1]
    assert stats["positions_out_of_range"].tolist() == [1, 2]
    with pytest.raises(ValueError, match="check: ") as caught:
        op.check()
    text = str(caught.value)
    # The first one is the lowest on NumPy; on a GPU any may be.
    anywhere = backend.name != "numpy"
    assert_first(text, "slots lie beyond the MLA cache", [(1, 99), (4, 98)], anywhere)
    assert_first(text, "positions lie beyond the RoPE table of the MLA cache", [(2, 5)], anywhere)
    assert_first(text, "slots lie beyond the indexer cache", [(4, 50)], anywhere)
    where = "positions lie beyond the RoPE table of the indexer cache"
    assert_first(text, where, [(2, 2), (3, 3)], anywhere)
    op.check()
    op(**step(given))
    assert op.stats()["slots_out_of_range"].tolist() == [4, 3]


def test_slots_are_told_before_positions(backend, rng):
    """Whichever came first: the records of a GPU have no order in time."""
    layer = make_layer(rng, slots=[3, 4, 5, 6, 7], positions=[0, 1, 77, 88, 2])
    op, given = make_object(backend, layer, mla_kv_cache=make_cache(backend).array)
    op(**step(given))
    op(**(step(given) | {"slot_mapping": backend.array(np.array([99, 1, 2, 3, 4]))}))
    with pytest.raises(ValueError, match=r"^check: slots lie beyond .*; positions lie beyond "):
        op.check()


def test_the_object_counts_zeros_for_a_cache_it_does_not_have(backend, rng):
    layer = make_layer(rng, slots=[3, 99, 5, -1, 98])
    op, given = make_object(backend, layer, mla_kv_cache=make_cache(backend).array)
    op(**step(given))
    assert op.stats()["slots_out_of_range"].tolist() == [2, 0]


def test_the_object_reads_weights_and_scale_at_each_call(backend, rng):
    layer = make_layer(rng)
    cache = make_cache(backend, "fp8_e4m3")
    scale = backend.array(np.array([0.05], F32))
    weight = backend.array(layer.kv_weight.copy())
    op, given = make_object(
        backend,
        layer,
        kv_rms_norm_w=weight,
        mla_kv_cache=cache.array,
        mla_kv_cache_dtype="fp8",
        mla_k_scale=scale,
        has_indexer=False,
    )
    op(**step(given))
    scale[...] = 0.75
    layer.kv_weight = weights(np.random.default_rng(1), 512)
    weight[...] = backend.array(layer.kv_weight)
    want = expect(layer, cache, None, scale=0.75)
    op(**step(given))
    assert_bytes_equal(cache.bytes(), want.mla_pool, cache.geometry)


@pytest.mark.parametrize("bad_scale", [0.0, -1.0, np.nan, np.inf])
def test_the_object_reports_a_live_scale_that_is_none(backend, rng, bad_scale):
    layer = make_layer(rng)
    scale = backend.array(np.array([0.05], F32))
    cache = make_cache(backend, "fp8_e4m3")
    options = {"mla_kv_cache": cache.array, "mla_kv_cache_dtype": "fp8", "mla_k_scale": scale}
    op, _ = make_object(backend, layer, **options)
    op.check()
    scale[...] = bad_scale
    with pytest.raises(ValueError, match="scale of the MLA cache must be finite and > 0, got"):
        op.check()


def test_what_the_object_says_of_itself(backend, rng):
    layer = make_layer(rng)
    op, _ = make_object(
        backend,
        layer,
        mla_kv_cache=make_cache(backend, "fp8_ds_mla").array,
        mla_kv_cache_dtype="fp8_ds_mla",
        indexer_k_cache=make_indexer_cache(backend).array,
    )
    op.warmup()
    assert repr(op).startswith(
        "FusedNormRope(MLA cache as fp8_ds_mla, indexer cache as indexer_fp8, "
    )
    assert "no cache" in repr(make_object(backend, layer)[0])


# --- frameworks -----------------------------------------------------------------------------------


def test_torch_tensors_give_a_torch_tensor(rng):
    torch = pytest.importorskip("torch")
    layer = make_layer(rng)
    cache, indexer = make_cache(helpers.Backend()), make_indexer_cache(helpers.Backend())
    want = expect(layer, cache, indexer)

    def tensor(array):
        if array.dtype == oracle.BFLOAT16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    given = {
        name: tensor(value) if isinstance(value, np.ndarray) else value
        for name, value in arguments(helpers.Backend(), layer).items()
    }
    given["q_rms_norm_w"].requires_grad_()
    mla = torch.full((4, 4, 576), 0, dtype=torch.bfloat16)
    mla.view(torch.uint8).fill_(SENTINEL)
    keys = torch.full((3, 4, 132), SENTINEL, dtype=torch.uint8)
    topk = torch.zeros(5, 3, dtype=torch.int32)
    given.update(mla_kv_cache=mla, indexer_k_cache=keys, topk_indices_buffer=topk)
    out = fused_norm_rope(**given)
    assert isinstance(out, torch.Tensor)
    assert out.dtype == torch.bfloat16
    assert_same_bits(out.view(torch.int16).numpy().view(oracle.BFLOAT16), want.q_c)
    stored = mla.view(torch.uint8).numpy().reshape(-1)
    assert stored.tobytes() == want.mla_pool[256 : 256 + stored.size].tobytes()
    stored = keys.numpy().reshape(-1)
    assert stored.tobytes() == want.indexer_pool[256 : 256 + stored.size].tobytes()
    assert torch.all(topk == -1)


def test_jax_arrays_give_a_jax_array_and_are_no_destination(rng):
    jax = pytest.importorskip("jax")
    layer = make_layer(rng)
    layer.positions, layer.slots = layer.positions.astype(np.int32), layer.slots.astype(np.int32)
    cache = make_cache(helpers.Backend())
    given = {
        name: jax.numpy.asarray(value) if isinstance(value, np.ndarray) else value
        for name, value in arguments(helpers.Backend(), layer).items()
    }
    given["has_indexer"] = False
    out = fused_norm_rope(**given)
    assert isinstance(out, jax.Array)
    assert_same_bits(np.asarray(out), expect(layer, None, None).q_c)
    for name, array in (
        ("mla_kv_cache", jax.numpy.zeros((2, 4, 576), jax.numpy.bfloat16)),
        ("q_c_out", out),
    ):
        with rejected(ValueError, "fused_norm_rope", name, "read-only", caches=[cache]):
            fused_norm_rope(**{**given, name: array})
