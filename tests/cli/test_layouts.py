"""`cupy-mla layouts`."""

from __future__ import annotations

import re

import pytest

from cupy_mla.cli import main
from tests.cli.helpers import ROW_BYTES, run_json, table_rows


def test_layouts_prints_the_byte_map_of_every_layout(capsys):
    assert main(["layouts"]) == 0
    text = capsys.readouterr().out
    titles = re.findall(r"^(\w+): (\d+) bytes a row", text, re.MULTILINE)
    assert titles == [(name, str(size)) for name, size in ROW_BYTES.items()]
    assert table_rows(text, "Part") == [
        ["nope", "0", "1024", "bfloat16", "512", "as it is"],
        ["rope", "1024", "128", "bfloat16", "64", "as it is"],
    ]


def test_layouts_prints_the_fields_of_fp8_ds_mla(capsys):
    main(["layouts", "fp8_ds_mla", "--scale-format", "ue8m0"])
    text = capsys.readouterr().out
    assert "ue8m0 scales" in text.splitlines()[0]
    assert [row[:5] for row in table_rows(text, "Part")] == [
        ["nope", "0", "512", "float8_e4m3fn", "512"],
        ["scale", "512", "16", "float32", "4"],
        ["rope", "528", "128", "bfloat16", "64"],
    ]


def test_layouts_says_where_a_block_keeps_the_indexer_s_keys_and_scales(capsys):
    assert main(["layouts", "indexer_fp8", "--layers", "61"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("indexer_fp8: 132 bytes a row, row r in a block of B rows")
    assert [row[:5] for row in table_rows(text, "Part")][:2] == [
        ["nope", "128*r", "128", "float8_e4m3fn", "128"],
        ["scale", "128*B + 4*r", "4", "float32", "1"],
    ]
    assert f"{61 * 132:,}" in text
    assert main(["layouts", "indexer_fp8", "--markdown"]) == 0
    assert r"| scale | 128\*B + 4\*r | 4 | float32 | 1 | one a row |" in capsys.readouterr().out
    _, document = run_json(capsys, "layouts", "indexer_fp8")
    (layout,) = document["layouts"]
    assert [(part["offset"], part["plane"]) for part in layout["fields"]] == [(0, 0), (128, 1)]


@pytest.mark.parametrize("arguments", [[], ["fp8_ds_mla", "float16"], ["--kv-lora-rank", "7"]])
def test_layouts_table_json_and_markdown_say_the_same(capsys, arguments):
    status, document = run_json(capsys, "layouts", *arguments)
    assert status == 0
    assert main(["layouts", *arguments]) == 0
    parts = capsys.readouterr().out.split("\n\n")
    assert main(["layouts", *arguments, "--markdown"]) == 0
    markdown = capsys.readouterr().out
    for layout, part in zip(document["layouts"], parts, strict=False):
        title = part.splitlines()[0]
        assert title.startswith(f"{layout['name']}: {layout['row_bytes']} bytes a row")
        keys = ("name", "offset", "nbytes", "dtype", "count", "note")
        fields = [[str(field[key]) for key in keys] for field in layout["fields"]]
        assert table_rows(part, "Part") == fields
        for field in fields:
            assert f"| {' | '.join(field)} |" in markdown
        assert f"**{title}**" in markdown
    assert len(re.findall(r"bytes a row", markdown)) == len(document["layouts"])


def test_layouts_markdown_tables_are_well_formed(capsys):
    main(["layouts", "--markdown", "--layers", "2", "--tokens", "10"])
    text = capsys.readouterr().out
    blocks = [part.splitlines() for part in text.split("\n\n") if part.startswith("|")]
    assert len(blocks) == len(ROW_BYTES) + 1
    for lines in blocks:
        assert re.fullmatch(r"\|( -{3}:? \|)+", lines[1])
        assert len({line.count("|") for line in lines}) == 1


def test_layouts_of_a_name_given_twice_or_by_its_alias_come_once(capsys):
    _, document = run_json(capsys, "layouts", "fp8_e5m2", "fp8", "fp8_e4m3", "fp8_e5m2")
    assert [layout["name"] for layout in document["layouts"]] == ["fp8_e5m2", "fp8_e4m3"]


def test_layouts_of_other_sizes_leave_out_the_one_that_has_none(capsys):
    sizes = ("--kv-lora-rank", "256", "--rope-dim", "0")
    status, document = run_json(capsys, "layouts", *sizes)
    assert status == 0
    assert {layout["name"]: layout["row_bytes"] for layout in document["layouts"]} == {
        "bfloat16": 512,
        "float16": 512,
        "float32": 1024,
        "fp8_e4m3": 256,
        "fp8_e5m2": 256,
    }
    assert [len(layout["fields"]) for layout in document["layouts"]] == [1] * 5
    [skipped] = document["skipped"]
    assert skipped["name"] == "fp8_ds_mla"
    assert "512 and 64" in skipped["reason"]
    for option in ([], ["--markdown"]):
        assert main(["layouts", *sizes, *option]) == 0
        assert f"Left out fp8_ds_mla: {skipped['reason']}"[:80] in capsys.readouterr().out


def test_layouts_of_a_size_that_a_named_layout_has_not_is_an_error(capsys):
    assert main(["layouts", "fp8_ds_mla", "--kv-lora-rank", "256"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("cupy-mla layouts: error: get_layout: kv_lora_rank and rope_dim")


def test_layouts_memory_of_a_model(capsys):
    arguments = ("layouts", "--layers", "61", "--tokens", "131072")
    _, document = run_json(capsys, *arguments)
    memory = {layout["name"]: layout["memory"] for layout in document["layouts"]}
    assert memory["bfloat16"]["total_bytes"] == 9_210_691_584
    assert memory["fp8_e4m3"]["total_bytes"] == 4_605_345_792
    assert memory["fp8_ds_mla"] == {
        "layers": 61,
        "bytes_per_token": 40016,
        "tokens": 131072,
        "total_bytes": 5_244_977_152,
    }
    main(list(arguments))
    rows = {row[0]: row[1:] for row in table_rows(capsys.readouterr().out, "Layout")}
    assert rows["bfloat16"] == ["1152", "61", "70,272", "131,072", "9,210,691,584", "8.58"]
    assert list(rows) == list(ROW_BYTES)


def test_layouts_memory_without_tokens_or_without_layers(capsys):
    main(["layouts", "bfloat16", "--layers", "5"])
    assert table_rows(capsys.readouterr().out, "Layout") == [["bfloat16", "1152", "5", "5,760"]]
    main(["layouts", "bfloat16", "--tokens", "2"])
    assert table_rows(capsys.readouterr().out, "Layout") == [
        ["bfloat16", "1152", "1", "1,152", "2", "2,304", "0.00"]
    ]
    main(["layouts", "bfloat16"])
    assert "Memory" not in capsys.readouterr().out
