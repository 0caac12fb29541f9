"""The worked examples run, and their numbers are what they should be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples import decode_step

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("seed", range(3))
def test_a_decode_step_over_fp8_rows_is_close_to_one_over_bfloat16_rows(seed):
    """An e4m3 code is off by 3 % at most, on all sides; the sum over rows by far less."""
    errors = decode_step.run(seed)
    assert errors.keys() == {"flashmla_sparse", "flashinfer_sparse"}
    for error in errors.values():
        assert 1e-4 < error < 0.01


def test_the_decode_step_runs_as_a_script():
    done = subprocess.run(
        [sys.executable, "tests/examples/decode_step.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["flashmla_sparse", "flashinfer_sparse"]
    assert all(float(line.split()[-2]) < 1 for line in lines)
