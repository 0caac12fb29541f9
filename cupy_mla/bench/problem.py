"""What an operation tells the benchmark: its problems, buffers, calls and bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from cupy_mla.dtypes import DType
from cupy_mla.layouts import CacheLayout

from .traffic import Traffic

Array = np.ndarray[Any, Any]
Call = Callable[[], Any]

#: DeepSeek's sizes, which Kimi's draft model shares.
KV_LORA_RANK = 512
ROPE_DIM = 64

PATTERNS = ("contiguous", "random")


class Arrays(Protocol):
    """Where arrays lie: `cupy_mla.cli._device.Device`, or the like."""

    def to_device(self, array: Array) -> Any:
        """Return a host array's values on the device."""

    def to_host(self, array: Any) -> Array:
        """Return an array of the device as a host array."""


@dataclass(frozen=True)
class Problem:
    """One size of one operation.

    Attributes
    ----------
    operation : str
    layout : CacheLayout
        Format of the cache; of the destination, where there are two.
    layers : int
        1 for an operation on one layer.
    tokens : int
        Tokens of a call; rows, where nothing is stored.
    block_size : int
    pattern : {"contiguous", "random"}
        Where rows lie in a cache: one behind the other, or anywhere in a pool twice as large.
    """

    operation: str
    layout: CacheLayout
    layers: int
    tokens: int
    block_size: int
    pattern: str

    @property
    def input_dtype(self) -> DType:
        """Element type of the rows that are stored."""
        return self.layout.input_dtypes[0]

    @property
    def pool_blocks(self) -> int:
        """Blocks of each cache."""
        rows = self.tokens if self.pattern == "contiguous" else 2 * self.tokens
        return -(-rows // self.block_size)

    @property
    def label(self) -> str:
        """Format, tokens and pattern in a few words."""
        return f"{self.operation} {self.layout.name} {self.tokens} {self.pattern}"


@dataclass(frozen=True)
class Alternative:
    """Something that does the operation's work in another way, on the same buffers.

    Attributes
    ----------
    call : callable
    exact : bool
        Whether it has to leave the same bytes as the operation.
    torch : bool
        Whether its work is torch's, so that torch has to capture it.
    """

    call: Call
    exact: bool = True
    torch: bool = False


@dataclass
class Instance:
    """An operation with one set of buffers.

    Attributes
    ----------
    run : callable
        The operation, ready for capture in a graph once it was called.
    outputs : mapping of str to array
        What it writes, whole arrays: what it does not write has to stay, too.
    alternatives : mapping of str to Alternative
    host : mapping of str to callable
        Ways to call the operation whose host time is of interest.
    arrays : mapping of str to array
        Buffers by name, for what comparisons with other libraries need.
    """

    run: Call
    outputs: Mapping[str, Any]
    alternatives: dict[str, Alternative] = field(default_factory=dict)
    host: dict[str, Call] = field(default_factory=dict)
    arrays: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Operation:
    """One subject of the benchmark.

    Attributes
    ----------
    name : str
        As the command line knows it.
    summary : str
    formats : tuple of str
        Formats that are measured where none is named.
    tokens : tuple of int
        Numbers of tokens, likewise.
    layered : bool
        Whether one call serves several layers.
    patterned : bool
        Whether the place of rows in a cache matters.
    traffic : callable
        ``(problem) -> Traffic``.
    make : callable
        ``(problem, arrays, machine) -> Instance``; `machine` is None where nothing but the
        operation itself is wanted.
    expect : callable
        ``(problem, host instance) -> [(output, Expected)]``: what the reference must have left,
        worked out without it.
    whole_blocks : bool
        Whether it works on whole blocks, so that numbers of tokens are rounded up.
    """

    name: str
    summary: str
    formats: tuple[str, ...]
    tokens: tuple[int, ...]
    layered: bool
    patterned: bool
    traffic: Callable[[Problem], Traffic]
    make: Callable[..., Instance]
    expect: Callable[[Problem, Instance], Sequence[tuple[str, Expected]]]
    whole_blocks: bool = False


@dataclass(frozen=True)
class Expected:
    """What an output, or a part of it, has to be.

    Attributes
    ----------
    values : numpy.ndarray
        Bytes where `tolerance` is None, else numbers.
    tolerance : float or None
        Largest difference, relative to the magnitude of a value or to `floor`, whichever is
        larger; None for equal bytes.
    floor : float or numpy.ndarray
    decode : callable, optional
        Makes of the output's array what is compared with `values`; its bytes by default.
    """

    values: Array
    tolerance: float | None = None
    floor: float | Array = 0.0
    decode: Callable[[Array], Array] | None = None

    def differences(self, output: Array) -> int:
        """Return how many bytes or numbers of an output are not as expected.

        Examples
        --------
        >>> wanted = Expected(np.array([1.0, 0.0]), 0.5, 0.1, lambda output: output)
        >>> wanted.differences(np.array([1.4, 0.06])), wanted.differences(np.array([1.4, 0.04]))
        (1, 0)
        """
        found = output.view(np.uint8) if self.decode is None else self.decode(output)
        if found.shape != self.values.shape:
            raise ValueError(
                f"differences: output must have shape {self.values.shape}, got {found.shape}"
            )
        if self.tolerance is None:
            return int((found != self.values).sum())
        allowed = self.tolerance * np.maximum(np.abs(self.values), self.floor)
        with np.errstate(invalid="ignore"):  # a NaN is a difference
            return int((~(np.abs(found - self.values) <= allowed)).sum())


def slots_of(problem: Problem, seed: int = 0) -> Array:
    """Return the slots of a step, int64 ``[T]``, no slot twice.

    Examples
    --------
    >>> from cupy_mla import get_layout
    >>> problem = Problem("insert", get_layout("fp8"), 1, 4, 64, "contiguous")
    >>> slots_of(problem)
    array([0, 1, 2, 3])
    """
    if problem.pattern == "contiguous":
        return np.arange(problem.tokens)
    pool = problem.pool_blocks * problem.block_size
    return np.random.default_rng(seed).permutation(pool)[: problem.tokens]


#: Random values that larger arrays repeat: a prime number, so that no two rows are alike.
_POOL = 1_048_573
_pools: dict[tuple[str, int], Array] = {}


def random_values(shape: Sequence[int], dtype: DType, seed: int = 0) -> Array:
    """Return normal values of magnitudes over several powers of two.

    Made once and repeated: drawing a gigabyte of normals anew takes longer than all measurements.
    """
    key = (dtype.name, seed)
    pool = _pools.get(key)
    if pool is None:
        rng = np.random.default_rng(seed)
        values = rng.standard_normal(_POOL, dtype=np.float32)
        values *= np.exp2(rng.integers(-4, 4, _POOL)).astype(np.float32)
        pool = _pools[key] = values.astype(dtype)
    count = int(np.prod(shape, dtype=np.int64))
    whole, rest = divmod(count, _POOL)
    return np.concatenate([pool] * whole + [pool[:rest]]).reshape(shape)


def scales_of(problem: Problem) -> list[float] | None:
    """Return a scale a layer where the format needs one."""
    if not problem.layout.needs_scale:
        return None
    return [0.0375 * (layer + 1) for layer in range(problem.layers)]


#: What every byte of an output is before it is written.
SENTINEL = 0xA5


def new_cache(problem: Problem, arrays: Arrays) -> Any:
    """Return a cache whose bytes are all `SENTINEL`."""
    layout = problem.layout
    shape = (problem.pool_blocks, problem.block_size, layout.width)
    return new_output(shape, layout.storage_dtype, arrays)


def new_output(shape: Sequence[int], dtype: DType, arrays: Arrays) -> Any:
    """Return an array whose bytes are all `SENTINEL`."""
    raw = np.full((*shape[:-1], shape[-1] * dtype.itemsize), SENTINEL, np.uint8)
    return arrays.to_device(raw.view(dtype))


def spoil(outputs: Mapping[str, Any]) -> None:
    """Make every byte of some outputs `SENTINEL` again."""
    for array in outputs.values():
        array.view(np.uint8)[...] = SENTINEL
