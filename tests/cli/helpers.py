"""How the tests run the command line and read what it prints."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import cupy_mla
from cupy_mla.cli import main

ROOT = Path(cupy_mla.__file__).resolve().parent.parent
ROW_BYTES = {
    "bfloat16": 1152,
    "float16": 1152,
    "float32": 2304,
    "fp8_e4m3": 576,
    "fp8_e5m2": 576,
    "fp8_ds_mla": 656,
}
#: Format and scale format of each row of the whole demo, in its order.
DEMO_ROWS = [
    ("bfloat16", None),
    ("float16", None),
    ("float32", None),
    ("fp8_e4m3", None),
    ("fp8_e5m2", None),
    ("fp8_ds_mla", "float32"),
    ("fp8_ds_mla", "ue8m0"),
]
SMALL = ("--device", "cpu", "--layers", "3", "--tokens", "40", "--block-size", "16")


def run_json(capsys, *arguments):
    """Run a command with --json; return its exit status and the document."""
    status = main([*arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


def python(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **environment):
    """Run a fresh interpreter that finds this checkout."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("FORCE_COLOR", "NO_COLOR", "COLUMNS", "PYTHONUNBUFFERED")
    }
    return subprocess.run(
        [sys.executable, *arguments],
        env=inherited | {"PYTHONPATH": str(ROOT)} | environment,
        stdout=stdout,
        stderr=stderr,
        text=True,
        timeout=120,
    )


def table_rows(text, header):
    """Return the cells of the table below the header line that starts with `header`."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(header)) + 2
    rows = []
    for line in lines[start:]:
        if not line.strip():
            break
        rows.append(re.split(r"\s{2,}", line.strip()))
    return rows
