"""The query kernel against the NumPy backend: all bytes of all outputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_mla import fused_q
from tests import helpers, oracle
from tests.emulator.api.conftest import DeviceBackend, emulated  # noqa: F401
from tests.fused_helpers import cos_sin
from tests.helpers import random_bits, random_rows

F32 = np.float32
NUMBERS = (oracle.BFLOAT16, oracle.FLOAT16, oracle.FLOAT32)
ROWS = 16  # of the RoPE tables

any_dtype = pytest.mark.parametrize("dtype", NUMBERS, ids=str)


@dataclass
class Case:
    """A call as plain NumPy values; `pad` is elements behind each head of inputs and outputs."""

    arrays: dict[str, Any]
    pad: int = 0
    given_outs: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, backend: helpers.Backend) -> dict[str, np.ndarray]:
        """Run it; return all that was written."""
        place: dict[str, Any] = {}
        for name, values in self.arrays.items():
            place[name] = values
            if isinstance(values, np.ndarray):
                place[name] = backend.array(values)
                if self.pad and values.dtype.kind != "i" and values.ndim > 1:
                    place[name] = helpers.surrounded(backend, values, lead=self.pad, pad=self.pad)
        place |= self.options
        quantise = self.options.get("quantize_mqa", True)
        tokens, heads, rope = self.arrays["q_pe"].shape
        rank = self.arrays["ql_nope"].shape[2] if quantise else 0
        index_heads, index_width = self.arrays["index_q"].shape[1:]
        rooms = {}
        if self.given_outs:
            mqa = np.uint8 if quantise else self.arrays["q_pe"].dtype
            for name, shape, dtype in (
                ("mqa_q_out", (tokens + 1, heads, rank + rope + self.pad), mqa),
                ("index_q_out", (tokens + 1, index_heads, index_width + self.pad), np.uint8),
                ("index_weights_out", (tokens + 1, index_heads + self.pad), F32),
            ):
                rooms[name] = backend.array(np.full(shape, 3).astype(dtype))
                place[name] = rooms[name][..., self.pad :]
        made = fused_q(**place)
        written = {name: backend.to_numpy(room).copy() for name, room in rooms.items()}
        if not self.given_outs:
            for number, array in enumerate(made):
                if array is not None:
                    written[f"made {number}"] = np.array(backend.to_numpy(array))
        return written


def check(case: Case) -> None:
    """Run a case by both backends."""
    want, got = case.run(helpers.Backend()), case.run(DeviceBackend())
    assert want.keys() == got.keys()
    for name, expected in want.items():
        assert got[name].dtype.itemsize == expected.dtype.itemsize
        assert got[name].shape == expected.shape
        bits = np.ascontiguousarray(expected).view(np.uint8)
        wrong = np.argwhere(np.ascontiguousarray(got[name]).view(np.uint8) != bits)
        assert not len(wrong), f"{name}: {len(wrong)} bytes differ, first at {wrong[0]}"


def make_case(
    rng: np.random.Generator,
    dtype: Any,
    *,
    tokens: int = 5,
    heads: int = 6,
    rank: int = 512,
    rope: int = 64,
    index_heads: int = 7,
    index_width: int = 128,
    index_rope: int = 64,
    **changes: Any,
) -> Case:
    """Make an ordinary call, some of its positions beyond the tables."""
    case = Case(
        {
            "positions": rng.integers(-1, ROWS + 1, tokens),
            "q_pe": random_rows(rng, (tokens, heads, rope), dtype),
            "q_pe_cos_sin_cache": cos_sin(ROWS, rope),
            "index_q": random_rows(rng, (tokens, index_heads, index_width), dtype),
            "index_q_cos_sin_cache": cos_sin(ROWS, index_rope),
            "ql_nope": random_rows(rng, (tokens, heads, rank), dtype),
            "q_scale": 0.37,
            "index_weights": random_rows(rng, (tokens, index_heads), F32),
            "index_weights_softmax_scale": 128**-0.5,
            "index_weights_head_scale": 7**-0.5,
        }
    )
    for name, value in changes.items():
        setattr(case, name, value)
    return case


@any_dtype
@pytest.mark.parametrize("quantise", [True, False])
@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize("pad", [0, 1, 16])
def test_every_specialisation(rng, dtype, quantise, interleave, pad):
    options = {"quantize_mqa": quantise, "index_rope_interleave": interleave}
    check(make_case(rng, dtype, pad=pad, options=options))


@any_dtype
@pytest.mark.parametrize("quantise", [True, False])
def test_new_outputs_and_no_indexer(rng, dtype, quantise):
    options = {"quantize_mqa": quantise}
    check(make_case(rng, dtype, options=options, given_outs=False))
    check(make_case(rng, dtype, options=options | {"has_indexer": False}, given_outs=False))


@pytest.mark.parametrize(
    ("rank", "rope"), [(16, 2), (1, 128), (1024, 64), (520, 130), (40, 6), (40, 8), (24, 8)]
)
@pytest.mark.parametrize("quantise", [True, False])
def test_sizes_of_heads(rng, rank, rope, quantise):
    options = {"quantize_mqa": quantise}
    check(make_case(rng, oracle.BFLOAT16, rank=rank, rope=rope, options=options))


@pytest.mark.parametrize("width", [1, 2, 64, 127, 128, 129, 300])
@pytest.mark.parametrize("half", [1, 16, 31, 32, 64])
@pytest.mark.parametrize("interleave", [True, False])
def test_sizes_of_the_indexers_heads(rng, width, half, interleave):
    rope = min(2 * half, width // 2 * 2) or 2
    width = max(width, rope)
    options = {"index_rope_interleave": interleave}
    case = make_case(rng, oracle.BFLOAT16, index_width=width, index_rope=rope, options=options)
    check(case)


@pytest.mark.parametrize("heads", [1, 4, 5, 16, 17, 33])
def test_numbers_of_heads(rng, heads):
    check(make_case(rng, oracle.BFLOAT16, heads=heads, index_heads=heads + 2, rank=16, tokens=2))


@pytest.mark.parametrize("tokens", [1, 17, 40])
def test_blocks_and_turns(rng, tokens, emulated):  # noqa: F811
    del emulated.launches[:]
    case = make_case(rng, oracle.BFLOAT16, tokens=tokens, heads=16, index_heads=64, rank=32)
    check(case)
    ((_, grid, block),) = emulated.launches
    assert block == (32, 4)
    assert grid % tokens == 0


@pytest.mark.parametrize("number", NUMBERS, ids=str)
@pytest.mark.parametrize("pad", [0, 1, 2])
def test_tables_and_weights_of_each_dtype(rng, number, pad):
    case = make_case(rng, oracle.BFLOAT16, pad=pad)
    for name in ("q_pe_cos_sin_cache", "index_q_cos_sin_cache", "index_weights"):
        case.arrays[name] = case.arrays[name].astype(number)
    check(case)


@any_dtype
@pytest.mark.parametrize("scale", [2.0**-149, 1e-30, 0.37, 1e30, 3.4e38])
def test_scales_of_any_size(rng, dtype, scale):
    case = make_case(rng, dtype)
    case.arrays["q_scale"] = float(F32(scale))
    with np.errstate(over="ignore"):
        for name in ("q_pe", "ql_nope"):
            values = case.arrays[name].astype(F32) * F32(scale)
            case.arrays[name] = values.astype(case.arrays[name].dtype)
    check(case)


@pytest.mark.parametrize("scale", [0.0, -0.0, -2.0, np.inf, -np.inf, np.nan, 0.5])
def test_what_a_live_scale_may_hold(rng, scale):
    """Without a NumPy backend to compare with: it refuses such a scale."""
    case = make_case(rng, F32, rank=5, rope=2, tokens=1, heads=1)
    case.arrays["positions"][:] = 0  # angle 0
    latent = np.array([1.0, -3.0, 0.0, np.inf, np.nan], F32)
    case.arrays["ql_nope"][:], case.arrays["q_pe"][:] = latent, [-0.0, 448.0]
    backend = DeviceBackend()
    given = {
        name: backend.array(value) if isinstance(value, np.ndarray) else value
        for name, value in case.arrays.items()
    }
    given["q_scale"] = backend.array(np.array([scale], F32))
    _, _, mqa = fused_q(**given, has_indexer=False)
    with np.errstate(all="ignore"):
        rotary = [F32(-0.0) * F32(1) - F32(448) * F32(0), F32(448)]
    row = np.concatenate([latent, np.array(rotary, F32)])
    want = oracle.encode_fp8(row, scale, "fp8_e4m3")
    np.testing.assert_array_equal(backend.to_numpy(mqa).view(np.uint8)[0, 0], want)


def quiet(values: np.ndarray) -> np.ndarray:
    """Make every NaN a quiet one: of others, NumPy's fmax may make a NaN."""
    bit = {"bfloat16": 0x40, "float16": 0x200, "float32": 0x400000}[values.dtype.name]
    with np.errstate(all="ignore"):
        missing = np.isnan(values.astype(F32))
    values.view(f"u{values.dtype.itemsize}")[missing] |= bit
    return values


