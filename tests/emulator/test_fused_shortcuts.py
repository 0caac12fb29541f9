"""Fused calls that are found again by what their arrays look like: they launch by address alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupy_mla import (
    FusedNormRope,
    GroupedCacheWriter,
    _arrays,
    _validate,
    fused_norm_rope,
    fused_q,
    indexer_k_quant_and_cache,
)
from cupy_mla._cuda import backend as cuda_backend
from cupy_mla._looks import UNKNOWN
from cupy_mla._shortcuts import Shortcuts
from tests import helpers, oracle
from tests.emulator import test_context as test_context_kernel
from tests.emulator import test_norm_rope as test_norm_rope_kernel
from tests.emulator import test_query as test_query_kernel
from tests.emulator.device import EmulatorDevice
from tests.helpers import random_rows


class CupyLike:
    """A host array with the attributes by which CuPy's are known."""

    def __init__(self, host: np.ndarray) -> None:
        self.host = host
        self.shape, self.strides, self.dtype = host.shape, host.strides, host.dtype
        self.data = SimpleNamespace(ptr=host.__array_interface__["data"][0], device_id=0)


CupyLike.__module__ = "cupy"


@pytest.fixture(autouse=True)
def emulated(device: EmulatorDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatorDevice]:
    empty = device.empty
    monkeypatch.setattr(cuda_backend, "_backends", {})
    monkeypatch.setattr(device, "empty", lambda *how: CupyLike(empty(*how)))
    cuda_backend.install(device)
    yield device


