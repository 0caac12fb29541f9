"""README.md says what is so: its examples run, its tables are those that the package prints.

`python -m tests.test_readme` writes the tables into README.md again.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import numpy as np
import pytest

import cupy_mla
from cupy_mla._cuda.backend import CudaBackend
from cupy_mla.backends import NumpyBackend
from cupy_mla.cli import main
from cupy_mla.cli._device import cuda_missing
from cupy_mla.layouts import LAYOUT_NAMES

README = Path(__file__).resolve().parent.parent / "README.md"
TEXT = README.read_text(encoding="utf-8")
REWRITE = "`python -m tests.test_readme` writes the tables again"
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
    assert between(TEXT, "layouts") == layout_tables(), REWRITE


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
        missing = cuda_missing()
        if missing is not None:
            pytest.skip(f"this example needs CuPy and a GPU: {missing}")
    for module in ("torch", "jax"):
        if f"import {module}" in source:
            pytest.importorskip(module, exc_type=ImportError)
    assert len(source.splitlines()) <= 12
    exec(compile(source, str(README), "exec"), {"__name__": "example"})


@pytest.mark.parametrize("name", ["demo-command", "test-command"])
def test_commands_are_one_line(name: str) -> None:
    """CI reads these lines by their marks and runs them as they stand."""
    (block,) = re.findall(rf"<!-- {name} -->\n```sh\n(.*?)^```$", TEXT, re.M | re.S)
    assert block.count("\n") == 1
    assert block.startswith("python3 -m venv .venv && .venv/bin/pip install ")


# --- the support table ------------------------------------------------------------------------

# Public names that run on no backend.
NO_OPERATION = {
    "BackendUnavailable",
    "CacheAudit",
    "CacheLayout",
    "CacheMemory",
    "CachePolicy",
    "CompileError",
    "LayoutField",
    "__version__",
    "cache_memory",
    "get_layout",
    "register_backend",
    "select_cache_policy",
}
# Operations that share a row, what they read or write, and the method of a backend that they come
# down to: a backend that lacks the method does not have the operation.
OPERATIONS = [
    (("concat_and_cache_mla",), "all", "insert"),
    (("concat_and_cache_mla_grouped",), "all", "insert_grouped"),
    (("GroupedCacheWriter.insert",), "all", "insert"),
    (("GroupedCacheWriter.insert_context",), "all", "insert_context"),
    (("fused_norm_rope", "FusedNormRope"), "all, and `indexer_fp8`", "norm_rope"),
    (("fused_q",), "none, queries", "fused_q"),
    (("indexer_k_quant_and_cache",), "`indexer_fp8`", "insert_indexer"),
    (("read_slots",), "all", "read_slots"),
    (("gather_cache", "gather_and_maybe_dequant_cache"), "all", "gather"),
    (("cp_gather_and_upconvert_fp8_kv_cache",), "`fp8_ds_mla`", "gather"),
    (("cp_gather_indexer_k_quant_cache",), "`indexer_fp8`", "gather_indexer"),
    (("convert_cache",), "all", "convert"),
    (("audit_cache",), "all", "host_rows"),
]


def support_table() -> str:
    lines = ["| operation | formats | NumPy | CUDA |", "| --- | --- | --- | --- |"]
    for names, formats, method in OPERATIONS:
        listed = ", ".join(f"`{name}`" for name in names)
        has = ("yes" if hasattr(it, method) else "no" for it in (NumpyBackend, CudaBackend))
        lines.append(f"| {listed} | {formats} | {' | '.join(has)} |")
    return "\n".join([*lines, ""])


def test_the_support_table_is_what_the_backends_have() -> None:
    assert between(TEXT, "support") == support_table(), REWRITE


def test_the_support_table_has_every_operation() -> None:
    listed = {name.partition(".")[0] for names, _, _ in OPERATIONS for name in names}
    assert listed == set(cupy_mla.__all__) - NO_OPERATION


def rows_of(layout: cupy_mla.CacheLayout) -> tuple[np.ndarray, np.ndarray]:
    dtype = layout.input_dtypes[0]
    return np.ones((1, 2, 512), dtype), np.ones((1, 2, 64), dtype)


@pytest.mark.parametrize("name", LAYOUT_NAMES)
@pytest.mark.parametrize("grouped", [False, True])
def test_all_formats_are_written_and_read_on_numpy(name: str, grouped: bool) -> None:
    layout = cupy_mla.get_layout(name)
    cache = layout.empty(2, 4)
    cache[:] = 0
    kv_c, k_pe = rows_of(layout)
    slots, scale = np.array([1, 6]), 0.5 if layout.needs_scale else None
    if grouped:
        scales = [scale] if layout.needs_scale else None
        cupy_mla.GroupedCacheWriter([cache], name, scales).insert(kv_c, k_pe, slots)
    else:
        cupy_mla.concat_and_cache_mla(kv_c[0], k_pe[0], cache, slots, name, scale)
    rows = cupy_mla.read_slots(cache, np.array([1, 6, 2]), name, scale)
    assert (rows == [[1], [1], [0]]).all()


@pytest.mark.parametrize("name", LAYOUT_NAMES)
def test_the_grouped_function_takes_no_numpy_arrays(name: str) -> None:
    layout = cupy_mla.get_layout(name)
    cache = layout.empty(2, 4)
    block, entry = (stride // cache.itemsize for stride in cache.strides[:2])
    pointers = np.array([cache.ctypes.data])
    with pytest.raises(TypeError, match="concat_and_cache_mla_grouped"):
        cupy_mla.concat_and_cache_mla_grouped(
            *rows_of(layout), pointers, np.array([1, 6]), 4, block, entry, kv_cache_dtype=name
        )


def replaced(text: str, mark: str, new: str) -> str:
    """Put `new` between <!-- mark:begin --> and <!-- mark:end -->."""
    head, begin, rest = text.partition(f"<!-- {mark}:begin -->\n")
    _, end, tail = rest.partition(f"<!-- {mark}:end -->")
    return f"{head}{begin}{new}{end}{tail}"


if __name__ == "__main__":
    new = replaced(TEXT, "layouts", layout_tables())
    README.write_text(replaced(new, "support", support_table()), encoding="utf-8")
