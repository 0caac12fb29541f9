"""The step that the demo makes up, and the rows that it works out by ml_dtypes alone."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cupy_mla import get_layout
from cupy_mla.cli import _rows, _step
from tests.cli.helpers import DEMO_ROWS


def rows_of(values, dtype=ml_dtypes.bfloat16):
    return np.asarray([values], np.float32).astype(dtype)


def hex_of(array):
    return np.ascontiguousarray(array).tobytes().hex(" ").upper()


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "values", "scale", "expected"),
    [
        ("fp8_e4m3", [1, 2, -3, 448], 2.0, "30 38 BC 76"),
        ("fp8_e4m3", [1000, -1000, 464, 465, INF, -INF], 1.0, "7E FE 7E 7E 7E FE"),
        ("fp8_e4m3", [2**-9, 2**-10, 3 * 2**-10, 2**-6], 1.0, "01 00 02 08"),
        ("fp8_e4m3", [NAN, -NAN, 1, -0.0, -(2**-12)], 1.0, "7F 7F 38 80 80"),
        ("fp8_e4m3", [0.01068115234375], 0.109375, "1C"),
        ("fp8_e4m3", [0.00885009765625], 0.265625, "11"),
        ("fp8_e5m2", [1, 2, 3.5, 0.25], 1.0, "3C 40 43 34"),
        ("fp8_e5m2", [2**-16, 2**-17, 3 * 2**-17, -(2**-17)], 1.0, "01 00 02 80"),
        ("fp8_e5m2", [NAN, -NAN, 1, INF, -INF, 1e9], 1.0, "7F 7F 3C 7B FB 7B"),
    ],
)
def test_encoded_flat_fp8(name, values, scale, expected):
    layout = get_layout(name, kv_lora_rank=len(values), rope_dim=0)
    # float32 rows: some of the values are not exact in bfloat16
    rows = rows_of(values, np.float32)
    assert hex_of(_rows.encode_rows(layout, rows, scale)) == expected


def test_encoded_flat_fp8_scales_the_rotary_part_too():
    layout = get_layout("fp8", kv_lora_rank=2, rope_dim=1)
    assert hex_of(_rows.encode_rows(layout, rows_of([1, 1, 1]), 0.5)) == "40 40 40"


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_encoded_plain_rows_are_copies(name):
    layout = get_layout(name, kv_lora_rank=3, rope_dim=2)
    rows = rows_of([1.5, -0.0, NAN, INF, 2.0], layout.storage_dtype)
    assert hex_of(_rows.encode_rows(layout, rows, None)) == hex_of(rows)


def ds_mla(tile, scale_format, rope=()):
    """Encode a row whose first tile starts with `tile`; return codes, scale and the whole row."""
    values = np.zeros(576, np.float32)
    values[: len(tile)] = tile
    values[512 : 512 + len(rope)] = rope
    layout = get_layout("fp8_ds_mla", scale_format=scale_format)
    [row] = _rows.encode_rows(layout, rows_of(values), None)
    return hex_of(row[: max(len(tile), 1)]), row[512:516].view("<u4")[0], row


@pytest.mark.parametrize(
    ("tile", "scale_format", "codes", "scale"),
    [
        ([336], "float32", "7E", 0x3F400000),
        ([336], "ue8m0", "7A", 0x3F800000),
        ([], "float32", "00", 0x00800000),
        ([], "ue8m0", "00", 0x39000000),  # 2**-13
        ([1, NAN, 2, 0], "float32", "76 7F 7E 00", 0x3B924925),
        ([1, INF, -2, 0], "float32", "00 7F 80 00", 0x7F800000),
        ([1.015625], "float32", "7E", 0x3B149249),
        ([448], "ue8m0", "7E", 0x3F800000),  # a power of two stays
        ([450], "ue8m0", "76", 0x40000000),  # just above one goes up
    ],
)
def test_encoded_fp8_ds_mla(tile, scale_format, codes, scale):
    found = ds_mla(tile, scale_format)
    assert found[:2] == (codes, scale)


def test_encoded_fp8_ds_mla_row_is_codes_scales_and_rope():
    values = np.concatenate([np.repeat([1.0, 2.0, 3.0, 4.0], 128), np.arange(64.0)])
    [row] = _rows.encode_rows(get_layout("fp8_ds_mla"), rows_of(values), None)
    assert row.shape == (656,)
    assert set(row[:512]) == {0x7E}
    assert hex_of(row[512:528]) == "25 49 12 3B 25 49 92 3B B7 6D DB 3B 25 49 12 3C"
    assert np.array_equal(row[528:].view(ml_dtypes.bfloat16), values[512:].astype("bfloat16"))


@pytest.mark.parametrize(("name", "scale_format"), DEMO_ROWS)
def test_decoded_rows_are_near_what_was_encoded(name, scale_format):
    layout = get_layout(name, scale_format=scale_format or "float32")
    rows = np.random.default_rng(1).standard_normal((5, 576)).astype(layout.input_dtypes[0])
    scale = 0.0375 if layout.needs_scale else None
    decoded = _rows.decode_rows(layout, _rows.encode_rows(layout, rows, scale), scale)
    assert decoded.dtype == np.float32
    exact = rows.astype(np.float32)
    if not layout.is_fp8:
        assert np.array_equal(decoded, exact)
    else:
        # half a step: 2**-4 of the value with 3 bits of mantissa, 2**-3 with 2; below the normal
        # range half of the least code, under a scale of less than 0.0375 in every case
        step = 2.0**-3 if name == "fp8_e5m2" else 2.0**-4
        assert np.all(np.abs(decoded - exact) <= np.abs(exact) * step + 0.0375 * 2.0**-10)
        assert np.array_equal(decoded[:, 512:], exact[:, 512:]) == (name == "fp8_ds_mla")


def test_decoded_codes_are_multiplied_by_their_scale():
    layout = get_layout("fp8_ds_mla")
    row = np.zeros((1, 656), np.uint8)
    row[0, 128] = 0x7E
    row[0, 516:520] = np.frombuffer(np.float32(0.75).tobytes(), np.uint8)
    assert _rows.decode_rows(layout, row, None)[0, 128] == 336.0


@pytest.mark.parametrize("tokens", [1, 7, 100])
def test_a_step_has_padding_free_rows_and_every_slot_once(tokens):
    layout = get_layout("fp8")
    step = _step.make_step(layout, 3, tokens, 16, seed=0)
    assert step.projection.shape == (tokens, 3, 576)
    assert step.projection.dtype == ml_dtypes.bfloat16
    assert step.slots.shape == (3, tokens)
    capacity = step.num_blocks * 16
    for slots in step.slots:
        stored = slots[slots >= 0]
        assert len(set(stored)) == len(stored) == tokens - tokens // 8
        assert stored.max() < capacity
        assert len(stored) < capacity
        assert set(slots[slots < 0]) <= {-1}
    if tokens > 8:
        assert len({tuple(slots) for slots in step.slots}) == 3


def test_a_step_has_what_goes_wrong_first():
    rows = _step.make_step(get_layout("fp8"), 2, 64, 16, seed=3).projection.astype(np.float32)
    assert np.isnan(rows).any()
    assert np.isposinf(rows).any()
    assert np.isneginf(rows).any()
    assert (np.abs(rows[np.isfinite(rows)]) > 448).any()
    assert (rows[:, 0] == 0).all(axis=1).sum() == 2
    assert (np.signbit(rows) & (rows == 0)).any()


def test_a_step_depends_on_the_seed_alone():
    layout = get_layout("bfloat16")
    one, same, other = (_step.make_step(layout, 2, 30, 16, seed) for seed in (5, 5, 6))
    assert np.array_equal(one.slots, same.slots)
    assert hex_of(one.projection) == hex_of(same.projection)
    assert not np.array_equal(one.slots, other.slots)
    assert hex_of(one.projection) != hex_of(other.projection)
