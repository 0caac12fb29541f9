"""The probe of exact_math.cuh: its source, its operands, and what NumPy makes of them.

A test on a GPU can run the same source on a product device and compare with the same numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from cupy_mla._cuda import sources
from tests import oracle

Array = np.ndarray[Any, Any]

ENTRY = "exact_math_probe"
#: In the order in which the kernel puts them out.
OPERATIONS = (
    "add", "sub", "mul", "fma", "div", "rcp", "sqrt", "max", "abs", "neg", "fma_if_below",
    "bf16_to_f32", "f16_to_f32", "cvt_bf16", "cvt_f16", "cvt_e4m3x4", "cvt_e5m2x4",
    "cvt_e4m3_soft", "cvt_e5m2_soft", "e4m3_0", "e4m3_1", "e4m3_2", "e4m3_3", "e5m2_0", "e5m2_1",
    "e5m2_2", "e5m2_3", "e4m3_soft", "cvt_bf16x2", "cvt_f16x2", "canonical", "amax_power_of_two",
    "codes_e4m3", "codes_e5m2", "codes_of_power",
)  # fmt: skip
#: Results that are codes or 16-bit numbers; the others are float32 and may be NaN of any payload.
INTEGERS = {name for name in OPERATIONS if name.startswith(("cvt", "canonical", "codes"))}


def source() -> str:
    """Return the kernel's text."""
    path = Path(__file__).with_name(f"{ENTRY}.cu")
    return f'{sources.flatten(("quotients.cuh",))}#line 1 "{path.name}"\n{path.read_text()}'


def operands(rng: np.random.Generator, count: int = 1 << 16) -> tuple[Array, Array, Array]:
    """Make three arrays of float32: random bits, all 16-bit patterns below, and special numbers."""
    arrays = []
    for _ in range(3):
        bits = rng.integers(0, 2**32, count, np.uint32)
        near = rng.random(count) < 0.5  # exponents that codes can tell
        exponents = rng.integers(127 - 20, 127 + 20, count, np.uint32)
        bits[near] = (bits[near] & 0x807FFFFF) | exponents[near] << 23
        arrays.append(bits.view(np.float32))
    a, b, c = arrays
    a.view(np.uint16)[::2] = rng.permutation(np.arange(65536)).astype(np.uint16)[:count]
    special = np.array(
        [0.0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 2**-126, 2**-127, 2**-149, -(2**-149), 448,
         464, 465, 57344, 61440, 2**-9, 2**-10, 2**-16, 2**-17, 3.4028235e38, 65504, 65520],
        np.float32,
    )  # fmt: skip
    pairs = len(special) ** 2
    a[:pairs] = np.repeat(special, len(special))
    b[:pairs] = np.tile(special, len(special))
    # Ties of both fp8 formats, and the floats beside them.
    ties = []
    for fmt, largest in (("fp8_e4m3", 0x7E), ("fp8_e5m2", 0x7B)):
        codes = np.arange(largest + 1, dtype=np.uint8)
        numbers = codes.view(oracle.CODE_DTYPES[fmt]).astype(np.float32)
        ties.append((numbers[:-1] + numbers[1:]) / 2)
    middle = np.concatenate(ties).astype(np.float32).view(np.uint32)
    beside = np.concatenate([middle - 1, middle, middle + 1])
    beside = np.concatenate([beside, beside | 0x80000000])
    a[pairs : pairs + beside.size] = beside.view(np.float32)
    return a, b, c


