"""GroupedCacheWriter: forms of slots, mixed layers, scales that live, bound calls, statistics."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest

from cupy_mla import GroupedCacheWriter, concat_and_cache_mla, get_layout
from tests import helpers, oracle
from tests.helpers import assert_bytes_equal, constant_rows, make_cache, random_rows

BF16 = oracle.BFLOAT16


def arrays_of(caches):
    return [cache.array for cache in caches]


def make_rows(rng, layers, tokens, dtype=BF16):
    return random_rows(rng, (layers, tokens, 512), dtype), random_rows(
        rng, (layers, tokens, 64), dtype
    )


def ones(layers, tokens=1):
    numbers = [[1.0] * tokens] * layers
    return constant_rows(numbers, 512, BF16), constant_rows(numbers, 64, BF16)


def insert_ones(backend, writer, slot):
    kv_c, k_pe = ones(writer.num_layers)
    writer.insert(backend.array(kv_c), backend.array(k_pe), backend.array(np.array([slot])))


def codes_of(caches, slot):
    """The one code that fills a row, layer by layer."""
    codes = []
    for cache in caches:
        row = cache.row(slot)
        assert np.all(row == row[0])
        codes.append(int(row[0]))
    return codes


# --- forms of slots -------------------------------------------------------------------------------


def mixed_caches(backend):
    row = 576
    return [
        make_cache(backend, "bfloat16"),
        make_cache(backend, "fp8_e4m3", num_blocks=3, block_size=6, block_pad=2 * row),
        make_cache(backend, "fp8_ds_mla", num_blocks=6, block_size=3, row_pad=16),
        make_cache(backend, "fp8_e5m2", four_d=True, dtype=oracle.E5M2),
        make_cache(backend, "bfloat16", num_blocks=18, block_size=1),
    ]


MIXED_SCALES = [None, 0.37, None, 3.0, None]
FORMATS = ["bfloat16", "fp8_e4m3", "fp8_ds_mla", "fp8_e5m2", "bfloat16"]


@pytest.mark.parametrize("form", ["matrix", "one row", "list", "list of 32 bit"])
def test_layers_of_mixed_layouts_and_geometries(backend, rng, form):
    caches = mixed_caches(backend)
    kv_c, k_pe = make_rows(rng, 5, 6)
    matrix = np.stack([rng.permutation(np.array([0, 3, 15, 7, -1, 4])) for _ in range(5)])
    layers = list(matrix)
    if form == "one row":
        slots, layers = backend.array(matrix[0]), [matrix[0]] * 5
    elif form == "matrix":
        slots = backend.array(matrix)
    else:
        if form == "list of 32 bit":
            layers = [row.astype(np.int32) for row in layers]
        slots = [backend.array(row.copy()) for row in layers]
    before = helpers.pools_of(caches)
    writer = GroupedCacheWriter(arrays_of(caches), FORMATS, MIXED_SCALES)
    writer.insert(backend.array(kv_c), backend.array(k_pe), slots)
    for layer, cache in enumerate(caches):
        expected = before[id(cache.buffer)]
        scale = MIXED_SCALES[layer]
        oracle.insert(
            expected, cache.geometry, kv_c[layer], k_pe[layer], layers[layer], cache.fmt, scale
        )
        assert_bytes_equal(cache.bytes(), expected, cache.geometry)


def test_none_in_a_list_leaves_a_layer_out(backend, rng):
    caches = mixed_caches(backend)
    kv_c, k_pe = make_rows(rng, 5, 3)
    writer = GroupedCacheWriter(arrays_of(caches), FORMATS, MIXED_SCALES, collect_stats=True)
    slots = backend.array(np.array([1, 2, 3]))
    with helpers.unchanged(*caches[:2], caches[3]):
        writer.insert(backend.array(kv_c), backend.array(k_pe), [None, None, slots, None, slots])
    assert writer.stats()["rows_written"].tolist() == [0, 0, 3, 0, 3]
    with helpers.unchanged(*caches):
        writer.insert(backend.array(kv_c), backend.array(k_pe), [None] * 5)
    for layer in (2, 4):
        cache = caches[layer]
        expected = cache.bytes()
        oracle.insert(
            expected, cache.geometry, kv_c[layer], k_pe[layer], np.array([1, 2, 3]), cache.fmt
        )
        assert_bytes_equal(cache.bytes(), expected, cache.geometry)
        assert np.any(cache.row(1) != helpers.SENTINEL)


def test_no_slots_at_all_is_no_work(backend):
    caches = mixed_caches(backend)
    writer = GroupedCacheWriter(arrays_of(caches), FORMATS, MIXED_SCALES, collect_stats=True)
    kv_c, k_pe = ones(5)
    with helpers.unchanged(*caches):
        assert writer.insert(backend.array(kv_c), backend.array(k_pe), None) is None
    assert all(not np.any(counts) for counts in writer.stats().values())


@pytest.mark.parametrize("fmt", helpers.FORMATS)
def test_grouped_equals_one_by_one(backend, rng, fmt):
    dtype = helpers.INPUT_DTYPES[fmt]
    kv_c, k_pe = make_rows(rng, 3, 9, dtype)
    slots = np.stack([rng.permutation(23)[:9] - 3 for _ in range(3)])
    scales = helpers.default_scales(fmt, 3)
    grouped = [make_cache(backend, fmt, block_pad=32) for _ in range(3)]
    single = [make_cache(backend, fmt, block_pad=32) for _ in range(3)]
    inputs = backend.array(kv_c), backend.array(k_pe)
    helpers.insert_grouped(*inputs, arrays_of(grouped), backend.array(slots), fmt, scales)
    helpers.insert_one_by_one(*inputs, arrays_of(single), backend.array(slots), fmt, scales)
    assert np.any(grouped[0].bytes() != helpers.SENTINEL)
    for one, other in zip(grouped, single, strict=True):
        assert_bytes_equal(one.bytes(), other.bytes(), one.geometry)


def test_layers_may_share_one_cache_at_different_slots(backend, rng):
    cache = make_cache(backend)
    kv_c, k_pe = make_rows(rng, 2, 2)
    slots = np.array([[0, 5], [1, 6]])
    assert helpers.check_insert(helpers.insert_grouped, [cache, cache], kv_c, k_pe, slots)


def test_one_writer_takes_inputs_of_changing_length_and_strides(backend, rng):
    caches = [make_cache(backend, "fp8_e4m3") for _ in range(2)]
    writer = GroupedCacheWriter(arrays_of(caches), "fp8", [0.5, 2.0])
    for tokens, dtype in [(1, BF16), (7, BF16), (3, oracle.FLOAT16), (0, BF16), (7, np.float32)]:
        kv_c, k_pe = make_rows(rng, 2, tokens, dtype)
        slots = rng.permutation(16)[:tokens]
        for layer_slots in (slots, np.stack([slots, slots[::-1]]).astype(np.int32)):
            before = [cache.bytes() for cache in caches]
            writer.insert(
                helpers.surrounded(backend, kv_c, lead=tokens),
                backend.array(k_pe),
                backend.array(layer_slots),
            )
            for layer, cache in enumerate(caches):
                row = layer_slots if layer_slots.ndim == 1 else layer_slots[layer]
                oracle.insert(
                    before[layer],
                    cache.geometry,
                    kv_c[layer],
                    k_pe[layer],
                    row,
                    "fp8_e4m3",
                    [0.5, 2.0][layer],
                )
                assert_bytes_equal(cache.bytes(), before[layer], cache.geometry)


def test_rows_named_by_keyword(backend):
    caches = [make_cache(backend)]
    writer = GroupedCacheWriter(kv_caches=arrays_of(caches), kv_cache_dtype="auto", kv_scales=None)
    kv_c, k_pe = ones(1)
    slots = backend.array(np.array([3]))
    writer.insert(kv_c=backend.array(kv_c), k_pe=backend.array(k_pe), slot_mapping=slots)
    assert np.all(caches[0].values(3) == 0x3F80)


# --- scales ---------------------------------------------------------------------------------------


def fp8_writer(backend, scales, layers=3, **options):
    caches = [make_cache(backend, "fp8_e4m3") for _ in range(layers)]
    return GroupedCacheWriter(arrays_of(caches), "fp8", scales, **options), caches


def test_host_numbers_are_copied(backend):
    scales = [0.5, 1.0, 2.0]
    writer, caches = fp8_writer(backend, scales)
    scales[:] = [8.0, 8.0, 8.0]
    insert_ones(backend, writer, 1)
    assert codes_of(caches, 1) == [0x40, 0x38, 0x30]
    assert [float(scale) for scale in writer.kv_scales] == [0.5, 1.0, 2.0]
    update = [2.0, 2.0, 0.5]
    writer.update_scales(update)
    update[:] = [8.0, 8.0, 8.0]
    insert_ones(backend, writer, 2)
    assert codes_of(caches, 2) == [0x30, 0x30, 0x40]
    assert [float(scale) for scale in writer.kv_scales] == [2.0, 2.0, 0.5]


def test_one_array_of_scales_is_read_at_each_insert(backend):
    scales = backend.array(np.array([0.5, 1.0, 2.0], np.float32))
    writer, caches = fp8_writer(backend, scales)
    bound = writer.bind(*map(backend.array, ones(3)), backend.array(np.array([2])))
    insert_ones(backend, writer, 1)
    assert codes_of(caches, 1) == [0x40, 0x38, 0x30]
    scales[1] = 0.5
    scales[2] = 0.25
    insert_ones(backend, writer, 1)
    bound()
    assert codes_of(caches, 1) == codes_of(caches, 2) == [0x40, 0x40, 0x48]


@pytest.mark.parametrize("shape", [(), (1,)])
def test_scales_of_single_layers_are_read_at_each_insert(backend, shape):
    scales = [backend.array(np.full(shape, value, np.float32)) for value in (0.5, 1.0, 2.0)]
    writer, caches = fp8_writer(backend, scales)
    insert_ones(backend, writer, 1)
    assert codes_of(caches, 1) == [0x40, 0x38, 0x30]
    scales[0][...] = 2.0
    insert_ones(backend, writer, 1)
    assert codes_of(caches, 1) == [0x30, 0x38, 0x30]


def test_live_and_copied_scales_together(backend):
    live = backend.array(np.array([1.0], np.float32))
    writer, caches = fp8_writer(backend, [0.5, live, 2])
    live[...] = 2.0
    insert_ones(backend, writer, 1)
    assert codes_of(caches, 1) == [0x40, 0x30, 0x30]
    writer.update_scales([live, 0.5, live])
    live[...] = 1.0
    insert_ones(backend, writer, 1)
    assert codes_of(caches, 1) == [0x38, 0x40, 0x38]


def test_a_slice_of_a_larger_array_of_scales_is_live(backend):
    table = backend.array(np.array([9.0, 0.5, 1.0, 2.0, 9.0], np.float32))
    writer, caches = fp8_writer(backend, table[1:4])
    insert_ones(backend, writer, 1)
    assert codes_of(caches, 1) == [0x40, 0x38, 0x30]
    table[3] = 0.5
    insert_ones(backend, writer, 1)
    assert codes_of(caches, 1) == [0x40, 0x38, 0x40]


def test_live_scales_are_kept_alive():
    class Scales(np.ndarray):
        pass

    scales = np.array([0.5, 1.0, 2.0], np.float32).view(Scales)
    alive = weakref.ref(scales)
    writer, caches = fp8_writer(helpers.Backend(), scales)
    del scales
    gc.collect()
    assert alive() is not None
    insert_ones(helpers.Backend(), writer, 1)
    assert codes_of(caches, 1) == [0x40, 0x38, 0x30]
    writer.update_scales([1.0, 1.0, 1.0])
    gc.collect()
    assert alive() is None


def test_update_scales_reaches_bound_calls(backend):
    writer, caches = fp8_writer(backend, [0.5, 1.0, 2.0])
    bound = writer.bind(*map(backend.array, ones(3)), backend.array(np.array([4])))
    bound()
    assert codes_of(caches, 4) == [0x40, 0x38, 0x30]
    writer.update_scales(backend.array(np.array([2.0, 2.0, 1.0], np.float32)))
    bound()
    assert codes_of(caches, 4) == [0x30, 0x30, 0x38]


def test_scales_beside_layers_without_one(backend):
    caches = [
        make_cache(backend, "fp8_ds_mla"),
        make_cache(backend, "fp8_e4m3"),
        make_cache(backend, "bfloat16"),
    ]
    formats = [cache.fmt for cache in caches]
    writer = GroupedCacheWriter(arrays_of(caches), formats, [None, 0.5, None])
    insert_ones(backend, writer, 1)
    assert codes_of(caches[1:2], 1) == [0x40]
    writer.update_scales([None, 2.0, None])
    insert_ones(backend, writer, 1)
    assert codes_of(caches[1:2], 1) == [0x30]


def test_scales_that_are_shown(backend):
    writer, _ = fp8_writer(backend, [0.5, 1.0, 2.0])
    assert [float(scale) for scale in writer.kv_scales] == [0.5, 1.0, 2.0]
    live = backend.array(np.array([0.25, 1.0, 2.0], np.float32))
    writer.update_scales(live)
    assert [float(scale) for scale in writer.kv_scales] == [0.25, 1.0, 2.0]
    live[0] = 4.0
    assert [float(scale) for scale in writer.kv_scales] == [4.0, 1.0, 2.0]


# --- rebind and bind ------------------------------------------------------------------------------


def test_rebind_moves_inserts_and_bound_calls(backend, rng):
    old = mixed_caches(backend)
    new = [
        make_cache(backend, "bfloat16", block_pad=64),
        make_cache(backend, "fp8_e4m3", num_blocks=5, block_size=5),
        make_cache(backend, "fp8_ds_mla", num_blocks=1, block_size=20),
        make_cache(backend, "fp8_e5m2", dtype=oracle.E5M2),
        make_cache(backend, "bfloat16", num_blocks=7, block_size=3, row_pad=8),
    ]
    kv_c, k_pe = make_rows(rng, 5, 4)
    slots = np.array([0, 7, -1, 13])
    inputs = backend.array(kv_c), backend.array(k_pe), backend.array(slots)
    writer = GroupedCacheWriter(arrays_of(old), FORMATS, MIXED_SCALES)
    bound = writer.bind(*inputs)
    bound()
    after_first = [cache.bytes() for cache in old]
    writer.rebind(arrays_of(new))
    expected = [cache.bytes() for cache in new]
    bound()
    writer.insert(*inputs)
    for layer, cache in enumerate(new):
        oracle.insert(
            expected[layer],
            cache.geometry,
            kv_c[layer],
            k_pe[layer],
            slots,
            cache.fmt,
            MIXED_SCALES[layer],
        )
        assert_bytes_equal(cache.bytes(), expected[layer], cache.geometry)
        assert np.any(cache.row(7) != helpers.SENTINEL)
        assert_bytes_equal(old[layer].bytes(), after_first[layer], old[layer].geometry)


def test_rebind_takes_the_new_capacity(backend):
    writer, _ = fp8_writer(backend, [1.0], 1)
    small = [make_cache(backend, "fp8_e4m3", num_blocks=1)]
    large = [make_cache(backend, "fp8_e4m3", num_blocks=9)]
    writer.rebind(arrays_of(small))
    insert_ones(backend, writer, 15)
    assert writer.stats()["slots_out_of_range"].tolist() == [1]
    writer.rebind(arrays_of(large))
    insert_ones(backend, writer, 35)
    assert writer.stats()["slots_out_of_range"].tolist() == [1]
    assert codes_of(large, 35) == [0x38]


def test_a_bound_call_stores_what_its_buffers_hold_then(backend, rng):
    caches = [make_cache(backend, "fp8_e4m3") for _ in range(2)]
    writer = GroupedCacheWriter(arrays_of(caches), "fp8", [0.5, 2.0])
    kv_c, k_pe = make_rows(rng, 2, 4)
    slots = np.array([3, 1, -1, 9])
    arrays = [backend.array(array) for array in (kv_c.copy(), k_pe.copy(), slots.copy())]
    bound = writer.bind(*arrays)
    for step in range(3):
        kv_c, k_pe = make_rows(rng, 2, 4)
        slots = np.roll(slots, 1) + step
        for array, values in zip(arrays, (kv_c, k_pe, slots), strict=True):
            array[...] = backend.array(values)
        expected = [cache.bytes() for cache in caches]
        assert bound() is None
        for layer, cache in enumerate(caches):
            oracle.insert(
                expected[layer],
                cache.geometry,
                kv_c[layer],
                k_pe[layer],
                slots,
                "fp8_e4m3",
                [0.5, 2.0][layer],
            )
            assert_bytes_equal(cache.bytes(), expected[layer], cache.geometry)


def test_bound_calls_of_slot_lists(backend, rng):
    caches = [make_cache(backend) for _ in range(3)]
    writer = GroupedCacheWriter(arrays_of(caches))
    kv_c, k_pe = make_rows(rng, 3, 2)
    slots = [backend.array(np.array([4, 5])), None, backend.array(np.array([6, -1]))]
    with helpers.unchanged(caches[1]):
        writer.bind(backend.array(kv_c), backend.array(k_pe), slots)()
    for layer, row in ((0, [4, 5]), (2, [6])):
        for token, slot in enumerate(row):
            bits = np.concatenate([kv_c[layer, token], k_pe[layer, token]]).view(np.uint16)
            assert np.array_equal(caches[layer].values(slot), bits)


def test_binding_writes_nothing(backend):
    caches = [make_cache(backend)]
    writer = GroupedCacheWriter(arrays_of(caches))
    with helpers.unchanged(*caches):
        writer.bind(*map(backend.array, ones(1)), backend.array(np.array([3])))
        writer.warmup()


# --- counters and checks --------------------------------------------------------------------------

ALWAYS = {"slots_out_of_range", "positions_out_of_range"}
WITH_STATS = {"rows_written", "slots_padding", "nonfinite_elements", "saturated_elements"}


@pytest.mark.parametrize("collect", [False, True])
def test_names_and_form_of_the_counters(backend, collect):
    writer, _ = fp8_writer(backend, [1.0, 1.0, 1.0], collect_stats=collect)
    stats = writer.stats()
    assert set(stats) == (ALWAYS | WITH_STATS if collect else ALWAYS)
    for counts in stats.values():
        assert isinstance(counts, np.ndarray)
        assert counts.dtype == np.int64
        assert counts.tolist() == [0, 0, 0]


def test_counters_are_copies(backend):
    writer, _ = fp8_writer(backend, [1.0, 1.0, 1.0], collect_stats=True)
    first = writer.stats()["rows_written"]
    insert_ones(backend, writer, 2)
    assert first.tolist() == [0, 0, 0]
    assert writer.stats()["rows_written"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("fmt", helpers.FORMATS)
def test_counters_follow_the_rules_over_several_inserts(backend, rng, fmt):
    dtype = helpers.INPUT_DTYPES[fmt]
    caches = [make_cache(backend, fmt), make_cache(backend, fmt, num_blocks=2)]
    scales = [0.37, 1.5] if fmt in helpers.SCALED_FORMATS else None
    writer = GroupedCacheWriter(arrays_of(caches), fmt, scales, collect_stats=True)
    total = [dict.fromkeys(ALWAYS | WITH_STATS, 0) for _ in caches]
    for _ in range(3):
        kv_c = helpers.random_bits(rng, (2, 10, 512), dtype)
        k_pe = helpers.random_bits(rng, (2, 10, 64), dtype)
        slots = np.stack([rng.permutation(20)[:10], rng.permutation(20)[:10]])
        slots[rng.random((2, 10)) < 0.2] = -1
        writer.insert(backend.array(kv_c), backend.array(k_pe), backend.array(slots))
        for layer, cache in enumerate(caches):
            counts = oracle.statistics(
                kv_c[layer],
                k_pe[layer],
                slots[layer],
                cache.geometry.capacity,
                fmt,
                scales and scales[layer],
            )
            for name, count in counts.items():
                total[layer][name] += count
        stats = writer.stats()
        assert {name: counts.tolist() for name, counts in stats.items()} == {
            name: [layer[name] for layer in total] for name in stats
        }
    assert total[0]["nonfinite_elements"] > 0
    assert total[1]["slots_out_of_range"] > 0
    assert (total[0]["saturated_elements"] > 0) == (fmt in helpers.SCALED_FORMATS)


@pytest.mark.parametrize(
    ("fmt", "values", "count"),
    [
        ("fp8_e4m3", [448, 464, -464, 0, np.nan], 0),
        ("fp8_e4m3", [464.5, -480, 1e30, np.inf, -np.inf, np.nan], 5),
        ("fp8_e5m2", [57344, 61439, -61439, np.nan], 0),
        ("fp8_e5m2", [61440, -61440, 1e30, np.inf, np.nan], 4),
    ],
)
def test_what_counts_as_saturated(backend, fmt, values, count):
    caches = [make_cache(backend, fmt)]
    writer = GroupedCacheWriter(arrays_of(caches), fmt, [1.0], collect_stats=True)
    writer.insert(
        backend.array(helpers.row_of(values, 512, np.float32)),
        backend.array(helpers.row_of(values, 64, np.float32)),
        backend.array(np.array([0])),
    )
    assert writer.stats()["saturated_elements"].tolist() == [2 * count]
    nonfinite = int(np.sum(~np.isfinite(values)))
    assert writer.stats()["nonfinite_elements"].tolist() == [2 * nonfinite]


def test_rows_that_are_not_stored_do_not_count(backend):
    caches = [make_cache(backend)]
    writer = GroupedCacheWriter(arrays_of(caches), collect_stats=True)
    kv_c = np.full((1, 3, 512), np.nan, BF16)
    writer.insert(
        backend.array(kv_c),
        backend.array(kv_c[:, :, :64].copy()),
        backend.array(np.array([-1, 16])),
    )
    stats = {name: counts.tolist() for name, counts in writer.stats().items()}
    assert stats == {
        "slots_out_of_range": [1],
        "positions_out_of_range": [0],
        "rows_written": [0],
        "slots_padding": [1],
        "nonfinite_elements": [0],
        "saturated_elements": [0],
    }


def test_check_is_silent_when_all_is_well(backend, rng):
    writer, _ = fp8_writer(backend, [1.0, 1.0, 1.0], collect_stats=True)
    assert writer.check() is None
    insert_ones(backend, writer, 3)
    insert_ones(backend, writer, -1)
    assert writer.check() is None


def test_check_names_the_first_slot_beyond_a_cache_and_rearms(backend):
    writer, _ = fp8_writer(backend, [1.0, 1.0, 1.0])
    kv_c, k_pe = map(backend.array, ones(3, 4))
    writer.insert(kv_c, k_pe, backend.array(np.array([[0, 1, 2, 3], [0, -1, 77, 1], [0] * 4])))
    with pytest.raises(ValueError, match=r"layer 1\b.*token 2\b.*slot 77\b"):
        writer.check()
    assert writer.check() is None
    assert writer.stats()["slots_out_of_range"].tolist() == [0, 1, 0]
    writer.insert(kv_c, k_pe, backend.array(np.array([[5, 6, 7, 2**40 + 17]] * 3)))
    with pytest.raises(ValueError, match=rf"layer [012]\b.*token 3\b.*slot {2**40 + 17}\b"):
        writer.check()
    assert writer.stats()["slots_out_of_range"].tolist() == [1, 2, 1]


def test_check_on_numpy_takes_the_lowest_layer_then_token():
    backend = helpers.Backend()
    writer, _ = fp8_writer(backend, [1.0, 1.0, 1.0])
    kv_c, k_pe = ones(3, 4)
    writer.insert(kv_c, k_pe, np.array([[0, 1, 2, 3], [0, 50, 77, 1], [99] * 4]))
    with pytest.raises(ValueError, match=r"layer 1\b.*token 1\b.*slot 50\b"):
        writer.check()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("part", ["kv_c", "k_pe"])
@pytest.mark.parametrize("fmt", ["bfloat16", "fp8_e4m3", "fp8_ds_mla"])
def test_check_names_the_first_row_that_is_not_finite(backend, fmt, part, value):
    caches = [make_cache(backend, fmt) for _ in range(2)]
    scales = [1.0, 1.0] if fmt == "fp8_e4m3" else None
    inputs = dict(zip(("kv_c", "k_pe"), ones(2, 3), strict=True))
    inputs[part][1, 2, -1] = value
    inputs[part][1, 0, 0] = value  # its slot is padding
    slots = np.array([[4, 5, 6], [-1, 5, 11]])
    for collect in (False, True):
        writer = GroupedCacheWriter(arrays_of(caches), fmt, scales, collect_stats=collect)
        writer.insert(
            backend.array(inputs["kv_c"]), backend.array(inputs["k_pe"]), backend.array(slots)
        )
        if not collect:
            assert writer.check() is None
            continue
        with pytest.raises(ValueError, match=r"layer 1\b.*token 2\b.*slot 11\b"):
            writer.check()
        assert writer.check() is None


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf, -0.0])
def test_check_names_the_layer_of_a_live_scale_gone_bad(backend, value):
    scales = backend.array(np.array([1.0, 1.0, 1.0], np.float32))
    writer, _ = fp8_writer(backend, scales)
    insert_ones(backend, writer, 3)
    assert writer.check() is None
    scales[1] = value
    with pytest.raises(ValueError, match=r"layer 1\b"):
        writer.check()
    insert_ones(backend, writer, 3)  # not looked at by inserts
    scales[1] = 1.0
    assert writer.check() is None


# --- what a writer says about itself --------------------------------------------------------------


def test_layouts_and_numbers_of_layers_and_launches(backend):
    caches = mixed_caches(backend)
    writer = GroupedCacheWriter(arrays_of(caches), FORMATS, MIXED_SCALES)
    assert writer.num_layers == 5
    assert [layout.name for layout in writer.layouts] == FORMATS
    assert writer.num_launches == 4
    same = GroupedCacheWriter(arrays_of(caches[:1] + caches[4:]))
    assert same.num_launches == 1
    assert [layout.name for layout in same.layouts] == ["bfloat16", "bfloat16"]
    assert same.layouts[0] == get_layout("bfloat16")


def test_explain_names_every_layout_and_the_number_of_launches(backend):
    caches = mixed_caches(backend)
    writer = GroupedCacheWriter(arrays_of(caches), FORMATS, MIXED_SCALES)
    text = writer.explain()
    assert isinstance(text, str)
    assert "4" in text
    for name in set(FORMATS):
        assert name in text
    one = GroupedCacheWriter(arrays_of(caches[:1])).explain()
    assert one != text
    assert "fp8" not in one


def test_a_layout_stands_where_a_name_stands(backend, insert_path, rng):
    kv_c, k_pe = make_rows(rng, 2, 3)
    slots = np.array([5, 0, 14])
    for fmt in helpers.FORMATS:
        dtype = helpers.INPUT_DTYPES[fmt]
        rows = backend.array(kv_c.astype(dtype)), backend.array(k_pe.astype(dtype))
        scales = helpers.default_scales(fmt, 2)
        pools = []
        for name in (fmt, get_layout(fmt)):
            caches = [make_cache(backend, fmt) for _ in range(2)]
            insert_path(*rows, arrays_of(caches), backend.array(slots), name, scales)
            pools.append(caches[1].bytes())
        assert np.any(pools[0] != helpers.SENTINEL)
        assert_bytes_equal(pools[1], pools[0], caches[1].geometry)


def test_the_scale_format_of_a_writer_is_that_of_its_tiled_layers(backend):
    caches = [make_cache(backend, "fp8_ds_mla"), make_cache(backend, "fp8_e4m3")]
    formats = ["fp8_ds_mla", "fp8_e4m3"]
    writer = GroupedCacheWriter(arrays_of(caches), formats, [None, 1.0], scale_format="ue8m0")
    assert [layout.scale_format for layout in writer.layouts] == ["ue8m0", None]
    insert_ones(backend, writer, 3)
    assert caches[0].row(3)[512:528].view("<f4").tolist() == [2.0**-8] * 4
    assert caches[0].row(3)[0] == 0x78
    assert codes_of(caches[1:], 3) == [0x38]


# --- threads --------------------------------------------------------------------------------------


def test_threads_insert_into_disjoint_slots_of_one_writer(rng):
    backend = helpers.Backend()
    tokens, threads, rounds = 16, 8, 6
    caches = [
        make_cache(backend, fmt, num_blocks=16, block_size=8)
        for fmt in ("fp8_e4m3", "bfloat16", "fp8_ds_mla")
    ]
    formats = [cache.fmt for cache in caches]
    writer = GroupedCacheWriter(arrays_of(caches), formats, [0.37, None, None], collect_stats=True)
    inputs = [make_rows(rng, 3, tokens) for _ in range(threads)]
    failures = []
    start = threading.Barrier(threads)

    def work(number):
        try:
            start.wait()
            for round_number in range(rounds):
                slots = np.arange(tokens) + tokens * number
                slots = np.roll(slots, round_number)
                slots[0] = 10**6
                writer.insert(*inputs[number], slots)
        except Exception as error:  # an exception in a thread is lost otherwise
            failures.append(error)

    before = [cache.bytes() for cache in caches]
    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures
    for layer, cache in enumerate(caches):
        expected = before[layer]
        for number in range(threads):
            kv_c, k_pe = inputs[number]
            for round_number in range(rounds):
                slots = np.roll(np.arange(tokens) + tokens * number, round_number)
                slots[0] = 10**6
                oracle.insert(
                    expected,
                    cache.geometry,
                    kv_c[layer],
                    k_pe[layer],
                    slots,
                    cache.fmt,
                    [0.37, None, None][layer],
                )
        assert_bytes_equal(cache.bytes(), expected, cache.geometry)
    stats = writer.stats()
    assert stats["slots_out_of_range"].tolist() == [threads * rounds] * 3
    assert stats["rows_written"].tolist() == [threads * rounds * (tokens - 1)] * 3


def test_threads_call_the_single_operation(rng):
    backend = helpers.Backend()
    cache = make_cache(backend, "fp8_e4m3", num_blocks=16, block_size=8)
    kv_c, k_pe = make_rows(rng, 8, 16)
    before = cache.bytes()

    def work(number):
        slots = np.arange(16) + 16 * number
        for _ in range(10):
            concat_and_cache_mla(kv_c[number], k_pe[number], cache.array, slots, "fp8", 0.37)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for number in range(8):
        oracle.insert(
            before,
            cache.geometry,
            kv_c[number],
            k_pe[number],
            np.arange(16) + 16 * number,
            "fp8_e4m3",
            0.37,
        )
    assert_bytes_equal(cache.bytes(), before, cache.geometry)
