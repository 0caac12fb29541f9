"""Bytes, statistics, choices of the benchmark, and what it compares results with."""

from __future__ import annotations

import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from cupy_mla import get_layout
from cupy_mla.bench import rotation, verify
from cupy_mla.bench.figures import Figures, gigabytes_per_second, is_launch_bound, percentile
from cupy_mla.bench.operations import OPERATIONS
from cupy_mla.bench.problem import (
    PATTERNS,
    Expected,
    Problem,
    random_values,
    scales_of,
    slots_of,
    spoil,
)
from cupy_mla.bench.traffic import Part, Traffic, cache_rows

FORMATS = ("bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla")


def problem(name="insert", fmt="fp8_e4m3", layers=1, tokens=70, pattern="random", block_size=16):
    return Problem(name, get_layout(fmt), layers, tokens, block_size, pattern)


# --- bytes ----------------------------------------------------------------------------------------

# Of 3 tokens; 5 layers for insert and context. Slots, positions are int64; tables float32.
ROWS_IN, SLOTS, SCALES = 5 * 3 * 576 * 2, 3 * 8, 5 * 4
CONTEXT_IN = ROWS_IN + 5 * 512 * 2 + 3 * 64 * 4
NORM_ROPE_IN = 3 * (1536 + 576 + 128) * 2 + (1536 + 512 + 256) * 2 + 2 * 3 * 64 * 4
NORM_ROPE_OUT = 3 * 1536 * 2 + 3 * 2048 * 4 + 3 * 132
QUERY_IN = 3 * 64 * 128 * 2 + 3 * 64 * 2 + 2 * 3 * 64 * 4
QUERY_OUT = 3 * 64 * 128 + 3 * 64 * 4
TABLE = 4 + 8  # one block, two ends
BYTES = [
    # operation, format: inputs, outputs, slots, scales
    ("insert", "bfloat16", ROWS_IN, 5 * 3 * 1152, SLOTS, 0),
    ("insert", "float16", ROWS_IN, 5 * 3 * 1152, SLOTS, 0),
    ("insert", "float32", 2 * ROWS_IN, 5 * 3 * 2304, SLOTS, 0),
    ("insert", "fp8_e4m3", ROWS_IN, 5 * 3 * 576, SLOTS, SCALES),
    ("insert", "fp8_e5m2", ROWS_IN, 5 * 3 * 576, SLOTS, SCALES),
    ("insert", "fp8_ds_mla", ROWS_IN, 5 * 3 * 656, SLOTS, 0),
    ("context", "bfloat16", CONTEXT_IN, 5 * 3 * 1152, 2 * SLOTS, 0),
    ("context", "fp8_e4m3", CONTEXT_IN, 5 * 3 * 576, 2 * SLOTS, SCALES),
    ("norm-rope", "fp8_e4m3", NORM_ROPE_IN, NORM_ROPE_OUT + 3 * 576, 2 * SLOTS, 4),
    ("norm-rope", "fp8_ds_mla", NORM_ROPE_IN, NORM_ROPE_OUT + 3 * 656, 2 * SLOTS, 0),
    ("q", "fp8_e4m3", QUERY_IN + 3 * 16 * 576 * 2, QUERY_OUT + 3 * 16 * 576, SLOTS, 4),
    ("q", "bfloat16", QUERY_IN + 3 * 16 * 64 * 2, QUERY_OUT + 3 * 16 * 64 * 2, SLOTS, 0),
    ("gather", "fp8_e4m3", 3 * 576, 3 * 1152, TABLE, 4),
    ("gather", "fp8_ds_mla", 3 * 656, 3 * 1152, TABLE, 0),
    ("gather", "float32", 3 * 2304, 3 * 1152, TABLE, 0),
    # All rows of one block of 16.
    ("convert", "fp8_e4m3", 16 * 1152, 16 * 576, 0, 4),
    ("convert", "fp8_ds_mla", 16 * 1152, 16 * 656, 0, 0),
    ("convert", "bfloat16", 16 * 656, 16 * 1152, 0, 0),
]


@pytest.mark.parametrize(("name", "fmt", "inputs", "outputs", "slots", "scales"), BYTES)
def test_bytes_of_an_operation(name, fmt, inputs, outputs, slots, scales):
    operation = OPERATIONS[name]
    layers = 5 if operation.layered else 1
    found = operation.traffic(problem(name, fmt, layers, 3, "contiguous"))
    assert found.by_kind() == {
        "inputs": inputs,
        "outputs": outputs,
        "slots": slots,
        "scales": scales,
    }
    assert found.read == inputs + slots + scales
    assert found.written == outputs
    assert found.total == found.read + found.written == sum(found.by_dtype().values())


