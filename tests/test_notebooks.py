"""Notebooks are stored without outputs, and README's numbers are those of notebook 3.

CI executes them whole; what needs matplotlib is not run here.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def load(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def test_there_are_notebooks() -> None:
    assert [path.name[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(path: Path) -> None:
    notebook = load(path)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert "".join(notebook["cells"][0]["source"]).startswith("# ")
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None


@pytest.fixture(scope="module")
def summary() -> dict[str, tuple[int, float, float]]:
    """Bytes a row, error of an element and of attention's output, by format."""
    (path,) = [path for path in NOTEBOOKS if path.stem == "03_what_quantisation_costs"]
    names: dict = {}
    for cell in load(path)["cells"]:
        if "readme" in cell["metadata"].get("tags", ()):
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    return names["summary"]


def test_the_table_of_formats_holds_the_numbers_of_the_notebook(summary) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.partition("### How to choose a format")[2].partition("\n#")[0]
    line = r"^\| `(\w+)`[^|]* \| (\d+) \| ([\d.]+) % \| ([\d.]+) % \|"
    listed = {name: numbers for name, *numbers in re.findall(line, section, re.M)}
    assert listed.keys() == {*summary, "float32"}
    for name, found in summary.items():
        assert [float(number) for number in listed[name]] == pytest.approx(found, abs=0.06)


def test_the_errors_are_of_the_size_that_the_formats_have(summary) -> None:
    """A code of m bits behind the first is off by up to 2^-(m+1), and 2.4 times less as an RMS.

    That is 6.25 % and 12.5 % at most for e4m3 and e5m2.
    """
    errors = {name: value for name, (_, value, _) in summary.items()}
    assert errors["bfloat16"] == 0
    assert 6.25 / 3 < errors["fp8_e4m3"] < 6.25 / 2
    assert 12.5 / 3 < errors["fp8_e5m2"] < 12.5 / 2
    assert 0.9 * errors["fp8_e4m3"] < errors["fp8_ds_mla"] < errors["fp8_e4m3"]
