"""The comparison and the builders that the other tests rely on."""

from __future__ import annotations

import numpy as np
import pytest

from tests import helpers, oracle


def test_the_first_wrong_byte_is_named_with_its_block_and_row(backend):
    cache = helpers.make_cache(backend, "fp8_e4m3", 3, 4, row_pad=8, block_pad=16)
    expected = cache.bytes()
    actual = expected.copy()
    start = cache.geometry.row_at(9)
    actual[start + 513] = 0x7E
    actual[start + 600] = 0x00
    with pytest.raises(pytest.fail.Exception) as caught:
        helpers.assert_bytes_equal(actual, expected, cache.geometry)
    message = str(caught.value)
    assert "2 of" in message
    assert "block 2, row 1, byte 513" in message
    assert "got 7E A5" in message
    assert "expected A5 A5" in message
    helpers.assert_bytes_equal(expected.copy(), expected, cache.geometry)


def test_a_wrong_byte_outside_every_row_is_named(backend):
    cache = helpers.make_cache(backend, "fp8_e4m3", 3, 4, row_pad=8)
    actual = cache.bytes()
    actual[cache.geometry.row_at(5) + 576] = 0
    with pytest.raises(pytest.fail.Exception, match="outside every row"):
        helpers.assert_bytes_equal(actual, cache.bytes(), cache.geometry)


def test_values_tell_zeros_apart_and_nan_not():
    nan = np.array([0x7FC0, 0xFFFF], np.uint16).view(oracle.BFLOAT16)
    helpers.assert_values_equal(nan[:1], nan[1:])
    zero = np.zeros(1, np.float32)
    with pytest.raises(AssertionError):
        helpers.assert_values_equal(zero, -zero)
    with pytest.raises(AssertionError):
        helpers.assert_values_equal(zero, zero.astype(np.float16))


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 5), (1, 0, 5)])
@pytest.mark.parametrize("lead", [0, 3])
def test_surrounded_rows_have_nan_on_every_side(backend, shape, lead):
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    placed = helpers.surrounded(backend, values, lead=lead, pad=2)
    assert np.array_equal(backend.to_numpy(placed), values)
    if values.size:
        assert placed.strides[-2] == (shape[-1] + 2) * 4
        wider = np.lib.stride_tricks.as_strided(
            placed, (shape[-2], shape[-1] + 2), placed.strides[-2:]
        )
        assert np.all(np.isnan(wider[:, shape[-1] :]))


def test_a_message_without_its_form_is_no_message():
    for message in (
        "insert: kv_c is wrong",
        "kv_c must have shape [2], got [3]",
        "insert: k_pe must have the width of kv_c, got 3",
        "insert: kv_c must have shape [2]",
    ):
        with pytest.raises(AssertionError):
            helpers.assert_message(message, "insert", ["kv_c"])
    helpers.assert_message("insert: kv_c must have shape [2], got [3]", "insert", ["kv_c"], "[2]")


def test_the_oracle_agrees_with_a_row_written_by_hand():
    kv_c = np.repeat(np.float32([1, 2, 3, 4]), 128).astype(oracle.BFLOAT16)
    k_pe = np.zeros(64, oracle.BFLOAT16)
    row = oracle.encode_row(kv_c, k_pe, "fp8_ds_mla")
    assert row[:512] == b"\x7e" * 512
    assert row[512:528].hex() == "2549123b2549923bb76ddb3b2549123c"
    assert row[528:] == bytes(128)
    assert np.allclose(oracle.decode_row(row, "fp8_ds_mla")[:512], kv_c.astype(np.float32))
    flat = oracle.encode_row(np.float32([1000, -3, np.nan]), None, "fp8_e4m3", 2.0)
    assert flat.hex() == "7ebc7f"