def test_bytes_by_element_type():
    found = OPERATIONS["insert"].traffic(problem(fmt="fp8_ds_mla", layers=5, tokens=16384))
    rows = 5 * 16384
    assert found.by_dtype() == {
        "bfloat16": rows * (576 + 64) * 2,
        "int64": 16384 * 8,
        "float8_e4m3fn": rows * 512,
        "float32": rows * 16,
    }
    assert found.to_dict()["dtypes"] == found.by_dtype()


def test_a_token_of_norm_rope_moves_what_is_known_of_it():
    """17.1 KB at top-k 2048, 8.2 of them the fill with -1."""
    found = OPERATIONS["norm-rope"].traffic(problem("norm-rope", "fp8_ds_mla", tokens=8192))
    assert found.total / 8192 == pytest.approx(17_100, rel=0.005)
    assert found.by_dtype()["int32"] / 8192 == 8192


def test_gather_counts_blocks_of_whole_and_partial_requests():
    found = OPERATIONS["gather"].traffic(problem("gather", tokens=2048 + 100, block_size=64))
    assert found.by_kind()["slots"] == 4 * (32 + 2) + 4 * 3


def test_parts_without_elements_are_left_out():
    rank_only = get_layout("fp8", kv_lora_rank=256, rope_dim=0)
    found = Traffic.of(cache_rows(rank_only, 2, "outputs"), Part("x", "inputs", np.dtype("i8"), 0))
    assert [part.name for part in found.parts] == ["rows.nope"]
    assert found.total == 512


# --- statistics -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([7.0], 0, 7.0),
        ([7.0], 90, 7.0),
        ([1.0, 3.0], 50, 2.0),
        ([3.0, 1.0, 2.0], 50, 2.0),
        ([5.0, 1.0, 2.0, 3.0, 4.0], 90, 4.6),
        (list(map(float, range(11))), 90, 9.0),
        ([1.0, 2.0], 100, 2.0),
    ],
)
def test_percentiles(values, percent, expected):
    assert percentile(values, percent) == pytest.approx(expected)
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)))


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], -1), ([1.0], 101)])
def test_percentiles_that_do_not_exist(values, percent):
    with pytest.raises(ValueError, match=r"^percentile: "):
        percentile(values, percent)


def test_figures_keep_the_order_of_nothing():
    figures = Figures.of([3.0, 9.0, 1.0, 2.0, 4.0])
    assert figures.to_dict() == {"median": 3.0, "min": 1.0, "p90": pytest.approx(7.0)}


@pytest.mark.parametrize(("time", "bound"), [(2.99, True), (3.0, False), (0.6, True), (40, False)])
def test_launch_bound_is_less_than_five_empty_nodes(time, bound):
    assert is_launch_bound(time, 0.6) is bound


def test_rate():
    assert gigabytes_per_second(141_557_760, 40.0) == pytest.approx(3538.944)


# --- buffers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, 3_000, 1 << 20, 20 << 20, 64 << 20, 1 << 30])
@pytest.mark.parametrize("l2", [40 << 20, 60 << 20])
def test_cold_buffers_are_not_met_again_in_the_cache(nbytes, l2):
    turns = rotation.choose(nbytes, l2, cold=True)
    assert turns.calls % turns.buffers == 0
    assert turns.calls >= 20
    assert turns.footprint == turns.buffers * nbytes
    if turns.calls > turns.buffers:  # a set has several turns: all others lie between them
        assert turns.footprint - nbytes >= 5 * l2
    else:
        assert turns.buffers == rotation.MOST_BUFFERS or turns.footprint >= 5 * l2


@pytest.mark.parametrize("nbytes", [1, 1 << 20, 1 << 30])
def test_warm_is_one_buffer(nbytes):
    turns = rotation.choose(nbytes, 60 << 20, cold=False)
    assert (turns.buffers, turns.cold) == (1, False)
    assert turns.calls >= 20


