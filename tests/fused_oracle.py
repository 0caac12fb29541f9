"""What the fused operations must give: one number at a time, written from the rules.

Every operation is one on NumPy float32 scalars, so each is rounded by itself; the order of the
sums is spelled out. `exact_*` are the same formulas in float64, which bound the error instead.
Nothing here imports the package under test; rows are encoded by `tests.oracle`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import numpy as np

from tests import oracle

F32 = np.float32
KEY_BYTES = 128  # codes of an indexer row; its scale lies behind the codes of all rows of a block
SCALE_BYTES = 4


# --- rounding -------------------------------------------------------------------------------------


def bf16_bits(value: np.float32) -> int:
    """Bits of a bfloat16, to nearest even; every NaN is 7FFF."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    if bits & 0x7FFFFFFF > 0x7F800000:
        return 0x7FFF
    low, high = bits & 0xFFFF, bits >> 16
    return high + (1 if low > 0x8000 or (low == 0x8000 and high & 1) else 0)


def narrow(values: Sequence[np.float32], dtype: np.dtype) -> np.ndarray:
    """Values rounded once to a dtype."""
    if dtype == oracle.BFLOAT16:
        return np.array([bf16_bits(value) for value in values], np.uint16).view(dtype)
    with np.errstate(all="ignore"):
        out = np.array(values, F32).astype(dtype)
    code = 0x7FFF if dtype.itemsize == 2 else 0x7FFFFFFF
    for index, value in enumerate(values):
        if math.isnan(value):
            out.view(f"u{dtype.itemsize}")[index] = code
    return out


def widen(values: np.ndarray) -> list[np.float32]:
    """Values of any input dtype as float32."""
    with np.errstate(all="ignore"):
        return list(np.asarray(values).astype(F32))


def rounded(values: Sequence[np.float32], dtype: np.dtype) -> list[np.float32]:
    """Values that a dtype can hold, as float32."""
    return widen(narrow(values, dtype))


# --- norms and RoPE -------------------------------------------------------------------------------


def tree(terms: Sequence[np.float32]) -> np.float32:
    """Sum in the fixed order: 32 lanes, then a butterfly."""
    places = 16 if len(terms) >= 512 else 4
    lanes = [F32(0)] * 32
    for element, term in enumerate(terms):  # rising elements: rising chunk, then rising place
        lane = element // places % 32
        lanes[lane] = lanes[lane] + term
    for distance in (16, 8, 4, 2, 1):
        lanes = [lanes[lane] + lanes[lane ^ distance] for lane in range(32)]
    return lanes[0]


def rms_norm(x: Sequence[np.float32], weight: Sequence[np.float32], eps: float) -> list[np.float32]:
    """(x * r) * w."""
    mean = tree([value * value for value in x]) / F32(len(x))
    r = F32(1) / np.sqrt(mean + F32(eps))
    return [(value * r) * w for value, w in zip(x, weight, strict=True)]


def layer_norm(
    x: Sequence[np.float32],
    weight: Sequence[np.float32],
    bias: Sequence[np.float32],
    eps: float,
) -> list[np.float32]:
    """((d * r) * w) + b."""
    mean = tree(x) / F32(len(x))
    d = [value - mean for value in x]
    var = tree([value * value for value in d]) / F32(len(x))
    r = F32(1) / np.sqrt(var + F32(eps))
    return [((value * r) * w) + b for value, w, b in zip(d, weight, bias, strict=True)]


def pairs(width: int, neox: bool) -> list[tuple[int, int]]:
    """Pairs of elements that are rotated together."""
    half = width // 2
    return [(i, i + half) if neox else (2 * i, 2 * i + 1) for i in range(half)]


def rope(
    x: Sequence[np.float32], table: np.ndarray, position: int, neox: bool
) -> tuple[list[np.float32], bool]:
    """Rotate the leading part; zeros there and False for a position that the table lacks."""
    out, width = list(x), table.shape[1]
    if not 0 <= position < len(table):
        out[:width] = [F32(0)] * width
        return out, False
    row = widen(table[position])
    for i, (first, second) in enumerate(pairs(width, neox)):
        cos, sin = row[i], row[width // 2 + i]
        a, b = x[first], x[second]
        out[first] = a * cos - b * sin
        out[second] = b * cos + a * sin
    return out, True


# --- the indexer's keys and queries ---------------------------------------------------------------


def key_scale(values: Sequence[np.float32], scale_format: str = "ue8m0") -> np.float32:
    """Scale of one row."""
    amax = max((abs(float(v)) for v in values if not math.isnan(v)), default=0.0)
    raw = F32(max(F32(amax), F32(1e-4))) / F32(448)
    if scale_format == "float32" or math.isinf(raw):
        return raw
    mantissa, exponent = math.frexp(float(raw))
    return F32(math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent))


