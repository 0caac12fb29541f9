"""Element types: NumPy dtypes (ml_dtypes where NumPy has none) and the fp8 formats' limits.

Everywhere in cupy_mla a dtype is a ``numpy.dtype`` object, whichever framework the array is from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

DType = np.dtype[Any]

BFLOAT16: DType = np.dtype(ml_dtypes.bfloat16)
FLOAT16: DType = np.dtype(np.float16)
FLOAT32: DType = np.dtype(np.float32)
FLOAT8_E4M3: DType = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT8_E5M2: DType = np.dtype(ml_dtypes.float8_e5m2)
UINT8: DType = np.dtype(np.uint8)
INT32: DType = np.dtype(np.int32)
INT64: DType = np.dtype(np.int64)

#: What a row may be made of before it is stored.
INPUT_DTYPES: tuple[DType, ...] = (BFLOAT16, FLOAT16, FLOAT32)
#: What a slot, a position or a table entry may be.
INDEX_DTYPES: tuple[DType, ...] = (INT32, INT64)

#: Names that NumPy's own ``np.dtype(name)`` may not know.
_BY_NAME: dict[str, DType] = {
    np.dtype(scalar).name: np.dtype(scalar)
    for scalar in (
        ml_dtypes.bfloat16,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e4m3fnuz,
        ml_dtypes.float8_e4m3b11fnuz,
        ml_dtypes.float8_e5m2,
        ml_dtypes.float8_e5m2fnuz,
    )
}


@dataclass(frozen=True)
class Fp8Format:
    """Limits of one fp8 format.

    Attributes
    ----------
    dtype : numpy.dtype
        The ml_dtypes dtype of a code.
    max : float
        Largest finite magnitude.
    overflow : float
        Smallest magnitude that round-to-nearest-even without saturation would turn into NaN or
        Inf is ``overflow`` itself when `overflow_inclusive`, else the next float above it.
    overflow_inclusive : bool
        Whether the tie at `overflow` already overflows (its neighbour below has an odd mantissa).
    """

    dtype: DType
    max: float
    overflow: float
    overflow_inclusive: bool


#: A NaN is stored as this code in both formats, as ``cvt.rn.satfinite`` does on a GPU.
FP8_NAN_CODE = 0x7F

FP8_FORMATS: dict[DType, Fp8Format] = {
    FLOAT8_E4M3: Fp8Format(FLOAT8_E4M3, 448.0, 464.0, overflow_inclusive=False),
    FLOAT8_E5M2: Fp8Format(FLOAT8_E5M2, 57344.0, 61440.0, overflow_inclusive=True),
}


def named(name: str) -> DType | None:
    """Return the dtype called `name`, or None where nothing is called so.

    Parameters
    ----------
    name : str
        A dtype name as NumPy, ml_dtypes, torch or JAX spell it (``bfloat16``, ``float32``).
    """
    if name in _BY_NAME:
        return _BY_NAME[name]
    try:
        return np.dtype(name)
    except (TypeError, ValueError, SyntaxError):
        return None


def of(value: object) -> DType | None:
    """Return what a caller means by a dtype, in native byte order; None for what is none.

    Parameters
    ----------
    value : str, dtype or type
        A name, or a dtype of NumPy, ml_dtypes, torch or JAX.
    """
    if isinstance(value, (np.dtype, type)):
        try:
            return named(np.dtype(value).name)
        except TypeError:
            return None
    return named(value if isinstance(value, str) else str(value).rpartition(".")[2])


def text(dtype: DType) -> str:
    """Return a dtype's name, and its byte order where it is another machine's."""
    return dtype.name if dtype.isnative else f"{dtype.name} of foreign byte order ({dtype.str})"