# --- problems -------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", PATTERNS)
def test_slots_are_distinct_and_lie_in_the_pool(pattern):
    chosen = problem(tokens=100, pattern=pattern)
    slots = slots_of(chosen)
    assert len(set(slots.tolist())) == 100
    assert slots.min() >= 0
    assert slots.max() < chosen.pool_blocks * 16
    assert (np.diff(slots) == 1).all() == (pattern == "contiguous")


def test_random_slots_leave_half_of_the_pool_alone():
    chosen = problem(tokens=1000)
    assert chosen.pool_blocks * chosen.block_size >= 2000
    assert slots_of(chosen).max() > 1500


def test_random_values_differ_by_row_and_seed():
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    values = random_values((5000, 576), bfloat16)
    assert values.dtype == bfloat16
    assert np.isfinite(values.astype(np.float32)).all()
    assert len({row.tobytes() for row in values}) == 5000
    assert (values.view(np.uint16) == random_values((5000, 576), bfloat16).view(np.uint16)).all()
    assert (values[0] != random_values((1, 576), bfloat16, seed=1)[0]).any()


def test_scales_are_one_a_layer_where_there_are_any():
    assert scales_of(problem(layers=3)) == pytest.approx([0.0375, 0.075, 0.1125])
    assert scales_of(problem(fmt="fp8_ds_mla", layers=3)) is None


# --- results --------------------------------------------------------------------------------------


def test_expected_bytes_count_every_difference():
    wanted = Expected(np.array([1, 2, 3, 4], np.uint8))
    assert wanted.differences(np.array([0x0201, 0x0403], "<u2")) == 0
    assert wanted.differences(np.array([0x0200, 0xFF03], "<u2")) == 2
    with pytest.raises(ValueError, match="shape"):
        wanted.differences(np.zeros(3, np.uint8))


def test_expected_numbers_take_no_nan():
    wanted = Expected(np.array([1.0, -2.0, 0.0]), 0.01, 0.5, lambda output: output)
    assert wanted.differences(np.array([1.009, -1.99, 0.005])) == 0
    assert wanted.differences(np.array([1.011, -2.03, 0.006])) == 3
    assert wanted.differences(np.array([math.nan, -2.0, math.inf])) == 2


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", list(OPERATIONS))
def test_the_reference_is_what_is_worked_out_without_it(name, fmt, pattern):
    operation = OPERATIONS[name]
    check = verify.check_reference(
        operation, problem(name, fmt, 3 if operation.layered else 1, pattern=pattern)
    )
    assert (check.differences, check.first) == (0, None)
    assert check.compared > 70 * 576


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", list(OPERATIONS))
def test_every_output_is_looked_at(name, fmt):
    """A fault in any output, at its begin, middle or end, is found."""
    operation = OPERATIONS[name]
    chosen = problem(name, fmt, 2 if operation.layered else 1, 20)
    for output in operation.make(chosen, verify.HostArrays()).outputs:
        for place in (0.0, 0.5, 1.0):

            def make(problem, arrays, machine=None, output=output, place=place):
                instance = operation.make(problem, arrays)
                run = instance.run

                def broken():
                    run()
                    raw = instance.outputs[output].reshape(-1).view(np.uint8)
                    start = int((raw.size - 8) * place)  # a number's exponent is hit too
                    raw[start : start + 8] ^= 0x55

                return replace(instance, run=broken)

            check = verify.check_reference(replace(operation, make=make), chosen)
            assert check.differences > 0, f"{output} at {place}"
            assert check.first == output


@pytest.mark.parametrize("name", list(OPERATIONS))
def test_all_ways_to_call_an_operation_do_the_same(name):
    operation = OPERATIONS[name]
    chosen = problem(name, "fp8_e4m3", 1, 20)
    instance = operation.make(chosen, verify.HostArrays())
    instance.run()
    expected = {key: array.tobytes() for key, array in instance.outputs.items()}
    assert instance.host
    for way, call in instance.host.items():
        spoil(instance.outputs)
        call()
        assert {key: array.tobytes() for key, array in instance.outputs.items()} == expected, way


def test_the_reference_is_checked_up_to_a_size():
    check = verify.check_reference(OPERATIONS["insert"], problem(fmt="bfloat16", tokens=10**6))
    assert check.problem.tokens == 1024


def test_spoiling_leaves_no_byte():
    outputs = {"a": np.zeros((2, 3), np.int32), "b": np.zeros(5, ml_dtypes.bfloat16)}
    spoil(outputs)
    assert {byte for array in outputs.values() for byte in array.tobytes()} == {0xA5}
