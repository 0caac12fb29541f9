"""Compiled kernels are found again: by plan, by device, and on disk by the next process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = """
import torch
from cupy_mla import GroupedCacheWriter
cache = torch.zeros(4, 16, 37, dtype=torch.float16, device="cuda")
rows = torch.ones(1, 4, 37, dtype=torch.float16, device="cuda")
for _ in range(3):
    writer = GroupedCacheWriter([cache], kv_lora_rank=32, rope_dim=5)
    writer.warmup()
    writer.insert(rows[..., :32], rows[..., 32:], torch.arange(4, device="cuda"))
assert int(cache.sum()) == 4 * 37
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
        "PYTHONPATH": os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    # In that folder: Python looks for modules in the current one first.
    return subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, cwd=root
    )


def compiled(cache_dir: Path, root: Path) -> dict[str, int]:
    """Run a process; return the compiled kernels that lie in its cache, and when they came."""
    done = run(cache_dir, root)
    assert done.returncode == 0, done.stderr
    return {path.name: path.stat().st_mtime_ns for path in cache_dir.iterdir()}


def test_a_second_process_compiles_nothing_unless_a_header_changed(tmp_path):
    copy = tmp_path / "checkout"
    for folder in ("cupy_mla", "kernels_src"):
        shutil.copytree(ROOT / folder, copy / folder)
    cache_dir = tmp_path / "cache"
    first = compiled(cache_dir, copy)
    assert len(first) == 1
    assert compiled(cache_dir, copy) == first
    header = copy / "kernels_src" / "paging.cuh"
    header.write_text(header.read_text() + "// changed\n")
    assert len(compiled(cache_dir, copy)) == 2


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
