"""The context kernel against the NumPy backend: every byte of every pool, and every counter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_mla import GroupedCacheWriter
from cupy_mla._cuda import registry
from tests import helpers, oracle
from tests.emulator.api.conftest import DeviceBackend, emulated  # noqa: F401
from tests.emulator.harness import COMBINATIONS
from tests.fused_helpers import cos_sin, weights
from tests.helpers import random_bits, random_rows

F32 = np.float32
NUMBERS = (oracle.BFLOAT16, oracle.FLOAT16, oracle.FLOAT32)
ROWS = 16  # of the RoPE table

every_combination = pytest.mark.parametrize(("fmt", "dtype"), COMBINATIONS)


@dataclass
class Case:
    """An insert_context as plain NumPy values; `pad` is elements between rows of each input."""

    formats: list[str]
    kv: np.ndarray
    weight: np.ndarray
    table: np.ndarray | None
    positions: np.ndarray | None
    slots: Any
    rank: int
    scales: list[float | None] | None = None
    pad: int = 0
    geometries: list[dict[str, int]] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    scale_format: str = "float32"
    collect_stats: bool = True
    times: int = 1

    def run(self, backend: helpers.Backend) -> tuple[list[np.ndarray], dict[str, list[int]], str]:
        """Store the rows; return pools, counters and the first errors' kinds."""
        rope = self.kv.shape[2] - self.rank
        caches = [
            helpers.make_cache(backend, fmt, rank=self.rank, rope=rope, **geometry)
            for fmt, geometry in zip(self.formats, self.geometries, strict=True)
        ]
        writer = GroupedCacheWriter(
            [cache.array for cache in caches],
            self.formats,
            self._scales(backend),
            kv_lora_rank=self.rank,
            rope_dim=rope,
            scale_format=self.scale_format,
            collect_stats=self.collect_stats,
        )
        slots = self.slots
        if isinstance(slots, list):
            slots = [None if own is None else backend.array(own) for own in slots]
        else:
            slots = backend.array(slots)
        for _ in range(self.times):
            writer.insert_context(
                self._place(backend, self.kv),
                None if self.positions is None else backend.array(self.positions),
                slots,
                self._place(backend, self.weight),
                None if self.table is None else self._place(backend, self.table),
                **self.options,
            )
        stats = {name: counts.tolist() for name, counts in writer.stats().items()}
        try:
            writer.check()
            text = ""
        except ValueError as error:
            text = str(error)
        return [cache.bytes() for cache in caches], stats, text

    def _scales(self, backend: helpers.Backend) -> Any:
        return self.scales

    def _place(self, backend: helpers.Backend, values: np.ndarray) -> Any:
        if not self.pad:
            return backend.array(values)
        return helpers.surrounded(backend, values, lead=self.pad, pad=self.pad)


def check(case: Case) -> dict[str, list[int]]:
    """Run a case by both backends."""
    want, want_stats, want_text = case.run(helpers.Backend())
    got, stats, text = case.run(DeviceBackend())
    for layer, (pool, expected) in enumerate(zip(got, want, strict=True)):
        wrong = np.flatnonzero(pool != expected)
        assert not wrong.size, (
            f"layer {layer} ({case.formats[layer]}): {wrong.size} bytes differ, first at "
            f"{wrong[0]}: {pool[wrong[0]]:02x} instead of {expected[wrong[0]]:02x}"
        )
    assert stats == want_stats
    for kind in ("slots lie", "positions lie", "a NaN or Inf"):
        assert (kind in text) == (kind in want_text)
    return stats


def make_case(
    rng: np.random.Generator,
    fmt: str,
    dtype: str,
    *,
    layers: int = 2,
    tokens: int = 9,
    rank: int = 512,
    rope: int = 64,
    **changes: Any,
) -> Case:
    """Make an ordinary case: some padding, some rows without a place or a position."""
    formats = [fmt] * layers
    capacity = 12
    slots = np.stack([rng.permutation(max(capacity + 4, tokens))[:tokens] for _ in range(layers)])
    slots[:, rng.integers(tokens)] = -1
    positions = rng.permutation(ROWS + 2)[:tokens] if tokens <= ROWS + 2 else None
    if positions is None:
        positions = rng.integers(0, ROWS + 1, tokens)
    case = Case(
        formats,
        random_rows(rng, (tokens, layers, rank + rope), oracle.DTYPES[dtype]),
        weights(rng, (layers, rank)),
        cos_sin(ROWS, rope) if rope else None,
        positions if rope else None,
        slots,
        rank,
        helpers.default_scales(formats, layers),
        geometries=[
            {"num_blocks": 3, "block_size": 4, "row_pad": 16 * layer, "block_pad": 32}
            for layer in range(layers)
        ],
    )
    for name, value in changes.items():
        setattr(case, name, value)
    return case