@st.composite
def cases(draw):
    """Draw anything that a caller may ask for."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from(NUMBERS))
    width = draw(st.sampled_from([128, 128, 64]) | st.integers(2, 150))
    case = make_case(
        rng,
        dtype,
        tokens=draw(st.integers(1, 8)),
        heads=draw(st.integers(1, 20)),
        rank=draw(st.sampled_from([512, 32]) | st.integers(1, 60)),
        rope=2 * draw(st.sampled_from([32]) | st.integers(1, 70)),
        index_heads=draw(st.integers(1, 20)),
        index_width=width,
        index_rope=2 * min(width // 2, draw(st.sampled_from([32]) | st.integers(1, 75))),
    )
    rows = draw(st.sampled_from(["plain", "bits", "inf"]))
    for name in ("q_pe", "ql_nope", "index_q", "index_weights"):
        values = case.arrays[name]
        if rows == "bits":
            values[:] = quiet(random_bits(rng, values.shape, values.dtype))
        elif rows == "inf":
            values[rng.integers(len(values)), rng.integers(values.shape[1])] = np.inf
    for name in ("q_pe_cos_sin_cache", "index_q_cos_sin_cache", "index_weights"):
        with np.errstate(all="ignore"):
            case.arrays[name] = case.arrays[name].astype(draw(st.sampled_from(NUMBERS)))
    floats = st.floats(width=32, min_value=2.0**-149, allow_infinity=False)
    case.arrays["q_scale"] = draw(floats)
    case.pad = draw(st.integers(0, 9) | st.just(16))
    case.given_outs = draw(st.booleans())
    case.options = {
        "quantize_mqa": draw(st.booleans()),
        "has_indexer": draw(st.booleans()),
        "index_rope_interleave": draw(st.booleans()),
    }
    return case


@given(cases())
def test_any_case(drawn):
    check(drawn)
