"""Caches in files, memory-mapped: NumPy's .npy and .safetensors. Nothing is ever unpickled."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from cupy_mla import dtypes
from cupy_mla.dtypes import DType
from cupy_mla.errors import BackendUnavailable, reject_type, reject_value
from cupy_mla.layouts import CacheLayout, resolve_layout

Array = np.ndarray[Any, Any]

#: Bits of an element by safetensors' name of its type, for finding where a tensor begins.
_SAFETENSORS_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys(
        ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8
    ),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
#: Types that a cache may be stored as.
_SAFETENSORS_DTYPES: dict[str, DType] = {
    "U8": dtypes.UINT8,
    "I8": np.dtype(np.int8),
    "F8_E4M3": dtypes.FLOAT8_E4M3,
    "F8_E5M2": dtypes.FLOAT8_E5M2,
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "F16": dtypes.FLOAT16,
    "BF16": dtypes.BFLOAT16,
    "F32": dtypes.FLOAT32,
}
_NAMES_SHOWN = 8


def open_cache(
    path: str | os.PathLike[str],
    kv_cache_dtype: str | CacheLayout,
    *,
    block_size: int | None = None,
    tensor: str | None = None,
    kv_lora_rank: int = 512,
    rope_dim: int = 64,
    operation: str = "open_cache",
) -> Array:
    """Map a cache in a file into memory, read-only.

    Parameters
    ----------
    path : path
        A ``.npy`` file, or a ``.safetensors`` file, which needs the package safetensors.
    kv_cache_dtype : str or CacheLayout
        See `get_layout`; ``auto`` is the file's own bfloat16, float16 or float32.
    block_size : int, optional
        Rows a block, for a file of shape ``[slots, width]``: 1 by default.
    tensor : str, optional
        Name of the tensor in a ``.safetensors`` file of several.
    kv_lora_rank, rope_dim : int
        Elements of the latent and of the rotary part, where `kv_cache_dtype` is a name.
    operation : str
        Name for messages.

    Returns
    -------
    array [num_blocks, block_size, width]
        Of the layout's `storage_dtype`. A file may also hold it as raw elements of that size (NumPy
        writes bfloat16 so), as bytes, or with an axis of one head.

    Raises
    ------
    ValueError
        For a file that is missing, damaged, of another kind, or of a shape that does not fit.
    TypeError
        For elements of another type.
    BackendUnavailable
        For a ``.safetensors`` file without the package.
    """
    name = os.fspath(path)
    if not os.path.isfile(name):
        reject_value(operation, "file", "exist and be a regular file", repr(name))
    suffix = Path(name).suffix.lower()
    if suffix == ".npy":
        if tensor is not None:
            reject_value(operation, "tensor", "be None for a .npy file", repr(tensor))
        mapped = _map_npy(operation, name)
    elif suffix == ".safetensors":
        mapped = _map_safetensors(operation, name, tensor)
    else:
        reject_value(operation, "file", "be a .npy or .safetensors file", repr(name))
    if isinstance(kv_cache_dtype, str) and kv_cache_dtype == "auto":
        kv_cache_dtype = _own_dtype(operation, name, mapped)
    layout = resolve_layout(operation, kv_cache_dtype, kv_lora_rank, rope_dim)
    return _as_cache(operation, name, mapped, layout, block_size)


def _map_npy(operation: str, name: str) -> Array:
    try:
        # Reads .npy alone, maps what it reads, and refuses object arrays, which are pickles.
        mapped: Array = np.lib.format.open_memmap(name, mode="r")
    except Exception as error:  # a damaged header makes NumPy's parser raise anything
        raise ValueError(
            f"{operation}: file must be an undamaged .npy file of numbers (pickles are not "
            f"loaded), got {name!r}: {error}"
        ) from error
    if not mapped.flags.c_contiguous:
        reject_value(operation, "file", "hold an array in C order", f"Fortran order in {name!r}")
    return mapped


def _map_safetensors(operation: str, name: str, tensor: str | None) -> Array:
    try:
        library: Any = importlib.import_module("safetensors")
    except ImportError as error:
        raise BackendUnavailable(
            f"{operation}: .safetensors files need the package safetensors "
            "(pip install 'cupy-mla[inspect]')"
        ) from error
    offset = 0
    begins: dict[str, tuple[int, str, tuple[int, ...]]] = {}
    try:
        # Checks the header: offsets that overlap, leave a gap or end elsewhere than the file.
        with library.safe_open(name, framework="np") as opened:
            for key in opened.offset_keys():
                part = opened.get_slice(key)
                kind, shape = part.get_dtype(), tuple(part.get_shape())
                begins[key] = (offset, kind, shape)
                count = int(np.prod(shape, dtype=object))
                offset += count * _SAFETENSORS_BITS[kind] // 8
    except KeyError as error:
        reject_value(operation, "file", "hold tensors of known types", f"{error} in {name!r}")
    except (library.SafetensorError, OSError) as error:
        raise ValueError(
            f"{operation}: file must be an undamaged .safetensors file, got {name!r}: {error}"
        ) from error
    begin, kind, shape = begins[_choose(operation, name, list(begins), tensor)]
    dtype = _SAFETENSORS_DTYPES.get(kind)
    if dtype is None:
        known = ", ".join(_SAFETENSORS_DTYPES)
        reject_type(operation, "tensor", f"be one of {known}", kind)
    if 0 in shape:
        return np.empty(shape, dtype)
    start = Path(name).stat().st_size - offset + begin  # the tensors end where the file does
    return np.memmap(name, dtype, "r", start, shape)


def _choose(operation: str, name: str, keys: list[str], tensor: str | None) -> str:
    shown = ", ".join(map(repr, keys[:_NAMES_SHOWN])) + (", ..." if keys[_NAMES_SHOWN:] else "")
    if tensor is None:
        if len(keys) == 1:
            return keys[0]
        reject_value(
            operation, "tensor", f"be named, one of {shown or 'none'}", f"{len(keys)} in {name!r}"
        )
    if tensor not in keys:
        reject_value(operation, "tensor", f"be one of {shown or 'none'}", repr(tensor))
    return tensor


def _own_dtype(operation: str, name: str, mapped: Array) -> str:
    if mapped.dtype == np.dtype("V2"):  # what numpy.save makes of bfloat16
        return dtypes.BFLOAT16.name
    if mapped.dtype not in dtypes.INPUT_DTYPES:
        reject_type(
            operation,
            "file",
            'hold bfloat16, float16 or float32 for layout "auto" (name the layout of others)',
            f"{mapped.dtype} in {name!r}",
        )
    return str(mapped.dtype.name)


def _as_cache(
    operation: str, name: str, mapped: Array, layout: CacheLayout, block_size: int | None
) -> Array:
    """View a mapped array as a cache of `layout`; nothing is copied."""
    stored = layout.storage_dtype
    raw = mapped.dtype.kind in "uiV" and mapped.dtype.itemsize in (1, stored.itemsize)
    if mapped.dtype not in layout.accepted_dtypes and not raw:
        expected = " or ".join(dtype.name for dtype in layout.accepted_dtypes)
        reject_type(
            operation,
            "file",
            f"hold {expected} for {layout.name}, or raw elements of that size",
            f"{mapped.dtype} in {name!r}",
        )
    shape = mapped.shape
    fits = 2 <= len(shape) <= 4 and (len(shape) < 4 or shape[2] == 1)
    if not fits or shape[-1] * mapped.dtype.itemsize != layout.row_bytes:
        width = layout.row_bytes // mapped.dtype.itemsize
        reject_value(
            operation,
            "file",
            f"have shape [num_blocks, block_size, {width}] or [slots, {width}] for {layout.name} "
            f"rows (kv_lora_rank {layout.kv_lora_rank}, rope_dim {layout.rope_dim})",
            f"{list(shape)} in {name!r}",
        )
    if 0 in shape:
        reject_value(operation, "file", "hold at least one row", f"{list(shape)} in {name!r}")
    if len(shape) > 2:
        rows = shape[1]
        if block_size not in (None, rows):
            reject_value(operation, "block_size", f"be the {rows} of {name!r}", block_size)
    else:
        rows = 1 if block_size is None else block_size
        if rows < 1 or shape[0] % rows:
            reject_value(
                operation, "block_size", f"divide the {shape[0]} slots of {name!r}", block_size
            )
    return mapped.view(stored).reshape(-1, rows, layout.width)
