"""How many blocks of how many threads a launch takes."""

from __future__ import annotations

from typing import NamedTuple

from .params import INT32_END
from .registry import Specialisation

#: Threads a block at most; the kernels' ``__launch_bounds__`` and the most tokens a block can have.
MAX_THREADS = 288
_WARP = 32
#: More threads than these a row leave too few rows a block; wider rows take several turns.
_MAX_LANES = 144

# Blocks a multiprocessor: a block's preparations pay off over many rows, but only while there are
# blocks enough for several waves; few rows are rather spread than gathered.
_MANY_BLOCKS = 16
_WAVE_BLOCKS = 4
_SOME_BLOCKS = 4
_FEW_BLOCKS = 2

#: Warps of the blocks in which a warp takes a row; as many threads as bring the norm's weights.
ROW_WARPS = 4
_MOST_ROW_TURNS = 4
_WAVE_ROW_BLOCKS = 8


class LaunchShape(NamedTuple):
    """Grid and block of a launch.

    Attributes
    ----------
    grid : int
        Blocks, along x.
    block : (int, int)
        Threads a row, and rows that are stored at a time.
    blocks_per_layer : int
    block_tokens : int
        Consecutive tokens of a layer that a block stores.
    """

    grid: int
    block: tuple[int, int]
    blocks_per_layer: int
    block_tokens: int


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
    >>> insert_shape(fp8, layers=5, tokens=16384, **sizes)
    LaunchShape(grid=5120, block=(36, 8), blocks_per_layer=1024, block_tokens=16)
    >>> insert_shape(fp8, layers=5, tokens=1, **sizes)
    LaunchShape(grid=5, block=(36, 1), blocks_per_layer=1, block_tokens=1)
    """
    lanes = _lanes(specialisation, lora_rank, rope_dim)
    rows = min(MAX_THREADS // lanes, tokens, specialisation.input.most_rows or tokens)
    if max(layers * tokens, tokens) > INT32_END - 2**16:
        raise ValueError(f"insert: layers and tokens must fit a grid, got {layers} and {tokens}")

    def blocks(block_tokens: int) -> int:
        return layers * -(-tokens // block_tokens)

    while rows > 1 and blocks(rows) < _FEW_BLOCKS * sm_count:
        rows = (rows + 1) // 2
    # A block's preparations pay off over several rows a thread, but only where there are more
    # blocks than run at a time; a block's threads look up the slots of all its tokens at once.
    turns = 1
    while 2 * turns <= min(specialisation.input.most_turns, lanes) and (
        blocks(rows * turns) > _WAVE_BLOCKS * turns**2 * sm_count
    ):
        turns *= 2
    grid = blocks(rows * turns)
    return LaunchShape(grid, (lanes, rows), grid // layers, rows * turns)


def read_shape(
    specialisation: Specialisation, *, rows: int, size: int, unit: int, sm_count: int
) -> LaunchShape:
    """Choose the grid of a kernel that reads rows.

    Parameters
    ----------
    specialisation : Specialisation
    rows : int
        At least 1.
    size, unit : int
        What a row holds, and how much of it a thread takes at a time. Rows that are no whole
        units are read element by element.
    sm_count : int
        Multiprocessors of the device.

    Examples
    --------
    >>> from cupy_mla._cuda import registry
    >>> fp8 = registry.find("gather", "fp8_e4m3", "bfloat16")
    >>> read_shape(fp8, rows=131072, size=576, unit=8, sm_count=132)
    LaunchShape(grid=4096, block=(72, 4), blocks_per_layer=4096, block_tokens=32)
    >>> read_shape(fp8, rows=1, size=576, unit=8, sm_count=132)
    LaunchShape(grid=1, block=(72, 1), blocks_per_layer=1, block_tokens=1)
    """
    lanes = min(size, _WARP)
    if specialisation.format.warp_a_row:
        lanes = _WARP
    elif size % unit == 0:
        turns = -(-(size // unit) // _MAX_LANES)
        lanes = -(-(size // unit) // turns)
    at_a_time = min(MAX_THREADS // lanes, rows)
    in_flight = specialisation.input.rows_in_flight
    choices = (
        (4 * in_flight, _MANY_BLOCKS),
        (2 * in_flight, _MANY_BLOCKS),
        (in_flight, _SOME_BLOCKS),
        (1, _FEW_BLOCKS),
    )
    block_rows = at_a_time
    for turns, enough in choices:
        # A block's threads look up all its rows at once.
        block_rows = at_a_time * min(turns, lanes)
        if -(-rows // block_rows) >= enough * sm_count:
            break
    else:
        while at_a_time > 1 and -(-rows // at_a_time) < _FEW_BLOCKS * sm_count:
            at_a_time = (at_a_time + 1) // 2
        block_rows = at_a_time
    if rows > INT32_END - 2**16:
        raise ValueError(f"{specialisation.kernel.name}: rows must fit a grid, got {rows}")
    grid = -(-rows // block_rows)
    return LaunchShape(grid, (lanes, at_a_time), grid, block_rows)


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


def warp_rows_shape(
    operation: str,
    *,
    layers: int,
    tokens: int,
    sm_count: int,
    most_turns: int = _MOST_ROW_TURNS,
) -> LaunchShape:
    """Choose the grid of a kernel whose warps take a row each, one after the other.

    Parameters
    ----------
    operation : str
        For messages.
    layers, tokens : int
        At least 1.
    sm_count : int
        Multiprocessors of the device.
    most_turns : int
        Rows that a warp takes at most.

    Examples
    --------
    >>> warp_rows_shape("insert_context", layers=5, tokens=8192, sm_count=132)
    LaunchShape(grid=2560, block=(32, 4), blocks_per_layer=512, block_tokens=16)
    >>> warp_rows_shape("insert_context", layers=5, tokens=1, sm_count=132)
    LaunchShape(grid=5, block=(32, 4), blocks_per_layer=1, block_tokens=4)
    """
    if max(layers * tokens, tokens) > INT32_END - 2**16:
        raise ValueError(
            f"{operation}: layers and tokens must fit a grid, got {layers} and {tokens}"
        )

    def blocks(block_tokens: int) -> int:
        return layers * -(-tokens // block_tokens)

    turns = 1
    while turns < most_turns and (
        blocks(ROW_WARPS * turns) > _WAVE_ROW_BLOCKS * turns**2 * sm_count
    ):
        turns *= 2
    grid = blocks(ROW_WARPS * turns)
    return LaunchShape(grid, (_WARP, ROW_WARPS), grid // layers, ROW_WARPS * turns)


class QueryShape(NamedTuple):
    """Grid of a launch whose blocks take some heads of one token.

    Attributes
    ----------
    launch : LaunchShape
    token_blocks : int
        Blocks of a token: those for attention's heads, then those for the indexer's.
    mqa_blocks : int
    mqa_block_heads, index_block_heads : int
        Heads of a block.
    """

    launch: LaunchShape
    token_blocks: int
    mqa_blocks: int
    mqa_block_heads: int
    index_block_heads: int


#: Heads of short rows, the rotary part alone or the indexer's, that a warp takes at a time.
_GROUPS = 4


def query_shape(
    operation: str,
    *,
    tokens: int,
    heads: int,
    index_heads: int,
    has_latents: bool,
    sm_count: int,
) -> QueryShape:
    """Choose the grid of a kernel whose blocks take some heads of one token.

    Parameters
    ----------
    operation : str
        For messages.
    tokens : int
        At least 1.
    heads, index_heads : int
        Of attention and of the indexer, at least one in all.
    has_latents : bool
        Whether attention's heads have a latent part, not the rotary part alone.
    sm_count : int
        Multiprocessors of the device.

    Examples
    --------
    >>> sizes = dict(heads=128, index_heads=64, sm_count=132)
    >>> query_shape("fused_q", tokens=4096, has_latents=True, **sizes)[1:]
    (9, 8, 16, 64)
    >>> query_shape("fused_q", tokens=1, has_latents=True, **sizes)[1:]
    (36, 32, 4, 16)
    >>> query_shape("fused_q", tokens=1, has_latents=False, **sizes)[1:]
    (12, 8, 16, 16)
    """

    def shape(turns: int) -> QueryShape:
        index = ROW_WARPS * turns * _GROUPS
        mqa_heads = ROW_WARPS * turns if has_latents else index
        mqa_blocks = -(-heads // mqa_heads)
        blocks = mqa_blocks + -(-index_heads // index)
        launch = LaunchShape(tokens * blocks, (_WARP, ROW_WARPS), blocks, 1)
        return QueryShape(launch, blocks, mqa_blocks, mqa_heads, index)

    turns = 1
    while turns < _MOST_ROW_TURNS and (
        shape(turns).launch.grid > _WAVE_ROW_BLOCKS * turns**2 * sm_count
    ):
        turns *= 2
    found = shape(turns)
    if found.launch.grid > INT32_END - 2**16:
        raise ValueError(f"{operation}: tokens and heads must fit a grid, got {tokens} and {heads}")
    return found
