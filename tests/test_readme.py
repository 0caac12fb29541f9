"""README.md says what is so: its examples run, its tables are those that the package prints.

`python -m tests.test_readme` writes the tables into README.md again.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import cupy_mla
from cupy_mla.cli import main
from cupy_mla.layouts import LAYOUT_NAMES

README = Path(__file__).resolve().parent.parent / "README.md"
TEXT = README.read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", TEXT, re.M | re.S)


def between(text: str, mark: str) -> str:
    """What stands between <!-- mark:begin --> and <!-- mark:end -->."""
    (found,) = re.findall(rf"<!-- {mark}:begin -->\n(.*?)<!-- {mark}:end -->", text, re.S)
    return found


def layout_tables() -> str:
    """All that README says about the formats: an overview, then the byte map of each."""
    lines = ["| format | bytes a row | cache array | rows made of | scale |"]
    lines.append("| --- | ---: | --- | --- | --- |")
    for name in LAYOUT_NAMES:
        layout = cupy_mla.get_layout(name)
        scale = "one a layer" if layout.needs_scale else "in the row" if layout.tile else "none"
        arrays = " or ".join(dtype.name for dtype in layout.accepted_dtypes)
        inputs = ", ".join(dtype.name for dtype in layout.input_dtypes)
        lines.append(f"| `{name}` | {layout.row_bytes} | {arrays} | {inputs} | {scale} |")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["layouts", "--markdown"]) == 0
    return "\n".join(["", *lines, "", printed.getvalue(), ""])


def test_the_layout_tables_are_the_package_s_own() -> None:
    written = between(TEXT, "layouts")
    assert written == layout_tables(), "python -m tests.test_readme writes them again"


def test_the_tables_show_the_published_offsets() -> None:
    """Literal numbers, so that the generator and the layouts cannot err together."""
    table = between(TEXT, "layouts")
    row_bytes = dict(re.findall(r"^\| `(\w+)` \| (\d+) \|", table, re.M))
    assert row_bytes == {
        "bfloat16": "1152",
        "float16": "1152",
        "float32": "2304",
        "fp8_e4m3": "576",
        "fp8_e5m2": "576",
        "fp8_ds_mla": "656",
    }
    ds_mla = table.partition("**fp8_ds_mla")[2].partition("**fp8_")[0]
    offsets = re.findall(r"^\| (\w+) \| (\d+) \| (\d+) \| (\w+) \| (\d+) \|", ds_mla, re.M)
    assert offsets == [
        ("nope", "0", "512", "float8_e4m3fn", "512"),
        ("scale", "512", "16", "float32", "4"),
        ("rope", "528", "128", "bfloat16", "64"),
    ]


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(
            source,
            id=f"example{number}",
            marks=[pytest.mark.gpu] if "import cupy as" in source else [],
        )
        for number, source in enumerate(EXAMPLES)
    ],
)
def test_example_runs(source: str) -> None:
    if "import cupy as" in source:
        pytest.importorskip(
            "cupy", reason="this example needs CuPy and a GPU", exc_type=ImportError
        )
    assert len(source.splitlines()) <= 12
    exec(compile(source, str(README), "exec"), {"__name__": "example"})


@pytest.mark.parametrize("name", ["demo-command", "test-command"])
def test_commands_are_one_line(name: str) -> None:
    """CI reads these lines by their marks and runs them as they stand."""
    (block,) = re.findall(rf"<!-- {name} -->\n```sh\n(.*?)^```$", TEXT, re.M | re.S)
    assert block.count("\n") == 1
    assert block.startswith("python3 -m venv .venv && .venv/bin/pip install ")


# --- the support table ------------------------------------------------------------------------

COLUMNS = {
    "16 and 32 bits": ("bfloat16", "float16", "float32"),
    "flat fp8": ("fp8_e4m3", "fp8_e5m2"),
    "`fp8_ds_mla`": ("fp8_ds_mla",),
}


def support() -> dict[tuple[str, str], set[str]]:
    """(operation, column) -> backends, as README has it."""
    table = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in between(TEXT, "support").splitlines()
    ]
    header, _, *rows = table
    assert header == ["operation", *COLUMNS]
    return {
        (row[0].strip("`"), column): set(cell.split(", "))
        for row in rows
        for column, cell in zip(COLUMNS, row[1:], strict=True)
    }


def call_on_numpy(operation: str, name: str) -> None:
    """Call one operation on NumPy arrays of one format."""
    layout = cupy_mla.get_layout(name)
    dtype = layout.input_dtypes[0]
    assert dtype in (ml_dtypes.bfloat16, np.float16, np.float32)
    cache = layout.empty(2, 4)
    cache[:] = 0
    kv_c, k_pe = np.ones((1, 2, 512), dtype), np.ones((1, 2, 64), dtype)
    slots, scale = np.array([1, 6]), 0.5 if layout.needs_scale else None
    if operation == "get_layout":
        return
    if operation == "concat_and_cache_mla":
        cupy_mla.concat_and_cache_mla(kv_c[0], k_pe[0], cache, slots, name, scale)
    elif operation == "GroupedCacheWriter":
        scales = [scale] if layout.needs_scale else None
        cupy_mla.GroupedCacheWriter([cache], name, scales).insert(kv_c, k_pe, slots)
    elif operation == "concat_and_cache_mla_grouped":
        pointers = np.array([cache.ctypes.data])
        strides = (cache.strides[0] // cache.itemsize, cache.strides[1] // cache.itemsize)
        cupy_mla.concat_and_cache_mla_grouped(
            kv_c, k_pe, pointers, slots, 4, *strides, kv_cache_dtype=name, num_blocks=2
        )
    elif operation == "read_slots":
        cupy_mla.concat_and_cache_mla(kv_c[0], k_pe[0], cache, slots, name, scale)
        rows = cupy_mla.read_slots(cache, slots, name, scale)
        assert (rows == 1).all()
        return
    else:
        raise AssertionError(f"no call for {operation}")
    assert cache.any()


@pytest.mark.parametrize(("operation", "column"), list(support()))
def test_support_table_is_right_about_numpy(operation: str, column: str) -> None:
    backends = support()[operation, column]
    assert backends <= {"NumPy", "CUDA"}
    for name in COLUMNS[column]:
        if "NumPy" in backends:
            call_on_numpy(operation, name)
        else:
            with pytest.raises(TypeError):
                call_on_numpy(operation, name)


def test_support_table_names_every_public_operation() -> None:
    types = {"CacheLayout", "LayoutField", "CompileError", "BackendUnavailable"}
    constants = {"LAYOUT_NAMES", "__version__"}
    public = set(cupy_mla.__all__) - types - constants
    assert {operation for operation, _ in support()} == public


if __name__ == "__main__":
    head, _, rest = TEXT.partition("<!-- layouts:begin -->\n")
    tail = rest.partition("<!-- layouts:end -->")[2]
    new = f"{head}<!-- layouts:begin -->\n{layout_tables()}<!-- layouts:end -->{tail}"
    README.write_text(new, encoding="utf-8")
