"""Importing the package is cheap and needs nothing but NumPy and ml_dtypes.

Each check runs in its own interpreter. It makes no difference whether CuPy, torch or JAX are
installed: a finder at the head of sys.meta_path records who asks for them, and answers that they do
not exist.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import cupy_mla

PACKAGE = Path(cupy_mla.__file__).resolve().parent
FRAMEWORKS = frozenset({"cupy", "cupyx", "cupy_backends", "torch", "jax", "jaxlib", "triton"})
CUPY = frozenset({"cupy", "cupyx", "cupy_backends"})

BLOCKER = """
    import json, sys

    class Blocker:
        asked = []
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in {blocked}:
                self.asked.append(name)
                raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
            return None

    import numpy, ml_dtypes
    before = set(sys.modules)
    sys.meta_path.insert(0, Blocker())
"""


def run(code: str, *, blocked: frozenset[str]) -> dict[str, list[str]]:
    prologue = textwrap.dedent(BLOCKER).format(blocked=sorted(blocked))
    environment = dict(os.environ, PYTHONPATH=str(PACKAGE.parent))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", prologue + textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


IMPORT = """
    import cupy_mla
    print(json.dumps({"asked": Blocker.asked, "new": sorted(set(sys.modules) - before)}))
"""


@pytest.mark.parametrize(
    "module", ["cupy_mla", "cupy_mla.layouts", "cupy_mla.dtypes", "cupy_mla.errors"]
)
def test_import_asks_for_no_framework(module: str) -> None:
    report = run(IMPORT.replace("cupy_mla", module, 1), blocked=FRAMEWORKS | {"cuda", "rich"})
    assert report["asked"] == []
    assert module in report["new"]


def test_import_loads_nothing_beyond_numpy_ml_dtypes_and_the_standard_library() -> None:
    new = run(IMPORT, blocked=frozenset())["new"]
    tops = {name.partition(".")[0] for name in new}
    assert tops - {"cupy_mla"} <= sys.stdlib_module_names


def test_import_loads_no_slow_part_of_the_standard_library() -> None:
    slow = {"asyncio", "ctypes.util", "email", "http", "importlib.metadata", "multiprocessing"}
    slow |= {"sqlite3", "ssl", "tkinter", "unittest", "urllib.request", "xml"}
    new = set(run(IMPORT, blocked=frozenset())["new"])
    assert new & slow == set()


def test_import_loads_neither_the_command_line_nor_the_cuda_backend() -> None:
    new = run(IMPORT, blocked=frozenset())["new"]
    assert [name for name in new if name.startswith(("cupy_mla.cli", "cupy_mla._cuda"))] == []


def test_numpy_arrays_are_served_without_any_framework() -> None:
    code = """
        import numpy as np
        import cupy_mla
        layout = cupy_mla.get_layout("fp8_ds_mla")
        cache = layout.empty(2, 4)
        kv_c = np.ones((1, 512), ml_dtypes.bfloat16)
        k_pe = np.full((1, 64), 2, ml_dtypes.bfloat16)
        cupy_mla.concat_and_cache_mla(kv_c, k_pe, cache, np.array([5]), "fp8_ds_mla")
        row = cupy_mla.read_slots(cache, np.array([5]), "fp8_ds_mla")
        writer = cupy_mla.GroupedCacheWriter([cache], "fp8_ds_mla")
        writer.insert(kv_c[None], k_pe[None], np.array([6]))
        print(json.dumps({
            "asked": Blocker.asked,
            "shape": list(row.shape),
            "ends": [float(row[0, 0]), float(row[0, -1])],
        }))
    """
    report = run(code, blocked=FRAMEWORKS)
    assert report == {"asked": [], "shape": [1, 576], "ends": [1.0, 2.0]}


def imports_of(path: Path) -> set[str]:
    """Top-level names that a file imports anywhere, functions included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.relative_to(PACKAGE).as_posix()
)
def test_frameworks_are_imported_in_their_place_only(path: Path) -> None:
    """CuPy in cupy_mla/_cuda; rich in cupy_mla/cli; Triton in kernels that are compared with.

    torch and JAX nowhere, arrays bring them.
    """
    imported = imports_of(path)
    folder = path.relative_to(PACKAGE).parts[0]
    allowed = CUPY if folder == "_cuda" else frozenset()
    if path == PACKAGE / "bench" / "triton_ways.py":
        allowed = frozenset({"triton"})
    assert imported & FRAMEWORKS <= allowed
    assert "rich" not in imported or folder == "cli"