def key_codes(
    values: Sequence[np.float32], scale_format: str = "ue8m0"
) -> tuple[np.ndarray, np.float32]:
    """Codes and scale of one row."""
    scale = key_scale(values, scale_format)
    return oracle.encode_fp8(np.array(values, F32), scale, "fp8_e4m3"), scale


def put_key(
    pool: np.ndarray,
    geometry: oracle.Geometry,
    slot: int,
    values: Sequence[np.float32],
    scale_format: str = "ue8m0",
) -> None:
    """Store a row in an indexer cache: codes of all rows of the block, then all scales."""
    codes, scale = key_codes(values, scale_format)
    block, row = divmod(slot, geometry.block_size)
    start = geometry.offset + block * geometry.block_stride
    at = start + row * KEY_BYTES
    pool[at : at + KEY_BYTES] = codes
    at = start + geometry.block_size * KEY_BYTES + row * SCALE_BYTES
    pool[at : at + SCALE_BYTES] = np.frombuffer(struct.pack("<f", scale), np.uint8)


# --- rows of an MLA cache -------------------------------------------------------------------------


def encode_values(
    latent: Sequence[np.float32],
    rotary: Sequence[np.float32],
    fmt: str,
    scale: float | None,
    scale_format: str,
) -> bytes:
    """Bytes of a row of float32 values, each rounded once."""
    if fmt in oracle.DTYPES:
        dtype = oracle.DTYPES[fmt]
        return narrow(latent, dtype).tobytes() + narrow(rotary, dtype).tobytes()
    nope, rope_part = np.array(latent, F32), np.array(rotary, F32)
    if fmt == "fp8_ds_mla":
        return oracle.encode_row(
            nope, narrow(rotary, oracle.BFLOAT16), fmt, scale_format=scale_format
        )
    return oracle.encode_row(nope, rope_part, fmt, scale)


def put_values(
    pool: np.ndarray,
    geometry: oracle.Geometry,
    slot: int,
    row: bytes,
) -> None:
    """Store a row in an MLA cache."""
    start = geometry.row_at(slot)
    pool[start : start + len(row)] = np.frombuffer(row, np.uint8)


# --- the same in float64 --------------------------------------------------------------------------


def exact_rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """RMSNorm of rows."""
    x = x.astype(np.float64)
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight.astype(np.float64)


def exact_layer_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float) -> np.ndarray:
    """LayerNorm of rows."""
    d = x.astype(np.float64)
    d = d - d.mean(axis=-1, keepdims=True)
    root = np.sqrt(np.mean(d * d, axis=-1, keepdims=True) + eps)
    return d / root * weight.astype(np.float64) + bias.astype(np.float64)


def exact_rope(x: np.ndarray, table: np.ndarray, positions: np.ndarray, neox: bool) -> np.ndarray:
    """RoPE of rows [T, D] or [T, H, D]."""
    rows = table.astype(np.float64)[positions]
    width = table.shape[1]
    out = x.astype(np.float64).copy()
    for i, (first, second) in enumerate(pairs(width, neox)):
        shape = (-1,) + (1,) * (x.ndim - 2)
        cos, sin = rows[:, i].reshape(shape), rows[:, width // 2 + i].reshape(shape)
        a, b = out[..., first].copy(), out[..., second].copy()
        out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return out


def bf16_ulp(values: np.ndarray) -> np.ndarray:
    """Distance of neighbouring bfloat16 numbers around values."""
    _, exponents = np.frexp(np.abs(values))
    return np.ldexp(1.0, np.maximum(exponents, -125) - 8)


def code_order(codes: np.ndarray) -> np.ndarray:
    """Rank of e4m3 codes, so that neighbouring numbers differ by 1 (both zeros are 0)."""
    codes = codes.astype(np.int64)
    return np.where(codes & 0x80, -(codes & 0x7F), codes & 0x7F)
