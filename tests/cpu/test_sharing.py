"""Arrays that share memory with what is written, and destinations that overlap themselves."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from cupy_mla import (
    GroupedCacheWriter,
    _validate,
    concat_and_cache_mla,
    cp_gather_indexer_k_quant_cache,
    fused_norm_rope,
    fused_q,
    gather_and_maybe_dequant_cache,
    gather_cache,
    get_layout,
    indexer_k_quant_and_cache,
    read_slots,
)
from tests import helpers, oracle
from tests.context_helpers import Step
from tests.fused_helpers import (
    arguments,
    assert_same_bits,
    both_ways,
    expect,
    make_indexer_cache,
    make_layer,
    run_function,
    run_object,
)
from tests.helpers import make_cache, make_layered_pool, rejected

F32 = np.float32
SHARE = "not share memory with"


# --- fused_norm_rope ------------------------------------------------------------------------------


def shifted(rows: np.ndarray, by: int) -> tuple[np.ndarray, np.ndarray]:
    """Give the rows in one buffer twice, the second time `by` elements further."""
    room = np.zeros(rows.size + by, rows.dtype)
    views = (room[: rows.size].reshape(rows.shape), room[by:].reshape(rows.shape))
    views[0][...] = rows
    return views


def q_c_one_row_further(given):
    given["q_c"], given["q_c_out"] = shifted(given["q_c"], 24)


def kv_c_one_row_further(given):
    given["kv_c"], given["kv_c_out"] = shifted(given["kv_c"], 512)


def q_c_out_in_kv_c(given):
    given["q_c_out"] = given["kv_c"][:, :24]


def k_pe_out_in_kv_c_out(given):
    given["kv_c_out"] = np.zeros_like(given["kv_c"])
    given["k_pe_out"] = given["kv_c_out"][:, 448:]


def k_pe_in_the_cache(given):
    given["k_pe"] = given["mla_kv_cache"].reshape(-1)[-5 * 64 :].reshape(5, 64)


#: Others than those that begin where what is written does, which come below.
NORM_ROPE = [
    (q_c_one_row_further, "q_c_out", "q_c"),
    (kv_c_one_row_further, "kv_c_out", "kv_c"),
    (q_c_out_in_kv_c, "q_c_out", "kv_c"),
    (k_pe_out_in_kv_c_out, "k_pe_out", "kv_c_out"),
    (k_pe_in_the_cache, "mla_kv_cache", "k_pe"),
]


@both_ways
@pytest.mark.parametrize(
    ("share", "blamed", "other"), NORM_ROPE, ids=[case[0].__name__ for case in NORM_ROPE]
)
def test_norm_rope_refuses_what_shares_memory(rng, run, share, blamed, other):
    backend = helpers.Backend()
    given = arguments(
        backend,
        make_layer(rng),
        mla_kv_cache=np.zeros((4, 4, 576), oracle.BFLOAT16),
        indexer_k_cache=np.zeros((3, 4, 132), np.uint8),
    )
    share(given)
    before = {name: np.array(value) for name, value in given.items()}
    operation = "fused_norm_rope" if run.__name__ == "run_function" else "FusedNormRope"
    with rejected(ValueError, operation, blamed, f"{SHARE} {other}, got"):
        run(given)
    for name, value in before.items():
        if value.dtype != object:
            np.testing.assert_array_equal(np.asarray(given[name]), value)


WRITTEN = (
    "q_c_out", "kv_c_out", "k_pe_out", "topk_indices_buffer", "mla_kv_cache", "indexer_k_cache",
)  # fmt: skip
READ = (
    "positions", "q_c", "q_rms_norm_w", "kv_c", "kv_rms_norm_w", "k_pe", "k_rope_cos_sin_cache",
    "index_k", "index_k_layer_norm_w", "index_k_layer_norm_bias", "index_k_rope_cos_sin_cache",
    "slot_mapping", "indexer_slot_mapping", "mla_k_scale",
)  # fmt: skip
IN_PLACE = {("q_c_out", "q_c"), ("kv_c_out", "kv_c"), ("k_pe_out", "k_pe")}


def in_one_room(given: dict, names: tuple[str, str]) -> np.ndarray:
    """Lay two arrays over one another, with what the second one holds; return the room."""
    room = np.ones(max(given[name].nbytes for name in names), np.uint8)
    for name in names:
        value = given[name]
        given[name] = np.ndarray(value.shape, value.dtype, room)
        given[name][...] = value
    return room


@pytest.mark.parametrize(
    ("run", "written", "other"),
    [
        (run, written, other)
        for run in (run_function, run_object)
        for place, written in enumerate(WRITTEN)
        for other in (*READ, *WRITTEN[place + 1 :])
        if (written, other) not in IN_PLACE
        # The function takes a scale on the host by its value.
        and not (run is run_function and other == "mla_k_scale")
    ],
)
def test_norm_rope_refuses_what_lies_in_anything_it_writes(rng, run, written, other):
    backend = helpers.Backend()
    layer = make_layer(rng)
    given = arguments(
        backend,
        layer,
        mla_kv_cache=np.zeros((4, 4, 576), np.uint8),
        mla_kv_cache_dtype="fp8_e4m3",
        mla_k_scale=np.ones(1, F32),
        indexer_k_cache=np.zeros((3, 4, 132), np.uint8),
        indexer_slot_mapping=layer.slots.copy(),
        topk_indices_buffer=np.zeros((5, 8), np.int32),
        q_c_out=np.zeros_like(layer.q_c),
        kv_c_out=np.zeros_like(layer.kv_c),
        k_pe_out=np.zeros_like(layer.k_pe),
    )
    room = in_one_room(given, (written, other))
    before = room.copy()
    operation = "fused_norm_rope" if run is run_function else "FusedNormRope"
    with pytest.raises(ValueError, match=SHARE) as caught:
        run(given)
    message = str(caught.value)
    blamed = [name for name in (written, other) if message.startswith(f"{operation}: {name} must")]
    assert blamed, message
    assert (other if blamed == [written] else written) in message.partition(SHARE)[2]
    np.testing.assert_array_equal(room, before)


def test_columns_of_one_buffer_share_nothing(rng):
    backend = helpers.Backend()
    layer = make_layer(rng)
    want = expect(layer, None, None)
    room = np.zeros((5, 24 + 512 + 64), oracle.BFLOAT16)
    outs = {"q_c_out": room[:, :24], "kv_c_out": room[:, 24:536], "k_pe_out": room[:, 536:]}
    fused_norm_rope(**arguments(backend, layer, **outs))
    assert_same_bits(room, np.concatenate([want.q_c, want.kv_c, want.k_pe], axis=1))


# --- fused_q and the indexer's insert -------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "blamed", "other"),
    [
        (("mqa_q_out", "index_q_out"), "mqa_q_out", "index_q_out"),
        (("mqa_q_out", "q_pe"), "mqa_q_out", "q_pe"),
        (("mqa_q_out", "ql_nope"), "mqa_q_out", "ql_nope"),
        (("index_q_out", "index_q"), "index_q_out", "index_q"),
        (("index_weights_out", "index_weights"), "index_weights_out", "index_weights"),
        (("index_q_out", "positions"), "index_q_out", "positions"),
        (("index_weights_out", "q_pe_cos_sin_cache"), "index_weights_out", "q_pe_cos_sin_cache"),
        (("mqa_q_out", "index_q_cos_sin_cache"), "mqa_q_out", "index_q_cos_sin_cache"),
        (("index_q_out", "index_q_cos_sin_cache"), "index_q_out", "index_q_cos_sin_cache"),
        (("mqa_q_out", "index_weights_out"), "mqa_q_out", "index_weights_out"),
        (("index_weights_out", "index_q_out"), "index_weights_out", "index_q_out"),
    ],
)
def test_fused_q_refuses_what_shares_memory(names, blamed, other):
    shapes = {
        "positions": ((2,), np.int64),
        "q_pe": ((2, 3, 8), F32),
        "q_pe_cos_sin_cache": ((4, 8), F32),
        "index_q": ((2, 4, 16), F32),
        "index_q_cos_sin_cache": ((4, 8), F32),
        "ql_nope": ((2, 3, 16), F32),
        "q_scale": ((1,), F32),
        "index_weights": ((2, 4), F32),
        "index_q_out": ((2, 4, 16), np.uint8),
        "index_weights_out": ((2, 4), F32),
        "mqa_q_out": ((2, 3, 24), np.uint8),
    }
    room = np.full(4096, 1, np.uint8)
    given = {"index_weights_softmax_scale": 1.0, "index_weights_head_scale": 1.0}
    for name, (shape, dtype) in shapes.items():
        buffer = room if name in names else np.ones(4096, np.uint8)
        given[name] = np.ndarray(shape, dtype, buffer)
    with rejected(ValueError, "fused_q", blamed, f"{SHARE} {other}, got"):
        fused_q(**given)
    assert np.all(room == 1)


def test_keys_in_their_own_cache_are_refused():
    cache = np.zeros((3, 4, 132), np.uint8)
    keys = cache.reshape(-1).view(F32)[: 3 * 128].reshape(3, 128)
    with rejected(ValueError, "indexer_k_quant_and_cache", "kv_cache", f"{SHARE} k, got"):
        indexer_k_quant_and_cache(keys, cache, np.arange(3))


def test_slots_in_the_cache_of_keys_are_refused():
    cache = np.zeros((3, 4, 132), np.uint8)
    slots = cache.reshape(-1).view(np.int64)[:3]
    slots[...] = 1, 2, 3
    before = cache.copy()
    with rejected(
        ValueError, "indexer_k_quant_and_cache", "kv_cache", f"{SHARE} slot_mapping, got"
    ):
        indexer_k_quant_and_cache(np.ones((3, 128), F32), cache, slots)
    np.testing.assert_array_equal(cache, before)


# --- insert ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["kv_c", "k_pe", "slot_mapping"])
@pytest.mark.parametrize("operation", ["insert", "bind", "concat_and_cache_mla"])
def test_inserts_refuse_what_lies_in_a_cache(rng, operation, name):
    pool = np.zeros((2, 8, 4, 576), F32)
    is_single = operation == "concat_and_cache_mla"
    leading = () if is_single else (2,)
    given = {
        "kv_c": rng.standard_normal((*leading, 3, 512), F32),
        "k_pe": rng.standard_normal((*leading, 3, 64), F32),
        "slot_mapping": np.array([4, 9, 30]),
    }
    value = given[name]
    flat = pool[1].reshape(-1).view(value.dtype)
    flat[: value.size] = value.reshape(-1)
    given[name] = flat[: value.size].reshape(value.shape)
    before = pool.copy()
    cache = "kv_cache" if is_single else "kv_caches[1]"
    with rejected(ValueError, operation, name, f"{SHARE} {cache}, got"):
        if is_single:
            concat_and_cache_mla(kv_cache=pool[1], **given)
        else:
            getattr(GroupedCacheWriter(list(pool)), operation)(**given)
    np.testing.assert_array_equal(pool, before)


def test_rows_between_the_caches_of_one_buffer_are_taken(rng):
    buffer = np.zeros((5, 4, 576), F32)
    caches, rows = list(buffer[:4].reshape(2, 2, 4, 576)), buffer[4]
    rows[...] = rng.standard_normal(rows.shape, F32)
    between = np.zeros((3, 2, 4, 576), F32)
    between[1, 0] = rows
    for first, second, source in ((*caches, rows), (between[0], between[2], between[1, 0])):
        kv = np.broadcast_to(source, (2, 4, 576))
        writer = GroupedCacheWriter([first, second])
        writer.insert(kv[..., :512], kv[..., 512:], np.arange(4))
        for cache in (first, second):
            np.testing.assert_array_equal(cache[0], rows)


# --- gather ---------------------------------------------------------------------------------------


def in_the_front_of(out: np.ndarray, values: list) -> np.ndarray:
    """Put an index array into the first bytes of an output."""
    array = np.array(values, np.int32)
    found = out.reshape(-1).view(np.int32)[: array.size].reshape(array.shape)
    found[...] = array
    return found


@pytest.mark.parametrize("name", ["block_table", "cu_seq_lens", "seq_starts"])
def test_gathers_refuse_indices_that_lie_in_out(name):
    out = np.zeros((4, 576), F32)
    given = {"block_table": [[1, 0]], "cu_seq_lens": [0, 4], "seq_starts": [1]}
    arrays = {key: np.array(values, np.int32) for key, values in given.items()}
    arrays[name] = in_the_front_of(out, given[name])
    before = out.copy()
    with rejected(ValueError, "gather_cache", name, f"{SHARE} out, got"):
        gather_cache(np.ones((2, 4, 576), F32), **arrays, out=out)
    np.testing.assert_array_equal(out, before)


def test_gathers_refuse_owners_that_lie_in_the_destination():
    dst = np.zeros((4, 576), F32)
    owners = in_the_front_of(dst, [0, 0, 0, 0])
    table, cu_seq_lens = np.array([[1, 0]], np.int32), np.array([0, 4], np.int32)
    cache = np.ones((2, 4, 576), F32)
    operation = "gather_and_maybe_dequant_cache"
    with rejected(ValueError, operation, "token_to_seq", f"{SHARE} dst, got"):
        gather_and_maybe_dequant_cache(cache, dst, table, cu_seq_lens, owners, 4, "auto", None)
    assert not dst.any()


@pytest.mark.parametrize("name", ["dst_k", "dst_scale"])
def test_gathers_of_indexer_keys_refuse_indices_that_lie_in_an_output(name):
    outputs = {"dst_k": np.zeros((4, 128), np.uint8), "dst_scale": np.zeros((4, 1), F32)}
    table = in_the_front_of(outputs[name], [[1, 0]])
    operation = "cp_gather_indexer_k_quant_cache"
    with rejected(ValueError, operation, "block_table", f"{SHARE} {name}, got"):
        cp_gather_indexer_k_quant_cache(
            np.ones((2, 4, 132), np.uint8),
            block_table=table,
            cu_seq_lens=np.array([0, 4], np.int32),
            **outputs,
        )
    np.testing.assert_array_equal(table, [[1, 0]])
    assert sum(int(np.count_nonzero(out.view(np.uint8))) for out in outputs.values()) == 1


# --- insert_context -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["kv", "positions", "slot_mapping", "norm_weight"])
def test_insert_context_refuses_what_lies_in_a_cache(rng, name):
    step = Step(helpers.Backend(), rng)
    pool = np.zeros((3, 8, 4, 576), oracle.BFLOAT16)
    writer = GroupedCacheWriter(list(pool))
    given = step.arguments()
    value = given[name]
    flat = pool[1].reshape(-1).view(value.dtype)
    flat[: value.size] = value.reshape(-1)
    given[name] = flat[: value.size].reshape(value.shape)
    before = pool.copy()
    with rejected(ValueError, "insert_context", name, f"{SHARE} kv_caches[1], got"):
        writer.insert_context(**given)
    np.testing.assert_array_equal(pool, before)


def test_insert_context_looks_at_the_caches_of_a_rebind(rng):
    step = Step(helpers.Backend(), rng)
    first, second = np.zeros((2, 3, 4, 4, 576), oracle.BFLOAT16)
    writer = GroupedCacheWriter(list(first))
    kv = first.reshape(-1)[: 4 * 3 * 576].reshape(4, 3, 576)
    given = step.arguments(kv=kv)
    writer.rebind(list(second))
    writer.insert_context(**given)
    given["kv"] = second.reshape(-1)[: 4 * 3 * 576].reshape(4, 3, 576)
    with rejected(ValueError, "insert_context", "kv", f"{SHARE} kv_caches[0]"):
        writer.insert_context(**given)


# --- caches that overlap themselves ---------------------------------------------------------------


def insert_ones(cache):
    rows = np.ones((1, 6), F32)
    concat_and_cache_mla(rows[:, :4], rows[:, 4:], cache, np.array([cache.shape[1] + 1]))


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((3, 4, 6), (24, 24, 4)), ((3, 4, 6), (48, 24, 4)), ((3, 4, 6), (72, -24, 4)),
     ((4, 3, 6), (24, 48, 4)), ((3, 4, 6), (0, 24, 4)), ((3, 4, 6), (-24, 24, 4))],
)  # fmt: skip
def test_blocks_whose_rows_overlap_are_refused(shape, strides):
    pool = np.zeros(200, F32)
    cache = as_strided(pool[100:], shape, strides)
    with rejected(ValueError, "concat_and_cache_mla", "kv_cache", "do not overlap", str(strides)):
        insert_ones(cache)
    with rejected(ValueError, "GroupedCacheWriter", "kv_caches", "do not overlap", layer=0):
        GroupedCacheWriter([cache], kv_lora_rank=4, rope_dim=2)
    assert not pool.any()


def test_blocks_of_the_indexer_that_overlap_are_refused():
    pool = np.zeros(3000, np.uint8)
    cache = as_strided(pool, (3, 4, 132), (264, 132, 1))
    with rejected(ValueError, "indexer_k_quant_and_cache", "kv_cache", "do not overlap"):
        indexer_k_quant_and_cache(np.ones((1, 128), F32), cache, np.array([3]))
    assert not pool.any()


def pools():
    """Give the ways in which rows of a pool may lie apart."""
    return {
        "layers in columns": np.zeros((3, 4, 5, 6), F32)[:, :, 2],
        "cross-layer": np.zeros((3, 5, 4, 6), F32)[:, 2],
        "transposed": np.zeros((4, 3, 6), F32).transpose(1, 0, 2),
        "blocks backwards": np.zeros((3, 4, 6), F32)[::-1],
        "rows backwards": np.zeros((3, 4, 6), F32)[:, ::-1],
        "every other row": np.zeros((3, 8, 6), F32)[:, ::2],
        "one block": as_strided(np.zeros(24, F32), (1, 4, 6), (0, 24, 4)),
        "one row": as_strided(np.zeros(18, F32), (3, 1, 6), (24, 0, 4)),
    }


@pytest.mark.parametrize("name", pools())
def test_pools_whose_rows_lie_apart_are_taken(name):
    cache = pools()[name]
    slot = cache.shape[1] + 1 if cache.shape[0] > 1 else 1
    rows = np.ones((1, 6), F32)
    concat_and_cache_mla(rows[:, :4], rows[:, 4:], cache, np.array([slot]))
    assert np.all(read_slots(cache, np.array([slot])) == 1)
    assert np.count_nonzero(cache) == 6


@pytest.mark.parametrize(
    ("num_blocks", "block_stride", "entry_stride", "fits"),
    [
        (3, 6, 6, False),
        (3, 12, 6, False),
        (3, 24, 6, True),
        (3, -24, 6, True),
        (3, 6, 18, True),
        (1, 0, 6, True),
        (None, 0, 6, True),
    ],
)
def test_blocks_known_by_strides_alone(num_blocks, block_stride, entry_stride, fits):
    pointers = helpers.FakeDevice((2,), "<i8")
    layout = get_layout("float32", kv_lora_rank=4, rope_dim=2)
    given = (None, pointers, 4, block_stride, entry_stride, None, layout, num_blocks, "float32")
    operation = "concat_and_cache_mla_grouped"
    if fits:
        _validate.grouped(operation, *given, (4, 2))
        return
    with rejected(ValueError, operation, "block_stride", f"{block_stride} and {entry_stride}"):
        _validate.grouped(operation, *given, (4, 2))


# --- layers of one writer -------------------------------------------------------------------------


def test_layers_that_share_memory_are_named():
    pool = np.zeros((5, 4, 6), F32)
    other = np.zeros((2, 4, 6), F32)
    sizes = {"kv_lora_rank": 4, "rope_dim": 2}
    for caches, first, second in (
        ([other, pool, pool[::-1]], 1, 2),
        ([pool[:3], other, pool[2:]], 0, 2),
        ([pool[1:], pool[:2]], 0, 1),
        ([pool.reshape(10, 2, 6), pool], 0, 1),
    ):
        with rejected(
            ValueError,
            "GroupedCacheWriter",
            f"kv_caches[{second}]"[:-3],
            f"kv_caches[{second}] must {SHARE} kv_caches[{first}], got",
        ):
            GroupedCacheWriter(caches, **sizes)
    writer = GroupedCacheWriter([pool, other], **sizes)
    with rejected(ValueError, "rebind", "kv_caches", f"{SHARE} kv_caches[0]", layer=1):
        writer.rebind([other, other[::-1]])
    writer.insert(np.ones((2, 1, 4), F32), np.ones((2, 1, 2), F32), np.array([0]))
    assert np.all(pool[0, 0] == 1)


def test_layers_of_one_pool_are_taken(rng):
    backend = helpers.Backend()
    caches = [cache.array for cache in make_layered_pool(backend, "fp8_ds_mla", 4, 3, 4)]
    assert GroupedCacheWriter(caches, "fp8_ds_mla").num_layers == 4
    sizes = {"kv_lora_rank": 4, "rope_dim": 2}
    columns = np.zeros((3, 4, 5, 6), F32)
    for layers in (
        [columns[:, :, layer] for layer in range(5)],
        [columns[::-1, :, layer] for layer in range(5)],
        [columns[:, :, 4], columns[:, ::-1, 0], columns[:, :2, 1]],
        [columns[:, layer] for layer in range(4)],
        list(columns[:, :, :, :].transpose(2, 1, 0, 3)),
    ):
        assert GroupedCacheWriter(layers, **sizes).num_layers == len(layers)


def test_layers_of_other_layouts_in_the_columns_of_one_pool_are_taken():
    pool = np.zeros((256, 64, 576 + 656 + 1152), np.uint8)
    caches = [pool[..., :576], pool[..., 576:1232], pool[..., 1232:].view(oracle.BFLOAT16)]
    writer = GroupedCacheWriter(caches, ["fp8", "fp8_ds_mla", "bfloat16"], [1.0, None, None])
    assert writer.num_layers == 3


def test_caches_of_an_odd_pool_are_taken_too():
    # Helpers put each cache in a pool of its own; its neighbours' bytes do not count.
    caches = [make_cache(helpers.Backend(), row_pad=16, block_pad=64).array for _ in range(3)]
    assert GroupedCacheWriter(caches).num_layers == 3
    keys = make_indexer_cache(helpers.Backend(), block_pad=64).array
    indexer_k_quant_and_cache(np.ones((1, 128), F32), keys, np.array([5]))
