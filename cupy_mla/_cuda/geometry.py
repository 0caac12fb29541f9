"""How many blocks of how many threads a launch takes."""

from __future__ import annotations

from typing import NamedTuple

from .params import INT32_END
from .registry import Specialisation

#: Threads a block at most; the kernels' ``__launch_bounds__``.
MAX_THREADS = 288
_WARP = 32
#: More threads than these a row leave too few rows a block; wider rows take several turns.
_MAX_LANES = 144
#: Blocks a multiprocessor that are worth more than large blocks.
_BLOCKS_PER_SM = 2


class LaunchShape(NamedTuple):
    """Grid and block of a launch.

    Attributes
    ----------
    grid : int
        Blocks, along x.
    block : (int, int)
        Threads a row, and rows.
    blocks_per_layer : int
    """

    grid: int
    block: tuple[int, int]
    blocks_per_layer: int


def insert_shape(
    specialisation: Specialisation,
    *,
    layers: int,
    tokens: int,
    lora_rank: int,
    rope_dim: int,
    sm_count: int,
) -> LaunchShape:
    """Choose the grid of an insert.

    Parameters
    ----------
    specialisation : Specialisation
    layers, tokens : int
        At least 1.
    lora_rank, rope_dim : int
    sm_count : int
        Multiprocessors of the device.

    Examples
    --------
    >>> from cupy_mla._cuda import registry
    >>> fp8 = registry.find("insert", "fp8_e4m3", "bfloat16")
    >>> sizes = dict(lora_rank=512, rope_dim=64, sm_count=132)
    >>> insert_shape(fp8, layers=5, tokens=8192, **sizes)
    LaunchShape(grid=2560, block=(36, 8), blocks_per_layer=512)
    >>> insert_shape(fp8, layers=5, tokens=1, **sizes)
    LaunchShape(grid=5, block=(36, 1), blocks_per_layer=1)
    """
    lanes = _lanes(specialisation, lora_rank, rope_dim)
    rows = max(1, MAX_THREADS // lanes)

    def blocks(rows: int) -> int:
        return -(-tokens // (rows * specialisation.input.rows_in_flight))

    # Few rows: spread them over the multiprocessors rather than fill blocks.
    while rows > 1 and layers * blocks(rows) < _BLOCKS_PER_SM * sm_count:
        rows = (rows + 1) // 2
    per_layer = blocks(rows)
    if layers * per_layer >= INT32_END:
        raise ValueError(
            f"insert: layers times tokens must fit one grid, got {layers} times {tokens}"
        )
    return LaunchShape(layers * per_layer, (lanes, rows), per_layer)


def _lanes(specialisation: Specialisation, lora_rank: int, rope_dim: int) -> int:
    """Return the threads that share a row."""
    row_format = specialisation.format
    if row_format.warp_a_row:
        return _WARP
    width = lora_rank + rope_dim
    if lora_rank % row_format.unit or rope_dim % row_format.unit:
        return min(width, _WARP)  # element by element
    units = width // row_format.unit
    turns = -(-units // _MAX_LANES)
    return -(-units // turns)
