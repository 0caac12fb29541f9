"""Builders of awkward inputs, comparison of pools byte by byte, and the ways to insert rows."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from cupy_mla import GroupedCacheWriter, concat_and_cache_mla
from tests import oracle
from tests.oracle import Geometry

SENTINEL = 0xA5
FORMATS = ("bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla")
FLAT_FORMATS = FORMATS[:-1]
SCALED_FORMATS = ("fp8_e4m3", "fp8_e5m2")
# The dtype of rows that each format is fed with where a test does not choose another one.
INPUT_DTYPES = {
    "bfloat16": oracle.BFLOAT16,
    "float16": oracle.FLOAT16,
    "float32": oracle.FLOAT32,
    "fp8_e4m3": oracle.BFLOAT16,
    "fp8_e5m2": oracle.BFLOAT16,
    "fp8_ds_mla": oracle.BFLOAT16,
}
STORAGE_DTYPES = {
    "bfloat16": oracle.BFLOAT16,
    "float16": oracle.FLOAT16,
    "float32": oracle.FLOAT32,
    "fp8_e4m3": oracle.UINT8,
    "fp8_e5m2": oracle.UINT8,
    "fp8_ds_mla": oracle.UINT8,
}


class Backend:
    """How a framework makes arrays from NumPy's and gives them back; here NumPy itself.

    For another framework override the four methods. `view` must alias the buffer: tests write
    through views and then look at every byte of the buffer.
    """

    name = "numpy"
    last_duplicate_wins = True

    def array(self, values: np.ndarray) -> Any:
        """Give the framework's array of the same shape, dtype and values."""
        return values

    def to_numpy(self, array: Any) -> np.ndarray:
        """Give the values of a framework's array, synchronised."""
        return np.asarray(array)

    def buffer(self, data: np.ndarray) -> Any:
        """Give a framework's one-dimensional uint8 copy of bytes, aligned to 256 bytes or more."""
        room = np.empty(data.size + 256, np.uint8)
        start = -room.ctypes.data % 256
        room[start : start + data.size] = data
        return room[start : start + data.size]

    def view(
        self, buffer: Any, shape: Sequence[int], dtype: Any, strides: Sequence[int], offset: int = 0
    ) -> Any:
        """Give an array over a buffer's bytes; strides and offset are in bytes."""
        return np.ndarray(tuple(shape), dtype, buffer, offset, tuple(strides))


# --- caches ---------------------------------------------------------------------------------------


@dataclass
class Cache:
    """A cache inside a larger pool of bytes, and where its rows lie there."""

    array: Any
    buffer: Any
    geometry: Geometry
    fmt: str
    backend: Backend = field(repr=False)

    def bytes(self) -> np.ndarray:
        """Every byte of the pool, copied."""
        return self.backend.to_numpy(self.buffer).copy()

    def row(self, slot: int) -> np.ndarray:
        """Bytes of a slot's row."""
        start = self.geometry.row_at(slot)
        return self.bytes()[start : start + self.geometry.row_bytes]

    def values(self, slot: int) -> np.ndarray:
        """Bits of a row's elements: uint16 for 16-bit caches, uint32 for float32, else bytes."""
        width = STORAGE_DTYPES[self.fmt].itemsize
        return self.row(slot).view(f"u{width}")


