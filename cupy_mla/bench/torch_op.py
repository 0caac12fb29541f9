"""A torch operation of compiled code that launches the same kernel, for comparing host times."""

from __future__ import annotations

import hashlib
import importlib
import importlib.resources
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from cupy_mla._cuda.timing import RecordedLaunch

from .problem import Call

_FILE = "torch_op.cpp"


def _folder() -> Path:
    """Return where the library is kept: a folder of this user alone."""
    path = Path(tempfile.gettempdir(), f"cupy_mla_bench_{os.getuid()}")
    path.mkdir(mode=0o700, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise RuntimeError(f"{path} belongs to somebody else")
    return path


def _command(torch: ModuleType, compiler: str, source: Path, library: Path) -> list[str]:
    extension = importlib.import_module("torch.utils.cpp_extension")
    new_abi = int(getattr(torch._C, "_GLIBCXX_USE_CXX11_ABI", True))
    folders = extension.library_paths()
    return [
        compiler,
        "-std=c++20",
        "-O2",
        "-shared",
        "-fPIC",
        f"-D_GLIBCXX_USE_CXX11_ABI={new_abi}",
        *(f"-I{folder}" for folder in extension.include_paths()),
        str(source),
        "-o",
        str(library),
        *(f"-L{folder}" for folder in folders),
        "-lc10",
        "-ltorch_cpu",
        "-ltorch",
    ]


def build(torch: ModuleType) -> Path:
    """Compile the operation, or find the library that an earlier run left.

    Raises
    ------
    RuntimeError
        Where there is no compiler, or the source does not compile; the text says why.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise RuntimeError("there is no C++ compiler g++")
    text = (importlib.resources.files(__package__) / _FILE).read_text(encoding="utf-8")
    key = hashlib.sha256(f"{torch.__version__}\n{compiler}\n{text}".encode()).hexdigest()
    library = _folder() / f"torch_op_{key[:16]}.so"
    if library.exists():
        return library
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        source, built = Path(folder, _FILE), Path(folder, library.name)
        source.write_text(text, encoding="utf-8")
        done = subprocess.run(
            _command(torch, compiler, source, built), capture_output=True, text=True
        )
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line]
            raise RuntimeError(lines[0] if lines else f"{compiler} failed")
        os.replace(built, library)
    return library


def load(torch: ModuleType) -> Any:
    """Return the operations; torch_op.cpp says what they are."""
    torch.ops.load_library(str(build(torch)))
    return torch.ops.cupy_mla_bench


def call(torch: ModuleType, arrays: Sequence[Any], launch: RecordedLaunch) -> Call:
    """Return a call of the operation that makes the launch again.

    Parameters
    ----------
    torch : module
    arrays : (tensor, tensor, tensor)
        kv_c, k_pe and slots, on the device.
    launch : RecordedLaunch
        Of an insert of these arrays.
    """
    insert = load(torch).insert
    arguments = torch.frombuffer(bytearray(launch.arguments), dtype=torch.uint8)
    shape = (int(launch.function), launch.grid, *launch.block)
    kv_c, k_pe, slots = arrays

    def run(keep: object = launch.keep) -> None:  # the launch has addresses of what is kept
        insert(kv_c, k_pe, slots, arguments, *shape)

    return run


def published_call(
    torch: ModuleType,
    arrays: Sequence[Any],
    caches: Sequence[Any],
    launch: RecordedLaunch,
    kv_cache_dtype: str,
) -> Call:
    """Return a call with the arguments of the published grouped operation, which it checks.

    Parameters
    ----------
    torch : module
    arrays : (tensor, tensor, tensor)
        kv_c, k_pe and slots, on the device.
    caches : sequence of tensor
        Of equal shapes and strides.
    launch : RecordedLaunch
        Of an insert of these arrays.
    kv_cache_dtype : str
        "auto" or the name of a flat fp8 layout.
    """
    operations = load(torch)
    arguments = torch.frombuffer(bytearray(launch.arguments), dtype=torch.uint8)
    operations.record(arguments, int(launch.function), launch.grid, *launch.block)
    insert_grouped = operations.insert_grouped
    kv_c, k_pe, slots = arrays
    device = kv_c.device
    pointers = torch.tensor([cache.data_ptr() for cache in caches], device=device)
    scales = None if kv_cache_dtype == "auto" else torch.ones(len(caches), device=device)
    block_stride, entry_stride = caches[0].stride(0), caches[0].stride(1)
    block_size = caches[0].shape[1]

    # Such operations are called through a function of Python that names their arguments.
    def concat_and_cache(
        kv_c: Any,
        k_pe: Any,
        kv_cache_ptrs: Any,
        slot_mapping: Any,
        block_size: int,
        block_stride: int,
        entry_stride: int,
        kv_cache_dtype: str,
        kv_scales: Any,
    ) -> None:
        insert_grouped(
            kv_c,
            k_pe,
            kv_cache_ptrs,
            slot_mapping,
            block_size,
            block_stride,
            entry_stride,
            kv_cache_dtype,
            kv_scales,
        )

    def run(keep: object = (launch.keep, caches)) -> None:
        concat_and_cache(
            kv_c,
            k_pe,
            pointers,
            slots,
            block_size,
            block_stride,
            entry_stride,
            kv_cache_dtype,
            scales,
        )

    return run
