"""``cupy-mla info``: versions, the backend that would be used, and the GPU of this machine."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import re
from typing import Any

from cupy_mla import _kernel_files
from cupy_mla._version import __version__
from cupy_mla.cli import _arguments, _console, _device

SUMMARY = "versions, backend and GPU of this machine"
DESCRIPTION = (
    "Show the versions of cupy_mla and of what it works with, the backend that is used by default "
    "and why, and, where CuPy is installed, the GPUs, their driver and the compiler. Versions are "
    "read from package metadata: torch and JAX are not imported."
)
EXAMPLES = (
    "cupy-mla info",
    "cupy-mla info --json",
)

#: Modules that are reported, and the distributions that hold them.
_PACKAGES = {
    "numpy": "numpy",
    "ml_dtypes": "ml-dtypes",
    "torch": "torch",
    "triton": "triton",
    "jax": "jax",
}
#: CuPy comes as many distributions that all hold the module ``cupy``.
_CUPY = re.compile(r"cupy(-cuda\d+x?|-rocm-.+)?")
_GIB = 1 << 30


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    _arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print what this machine has."""
    facts = collect()
    if args.json:
        _console.print_json(facts)
    else:
        _print(facts)
    return 0


def collect() -> dict[str, Any]:
    """Return everything that the command shows, as plain data."""
    wheels = _cupy_wheels()
    missing = _device.cuda_missing()
    packages = {module: _version(module, name) for module, name in _PACKAGES.items()}
    packages["cupy"] = ", ".join(f"{version} ({name})" for name, version in wheels.items()) or (
        "of unknown version" if _device.installed("cupy") else None
    )
    return {
        "cupy_mla": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "backend": "CUDA" if missing is None else "NumPy",
        "reason": missing or "CuPy finds a CUDA device",
        "cuda": _device.cuda_facts(),
        "kernel_sources": _kernel_sources(),
        "warnings": _warnings(wheels),
    }


def _version(module: str, distribution: str) -> str | None:
    """Return the version of a module that can be imported, without importing it; else None."""
    if not _device.installed(module):
        return None
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _cupy_wheels() -> dict[str, str]:
    """Return the versions of the installed CuPy distributions by name."""
    wheels: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
        if _CUPY.fullmatch(name):
            wheels.setdefault(name, distribution.version)
    return dict(sorted(wheels.items()))


def _warnings(wheels: dict[str, str]) -> list[str]:
    if len(wheels) < 2:
        return []
    names = list(wheels)
    return [
        f"{' and '.join(names)} are installed side by side and overwrite each other's files; "
        f"run: pip uninstall {' '.join(names)}, then install one of them again"
    ]


def _kernel_sources() -> dict[str, Any] | None:
    """Return number and digest of the CUDA sources, or None where they are missing."""
    try:
        return {"files": len(_kernel_files.names()), "sha256": _kernel_files.digest()}
    except FileNotFoundError:
        return None


def _print(facts: dict[str, Any]) -> None:
    out = _console.console()
    _console.print_facts(
        out,
        "Versions",
        {
            "cupy_mla": facts["cupy_mla"],
            "python": facts["python"],
            "platform": facts["platform"],
            **{name: version or "not installed" for name, version in facts["packages"].items()},
        },
    )
    out.print()
    _console.print_facts(out, "Backend", _backend_facts(facts))
    for gpu in (facts["cuda"] or {}).get("gpus", ()):
        out.print()
        _console.print_facts(
            out,
            f"GPU {gpu['index']}",
            {
                "name": gpu["name"],
                "compute capability": gpu["compute_capability"],
                "memory": f"{gpu['memory_bytes'] / _GIB:.1f} GiB",
                "multiprocessors": str(gpu["multiprocessors"]),
            },
        )
    for warning in facts["warnings"]:
        out.print()
        out.print(f"Warning: {warning}", style="bold yellow")


def _backend_facts(facts: dict[str, Any]) -> dict[str, str]:
    sources, cuda = facts["kernel_sources"], facts["cuda"]
    shown = {"default": facts["backend"], "why": facts["reason"]}
    shown["kernel sources"] = (
        f"{sources['files']} files, sha256 {sources['sha256'][:16]}" if sources else "missing"
    )
    if cuda is not None:
        unknown = "unknown"
        shown |= {
            "driver": f"{cuda['driver'] or unknown} (CUDA {cuda['driver_cuda'] or unknown})",
            "CUDA runtime": cuda["runtime_cuda"] or unknown,
            "NVRTC": cuda["nvrtc"] or unknown,
            "kernel cache": cuda["kernel_cache_dir"] or "in memory (CUPY_CACHE_IN_MEMORY=1)",
        }
    return shown