def make_cache(
    backend: Backend,
    fmt: str = "bfloat16",
    num_blocks: int = 4,
    block_size: int = 4,
    rank: int = 512,
    rope: int = 64,
    *,
    row_pad: int = 0,
    block_pad: int = 0,
    offset: int = 256,
    dtype: Any = None,
    row_bytes: int | None = None,
    four_d: bool = False,
    fill: int = SENTINEL,
) -> Cache:
    """Make a cache in a pool of sentinel bytes that is larger on all sides.

    `row_pad` and `block_pad` are bytes between rows and between blocks.
    """
    size = oracle.row_bytes(fmt, rank, rope) if row_bytes is None else row_bytes
    dtype = np.dtype(STORAGE_DTYPES[fmt] if dtype is None else dtype)
    row_stride = size + row_pad
    block_stride = block_size * row_stride + block_pad
    geometry = Geometry(offset, num_blocks, block_size, block_stride, row_stride, size)
    total = offset + num_blocks * block_stride + 256
    buffer = backend.buffer(np.full(total, fill, np.uint8))
    shape: tuple[int, ...] = (num_blocks, block_size, size // dtype.itemsize)
    strides: tuple[int, ...] = (block_stride, row_stride, dtype.itemsize)
    if four_d:
        shape = (*shape[:2], 1, shape[2])
        strides = (*strides[:2], row_stride, strides[2])
    array = backend.view(buffer, shape, dtype, strides, offset)
    return Cache(array, buffer, geometry, fmt, backend)


def make_layered_pool(
    backend: Backend, fmt: str, layers: int, num_blocks: int, block_size: int
) -> list[Cache]:
    """Make the caches of several layers as slices of one [blocks, layers, rows, width] buffer."""
    size = oracle.row_bytes(fmt, 512, 64)
    dtype = STORAGE_DTYPES[fmt]
    block_stride = layers * block_size * size
    total = 256 + num_blocks * block_stride + 256
    buffer = backend.buffer(np.full(total, SENTINEL, np.uint8))
    caches = []
    for layer in range(layers):
        offset = 256 + layer * block_size * size
        geometry = Geometry(offset, num_blocks, block_size, block_stride, size, size)
        shape = (num_blocks, block_size, size // dtype.itemsize)
        strides = (block_stride, size, dtype.itemsize)
        array = backend.view(buffer, shape, dtype, strides, offset)
        caches.append(Cache(array, buffer, geometry, fmt, backend))
    return caches


# --- rows -----------------------------------------------------------------------------------------


def random_rows(rng: np.random.Generator, shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Finite values over many magnitudes, with zeros of both signs."""
    values = rng.standard_normal(shape) * 2.0 ** rng.integers(-14, 9, shape)
    values = np.where(rng.random(shape) < 0.02, 0.0, values)
    values = np.where(rng.random(shape) < 0.02, -0.0, values)
    return values.astype(np.float32).astype(dtype)


def random_bits(rng: np.random.Generator, shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Every bit random: NaN, infinities and subnormal numbers included."""
    dtype = np.dtype(dtype)
    count = int(np.prod(shape)) * dtype.itemsize
    raw = rng.integers(0, 256, count, np.uint8)
    return raw.view(dtype).reshape(tuple(shape))


def surrounded(
    backend: Backend, values: np.ndarray, *, lead: int = 1, pad: int = 3, offset: int = 0
) -> Any:
    """Place rows inside a larger buffer of NaN: around them, between them, after each row.

    `lead` and `pad` count elements before the first row and after each one; `offset` counts bytes.
    """
    itemsize = values.dtype.itemsize
    width = values.shape[-1]
    strides = [itemsize]
    stride = (width + pad) * itemsize
    for extent in reversed(values.shape[:-1]):
        strides.insert(0, stride)
        stride *= extent + 1
    start = offset + lead * itemsize
    count = start // itemsize + 1 + stride // itemsize
    poison = np.full(count, np.nan, values.dtype).view(np.uint8)
    room = np.ndarray(values.shape, values.dtype, poison, start, strides)
    room[...] = values
    return backend.view(backend.buffer(poison), values.shape, values.dtype, strides, start)


def make_projection(
    backend: Backend, tokens: int, layers: int, rank: int, rope: int, dtype: Any
) -> tuple[Any, Any, np.ndarray, np.ndarray]:
    """Make kv_c [L, T, R] and k_pe [L, T, P] as views of one [T, L, R + P] projection output.

    Also the contiguous copies of both.
    """
    dtype = np.dtype(dtype)
    width = rank + rope
    values = (np.arange(tokens * layers * width) % 251 - 60).astype(dtype)
    values = values.reshape(tokens, layers, width)
    buffer = backend.buffer(values.reshape(-1).view(np.uint8))
    size = dtype.itemsize
    strides = (width * size, layers * width * size, size)
    kv_c = backend.view(buffer, (layers, tokens, rank), dtype, strides)
    k_pe = backend.view(buffer, (layers, tokens, rope), dtype, strides, rank * size)
    by_layer = values.transpose(1, 0, 2)
    return kv_c, k_pe, by_layer[:, :, :rank].copy(), by_layer[:, :, rank:].copy()


def constant_rows(values: Sequence[Sequence[float]], width: int, dtype: Any) -> np.ndarray:
    """Rows [L, T, width], each filled with one number."""
    numbers = np.asarray(values, np.float32)
    return np.repeat(numbers[:, :, None], width, axis=2).astype(dtype)


def row_of(values: Sequence[float], width: int = 512, dtype: Any = oracle.BFLOAT16) -> np.ndarray:
    """One row [1, 1, width] that begins with the given numbers and goes on with zeros."""
    row = np.zeros((1, 1, width), dtype)
    with np.errstate(all="ignore"):
        row[0, 0, : len(values)] = np.asarray(values, np.float32).astype(dtype)
    return row


# --- comparison -----------------------------------------------------------------------------------


def assert_bytes_equal(actual: np.ndarray, expected: np.ndarray, geometry: Geometry) -> None:
    """Compare every byte of two pools; the message names the first wrong byte as block and row."""
    if actual.shape != expected.shape:
        pytest.fail(f"pools of {actual.shape} and {expected.shape} bytes")
    if np.array_equal(actual, expected):
        return
    wrong = np.flatnonzero(actual != expected)
    first = int(wrong[0])
    where = geometry.locate(first)
    end = first + 8
    pytest.fail(
        f"{wrong.size} of {actual.size} bytes differ; first at {where}: "
        f"got {actual[first:end].tobytes().hex(' ').upper()}, "
        f"expected {expected[first:end].tobytes().hex(' ').upper()}"
    )


def assert_values_equal(actual: np.ndarray, expected: np.ndarray) -> None:
    """Compare numbers bit by bit, except that every NaN equals every other."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    missing = np.isnan(expected.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(actual.astype(np.float32)), missing)
    bits = f"u{expected.dtype.itemsize}"
    got = np.where(missing, 0, np.ascontiguousarray(actual).view(bits))
    want = np.where(missing, 0, np.ascontiguousarray(expected).view(bits))
    np.testing.assert_array_equal(got, want)


def codes_hex(row: np.ndarray, count: int) -> str:
    """Hexadecimal text of the first bytes of a row."""
    return row[:count].tobytes().hex(" ").upper()


@contextmanager
def unchanged(*caches: Cache):
    """Assert that the block leaves every byte of the caches' pools alone."""
    before = [cache.bytes() for cache in caches]
    yield
    for cache, pool in zip(caches, before, strict=True):
        assert_bytes_equal(cache.bytes(), pool, cache.geometry)


@contextmanager
def rejected(
    exception: type[Exception] | tuple[type[Exception], ...],
    operation: str,
    arguments: str | Sequence[str],
    *fragments: str,
    layer: int | None = None,
    caches: Sequence[Cache] = (),
):
    """Assert that the block raises the project's form of error and writes nothing.

    The form is "operation: argument must ..., got ...". `arguments` are the names that may be
    blamed, `fragments` are further texts of the message, `layer` is the layer it must name.
    """
    names = [arguments] if isinstance(arguments, str) else list(arguments)
    with unchanged(*caches):
        with pytest.raises(exception) as caught:
            yield
        message = str(caught.value)
        assert_message(message, operation, names, *fragments)
        if layer is not None:
            assert re.search(rf"(layer |\[){layer}\b", message), message


def assert_message(message: str, operation: str, arguments: Sequence[str], *fragments: str) -> None:
    """Assert "operation: argument must ..., got ..." and that the fragments are in the message."""
    head, must, tail = message.partition(" must ")
    assert must, message
    assert head.startswith(f"{operation}: "), message
    assert any(re.search(rf"\b{re.escape(name)}\b", head) for name in arguments), message
    assert ", got " in tail, message
    for fragment in fragments:
        assert fragment.lower() in message.lower(), f"{fragment!r} is not in {message!r}"


# --- ways to insert -------------------------------------------------------------------------------


def layer_of(value: Any, layer: int) -> Any:
    """Give a layer's entry of a per-layer list, or the value that all layers share."""
    return value[layer] if isinstance(value, (list, tuple)) else value


def insert_one_by_one(
    kv_c: Any,
    k_pe: Any,
    caches: Sequence[Any],
    slots: Any,
    fmt: Any = "auto",
    scales: Any = None,
    scale_format: str = "float32",
) -> None:
    """Call the single-layer operation for each layer."""
    for layer, cache in enumerate(caches):
        concat_and_cache_mla(
            kv_c[layer],
            None if k_pe is None else k_pe[layer],
            cache,
            slots if slots.ndim == 1 else slots[layer],
            layer_of(fmt, layer),
            None if scales is None else scales[layer],
            scale_format=scale_format,
        )


def insert_grouped(
    kv_c: Any,
    k_pe: Any,
    caches: Sequence[Any],
    slots: Any,
    fmt: Any = "auto",
    scales: Any = None,
    scale_format: str = "float32",
) -> None:
    """Build a writer for all layers and insert once."""
    writer = GroupedCacheWriter(
        list(caches),
        fmt,
        scales,
        kv_lora_rank=kv_c.shape[-1],
        rope_dim=0 if k_pe is None else k_pe.shape[-1],
        scale_format=scale_format,
    )
    writer.insert(kv_c, k_pe, slots)


INSERT_PATHS: dict[str, Callable[..., None]] = {
    "single": insert_one_by_one,
    "grouped": insert_grouped,
}


def default_scales(fmt: Any, layers: int) -> list[float | None] | None:
    """Give a scale for each layer that needs one, all different; None if no layer does."""
    numbers = [0.37, 1.5, 0.0625, 3.0, 0.2]
    scales = [
        numbers[layer % 5] if layer_of(fmt, layer) in SCALED_FORMATS else None
        for layer in range(layers)
    ]
    return None if all(scale is None for scale in scales) else scales


def expected_pools(
    caches: Sequence[Cache],
    before: dict[int, np.ndarray],
    kv_c: np.ndarray,
    k_pe: np.ndarray | None,
    slots: np.ndarray,
    scales: Sequence[float | None] | None,
    scale_format: str,
) -> dict[int, np.ndarray]:
    """Give what each pool must hold after the rows of all layers were stored, by the oracle."""
    after = {key: pool.copy() for key, pool in before.items()}
    for layer, cache in enumerate(caches):
        oracle.insert(
            after[id(cache.buffer)],
            cache.geometry,
            kv_c[layer],
            None if k_pe is None else k_pe[layer],
            slots if slots.ndim == 1 else slots[layer],
            cache.fmt,
            None if scales is None else scales[layer],
            scale_format,
        )
    return after


def pools_of(caches: Sequence[Cache]) -> dict[int, np.ndarray]:
    """Every byte of every pool, once for caches that share one."""
    return {id(cache.buffer): cache.bytes() for cache in caches}


def check_insert(
    insert_path: Callable[..., None],
    caches: Sequence[Cache],
    kv_c: np.ndarray,
    k_pe: np.ndarray | None,
    slots: np.ndarray,
    scales: Sequence[float | None] | None = None,
    scale_format: str = "float32",
    *,
    kv_c_array: Any = None,
    k_pe_array: Any = None,
    slots_array: Any = None,
    may_refuse: str | None = None,
) -> bool:
    """Insert and compare every byte of the pools with the oracle; say whether rows were stored.

    `kv_c`, `k_pe` and `slots` are plain NumPy values; the *_array arguments are what to pass in
    their place. With `may_refuse`, a ValueError that names this argument and writes nothing is
    right as well.
    """
    backend = caches[0].backend
    formats = [cache.fmt for cache in caches]
    if scales is None:
        scales = default_scales(formats, len(caches))
    before = pools_of(caches)
    kv_c_array = backend.array(kv_c) if kv_c_array is None else kv_c_array
    if k_pe_array is None and k_pe is not None:
        k_pe_array = backend.array(k_pe)
    slots_array = backend.array(slots) if slots_array is None else slots_array
    stored = True
    try:
        insert_path(
            kv_c_array,
            k_pe_array,
            [cache.array for cache in caches],
            slots_array,
            formats if len(set(formats)) > 1 else formats[0],
            scales,
            scale_format,
        )
    except ValueError as error:
        if may_refuse is None:
            raise
        operation = str(error).partition(":")[0]
        assert_message(str(error), operation, [may_refuse])
        stored = False
    if stored:
        expected = expected_pools(caches, before, kv_c, k_pe, slots, scales, scale_format)
    else:
        expected = before
    for cache in caches:
        assert_bytes_equal(cache.bytes(), expected[id(cache.buffer)], cache.geometry)
    return stored


# --- objects that speak a protocol ----------------------------------------------------------------


#: Each fake has memory of its own.
_fake_pointers = itertools.count(0x7F0000000000, 1 << 32)


class FakeDevice:
    """An array that claims to be CUDA memory; no kernel may ever be launched on it."""

    def __init__(
        self,
        shape: Sequence[int],
        typestr: str,
        *,
        pointer: int | None = None,
        strides: Sequence[int] | None = None,
        device: int = 0,
        dtype: Any = None,
        read_only: bool = False,
    ) -> None:
        self.shape = tuple(shape)
        self.ndim = len(self.shape)
        self.dtype = np.dtype(typestr) if dtype is None else dtype
        self._device = device
        self.__cuda_array_interface__ = {
            "shape": self.shape,
            "typestr": typestr,
            "data": (next(_fake_pointers) if pointer is None else pointer, read_only),
            "strides": None if strides is None else tuple(strides),
            "version": 3,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        """CUDA device of this number."""
        return (2, self._device)

    def __dlpack__(self, **_: Any) -> Any:
        """Refuse: a fake has no memory to export."""
        raise BufferError("this array only claims to exist")


class OnlyDLPack:
    """A host array seen through DLPack alone."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        """Export the array."""
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Give the host."""
        return self._array.__dlpack_device__()
