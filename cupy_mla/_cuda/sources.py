"""One self-contained CUDA source a specialisation.

CuPy's disk cache knows a kernel by its source text, not by the text of included headers, and a
new tuple of compiler options costs an extra compilation. So headers are put into the source, and
what differs between specialisations is text: constants in front, and an entry behind that
instantiates the template.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from cupy_mla import _kernel_files
from cupy_mla.layouts import CacheLayout

from . import geometry
from .registry import Specialisation

_INCLUDE = re.compile(r'\s*#\s*include\s+"([^"]+)"\s*')
#: What a multiprocessor holds before sm_80; later ones hold half as many again, or twice as many.
_TURING_THREADS = 1024
_ONCE = re.compile(r"\s*#\s*pragma\s+once\s*")


@dataclass(frozen=True)
class Source:
    """The text of one compilation.

    Attributes
    ----------
    specialisation : Specialisation
    text : str
        Needs no include path.
    entry : str
        Name of the ``extern "C"`` function.
    digest : str
        SHA-256 of the text.
    """

    specialisation: Specialisation
    text: str
    entry: str
    digest: str


def flatten(names: Iterable[str]) -> str:
    """Join source files into one text, each included file once, where it is first asked for.

    ``#line`` directives keep file names and line numbers in compiler messages.

    Parameters
    ----------
    names : iterable of str
        Files below ``kernels_src``, in order.
    """
    seen: set[str] = set()
    return "".join(_flatten(name, seen) for name in names)


def _flatten(name: str, seen: set[str]) -> str:
    if name in seen:
        return ""
    seen.add(name)
    lines = [f'#line 1 "{name}"']
    for number, line in enumerate(_kernel_files.read(name).splitlines(), start=1):
        include = _INCLUDE.fullmatch(line)
        if include:
            text = _flatten(include[1], seen)
            lines.append(f'{text}#line {number + 1} "{name}"' if text else "")
        else:
            lines.append("" if _ONCE.fullmatch(line) else line)
    return "\n".join(lines) + "\n"


def build(specialisation: Specialisation, layout: CacheLayout) -> Source:
    """Return the source of a specialisation.

    Parameters
    ----------
    specialisation : Specialisation
    layout : CacheLayout
        Whose constants are printed in front. All sizes of a flat layout give one source.
    """
    return _build(specialisation, layout.cuda_constants())


@cache
def _build(specialisation: Specialisation, constants: str) -> Source:
    kernel = specialisation.kernel
    entry = specialisation.entry
    threads, blocks = kernel.max_threads or geometry.MAX_THREADS, specialisation.input.min_blocks
    bounds = "tuning::kMaxThreads"
    if threads * blocks > _TURING_THREADS:
        bounds += f", __CUDA_ARCH__ >= 800 ? {blocks} : 0"
    elif blocks:
        bounds += f", {blocks}"
    checks = "".join(struct.layout_checks() for struct in (*kernel.structs, kernel.params))
    text = (
        f"// cupy_mla: {specialisation}\n"
        '#line 1 "prologue"\n'
        f"{constants}"
        "namespace tuning {\n"
        f"constexpr int kRowsInFlight = {specialisation.input.rows_in_flight};\n"
        f"constexpr int kMaxThreads = {threads};\n"
        "}  // namespace tuning\n"
        f"{flatten((kernel.file, specialisation.format.header))}"
        '#line 1 "entry"\n'
        f"{checks}"
        f'extern "C" __global__ void __launch_bounds__({bounds})\n'
        f"{entry}(const __grid_constant__ cupy_mla::{kernel.params.name} params) {{\n"
        f"  cupy_mla::{kernel.name}<{specialisation.template_argument}>(params);\n"
        "}\n"
    )
    return Source(specialisation, text, entry, hashlib.sha256(text.encode()).hexdigest())
