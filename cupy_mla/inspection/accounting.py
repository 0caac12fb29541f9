"""How much memory a cache takes, padding apart, and how many tokens fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from cupy_mla._validate import integer
from cupy_mla.errors import reject_type, reject_value
from cupy_mla.layouts import CacheLayout, resolve_layout

from ._display import html_table, text_table

_GIB = 1 << 30


@dataclass(frozen=True)
class LayerMemory:
    """The layers of one layout.

    Attributes
    ----------
    layout : CacheLayout
    num_layers : int
    block_bytes : int
        Bytes of the rows of a block.
    page_bytes : int
        Bytes that a block takes, padding included.
    """

    layout: CacheLayout
    num_layers: int
    block_bytes: int
    page_bytes: int

    @property
    def padding_bytes(self) -> int:
        """Bytes of a block's page that hold no row."""
        return self.page_bytes - self.block_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of a token in one layer, without padding."""
        return self.layout.row_bytes


@dataclass(frozen=True)
class CacheMemory:
    """What `cache_memory` found.

    Attributes
    ----------
    layers : tuple of LayerMemory
        One for each layout.
    block_size : int
        Rows a block.
    memory : int or None
        Bytes that are there for the cache.
    tokens : int or None
        Tokens asked for, or those that fit `memory`.
    blocks : int or None
        Blocks that they take, in each layer.

    Examples
    --------
    >>> from cupy_mla import cache_memory
    >>> model = cache_memory(["fp8_ds_mla"] * 61 + ["bfloat16"] * 5, memory=40 << 30)
    >>> model.bytes_per_token, model.tokens
    (45776.0, 938240)
    """

    layers: tuple[LayerMemory, ...]
    block_size: int
    memory: int | None
    tokens: int | None
    blocks: int | None

    @property
    def num_layers(self) -> int:
        """Layers in all."""
        return sum(layer.num_layers for layer in self.layers)

    @property
    def data_bytes_per_token(self) -> int:
        """Bytes of a token's rows in all layers."""
        return sum(layer.num_layers * layer.row_bytes for layer in self.layers)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block in all layers, padding included."""
        return sum(layer.num_layers * layer.page_bytes for layer in self.layers)

    @property
    def padding_bytes_per_block(self) -> int:
        """Bytes of a block in all layers that hold no row."""
        return sum(layer.num_layers * layer.padding_bytes for layer in self.layers)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of a token in all layers, with its share of the padding."""
        return self.bytes_per_block / self.block_size

    @property
    def data_bytes(self) -> int | None:
        """Bytes of the rows of `tokens`; None where no number of tokens is known."""
        return None if self.tokens is None else self.tokens * self.data_bytes_per_token

    @property
    def total_bytes(self) -> int | None:
        """Bytes of `blocks`, padding and the unused rows of the last block included."""
        return None if self.blocks is None else self.blocks * self.bytes_per_block

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as plain data that ``json.dumps`` takes."""
        return {
            "layers": [
                {
                    "layout": layer.layout.name,
                    "num_layers": layer.num_layers,
                    "row_bytes": layer.row_bytes,
                    "block_bytes": layer.block_bytes,
                    "page_bytes": layer.page_bytes,
                    "padding_bytes": layer.padding_bytes,
                }
                for layer in self.layers
            ],
            "num_layers": self.num_layers,
            "block_size": self.block_size,
            "data_bytes_per_token": self.data_bytes_per_token,
            "bytes_per_token": self.bytes_per_token,
            "bytes_per_block": self.bytes_per_block,
            "padding_bytes_per_block": self.padding_bytes_per_block,
            "memory": self.memory,
            "tokens": self.tokens,
            "blocks": self.blocks,
            "data_bytes": self.data_bytes,
            "total_bytes": self.total_bytes,
        }

    def facts(self) -> dict[str, str]:
        """Return the numbers as names and texts, for display."""
        shown = {}
        for layer in self.layers:
            padding = f" + {layer.padding_bytes} padding" if layer.padding_bytes else ""
            shown[f"{layer.num_layers} x {layer.layout.name}"] = (
                f"{layer.row_bytes} bytes a token, {layer.block_bytes}{padding} a block"
            )
        shown["a token"] = _share(self.data_bytes_per_token, self.bytes_per_block, self.block_size)
        shown["a block"] = f"{self.bytes_per_block:,} bytes for {self.block_size} tokens"
        if self.memory is not None:
            shown["memory"] = _size(self.memory)
        if self.tokens is not None:
            name = "tokens" if self.memory is None else "tokens that fit"
            shown[name] = f"{self.tokens:,} in {self.blocks:,} blocks"
            shown["in all"] = _size(self.total_bytes or 0)
        return shown

    def __str__(self) -> str:
        return text_table(self.facts(), "CacheMemory")

    def _repr_html_(self) -> str:
        """Table for Jupyter."""
        return html_table(self.facts(), "CacheMemory")


def _share(data: int, block: int, block_size: int) -> str:
    whole = Fraction(block, block_size)
    if whole == data:
        return f"{data:,} bytes"
    return f"{float(whole):,g} bytes ({data:,} of rows, {float(whole - data):,g} of padding)"


def _size(count: int) -> str:
    return f"{count:,} bytes ({count / _GIB:.2f} GiB)"


def cache_memory(
    kv_cache_dtype: str | CacheLayout | Sequence[str | CacheLayout],
    *,
    num_layers: int | None = None,
    block_size: int = 64,
    page_bytes: int | None = None,
    tokens: int | None = None,
    memory: int | None = None,
    kv_lora_rank: int = 512,
    rope_dim: int = 64,
) -> CacheMemory:
    """Work out the memory that a model's caches take, or the tokens that a memory holds.

    Parameters
    ----------
    kv_cache_dtype : str, CacheLayout, or sequence of them
        Layout of all layers, or of each; see `get_layout`.
    num_layers : int, optional
        Layers of the one layout, 1 by default; a sequence has its own number.
    block_size : int
        Rows a block.
    page_bytes : int, optional
        Bytes that the allocator gives to a block of a layer; by default what its rows take.
    tokens : int, optional
        Tokens to be stored; they take whole blocks.
    memory : int, optional
        Bytes that are there for all layers; `tokens` are then those that fit.
    kv_lora_rank, rope_dim : int
        Elements of the latent and of the rotary part, where a layout is given by its name.

    Returns
    -------
    CacheMemory

    Raises
    ------
    ValueError
        For a number that is out of range, a page that is too small, or both `tokens` and `memory`.
    TypeError
        For what is no integer or no layout.

    Examples
    --------
    >>> from cupy_mla import cache_memory
    >>> cache_memory("fp8_ds_mla", num_layers=61, tokens=131072).total_bytes
    5244977152
    >>> print(cache_memory("fp8_ds_mla", page_bytes=43008, memory=80 << 30))
    CacheMemory
      1 x fp8_ds_mla   656 bytes a token, 41984 + 1024 padding a block
      a token          672 bytes (656 of rows, 16 of padding)
      a block          43,008 bytes for 64 tokens
      memory           85,899,345,920 bytes (80.00 GiB)
      tokens that fit  127,826,368 in 1,997,287 blocks
      in all           85,899,319,296 bytes (80.00 GiB)
    """
    operation = "cache_memory"
    named = _layers(operation, kv_cache_dtype, num_layers)
    rows = integer(operation, "block_size", block_size, 1)
    counts: dict[CacheLayout, int] = {}
    for name, count in named:
        layout = resolve_layout(operation, name, kv_lora_rank, rope_dim)
        counts[layout] = counts.get(layout, 0) + count
    layers = []
    for layout, count in counts.items():
        data = layout.block_bytes(rows)
        page = data if page_bytes is None else integer(operation, "page_bytes", page_bytes, 1)
        if page < data:
            expected = f"hold the {data} bytes of {rows} {layout.name} rows"
            reject_value(operation, "page_bytes", expected, page)
        layers.append(LayerMemory(layout, count, data, page))
    if tokens is not None and memory is not None:
        reject_value(operation, "tokens", "be None where memory is given", tokens)
    blocks = None
    if memory is not None:
        memory = integer(operation, "memory", memory, 0)
        blocks = memory // sum(layer.num_layers * layer.page_bytes for layer in layers)
        tokens = blocks * rows
    elif tokens is not None:
        tokens = integer(operation, "tokens", tokens, 0)
        blocks = -(-tokens // rows)
    return CacheMemory(tuple(layers), rows, memory, tokens, blocks)


def _layers(operation: str, kv_cache_dtype: Any, num_layers: int | None) -> list[tuple[Any, int]]:
    """Return layouts as they were given, and for how many layers."""
    if isinstance(kv_cache_dtype, (str, CacheLayout)):
        count = 1 if num_layers is None else integer(operation, "num_layers", num_layers, 1)
        return [(kv_cache_dtype, count)]
    if not isinstance(kv_cache_dtype, Sequence):
        reject_type(
            operation,
            "kv_cache_dtype",
            "be a layout or a sequence of them",
            type(kv_cache_dtype).__name__,
        )
    if not kv_cache_dtype:
        reject_value(operation, "kv_cache_dtype", "name at least one layer", "none")
    if num_layers is not None and num_layers != len(kv_cache_dtype):
        expected = f"be {len(kv_cache_dtype)}, the number of layouts given"
        reject_value(operation, "num_layers", expected, num_layers)
    return [(name, 1) for name in kv_cache_dtype]
