"""The worked examples run, and their numbers are what they should be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.examples import decode_step, draft_model

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


def test_the_draft_model_runs_as_a_script():
    done = subprocess.run(
        [sys.executable, "tests/examples/draft_model.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[:3] for line in lines] == [
        [fmt, "6", "steps,"] for fmt in draft_model.FORMATS
    ]
    assert all(line.endswith(" 0 bytes differ: good") for line in lines)


@pytest.mark.parametrize("fmt", draft_model.FORMATS)
@pytest.mark.parametrize("seed", [1, 2])
def test_rows_of_the_draft_model_are_within_their_bounds_and_no_looser(fmt, seed):
    """Of so many elements some are nearly as far off as a rounding can be."""
    result = draft_model.run(fmt, draft_model.NumpyArrays(), seed)
    assert result.good
    assert result.rows > sum(draft_model.PROMPTS)
    assert result.error > 0.95


def test_the_draft_model_over_torch_on_the_cpu(capsys):
    pytest.importorskip("torch")
    assert draft_model.main(["--arrays", "torch", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.count("good") == len(draft_model.FORMATS)


def test_a_framework_without_a_device_is_a_usage_error(monkeypatch, capsys):
    class NoGpu:
        def put(self, host):
            raise RuntimeError("no CUDA device")

    monkeypatch.setattr(draft_model, "CupyArrays", NoGpu)
    with pytest.raises(SystemExit):
        draft_model.main(["--arrays", "cupy"])
    assert "no arrays of cupy on cuda: no CUDA device" in capsys.readouterr().err


def test_the_decode_step_explains_itself(capsys):
    with pytest.raises(SystemExit) as ended:
        decode_step.main(["--help"])
    assert ended.value.code == 0
    assert "One decode step" in capsys.readouterr().out


def other_pairs(x, row):
    """Pairs (i, i + P/2)."""
    cos, sin = row[:, :32], row[:, 32:]
    a, b = x[:, :32], x[:, 32:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=1)


def other_norm(x, weight, *, tree=False, norm=draft_model.norm):
    """The norm of twice the row: as with an eps of 2.5e-7."""
    return norm(x * 2, weight, tree=tree)


@pytest.mark.parametrize(("name", "other"), [("rotate", other_pairs), ("norm", other_norm)])
def test_the_draft_model_notices_another_arithmetic(monkeypatch, capsys, name, other):
    monkeypatch.setattr(draft_model, name, other)
    assert draft_model.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert all(line.endswith("WRONG") and " 0 bytes differ" not in line for line in lines)


@pytest.mark.parametrize(("arrays", "device"), [("numpy", "cuda"), ("cupy", "cpu")])
def test_the_draft_model_refuses_arrays_that_a_device_has_not(capsys, arrays, device):
    with pytest.raises(SystemExit):
        draft_model.main(["--arrays", arrays, "--device", device])
    assert f"{arrays} has no arrays on {device}" in capsys.readouterr().err
