"""``cupy-mla warmup``: compile every kernel for the GPU at hand, before the first step needs it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from cupy_mla import _kernel_files, backends
from cupy_mla._arrays import DeviceId
from cupy_mla._cuda import compiler, registry
from cupy_mla._cuda.registry import Specialisation
from cupy_mla.cli import _arguments, _console, _device
from cupy_mla.errors import BackendUnavailable
from cupy_mla.layouts import get_layout

SUMMARY = "compile the kernels for this GPU in advance"
DESCRIPTION = (
    "Compile the kernels of every operation for the current CUDA device, or those of chosen "
    "layouts and dtypes, so that a service finds them in CuPy's cache on disk when it starts. "
    "Kernels that are there already are only loaded."
)
EXAMPLES = (
    "cupy-mla warmup",
    "cupy-mla warmup --layout fp8_ds_mla --layout indexer_fp8",
    "cupy-mla warmup --input bfloat16 --json > warmup.json",
)


def _names() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the layouts and dtypes for which there are kernels."""
    specials = list(registry.specialisations())
    layouts = dict.fromkeys(special.format.layout for special in specials)
    inputs = dict.fromkeys(special.input.dtype for special in specials)
    return tuple(layouts), tuple(inputs)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    layouts, inputs = _names()
    parser.add_argument(
        "--layout",
        action="append",
        type=_layout,
        metavar="NAME",
        dest="layouts",
        help=f"cache layout, may be repeated: {', '.join(layouts)}, fp8 for fp8_e4m3 "
        "(default: all)",
    )
    parser.add_argument(
        "--input",
        action="append",
        choices=inputs,
        dest="inputs",
        help="dtype of a kernel's inputs, of its output where it reads a cache; may be repeated "
        "(default: all)",
    )
    _arguments.add_json(parser)


def _layout(text: str) -> str:
    layouts, _ = _names()
    try:
        # "auto" stands for the dtype of a cache, and there is none here.
        name = "auto" if text == "auto" else get_layout(text).name
    except ValueError:
        name = text
    if name not in layouts:
        raise argparse.ArgumentTypeError(
            f"unknown layout {text!r} (choose from {', '.join(layouts)}; fp8 is fp8_e4m3)"
        )
    return name


@dataclass(frozen=True)
class Loaded:
    """A kernel that was compiled or loaded."""

    special: Specialisation
    seconds: float


def chosen(layouts: Sequence[str] | None, inputs: Sequence[str] | None) -> list[Specialisation]:
    """Return the kernels of some layouts and dtypes; all where none is named."""
    return [
        special
        for special in registry.specialisations()
        if (not layouts or special.format.layout in layouts)
        and (not inputs or special.input.dtype in inputs)
    ]


def run(args: argparse.Namespace) -> int:
    """Compile what `args` asks for, and report."""
    missing = _device.cuda_missing()
    if missing is not None:
        raise BackendUnavailable(f"kernels are compiled for a GPU: {missing}")
    device = backends.cuda(DeviceId("cuda", _current_device())).device
    specials = chosen(args.layouts, args.inputs)
    if not specials:
        raise ValueError("no kernel is built for these layouts with these inputs")
    loaded = []
    begin_all = perf_counter()
    with _console.progress("compiling", len(specials)) as begin:
        for special in specials:
            begin(str(special))
            start = perf_counter()
            compiler.load(device, special, get_layout(special.format.layout))
            loaded.append(Loaded(special, perf_counter() - start))
    seconds = perf_counter() - begin_all
    cache_dir = (_device.cuda_facts() or {}).get("kernel_cache_dir")
    if args.json:
        _console.print_json(_document(device, loaded, seconds, cache_dir))
    else:
        _print(device, loaded, seconds, cache_dir)
    return 0


def _current_device() -> int:
    return int(sys.modules["cupy"].cuda.runtime.getDevice())


def _document(
    device: Any, loaded: Sequence[Loaded], seconds: float, cache_dir: str | None
) -> dict[str, Any]:
    return {
        "device": device.name,
        "arch": device.arch,
        "kernel_sources_sha256": _kernel_files.digest(),
        "count": len(loaded),
        "seconds": seconds,
        "cache_dir": cache_dir,
        "kernels": [
            {
                "kernel": item.special.kernel.name,
                "layout": item.special.format.layout,
                "input": item.special.input.dtype,
                "seconds": item.seconds,
            }
            for item in loaded
        ],
    }


def _print(device: Any, loaded: Sequence[Loaded], seconds: float, cache_dir: str | None) -> None:
    out = _console.console()
    slowest = max(loaded, key=lambda item: item.seconds)
    plural = "s" if len(loaded) > 1 else ""
    _console.print_facts(
        out,
        f"{len(loaded)} kernel{plural} ready in {seconds:.1f} s",
        {
            "device": f"{device.name} ({device.arch})",
            "longest": f"{slowest.special}, {slowest.seconds:.2f} s",
            "kernel cache": cache_dir
            or "in memory (CUPY_CACHE_IN_MEMORY=1), gone with the process",
        },
    )
