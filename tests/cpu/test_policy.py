"""select_cache_policy: what goes together, and what a refusal says to choose."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_mla import fused_q, get_layout, policy, register_backend, select_cache_policy
from cupy_mla.policy import CachePolicy
from tests import oracle
from tests.helpers import rejected

OPERATION = "select_cache_policy"


@pytest.fixture
def table():
    """Restore the table behind a test that changes it."""
    before = policy.registered_backends()
    yield
    for rule in policy.registered_backends():
        policy.unregister_backend(rule.name)
    for rule in before:
        register_backend(
            rule.name,
            architectures=rule.architectures,
            layouts=rule.layouts,
            fp8_query=rule.fp8_query,
            cache_needs_fp8_view=rule.cache_needs_fp8_view,
            scale_format=rule.scale_format,
            exponent_only=rule.exponent_only,
        )
    assert policy.registered_backends() == before


# --- what goes together ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
@pytest.mark.parametrize("backend", [None, "flashinfer_sparse"])
@pytest.mark.parametrize("capability", [None, 100, (10, 0), (10, 3), 103, np.int64(100)])
def test_flat_fp8_goes_with_an_fp8_query(name, backend, capability):
    chosen = select_cache_policy(name, backend, capability=capability)
    assert chosen == CachePolicy("flashinfer_sparse", get_layout("fp8"), True, True)
    assert chosen.scale_format is None
    query = object()
    assert chosen.mqa_query(None, query) is query


@pytest.mark.parametrize("backend", [None, "flashmla_sparse"])
@pytest.mark.parametrize("capability", [None, 90, (9, 0), 100, (10, 0)])
def test_block_scaled_rows_go_with_the_pair(backend, capability):
    chosen = select_cache_policy("fp8_ds_mla", backend, capability=capability)
    layout = get_layout("fp8_ds_mla", scale_format="ue8m0")
    assert chosen == CachePolicy("flashmla_sparse", layout, False, False)
    assert chosen.scale_format == "ue8m0"
    nope, rope = object(), object()
    assert chosen.mqa_query(nope, rope) == (nope, rope)


@pytest.mark.parametrize("capability", [None, 90])
def test_exact_scales_where_the_reader_multiplies_them(capability):
    chosen = select_cache_policy("fp8_ds_mla", capability=capability, scale_format="float32")
    assert chosen.scale_format == chosen.layout.scale_format == "float32"


def test_a_layout_is_taken_as_it_is():
    layout = get_layout("fp8_ds_mla", scale_format="float32")
    assert select_cache_policy(layout, capability=90).layout is layout
    flat = get_layout("fp8", kv_lora_rank=256)
    assert select_cache_policy(flat).layout is flat
    assert select_cache_policy(layout, scale_format="float32").scale_format == "float32"


def test_flat_layouts_ignore_the_scale_format():
    assert select_cache_policy("fp8", scale_format="ue8m0").scale_format is None


@pytest.mark.parametrize(("cache", "capability"), [("fp8", 100), ("fp8_ds_mla", 90)])
def test_the_policy_says_what_fused_q_has_to_make(cache, capability):
    chosen = select_cache_policy(cache, capability=capability)
    rows = np.ones((2, 3, 8), oracle.BFLOAT16)
    table = np.ones((4, 8), np.float32)
    _, _, mqa_q = fused_q(
        *(np.arange(2), rows, table, None, None, rows, 1.0, None, 1.0, 1.0, False),
        quantize_mqa=chosen.fp8_query,
    )
    query = chosen.mqa_query(rows, mqa_q)
    if chosen.fp8_query:
        assert query.shape == (2, 3, 16)
        assert query.dtype == oracle.E4M3
    else:
        assert query[0] is rows
        assert query[1].dtype == oracle.BFLOAT16


# --- what is refused, and what to choose ----------------------------------------------------------

SM90 = '"fp8_ds_mla" with backend "flashmla_sparse" on SM90'
EITHER = (
    '"fp8_e4m3" with backend "flashinfer_sparse" or "fp8_ds_mla" with backend "flashmla_sparse"'
)
REFUSED = [
    (("fp8",), {"capability": 90}, "kv_cache_dtype", [SM90, "got 'fp8'", "FlashAttention 3"]),
    (("fp8",), {"capability": (9, 0)}, "kv_cache_dtype", [SM90]),
    (("fp8_e5m2",), {"capability": 90}, "kv_cache_dtype", [SM90, "got 'fp8_e5m2'"]),
    (("fp8_e5m2",), {}, "kv_cache_dtype", [EITHER, "none of the registered backends reads"]),
    (("auto",), {}, "kv_cache_dtype", [EITHER, "got 'auto'", "unquantised"]),
    (("bfloat16",), {"capability": 90}, "kv_cache_dtype", [SM90, "unquantised"]),
    (("bfloat16", "flashmla_sparse"), {}, "kv_cache_dtype",
     ['be "fp8_ds_mla" with backend "flashmla_sparse"', "unquantised"]),
    (("float16", "flashinfer_sparse"), {}, "kv_cache_dtype", ['"fp8_e4m3"', "unquantised"]),
    (("fp8", "flashmla_sparse"), {}, "kv_cache_dtype",
     ['"fp8_ds_mla"', "cannot mix a bf16 query with an fp8 cache"]),
    (("fp8_ds_mla", "flashinfer_sparse"), {}, "kv_cache_dtype", ['"fp8_e4m3"', "'fp8_ds_mla'"]),
    (("fp8", "flashinfer_sparse"), {"capability": 90}, "backend", ["SM90", '"flashmla_sparse"']),
    (("fp8_ds_mla", "flashmla"), {}, "backend", ["flashinfer_sparse, flashmla_sparse"]),
    (("fp8_ds_mla",), {"capability": (12, 0)}, "capability",
     ["SM120", '9.x: "fp8_ds_mla" with backend "flashmla_sparse"; 10.x: ' + EITHER]),
    (("fp8_ds_mla", "flashmla_sparse"), {"capability": 80}, "backend", ["SM80"]),
    (("fp8_ds_mla",), {"capability": 0}, "capability", ["(9, 0)"]),
    (("fp8_ds_mla",), {"capability": (9, 10)}, "capability", ["(9, 10)"]),
    (("fp8_ds_mla",), {"scale_format": "exact"}, "scale_format", ["ue8m0", "'exact'"]),
    (("fp8_ds_mla",), {"scale_format": "float32", "capability": 100}, "scale_format",
     ['"ue8m0"', "exponent"]),
    ((get_layout("fp8_ds_mla"),), {"scale_format": "ue8m0"}, "scale_format", ["float32"]),
    ((get_layout("fp8_ds_mla"),), {"capability": 100}, "scale_format", ["ue8m0"]),
    ((get_layout("bfloat16"),), {}, "kv_cache_dtype", ["'bfloat16'", "unquantised"]),
    (("fp4",), {}, "kv_cache_dtype", ["fp8_ds_mla", "'fp4'"]),
    (("indexer_fp8",), {}, "kv_cache_dtype", [EITHER]),
]  # fmt: skip


@pytest.mark.parametrize(("given", "options", "argument", "fragments"), REFUSED, ids=str)
def test_a_refusal_names_the_option_to_choose(given, options, argument, fragments):
    with rejected(ValueError, OPERATION, argument, *fragments):
        select_cache_policy(*given, **options)


@pytest.mark.parametrize("backend", [["flashmla_sparse"], 9, {"a": 1}])
def test_a_backend_is_a_name(backend):
    with rejected(TypeError, OPERATION, "backend", "name", type(backend).__name__):
        select_cache_policy("fp8_ds_mla", backend)
    with rejected(TypeError, "unregister_backend", "name", type(backend).__name__):
        policy.unregister_backend(backend)


@pytest.mark.parametrize("capability", ["90", 9.0, True, (9, 0, 0), (9.0, 0), ()])
def test_what_is_no_capability(capability):
    with rejected(TypeError, OPERATION, "capability", "(9, 0)"):
        select_cache_policy("fp8", capability=capability)


def test_what_is_no_dtype():
    with rejected(TypeError, OPERATION, "kv_cache_dtype", "int"):
        select_cache_policy(8)


# --- more backends --------------------------------------------------------------------------------


def test_a_registered_backend_is_chosen_and_named(table):
    rule = register_backend(
        "dense_mla", architectures=[9, 12], layouts=["bfloat16", "float16"], fp8_query=False
    )
    assert policy.registered_backends()[-1] == rule
    for capability in (None, 90, 120):
        chosen = select_cache_policy("float16", capability=capability)
        assert chosen == CachePolicy("dense_mla", get_layout("float16"), False, False)
    with rejected(ValueError, OPERATION, "kv_cache_dtype", '"bfloat16" with backend "dense_mla"'):
        select_cache_policy("fp8", "dense_mla")
    fragments = ['"fp8_e4m3" with', "SM100", "only dense_mla can read"]
    with rejected(ValueError, OPERATION, "kv_cache_dtype", *fragments):
        select_cache_policy("float16", capability=100)


def test_the_first_registered_one_wins_unless_another_is_named(table):
    register_backend("second", architectures=[10], layouts=["fp8"], fp8_query=False)
    assert select_cache_policy("fp8").backend == "flashinfer_sparse"
    assert select_cache_policy("fp8", "second").backend == "second"


def test_an_entry_is_replaced_only_on_purpose(table):
    entry = {"architectures": [12], "layouts": ["fp8_ds_mla"], "fp8_query": False}
    with rejected(ValueError, "register_backend", "name", "'flashmla_sparse'"):
        register_backend("flashmla_sparse", **entry)
    assert select_cache_policy("fp8_ds_mla", capability=90).backend == "flashmla_sparse"
    register_backend("flashmla_sparse", **entry, scale_format="float32", replace=True)
    assert select_cache_policy("fp8_ds_mla", capability=120).scale_format == "float32"
    with pytest.raises(ValueError, match="SM90"):
        select_cache_policy("fp8_ds_mla", capability=90)


@pytest.mark.parametrize(
    ("changes", "exception", "argument"),
    [
        ({"name": 3}, TypeError, "name"),
        ({"layouts": []}, ValueError, "layouts"),
        ({"layouts": ["auto"]}, ValueError, "layouts"),
        ({"layouts": ["fp4"]}, ValueError, "layouts"),
        ({"layouts": "fp8"}, TypeError, "layouts"),
        ({"layouts": None}, TypeError, "layouts"),
        ({"layouts": [8]}, TypeError, "layouts"),
        ({"architectures": 9}, TypeError, "architectures"),
        ({"architectures": "9"}, TypeError, "architectures"),
        ({"architectures": [9.0]}, TypeError, "architectures"),
        ({"architectures": [0]}, ValueError, "architectures"),
        ({"exponent_only": ["9"]}, TypeError, "exponent_only"),
        ({"scale_format": np.dtype("f4")}, ValueError, "scale_format"),
        ({"scale_format": "e8m0"}, ValueError, "scale_format"),
    ],
)
def test_entries_that_do_not_fit(table, changes, exception, argument):
    before = policy.registered_backends()
    entry = {"name": "new", "architectures": [9], "layouts": ["fp8"], "fp8_query": True}
    with rejected(exception, "register_backend", argument):
        register_backend(**{**entry, **changes})
    assert policy.registered_backends() == before


def test_taking_out_what_is_not_there():
    with rejected(ValueError, "unregister_backend", "name", "flashmla_sparse"):
        policy.unregister_backend("flashmla")
