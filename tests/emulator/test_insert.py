"""The insert kernel: where bytes go. Every byte of every pool is compared with the rules."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from cupy_mla._cuda import geometry, registry
from tests import oracle
from tests.emulator import harness
from tests.emulator.harness import COMBINATIONS, check, make_cache, make_case

every_specialisation = pytest.mark.parametrize(("fmt", "dtype"), COMBINATIONS)
ONE_OF_EACH_KIND = (
    ("bfloat16", "bfloat16"),
    ("float32", "float32"),
    ("fp8_e4m3", "bfloat16"),
    ("fp8_e5m2", "float32"),
    ("fp8_ds_mla", "bfloat16"),
)
one_of_each_kind = pytest.mark.parametrize(("fmt", "dtype"), ONE_OF_EACH_KIND)
FLAT = tuple(pair for pair in COMBINATIONS if pair[0] != "fp8_ds_mla")


def test_the_combinations_are_all_that_are_built():
    built = {(s.format.layout, s.input.dtype) for s in registry.specialisations("insert")}
    assert built == set(COMBINATIONS)


@every_specialisation
@pytest.mark.parametrize("mode", ["table", "live", "scales", "mapped", "pointers"])
def test_every_specialisation_by_every_way_to_name_caches(device, rng, fmt, dtype, mode):
    case = make_case(rng, fmt, dtype, layers=3, tokens=17, blocks=5, block_size=3)
    check(device, case, mode)


@every_specialisation
def test_one_layer_by_value(device, rng, fmt, dtype):
    case = make_case(rng, fmt, dtype, layers=1)
    check(
        device, replace(case, kv_c=case.kv_c[0], k_pe=case.k_pe[0], slots=case.slots[0]), "inline"
    )


@every_specialisation
def test_layers_with_geometries_of_their_own(device, rng, fmt, dtype):
    case = make_case(rng, fmt, dtype, layers=3, tokens=9)
    case.caches = [
        make_cache(fmt, blocks=4, block_size=4),
        make_cache(fmt, blocks=3, block_size=5, row_pad=32, block_pad=16),
        make_cache(fmt, blocks=16, block_size=1, row_pad=4, block_pad=8),
    ]
    case.slots = np.stack([rng.permutation(15)[:9] for _ in range(3)])
    check(device, case)


@one_of_each_kind
@pytest.mark.parametrize("row_pad", [0, 4, 8, 16])
@pytest.mark.parametrize("offset", [256, 260, 264, 272])
def test_caches_at_every_alignment_of_their_elements(device, rng, fmt, dtype, row_pad, offset):
    check(device, make_case(rng, fmt, dtype, row_pad=row_pad, block_pad=row_pad, offset=offset))


@pytest.mark.parametrize(("fmt", "dtype"), [("fp8_e4m3", "float16"), ("fp8_ds_mla", "bfloat16")])
@pytest.mark.parametrize(
    ("row_pad", "block_pad", "offset"), [(1, 0, 256), (0, 3, 256), (2, 5, 257)]
)
def test_byte_caches_at_any_address(device, rng, fmt, dtype, row_pad, block_pad, offset):
    case = make_case(rng, fmt, dtype, row_pad=row_pad, block_pad=block_pad, offset=offset)
    check(device, case)


@every_specialisation
@pytest.mark.parametrize("lead", [1, 2, 4, 8])
def test_rows_off_their_vectors(device, rng, fmt, dtype, lead):
    case = make_case(rng, fmt, dtype, tokens=7)
    wide = harness.values(rng, (2, 7, 512 + 64 + 2 * lead), dtype)
    wide[..., :lead] = wide[..., 512 + lead : 512 + 2 * lead] = np.nan
    case.kv_c = wide[..., lead : 512 + lead]
    case.k_pe = wide[..., 512 + 2 * lead :]
    check(device, case)


@one_of_each_kind
@pytest.mark.parametrize("part", ["kv_c", "k_pe"])
@pytest.mark.parametrize(("lead", "tail"), [(0, 1), (1, 15), (4, 12), (8, 9)])
def test_one_input_off_its_vectors_by_base_or_stride(device, rng, fmt, dtype, part, lead, tail):
    case = make_case(rng, fmt, dtype, tokens=7)
    rows = getattr(case, part)
    wide = harness.aligned_copy(np.pad(rows, ((0, 0), (0, 0), (lead, tail))))
    setattr(case, part, wide[..., lead : lead + rows.shape[-1]])
    check(device, case)


@every_specialisation
def test_rows_that_are_views_of_one_projection(device, rng, fmt, dtype):
    case = make_case(rng, fmt, dtype, layers=3, tokens=10)
    fused = harness.values(rng, (10, 3, 576), dtype)
    case.kv_c = fused[..., :512].transpose(1, 0, 2)
    case.k_pe = fused[..., 512:].transpose(1, 0, 2)
    check(device, case)


@one_of_each_kind
def test_tokens_in_reverse_and_one_row_for_all(device, rng, fmt, dtype):
    case = make_case(rng, fmt, dtype, tokens=6)
    check(device, replace(case, kv_c=case.kv_c[:, ::-1]))
    case.kv_c = np.broadcast_to(case.kv_c[:1, :1], case.kv_c.shape)
    check(device, case)


@one_of_each_kind
@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize("form", ["each", "one", "broadcast", "strided"])
def test_slots_of_both_widths_and_any_strides(device, rng, fmt, dtype, index, form):
    case = make_case(rng, fmt, dtype, layers=3, tokens=8)
    slots = np.stack([rng.permutation(16)[:8] for _ in range(3)]).astype(index)
    slots[:, 2] = -1
    forms = {
        "each": slots,
        "one": slots[0],
        "broadcast": np.broadcast_to(slots[0], (3, 8)),
        "strided": np.repeat(np.repeat(slots, 2, axis=1), 2, axis=0)[::2, ::2],
    }
    check(device, replace(case, slots=forms[form]))


@every_specialisation
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_padding_and_slots_beyond_the_cache(device, rng, fmt, dtype, index):
    case = make_case(rng, fmt, dtype, tokens=9)
    info = np.iinfo(index)
    far = 2**40 + 17 if index is np.int64 else 2**30 + 17
    slots = np.array([[15, 16, -1, far, info.min, info.max, 0, -7, 5]] * 2, index)
    slots[1, 0] = 14
    outcome = check(device, replace(case, slots=slots))
    assert outcome.counters["slots_out_of_range"].tolist() == [3, 3]
    layer, token, slot = outcome.errors["slot"]
    assert slots[layer, token] == slot >= 16
    assert set(outcome.errors) == {"slot"}


@one_of_each_kind
def test_slots_beyond_the_cache_are_left_out_where_nobody_counts(device, rng, fmt, dtype):
    case = make_case(rng, fmt, dtype, layers=1, tokens=3)
    case.slots = np.array([3, 16, 2**40])
    expected = harness.expected_pools(case)
    harness.launch(device, case, counted=False)
    harness.assert_pools(case, expected)


@one_of_each_kind
def test_all_padding_leaves_everything_alone(device, rng, fmt, dtype):
    case = make_case(rng, fmt, dtype, tokens=16)
    case.kv_c[...] = np.nan
    check(device, replace(case, slots=np.full(16, -1), collect_stats=True))


@every_specialisation
@pytest.mark.parametrize("mode", ["table", "mapped"])
def test_a_list_of_slots_leaves_layers_out(device, rng, fmt, dtype, mode):
    case = make_case(rng, fmt, dtype, layers=4, tokens=5)
    rows = [rng.permutation(16)[:5].astype(np.int32) for _ in range(4)]
    case.slots = [rows[0], None, np.repeat(rows[2], 3)[::3], rows[3]]
    check(device, case, mode)


def test_sixteen_layers_with_slots_of_their_own(device, rng):
    case = make_case(rng, "fp8_e4m3", "bfloat16", layers=16, tokens=3)
    check(device, replace(case, slots=[rng.permutation(16)[:3] for _ in range(16)]))


@pytest.mark.parametrize(("fmt", "dtype"), FLAT)
@pytest.mark.parametrize(
    ("rank", "rope"), [(512, 0), (7, 3), (5, 0), (1, 1), (256, 64), (512, 32), (48, 8), (33, 96)]
)
def test_other_widths(device, rng, fmt, dtype, rank, rope):
    check(device, make_case(rng, fmt, dtype, rank=rank, rope=rope))


@pytest.mark.parametrize(("fmt", "dtype"), [("bfloat16", "bfloat16"), ("fp8_e5m2", "bfloat16")])
def test_rows_of_more_units_than_a_block_has_threads_for_a_row(device, rng, fmt, dtype):
    case = make_case(rng, fmt, dtype, rank=8192, rope=64, tokens=5, layers=1)
    case.collect_stats = True
    check(device, case)


@pytest.mark.parametrize("block_size", [1, 3, 48, 3328])
def test_block_sizes_that_are_no_power_of_two(device, rng, block_size):
    case = make_case(
        rng, "fp8_e4m3", "bfloat16", rank=16, rope=16, blocks=3, block_size=block_size, tokens=3
    )
    slots = np.array([block_size - 1, block_size, 2 * block_size])
    check(device, replace(case, slots=slots))


@one_of_each_kind
@pytest.mark.parametrize("stream_stores", [False, True])
def test_shapes_of_grid_and_block(device, rng, fmt, dtype, stream_stores):
    case = make_case(rng, fmt, dtype, layers=2, tokens=45, blocks=16)
    lanes = 32 if fmt == "fp8_ds_mla" else 24
    for rows, block_tokens in ((1, 1), (1, 7), (3, 3), (3, 32), (8, 45)):
        per_layer = -(-45 // block_tokens)
        case.shape = geometry.LaunchShape(2 * per_layer, (lanes, rows), per_layer, block_tokens)
        for cache in case.caches:
            cache.pool[:] = harness.SENTINEL
        outcome = check(device, replace(case, stream_stores=stream_stores, collect_stats=True))
        assert outcome.counters["rows_written"].sum() > 64


@pytest.mark.parametrize(("fmt", "dtype"), [("bfloat16", "bfloat16"), ("fp8_e4m3", "bfloat16")])
@pytest.mark.parametrize("tokens", [65536, 70001])
def test_more_tokens_than_a_grid_has_on_other_axes(device, rng, fmt, dtype, tokens):
    rank, rope = 16, 4
    cache = make_cache(fmt, rank, rope, blocks=tokens // 16 + 1, block_size=16)
    slots = rng.permutation(tokens)
    numbers = (np.arange(tokens) % 251).astype(np.float32)
    kv_c = np.repeat(numbers[:, None], rank, axis=1).astype(ml_dtypes.bfloat16)
    k_pe = np.repeat(numbers[:, None], rope, axis=1).astype(ml_dtypes.bfloat16)
    scales = [1.0] if fmt == "fp8_e4m3" else None
    case = harness.Insert(fmt, kv_c, k_pe, slots, [cache], scales)
    harness.launch(device, case, "inline")
    place = cache.geometry
    end = place.offset + place.num_blocks * place.block_stride
    rows = cache.pool[place.offset : end].reshape(-1, place.row_bytes)
    whole = np.concatenate([kv_c, k_pe], axis=1)
    stored = {"bfloat16": whole, "fp8_e4m3": oracle.encode_fp8(whole, 1.0, "fp8_e4m3")}
    want = stored[fmt].view(np.uint8)
    assert (rows[slots] == want).all()
    assert (rows[tokens:] == harness.SENTINEL).all()


@pytest.mark.parametrize("slot", [2**31 - 1, 2**31, 2**32 + 5, 2**40 + 17, 2**62 + 3])
@pytest.mark.parametrize("block_size", [1, 16, 48])
def test_slots_beyond_32_bits_are_divided_exactly(device, rng, slot, block_size):
    """Blocks that all lie on one another: the row shows the remainder, the stride the quotient."""
    case = make_case(rng, "fp8_e4m3", "bfloat16", layers=1, tokens=1, blocks=1, block_size=48)
    place = case.caches[0].geometry
    folded = replace(place, block_size=block_size, block_stride=0)
    case.caches = [harness.Cache(folded, case.caches[0].pool)]
    case.slots = np.array([slot])
    expected = case.caches[0].pool.copy()
    row = oracle.encode_row(case.kv_c[0, 0], case.k_pe[0, 0], "fp8_e4m3", case.scales[0])
    start = folded.offset + slot % block_size * folded.row_stride
    expected[start : start + len(row)] = np.frombuffer(row, np.uint8)
    harness.launch(device, case, bounded=False)
    harness.assert_pools(case, [expected])


def test_bytes_beyond_2_gib(device, rng):
    """A cache of 2.15 GB of which the kernel touches three rows; the rest is never mapped."""
    rows = 3_728_272
    pool = np.zeros(rows * 576, np.uint8)
    place = oracle.Geometry(0, rows // 16, 16, 16 * 576, 576, 576)
    case = make_case(rng, "fp8_e4m3", "bfloat16", layers=1, tokens=3)
    case.caches = [harness.Cache(place, pool)]
    for index in (np.int32, np.int64):
        case.slots = np.array([0, rows - 2, rows - 1], index)
        harness.launch(device, case, "inline")
        for token, start in enumerate((0, 2_147_483_520, 2_147_484_096)):
            row = oracle.encode_row(
                case.kv_c[0, token], case.k_pe[0, token], "fp8_e4m3", case.scales[0]
            )
            assert pool[start : start + 576].tobytes() == row
            pool[start : start + 576] = 0


def test_tokens_behind_the_slots_are_padding(device, rng):
    case = make_case(rng, "fp8_ds_mla", "bfloat16", tokens=8)
    case.slots = case.slots[:, :5].copy()
    check(device, case)