def test_the_combinations_are_all_that_are_built():
    built = {(s.format.layout, s.input.dtype) for s in registry.specialisations("context")}
    assert built == set(COMBINATIONS)


@every_combination
@pytest.mark.parametrize("pad", [0, 3, 8])
@pytest.mark.parametrize("rounding", ["fused", "staged"])
def test_every_specialisation(rng, fmt, dtype, pad, rounding):
    """Rows in registers (pads of 0 and 8 elements are vectors'), and by element."""
    check(make_case(rng, fmt, dtype, pad=pad, options={"rounding": rounding, "eps": 1e-5}))


@every_combination
def test_caches_off_their_vectors(rng, fmt, dtype):
    size = helpers.STORAGE_DTYPES[fmt].itemsize
    for row_pad, block_pad, offset in ((size, 0, 256), (0, size, 256), (0, 0, 256 + size)):
        geometry = {"row_pad": row_pad, "block_pad": block_pad, "offset": offset}
        case = make_case(rng, fmt, dtype, geometries=[geometry] * 2)
        check(case)


@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
@pytest.mark.parametrize("pad", [0, 1])
def test_tiles(rng, scale_format, pad):
    case = make_case(rng, "fp8_ds_mla", "bfloat16", tokens=12, layers=1)
    case.scale_format, case.pad, case.slots = scale_format, pad, rng.permutation(12)
    case.positions = np.arange(12)
    kv = case.kv[:, 0]
    kv[0] = 0
    kv[1, :128], kv[1, 128:256] = np.nan, -0.0
    kv[2, :4] = [1, np.inf, -2, 0]
    kv[3] = kv[3] * np.asarray(2.0**-130, kv.dtype)
    kv[4, 5] = 3e38
    case.weight[0, :128], case.weight[0, 128:256] = 0, 1e-30
    case.weight[0, 256:300] = 1e30
    case.options = {"eps": 0.0}
    check(case)


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("scale", [2.0**-149, 1e-30, 3.3e-5, 1.7, 1e30, 3.4e38])
@pytest.mark.parametrize("pad", [0, 1])
def test_scales_of_any_size(rng, fmt, dtype, scale, pad):
    case = make_case(rng, fmt, dtype, layers=1, pad=pad)
    case.scales = [float(F32(scale))]
    with np.errstate(over="ignore"):
        factor = np.exp2(rng.integers(-20, 20, 512)) * float(F32(scale))
        case.weight = (case.weight.astype(F32) * factor).astype(F32)
    check(case)


@every_combination
@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize(("rank", "rope"), [(512, 0), (512, 2), (512, 130), (7, 6), (513, 64)])
def test_other_widths(rng, fmt, dtype, rank, rope, neox):
    if fmt == "fp8_ds_mla":
        rank, rope = 512, 64
    check(make_case(rng, fmt, dtype, rank=rank, rope=rope, options={"is_neox": neox}))


@pytest.mark.parametrize("fmt", ["float32", "fp8_e4m3"])
@pytest.mark.parametrize("rank", [1, 4, 127, 128, 129, 511, 1024, 1100])
def test_trees_of_any_width(rng, fmt, rank):
    check(make_case(rng, fmt, "float32", rank=rank, rope=4, tokens=3))


@pytest.mark.parametrize("number", NUMBERS, ids=str)
@pytest.mark.parametrize("pad", [0, 1, 3, 4])
def test_weights_and_tables_of_each_dtype_at_each_address(rng, number, pad):
    case = make_case(rng, "fp8_ds_mla", "bfloat16", pad=pad)
    case.weight = case.weight.astype(F32).astype(number)
    case.table = case.table.astype(number)
    check(case)


@pytest.mark.parametrize("form", ["one", "each", "int32", "broadcast", "list", "nobody", "17"])
def test_forms_of_slots(rng, form):
    layers = 17 if form == "17" else 3
    case = make_case(rng, "fp8_e4m3", "bfloat16", layers=layers, rank=16, rope=4)
    slots = case.slots
    case.slots = {
        "one": slots[0],
        "each": slots,
        "int32": slots.astype(np.int32),
        "broadcast": np.broadcast_to(slots[0], slots.shape),
        "list": [slots[0].astype(np.int32), None, slots[2].astype(np.int32)],
        "nobody": [None] * 3,
        "17": list(slots),
    }[form]
    check(case)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_far_slots_and_positions(rng, dtype):
    case = make_case(rng, "bfloat16", "bfloat16", tokens=8)
    info = np.iinfo(dtype)
    case.slots = np.array([0, info.max, info.min, 3, 4, 5, -1, 12], dtype)
    case.positions = np.array([0, 1, 99, info.max, info.min, 15, 99, 99], dtype)
    stats = check(case)
    assert stats["slots_out_of_range"] == [2, 2]
    assert stats["positions_out_of_range"] == [2, 2]
    assert stats["slots_padding"] == [2, 2]
    assert stats["rows_written"] == [2, 2]


