"""Launches of the insert kernel by hand: argument structures without the package's launch code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cupy_mla._cuda import compiler, geometry, params, registry
from cupy_mla._cuda.device import Arguments
from cupy_mla.layouts import get_layout
from tests import oracle
from tests.emulator.device import EmulatorDevice

Array = np.ndarray[Any, Any]

SENTINEL = 0xA5
COUNTERS = (
    "slots_out_of_range",
    "positions_out_of_range",
    "rows_written",
    "slots_padding",
    "nonfinite_elements",
    "saturated_elements",
)
INT64_MAX = 2**63 - 1

#: Every layout with every input dtype that it takes.
COMBINATIONS = (
    ("bfloat16", "bfloat16"),
    ("float16", "float16"),
    ("float32", "float32"),
    ("fp8_e4m3", "bfloat16"),
    ("fp8_e4m3", "float16"),
    ("fp8_e4m3", "float32"),
    ("fp8_e5m2", "bfloat16"),
    ("fp8_e5m2", "float16"),
    ("fp8_e5m2", "float32"),
    ("fp8_ds_mla", "bfloat16"),
)


def aligned(nbytes: int, fill: int = SENTINEL, boundary: int = 256) -> Array:
    """Make bytes that start at a multiple of `boundary`."""
    room = np.full(nbytes + boundary, fill, np.uint8)
    start = -room.ctypes.data % boundary
    return room[start : start + nbytes]


def aligned_copy(values: Array) -> Array:
    """Copy an array to aligned memory, C-contiguous."""
    memory = aligned(max(values.nbytes, 1))[: values.nbytes]
    result = memory.view(values.dtype).reshape(values.shape)
    result[...] = values
    return result


@dataclass
class Cache:
    """A pool of sentinel bytes with a cache in it."""

    geometry: oracle.Geometry
    pool: Array = field(repr=False)

    @property
    def ptr(self) -> int:
        """Address of the first row."""
        return self.pool.ctypes.data + self.geometry.offset


def make_cache(
    fmt: str,
    rank: int = 512,
    rope: int = 64,
    *,
    blocks: int = 4,
    block_size: int = 4,
    row_pad: int = 0,
    block_pad: int = 0,
    offset: int = 256,
) -> Cache:
    """Make a cache with room for sentinels on all sides of rows and blocks."""
    row_bytes = oracle.row_bytes(fmt, rank, rope)
    row_stride = row_bytes + row_pad
    block_stride = block_size * row_stride + block_pad
    place = oracle.Geometry(offset, blocks, block_size, block_stride, row_stride, row_bytes)
    return Cache(place, aligned(offset + blocks * block_stride + 256))


@dataclass
class Insert:
    """One launch: inputs ``[L, T, R]`` and ``[L, T, P]`` of any strides, and what to do with them.

    `slots` is ``[T]``, ``[L, T]`` or a list of L arrays or None. `scales` are one number a layer.
    """

    fmt: str
    kv_c: Array
    k_pe: Array | None
    slots: Array | Sequence[Array | None]
    caches: Sequence[Cache]
    scales: Sequence[float] | None = None
    scale_format: str = "float32"
    collect_stats: bool = False
    stream_stores: bool = False
    shape: geometry.LaunchShape | None = None
    tokens: int | None = None

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.caches)

    def slots_of(self, layer: int) -> Array | None:
        """Return the slots of a layer."""
        if isinstance(self.slots, np.ndarray):
            return self.slots if self.slots.ndim == 1 else self.slots[layer]
        return self.slots[layer]

    @property
    def num_tokens(self) -> int:
        """Return T."""
        if self.tokens is not None:
            return self.tokens
        return next(len(s) for s in map(self.slots_of, range(self.layers)) if s is not None)

    def scale(self, layer: int) -> float | None:
        """Return the scale of a layer."""
        return None if self.scales is None else self.scales[layer]


@dataclass
class Outcome:
    """What a launch left behind, beside the caches."""

    counters: dict[str, Array]
    errors: dict[str, tuple[int, int, int]]


def layer_entry(case: Insert, layer: int, source_layer: int, *, scale_ptr: int = 0) -> Array:
    """Fill in a ``LayerEntry``."""
    cache = case.caches[layer]
    entry = params.LAYER_ENTRY.zeros()
    entry["cache"] = cache.ptr
    entry["block_stride"] = cache.geometry.block_stride
    entry["row_stride"] = cache.geometry.row_stride
    entry["num_slots"] = cache.geometry.capacity
    entry["block_size"] = params.divisor(cache.geometry.block_size)
    entry["source_layer"] = source_layer
    entry["scale"] = scale_ptr
    if case.scales is not None and not scale_ptr:
        entry["scale_value"] = case.scales[layer]
    entry["scale_ue8m0"] = case.scale_format == "ue8m0"
    return entry


def _strides(array: Array) -> tuple[int, int]:
    return (array.strides[0], array.strides[1]) if array.ndim == 3 else (0, array.strides[0])


def launch(
    device: EmulatorDevice,
    case: Insert,
    mode: str = "table",
    *,
    counted: bool = True,
    bounded: bool = True,
) -> Outcome:
    """Run the insert kernel on a case.

    Parameters
    ----------
    device : EmulatorDevice
    case : Insert
    mode : str
        Where the kernel finds caches and scales: ``table`` (a device table, scales in it),
        ``live`` (a device table with pointers to scales), ``scales`` (a device table and an array
        of scales), ``mapped`` (a table in reverse order), ``pointers`` (arrays of pointers and
        scales, geometry by value) or ``inline`` (one layer, by value).
    counted : bool
        Whether the kernel gets counters.
    bounded : bool
        Whether it is told how many rows a cache has.
    """
    rank = case.kv_c.shape[-1]
    rope = 0 if case.k_pe is None else case.k_pe.shape[-1]
    layers, tokens = case.layers, case.num_tokens
    special = registry.find("insert", case.fmt, case.kv_c.dtype.name)
    function = compiler.load(device, special, get_layout(case.fmt))
    shape = case.shape or geometry.insert_shape(
        special,
        layers=layers,
        tokens=tokens,
        lora_rank=rank,
        rope_dim=rope,
        sm_count=device.sm_count,
    )
    arguments = params.INSERT_PARAMS.zeros()
    arguments["kv_c"] = (case.kv_c.ctypes.data, *_strides(case.kv_c))
    if case.k_pe is not None and rope:
        arguments["k_pe"] = (case.k_pe.ctypes.data, *_strides(case.k_pe))
    if isinstance(case.slots, np.ndarray):
        step = (0, case.slots.strides[0]) if case.slots.ndim == 1 else case.slots.strides
        arguments["slots"] = (case.slots.ctypes.data, *step)
        arguments["slot_bytes"] = case.slots.itemsize
    else:
        arguments["use_slot_list"] = 1
        for layer, slots in enumerate(case.slots):
            if slots is not None:
                arguments["slot_list"][0][layer] = (slots.ctypes.data, slots.strides[0])
                arguments["slot_bytes"] = slots.itemsize
    arguments["tokens"] = tokens
    arguments["lora_rank"] = rank
    arguments["rope_dim"] = rope
    arguments["blocks_per_layer"] = params.divisor(shape.blocks_per_layer)
    arguments["block_tokens"] = shape.block_tokens
    arguments["collect_stats"] = case.collect_stats
    arguments["stream_stores"] = case.stream_stores
    counters = np.zeros((layers, len(COUNTERS)), np.int64)
    errors = np.zeros(3, params.ERROR_RECORD.dtype)
    if counted:
        arguments["counters"] = counters.ctypes.data
        arguments["errors"] = errors.ctypes.data
    keep = _place_caches(case, mode, arguments, bounded)
    device.launch(function, shape.grid, shape.block, Arguments(arguments.tobytes()), 0)
    del keep
    return Outcome(
        {name: counters[:, i] for i, name in enumerate(COUNTERS)},
        {
            kind: (int(record["layer"]), int(record["token"]), int(record["slot"]))
            for kind, record in zip(("slot", "position", "nonfinite"), errors, strict=True)
            if record["claimed"]
        },
    )


def _place_caches(case: Insert, mode: str, arguments: Array, bounded: bool) -> list[Array]:
    """Fill in where the kernel finds caches and scales; return what has to stay alive."""
    live = np.array(case.scales if case.scales is not None else [], np.float32)
    if mode == "inline":
        arguments["layer"] = layer_entry(case, 0, 0)
        return [live]
    if mode == "pointers":
        pointers = np.array([cache.ptr for cache in case.caches], np.int64)
        arguments["layer"] = layer_entry(case, 0, 0)
        arguments["layer"]["cache"] = 0
        arguments["cache_ptrs"] = pointers.ctypes.data
        arguments["scales"] = live.ctypes.data if live.size else 0
        return [live, pointers]
    order = range(case.layers)
    if mode == "mapped":
        order = reversed(order)
        arguments["layers_are_mapped"] = 1
        if arguments["use_slot_list"][0]:  # by layer of the launch
            arguments["slot_list"][0][: case.layers] = arguments["slot_list"][0][
                case.layers - 1 :: -1
            ]
    entries = [
        layer_entry(
            replace(case, scales=None) if mode == "scales" else case,
            layer,
            layer,
            scale_ptr=live.ctypes.data + 4 * layer if mode == "live" and live.size else 0,
        )
        for layer in order
    ]
    table = aligned_copy(np.concatenate(entries))
    if not bounded:
        table["num_slots"] = INT64_MAX
    arguments["layers"] = table.ctypes.data
    if mode == "scales" and live.size:
        arguments["scales"] = live.ctypes.data
    return [live, table]


def expected_pools(case: Insert) -> list[Array]:
    """Return what the pools have to be, from the rules; call it before the launch."""
    pools = [cache.pool.copy() for cache in case.caches]
    for layer, (pool, cache) in enumerate(zip(pools, case.caches, strict=True)):
        slots = case.slots_of(layer)
        if slots is None:
            continue
        kv_c = case.kv_c if case.kv_c.ndim == 2 else case.kv_c[layer]
        k_pe = case.k_pe if case.k_pe is None or case.k_pe.ndim == 2 else case.k_pe[layer]
        oracle.insert(
            pool, cache.geometry, kv_c, k_pe, slots, case.fmt, case.scale(layer), case.scale_format
        )
    return pools


def assert_pools(case: Insert, expected: Sequence[Array]) -> None:
    """Compare all bytes, and say of the first wrong one where it lies."""
    for layer, (cache, want) in enumerate(zip(case.caches, expected, strict=True)):
        wrong = np.flatnonzero(cache.pool != want)
        if wrong.size:
            first = int(wrong[0])
            raise AssertionError(
                f"{case.fmt}, layer {layer}: {wrong.size} bytes differ, first in "
                f"{cache.geometry.locate(first)}: {cache.pool[first]:02X}, not {want[first]:02X}"
            )


def check(device: EmulatorDevice, case: Insert, mode: str = "table") -> Outcome:
    """Run a case and compare every byte of every pool, and the counters."""
    expected = expected_pools(case)
    outcome = launch(device, case, mode)
    assert_pools(case, expected)
    for layer, cache in enumerate(case.caches):
        slots = case.slots_of(layer)
        if slots is None:
            want = dict.fromkeys(COUNTERS, 0)
        else:
            want = oracle.statistics(
                case.kv_c if case.kv_c.ndim == 2 else case.kv_c[layer],
                case.k_pe if case.k_pe is None or case.k_pe.ndim == 2 else case.k_pe[layer],
                slots,
                cache.geometry.capacity,
                case.fmt,
                case.scale(layer),
                case.scale_format,
            )
        if not case.collect_stats:
            want = {name: count if name in COUNTERS[:2] else 0 for name, count in want.items()}
        assert {name: int(outcome.counters[name][layer]) for name in COUNTERS} == want
    return outcome


def values(rng: np.random.Generator, shape: Sequence[int], dtype: str, spread: int = 8) -> Array:
    """Make rows with wide exponents, zeros of both signs, ties of fp8 and extreme numbers."""
    raw = rng.standard_normal(tuple(shape)) * np.exp2(rng.integers(-spread, spread, tuple(shape)))
    special = np.array([0.0, -0.0, 448, -464, 465, 61440, 57344, 2.0**-9, -(2.0**-10), 1.0625])
    pick = rng.random(raw.shape) < 0.1
    raw[pick] = rng.choice(special, int(pick.sum()))
    with np.errstate(over="ignore"):
        return aligned_copy(raw.astype(oracle.DTYPES[dtype]))


def make_case(
    rng: np.random.Generator,
    fmt: str,
    dtype: str,
    *,
    layers: int = 2,
    tokens: int = 11,
    rank: int = 512,
    rope: int = 64,
    slots: Array | None = None,
    **cache: Any,
) -> Insert:
    """Make an ordinary case: distinct slots, some padding, a scale a layer where one is needed."""
    caches = [make_cache(fmt, rank, rope, **cache) for _ in range(layers)]
    if slots is None:
        capacity = caches[0].geometry.capacity
        slots = np.stack([rng.permutation(max(capacity, tokens))[:tokens] for _ in range(layers)])
        slots = np.where(slots < capacity, slots, -1)
    scales = None
    if fmt in oracle.CODE_DTYPES:
        scales = [float(np.float32(s)) for s in rng.uniform(0.01, 3.0, layers)]
    return Insert(
        fmt,
        values(rng, (layers, tokens, rank), dtype),
        values(rng, (layers, tokens, rope), dtype) if rope else None,
        slots,
        caches,
        scales,
    )
