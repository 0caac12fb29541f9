"""Compiled kernels are found again: by plan, by device, and on disk by the next process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = """
import cupy
from cupy.cuda import compiler

calls = []
compile_using_nvrtc = compiler._compile_using_nvrtc_no_warning
def counting(source, *args, **kwargs):
    if "cupy_mla" in source:
        calls.append(1)
    return compile_using_nvrtc(source, *args, **kwargs)
compiler._compile_using_nvrtc_no_warning = counting

from cupy_mla import GroupedCacheWriter
cache = cupy.zeros((4, 16, 37), cupy.float16)
rows = cupy.ones((1, 4, 37), cupy.float16)
for _ in range(3):
    writer = GroupedCacheWriter([cache], kv_lora_rank=32, rope_dim=5)
    writer.warmup()
    writer.insert(rows[..., :32], rows[..., 32:], cupy.arange(4))
assert int(cache.sum()) == 4 * 37
print("compiled", len(calls))
"""


NO_FOLDER = """
from cupy_mla import backends
from cupy_mla._arrays import DeviceId
backends.cuda(DeviceId("cuda", 0))
"""


def run(cache_dir: Path, root: Path, script: str = SCRIPT) -> subprocess.CompletedProcess[str]:
    """Run a process with a kernel cache of its own."""
    environment = {
        **os.environ,
        "CUPY_CACHE_DIR": str(cache_dir),
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
    }
    return subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )


def compiled(cache_dir: Path, root: Path) -> int:
    """Say how many sources a process compiled."""
    done = run(cache_dir, root)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


def test_a_second_process_compiles_nothing_unless_a_header_changed(tmp_path):
    copy = tmp_path / "checkout"
    for folder in ("cupy_mla", "kernels_src"):
        shutil.copytree(ROOT / folder, copy / folder)
    cache_dir = tmp_path / "cache"
    assert compiled(cache_dir, copy) == 1
    assert compiled(cache_dir, copy) == 0
    header = copy / "kernels_src" / "paging.cuh"
    header.write_text(header.read_text() + "// changed\n")
    assert compiled(cache_dir, copy) == 1


def test_a_cache_folder_that_cannot_be_made():
    done = run(Path("/proc/nowhere"), ROOT, NO_FOLDER)
    assert done.returncode != 0
    assert "BackendUnavailable" in done.stderr
    assert "CUPY_CACHE_DIR" in done.stderr


def test_a_cache_folder_that_cannot_be_written():
    """Kernels are compiled in memory, with a warning that names the variable."""
    done = run(Path("/proc"), ROOT)
    assert done.returncode == 0, done.stderr
    assert "CUPY_CACHE_DIR" in done.stderr
