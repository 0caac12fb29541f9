"""README's section on performance says what the stored results say, and whether they still hold."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cupy_mla import _kernel_files, get_layout
from cupy_mla.bench import performance, stored
from cupy_mla.bench.compile_time import CompileRow
from cupy_mla.bench.figures import Figures
from cupy_mla.bench.host_calls import HostRow
from cupy_mla.bench.measure import Ceiling, Row
from cupy_mla.bench.operations import OPERATIONS
from cupy_mla.bench.problem import Problem
from cupy_mla.bench.report import Report
from cupy_mla.bench.rotation import Rotation
from cupy_mla.bench.step import FRAMEWORK, NOTHING, OURS, StepRow

README = Path(__file__).resolve().parent.parent / "README.md"
STALE = "The kernels have changed since these were measured."
EMPTY_NODE = 0.6


def figures(microseconds: float) -> Figures:
    return Figures(microseconds, 0.98 * microseconds, 1.05 * microseconds)


def problem(operation: str, fmt: str, tokens: int, pattern: str = "contiguous") -> Problem:
    layers = 5 if OPERATIONS[operation].layered else 1
    return Problem(operation, get_layout(fmt), layers, tokens, 64, pattern)


def row(what: Problem, us: float, ceiling: float, *, cold: bool = True, **others: float) -> Row:
    moved = OPERATIONS[what.operation].traffic(what)
    return Row(
        what,
        moved,
        Rotation(8, 64, cold, 8 * moved.total),
        figures(us),
        EMPTY_NODE,
        Ceiling(figures(ceiling), "16 bytes a thread"),
        {name.replace("_", " "): figures(other) for name, other in others.items()},
    )


def report() -> Report:
    """Results as a session leaves them, with times that are easy to check."""
    small, large = problem("insert", "fp8_e4m3", 1), problem("insert", "fp8_e4m3", 8192)
    scattered = problem("insert", "fp8_e4m3", 8192, "random")
    return Report(
        device="CUDA on NVIDIA H200",
        reason="CuPy finds a CUDA device",
        timed=True,
        machine={
            "packages": {"cupy": "14.2.0 (cupy-cuda12x)", "torch": None},
            "cuda": {"driver": "570.86", "nvrtc": "12.9"},
            "kernel_sources": {"files": 30, "sha256": _kernel_files.digest()},
        },
        rows=[
            row(small, 1.25, 0.75, scalar=2.5),
            row(large, 20.0, 19.0, scalar=140.0, per_layer=25.0),
            row(scattered, 25.0, 20.0, scalar=150.0),
            row(large, 10.0, 9.9, cold=False),
            row(problem("gather", "fp8_ds_mla", 131072), 80.0, 72.0),
            row(problem("convert", "bfloat16", 131072), 100.0, 88.0),
        ],
        host=[
            HostRow(small, "bind()", "CuPy", figures(4.5)),
            HostRow(small, "bind()", "torch", figures(4.75)),
            HostRow(problem("insert", "fp8_e4m3", 64), "bind()", "CuPy", figures(4.625)),
            HostRow(large, "bind()", "CuPy", figures(5.25)),
            HostRow(small, "cupy.RawKernel, 15 arguments", "CuPy", figures(9.0)),
            HostRow(problem("norm-rope", "bfloat16", 1), "Triton", "torch", figures(50.0)),
            HostRow(problem("q", "bfloat16", 1), "Triton", "torch", figures(30.0)),
        ],
        compiled=[CompileRow("insert_a", 0.31, 0.021), CompileRow("insert_b", 0.25, 0.019)],
        steps=[
            StepRow(
                large,
                "torch",
                {NOTHING: figures(100.0), OURS: figures(121.0), FRAMEWORK: figures(400.0)},
            )
        ],
        notes={"vLLM": "not importable"},
    )


def document(**changes) -> dict:
    return report().to_dict(["cupy-mla", "bench"], {}) | changes


def store(folder: Path, name: str, content: dict) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


def rendered(folder: Path) -> str:
    return performance.render(stored.load(folder))


# --- the section ----------------------------------------------------------------------------------


def test_the_section_is_what_the_stored_results_say(tmp_path):
    again = tmp_path / "README.md"
    shutil.copyfile(README, again)
    performance.write(again, performance.render(stored.load()))
    assert again.read_text(encoding="utf-8") == README.read_text(encoding="utf-8"), (
        f"`{performance.COMMAND}` writes the section again"
    )


def test_nothing_measured_is_said():
    assert performance.render([]).startswith("Nothing has been measured yet")


def test_a_folder_that_is_not_there_holds_no_results(tmp_path):
    assert stored.load(tmp_path / "missing") == []


def test_the_tables_hold_the_measured_numbers(tmp_path):
    store(tmp_path, "h200.json", document(date="2026-11-30T10:00:00+00:00"))
    text = rendered(tmp_path)
    lines = text.splitlines()
    insert = "`GroupedCacheWriter.insert`, 5 layers | fp8_e4m3"
    assert "### NVIDIA H200" in lines
    assert (
        "- `h200.json`, 2026-11-30: driver 570.86, NVRTC 12.9, CuPy 14.2.0 (cupy-cuda12x); "
        f"kernels `{_kernel_files.digest()[:12]}`." in lines
    )
    assert f"| {insert} | scalar 7.00x, per layer 1.25x | 8,192 | 20.0 | 95 % | 80 % |" in lines
    assert f"| {insert} | scalar 2.00x | 1 | 1.25 | 0.60 | 0.75 |" in lines
    assert "| `gather_cache` | fp8_ds_mla | - | 131,072 | 80.0 | 90 % | - |" in lines
    assert "| `convert_cache` | to bfloat16 | - | 131,072 | 100 | 88 % | - |" in lines
    assert "| fp8_e4m3 | contiguous | torch | 8,192 | 21.0 | 300 |" in lines
    assert [line for line in lines if line.startswith("| bind()")] == [
        "| bind() | fp8_e4m3 | 1 | 4.50 (4.41) | 4.75 (4.66) |",
        "| bind() | fp8_e4m3 | 8,192 | 5.25 (5.14) | - |",
    ]
    assert "| cupy.RawKernel, 15 arguments | fp8_e4m3 | 1 | 9.00 (8.82) | - |" in lines
    assert "| Triton, as `fused_norm_rope` | bfloat16 | 1 | - | 50.0 (49.0) |" in lines
    assert "| Triton, as `fused_q` | bfloat16 | 1 | - | 30.0 (29.4) |" in lines
    assert "waits 250 to 310 ms for NVRTC, and 19 to 21 ms where" in text
    assert "kernels of insert)." in text
    assert "Not measured there: vLLM." in text
    assert STALE not in text


def test_all_rows_of_a_table_have_as_many_cells(tmp_path):
    store(tmp_path, "h200.json", document())
    tables = [part for part in rendered(tmp_path).split("\n\n") if part.startswith("|")]
    assert len(tables) == 4
    for table in tables:
        assert len({line.count("|") for line in table.splitlines()}) == 1


def test_the_newest_measurement_counts(tmp_path):
    old, new = (
        document(date="2026-11-29T10:00:00+00:00"),
        document(date="2026-11-30T09:00:00+00:00"),
    )
    new["rows"] = [entry for entry in new["rows"] if entry["operation"] == "insert"]
    for entry in new["rows"]:
        entry["us"]["median"] += 1
    store(tmp_path, "a.json", new)
    store(tmp_path, "b.json", old)
    text = rendered(tmp_path)
    assert "| 8,192 | 21.0 |" in text
    assert "| 8,192 | 20.0 |" not in text
    assert "| 131,072 | 80.0 |" in text  # only the old one has it


def test_each_gpu_has_its_own_tables(tmp_path):
    store(tmp_path, "h200.json", document())
    store(tmp_path, "l4.json", document(device="CUDA on NVIDIA L4"))
    text = rendered(tmp_path)
    assert text.count("| bind() |") == 4
    assert "### NVIDIA H200" in text
    assert "### NVIDIA L4" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 0}, "x.json: schema must be 1, got 0"),
        ({"timed": False}, "x.json: timed must be True, got False"),
        ({"ok": False}, "x.json: ok must be True, got False"),
    ],
)
def test_what_is_no_measurement_is_refused(tmp_path, changes, message):
    store(tmp_path, "x.json", document(**changes))
    with pytest.raises(ValueError, match=message):
        stored.load(tmp_path)


def test_a_file_without_marks_is_left_alone(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("# no marks\n", encoding="utf-8")
    with pytest.raises(ValueError, match="performance:begin"):
        performance.write(path, "text\n")
    assert path.read_text(encoding="utf-8") == "# no marks\n"


# --- whether results still hold -------------------------------------------------------------------


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """A copy of the kernel sources that may be edited."""
    copy = tmp_path / "kernels_src"
    shutil.copytree(_kernel_files._root(), copy)
    monkeypatch.setattr(_kernel_files, "_CANDIDATES", (copy,))
    return copy


def test_results_hold_as_long_as_no_kernel_changes(kernels, tmp_path):
    store(tmp_path / "results", "h200.json", document())
    assert STALE not in rendered(tmp_path / "results")
    source = kernels / _kernel_files.names()[0]
    text = source.read_text(encoding="utf-8")
    source.write_text(text + "// a comment\n", encoding="utf-8")
    assert STALE in rendered(tmp_path / "results")
    source.write_text(text, encoding="utf-8")
    assert STALE not in rendered(tmp_path / "results")
    source.unlink()
    assert STALE in rendered(tmp_path / "results")


def test_only_results_of_other_kernels_are_called_old(tmp_path):
    content = document(date="2026-11-01T00:00:00+00:00")
    content["machine"]["kernel_sources"]["sha256"] = "0" * 64
    store(tmp_path, "old.json", content)
    store(tmp_path, "new.json", document())
    found = {result.name: result.is_current for result in stored.load(tmp_path)}
    assert found == {"old.json": False, "new.json": True}
    (old,) = [line for line in rendered(tmp_path).splitlines() if STALE in line]
    assert old.startswith("- `old.json`, 2026-11-01: ")
    assert "kernels `000000000000`." in old


def test_results_of_unknown_kernels_are_called_old(tmp_path):
    content = document()
    content["machine"]["kernel_sources"] = None
    store(tmp_path, "x.json", content)
    assert "kernels `unknown`. **" + STALE in rendered(tmp_path)
