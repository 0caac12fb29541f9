"""Every 16-bit number at hundreds of scales, and exact rational arithmetic beside ml_dtypes."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from cupy_mla import GroupedCacheWriter, concat_and_cache_mla, read_slots
from tests import oracle

FORMATS = ("fp8_e4m3", "fp8_e5m2")
NAN_CODE = 0x7F


def many_scales():
    """Powers of two, subnormal, tiny, huge and random numbers, and some that make ties."""
    rng = np.random.default_rng(7)
    powers = 2.0 ** np.array([-149, -140, -130, -127, -126, -100, -20, -9, -1, 0, 1, 7, 64, 127])
    borders = [
        np.finfo(np.float32).max,
        np.finfo(np.float32).tiny,
        np.nextafter(np.float32(1), np.float32(0)),
        np.nextafter(np.float32(1), np.float32(2)),
        np.nextafter(np.finfo(np.float32).tiny, np.float32(0)),
    ]
    ties = [3.0, 1.5, 0.75, 7.0, 17.0, 1 / 448, 1 / 464, 0.109375, 0.265625, 464 / 448]
    bits = rng.integers(1, 0x7F800000, 170).astype(np.uint32).view(np.float32)
    usual = np.exp2(rng.uniform(-12, 6, 200))
    scales = np.concatenate([powers, borders, ties, bits, usual]).astype(np.float32)
    assert np.all(np.isfinite(scales) & (scales > 0))
    assert np.any(scales < np.finfo(np.float32).tiny)
    rng.shuffle(scales)
    return scales


def expected_codes(values, scale, fmt):
    """Codes by ml_dtypes: divide in float32, clip, cast; NaN is one code."""
    limit, dtype = {
        "fp8_e4m3": (448, oracle.E4M3),
        "fp8_e5m2": (57344, oracle.E5M2),
    }[fmt]
    with np.errstate(all="ignore"):
        quotient = np.divide(values.astype(np.float32), np.float32(scale), dtype=np.float32)
        codes = np.clip(quotient, -limit, limit).astype(dtype).view(np.uint8)
    codes[np.isnan(quotient)] = NAN_CODE
    return codes


def stored_codes(values, scales, fmt):
    """Codes by a writer with one layer a scale: [scales, values]."""
    rows = values.reshape(-1, 512)
    count = len(rows)
    caches = [np.zeros((1, count, 512), np.uint8) for _ in scales]
    writer = GroupedCacheWriter(
        caches, fmt, [float(scale) for scale in scales], kv_lora_rank=512, rope_dim=0
    )
    shared = np.broadcast_to(rows, (len(scales), count, 512))
    writer.insert(shared, None, np.arange(count))
    return np.stack([cache.reshape(-1) for cache in caches])


def compare(values, scales, fmt):
    for first in range(0, len(scales), 20):
        group = scales[first : first + 20]
        codes = stored_codes(values, group, fmt)
        for scale, got in zip(group, codes, strict=True):
            wrong = np.flatnonzero(got != expected_codes(values, scale, fmt))
            if wrong.size:
                index = wrong[0]
                pytest.fail(
                    f"{wrong.size} codes differ at scale {scale!r}; first x = {values[index]!r}: "
                    f"got {got[index]:02X}, "
                    f"expected {expected_codes(values, scale, fmt)[index]:02X}"
                )


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_bfloat16_number_at_many_scales(fmt):
    values = np.arange(65536, dtype=np.uint16).view(oracle.BFLOAT16)
    compare(values, many_scales(), fmt)


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_float16_number(fmt):
    values = np.arange(65536, dtype=np.uint16).view(np.float16)
    compare(values, many_scales()[::4], fmt)


@pytest.mark.parametrize("fmt", FORMATS)
def test_float32_numbers_of_random_bits_and_around_every_tie(fmt):
    rng = np.random.default_rng(11)
    dtype = oracle.CODE_DTYPES[fmt]
    codes = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    codes = np.sort(codes[np.isfinite(codes)])
    ties = (codes[1:] + codes[:-1]) / 2
    near = np.concatenate(
        [np.nextafter(ties, np.float32(-np.inf)), ties, np.nextafter(ties, np.float32(np.inf))]
    )
    scales = many_scales()[::40]
    with np.errstate(all="ignore"):
        scaled = (near[None] * scales[:, None]).ravel()
    bits = rng.integers(0, 2**32, 65536, np.uint32).view(np.float32)
    values = np.concatenate([bits, near, scaled])
    values = values[: values.size // 512 * 512]
    compare(values.astype(np.float32), scales, fmt)


@pytest.mark.parametrize("fmt", FORMATS)
def test_quotients_that_only_float32_rounds_to_a_tie(fmt):
    """The quotient is a float32 before it is a code: a wider one would not see these ties."""
    rng = np.random.default_rng(17)
    codes = np.arange(16, 100, dtype=np.uint8).view(oracle.CODE_DTYPES[fmt]).astype(np.float32)
    ties = (codes[1:] + codes[:-1]) / 2
    bits = rng.integers(0x3F80, 0x4000, ties.size).astype(np.uint16)
    numerators = bits.view(oracle.BFLOAT16).astype(np.float32)
    scales = numerators / ties
    compare(np.arange(65536, dtype=np.uint16).view(oracle.BFLOAT16), scales, fmt)
    # Where the code below is even and the exact quotient above the tie, the codes differ.
    exact = numerators.astype(np.float64) / scales
    even = np.arange(16, 99) % 2 == 0
    assert np.count_nonzero((numerators / scales == ties) & (exact > ties) & even) > 3
    assert np.count_nonzero((numerators / scales == ties) & (exact < ties) & ~even) > 3


@pytest.mark.parametrize("fmt", FORMATS)
def test_stored_codes_read_back_as_their_values(fmt):
    values = np.arange(65536, dtype=np.uint16).view(oracle.BFLOAT16)
    for scale in many_scales()[::40]:
        cache = np.zeros((1, 128, 512), np.uint8)
        rows = values.reshape(128, 512)
        slots = np.arange(128)
        concat_and_cache_mla(rows, None, cache, slots, fmt, float(scale))
        got = read_slots(cache, slots, fmt, float(scale)).reshape(-1)
        with np.errstate(all="ignore"):
            codes = cache.reshape(-1).view(oracle.CODE_DTYPES[fmt]).astype(np.float32)
            expected = codes * scale
        assert got.dtype == np.float32
        assert np.array_equal(got, expected, equal_nan=True)
        assert np.array_equal(np.isnan(got), np.isnan(values.astype(np.float32)))
        again = np.zeros_like(cache)
        concat_and_cache_mla(got.reshape(128, 512), None, again, slots, fmt, float(scale))
        # A code times a subnormal scale may round, or overflow float32, and then differ.
        with np.errstate(all="ignore"):
            exact = (codes.astype(np.float64) * float(scale) == expected) | np.isnan(codes)
        assert np.array_equal(again.reshape(-1)[exact], cache.reshape(-1)[exact])
        assert np.count_nonzero(exact) > 1000


# --- exact rational arithmetic --------------------------------------------------------------------


def round_to_float32(value: Fraction) -> Fraction | None:
    """Round to the nearest float32, ties to even; None where it overflows."""
    if value == 0:
        return value
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    step = Fraction(2) ** (max(exponent, -126) - 23)
    rounded = round(magnitude / step) * step  # round() takes ties to even
    if rounded >= Fraction(2) ** 128:
        return None
    return rounded if value > 0 else -rounded


def magnitudes_of(fmt):
    """Every finite magnitude of a format by its code, from the definition of the format."""
    bits, bias, last = {"fp8_e4m3": (3, 7, 0x7E), "fp8_e5m2": (2, 15, 0x7B)}[fmt]
    table = []
    for code in range(last + 1):
        exponent, mantissa = code >> bits, code & ((1 << bits) - 1)
        whole = mantissa if exponent == 0 else mantissa + (1 << bits)
        table.append(whole * Fraction(2) ** (max(exponent, 1) - bias - bits))
    return table


def exact_code(x: float, scale: float, table) -> int:
    """Code of x / scale with one rounding to float32 and one to the format."""
    quotient = round_to_float32(Fraction(x) / Fraction(scale))
    sign = 0x80 if np.signbit(np.float32(x)) else 0
    if quotient is None or abs(quotient) >= table[-1]:
        return sign | (len(table) - 1)
    magnitude = abs(quotient)
    low, high = 0, len(table) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if table[middle] <= magnitude else (low, middle)
    below, above = magnitude - table[low], table[high] - magnitude
    if below == above:
        return sign | (low if low % 2 == 0 else high)
    return sign | (low if below < above else high)


@pytest.mark.parametrize("fmt", FORMATS)
def test_codes_agree_with_exact_rational_arithmetic(fmt):
    rng = np.random.default_rng(13)
    table = magnitudes_of(fmt)
    assert float(table[-1]) == oracle.LARGEST[fmt]
    scales = many_scales()[::16]
    for scale in scales:
        usual = (rng.standard_normal(256) * 2.0 ** rng.integers(-12, 12, 256)) * float(scale)
        bits = rng.integers(0, 2**32, 256, np.uint32).view(np.float32)
        with np.errstate(all="ignore"):
            values = np.concatenate([usual.astype(np.float32), bits])
        values = np.where(np.isfinite(values), values, np.float32(0.1))
        got = stored_codes(values, [scale], fmt)[0]
        expected = [exact_code(float(x), float(scale), table) for x in values]
        assert got.tolist() == expected
