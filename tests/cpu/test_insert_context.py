"""GroupedCacheWriter.insert_context: every bit, strides, rounding in stages, counters."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import fused_oracle, helpers, oracle
from tests.context_helpers import Step
from tests.fused_helpers import assert_same_bits, expect_row
from tests.helpers import (
    FORMATS,
    SENTINEL,
    assert_bytes_equal,
    make_cache,
    make_layered_pool,
    random_bits,
    surrounded,
)

F32 = np.float32
any_format = pytest.mark.parametrize("fmt", FORMATS)


# --- bit for bit ----------------------------------------------------------------------------------


@any_format
@pytest.mark.parametrize("rounding", ["fused", "staged"])
@pytest.mark.parametrize("neox", [False, True])
def test_every_byte_is_the_oracles(backend, rng, fmt, rounding, neox):
    step = Step(backend, rng, fmt, tokens=5, slots=[11, -1, 2, 12, 40], positions=[15, 1, 16, 0, 2])
    before = {name: backend.to_numpy(value).copy() for name, value in step.arguments().items()}
    want = step.expected(neox=neox, staged=rounding == "staged", eps=1e-5)
    given = step.arguments()
    step.writer().insert_context(**given, eps=1e-5, is_neox=neox, rounding=rounding)
    step.check(want)
    for name, values in before.items():
        assert_same_bits(backend.to_numpy(given[name]), values)


def test_powers_of_two_as_scales(backend, rng):
    step = Step(backend, rng, "fp8_ds_mla", scale_format="ue8m0")
    want = step.expected()
    step.writer().insert_context(**step.arguments())
    step.check(want)


def test_layers_of_several_layouts(backend, rng):
    step = Step(backend, rng, ["fp8_ds_mla", "bfloat16", "fp8_e4m3", "fp8_e5m2", "bfloat16"])
    want = step.expected()
    step.writer().insert_context(**step.arguments())
    step.check(want)


@pytest.mark.parametrize(("rank", "rope"), [(7, 2), (256, 64), (513, 6), (1, 128)])
@pytest.mark.parametrize("fmt", ["float32", "fp8_e4m3"])
def test_other_sizes(backend, rng, rank, rope, fmt):
    step = Step(backend, rng, fmt, layers=2, tokens=2, rank=rank, rope=rope, dtype=F32)
    want = step.expected()
    step.writer().insert_context(**step.arguments())
    step.check(want)


@pytest.mark.parametrize("with_positions", [True, False])
def test_a_model_without_rope(backend, rng, with_positions):
    step = Step(backend, rng, "bfloat16", rope=0)
    want = step.expected()
    changes = {} if with_positions else {"positions": None}
    step.writer().insert_context(**step.arguments(**changes))
    step.check(want)


@given(st.integers(0, 2**32 - 1), st.sampled_from(FORMATS), st.booleans())
def test_any_bits(seed, fmt, staged):
    rng = np.random.default_rng(seed)
    step = Step(helpers.Backend(), rng, fmt, layers=1, tokens=3)
    step.kv[0] = random_bits(rng, step.kv[0].shape, step.dtype)
    step.kv[1, 0, rng.integers(512)] = np.nan
    step.kv[2, 0, rng.integers(576)] = np.inf
    want = step.expected(staged=staged)
    rounding = "staged" if staged else "fused"
    step.writer().insert_context(**step.arguments(), rounding=rounding)
    step.check(want)


def test_many_tokens_are_worked_on_in_pieces(backend, rng):
    step = Step(backend, rng, "float32", layers=2, tokens=1500, rank=4, rope=2)
    step.positions = step.positions % 13
    step.slots = np.full(1500, -1)
    step.slots[[0, 1023, 1024, 1100, 1499]] = [3, 7, 0, 99, 11]
    want = step.expected()
    writer = step.writer()
    writer.insert_context(**step.arguments())
    step.check(want)
    with pytest.raises(ValueError, match=r"layer [01], token 1100, slot 99"):
        writer.check()


# --- arrays ---------------------------------------------------------------------------------------


@any_format
def test_a_flat_projection(backend, rng, fmt):
    step = Step(backend, rng, fmt)
    want = step.expected()
    flat = backend.array(step.kv.reshape(4, -1))
    step.writer().insert_context(**step.arguments(kv=flat))
    step.check(want)


def test_a_projection_of_one_layer(backend, rng):
    step = Step(backend, rng, layers=1)
    want = step.expected()
    step.writer().insert_context(**step.arguments(kv=backend.array(step.kv[:, 0])))
    step.check(want)


@pytest.mark.parametrize("flat", [True, False])
def test_inputs_inside_larger_buffers(backend, rng, flat):
    step = Step(backend, rng)
    want = step.expected()
    kv = step.kv.reshape(4, -1) if flat else step.kv
    step.writer().insert_context(
        **step.arguments(
            kv=surrounded(backend, kv, pad=5),
            norm_weight=surrounded(backend, step.weight),
            cos_sin_cache=surrounded(backend, step.table, pad=3),
        )
    )
    step.check(want)


def test_a_projection_whose_layers_come_first(backend, rng):
    step = Step(backend, rng)
    want = step.expected()
    base = np.ascontiguousarray(step.kv.transpose(1, 0, 2))
    kv = backend.array(base.transpose(1, 0, 2))
    step.writer().insert_context(**step.arguments(kv=kv))
    step.check(want)


def test_caches_that_share_a_pool(backend, rng):
    step = Step(backend, rng, layers=2, slots=[9, 0, 3, 2])
    step.caches = make_layered_pool(backend, "bfloat16", 2, 3, 4)
    first, second = step.expected()
    sentinel = np.uint8(SENTINEL)
    both = np.where(second != sentinel, second, first)
    step.writer().insert_context(**step.arguments())
    assert_bytes_equal(step.caches[0].bytes(), both, step.caches[0].geometry)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("kind", ["one", "each", "broadcast", "list", "list with None"])
def test_kinds_of_slots(backend, rng, dtype, kind):
    step = Step(backend, rng)
    one = np.array([5, -1, 2, 7], dtype)
    slots = {
        "one": one,
        "each": np.stack([one, one[::-1], np.roll(one, 1)]),
        "broadcast": np.broadcast_to(one, (3, 4)),
        "list": [one, one[::-1].copy(), one],
        "list with None": [one, None, one[::-1].copy()],
    }[kind]
    want = step.expected(slots=slots)
    array = backend.array
    given = (
        [None if own is None else array(own) for own in slots]
        if isinstance(slots, list)
        else array(slots)
    )
    step.writer().insert_context(**step.arguments(slot_mapping=given))
    step.check(want)


def test_fewer_slots_than_rows(backend, rng):
    step = Step(backend, rng, tokens=8, slots=[4, 0, 9])
    want = step.expected()
    step.writer().insert_context(**step.arguments())
    step.check(want)


def test_no_slots_do_nothing(backend, rng):
    step = Step(backend, rng)
    step.writer().insert_context(**step.arguments(slot_mapping=None))
    step.writer().insert_context(**step.arguments(slot_mapping=backend.array(np.zeros(0, int))))
    for cache in step.caches:
        assert np.all(cache.bytes() == SENTINEL)


def test_tables_and_weights_of_each_dtype(backend, rng):
    step = Step(backend, rng)
    step.table = (np.round(step.table * 64) / 64).astype(F32)  # exact in each dtype
    step.weight = (np.round(step.weight.astype(F32) * 64) / 64).astype(F32)
    want = step.expected()
    for dtype in (F32, np.float16, oracle.BFLOAT16):
        for cache in step.caches:
            cache.buffer[...] = SENTINEL
        given = step.arguments(
            norm_weight=backend.array(step.weight.astype(dtype)),
            cos_sin_cache=backend.array(step.table.astype(dtype)),
        )
        step.writer().insert_context(**given)
        step.check(want)


def test_it_follows_rebind_and_live_scales(backend, rng):
    step = Step(backend, rng, "fp8_e4m3", layers=2)
    scales = backend.array(np.array([0.5, 0.25], F32))
    step.scales = scales
    writer = step.writer()
    old = [cache.bytes() for cache in step.caches]
    fresh = [make_cache(backend, "fp8_e4m3", 2, 8) for _ in range(2)]
    writer.rebind([cache.array for cache in fresh])
    scales[...] = backend.array(np.array([2.0, 0.125], F32))
    step.scales = [2.0, 0.125]
    step.caches, gone = fresh, step.caches
    want = step.expected()
    writer.insert_context(**step.arguments())
    step.check(want)
    for cache, pool in zip(gone, old, strict=True):
        assert_bytes_equal(cache.bytes(), pool, cache.geometry)


# --- rounding in stages ---------------------------------------------------------------------------


@any_format
def test_staged_is_norm_then_rope_then_insert(backend, rng, fmt):
    step = Step(backend, rng, fmt)
    writer = step.writer()
    writer.insert_context(**step.arguments(), rounding="staged")
    staged = [cache.bytes() for cache in step.caches]
    kv_c = np.empty((3, 4, 512), step.dtype)
    k_pe = np.empty((3, 4, 64), step.dtype)
    for token in range(4):
        for layer in range(3):
            latent, rotary, _ = expect_row(
                step.kv[token, layer, :512],
                step.weight[layer],
                1e-6,
                step.kv[token, layer, 512:],
                step.table,
                token,
            )
            kv_c[layer, token] = fused_oracle.narrow(latent, step.dtype)
            k_pe[layer, token] = fused_oracle.narrow(rotary, step.dtype)
    for cache in step.caches:
        cache.buffer[...] = SENTINEL
    writer.insert(backend.array(kv_c), backend.array(k_pe), backend.array(step.slots))
    step.check(staged)


# --- counters -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["bfloat16", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla"])
@pytest.mark.parametrize("rounding", ["fused", "staged"])
def test_counters(backend, rng, fmt, rounding):
    """Each row counts once: as padding, beyond the cache, without a position, or written."""
    step = Step(
        backend,
        rng,
        fmt,
        layers=2,
        tokens=7,
        slots=[0, -1, 12, 3, 99, 4, 5],  # layer 0 has 12 slots, layer 1 has 20
        positions=[0, 99, 3, -1, 99, 5, 6],
    )
    step.kv[5, 1, 3] = np.nan  # makes the latent part of the row NaN
    step.kv[6, 0, 512] = np.inf  # and its partner: cos or sin of the table is 0 nowhere
    step.kv[0, 0, 0] = 3e38
    if step.scales:
        step.scales = [0.001, 0.001]
    writer = step.writer(collect_stats=True)
    writer.insert_context(**step.arguments(), rounding=rounding)
    stats = writer.stats()
    assert stats["slots_padding"].tolist() == [1, 1]
    assert stats["slots_out_of_range"].tolist() == [2, 1]
    assert stats["positions_out_of_range"].tolist() == [1, 1]
    assert stats["rows_written"].tolist() == [3, 4]
    nonfinite, saturated = zip(*(count(step, layer, rounding) for layer in range(2)), strict=True)
    assert stats["nonfinite_elements"].tolist() == list(nonfinite)
    assert stats["saturated_elements"].tolist() == list(saturated)
    assert nonfinite[0] >= 2
    assert nonfinite[1] == 512
    with pytest.raises(ValueError, match="check: ") as caught:
        writer.check()
    slots, positions, nonfinite = str(caught.value).split("; ")
    assert "slots lie beyond the cache and were not written, first: layer" in slots
    assert "positions lie beyond the RoPE table, first: layer" in positions
    assert "a NaN or Inf was stored, first: layer" in nonfinite
    # The first one is the lowest on NumPy; on a GPU any may be.
    first_slot, first_position = named(slots), named(positions)
    assert first_slot in {(0, 2, 12), (0, 4, 99), (1, 4, 99)}
    assert first_position in {(0, 3, 3), (1, 3, 3)}
    if backend.name == "numpy":
        assert (first_slot, first_position) == ((0, 2, 12), (0, 3, 3))
    writer.check()


def named(text):
    """Give the layer, token and slot that a message names."""
    return tuple(map(int, re.search(r"layer (\d+), token (\d+), slot (\d+)", text).groups()))


def count(step, layer, rounding):
    """NaN and Inf, and saturated elements, among what a layer stores."""
    nonfinite = saturated = 0
    capacity = step.caches[layer].geometry.capacity
    for token, slot in enumerate(step.slots.tolist()):
        if not 0 <= slot < capacity:
            continue
        with np.errstate(all="ignore"):
            latent, rotary, found = expect_row(
                step.kv[token, layer, :512],
                step.weight[layer],
                1e-6,
                step.kv[token, layer, 512:],
                step.table,
                int(step.positions[token]),
                staged=rounding == "staged",
            )
            if found:
                scale = None if step.scales is None else step.scales[layer]
                rows = np.array(latent, F32)[None], np.array(rotary, F32)[None]
                counts = oracle.statistics(*rows, np.zeros(1, int), 1, step.formats[layer], scale)
                nonfinite += counts["nonfinite_elements"]
                saturated += counts["saturated_elements"]
    return nonfinite, saturated


def test_without_statistics_rows_left_out_are_counted_all_the_same(backend, rng):
    step = Step(backend, rng, slots=[0, 99, 2, 3], positions=[0, 1, 16, 3])
    writer = step.writer()
    writer.insert_context(**step.arguments())
    assert writer.stats().keys() == {"slots_out_of_range", "positions_out_of_range"}
    assert writer.stats()["slots_out_of_range"].tolist() == [1, 1, 1]
    assert writer.stats()["positions_out_of_range"].tolist() == [1, 1, 1]
