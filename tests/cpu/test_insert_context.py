"""GroupedCacheWriter.insert_context and from_layers: bits, counters, what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_mla import GroupedCacheWriter, get_layout
from tests import fused_oracle, helpers, oracle
from tests.fused_helpers import assert_same_bits, cos_sin, expect_row, odd_address, weights
from tests.helpers import (
    FORMATS,
    INPUT_DTYPES,
    SENTINEL,
    assert_bytes_equal,
    make_cache,
    make_layered_pool,
    random_bits,
    random_rows,
    rejected,
    surrounded,
)

F32 = np.float32
any_format = pytest.mark.parametrize("fmt", FORMATS)
ROWS = 16  # of the RoPE table


class Step:
    """Caches of L layers, and the arrays of a step as plain NumPy values."""

    def __init__(
        self,
        backend,
        rng,
        fmt="bfloat16",
        *,
        layers=3,
        tokens=4,
        rank=512,
        rope=64,
        slots=None,
        positions=None,
        dtype=None,
        scale_format="float32",
    ):
        self.backend, self.rank, self.rope = backend, rank, rope
        self.formats = [fmt] * layers if isinstance(fmt, str) else list(fmt)
        self.scale_format = scale_format
        self.dtype = np.dtype(INPUT_DTYPES[self.formats[0]] if dtype is None else dtype)
        # Each layer has its own geometry.
        self.caches = [
            make_cache(backend, name, 3 + i, 4 + i, rank, rope, row_pad=16 * i, block_pad=32)
            for i, name in enumerate(self.formats)
        ]
        self.scales = helpers.default_scales(self.formats, len(self.formats))
        self.kv = random_rows(rng, (tokens, len(self.formats), rank + rope), self.dtype)
        self.weight = weights(rng, (len(self.formats), rank))
        self.table = cos_sin(ROWS, rope) if rope else None
        self.positions = np.arange(tokens) if positions is None else np.asarray(positions)
        self.slots = np.arange(tokens)[::-1].copy() if slots is None else np.asarray(slots)

    def writer(self, **options):
        return GroupedCacheWriter(
            [cache.array for cache in self.caches],
            self.formats,
            self.scales,
            kv_lora_rank=self.rank,
            rope_dim=self.rope,
            scale_format=self.scale_format,
            **options,
        )

    def arguments(self, **changes):
        array = self.backend.array
        given = {
            "kv": array(self.kv),
            "positions": array(self.positions),
            "slot_mapping": array(self.slots),
            "norm_weight": array(self.weight),
            "cos_sin_cache": None if self.table is None else array(self.table),
        }
        given.update(changes)
        return given

    def expected(self, *, eps=1e-6, neox=False, staged=False, slots=None):
        """Give every pool afterwards, one number at a time."""
        slots = self.slots if slots is None else slots
        pools = []
        for layer, cache in enumerate(self.caches):
            pool = cache.bytes()
            own = slots[layer] if isinstance(slots, list) or slots.ndim == 2 else slots
            for token, slot in enumerate([] if own is None else own.tolist()):
                if not 0 <= slot < cache.geometry.capacity:
                    continue
                with np.errstate(all="ignore"):
                    latent, rotary, found = expect_row(
                        self.kv[token, layer, : self.rank],
                        self.weight[layer],
                        eps,
                        self.kv[token, layer, self.rank :],
                        self.table,
                        int(self.positions[token]) if self.rope else 0,
                        staged=staged,
                        neox=neox,
                    )
                    if found:
                        scale = None if self.scales is None else self.scales[layer]
                        row = fused_oracle.encode_values(
                            latent, rotary, cache.fmt, scale, self.scale_format
                        )
                        fused_oracle.put_values(pool, cache.geometry, slot, row)
            pools.append(pool)
        return pools

    def check(self, want):
        for cache, pool in zip(self.caches, want, strict=True):
            assert_bytes_equal(cache.bytes(), pool, cache.geometry)


# --- bit for bit ----------------------------------------------------------------------------------


@any_format
@pytest.mark.parametrize("rounding", ["fused", "staged"])
@pytest.mark.parametrize("neox", [False, True])
def test_every_byte_is_the_oracles(backend, rng, fmt, rounding, neox):
    step = Step(backend, rng, fmt, tokens=5, slots=[11, -1, 2, 12, 40], positions=[15, 1, 16, 0, 2])
    before = {name: np.copy(value) for name, value in step.arguments().items()}
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
    with pytest.raises(ValueError, match="layer 0, token 1100, slot 99"):
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
    base = backend.array(np.ascontiguousarray(step.kv.transpose(1, 0, 2)))
    step.writer().insert_context(**step.arguments(kv=base.transpose(1, 0, 2)))
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
    text = str(caught.value)
    assert (
        "slots lie beyond the cache and were not written, first: layer 0, token 2, slot 12" in text
    )
    assert "positions lie beyond the RoPE table, first: layer 0, token 3, slot 3" in text
    assert "a NaN or Inf was stored, first: layer 0, token" in text
    writer.check()


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


# --- what is refused ------------------------------------------------------------------------------

WIDE = 3 * 576


def bf16(*shape):
    return np.zeros(shape, oracle.BFLOAT16)


REFUSED = [
    ("kv", bf16(4, 3, 575), ValueError, ["[T, 3, 576]", "[4, 3, 575]"]),
    ("kv", bf16(4, WIDE + 1), ValueError, [f"[T, 3, 576] or [T, {WIDE}]", f"[4, {WIDE + 1}]"]),
    ("kv", bf16(3, 3, 576), ValueError, ["4 tokens", "[3, 3, 576]"]),
    ("kv", bf16(3, WIDE), ValueError, ["4 tokens"]),
    ("kv", bf16(WIDE), ValueError, [f"[{WIDE}]"]),
    ("kv", bf16(4, 3, 1152)[..., ::2], ValueError, ["stride 1"]),
    ("kv", np.zeros((4, 3, 576), F32), TypeError, ["bfloat16", "layer 0", "float32"]),
    ("kv", np.zeros((4, 3, 576), np.int16), TypeError, ["int16"]),
    ("kv", None, TypeError, ["NoneType"]),
    ("kv", odd_address((4, 3, 576), oracle.BFLOAT16), ValueError, ["multiples", "2-byte"]),
    ("cos_sin_cache", odd_address((16, 64), F32), ValueError, ["multiples", "4-byte"]),
    ("positions", odd_address((4,), np.int64), ValueError, ["multiples", "8-byte"]),
    ("positions", np.zeros(3, np.int64), ValueError, ["4 tokens", "[3]"]),
    ("positions", np.zeros(4, F32), TypeError, ["int32 or int64", "float32"]),
    ("positions", np.zeros((1, 4), np.int64), ValueError, ["[T]", "[1, 4]"]),
    ("positions", None, TypeError, ["NoneType"]),
    ("slot_mapping", np.zeros((2, 4), np.int64), ValueError, ["[3, T]", "[2, 4]"]),
    ("slot_mapping", [np.zeros(4, np.int64)] * 2, ValueError, ["3 layers", "2"]),
    ("slot_mapping", np.zeros(4, np.uint64), TypeError, ["uint64"]),
    ("norm_weight", bf16(512), ValueError, ["[3, 512]", "[512]"]),
    ("norm_weight", bf16(2, 512), ValueError, ["[3, 512]", "[2, 512]"]),
    ("norm_weight", np.zeros((3, 512)), TypeError, ["float64"]),
    ("norm_weight", None, TypeError, ["NoneType"]),
    ("cos_sin_cache", np.zeros((16, 32), F32), ValueError, ["[positions, 64]", "[16, 32]"]),
    ("cos_sin_cache", np.zeros((16, 64), np.int64), TypeError, ["int64"]),
    ("cos_sin_cache", None, ValueError, ["rope_dim is 64", "None"]),
    ("eps", -1.0, ValueError, ["at least 0", "-1"]),
    ("eps", None, TypeError, ["number", "NoneType"]),
    ("rounding", "none", ValueError, ["staged", "'none'"]),
    ("stream", object(), ValueError, ["host memory"]),
    (
        "kv",
        helpers.FakeDevice((4, 3, 576), "<f2", dtype="torch.bfloat16"),
        ValueError,
        ["same CUDA device", "cuda:0"],
    ),
]


@pytest.mark.parametrize(
    ("name", "value", "exception", "fragments"),
    REFUSED,
    ids=[f"{case[0]}-{number}" for number, case in enumerate(REFUSED)],
)
def test_what_does_not_fit_is_refused_and_nothing_written(rng, name, value, exception, fragments):
    step = Step(helpers.Backend(), rng)
    given = step.arguments()
    given[name] = value
    writer = step.writer()
    with rejected(exception, "insert_context", name, *fragments, caches=step.caches):
        writer.insert_context(**given)
    assert not writer.stats()["slots_out_of_range"].any()


def test_a_table_without_a_rotary_part_is_refused(rng):
    step = Step(helpers.Backend(), rng, rope=0)
    with rejected(ValueError, "insert_context", "cos_sin_cache", "rope_dim is 0", "ndarray"):
        step.writer().insert_context(**step.arguments(cos_sin_cache=cos_sin(4, 64)))


def test_a_layout_that_cannot_take_the_dtype_is_named(rng):
    step = Step(helpers.Backend(), rng, ["fp8_e4m3", "fp8_ds_mla"], dtype=np.float16)
    with rejected(TypeError, "insert_context", "kv", "bfloat16", "fp8_ds_mla", layer=1):
        step.writer().insert_context(**step.arguments())


# --- from a model's layers ------------------------------------------------------------------------


def make_model_layers(step, *, eps=1e-5, neox=True, nested=True):
    """Make layers as engines have them, over the caches of a step."""
    array = step.backend.array
    layers = []
    for number, cache in enumerate(step.caches):
        scale = 1.0 if step.scales is None else step.scales[number]
        attention = SimpleNamespace(
            kv_cache=cache.array,
            kv_cache_dtype=step.formats[number],
            _k_scale=array(np.array(scale, F32)),
            kv_lora_rank=step.rank,
            qk_rope_head_dim=step.rope,
            kv_a_layernorm=SimpleNamespace(
                weight=array(step.weight[number].copy()), variance_epsilon=eps
            ),
            rotary_emb=SimpleNamespace(cos_sin_cache=array(step.table), is_neox_style=neox),
        )
        layers.append(SimpleNamespace(self_attn=attention) if nested else attention)
    return layers


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("fmt", ["bfloat16", "fp8_e4m3", "fp8_ds_mla"])
def test_a_writer_of_layers_knows_their_norms_and_table(backend, rng, fmt, nested):
    step = Step(backend, rng, fmt)
    step.scales = [F32(0.37)] * 3 if step.scales else None
    want = step.expected(eps=0.5, neox=True)
    layers = make_model_layers(step, eps=0.5, nested=nested)
    writer = GroupedCacheWriter.from_layers(layers)
    assert [layout.name for layout in writer.layouts] == step.formats
    # Weights were copied: the model may go.
    for layer in layers:
        (layer.self_attn if nested else layer).kv_a_layernorm.weight[...] = 0
    given = step.arguments(norm_weight=None, cos_sin_cache=None)
    writer.insert_context(**given)
    step.check(want)


def test_weights_and_table_of_the_caller_come_first(backend, rng):
    step = Step(backend, rng)
    layers = make_model_layers(step, eps=0.5, neox=True)
    step.weight = weights(rng, (3, 512))
    step.table = np.ascontiguousarray(step.table[::-1])
    want = step.expected(eps=1e-6, neox=False)
    GroupedCacheWriter.from_layers(layers).insert_context(**step.arguments())
    step.check(want)


def test_scales_of_layers_are_live_where_the_caches_are(backend, rng):
    step = Step(backend, rng, "fp8_e4m3")
    layers = make_model_layers(step)
    writer = GroupedCacheWriter.from_layers(layers)
    step.scales = [0.5, 2.0, 0.125]
    for layer, scale in zip(layers, step.scales, strict=True):
        layer.self_attn._k_scale[...] = scale
    want = step.expected()
    writer.insert_context(**step.arguments())
    step.check(want)


def test_numbers_as_scales_are_copied(backend, rng):
    step = Step(backend, rng, "fp8_e4m3")
    layers = make_model_layers(step, nested=False)
    for number, layer in enumerate(layers):
        layer.k_scale = step.scales[number]  # comes before _k_scale
        layer._k_scale[...] = 77
    want = step.expected()
    writer = GroupedCacheWriter.from_layers(layers)
    for layer in layers:
        layer.k_scale = 5.0
    writer.insert_context(**step.arguments())
    step.check(want)


def test_other_names_of_attributes(backend, rng):
    step = Step(backend, rng, layers=1)
    layers = [
        SimpleNamespace(
            mla=SimpleNamespace(cache=[step.caches[0].array]),
            rank=512,
            rope_dim=64,
            norm=SimpleNamespace(weight=backend.array(step.weight[0]), eps=1e-5),
        )
    ]
    names = {
        "kv_cache": "mla.cache",
        "kv_lora_rank": "rank",
        "norm_weight": "norm.weight",
        "norm_eps": "norm.eps",
    }
    want = step.expected(eps=1e-5)
    writer = GroupedCacheWriter.from_layers(layers, attributes=names, collect_stats=True)
    writer.insert_context(**step.arguments(norm_weight=None))
    step.check(want)
    assert writer.stats()["rows_written"].tolist() == [4]


def test_layers_without_norms_make_a_plain_writer(backend, rng):
    step = Step(backend, rng)
    layers = make_model_layers(step)
    for layer in layers:
        del layer.self_attn.kv_a_layernorm, layer.self_attn.rotary_emb
    writer = GroupedCacheWriter.from_layers(layers)
    with rejected(TypeError, "insert_context", "norm_weight", "NoneType"):
        writer.insert_context(**step.arguments(norm_weight=None))
    with rejected(ValueError, "insert_context", "cos_sin_cache", "rope_dim is 64"):
        writer.insert_context(**step.arguments(cos_sin_cache=None))
    want = step.expected()
    writer.insert_context(**step.arguments())
    step.check(want)


def test_the_scale_format_is_handed_on(backend, rng):
    step = Step(backend, rng, "fp8_ds_mla")
    writer = GroupedCacheWriter.from_layers(make_model_layers(step), scale_format="ue8m0")
    assert writer.layouts[0] == get_layout("fp8_ds_mla", scale_format="ue8m0")


def change(layer, path, value):
    *parents, name = path.split(".")
    for parent in parents:
        layer = getattr(layer, parent)
    if value is None:
        delattr(layer, name)
    else:
        setattr(layer, name, value)


@pytest.mark.parametrize(
    ("path", "value", "exception", "fragments"),
    [
        ("kv_lora_rank", 256, ValueError, ["kv_lora_rank of layer 0 (512)", "got 256"]),
        ("kv_lora_rank", None, TypeError, ["attribute kv_lora_rank"]),
        ("qk_rope_head_dim", 32, ValueError, ["rope_dim of layer 0 (64)", "got 32"]),
        ("qk_rope_head_dim", None, TypeError, ["rope_dim or qk_rope_head_dim"]),
        ("kv_a_layernorm.variance_epsilon", 1e-6, ValueError, ["eps of layer 0"]),
        ("kv_a_layernorm.variance_epsilon", None, TypeError, ["variance_epsilon"]),
        ("kv_a_layernorm", None, TypeError, ["kv_a_layernorm.weight"]),
        ("kv_a_layernorm.weight", bf16(256), ValueError, ["[512]", "[256]"]),
        ("kv_a_layernorm.weight", np.zeros(512, F32), TypeError, ["bfloat16", "float32"]),
        ("kv_a_layernorm.weight", np.zeros(512, int), TypeError, ["int64"]),
        ("kv_cache", None, TypeError, ["attribute kv_cache"]),
        ("_k_scale", None, TypeError, ["k_scale or _k_scale"]),
    ],
)
def test_a_layer_that_does_not_go_with_the_first_one_is_named(
    rng, path, value, exception, fragments
):
    step = Step(helpers.Backend(), rng, "fp8_e4m3")
    layers = make_model_layers(step)
    change(layers[2].self_attn, path, value)
    with rejected(exception, "from_layers", "layers", *fragments, layer=2):
        GroupedCacheWriter.from_layers(layers)


@pytest.mark.parametrize(
    ("path", "value", "exception"),
    [
        ("kv_cache_dtype", "fp7", ValueError),
        ("kv_lora_rank", "512", TypeError),
        ("kv_cache", np.zeros((4, 4, 575), np.uint8), ValueError),
        ("_k_scale", np.zeros(2, F32), ValueError),
    ],
)
def test_other_faults_name_the_layer_too(rng, path, value, exception):
    step = Step(helpers.Backend(), rng, "fp8_e4m3")
    layers = make_model_layers(step)
    change(layers[2].self_attn, path, value)
    with pytest.raises(exception, match=r"layer 2|\[2\]"):
        GroupedCacheWriter.from_layers(layers)


def test_no_layer_and_unknown_attributes(rng):
    with rejected(ValueError, "from_layers", "layers", "at least one"):
        GroupedCacheWriter.from_layers([])
    layers = make_model_layers(Step(helpers.Backend(), rng))
    with rejected(ValueError, "from_layers", "attributes", "kv_cache_dtype", "'cache'"):
        GroupedCacheWriter.from_layers(layers, attributes={"cache": "x"})


def test_layers_of_torch(rng):
    torch = pytest.importorskip("torch")
    step = Step(helpers.Backend(), rng, "fp8_e4m3", layers=2)
    layers = []
    for number, cache in enumerate(step.caches):
        layer = torch.nn.Module()
        layer.kv_cache = torch.from_numpy(cache.array)
        layer.kv_cache_dtype = "fp8"
        layer.register_buffer("_k_scale", torch.tensor(step.scales[number]))
        layer.kv_lora_rank, layer.qk_rope_head_dim = 512, 64
        layer.kv_a_layernorm = torch.nn.Module()
        weight = torch.from_numpy(step.weight[number].view(np.int16)).view(torch.bfloat16)
        layer.kv_a_layernorm.weight = torch.nn.Parameter(weight.clone())
        layer.kv_a_layernorm.variance_epsilon = 1e-6
        layers.append(layer)
    want = step.expected()
    writer = GroupedCacheWriter.from_layers(torch.nn.ModuleList(layers))
    kv = torch.from_numpy(step.kv.view(np.int16)).view(torch.bfloat16)
    writer.insert_context(
        kv,
        torch.from_numpy(step.positions),
        torch.from_numpy(step.slots),
        None,
        torch.from_numpy(step.table),
    )
    step.check(want)
