"""What the bytes of a cache must be: slow, obvious, one row at a time, written from the rules.

Nothing here imports the package under test. Byte offsets are literals and fp8 codes come from
ml_dtypes (clipped first, since its cast does not saturate), so that the package and its tests
cannot share a mistake.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E5M2 = np.dtype(ml_dtypes.float8_e5m2)
FLOAT16 = np.dtype(np.float16)
FLOAT32 = np.dtype(np.float32)
UINT8 = np.dtype(np.uint8)

DTYPES = {"bfloat16": BFLOAT16, "float16": FLOAT16, "float32": FLOAT32}
CODE_DTYPES = {"fp8_e4m3": E4M3, "fp8_e5m2": E5M2}
LARGEST = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
# A round-to-nearest cast without saturation leaves the format above these magnitudes: 464 is the
# tie between 448 and the missing 480 and goes to the even 448; 61440, between 57344 and the
# missing 65536, goes to infinity.
LEAVES_THE_FORMAT = {
    "fp8_e4m3": lambda magnitude: magnitude > 464.0,
    "fp8_e5m2": lambda magnitude: magnitude >= 61440.0,
}
NAN_CODE = 0x7F
SMALLEST_NORMAL = 1.1754944e-38


@dataclass(frozen=True)
class Geometry:
    """Where the rows of one cache lie in a one-dimensional pool of bytes."""

    offset: int
    num_blocks: int
    block_size: int
    block_stride: int
    row_stride: int
    row_bytes: int

    @property
    def capacity(self) -> int:
        """Slots of the cache."""
        return self.num_blocks * self.block_size

    def row_at(self, slot: int) -> int:
        """First byte of a slot's row."""
        block, row = divmod(slot, self.block_size)
        return self.offset + block * self.block_stride + row * self.row_stride

    def locate(self, position: int) -> str:
        """Say in words what a byte of the pool belongs to."""
        for slot in range(self.capacity):
            start = self.row_at(slot)
            if start <= position < start + self.row_bytes:
                block, row = divmod(slot, self.block_size)
                return f"block {block}, row {row}, byte {position - start}"
        return f"outside every row (pool byte {position})"


def row_bytes(fmt: str, rank: int, rope: int) -> int:
    """Bytes of a row."""
    if fmt == "fp8_ds_mla":
        return 656
    if fmt in CODE_DTYPES:
        return rank + rope
    return (rank + rope) * DTYPES[fmt].itemsize


def quotients(values: np.ndarray, scale: float) -> np.ndarray:
    """float32(x) / float32(scale), rounded once."""
    with np.errstate(all="ignore"):
        return values.astype(np.float32) / np.float32(scale)


def encode_fp8(values: np.ndarray, scale: float, fmt: str) -> np.ndarray:
    """Codes of a vector: divide, saturate, round once; every NaN becomes 7F."""
    scaled = quotients(values, scale)
    missing = np.isnan(scaled)
    limit = np.float32(LARGEST[fmt])
    clipped = np.clip(np.where(missing, np.float32(0), scaled), -limit, limit)
    codes = clipped.astype(CODE_DTYPES[fmt]).view(np.uint8)
    return np.where(missing, np.uint8(NAN_CODE), codes)


def tile_scale(tile: np.ndarray, scale_format: str) -> float:
    """Scale of 128 values of an fp8_ds_mla row, as a number that float32 holds exactly."""
    magnitudes = [abs(float(value)) for value in tile if not math.isnan(float(value))]
    amax = max(magnitudes, default=0.0)
    with np.errstate(all="ignore"):
        ratio = np.float32(amax) / np.float32(448.0)
    if scale_format == "float32":
        return float(max(ratio, np.float32(SMALLEST_NORMAL)))
    if scale_format != "ue8m0":
        raise AssertionError(scale_format)
    ratio = float(max(ratio, np.float32(1e-4)))
    if math.isinf(ratio):
        return ratio
    mantissa, exponent = math.frexp(ratio)  # ratio = mantissa * 2**exponent, mantissa in [0.5, 1)
    return math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)


