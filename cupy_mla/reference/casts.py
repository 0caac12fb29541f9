"""Roundings from float32 to the dtype of an output."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupy_mla import dtypes
from cupy_mla.dtypes import DType

from .fp8 import Floats

Array = np.ndarray[Any, Any]

#: What a NaN becomes, as PTX conversions and arithmetic have it: one code, without a sign.
_NAN_BITS: dict[DType, int] = {
    dtypes.BFLOAT16: 0x7FFF,
    dtypes.FLOAT16: 0x7FFF,
    dtypes.FLOAT32: 0x7FFFFFFF,
}


def narrow(values: Floats, dtype: DType) -> Array:
    """Round float32 to `dtype`, to nearest even; a NaN becomes one code.

    Parameters
    ----------
    values : float32 array
    dtype : numpy.dtype
        bfloat16, float16 or float32.

    Returns
    -------
    array of `dtype`
        A NaN is 0x7FFF (16 bits) or 0x7FFFFFFF. What is beyond the largest finite number is Inf.
    """
    with np.errstate(all="ignore"):
        out = values.astype(dtype)
    out.view(f"u{dtype.itemsize}")[np.isnan(values)] = _NAN_BITS[dtype]
    return out


def widen(values: Array) -> Floats:
    """Return values of an input dtype as float32, which is exact."""
    with np.errstate(all="ignore"):
        return values.astype(np.float32)


def round_to(values: Floats, dtype: DType) -> Floats:
    """Round float32 to what `dtype` can hold, and keep it as float32."""
    return widen(narrow(values, dtype))
