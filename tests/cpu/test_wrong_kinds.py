"""Arguments of a kind that nobody means: each has a message of its own, none a raw error."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest

from cupy_mla import (
    GroupedCacheWriter,
    audit_cache,
    concat_and_cache_mla,
    fused_norm_rope,
    fused_q,
    gather_cache,
    get_layout,
    indexer_k_quant_and_cache,
    read_slots,
)
from tests import helpers, oracle, query_helpers
from tests.context_helpers import Step
from tests.cpu.test_from_layers import make_model_layers
from tests.fused_helpers import arguments, make_layer
from tests.helpers import rejected

F32 = np.float32
BF16 = oracle.BFLOAT16
HUGE = 10**400


def insert(**changes):
    given = {
        "kv_c": np.ones((3, 512), F32),
        "k_pe": np.ones((3, 64), F32),
        "kv_cache": np.zeros((2, 4, 576), np.uint8),
        "slot_mapping": np.arange(3),
        "kv_cache_dtype": "fp8",
        "scale": 1.0,
    }
    given.update(changes)
    concat_and_cache_mla(**given)


# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [HUGE, -HUGE, Fraction(HUGE), 10**6000], ids=range(4))
def test_scales_beyond_float32(scale):
    with rejected(ValueError, "concat_and_cache_mla", "scale", "finite and > 0"):
        insert(scale=scale)


def test_a_scale_may_be_any_real_number():
    insert(scale=Fraction(1, 2))


def test_a_huge_number_is_not_printed():
    with rejected(ValueError, "concat_and_cache_mla", "scale", "an integer of 1329 bits"):
        insert(scale=HUGE)


@pytest.mark.parametrize("scale", ["a", [1.0]])
def test_a_scale_is_a_number_or_an_array(rng, scale):
    given = query_helpers.arguments(helpers.Backend(), query_helpers.make_query(rng))
    given["q_scale"] = scale
    with rejected(TypeError, "fused_q", "q_scale", "a number or an array", type(scale).__name__):
        fused_q(**given)


@pytest.mark.parametrize("value", ["no", 1, None, np.array([True, False])], ids=repr)
@pytest.mark.parametrize("name", ["has_indexer", "index_rope_interleave", "quantize_mqa"])
def test_a_flag_is_a_bool(rng, name, value):
    given = query_helpers.arguments(helpers.Backend(), query_helpers.make_query(rng))
    given[name] = value
    with rejected(TypeError, "fused_q", name, "be a bool", type(value).__name__):
        fused_q(**given)


def test_whether_a_writer_counts_is_a_bool():
    caches = [np.zeros((2, 4, 576), np.float32)]
    with rejected(TypeError, "GroupedCacheWriter", "collect_stats", "be a bool", "int"):
        GroupedCacheWriter(caches, collect_stats=1)


@pytest.mark.parametrize(
    ("eps", "exception", "fragment"),
    [
        (HUGE, ValueError, "finite"),
        (-(10**6000), ValueError, "finite"),
        (1e-6 + 0j, TypeError, "complex"),
        (np.complex64(1e-6), TypeError, "complex64"),
    ],
    ids=range(4),
)
def test_eps(rng, eps, exception, fragment):
    given = arguments(helpers.Backend(), make_layer(rng))
    given["q_rms_eps"] = eps
    with rejected(exception, "fused_norm_rope", "q_rms_eps", fragment):
        fused_norm_rope(**given)


# --- dtypes and layouts ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "array", "text"),
    [
        ("kv_c", np.ones((3, 512), ">f4"), "float32 of foreign byte order (>f4)"),
        ("k_pe", np.ones((3, 64), ">f4"), "float32 of foreign byte order (>f4)"),
        ("slot_mapping", np.arange(3).astype(">i8"), "int64 of foreign byte order (>i8)"),
    ],
)
def test_arrays_of_another_byte_order(name, array, text):
    with rejected(TypeError, "concat_and_cache_mla", name, f"got {text}"):
        insert(**{name: array})


def test_caches_of_another_byte_order():
    with rejected(
        TypeError, "concat_and_cache_mla", "kv_cache", "native byte order", "float32 of foreign"
    ):
        insert(kv_cache=np.zeros((2, 4, 576), ">f4"), kv_cache_dtype="auto")


def test_the_dtype_of_kv_c_is_blamed_before_that_of_k_pe():
    kv_c, k_pe = np.ones((2, 3, 512), np.int32), np.ones((2, 3, 64), F32)
    writer = GroupedCacheWriter(list(np.zeros((2, 2, 4, 576), F32)))
    with rejected(TypeError, "insert", "kv_c", "bfloat16", "got int32"):
        writer.insert(kv_c, k_pe, np.arange(3))


def test_an_insert_offers_no_layout_of_the_indexer():
    with pytest.raises(ValueError, match=r"be one of auto, fp8, .*fp8_ds_mla, got 'fp7'"):
        insert(kv_cache_dtype="fp7")
    with pytest.raises(ValueError, match=r"fp8_ds_mla, indexer_fp8, got 'fp7'"):
        get_layout("fp7")


@pytest.mark.parametrize("scale_format", [np.dtype("f4"), np.float32, None, ["ue8m0"], 1])
def test_a_scale_format_is_a_text(scale_format):
    with rejected(ValueError, "get_layout", "scale_format", "str", repr(scale_format)):
        get_layout("fp8_ds_mla", scale_format=scale_format)
    with rejected(ValueError, "concat_and_cache_mla", "scale_format", repr(scale_format)):
        insert(scale_format=scale_format)
    with rejected(ValueError, "indexer_k_quant_and_cache", "scale_fmt", repr(scale_format)):
        indexer_k_quant_and_cache(
            np.ones((1, 128), F32),
            np.zeros((1, 4, 132), np.uint8),
            np.array([0]),
            scale_fmt=scale_format,
        )


@pytest.mark.parametrize(
    "out_dtype", [get_layout("fp8"), object(), None, 5, ("f4", 2), "f4,", "float64", np.int64]
)
def test_what_is_no_output_dtype(out_dtype):
    cache = np.zeros((2, 4, 576), F32)
    with rejected(TypeError, "read_slots", "out_dtype", "bfloat16, float16 or float32"):
        read_slots(cache, np.array([1]), out_dtype=out_dtype)
    with rejected(ValueError, "get_layout", "dtype", "bfloat16, float16 or float32"):
        get_layout("auto", dtype=out_dtype)


def test_dtypes_of_frameworks():
    torch = pytest.importorskip("torch")
    assert get_layout("auto", dtype=torch.bfloat16) == get_layout("bfloat16")
    assert get_layout("auto", dtype=torch.float16) == get_layout("float16")
    assert get_layout("auto", dtype=BF16.type) == get_layout("bfloat16")


# --- sizes of a layout ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "exception"), [(2.0, TypeError), ("2", TypeError), (True, TypeError), (-1, ValueError)]
)
def test_sizes_of_a_layout_are_counts(size, exception):
    layout = get_layout("fp8")
    with rejected(exception, "block_bytes", "block_size"):
        layout.block_bytes(size)
    with rejected(exception, "empty", "num_blocks"):
        layout.empty(size, 4)
    with rejected(exception, "empty", "block_size"):
        layout.empty(4, size)
    with rejected(exception, "offset_in_block", "row"):
        layout.offset_in_block("nope", size, 4)
    with rejected(exception, "offset_in_block", "block_size"):
        layout.offset_in_block("nope", 0, size)


def test_a_row_lies_in_its_block():
    layout = get_layout("indexer_fp8")
    assert layout.offset_in_block("scale", np.int32(3), np.int64(4)) == 4 * 128 + 12
    with rejected(ValueError, "offset_in_block", "row", "4 rows", "got 4"):
        layout.offset_in_block("scale", 4, 4)


# --- slots and rows -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slots", "exception", "fragment"),
    [
        ([[1, 2], [3]], ValueError, "unequal"),
        (["a"], TypeError, "integers"),
        ([10**30], TypeError, "integers"),
        ("12", TypeError, "array"),
        ({1, 2}, TypeError, "set"),
    ],
)
def test_slots_of_an_audit(slots, exception, fragment):
    with rejected(exception, "audit_cache", "slots", fragment):
        audit_cache(np.zeros((2, 4, 576), F32), "float32", slots=slots)


def test_tensors_without_memory_are_no_slots():
    torch = pytest.importorskip("torch")
    cache = np.zeros((2, 4, 576), F32)
    for slots in (torch.arange(3).to_sparse(), torch.arange(3, device="meta")):
        with rejected(TypeError, "audit_cache", "slots", "strided torch tensor"):
            audit_cache(cache, "float32", slots=slots)


def test_a_tensor_without_memory_is_no_list_of_layers():
    torch = pytest.importorskip("torch")
    for caches in (torch.eye(3).to_sparse(), torch.zeros(1, 2, 4, 576, device="meta")):
        with rejected(TypeError, "GroupedCacheWriter", "kv_caches", "list or tuple", "Tensor"):
            GroupedCacheWriter(caches)


@pytest.mark.parametrize("tokens", [2**40, 2**62, 2**63, 2**64, HUGE], ids=range(5))
def test_more_tokens_than_memory(tokens):
    cache, table = np.zeros((2, 4, 576), F32), np.array([[1]])
    with rejected(ValueError, "gather_cache", "num_tokens"):
        gather_cache(cache, table, np.array([0, 1]), num_tokens=tokens)
    if tokens < 2**63:
        with rejected(ValueError, "gather_cache", "cu_seq_lens", str(tokens)):
            gather_cache(cache, table, np.array([0, tokens]))


# --- messages -------------------------------------------------------------------------------------


def test_where_arrays_of_two_devices_may_be():
    rows = helpers.FakeDevice((3, 512), "<f4")
    with rejected(
        ValueError,
        "concat_and_cache_mla",
        ["kv_c", "k_pe"],
        "be on the same CUDA device as kv_cache (cpu), or both in host memory, got cuda:0",
    ):
        insert(kv_c=rows)


# --- layers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [None, 3])
def test_layers_are_a_sequence(layers):
    with rejected(TypeError, "from_layers", "layers", "sequence", type(layers).__name__):
        GroupedCacheWriter.from_layers(layers)


@pytest.mark.parametrize("attributes", ["kv_cache", [("kv_cache", "x")], 0])
def test_attributes_are_a_mapping(rng, attributes):
    layers = make_model_layers(Step(helpers.Backend(), rng))
    with rejected(TypeError, "from_layers", "attributes", "mapping"):
        GroupedCacheWriter.from_layers(layers, attributes=attributes)


@pytest.mark.parametrize("path", [3, None, ("kv_cache",)])
def test_paths_of_attributes_are_texts(rng, path):
    layers = make_model_layers(Step(helpers.Backend(), rng))
    with rejected(TypeError, "from_layers", "attributes", "kv_cache", "dotted path"):
        GroupedCacheWriter.from_layers(layers, attributes={"kv_cache": path})


def rotary_of(layers, number):
    return layers[number].self_attn.rotary_emb


@pytest.mark.parametrize(
    ("name", "change", "fragments"),
    [
        ("is_neox_style", lambda _: False, ["is_neox of layer 0 (True)", "got False"]),
        ("cos_sin_cache", lambda table: table + 1, ["cos_sin_cache of layer 0", "other values"]),
        ("cos_sin_cache", lambda table: table[:-1], ["(float32 [16, 64])", "[15, 64]"]),
        ("cos_sin_cache", lambda table: table.astype(BF16), ["got bfloat16 [16, 64]"]),
        ("cos_sin_cache", lambda _: None, ["a table", "got none"]),
    ],
)
def test_a_layer_that_rotates_in_another_way_is_named(rng, name, change, fragments):
    step = Step(helpers.Backend(), rng)
    layers = make_model_layers(step)
    rotary = rotary_of(layers, 2)
    setattr(rotary, name, change(getattr(rotary, name)))
    with rejected(ValueError, "from_layers", "layers", *fragments, layer=2):
        GroupedCacheWriter.from_layers(layers)


@pytest.mark.parametrize(
    ("path", "value", "exception", "fragment"),
    [
        ("kv_a_layernorm.weight", None, TypeError, "NoneType"),
        ("kv_a_layernorm.weight", [1.0], TypeError, "list"),
        ("kv_a_layernorm.variance_epsilon", "1", TypeError, "real number"),
        ("_k_scale", None, TypeError, "a number or an array"),
        ("_k_scale", "1", TypeError, "a number or an array"),
        ("_k_scale", 0, ValueError, "finite and > 0"),
        ("_k_scale", np.ones(1), TypeError, "float32 to be read in place"),
        ("_k_scale", np.ones(2, F32), ValueError, "one element"),
        ("kv_cache", None, TypeError, "NoneType"),
        ("kv_cache", np.zeros((2, 4, 575), np.uint8), ValueError, "576"),
        ("kv_cache", helpers.FakeDevice((2, 4, 576), "|u1"), ValueError, "same CUDA device"),
        ("kv_cache_dtype", "fp7", ValueError, "fp8_ds_mla"),
        ("kv_cache_dtype", 8, TypeError, "CacheLayout"),
        ("rotary_emb.is_neox_style", "yes", TypeError, "be a bool"),
        ("rotary_emb.is_neox_style", np.array([True, True]), TypeError, "be a bool"),
    ],
)
def test_what_a_layer_has_of_a_wrong_kind_is_named_by_its_path(
    rng, path, value, exception, fragment
):
    layers = make_model_layers(Step(helpers.Backend(), rng, "fp8_e4m3"))
    holder, _, name = path.rpartition(".")
    attention = layers[1].self_attn
    setattr(getattr(attention, holder) if holder else attention, name, value)
    with rejected(exception, "from_layers", f"layers[1]: self_attn.{path}", fragment):
        GroupedCacheWriter.from_layers(layers)


@pytest.mark.parametrize(
    ("table", "exception", "fragments"),
    [
        (np.zeros((20, 32), F32), ValueError, ["[positions, 64]", "[20, 32]"]),
        (np.zeros((20, 64)), TypeError, ["bfloat16", "float64"]),
        ([[1.0] * 64], TypeError, ["array", "list"]),
        (helpers.FakeDevice((20, 64), "<f4"), ValueError, ["same CUDA device as the caches"]),
    ],
    ids=range(4),
)
def test_a_table_that_no_context_can_use(rng, table, exception, fragments):
    layers = make_model_layers(Step(helpers.Backend(), rng))
    for number in range(3):
        rotary_of(layers, number).cos_sin_cache = table
    path = "self_attn.rotary_emb.cos_sin_cache"
    with rejected(exception, "from_layers", path, *fragments, layer=0):
        GroupedCacheWriter.from_layers(layers)


def test_layers_whose_caches_overlap(rng):
    layers = make_model_layers(Step(helpers.Backend(), rng))
    layers[2].self_attn.kv_cache = layers[0].self_attn.kv_cache[1:]
    with rejected(ValueError, "from_layers", "layers", "share memory with layers[0]", layer=2):
        GroupedCacheWriter.from_layers(layers)


def test_a_path_replaces_those_that_are_looked_at_else(rng):
    layers = make_model_layers(Step(helpers.Backend(), rng, "fp8_e4m3"))
    with rejected(TypeError, "from_layers", "layers", "attribute mla.scale", layer=0):
        GroupedCacheWriter.from_layers(layers, attributes={"k_scale": "mla.scale"})
    for layer in layers:
        layer.mla = SimpleNamespace(scale="1")
    with rejected(TypeError, "from_layers", "layers[0]: mla.scale", "got str"):
        GroupedCacheWriter.from_layers(layers, attributes={"k_scale": "mla.scale"})


def test_equal_tables_of_several_layers_are_one(rng):
    step = Step(helpers.Backend(), rng)
    layers = make_model_layers(step, eps=1e-6)
    for number in range(3):
        rotary_of(layers, number).cos_sin_cache = step.table.copy()
    rotary_of(layers, 2).cos_sin_cache = np.asfortranarray(step.table)
    want = step.expected(neox=True)
    writer = GroupedCacheWriter.from_layers(layers)
    writer.insert_context(**step.arguments(norm_weight=None, cos_sin_cache=None))
    step.check(want)


def test_another_eps_is_printed_as_it_was_given(rng):
    layers = make_model_layers(Step(helpers.Backend(), rng), eps=1e-5)
    layers[1].self_attn.kv_a_layernorm.variance_epsilon = 1e-6
    with rejected(ValueError, "from_layers", "layers", "layer 0 (1e-05), got 1e-06", layer=1):
        GroupedCacheWriter.from_layers(layers)


# --- an empty step --------------------------------------------------------------------------------


@pytest.mark.parametrize("flat", [True, False])
def test_a_context_of_no_tokens(rng, flat):
    step = Step(helpers.Backend(), rng, tokens=0)
    kv = np.zeros((0, 3 * 576) if flat else (0, 3, 576), BF16)
    step.writer().insert_context(**step.arguments(kv=kv))
    step.check([np.full_like(cache.bytes(), helpers.SENTINEL) for cache in step.caches])