def encode_row(
    kv_c_row: np.ndarray,
    k_pe_row: np.ndarray | None,
    fmt: str,
    scale: float | None = None,
    scale_format: str = "float32",
) -> bytes:
    """Bytes of the row of one token."""
    if k_pe_row is None:
        k_pe_row = kv_c_row[:0]
    if fmt in DTYPES:
        return kv_c_row.tobytes() + k_pe_row.tobytes()
    if fmt in CODE_DTYPES:
        return (
            encode_fp8(kv_c_row, scale, fmt).tobytes() + encode_fp8(k_pe_row, scale, fmt).tobytes()
        )
    if fmt != "fp8_ds_mla":
        raise AssertionError(fmt)
    row = bytearray(656)
    for tile in range(4):
        values = kv_c_row[128 * tile : 128 * tile + 128]
        number = tile_scale(values, scale_format)
        row[128 * tile : 128 * tile + 128] = encode_fp8(values, number, "fp8_e4m3").tobytes()
        row[512 + 4 * tile : 516 + 4 * tile] = struct.pack("<f", number)
    row[528:656] = k_pe_row.tobytes()
    return bytes(row)


def decode_row(
    row: bytes, fmt: str, scale: float | None = None, out_dtype: str = "float32"
) -> np.ndarray:
    """Values of a row: float32(code) * float32(scale), then rounded to the output dtype."""
    data = np.frombuffer(bytes(row), np.uint8)
    with np.errstate(all="ignore"):
        if fmt in DTYPES:
            values = data.view(DTYPES[fmt]).astype(np.float32)
        elif fmt in CODE_DTYPES:
            values = data.view(CODE_DTYPES[fmt]).astype(np.float32) * np.float32(scale)
        else:
            codes = data[:512].view(E4M3).astype(np.float32)
            scales = data[512:528].view("<f4")
            rope = data[528:656].view(BFLOAT16).astype(np.float32)
            tiles = [codes[128 * t : 128 * t + 128] * scales[t] for t in range(4)]
            values = np.concatenate([*tiles, rope])
        return values.astype(DTYPES[out_dtype])


def insert(
    pool: np.ndarray,
    geometry: Geometry,
    kv_c: np.ndarray,
    k_pe: np.ndarray | None,
    slots: np.ndarray,
    fmt: str,
    scale: float | None = None,
    scale_format: str = "float32",
) -> None:
    """Write the rows of one layer into a pool of bytes; a later token wins a shared slot."""
    for token, slot in enumerate(slots.tolist()):
        if 0 <= slot < geometry.capacity:
            row = encode_row(
                kv_c[token], None if k_pe is None else k_pe[token], fmt, scale, scale_format
            )
            start = geometry.row_at(slot)
            pool[start : start + len(row)] = np.frombuffer(row, np.uint8)


def read(
    pool: np.ndarray,
    geometry: Geometry,
    slots: np.ndarray,
    width: int,
    fmt: str,
    scale: float | None = None,
    out_dtype: str = "float32",
) -> np.ndarray:
    """Rows of the given slots as numbers; zeros for a slot that is not in the cache."""
    out = np.zeros((len(slots), width), DTYPES[out_dtype])
    for index, slot in enumerate(slots.tolist()):
        if 0 <= slot < geometry.capacity:
            start = geometry.row_at(slot)
            row = pool[start : start + geometry.row_bytes].tobytes()
            out[index] = decode_row(row, fmt, scale, out_dtype)
    return out


def statistics(
    kv_c: np.ndarray,
    k_pe: np.ndarray | None,
    slots: np.ndarray,
    capacity: int,
    fmt: str,
    scale: float | None = None,
    scale_format: str = "float32",
) -> dict[str, int]:
    """Counts of one layer and one insert, token by token."""
    counts = {
        "slots_out_of_range": 0,
        "positions_out_of_range": 0,
        "rows_written": 0,
        "slots_padding": 0,
        "nonfinite_elements": 0,
        "saturated_elements": 0,
    }
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            counts["slots_padding"] += 1
            continue
        if slot >= capacity:
            counts["slots_out_of_range"] += 1
            continue
        counts["rows_written"] += 1
        rope = kv_c[token][:0] if k_pe is None else k_pe[token]
        for part in (kv_c[token], rope):
            counts["nonfinite_elements"] += int(np.sum(~np.isfinite(part.astype(np.float32))))
        counts["saturated_elements"] += _saturated(kv_c[token], rope, fmt, scale, scale_format)
    return counts


def _saturated(nope, rope, fmt, scale, scale_format) -> int:
    if fmt in CODE_DTYPES:
        pieces = [(nope, scale, fmt), (rope, scale, fmt)]
    elif fmt == "fp8_ds_mla":
        tiles = [nope[128 * t : 128 * t + 128] for t in range(4)]
        pieces = [(tile, tile_scale(tile, scale_format), "fp8_e4m3") for tile in tiles]
    else:
        pieces = []
    return sum(
        int(np.sum(LEAVES_THE_FORMAT[code](np.abs(quotients(values, divisor)))))
        for values, divisor, code in pieces
    )
