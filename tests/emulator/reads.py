"""Calls that read rows, made twice: by the NumPy reference, and by launch code and kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cupy_mla import backends
from cupy_mla._cuda.backend import CudaBackend
from tests import oracle
from tests.emulator.device import EmulatorDevice
from tests.emulator.harness import aligned

Array = np.ndarray[Any, Any]

FORMATS = ("bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla", "indexer_fp8")
OUTPUTS = ("bfloat16", "float16", "float32")


def by_kernels(device: EmulatorDevice, call: Callable[[], Any]) -> Any:
    """Make a call with host arrays as if they were a device's."""
    usual = backends._NUMPY
    backends._NUMPY = CudaBackend(device)  # type: ignore[assignment]
    try:
        return call()
    finally:
        backends._NUMPY = usual


def agree(device: EmulatorDevice, call: Callable[[], Any], *pools: Array) -> Any:
    """Compare every byte that a call returns, and every byte of the pools that it writes into."""
    before = [pool.copy() for pool in pools]
    want = call()
    wanted = [pool.copy() for pool in pools]
    for pool, bytes_ in zip(pools, before, strict=True):
        pool[...] = bytes_
    got = by_kernels(device, call)
    for number, (pool, bytes_) in enumerate(zip(pools, wanted, strict=True)):
        wrong = np.flatnonzero(pool != bytes_)
        assert not wrong.size, (
            f"pool {number}: {wrong.size} bytes differ, first at {wrong[0]}: "
            f"{pool[wrong[0]]:02X}, not {bytes_[wrong[0]]:02X}"
        )
    if isinstance(want, np.ndarray):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        same = bits_of(got) == bits_of(want)
        assert same.all(), f"differs first at {np.argwhere(~same)[0]}"
    return got


def bits_of(values: Array) -> Array:
    """Look at the bits of numbers."""
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")


def storage(fmt: str) -> np.dtype[Any]:
    """Return the element type of a cache."""
    return oracle.DTYPES.get(fmt, oracle.UINT8)


def random_cache(
    rng: np.random.Generator,
    fmt: str,
    width: int = 576,
    *,
    blocks: int = 5,
    block_size: int = 4,
    row_pad: int = 0,
    block_pad: int = 0,
    offset: int = 256,
    finite: bool = False,
) -> tuple[Array, Array]:
    """Make a cache of random bits in a pool of random bytes; return the cache and the pool.

    With `finite` the elements are numbers around 1, and the scales in the rows too.
    """
    dtype = storage(fmt)
    size = {"fp8_ds_mla": 656, "indexer_fp8": 132}.get(fmt, width * dtype.itemsize)
    if fmt == "indexer_fp8":
        assert not row_pad
    row_stride = size + row_pad
    block_stride = block_size * row_stride + block_pad
    pool = aligned(offset + blocks * block_stride + 256)
    pool[...] = rng.integers(0, 256, pool.shape, np.uint8)
    if finite:
        _make_finite(rng, fmt, pool, offset, blocks, block_stride, block_size, row_stride, size)
    shape = (blocks, block_size, size // dtype.itemsize)
    strides = (block_stride, row_stride, dtype.itemsize)
    return np.ndarray(shape, dtype, pool, offset, strides), pool


def _make_finite(
    rng: np.random.Generator,
    fmt: str,
    pool: Array,
    offset: int,
    blocks: int,
    block_stride: int,
    block_size: int,
    row_stride: int,
    size: int,
) -> None:
    for block in range(blocks):
        for row in range(block_size):
            start = offset + block * block_stride + row * row_stride
            scales = np.exp2(rng.uniform(-9, 9, 4)).astype("<f4").view(np.uint8)
            values = rng.standard_normal(576) * np.exp2(rng.integers(-8, 8, 576))
            if fmt in oracle.DTYPES:
                count = size // oracle.DTYPES[fmt].itemsize
                part = np.resize(values, count).astype(oracle.DTYPES[fmt])
                pool[start : start + size] = part.view(np.uint8)
                continue
            limit = 0x7B if fmt == "fp8_e5m2" else 0x7E
            codes = rng.integers(0, limit + 1, size, np.uint8)
            codes |= rng.integers(0, 2, size, np.uint8) << 7
            if fmt == "indexer_fp8":
                base = offset + block * block_stride
                pool[base + 128 * row : base + 128 * row + 128] = codes[:128]
                plane = base + 128 * block_size + 4 * row
                pool[plane : plane + 4] = scales[:4]
                continue
            pool[start : start + size] = codes
            if fmt == "fp8_ds_mla":
                pool[start + 512 : start + 528] = scales
                rope = values[:64].astype(oracle.BFLOAT16)
                pool[start + 528 : start + 656] = rope.view(np.uint8)


def make_out(
    rows: int, width: int, dtype: str, *, gap: int = 0, offset: int = 256
) -> tuple[Array, Array]:
    """Make an output in a pool of a pattern, rows `gap` bytes apart; return it and the pool."""
    kind = oracle.DTYPES.get(dtype, oracle.UINT8)
    stride = width * kind.itemsize + gap
    pool = aligned(offset + rows * stride + 256, fill=0x5A)
    return np.ndarray((rows, width), kind, pool, offset, (stride, kind.itemsize)), pool
