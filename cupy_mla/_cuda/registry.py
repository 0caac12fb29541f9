"""Every kernel there is, with every combination of cache layout and input dtype it is built for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from . import params, params_fused
from .params import Struct

#: Names that the C++ sources have for dtypes.
_INPUT_TYPES = {
    "bfloat16": "Bfloat16",
    "float16": "Float16",
    "float32": "Float32",
    "uint8": "u8",
}


class InputTuning(NamedTuple):
    """A dtype beside the cache's, and what was chosen for speed with it.

    Attributes
    ----------
    dtype : str
        Name of the dtype of kv_c and k_pe; of the output where a kernel reads.
    rows_in_flight : int
        Rows that a thread asks for before it stores the first one.
    min_blocks : int
        Blocks a multiprocessor that the compiler has to leave registers for; 0: its own choice.
    most_turns : int
        Rows that a thread of an insert stores at most.
    most_rows : int
        Rows that a block of an insert stores at a time at most; 0: as many as it has threads for.
    """

    dtype: str
    rows_in_flight: int
    min_blocks: int = 0
    most_turns: int = 4
    most_rows: int = 0


@dataclass(frozen=True)
class RowFormat:
    """How the sources write or read one cache layout.

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
    serves : str
        What the kernel's name says in place of the layout, where other layouts are served too.
    """

    layout: str
    header: str
    template: str
    inputs: tuple[InputTuning, ...]
    unit: int
    warp_a_row: bool = False
    serves: str = ""


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
    max_threads : int
        Threads a block at most; 0: as many as `geometry` gives the others.
    """

    name: str
    file: str
    params: Struct
    structs: tuple[Struct, ...]
    formats: tuple[RowFormat, ...]
    max_threads: int = 0


@dataclass(frozen=True)
class Specialisation:
    """A kernel for one cache layout and one input dtype."""

    kernel: Kernel
    format: RowFormat
    input: InputTuning

    @property
    def entry(self) -> str:
        """Name of the ``extern "C"`` function, as profilers show it."""
        return f"{self.kernel.name}_{self.format.serves or self.format.layout}_{self.input.dtype}"

    @property
    def template_argument(self) -> str:
        """The row format as C++."""
        name = self.format.template.format(input=f"cupy_mla::{_INPUT_TYPES[self.input.dtype]}")
        return f"cupy_mla::{name}"

    def __str__(self) -> str:
        return f"{self.kernel.name} (layout {self.format.layout}, input {self.input.dtype})"


def _copies(name: str, unit: int) -> RowFormat:
    return RowFormat(
        name, "copy_rows.cuh", "CopyRows<{input}>", (InputTuning(name, 2, most_turns=2),), unit
    )


def _flat_fp8(name: str, code: str) -> RowFormat:
    inputs = (
        InputTuning("bfloat16", 2, most_turns=2),
        InputTuning("float16", 2, most_turns=2),
        InputTuning("float32", 1, 4),
    )
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
        (InputTuning("bfloat16", 2, min_blocks=4, most_turns=2, most_rows=4),),
        16,
        warp_a_row=True,
    ),
)


def _reads(name: str, element: str, outputs: dict[str, int]) -> RowFormat:
    template = f"FlatSource<cupy_mla::{element}, {{input}}>"
    tunings = tuple(InputTuning(output, rows) for output, rows in outputs.items())
    return RowFormat(name, "flat_source.cuh", template, tunings, 8)


def _tiled_reads(name: str, rows: int) -> RowFormat:
    tunings = tuple(InputTuning(output, rows) for output in ("bfloat16", "float16", "float32"))
    return RowFormat(name, "tiled_source.cuh", "TiledSource<{input}>", tunings, 8)


#: What a gather decodes; rows of the output's dtype are copied.
_READ_FORMATS = (
    _reads("bfloat16", "Bfloat16", {"float16": 4, "float32": 4}),
    _reads("float16", "Float16", {"bfloat16": 4, "float32": 4}),
    _reads("float32", "Float32", {"bfloat16": 2, "float16": 2}),
    _reads("fp8_e4m3", "E4m3Codes", {"bfloat16": 4, "float16": 4, "float32": 4}),
    _reads("fp8_e5m2", "E5m2Codes", {"bfloat16": 4, "float16": 4, "float32": 4}),
    _tiled_reads("fp8_ds_mla", 2),
    _tiled_reads("indexer_fp8", 4),
)

_BYTES = (InputTuning("uint8", 4),)
_COPY_FORMATS = (
    RowFormat("bfloat16", "copy.cu", "Pieces<1>", _BYTES, 16, serves="rows"),
    RowFormat("indexer_fp8", "copy.cu", "Pieces<2>", _BYTES, 16, serves="planes"),
)

