"""Memory that caches take: literal numbers of published configurations, padding apart."""

from __future__ import annotations

import json

import pytest

from cupy_mla import cache_memory, get_layout
from tests.helpers import rejected


@pytest.mark.parametrize(
    ("fmt", "row", "total"),
    [
        ("bfloat16", 1152, 9_210_691_584),
        ("fp8", 576, 4_605_345_792),
        ("fp8_ds_mla", 656, 5_244_977_152),
    ],
)
def test_61_layers_of_128k_tokens(fmt, row, total):
    memory = cache_memory(fmt, num_layers=61, tokens=131072)
    assert memory.layers[0].row_bytes == row
    assert memory.data_bytes_per_token == 61 * row
    assert memory.bytes_per_token == 61 * row
    assert memory.total_bytes == memory.data_bytes == total
    assert memory.blocks == 2048
    assert memory.padding_bytes_per_block == 0


def test_a_padded_page_shows_its_padding_apart():
    memory = cache_memory("fp8_ds_mla", block_size=64, page_bytes=43008, tokens=64)
    (layer,) = memory.layers
    assert (layer.block_bytes, layer.padding_bytes, layer.page_bytes) == (41984, 1024, 43008)
    assert memory.bytes_per_token == 672
    assert memory.data_bytes_per_token == 656
    assert (memory.data_bytes, memory.total_bytes) == (41984, 43008)
    assert "672 bytes (656 of rows, 16 of padding)" in str(memory)
    assert "41984 + 1024 padding a block" in str(memory)


def test_rows_without_a_rotary_part():
    assert cache_memory("bfloat16", rope_dim=0).bytes_per_token == 1024
    assert cache_memory("fp8", kv_lora_rank=256, rope_dim=32).bytes_per_token == 288


def test_tokens_take_whole_blocks():
    memory = cache_memory("fp8", tokens=65, block_size=64)
    assert (memory.blocks, memory.tokens) == (2, 65)
    assert memory.total_bytes == 2 * 64 * 576
    assert memory.data_bytes == 65 * 576
    assert cache_memory("fp8", tokens=0).total_bytes == 0


@pytest.mark.parametrize(
    ("memory", "blocks"), [(0, 0), (73727, 0), (73728, 1), (147455, 1), (147456, 2)]
)
def test_tokens_that_fit_a_memory(memory, blocks):
    """A block of 64 fp8 rows in 2 layers takes 73728 bytes."""
    found = cache_memory("fp8", num_layers=2, memory=memory)
    assert (found.blocks, found.tokens) == (blocks, 64 * blocks)
    assert found.total_bytes == blocks * 73728 <= memory


def test_layers_of_several_layouts():
    """A model, its draft and its indexer in pages of one size."""
    layers = ["fp8_ds_mla"] * 61 + [get_layout("bfloat16")] * 5 + ["indexer_fp8"] * 61
    memory = cache_memory(layers, tokens=1)
    assert memory.num_layers == 127
    assert [(layer.layout.name, layer.num_layers, layer.row_bytes) for layer in memory.layers] == [
        ("fp8_ds_mla", 61, 656),
        ("bfloat16", 5, 1152),
        ("indexer_fp8", 61, 132),
    ]
    assert memory.data_bytes_per_token == 61 * 656 + 5 * 1152 + 61 * 132
    padded = cache_memory(layers, page_bytes=73728, memory=127 * 73728)
    assert padded.tokens == 64
    assert padded.padding_bytes_per_block == 61 * (73728 - 41984) + 61 * (73728 - 8448)
    assert padded.bytes_per_token == 127 * 1152


def test_a_share_of_padding_that_is_no_whole_number():
    memory = cache_memory("fp8", block_size=3, page_bytes=1729)
    assert memory.bytes_per_token == pytest.approx(576 + 1 / 3)
    assert "576.333 bytes (576 of rows, 0.333333 of padding)" in str(memory)


def test_plain_data_and_display():
    memory = cache_memory("fp8", num_layers=2, block_size=16, memory=1 << 20)
    document = json.loads(json.dumps(memory.to_dict(), allow_nan=False))
    assert document == {
        "layers": [
            {
                "layout": "fp8_e4m3",
                "num_layers": 2,
                "row_bytes": 576,
                "block_bytes": 9216,
                "page_bytes": 9216,
                "padding_bytes": 0,
            }
        ],
        "num_layers": 2,
        "block_size": 16,
        "data_bytes_per_token": 1152,
        "bytes_per_token": 1152.0,
        "bytes_per_block": 18432,
        "padding_bytes_per_block": 0,
        "memory": 1048576,
        "tokens": 896,
        "blocks": 56,
        "data_bytes": 1032192,
        "total_bytes": 1032192,
    }
    text = str(memory)
    assert "tokens that fit  896 in 56 blocks" in text
    assert "1,048,576 bytes (0.00 GiB)" in text
    assert "896 in 56 blocks" in memory._repr_html_()
    assert list(cache_memory("fp8").facts()) == ["1 x fp8_e4m3", "a token", "a block"]


@pytest.mark.parametrize(
    ("arguments", "options", "exception", "argument", "fragments"),
    [
        (["fp4"], {}, ValueError, "kv_cache_dtype", ["fp4"]),
        ([7], {}, TypeError, "kv_cache_dtype", ["sequence", "int"]),
        ([[]], {}, ValueError, "kv_cache_dtype", ["at least one"]),
        ([["fp8"] * 3], {"num_layers": 2}, ValueError, "num_layers", ["3", "2"]),
        (["fp8"], {"num_layers": 0}, ValueError, "num_layers", ["at least 1"]),
        (["fp8"], {"block_size": 0}, ValueError, "block_size", ["at least 1"]),
        (["fp8"], {"block_size": 64.0}, TypeError, "block_size", ["integer"]),
        (["fp8"], {"tokens": -1}, ValueError, "tokens", ["at least 0"]),
        (["fp8"], {"memory": -1}, ValueError, "memory", ["at least 0"]),
        (["fp8"], {"memory": 1e9}, TypeError, "memory", ["integer", "float"]),
        (["fp8"], {"memory": 9, "tokens": 9}, ValueError, "tokens", ["None", "9"]),
        (["fp8"], {"page_bytes": 36863}, ValueError, "page_bytes", ["36864", "36863"]),
        (["fp8_ds_mla"], {"rope_dim": 0}, ValueError, "rope_dim", ["64"]),
    ],
)
def test_arguments_that_do_not_fit(arguments, options, exception, argument, fragments):
    with rejected(exception, "cache_memory", argument, *fragments):
        cache_memory(*arguments, **options)
