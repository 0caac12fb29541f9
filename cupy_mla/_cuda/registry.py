"""Every kernel there is, with every combination of cache layout and input dtype it is built for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from . import params
from .params import Struct

#: Names that the C++ sources have for input dtypes.
_INPUT_TYPES = {"bfloat16": "Bfloat16", "float16": "Float16", "float32": "Float32"}


class InputTuning(NamedTuple):
    """An input dtype, and what was chosen for speed with it.

    Attributes
    ----------
    dtype : str
        Name of the dtype of kv_c and k_pe.
    rows_in_flight : int
        Rows that a thread asks for before it stores the first one.
    min_blocks : int
        Blocks a multiprocessor that the compiler has to leave registers for; 0: its own choice.
    """

    dtype: str
    rows_in_flight: int
    min_blocks: int = 0


@dataclass(frozen=True)
class RowFormat:
    """How the sources write one cache layout.

    Attributes
    ----------
    layout : str
        Canonical name of the layout.
    header : str
        File that defines the template.
    template : str
        The C++ type, with ``{input}`` for the input type.
    inputs : tuple of InputTuning
    unit : int
        Consecutive elements that one thread stores at a time.
    warp_a_row : bool
        Whether exactly one warp has to store a row.
    """

    layout: str
    header: str
    template: str
    inputs: tuple[InputTuning, ...]
    unit: int
    warp_a_row: bool = False


@dataclass(frozen=True)
class Kernel:
    """A kernel: file, template and host operation have its name.

    Attributes
    ----------
    name : str
    file : str
        Below ``kernels_src``.
    params : Struct
        Its only argument.
    structs : tuple of Struct
        What the argument refers to.
    formats : tuple of RowFormat
    """

    name: str
    file: str
    params: Struct
    structs: tuple[Struct, ...]
    formats: tuple[RowFormat, ...]


@dataclass(frozen=True)
class Specialisation:
    """A kernel for one cache layout and one input dtype."""

    kernel: Kernel
    format: RowFormat
    input: InputTuning

    @property
    def entry(self) -> str:
        """Name of the ``extern "C"`` function, as profilers show it."""
        return f"{self.kernel.name}_{self.format.layout}_{self.input.dtype}"

    @property
    def template_argument(self) -> str:
        """The row format as C++."""
        name = self.format.template.format(input=f"cupy_mla::{_INPUT_TYPES[self.input.dtype]}")
        return f"cupy_mla::{name}"

    def __str__(self) -> str:
        return f"{self.kernel.name} (layout {self.format.layout}, input {self.input.dtype})"


def _copies(name: str, unit: int) -> RowFormat:
    return RowFormat(name, "copy_rows.cuh", "CopyRows<{input}>", (InputTuning(name, 4, 4),), unit)


def _flat_fp8(name: str, code: str) -> RowFormat:
    inputs = (InputTuning("bfloat16", 2, 4), InputTuning("float16", 2, 4), InputTuning("float32", 1, 4))
    template = f"FlatFp8Rows<cupy_mla::{code}, {{input}}>"
    return RowFormat(name, "flat_fp8_rows.cuh", template, inputs, 16)


_ROW_FORMATS = (
    _copies("bfloat16", 8),
    _copies("float16", 8),
    _copies("float32", 4),
    _flat_fp8("fp8_e4m3", "E4m3"),
    _flat_fp8("fp8_e5m2", "E5m2"),
    RowFormat(
        "fp8_ds_mla",
        "ds_mla_rows.cuh",
        "DsMlaRows",
        (InputTuning("bfloat16", 2),),
        16,
        warp_a_row=True,
    ),
)

KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel(
            "insert",
            "insert.cu",
            params.INSERT_PARAMS,
            (
                params.DIVISOR,
                params.STRIDED_ROWS,
                params.SLOT_ARRAY,
                params.LAYER_ENTRY,
                params.ERROR_RECORD,
            ),
            _ROW_FORMATS,
        ),
    )
}


def find(kernel: str, layout: str, input_dtype: str) -> Specialisation:
    """Return the specialisation of a kernel.

    Parameters
    ----------
    kernel : str
        Name of the kernel, which is the operation's.
    layout : str
        Canonical name of the cache layout.
    input_dtype : str
        Name of the dtype of kv_c and k_pe.

    Raises
    ------
    KeyError
        For a combination that validation should have refused.
    """
    for candidate in specialisations(kernel):
        if candidate.format.layout == layout and candidate.input.dtype == input_dtype:
            return candidate
    raise KeyError(f"{kernel} is not built for layout {layout} and input {input_dtype}")


def specialisations(kernel: str | None = None) -> Iterator[Specialisation]:
    """Yield all specialisations, of one kernel or of every one.

    Examples
    --------
    >>> [special.entry for special in specialisations("insert")][:2]
    ['insert_bfloat16_bfloat16', 'insert_float16_float16']
    """
    for candidate in KERNELS.values() if kernel is None else (KERNELS[kernel],):
        for row_format in candidate.formats:
            for tuning in row_format.inputs:
                yield Specialisation(candidate, row_format, tuning)
