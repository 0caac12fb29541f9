"""The insert kernel: which bytes a number becomes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import oracle
from tests.emulator import harness
from tests.emulator.harness import COMBINATIONS, check, make_case

FP8 = [pair for pair in COMBINATIONS if pair[0] in oracle.CODE_DTYPES]
every_fp8 = pytest.mark.parametrize(("fmt", "dtype"), FP8)

INF, NAN = float("inf"), float("nan")
#: Numbers, scale and codes, by hand.
GOLDEN = {
    "direction of the scale": ("fp8_e4m3", [1, 2, -3, 448], 2.0, "30 38 BC 76"),
    "saturation": ("fp8_e4m3", [1000, -1000, 464, 465, INF, -INF], 1.0, "7E FE 7E 7E 7E FE"),
    "subnormals": ("fp8_e4m3", [2**-9, 2**-10, 3 * 2**-10, 2**-6], 1.0, "01 00 02 08"),
    "e5m2 subnormals": ("fp8_e5m2", [2**-16, 2**-17, 3 * 2**-17, -(2**-17)], 1.0, "01 00 02 80"),
    "zeros": ("fp8_e4m3", [-0.0, 0.0, -(2**-12), 2**-12], 1.0, "80 00 80 00"),
    "NaN": ("fp8_e4m3", [NAN, -NAN, 1], 1.0, "7F 7F 38"),
    "NaN in e5m2": ("fp8_e5m2", [NAN, -NAN, 1], 1.0, "7F 7F 3C"),
    "e5m2": ("fp8_e5m2", [1, 2, 3.5, 0.25, 1e6, -INF], 1.0, "3C 40 43 34 7B FB"),
    "no reciprocal": ("fp8_e4m3", [0.01068115234375, 0.01239013671875], 0.109375, "1C 1E"),
    "one rounding": ("fp8_e4m3", [0.00885009765625, 0.00982666015625], 0.265625, "11 11"),
    "subnormal scale": ("fp8_e4m3", [2**-125, 0, -(2**-125)], 2.0**-130, "60 00 E0"),
}


@pytest.mark.parametrize("alignment", ["vectors", "elements"])
@pytest.mark.parametrize("name", list(GOLDEN))
def test_golden_codes(device, rng, name, alignment):
    fmt, numbers, scale, codes = GOLDEN[name]
    pad = 0 if alignment == "vectors" else 1
    case = make_case(rng, fmt, "bfloat16", layers=1, tokens=1, row_pad=pad)
    case.slots, case.scales = np.array([6]), [scale]
    case.kv_c[0, 0, : len(numbers)] = numbers
    case.k_pe[0, 0, : len(numbers)] = numbers
    harness.launch(device, case)
    start = case.caches[0].geometry.row_at(6)
    want = bytes.fromhex(codes)
    assert case.caches[0].pool[start : start + len(want)].tobytes() == want
    assert case.caches[0].pool[start + 512 : start + 512 + len(want)].tobytes() == want


@pytest.mark.parametrize(("fmt", "dtype"), [pair for pair in COMBINATIONS if pair[0] == pair[1]])
def test_copies_keep_every_bit(device, rng, fmt, dtype):
    case = make_case(rng, fmt, dtype, tokens=16)
    for part in (case.kv_c, case.k_pe):
        part.view(np.uint8)[...] = rng.integers(0, 256, part.view(np.uint8).shape, np.uint8)
    case.collect_stats = True
    check(device, case)


@every_fp8
@pytest.mark.parametrize(
    "scale",
    [2.0**-149, 2.0**-130, 1.2e-38, 2.0**-81, 2.0**-80, 1e-9, 0.3, 3e5, 2.0**80, 2.0**81, 3.4e38],
)
def test_scales_of_every_size(device, rng, fmt, dtype, scale):
    """Numerators around the scale, so that codes are neither all zero nor all saturated."""
    case = make_case(rng, fmt, dtype, layers=1, tokens=12)
    exponent = np.log2(scale)
    with np.errstate(over="ignore", under="ignore"):
        for part in (case.kv_c, case.k_pe):
            spread = rng.uniform(-18, 17, part.shape) + exponent
            numbers = rng.choice([-1.0, 1.0], part.shape) * np.exp2(spread)
            part[...] = numbers.astype(np.float32).astype(part.dtype)
    case.scales = [scale]
    case.collect_stats = True
    check(device, case)


@every_fp8
@pytest.mark.parametrize("scale", [0.0, -0.0, -1.0, -0.37, -1e-40, -3e38, INF, -INF, NAN])
@pytest.mark.parametrize("pad", [0, 1])
def test_what_a_live_scale_may_turn_out_to_be(device, rng, fmt, dtype, scale, pad):
    case = make_case(rng, fmt, dtype, layers=1, tokens=4, row_pad=pad)
    case.kv_c[0, 0, :6] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0]
    case.scales = [scale]
    case.collect_stats = True
    check(device, case, "live")


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_16_bit_number(device, rng, fmt, dtype):
    bits = np.arange(65536, dtype=np.uint16)
    for scale in (1.0, 0.0371, 2.0**-127, 1.5 * 2.0**100):
        case = make_case(rng, fmt, dtype, layers=1, tokens=128, rank=512, rope=0, blocks=32)
        case.kv_c = harness.aligned_copy(bits.reshape(1, 128, 512)).view(oracle.DTYPES[dtype])
        case.slots, case.scales = np.arange(128), [scale]
        case.collect_stats = True
        check(device, case)


def _near_ties(rng: np.random.Generator, fmt: str, scale: np.float32, shape) -> np.ndarray:
    """Make float32 numbers whose quotients lie on ties of codes, or a float or two beside them."""
    codes = np.arange(0x7E if fmt == "fp8_e4m3" else 0x7B, dtype=np.uint8)
    numbers = codes.view(oracle.CODE_DTYPES[fmt]).astype(np.float64)
    ties = rng.choice((numbers[:-1] + numbers[1:]) / 2, shape)
    products = (ties * np.float64(scale)).astype(np.float32)
    steps = rng.integers(-2, 3, shape).astype(np.int32)
    return (products.view(np.int32) + np.where(products == 0, 0, steps)).view(np.float32)


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "fp8_e5m2"])
def test_float32_numbers_beside_ties(device, rng, fmt):
    for scale in (1.0, 0.3, 1.1e-30, 7.7e25):
        case = make_case(rng, fmt, "float32", layers=1, tokens=16)
        case.kv_c[0] = _near_ties(rng, fmt, np.float32(scale), case.kv_c.shape[1:])
        case.scales = [float(np.float32(scale))]
        check(device, case)


@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
@pytest.mark.parametrize("pad", [0, 3])
def test_tiles_of_every_kind(device, rng, scale_format, pad):
    case = make_case(rng, "fp8_ds_mla", "bfloat16", layers=1, tokens=16, row_pad=pad)
    case.scale_format, case.collect_stats, case.slots = scale_format, True, rng.permutation(16)
    rows = case.kv_c[0]
    rows[0] = 0
    rows[1, :128], rows[1, 128:256] = np.nan, -0.0
    rows[2, :4] = [1, np.inf, -2, 0]
    rows[3] = rows[3] * np.asarray(2.0**-130, rows.dtype)
    rows[4] = rows[4] * np.asarray(2.0**110, rows.dtype)
    rows[5] = rng.standard_normal(512).astype(rows.dtype) * np.asarray(2.0**-100, rows.dtype)
    for token in range(6, 10):
        rows[token].view(np.uint16)[:] = rng.integers(0, 65536, 512, np.uint16)
    case.k_pe[0].view(np.uint16)[:] = rng.integers(0, 65536, case.k_pe[0].shape, np.uint16)
    check(device, case)


def test_golden_row_of_fp8_ds_mla(device, rng):
    case = make_case(rng, "fp8_ds_mla", "bfloat16", layers=1, tokens=1)
    case.slots = np.array([9])
    case.kv_c[0, 0] = np.repeat([1, 2, 3, 4], 128)
    case.k_pe[0, 0] = np.arange(64)
    harness.launch(device, case)
    start = case.caches[0].geometry.row_at(9)
    row = case.caches[0].pool[start : start + 656].tobytes()
    assert row[:512] == b"\x7e" * 512
    assert row[512:528].hex() == "2549123b2549923bb76ddb3b2549123c"
    assert row[528:] == np.arange(64).astype(ml_dtypes.bfloat16).tobytes()


@pytest.mark.parametrize(
    ("first", "scale_format", "bits", "codes"),
    [
        ([336], "float32", "3F400000", "7E"),
        ([336], "ue8m0", "3F800000", "7A"),
        ([0], "float32", "00800000", "00"),
        ([0], "ue8m0", "39000000", "00"),
        ([1, NAN, 2, 0], "float32", "3B924925", "76 7F 7E 00"),
        ([1, INF, -2, 0], "float32", "7F800000", "00 7F 80 00"),
        ([1.015625], "float32", "3B149249", "7E"),
    ],
)
def test_golden_tiles(device, rng, first, scale_format, bits, codes):
    case = make_case(rng, "fp8_ds_mla", "bfloat16", layers=1, tokens=1)
    case.slots, case.scale_format = np.array([0]), scale_format
    case.kv_c[0, 0, 128:256] = 0
    case.kv_c[0, 0, 128 : 128 + len(first)] = first
    harness.launch(device, case)
    row = case.caches[0].pool[256 : 256 + 656]
    assert f"{row[516:520].view('<u4')[0]:08X}" == bits
    want = bytes.fromhex(codes)
    assert row[128 : 128 + len(want)].tobytes() == want


def test_counters_and_first_errors(device, rng):
    case = make_case(rng, "fp8_e4m3", "bfloat16", layers=2, tokens=4)
    case.kv_c[...], case.k_pe[...] = 1, 1
    case.slots = np.array([[3, -1, 99, 5], [-1, 0, 1, 2]])
    case.kv_c[0, 0, :3] = [np.nan, np.inf, 500]  # the rule: Inf counts twice, NaN once
    case.kv_c[0, 1, 0] = np.nan  # not stored, not counted
    case.k_pe[1, 3, 5] = -np.inf
    case.scales, case.collect_stats = [1.0, 1.0], True
    outcome = harness.launch(device, case)
    assert {name: counts.tolist() for name, counts in outcome.counters.items()} == {
        "slots_out_of_range": [1, 0],
        "positions_out_of_range": [0, 0],
        "rows_written": [2, 3],
        "slots_padding": [1, 1],
        "nonfinite_elements": [2, 1],
        "saturated_elements": [2, 1],
    }
    assert outcome.errors["slot"] == (0, 2, 99)
    assert outcome.errors["nonfinite"] in {(0, 0, 3), (1, 3, 2)}


@pytest.mark.parametrize(("fmt", "dtype"), COMBINATIONS)
def test_statistics_change_no_byte(device, rng, fmt, dtype):
    case = make_case(rng, fmt, dtype, layers=2, tokens=30, blocks=9)
    harness.launch(device, case)
    plain = [cache.pool.copy() for cache in case.caches]
    for cache in case.caches:
        cache.pool[:] = harness.SENTINEL
    case.collect_stats = True
    harness.launch(device, case)
    harness.assert_pools(case, plain)


@st.composite
def cases(draw):
    """Draw anything that a host may ask for."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    fmt, dtype = draw(st.sampled_from(COMBINATIONS))
    itemsize = 1 if fmt.startswith("fp8") else oracle.DTYPES[dtype].itemsize
    rank, rope = 512, 64
    if fmt != "fp8_ds_mla":
        rank = draw(st.sampled_from([16, 32, 512]) | st.integers(1, 80))
        rope = draw(st.sampled_from([0, 16, 64]) | st.integers(0, 20))
    units = st.sampled_from([0, 16]) | st.integers(0, 5).map(lambda n: n * itemsize)
    case = make_case(
        rng,
        fmt,
        dtype,
        layers=draw(st.integers(1, 4)),
        tokens=draw(st.integers(1, 40)),
        rank=rank,
        rope=rope,
        blocks=draw(st.integers(1, 8)),
        block_size=draw(st.integers(1, 9)),
        row_pad=draw(units),
        block_pad=draw(units),
        offset=256 + draw(units),
    )
    if draw(st.booleans()):
        case.kv_c.view(np.uint8)[...] = rng.integers(
            0, 256, case.kv_c.view(np.uint8).shape, np.uint8
        )
    if draw(st.booleans()):
        noise = rng.random(case.slots.shape)
        case.slots = np.where(noise < 0.1, 10**12, np.where(noise < 0.2, -9, case.slots))
    if draw(st.booleans()):
        case.slots = case.slots.clip(max=2**31 - 1).astype(np.int32)
    if case.scales is not None and draw(st.booleans()):
        floats = st.floats(width=32, min_value=2.0**-149, allow_infinity=False)
        case.scales = [draw(floats) for _ in case.scales]
    if fmt == "fp8_ds_mla":
        case.scale_format = draw(st.sampled_from(["float32", "ue8m0"]))
    case.collect_stats = draw(st.booleans())
    case.stream_stores = draw(st.booleans())
    return case, draw(st.sampled_from(["table", "live", "scales", "mapped"]))


@given(cases())
def test_any_case(device, drawn):
    case, mode = drawn
    check(device, case, mode)
