"""The norm_rope and indexer kernels against the NumPy backend: all bytes of caches and outputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_mla import FusedNormRope, fused_norm_rope, indexer_k_quant_and_cache
from cupy_mla._cuda import registry
from tests import helpers, oracle
from tests.emulator.api.conftest import DeviceBackend, emulated  # noqa: F401
from tests.emulator.harness import COMBINATIONS
from tests.fused_helpers import cos_sin, make_indexer_cache, weights
from tests.helpers import random_bits, random_rows

F32 = np.float32
NUMBERS = (oracle.BFLOAT16, oracle.FLOAT16, oracle.FLOAT32)
ROWS = 16  # of the RoPE tables

every_combination = pytest.mark.parametrize(("fmt", "dtype"), COMBINATIONS)


@dataclass
class Case:
    """A step as plain NumPy values; `pad` is elements between rows of inputs and outputs."""

    fmt: str
    arrays: dict[str, Any]
    pad: int = 0
    outs: tuple[str, ...] = ("q_c_out", "kv_c_out", "k_pe_out")
    topk: tuple[int, int, Any] | None = (6, 0, np.int32)  # columns, columns behind them, dtype
    mla: dict[str, int] | None = field(default_factory=dict)
    indexer: dict[str, int] | None = field(default_factory=dict)
    scale: float = 0.05
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, backend: helpers.Backend) -> dict[str, np.ndarray]:
        """Run a step twice, by object and by function; return all that was written."""
        place = {name: self._place(backend, values) for name, values in self.arrays.items()}
        rank, rope = self.arrays["kv_c"].shape[1], 0
        if self.arrays["k_pe"] is not None:
            rope = self.arrays["k_pe"].shape[1]
        mla = indexer = None
        if self.mla is not None:
            mla = helpers.make_cache(backend, self.fmt, 3, 4, rank, rope, **self.mla)
            place["mla_kv_cache"], place["mla_kv_cache_dtype"] = mla.array, self.fmt
            if self.fmt in helpers.SCALED_FORMATS:
                place["mla_k_scale"] = self.scale
        if self.indexer is not None:
            indexer = make_indexer_cache(backend, 3, 4, **self.indexer)
            place["indexer_k_cache"] = indexer.array
        rooms = {}
        for name in self.outs:
            source = self.arrays[name.removesuffix("_out")]
            if source is not None:
                room = np.full((len(source) + 1, source.shape[1] + self.pad), 3).astype(
                    source.dtype
                )
                rooms[name] = backend.array(room)
                place[name] = rooms[name][:, self.pad :]
        place["topk_indices_buffer"] = None
        if self.topk is not None:
            columns, behind, dtype = self.topk
            room = np.full((len(self.arrays["q_c"]) + 1, columns + behind), 9, dtype)
            rooms["topk"] = backend.array(room)
            place["topk_indices_buffer"] = rooms["topk"][:, :columns]
        place |= self.options
        layer = FusedNormRope(**{name: place[name] for name in LAYER if name in place})
        step = {name: place[name] for name in place if name not in LAYER}
        made = layer(**step)
        fused_norm_rope(**place)
        written = {name: backend.to_numpy(room).copy() for name, room in rooms.items()}
        if "q_c_out" not in self.outs:
            written["q_c"] = backend.to_numpy(made)
        for name, cache in (("mla", mla), ("indexer", indexer)):
            if cache is not None:
                written[name] = cache.bytes()
        stats = layer.stats()
        assert list(stats) == ["slots_out_of_range", "positions_out_of_range"]
        return written | stats

    def _place(self, backend: helpers.Backend, values: Any) -> Any:
        if not isinstance(values, np.ndarray):
            return values
        if not self.pad or values.dtype.kind == "i":
            return backend.array(values)
        return helpers.surrounded(backend, values, lead=self.pad, pad=self.pad)


LAYER = {
    "q_rms_norm_w", "q_rms_eps", "kv_rms_norm_w", "kv_rms_eps", "k_rope_cos_sin_cache",
    "index_k_layer_norm_w", "index_k_layer_norm_bias", "index_k_layer_norm_eps",
    "index_k_rope_cos_sin_cache", "indexer_k_cache", "mla_kv_cache", "mla_kv_cache_dtype",
    "mla_k_scale", "has_indexer", "index_rope_interleave", "scale_format", "rounding",
}  # fmt: skip


def check(case: Case) -> dict[str, np.ndarray]:
    """Run a case by both backends."""
    want, got = case.run(helpers.Backend()), case.run(DeviceBackend())
    assert want.keys() == got.keys()
    for name, expected in want.items():
        assert got[name].dtype == expected.dtype
        assert got[name].shape == expected.shape
        bits = np.ascontiguousarray(expected).view(np.uint8)
        wrong = np.argwhere(np.ascontiguousarray(got[name]).view(np.uint8) != bits)
        assert not len(wrong), f"{name}: {len(wrong)} bytes differ, first at {wrong[0]}"
    return want


def make_case(
    rng: np.random.Generator,
    fmt: str,
    dtype: str,
    *,
    tokens: int = 7,
    q_dim: int = 24,
    rank: int = 512,
    rope: int = 64,
    index_rope: int = 64,
    **changes: Any,
) -> Case:
    """Make an ordinary step: some padding, some rows without a place or a position."""

    def rows(width: int) -> np.ndarray:
        return random_rows(rng, (tokens, width), oracle.DTYPES[dtype])

    slots = rng.permutation(max(16, tokens))[:tokens] - 1
    case = Case(
        fmt,
        {
            "positions": rng.integers(-1, ROWS + 1, tokens),
            "q_c": rows(q_dim),
            "q_rms_norm_w": weights(rng, q_dim),
            "q_rms_eps": 1e-6,
            "kv_c": rows(rank),
            "kv_rms_norm_w": weights(rng, rank),
            "kv_rms_eps": 1e-5,
            "k_pe": rows(rope) if rope else None,
            "k_rope_cos_sin_cache": cos_sin(ROWS, rope) if rope else None,
            "index_k": rows(128),
            "index_k_layer_norm_w": weights(rng, 128),
            "index_k_layer_norm_bias": weights(rng, 128) - 1,
            "index_k_layer_norm_eps": 1e-6,
            "index_k_rope_cos_sin_cache": cos_sin(ROWS, index_rope),
            "slot_mapping": slots,
            "indexer_slot_mapping": slots[::-1].astype(np.int32),
        },
    )
    for name, value in changes.items():
        setattr(case, name, value)
    return case


def test_the_combinations_are_all_that_are_built():
    built = {(s.format.layout, s.input.dtype) for s in registry.specialisations("norm_rope")}
    assert built == set(COMBINATIONS)


@every_combination
@pytest.mark.parametrize("pad", [0, 3, 8])
@pytest.mark.parametrize("rounding", ["fused", "staged"])
def test_every_specialisation(rng, fmt, dtype, pad, rounding):
    check(make_case(rng, fmt, dtype, pad=pad, options={"rounding": rounding}))


@every_combination
def test_only_what_is_wanted(rng, fmt, dtype):
    for outs in ((), ("kv_c_out",), ("k_pe_out",)):
        check(make_case(rng, fmt, dtype, outs=outs, topk=None, mla=None, indexer=None))
    check(make_case(rng, fmt, dtype, outs=(), mla=None))
    check(make_case(rng, fmt, dtype, outs=(), indexer=None))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("q_dim", [1, 100, 127, 511, 512, 513, 520, 528, 1536, 2048, 2560, 7168])
@pytest.mark.parametrize("pad", [0, 1])
def test_query_widths(rng, dtype, q_dim, pad):
    """By vectors, of which so many are asked for at once, and by element."""
    case = make_case(rng, dtype, dtype, q_dim=q_dim, tokens=3, pad=pad, topk=None, rank=16, rope=2)
    case.mla = case.indexer = None
    case.arrays["q_rms_norm_w"] = case.arrays["q_rms_norm_w"].astype(rng.choice(NUMBERS))
    check(case)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("number", NUMBERS, ids=str)
@pytest.mark.parametrize("past", [-16, 0, 16])
def test_a_block_shares_4_kib_of_the_querys_weights(rng, dtype, number, past):
    q_dim = 4096 // number.itemsize + past
    case = make_case(rng, dtype, dtype, q_dim=q_dim, tokens=5, topk=None, rank=16, rope=2)
    case.mla = case.indexer = None
    case.arrays["q_rms_norm_w"] = case.arrays["q_rms_norm_w"].astype(number)
    check(case)


@pytest.mark.parametrize("half", [1, 2, 3, 16, 31, 32, 33, 63, 64])
@pytest.mark.parametrize("interleave", [False, True])
def test_rotary_parts_of_the_indexers_key(rng, half, interleave):
    options = {"index_rope_interleave": interleave}
    check(make_case(rng, "bfloat16", "bfloat16", index_rope=2 * half, options=options))


@pytest.mark.parametrize("columns", [0, 1, 2, 3, 4, 5, 64, 513, 2048])
@pytest.mark.parametrize("behind", [0, 1, 4])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_rows_of_indices(rng, columns, behind, dtype):
    case = make_case(rng, "bfloat16", "bfloat16", topk=(columns, behind, dtype), tokens=5)
    case.mla = case.indexer = None
    want = check(case)
    assert np.all(want["topk"][:5, :columns] == -1)
    assert np.all(want["topk"][:, columns:] == 9)


@pytest.mark.parametrize("number", NUMBERS, ids=str)
@pytest.mark.parametrize("pad", [0, 1, 2])
def test_weights_and_tables_of_each_dtype_at_each_address(rng, number, pad):
    case = make_case(rng, "fp8_ds_mla", "bfloat16", pad=pad)
    for name in case.arrays:
        if "norm_w" in name or "bias" in name or "cos_sin" in name:
            case.arrays[name] = case.arrays[name].astype(F32).astype(number)
    check(case)


@every_combination
def test_caches_off_their_vectors(rng, fmt, dtype):
    size = helpers.STORAGE_DTYPES[fmt].itemsize
    for row_pad, block_pad, offset in ((size, 0, 256), (0, size, 256), (0, 0, 256 + size)):
        mla = {"row_pad": row_pad, "block_pad": block_pad, "offset": offset}
        check(make_case(rng, fmt, dtype, mla=mla, indexer={"block_pad": 1 + block_pad}))


@pytest.mark.parametrize("tokens", [1, 4, 17, 90])
def test_each_part_has_a_warp_a_token(rng, tokens, emulated):  # noqa: F811
    case = make_case(rng, "fp8_e4m3", "bfloat16", tokens=tokens, q_dim=512)
    del emulated.launches[:]
    check(case)
    assert len(emulated.launches) == 2  # a launch a call
    _, grid, block = emulated.launches[0]
    assert block == (32, 4)
    assert grid == 4 * -(-tokens // 4)


def test_a_launch_is_prepared_once(rng, emulated, monkeypatch):  # noqa: F811
    """A step whose arrays look the same takes nothing but addresses; nothing is allocated."""
    backend = DeviceBackend()
    case = make_case(rng, "bfloat16", "bfloat16")
    cache = helpers.make_cache(backend, "bfloat16", 3, 4)
    arrays = {
        name: backend.array(value) if isinstance(value, np.ndarray) else value
        for name, value in case.arrays.items()
    }
    layer = FusedNormRope(
        **{name: arrays[name] for name in LAYER if name in arrays},
        mla_kv_cache=cache.array,
        has_indexer=False,
    )
    step = {name: arrays[name] for name in arrays if name not in LAYER}
    out = backend.array(np.zeros((7, 24), oracle.BFLOAT16))
    layer(**step, q_c_out=out)
    compiled, launches = len(emulated.compiled), len(emulated.launches)
    with monkeypatch.context() as patch:
        patch.setattr(emulated, "allocate", None)
        patch.setattr(emulated, "empty", None)
        layer(**step, q_c_out=out)
    assert len(emulated.compiled) == compiled
    assert len(emulated.launches) == launches + 1


@st.composite
def cases(draw):
    """Draw anything that a caller may ask for."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    fmt, dtype = draw(st.sampled_from(COMBINATIONS))
    rank, rope = 512, 64
    if fmt != "fp8_ds_mla":
        rank = draw(st.sampled_from([512, 520]) | st.integers(1, 80))
        rope = 2 * draw(st.sampled_from([0, 32]) | st.integers(0, 70))
    case = make_case(
        rng,
        fmt,
        dtype,
        tokens=draw(st.integers(1, 30)),
        q_dim=draw(st.sampled_from([512, 1536]) | st.integers(1, 1100)),
        rank=rank,
        rope=rope,
        index_rope=2 * draw(st.integers(1, 64)),
    )
    case.pad = draw(st.integers(0, 9))
    names = st.lists(st.sampled_from(("q_c_out", "kv_c_out", "k_pe_out")), unique=True)
    case.outs = tuple(draw(names))
    rows = draw(st.sampled_from(["plain", "bits", "inf"]))
    for name in ("q_c", "kv_c", "k_pe", "index_k"):
        values = case.arrays[name]
        if values is not None and rows == "bits":
            values[:] = random_bits(rng, values.shape, values.dtype)
        elif values is not None and rows == "inf":
            values[rng.integers(len(values)), rng.integers(values.shape[1])] = np.inf
    for name in case.arrays:
        if "norm_w" in name or "bias" in name or "cos_sin" in name:
            values = case.arrays[name]
            number = draw(st.sampled_from(NUMBERS))
            case.arrays[name] = None if values is None else values.astype(F32).astype(number)
        if "eps" in name:
            case.arrays[name] = draw(st.sampled_from([0.0, 1e-6, 1.0]))
    case.mla = draw(st.sampled_from([None, {}, {"row_pad": 16}, {"block_pad": 4, "offset": 260}]))
    case.indexer = draw(st.sampled_from([None, {}, {"block_pad": 3}]))
    case.scale = draw(st.floats(width=32, min_value=2.0**-149, allow_infinity=False))
    case.options = {
        "rounding": draw(st.sampled_from(["fused", "staged"])),
        "scale_format": draw(st.sampled_from(["float32", "ue8m0"])),
        "index_rope_interleave": draw(st.booleans()),
        "has_indexer": draw(st.booleans()),
    }
    return case


@given(cases())
def test_any_case(drawn):
    check(drawn)


# --- keys that are ready --------------------------------------------------------------------------


@given(
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from(NUMBERS),
    tokens=st.integers(1, 30),
    pad=st.integers(0, 5),
    block_pad=st.integers(0, 5),
    scale_format=st.sampled_from(["ue8m0", "float32"]),
    kind=st.sampled_from(["bits", "plain"]),
)
def test_any_keys(seed, dtype, tokens, pad, block_pad, scale_format, kind):
    rng = np.random.default_rng(seed)
    k = {"bits": random_bits, "plain": random_rows}[kind](rng, (tokens, 128), dtype)
    slots = (rng.permutation(36)[:tokens] - 4).astype(rng.choice([np.int32, np.int64]))
    pools = []
    for backend in (helpers.Backend(), DeviceBackend()):
        cache = make_indexer_cache(backend, 5, 6, block_pad=block_pad)
        rows = helpers.surrounded(backend, k, lead=pad, pad=pad)
        given = (rows, cache.array, backend.array(slots), 128, scale_format)
        indexer_k_quant_and_cache(*given)
        pools.append(cache.bytes())
    np.testing.assert_array_equal(pools[1], pools[0])
