"""Colour, narrow terminals and progress."""

from __future__ import annotations

import json
import os
import pty
import re

import ml_dtypes
import numpy as np
import pytest

import cupy_mla
from cupy_mla.cli import _console, main
from cupy_mla.cli._console import Column
from tests.cli.helpers import DEMO_ROWS, SMALL, python, table_rows

COLOUR = re.compile(r"\x1b\[(?:\d+;)*[349]\d(?:;\d+)*m")


def test_colour_obeys_the_environment():
    small = ("-m", "cupy_mla", "demo", *SMALL, "--format", "fp8")
    assert "\x1b" not in python(*small).stdout
    assert COLOUR.search(python(*small, FORCE_COLOR="1").stdout)
    assert not COLOUR.search(python(*small, FORCE_COLOR="1", NO_COLOR="1").stdout)


def test_output_in_ascii_terminals():
    done = python("-m", "cupy_mla", "layouts", "fp8_ds_mla", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert table_rows(done.stdout, "Part")[1][:3] == ["scale", "512", "16"]


@pytest.mark.parametrize("columns", [24, 40, 79, 80, 120])
@pytest.mark.parametrize(
    "arguments", [["demo", *SMALL], ["layouts", "--layers", "61", "--tokens", "131072"], ["info"]]
)
def test_nothing_is_cut_or_wider_than_the_terminal(capsys, monkeypatch, columns, arguments):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert max(len(line) for line in text.splitlines()) <= columns
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    words = "".join(text.split())
    for needed in {
        "demo": ["fp8_ds_mlaue8m0", "2304", "Nodifference"],
        "layouts": ["18,421,383,168", "multipliedbyitstile'sscale", "float8_e4m3fn"],
        "info": [cupy_mla.__version__, np.__version__, ml_dtypes.__version__],
    }[arguments[0]]:
        assert needed in words


def test_a_narrow_terminal_gets_one_record_a_row(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    main(["layouts", "fp8_ds_mla"])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    at = lines.index("Part    scale")
    assert lines[at + 1 : at + 6] == [
        "Offset  512",
        "Bytes   16",
        "Dtype   float32",
        "Count   4",
        "Note    one a tile of 128",
    ]


def test_the_demo_fits_80_columns_as_a_table(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    main(["demo", "--device", "cpu", "--tokens", "64"])
    assert len(table_rows(capsys.readouterr().out, "Format ")) == len(DEMO_ROWS)


def test_a_divided_title_is_whole_in_a_record(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    columns = [Column("Differ-\nences", "right"), Column("Bytes\na token", "right")]
    _console.print_table(_console.console(), columns, [["12", "x" * 30]])
    text = capsys.readouterr().out
    assert "Differences" in text
    assert "Bytes a token" in text


def test_text_is_never_taken_for_markup(capsys):
    out = _console.console()
    _console.print_table(out, [Column("[bold]A")], [["[red]x[/red] :smile:"]])
    _console.print_facts(out, "[b]", {"[i]": "[link=y]"})
    text = capsys.readouterr().out
    for literal in ("[bold]A", "[red]x[/red] :smile:", "[b]", "[i]", "[link=y]"):
        assert literal in text


def test_progress_goes_to_a_terminal_on_stderr_and_not_into_json():
    leader, follower = pty.openpty()
    try:
        done = python(
            *("-m", "cupy_mla", "demo", *SMALL, "--json"),
            stderr=follower,
            TERM="xterm",
            COLUMNS="100",
        )
    finally:
        os.close(follower)
    shown = b""
    while True:
        try:
            piece = os.read(leader, 65536)
        except OSError:  # the other end is closed and everything was read
            break
        if not piece:
            break
        shown += piece
    os.close(leader)
    assert done.returncode == 0
    assert json.loads(done.stdout)["ok"] is True
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert "checking bfloat16" in text
    assert "0/7" in text
    assert "checking fp8_ds_mla ue8m0" in text
    assert "6/7" in text


def test_no_progress_where_stderr_is_no_terminal(capsys):
    main(["demo", *SMALL])
    assert capsys.readouterr().err == ""