@pytest.fixture
def no_validation(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make every validator fail from when this is called."""

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("this call should have been known")

    def forbid() -> None:
        for name in ("context", "norm_rope_layer", "norm_rope_step", "fused_q", "indexer_insert"):
            monkeypatch.setattr(_validate, name, fail)

    return forbid


Run = Callable[[dict[str, Any]], Any]


def check(
    run: Run, arrays: dict[str, Any], forbid: Callable[[], None], kept: Collection[str] = ()
) -> None:
    """Call twice, the second time with arrays at other addresses, and compare all that is written.

    `kept` are the arrays that an object keeps, which stay where they are.
    """
    before = {name: value.host.copy() for name, value in arrays.items() if is_array(value)}
    made = run(arrays)
    after = {name: arrays[name].host.copy() for name in before}
    assert any(after[name].tobytes() != before[name].tobytes() for name in before)
    again = dict(arrays)
    for name, values in before.items():
        if name in kept:
            arrays[name].host[...] = values
        else:
            again[name] = CupyLike(values.copy())
    forbid()
    made_again = run(again)
    for name, values in after.items():
        assert again[name].host.tobytes() == values.tobytes(), name
    for first, second in zip(listed(made), listed(made_again), strict=True):
        own = [name for name in before if first is arrays[name]]
        if own:
            assert second is again[own[0]]
        elif first is None:
            assert second is None
        else:
            assert second is not first
            assert second.host.dtype == first.host.dtype
            assert second.host.tobytes() == first.host.tobytes()


def is_array(value: Any) -> bool:
    return isinstance(value, CupyLike)


def listed(made: Any) -> tuple[Any, ...]:
    return made if isinstance(made, tuple) else (made,)


def in_device(arrays: dict[str, Any]) -> dict[str, Any]:
    return {
        name: CupyLike(value) if isinstance(value, np.ndarray) else value
        for name, value in arrays.items()
    }


VARIANTS: dict[str, dict[str, Any]] = {
    "all": {},
    "new query": {"q_c_out": None},
    "no indexer": {"has_indexer": False},
    "no MLA cache": {"mla_kv_cache": None},
    "no slots": {"slot_mapping": None, "indexer_slot_mapping": None},
    "one slot array": {"indexer_slot_mapping": None},
    "no RoPE": {
        "k_rope_cos_sin_cache": None,
        "k_pe": None,
        "k_pe_out": None,
        "mla_kv_cache": None,
    },
    "nothing stored": {"mla_kv_cache": None, "indexer_k_cache": None, "kv_c_out": None},
    "live scale": {"mla_k_scale": np.array([0.25], np.float32)},
}


@pytest.mark.parametrize("fmt", ["bfloat16", "fp8_e4m3"])
@pytest.mark.parametrize("kind", ["object", "function"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_norm_rope(rng, no_validation, fmt, kind, variant):
    case = test_norm_rope_kernel.make_case(rng, fmt, "bfloat16", q_dim=512)
    arrays = case.arrays | {
        "mla_kv_cache": np.full((3, 4, 576), 7).astype(helpers.STORAGE_DTYPES[fmt]),
        "mla_kv_cache_dtype": fmt,
        "mla_k_scale": 0.05,
        "indexer_k_cache": np.full((3, 4, 132), 7, np.uint8),
        "topk_indices_buffer": np.full((7, 6), 9, np.int32),
    }
    for name, width in (("q_c_out", 512), ("kv_c_out", 512), ("k_pe_out", 64)):
        arrays[name] = np.full((7, width), 3).astype(oracle.BFLOAT16)
    given = in_device(arrays | VARIANTS[variant])
    if kind == "function":
        check(lambda arrays: fused_norm_rope(**arrays), given, no_validation)
        return
    kept = test_norm_rope_kernel.LAYER & given.keys()
    layer = FusedNormRope(**{name: given[name] for name in kept})

    def step(arrays: dict[str, Any]) -> Any:
        return layer(**{name: value for name, value in arrays.items() if name not in kept})

    check(step, given, no_validation, kept)


@pytest.mark.parametrize("quantise", [True, False])
@pytest.mark.parametrize("has_indexer", [True, False])
@pytest.mark.parametrize("outs", ["given", "new", "one given"])
@pytest.mark.parametrize("scale", [0.37, np.array([0.37], np.float32)], ids=["number", "array"])
def test_query(rng, no_validation, quantise, has_indexer, outs, scale):
    case = test_query_kernel.make_case(rng, oracle.BFLOAT16)
    arrays = case.arrays | {
        "q_scale": scale,
        "quantize_mqa": quantise,
        "has_indexer": has_indexer,
        "spare": np.zeros(1),  # so that something is written where all outputs are new
    }
    if outs != "new":
        arrays["index_weights_out"] = np.full((5, 7), 3, np.float32)
    if outs == "given":
        arrays["index_q_out"] = np.full((5, 7, 128), 3, np.uint8)
        arrays["mqa_q_out"] = (
            np.full((5, 6, 576), 3, np.uint8)
            if quantise
            else np.full((5, 6, 64), 3).astype(oracle.BFLOAT16)
        )

    def run(arrays: dict[str, Any]) -> Any:
        arrays = dict(arrays)
        arrays.pop("spare").host[0] = 1
        return fused_q(**arrays)

    check(run, in_device(arrays), no_validation)


def test_indexer(rng, no_validation):
    arrays = {
        "k": random_rows(rng, (5, 128), oracle.BFLOAT16),
        "kv_cache": np.full((3, 4, 132), 7, np.uint8),
        "slot_mapping": np.array([3, -1, 99, 0, 11]),
    }
    run = lambda arrays: indexer_k_quant_and_cache(**arrays)  # noqa: E731
    check(run, in_device(arrays), no_validation)


@pytest.mark.parametrize("formats", [["fp8_e4m3"] * 2, ["bfloat16", "fp8_ds_mla"]])
def test_context(rng, no_validation, formats):
    case = test_context_kernel.make_case(rng, "bfloat16", "bfloat16")
    scales = helpers.default_scales(formats, 2)
    caches = {}
    for number, fmt in enumerate(formats):
        size = oracle.row_bytes(fmt, 512, 64)
        dtype = helpers.STORAGE_DTYPES[fmt]
        caches[f"cache {number}"] = np.full((3, 4, size // dtype.itemsize), 7).astype(dtype)
    arrays = in_device(
        caches
        | {
            "kv": case.kv,
            "positions": case.positions,
            "slot_mapping": case.slots,
            "norm_weight": case.weight,
            "cos_sin_cache": case.table,
        }
    )
    writer = GroupedCacheWriter([arrays[name] for name in caches], formats, scales)

    def run(arrays: dict[str, Any]) -> None:
        writer.insert_context(
            **{name: value for name, value in arrays.items() if name not in caches}, is_neox=True
        )

    check(run, arrays, no_validation, caches)


def test_options_and_looks_tell_calls_apart(rng):
    """A call that is not quite the one before is validated and prepared by itself."""
    case = test_query_kernel.make_case(rng, oracle.BFLOAT16, tokens=2, heads=1, index_heads=1)
    given = in_device(case.arrays)
    for change in (
        {},
        {"q_scale": 0.5},
        {"index_rope_interleave": True},
        {"index_weights_head_scale": 2.0},
        {"quantize_mqa": False},
        {"positions": CupyLike(case.arrays["positions"].astype(np.int32))},
        {"ql_nope": CupyLike(case.arrays["ql_nope"][:, :, :16])},
        {},
    ):
        arrays = given | change
        made = fused_q(**arrays)
        host = {name: value.host if is_array(value) else value for name, value in arrays.items()}
        for got, want in zip(made, fused_q(**host), strict=True):
            assert got.host.view(np.uint8).tobytes() == want.view(np.uint8).tobytes()


# --- the table of known calls ---------------------------------------------------------------------


def on_device_of(*shape: int) -> CupyLike:
    return CupyLike(np.zeros(shape, np.float32))


def addresses(*given: int) -> tuple[int, ...]:
    """Be a launch that tells what it was given."""
    return given


def learned(*arrays: Any, options: Any = None) -> Shortcuts:
    for array in arrays:
        _arrays.describe(array)
    shortcuts = Shortcuts()
    shortcuts.learn(addresses, options, *arrays)
    return shortcuts


def test_none_in_front_hides_no_array():
    shortcuts = learned(None, on_device_of(4, 4))
    same, other = on_device_of(4, 4), on_device_of(9, 9)
    assert shortcuts.run(None, None, same) == (0, same.data.ptr)
    assert shortcuts.run(None, None, other) is UNKNOWN
    assert shortcuts.run(None, None, None) is UNKNOWN


def test_an_array_of_an_unknown_kind_is_no_known_call():
    known = on_device_of(4)
    shortcuts = learned(known, known)
    assert shortcuts.run(None, known, known) == (known.data.ptr, known.data.ptr)
    assert shortcuts.run(None, known, np.zeros(4, np.float32)) is UNKNOWN
    assert shortcuts.run(None, np.zeros(4, np.float32), known) is UNKNOWN
    unknown = np.zeros(4, np.float32)
    assert learned(unknown, unknown).run(None, unknown, unknown) is UNKNOWN


def test_options_that_cannot_be_hashed_are_never_known():
    known = on_device_of(4)
    shortcuts = learned(known, options=[1])
    assert shortcuts.run([1], known) is UNKNOWN


def test_an_error_of_a_launch_is_the_caller_s():
    def fail(*_: int) -> None:
        raise TypeError("of the launch")

    known = on_device_of(4)
    _arrays.describe(known)
    shortcuts = Shortcuts()
    shortcuts.learn(fail, None, known)
    with pytest.raises(TypeError, match="of the launch"):
        shortcuts.run(None, known)


@pytest.mark.parametrize("change", ["shape", "strides", "dtype", "device"])
def test_whatever_differs_makes_another_call(change):
    first, other = on_device_of(4, 4), on_device_of(4, 4)
    shortcuts = learned(first, None, first)
    assert shortcuts.run(None, first, None, other) == (first.data.ptr, 0, other.data.ptr)
    if change == "device":
        other.data.device_id = 1
    else:
        different = {"shape": (2, 8), "strides": (4, 16), "dtype": np.dtype(np.int32)}
        setattr(other, change, different[change])
    assert shortcuts.run(None, first, None, other) is UNKNOWN
    assert shortcuts.run(None, other, None, first) is UNKNOWN
    assert shortcuts.run(1, first, None, first) is UNKNOWN
    assert shortcuts.run(None, first, first, None) is UNKNOWN


def test_a_step_is_the_call_without_options():
    rows, rope, slots = on_device_of(4, 4), on_device_of(4, 2), on_device_of(4)
    shortcuts = learned(rows, rope, slots)
    wanted = (rows.data.ptr, rope.data.ptr, slots.data.ptr)
    assert shortcuts.run_step(rows, rope, slots) == wanted == shortcuts.run(None, rows, rope, slots)
    assert shortcuts.run_step(rope, rope, slots) is UNKNOWN
    assert shortcuts.run_step(rows, rope, np.zeros(4)) is UNKNOWN
    shortcuts.forget()
    assert shortcuts.run_step(rows, rope, slots) is UNKNOWN


def test_addresses_differ_by_what_they_leave_of_eight_bytes():
    raw = np.zeros(64, np.uint8)
    begin = -raw.__array_interface__["data"][0] % 8
    first, second = (CupyLike(raw[begin + shift : begin + shift + 4]) for shift in (0, 4))
    shortcuts = learned(first, first)
    assert shortcuts.run(None, first, first) is not UNKNOWN
    assert shortcuts.run(None, first, second) is UNKNOWN
    assert shortcuts.run(None, second, first) is UNKNOWN