def _fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c in one rounding: float64 rounded to odd holds enough to round once more."""
    product = a.astype(np.float64) * b.astype(np.float64)  # exact
    addend = c.astype(np.float64)
    total = product + addend
    part = total - product
    lost = (product - (total - part)) + (addend - part)
    bits = total.view(np.int64)
    even = (bits & 1) == 0
    away = (lost > 0) == (total > 0)
    fix = np.isfinite(total) & (lost != 0) & even
    odd = np.where(fix, bits + np.where(away, 1, -1), bits)
    return odd.view(np.float64).astype(np.float32)


def expected(a: Array, b: Array, c: Array) -> dict[str, Array]:
    """Return the results by NumPy, as uint32."""
    one = np.ones_like(a)
    low = a.view(np.uint16)[::2].copy()

    def codes(fmt: str, *parts: Array) -> Array:
        total = np.zeros(a.shape, np.uint32)
        for place, part in enumerate(parts):
            total |= oracle.encode_fp8(part, 1.0, fmt).astype(np.uint32) << 8 * place
        return total

    def narrow(dtype: Any, x: Array = a) -> Array:
        bits = x.astype(dtype).view(np.uint16)
        return np.where(np.isnan(x), np.uint16(0x7FFF), bits).astype(np.uint32)

    def widened(fmt: str, place: int) -> Array:
        word = (a.view(np.uint32) >> np.uint32(8 * place)).astype(np.uint8)
        return word.view(oracle.CODE_DTYPES[fmt]).astype(np.float32)

    with np.errstate(all="ignore"):
        larger = np.where((a == 0) & (b == 0), a + b, np.fmax(a, b))  # +0 is larger than -0
        fused = _fma(a, b, c)
        power = _power_of_two(np.abs(b))
        floats = {
            "add": a + b,
            "sub": a - b,
            "mul": a * b,
            "fma": fused,
            "div": a / b,
            "rcp": one / a,
            "sqrt": np.sqrt(np.abs(a)),
            "max": larger,
            "abs": np.abs(a),
            "neg": -a,
            "fma_if_below": np.where(np.abs(c) < 1, fused, c),
            "bf16_to_f32": low.view(oracle.BFLOAT16).astype(np.float32),
            "f16_to_f32": low.view(np.float16).astype(np.float32),
            "amax_power_of_two": power,
            **{f"e4m3_{i}": widened("fp8_e4m3", i) for i in range(4)},
            **{f"e5m2_{i}": widened("fp8_e5m2", i) for i in range(4)},
            "e4m3_soft": widened("fp8_e4m3", 0),
        }
        return {name: values.view(np.uint32) for name, values in floats.items()} | {
            "cvt_bf16": narrow(oracle.BFLOAT16),
            "cvt_f16": narrow(np.float16),
            "cvt_e4m3x4": codes("fp8_e4m3", a, b, c, one),
            "cvt_e5m2x4": codes("fp8_e5m2", a, b, c, one),
            "cvt_bf16x2": narrow(oracle.BFLOAT16) | narrow(oracle.BFLOAT16, b) << 16,
            "cvt_f16x2": narrow(np.float16) | narrow(np.float16, b) << 16,
            "canonical": np.where(np.isnan(a), np.uint32(0x7FFFFFFF), a.view(np.uint32)),
            "cvt_e4m3_soft": codes("fp8_e4m3", a),
            "cvt_e5m2_soft": codes("fp8_e5m2", a),
            "codes_e4m3": codes("fp8_e4m3", a / b, c / b),
            "codes_e5m2": codes("fp8_e5m2", a / b, c / b),
            "codes_of_power": codes("fp8_e4m3", a / power, c / power),
        }


def _power_of_two(amax: Array) -> Array:
    """Return the smallest power of two that is neither below amax / 448 nor 2**-22."""
    least = np.maximum(amax / np.float32(448), np.float32(2**-22))
    mantissa, exponent = np.frexp(least.astype(np.float64))
    power = np.ldexp(1.0, np.where(mantissa == 0.5, exponent - 1, exponent))
    return np.where(np.isinf(amax), amax, power).astype(np.float32)


def comparable(name: str, a: Array, b: Array, want: Array) -> Array:
    """Say which results the operation promises."""
    if name in ("amax_power_of_two", "codes_of_power"):
        return ~np.isnan(b)
    return np.ones(a.shape, bool)


def differences(name: str, a: Array, b: Array, got: Array, want: Array) -> Array:
    """Return the places where results differ; NaN of any payload are one."""
    wrong = got != want
    if name not in INTEGERS:
        wrong &= ~(np.isnan(got.view(np.float32)) & np.isnan(want.view(np.float32)))
    return np.flatnonzero(wrong & comparable(name, a, b, want))
