"""The draft model of the worked examples, on the device, over arrays of each framework."""

from __future__ import annotations

import pytest

from tests.examples import draft_model

ARRAYS = {"cupy": draft_model.CupyArrays, "torch": lambda: draft_model.TorchArrays("cuda")}


@pytest.mark.parametrize("fmt", draft_model.FORMATS)
@pytest.mark.parametrize("name", list(ARRAYS))
def test_the_draft_model_stores_what_separate_operations_do(name, fmt):
    """Each device row is within its bound of plain NumPy, and staged bytes are the same."""
    pytest.importorskip(name)
    result = draft_model.run(fmt, ARRAYS[name]())
    assert result.good, result
    assert result.rows > sum(draft_model.PROMPTS)
    assert result.error > 0.9


@pytest.mark.parametrize("name", list(ARRAYS))
def test_the_draft_model_as_a_program(capsys, name):
    pytest.importorskip(name)
    assert draft_model.main(["--arrays", name, "--device", "cuda"]) == 0
    assert capsys.readouterr().out.count("good") == len(draft_model.FORMATS)