def test_layouts_side_by_side_and_twice(rng):
    case = make_case(rng, "bfloat16", "bfloat16", layers=5)
    case.formats = ["fp8_ds_mla", "bfloat16", "fp8_e4m3", "fp8_e5m2", "bfloat16"]
    case.scales = helpers.default_scales(case.formats, 5)
    case.times = 2
    stats = check(case)
    assert all(count % 2 == 0 for count in stats["slots_padding"])


def test_without_statistics_nothing_else_changes(rng):
    for fmt, dtype in COMBINATIONS:
        stats = check(make_case(rng, fmt, dtype, collect_stats=False))
        assert set(stats) == {"slots_out_of_range", "positions_out_of_range"}


@pytest.mark.parametrize("tokens", [1, 4, 17, 70, 300])
def test_blocks_and_turns(rng, tokens, emulated):  # noqa: F811
    case = make_case(rng, "fp8_e4m3", "bfloat16", layers=3, tokens=tokens, rank=512, rope=4)
    case.geometries = [{"num_blocks": 80, "block_size": 4}] * 3
    case.slots = rng.permutation(320)[:tokens]
    case.positions = rng.integers(0, ROWS, tokens)
    del emulated.launches[:]
    check(case)
    ((_, grid, block),) = emulated.launches
    assert block == (32, 4)
    assert grid * 4 >= tokens * 3 / 4


@st.composite
def cases(draw):
    """Draw anything that a caller may ask for."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    fmt, dtype = draw(st.sampled_from(COMBINATIONS))
    rank, rope = 512, 64
    if fmt != "fp8_ds_mla":
        rank = draw(st.sampled_from([512, 16, 520]) | st.integers(1, 80))
        rope = 2 * draw(st.sampled_from([0, 32]) | st.integers(0, 70))
    size = helpers.STORAGE_DTYPES[fmt].itemsize
    pads = st.sampled_from([0, 16]) | st.integers(0, 5).map(lambda n: n * size)
    layers = draw(st.integers(1, 4))
    case = (
        make_case(
            rng, fmt, dtype, layers=layers, tokens=draw(st.integers(1, 40)), rank=rank, rope=rope
        )
        if draw(st.booleans())
        else make_case(rng, fmt, dtype, layers=layers, rank=rank, rope=rope)
    )
    tokens = case.kv.shape[0]
    case.geometries = [
        {
            "num_blocks": draw(st.integers(1, 8)),
            "block_size": draw(st.integers(1, 9)),
            "row_pad": draw(pads),
            "block_pad": draw(pads),
            "offset": 256 + draw(pads),
        }
        for _ in range(layers)
    ]
    # Distinct slots: which of two tokens wins one is unspecified.
    case.slots = np.stack([rng.permutation(80)[:tokens] - 4 for _ in range(layers)])
    case.pad = draw(st.integers(0, 9))
    if draw(st.booleans()):
        case.kv[:] = random_bits(rng, case.kv.shape, case.kv.dtype)
    elif draw(st.booleans()):
        case.kv[:: max(1, tokens // 2), :, rng.integers(rank + rope)] = np.inf
    number = draw(st.sampled_from(NUMBERS))
    with np.errstate(over="ignore"):
        spread = np.exp2(rng.integers(-30, 30, case.weight.shape) * draw(st.integers(0, 4)))
        case.weight = (case.weight.astype(F32) * spread).astype(number)
    if case.table is not None:
        case.table = case.table.astype(draw(st.sampled_from(NUMBERS)))
    if case.scales is not None:
        floats = st.floats(width=32, min_value=2.0**-149, allow_infinity=False)
        case.scales = [draw(floats) for _ in case.scales]
    case.scale_format = draw(st.sampled_from(["float32", "ue8m0"]))
    case.collect_stats = draw(st.booleans())
    case.options = {
        "eps": draw(st.sampled_from([0.0, 1e-6, 1.0])),
        "is_neox": draw(st.booleans()),
        "rounding": draw(st.sampled_from(["fused", "staged"])),
    }
    return case


@given(cases())
def test_any_case(drawn):
    check(drawn)
