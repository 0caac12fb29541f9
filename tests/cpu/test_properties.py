"""Random shapes, strides, paddings, formats, scales and slots against the oracle, byte by byte."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from cupy_mla import GroupedCacheWriter, read_slots
from tests import helpers, oracle
from tests.helpers import FORMATS, SCALED_FORMATS, Cache, assert_bytes_equal, make_cache

INPUTS = {
    "bfloat16": [oracle.BFLOAT16],
    "float16": [oracle.FLOAT16],
    "float32": [oracle.FLOAT32],
    "fp8_e4m3": [oracle.BFLOAT16, oracle.FLOAT16, oracle.FLOAT32],
    "fp8_e5m2": [oracle.BFLOAT16, oracle.FLOAT16, oracle.FLOAT32],
    "fp8_ds_mla": [oracle.BFLOAT16],
}

scales = st.one_of(
    st.sampled_from([1.0, 0.5, 0.37, 448.0, 2.0**-130, 2.0**-149, 2.0**127, 1e-4]),
    st.floats(2.0**-149, float(np.finfo(np.float32).max), width=32),
)


@dataclass
class Layer:
    """Geometry, format, scale and slots of one layer."""

    fmt: str
    num_blocks: int
    block_size: int
    row_pad: int
    block_pad: int
    offset: int
    four_d: bool
    scale: float | None
    slots: list[int]


@dataclass
class Scenario:
    """One call of an insert."""

    dtype: np.dtype = field(repr=True)
    rank: int
    rope: int
    rows: int
    lead: int
    pad: int
    seed: int
    any_bits: bool
    slot_dtype: type
    shared_slots: bool
    scale_format: str
    layers: list[Layer]

    @property
    def tokens(self) -> int:
        """Slots of each layer."""
        return len(self.layers[0].slots)

    def values(self, width: int, seed: int) -> np.ndarray:
        """Rows of all layers."""
        rng = np.random.default_rng([self.seed, seed])
        shape = (len(self.layers), self.rows, width)
        make = helpers.random_bits if self.any_bits else helpers.random_rows
        return make(rng, shape, self.dtype)


@st.composite
def layers(draw, fmt, tokens, itemsize):
    num_blocks = draw(st.integers(1, 5))
    block_size = draw(st.sampled_from([1, 2, 3, 4, 5, 16]))
    capacity = num_blocks * block_size
    slot = st.one_of(
        st.integers(0, capacity - 1),
        st.integers(-3, capacity + 3),
        st.sampled_from([-1, -(2**31), 2**31 - 1]),
    )
    pad = st.sampled_from([0, 0, 1, 3, 8, 16, 33])
    return Layer(
        fmt,
        num_blocks,
        block_size,
        draw(pad) * itemsize,
        draw(pad) * itemsize,
        256 + itemsize * draw(st.sampled_from([0, 1, 2, 5, 8])),
        draw(st.booleans()),
        draw(scales) if fmt in SCALED_FORMATS else None,
        draw(st.lists(slot, min_size=tokens, max_size=tokens)),
    )


@st.composite
def scenarios(draw):
    dtype = draw(st.sampled_from([oracle.BFLOAT16, oracle.FLOAT16, oracle.FLOAT32]))
    possible = [fmt for fmt in FORMATS if dtype in INPUTS[fmt]]
    rank, rope = draw(
        st.sampled_from([(512, 64), (1, 1), (7, 3), (16, 4), (33, 0), (130, 14), (8, 96)])
    )
    if (rank, rope) != (512, 64):
        possible = [fmt for fmt in possible if fmt != "fp8_ds_mla"]
    count = draw(st.integers(1, 3))
    formats = draw(
        st.one_of(
            st.sampled_from(possible).map(lambda fmt: [fmt] * count),
            st.lists(st.sampled_from(possible), min_size=count, max_size=count),
        )
    )
    tokens = draw(st.integers(0, 7))
    all_layers = [
        draw(layers(fmt, tokens, helpers.STORAGE_DTYPES[fmt].itemsize)) for fmt in formats
    ]
    shared = draw(st.booleans())
    if shared:
        for layer in all_layers:
            layer.slots = all_layers[0].slots
    return Scenario(
        dtype,
        rank,
        rope,
        tokens + draw(st.sampled_from([0, 0, 1, 3])),
        draw(st.integers(0, 5)),
        draw(st.integers(0, 5)),
        draw(st.integers(0, 2**32 - 1)),
        draw(st.booleans()),
        draw(st.sampled_from([np.int32, np.int64])),
        shared,
        draw(st.sampled_from(["float32", "ue8m0"])),
        all_layers,
    )


def caches_of(backend, scenario: Scenario) -> list[Cache]:
    return [
        make_cache(
            backend,
            layer.fmt,
            layer.num_blocks,
            layer.block_size,
            scenario.rank,
            scenario.rope,
            row_pad=layer.row_pad,
            block_pad=layer.block_pad,
            offset=layer.offset,
            four_d=layer.four_d,
        )
        for layer in scenario.layers
    ]


def without_duplicates(scenario: Scenario) -> None:
    """Make every slot but the last of its kind padding."""
    for layer in scenario.layers:
        seen: set[int] = set()
        for index in reversed(range(len(layer.slots))):
            if layer.slots[index] in seen:
                layer.slots[index] = -1
            seen.add(layer.slots[index])


def run(backend, insert_path, scenario: Scenario) -> tuple[list[Cache], list[float | None]]:
    if not backend.last_duplicate_wins:
        without_duplicates(scenario)
    caches = caches_of(backend, scenario)
    kv_c = scenario.values(scenario.rank, 0)
    k_pe = scenario.values(scenario.rope, 1)
    slots = np.array([layer.slots for layer in scenario.layers], scenario.slot_dtype)
    slots = slots.reshape(len(caches), scenario.tokens)
    if scenario.shared_slots:
        slots = slots[0]
    layer_scales = [layer.scale for layer in scenario.layers]
    scaled = any(scale is not None for scale in layer_scales)
    assert helpers.check_insert(
        insert_path,
        caches,
        kv_c,
        k_pe,
        slots,
        layer_scales if scaled else None,
        scenario.scale_format,
        kv_c_array=helpers.surrounded(backend, kv_c, lead=scenario.lead, pad=scenario.pad),
        k_pe_array=helpers.surrounded(backend, k_pe, lead=scenario.pad, pad=scenario.lead),
    )
    return caches, layer_scales


PADDED = Scenario(
    oracle.BFLOAT16, 512, 64, 4, 1, 3, 5, False, np.int32, False, "ue8m0",
    [
        Layer("fp8_ds_mla", 3, 3, 16, 33, 257, False, None, [8, -1, 9]),
        Layer("fp8_e5m2", 2, 4, 1, 0, 261, True, 0.37, [7, 7, 0]),
        Layer("bfloat16", 1, 16, 2, 6, 266, False, None, [15, 0, 15]),
    ],
)  # fmt: skip


@given(scenario=scenarios())
@example(scenario=PADDED)
def test_pools_hold_what_the_oracle_says(backend, insert_path, scenario):
    run(backend, insert_path, scenario)


@given(
    scenario=scenarios(),
    out_dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    slot_dtype=st.sampled_from([np.int32, np.int64]),
    extra=st.lists(st.integers(-20, 100), max_size=12),
)
@example(scenario=PADDED, out_dtype="bfloat16", slot_dtype=np.int32, extra=[])
def test_rows_read_back_as_the_oracle_decodes_them(backend, scenario, out_dtype, slot_dtype, extra):
    caches, layer_scales = run(backend, helpers.insert_grouped, scenario)
    for layer, cache, scale in zip(scenario.layers, caches, layer_scales, strict=True):
        slots = np.array([*layer.slots, *extra], slot_dtype)
        pool = cache.bytes()
        got = read_slots(cache.array, backend.array(slots), cache.fmt, scale, out_dtype=out_dtype)
        width = scenario.rank + scenario.rope
        expected = oracle.read(pool, cache.geometry, slots, width, cache.fmt, scale, out_dtype)
        helpers.assert_values_equal(backend.to_numpy(got), expected)
        assert_bytes_equal(cache.bytes(), pool, cache.geometry)


@given(scenario=scenarios(), repeats=st.integers(1, 3))
@example(scenario=PADDED, repeats=2)
def test_counters_are_what_the_oracle_counts(backend, scenario, repeats):
    without_duplicates(scenario)
    caches = caches_of(backend, scenario)
    kv_c, k_pe = scenario.values(scenario.rank, 0), scenario.values(scenario.rope, 1)
    slots = np.array([layer.slots for layer in scenario.layers], scenario.slot_dtype)
    slots = slots.reshape(len(caches), scenario.tokens)
    writer = GroupedCacheWriter(
        [cache.array for cache in caches],
        [cache.fmt for cache in caches],
        [layer.scale for layer in scenario.layers],
        kv_lora_rank=scenario.rank,
        rope_dim=scenario.rope,
        scale_format=scenario.scale_format,
        collect_stats=True,
    )
    for _ in range(repeats):
        writer.insert(backend.array(kv_c), backend.array(k_pe), backend.array(slots))
    stats = writer.stats()
    wrong = False
    for index, (layer, cache) in enumerate(zip(scenario.layers, caches, strict=True)):
        expected = oracle.statistics(
            kv_c[index],
            k_pe[index],
            slots[index],
            cache.geometry.capacity,
            layer.fmt,
            layer.scale,
            scenario.scale_format,
        )
        for name, count in expected.items():
            assert stats[name][index] == repeats * count, name
        wrong = wrong or bool(expected["slots_out_of_range"] or expected["nonfinite_elements"])
    try:
        writer.check()
    except ValueError:
        assert wrong
    else:
        assert not wrong


@given(
    values=st.lists(st.floats(width=32), min_size=1, max_size=64),
    fmt=st.sampled_from(SCALED_FORMATS),
    scale=scales,
)
def test_reading_and_storing_again_changes_nothing(backend, values, fmt, scale):
    """What was decoded is stored as the same codes, unless the product left float32."""
    width = len(values)
    rows = np.array(values, np.float32)[None, None]
    cache, again = (make_cache(backend, fmt, 1, 1, width, 0) for _ in range(2))
    slots = backend.array(np.array([0]))
    helpers.insert_one_by_one(backend.array(rows), None, [cache.array], slots, fmt, [scale])
    decoded = backend.to_numpy(read_slots(cache.array, slots, fmt, scale))
    helpers.insert_one_by_one(
        backend.array(decoded[None].copy()), None, [again.array], slots, fmt, [scale]
    )
    codes = cache.row(0).view(oracle.CODE_DTYPES[fmt]).astype(np.float64)
    with np.errstate(all="ignore"):
        exact = np.isnan(codes) | (codes * np.float64(np.float32(scale)) == decoded[0])
        usual = np.abs(decoded[0]) >= np.finfo(np.float32).tiny
    kept = exact | (usual & np.isfinite(decoded[0]))
    assert np.array_equal(again.row(0)[kept], cache.row(0)[kept])
