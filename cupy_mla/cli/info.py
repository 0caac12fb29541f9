"""``cupy-mla info``: versions, the backend that would be used, and the GPU of this machine."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import platform
import re
import sys
from typing import Any

from cupy_mla import _kernel_files
from cupy_mla._version import __version__
from cupy_mla.cli import _arguments, _console, _device
from cupy_mla.cli._console import Column

SUMMARY = "versions, backend and GPU of this machine"
DESCRIPTION = (
    "Show the versions of cupy_mla and of what it works with, the backend that is used by default\n"
    "and why, and, where CuPy is installed, the GPU, its driver and the compiler. Versions are read\n"
    "from package metadata: torch and JAX are not imported."
)
EXAMPLES = (
    "cupy-mla info",
    "cupy-mla info --json",
)

#: Modules reported, and the distributions that hold them; CuPy's are found by their names.
_PACKAGES = {"numpy": "numpy", "ml_dtypes": "ml-dtypes", "torch": "torch", "jax": "jax"}
_CUPY_DISTRIBUTION = re.compile(r"cupy(-cuda\d+x?|-rocm-.+)?")


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
    cupy = _cupy_distributions()
    survey = _device.survey()
    packages: dict[str, str | None] = {
        module: _version(module, distribution) for module, distribution in _PACKAGES.items()
    }
    packages["cupy"] = ", ".join(f"{version} ({name})" for name, version in cupy.items()) or None
    return {
        "cupy_mla": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "executable": sys.executable,
        "platform": platform.platform(),
        "packages": packages,
        "backend": survey.backend,
        "reason": survey.reason,
        "gpus": [gpu.to_dict() for gpu in survey.gpus],
        "cuda": survey.cuda,
        "kernel_sources": _kernel_digest(),
        "warnings": _side_by_side(cupy),
    }