_VALUES = (InputTuning("float32", 1),)
_FLAT_DESTINATION = "flat_destination.cuh"
#: What a conversion writes; 16- and 32-bit rows are gathered, to slots.
_WRITE_FORMATS = (
    RowFormat("fp8_e4m3", _FLAT_DESTINATION, "FlatDestination<cupy_mla::E4m3>", _VALUES, 16),
    RowFormat("fp8_e5m2", _FLAT_DESTINATION, "FlatDestination<cupy_mla::E5m2>", _VALUES, 16),
    RowFormat(
        "fp8_ds_mla",
        "ds_mla_destination.cuh",
        "DsMlaDestination",
        (InputTuning("float32", 1, 4),),
        16,
        warp_a_row=True,
    ),
)

_READ_STRUCTS = (params.DIVISOR, params.LAYER_ENTRY, params.INDEX_ARRAY, params.ROW_INDEX)


def _value_formats(flat: dict[str, int], tiled: int) -> tuple[RowFormat, ...]:
    """Return what is stored of rows that were computed as float32, a warp a row.

    Parameters
    ----------
    flat : dict of str to int
        Blocks a multiprocessor for each input dtype of flat rows: as many as registers suffice
        for, on every architecture.
    tiled : int
        The same for fp8_ds_mla.
    """

    def form(name: str, header: str, template: str, inputs: dict[str, int]) -> RowFormat:
        tunings = tuple(InputTuning(dtype, 1, blocks) for dtype, blocks in inputs.items())
        return RowFormat(name, header, template, tunings, 16, warp_a_row=True)

    copies = tuple(
        form(name, "copy_values.cuh", "CopyValues<{input}>", {name: blocks})
        for name, blocks in flat.items()
    )
    codes = tuple(
        form(name, "flat_fp8_values.cuh", f"FlatFp8Values<cupy_mla::{code}, {{input}}>", flat)
        for name, code in (("fp8_e4m3", "E4m3"), ("fp8_e5m2", "E5m2"))
    )
    tiles = form("fp8_ds_mla", "ds_mla_values.cuh", "DsMlaValues", {"bfloat16": tiled})
    return (*copies, *codes, tiles)


def _inputs_alone(
    name: str, header: str, template: str, blocks: tuple[int, int] = (0, 0)
) -> tuple[RowFormat, ...]:
    """Return the formats of a kernel that differs by its input dtype alone.

    `blocks` a multiprocessor for inputs of 16 and of 32 bits.
    """
    inputs = tuple(
        InputTuning(dtype, 1, blocks[dtype == "float32"])
        for dtype in ("bfloat16", "float16", "float32")
    )
    return (RowFormat(name, header, template, inputs, 16, True),)


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
        Kernel(
            "context",
            "context.cu",
            params_fused.CONTEXT_PARAMS,
            (
                params.DIVISOR,
                params.SLOT_ARRAY,
                params.LAYER_ENTRY,
                params.ERROR_RECORD,
                params_fused.ROPE_TABLE,
                params_fused.KEY_NORM,
            ),
            _value_formats({"bfloat16": 6, "float16": 6, "float32": 5}, tiled=5),
            max_threads=128,
        ),
        Kernel(
            "norm_rope",
            "norm_rope.cu",
            params_fused.NORM_ROPE_PARAMS,
            (
                params.DIVISOR,
                params.LAYER_ENTRY,
                params.ERROR_RECORD,
                params_fused.ROPE_TABLE,
                params_fused.KEY_NORM,
                params_fused.INDEX_CACHE,
            ),
            _value_formats({"bfloat16": 8, "float16": 8, "float32": 7}, tiled=7),
            max_threads=128,
        ),
        Kernel(
            "indexer",
            "indexer.cu",
            params_fused.INDEXER_PARAMS,
            (params.DIVISOR, params.LAYER_ENTRY, params_fused.INDEX_CACHE),
            _inputs_alone("indexer_fp8", "indexer.cu", "IndexRows<{input}>"),
            max_threads=128,
        ),
        Kernel(
            "query",
            "query.cu",
            params_fused.QUERY_PARAMS,
            (params.DIVISOR, params_fused.ROPE_TABLE, params_fused.HEAD_STRIDES),
            _inputs_alone("fp8_e4m3", "query.cu", "QueryRows<{input}>"),
            max_threads=128,
        ),
        Kernel("gather", "gather.cu", params.READ_PARAMS, _READ_STRUCTS, _READ_FORMATS),
        Kernel("copy", "copy.cu", params.READ_PARAMS, _READ_STRUCTS, _COPY_FORMATS),
        Kernel("convert", "convert.cu", params.READ_PARAMS, _READ_STRUCTS, _WRITE_FORMATS),
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
