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


@pytest.mark.parametrize(("backend", "capability"), [
    (None, 120), (None, (12, 1)), ("flashinfer_sparse_sm120", None),
])  # fmt: skip
def test_block_scaled_rows_on_sm120_go_with_the_pair(backend, capability):
    chosen = select_cache_policy("fp8_ds_mla", backend, capability=capability)
    layout = get_layout("fp8_ds_mla", scale_format="ue8m0")
    assert chosen == CachePolicy("flashinfer_sparse_sm120", layout, False, False)


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
SM120 = '"fp8_ds_mla" with backend "flashinfer_sparse_sm120"'
EITHER = (
    '"fp8_e4m3" with backend "flashinfer_sparse" or "fp8_ds_mla" with backend "flashmla_sparse"'
)
ANY = f"{EITHER} or {SM120}"
REFUSED = [
    (("fp8",), {"capability": 90}, "kv_cache_dtype", [SM90, "got 'fp8'", "FlashAttention 3"]),
    (("fp8",), {"capability": (9, 0)}, "kv_cache_dtype", [SM90]),
    (("fp8_e5m2",), {"capability": 90}, "kv_cache_dtype", [SM90, "got 'fp8_e5m2'"]),
    (("fp8_e5m2",), {}, "kv_cache_dtype", [ANY, "no registered backend lists"]),
    (("auto",), {}, "kv_cache_dtype", [ANY, "got 'auto'", "unquantised"]),
    (("bfloat16",), {"capability": 90}, "kv_cache_dtype", [SM90, "unquantised"]),
    (("bfloat16", "flashmla_sparse"), {}, "kv_cache_dtype",
     ['be "fp8_ds_mla" with backend "flashmla_sparse"', "unquantised"]),
    (("float16", "flashinfer_sparse"), {}, "kv_cache_dtype", ['"fp8_e4m3"', "unquantised"]),
    (("fp8", "flashmla_sparse"), {}, "kv_cache_dtype",
     ['"fp8_ds_mla"', "cannot mix a bf16 query with an fp8 cache"]),
    (("fp8_ds_mla", "flashinfer_sparse"), {}, "kv_cache_dtype", ['"fp8_e4m3"', "'fp8_ds_mla'"]),
    (("fp8", "flashinfer_sparse"), {"capability": 90}, "backend", ["SM90", '"flashmla_sparse"']),
    (("fp8_ds_mla", "flashmla"), {}, "backend", ["flashinfer_sparse, flashmla_sparse"]),
    (("fp8_ds_mla",), {"capability": (8, 0)}, "capability",
     ["SM80", '9.x: "fp8_ds_mla" with backend "flashmla_sparse"; 10.x: ' + EITHER + "; 12.x: "
      + SM120]),
    (("fp8",), {"capability": 120}, "kv_cache_dtype", [SM120 + " on SM120", "got 'fp8'"]),
    (("fp8", "flashinfer_sparse"), {"capability": 120}, "backend", ["SM120", SM120]),
    (("fp8_ds_mla", "flashmla_sparse"), {"capability": 80}, "backend", ["SM80"]),
    (("fp8_ds_mla",), {"capability": 0}, "capability", ["(9, 0)"]),
    (("fp8_ds_mla",), {"capability": (9, 10)}, "capability", ["(9, 10)"]),
    (("fp8_ds_mla",), {"capability": (90, 0)}, "capability", ["got (90, 0)"]),
    (("fp8_ds_mla",), {"capability": 10**100}, "capability", ["an integer of 333 bits"]),
    (("fp8_ds_mla",), {"scale_format": "exact"}, "scale_format", ["ue8m0", "'exact'"]),
    (("fp8_ds_mla",), {"scale_format": "float32", "capability": 100}, "scale_format",
     ['"ue8m0"', "exponent"]),
    (("fp8_ds_mla",), {"scale_format": "float32", "capability": 120}, "scale_format",
     ['"ue8m0"', "exponent"]),
    (("fp8_ds_mla", "flashinfer_sparse_sm120"), {"scale_format": "float32"}, "scale_format",
     ['"ue8m0"', "any device", "exponent"]),
    ((get_layout("fp8_ds_mla"),), {"scale_format": "ue8m0"}, "scale_format", ["float32"]),
    ((get_layout("fp8_ds_mla"),), {"capability": 100}, "scale_format", ["ue8m0"]),
    ((get_layout("bfloat16"),), {}, "kv_cache_dtype", ["'bfloat16'", "unquantised"]),
    (("fp4",), {}, "kv_cache_dtype", ["fp8_ds_mla", "'fp4'"]),
    (("indexer_fp8",), {}, "kv_cache_dtype", [ANY]),
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


@pytest.mark.parametrize("capability", ["90", "sm90", ("9", "0")])
def test_a_capability_that_is_text_is_shown_as_text(capability):
    with rejected(TypeError, OPERATION, "capability", f"got {capability!r}"):
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


def test_powers_of_two_are_the_default_where_exponents_are_read(table):
    entry = {"layouts": ["fp8_ds_mla"], "fp8_query": False, "exponent_only": [10]}
    register_backend("mixed", architectures=[9, 10], **entry)
    for capability in (None, 90, 100):
        chosen = select_cache_policy("fp8_ds_mla", "mixed", capability=capability)
        assert chosen.scale_format == "ue8m0"
    register_backend("mixed", architectures=[9, 10], **entry, scale_format="float32", replace=True)
    assert select_cache_policy("fp8_ds_mla", "mixed", capability=90).scale_format == "float32"


def test_flags_and_numbers_of_numpy_are_taken(table):
    rule = register_backend(
        "numpy",
        architectures=np.array([9, 50]),
        layouts=np.array(["fp8"]),
        fp8_query=np.True_,
        cache_needs_fp8_view=np.False_,
    )
    assert rule == policy.BackendRule("numpy", (9, 50), ("fp8_e4m3",), True)
    assert {type(number) for number in rule.architectures} == {int}
    assert type(rule.fp8_query) is type(rule.cache_needs_fp8_view) is bool


def test_what_is_named_twice_counts_once(table):
    rule = register_backend(
        "twice", architectures=[9, 10, 9], layouts=["fp8", "fp8_e4m3"], fp8_query=True
    )
    assert rule.architectures == (9, 10)
    assert rule.layouts == ("fp8_e4m3",)


KNOWN = "fp8, bfloat16, float16, float32, fp8_e4m3, fp8_e5m2, fp8_ds_mla, got"
INTEGERS = "be a sequence of integers (9 for SM90), got "
NAMES = "be a sequence of names of layouts, got "


@pytest.mark.parametrize(
    ("changes", "exception", "argument", "text"),
    [
        ({"layouts": []}, ValueError, "layouts", "hold at least one name"),
        ({"layouts": ["auto"]}, ValueError, "layouts", f"hold names out of {KNOWN} 'auto'"),
        ({"layouts": ["fp4"]}, ValueError, "layouts", f"hold names out of {KNOWN} 'fp4'"),
        ({"layouts": ["indexer_fp8"]}, ValueError, "layouts", f"{KNOWN} 'indexer_fp8'"),
        ({"layouts": [get_layout("fp8")]}, TypeError, "layouts", f"{NAMES}a sequence with Cache"),
        ({"layouts": get_layout("fp8")}, TypeError, "layouts", f"{NAMES}CacheLayout"),
        ({"layouts": "fp8"}, TypeError, "layouts", f"{NAMES}str 'fp8'"),
        ({"architectures": []}, ValueError, "architectures", "at least one major number"),
        ({"architectures": [90]}, ValueError, "architectures", "major numbers (9 for SM90)"),
        ({"architectures": [9, 51]}, ValueError, "architectures", "from 1 to 50, got 51"),
        ({"architectures": [10**100]}, ValueError, "architectures", "an integer of 333 bits"),
        ({"architectures": 9}, TypeError, "architectures", f"{INTEGERS}int"),
        ({"architectures": np.array(9)}, TypeError, "architectures", f"{INTEGERS}ndarray"),
        ({"architectures": "9"}, TypeError, "architectures", f"{INTEGERS}str '9'"),
        ({"architectures": b"9"}, TypeError, "architectures", f"{INTEGERS}bytes b'9'"),
        ({"architectures": ["9"]}, TypeError, "architectures", f"{INTEGERS}a sequence with str"),
        ({"architectures": [True]}, TypeError, "architectures", f"{INTEGERS}a sequence with bool"),
        ({"exponent_only": [100]}, ValueError, "exponent_only", "9 for SM90"),
        ({"architectures": [9, 12], "exponent_only": [12, 10]}, ValueError, "exponent_only",
         "hold numbers of architectures (9, 12), got 10"),
        ({"exponent_only": 9}, TypeError, "exponent_only", f"{INTEGERS}int"),
        ({"name": ""}, ValueError, "name", "not empty, got ''"),
        ({"name": " "}, ValueError, "name", "not empty, got ' '"),
        ({"fp8_query": "no"}, TypeError, "fp8_query", "be a bool, got str"),
        ({"fp8_query": 1}, TypeError, "fp8_query", "be a bool, got int"),
        ({"fp8_query": None}, TypeError, "fp8_query", "be a bool, got NoneType"),
        ({"cache_needs_fp8_view": 0}, TypeError, "cache_needs_fp8_view", "be a bool, got int"),
        ({"replace": "no"}, TypeError, "replace", "be a bool, got str"),
        ({"scale_format": "float32", "exponent_only": [9]}, ValueError, "scale_format",
         '"ue8m0" for a backend that reads the exponent of a scale alone'),
    ],
    ids=str,
)  # fmt: skip
def test_a_refused_entry_says_what_is_taken(table, changes, exception, argument, text):
    before = policy.registered_backends()
    entry = {"name": "new", "architectures": [9], "layouts": ["fp8"], "fp8_query": True}
    with rejected(exception, "register_backend", argument, text):
        register_backend(**{**entry, **changes})
    assert policy.registered_backends() == before


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
