"""``cupy-mla inspect``: what is in a cache that was saved to a file."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from cupy_mla.cli import _arguments, _console
from cupy_mla.cli._console import Column
from cupy_mla.errors import reject_value
from cupy_mla.inspection.accounting import CacheMemory, cache_memory
from cupy_mla.inspection.audit import CacheAudit, audit_rows
from cupy_mla.inspection.compare import CacheComparison, compare_rows
from cupy_mla.inspection.files import open_cache
from cupy_mla.inspection.row import RowPart, row_parts
from cupy_mla.inspection.source import CacheRows
from cupy_mla.layouts import INDEXER_LAYOUT, LAYOUT_NAMES, CacheLayout, get_layout

SUMMARY = "what is in a cache file: NaN, scales, one row, differences"
DESCRIPTION = (
    "Look through a cache in a .npy or .safetensors file: NaN and Inf by slot, part and element, "
    "odd scales, the largest magnitudes, and in which format the scales were written. The file is "
    "mapped, so it may be larger than memory, and nothing in it is ever unpickled. Slot s is row "
    "s % B of block s // B. The exit status is 1 when --compare finds a difference."
)
EXAMPLES = (
    "cupy-mla inspect cache.npy --layout fp8_ds_mla",
    "cupy-mla inspect cache.npy --layout fp8 --row 130 --scale 0.05",
    "cupy-mla inspect model.safetensors --tensor layers.0.kv --layout bfloat16 --slots 0:128,700",
    "cupy-mla inspect a.npy --layout fp8_ds_mla --compare b.npy --json",
)

_ROW_COLUMNS = (
    Column("Part"),
    Column("Element", "right"),
    Column("Byte", "right"),
    Column("Bytes"),
    Column("Values", wrap=True),
)
_OPERATION = "inspect"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    names = ", ".join((*LAYOUT_NAMES, INDEXER_LAYOUT))
    parser.add_argument("file", metavar="FILE", help="a .npy or .safetensors file")
    parser.add_argument(
        "--layout",
        required=True,
        type=_layout,
        metavar="NAME",
        help=f"{names}, fp8 for fp8_e4m3, or auto for the file's own dtype of 16 or 32 bits",
    )
    parser.add_argument(
        "--kv-lora-rank",
        type=_arguments.integer(1),
        default=512,
        metavar="R",
        help="elements of the latent part (default: 512)",
    )
    parser.add_argument(
        "--rope-dim",
        type=_arguments.integer(0),
        default=64,
        metavar="P",
        help="elements of the rotary part (default: 64)",
    )
    parser.add_argument(
        "--block-size",
        type=_arguments.integer(1),
        metavar="B",
        help="rows a block, for a file of shape [slots, width] (default: 1)",
    )
    parser.add_argument("--tensor", metavar="NAME", help="tensor of a .safetensors file")
    parser.add_argument(
        "--slots",
        type=_slot_ranges,
        metavar="LIST",
        help="look at these slots alone: numbers and ranges START:STOP with commas between them",
    )
    parser.add_argument(
        "--row", type=_arguments.integer(0), metavar="SLOT", help="show every byte of one row"
    )
    parser.add_argument(
        "--scale", type=_scale, metavar="S", help="the layer's scale, for the values of a flat row"
    )
    parser.add_argument("--compare", metavar="OTHER", help="find where another file differs")
    parser.add_argument(
        "--compare-tensor", metavar="NAME", help="tensor of OTHER (default: as --tensor)"
    )
    _arguments.add_json(parser)


def _layout(text: str) -> str:
    try:
        return text if text == "auto" else get_layout(text).name
    except ValueError:
        known = ", ".join((*LAYOUT_NAMES, INDEXER_LAYOUT, "auto"))
        raise argparse.ArgumentTypeError(
            f"unknown layout {text!r} (choose from {known}; fp8 is fp8_e4m3)"
        ) from None


def _scale(text: str) -> float:
    try:
        value = float(np.float32(text))
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no finite number above 0")
    return value


def _slot_ranges(text: str) -> list[range]:
    """Argument type for ``0:128,700``."""
    try:
        ranges = [
            range(int(start), int(stop) if colon else int(start) + 1)
            for start, colon, stop in (piece.partition(":") for piece in text.split(","))
        ]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no list of slots such as 0:128,700"
        ) from None
    if not all(ranges):
        raise argparse.ArgumentTypeError(f"{text!r} has a range without slots")
    return ranges


def run(args: argparse.Namespace) -> int:
    """Look into the file, and print what `args` asks for."""
    if args.compare_tensor is not None and args.compare is None:
        reject_value(_OPERATION, "--compare-tensor", "come with --compare", args.compare_tensor)
    cache = _open(args, args.file, args.tensor)
    layout = get_layout(
        str(cache.dtype.name) if args.layout == "auto" else args.layout,
        kv_lora_rank=args.kv_lora_rank,
        rope_dim=args.rope_dim,
    )
    rows = CacheRows(_OPERATION, "file", cache, layout, None)
    slots, skipped = (None, 0) if args.slots is None else _chosen(args.slots, rows.num_slots)
    parts = None if args.row is None else _parts(rows, args.row, args.scale)
    other = None
    if args.compare is not None:
        tensor = args.tensor if args.compare_tensor is None else args.compare_tensor
        if not args.compare.endswith(".safetensors"):
            tensor = args.compare_tensor
        other = CacheRows(_OPERATION, "--compare", _open(args, args.compare, tensor), layout, None)
    with _progress("audit", rows, slots) as begin:
        audit = audit_rows(rows, slots, skipped, begin)
    comparison = None
    if other is not None:
        with _progress("compare", rows, slots) as begin:
            comparison = compare_rows(_OPERATION, rows, other, slots, begin)
    memory = cache_memory(layout, block_size=rows.block_size, tokens=rows.num_slots)
    if args.json:
        _console.print_json(_document(args, cache, layout, memory, audit, parts, comparison))
    else:
        _print(args, cache, memory, audit, parts, comparison)
    return 0 if comparison is None or comparison.equal else 1


def _open(args: argparse.Namespace, path: str, tensor: str | None) -> np.ndarray[Any, Any]:
    return open_cache(
        path,
        args.layout,
        block_size=args.block_size,
        tensor=tensor,
        kv_lora_rank=args.kv_lora_rank,
        rope_dim=args.rope_dim,
        operation=_OPERATION,
    )


def _chosen(ranges: list[range], num_slots: int) -> tuple[np.ndarray[Any, Any], int]:
    """Return the slots of the cache among those given, and how many given ones are none."""
    inside = [
        range(min(max(part.start, 0), num_slots), max(min(part.stop, num_slots), 0))
        for part in ranges
    ]
    slots = np.unique(np.concatenate([np.arange(part.start, part.stop) for part in inside]))
    given = sum(part.stop - part.start for part in ranges)  # len() would be a machine's integer
    return slots.astype(np.int64), given - sum(map(len, inside))


def _parts(rows: CacheRows, slot: int, scale: float | None) -> list[RowPart]:
    if slot >= rows.num_slots:
        reject_value(_OPERATION, "--row", f"be below the {rows.num_slots} slots of the file", slot)
    return row_parts(rows, slot, scale)


@contextmanager
def _progress(
    description: str, rows: CacheRows, slots: np.ndarray[Any, Any] | None
) -> Iterator[Callable[[int], None]]:
    with _console.progress(description, rows.chunk_count(slots)) as begin:
        yield lambda seen: begin(f"row {seen:,}")


def _document(
    args: argparse.Namespace,
    cache: np.ndarray[Any, Any],
    layout: CacheLayout,
    memory: CacheMemory,
    audit: CacheAudit,
    parts: list[RowPart] | None,
    comparison: CacheComparison | None,
) -> dict[str, Any]:
    document: dict[str, Any] = {
        "file": args.file,
        "num_blocks": cache.shape[0],
        "block_size": cache.shape[1],
        "layout": layout.to_dict(),
        "memory": memory.to_dict(),
        "audit": audit.to_dict(),
    }
    if parts is not None:
        block, row = divmod(args.row, cache.shape[1])
        document["row"] = {
            "slot": args.row,
            "block": block,
            "row": row,
            "parts": [part.to_dict() for part in parts],
        }
    if comparison is not None:
        document["compare"] = {"file": args.compare, **comparison.to_dict()}
    return document


def _print(
    args: argparse.Namespace,
    cache: np.ndarray[Any, Any],
    memory: CacheMemory,
    audit: CacheAudit,
    parts: list[RowPart] | None,
    comparison: CacheComparison | None,
) -> None:
    out = _console.console()
    blocks, rows = cache.shape[:2]
    facts = audit.facts()
    facts["rows"] += f" of {blocks * rows} ({blocks} blocks of {rows}, {memory.total_bytes} bytes)"
    _console.print_facts(out, args.file, facts)
    if parts is not None:
        out.print()
        block, row = divmod(args.row, rows)
        out.print(f"Slot {args.row}: block {block}, row {row}", style="bold")
        _console.print_table(out, _ROW_COLUMNS, [line for part in parts for line in part.lines()])
        if audit.layout.needs_scale and args.scale is None:
            out.print("Values as stored, before the layer's scale.")
    if comparison is not None:
        out.print()
        _console.print_facts(out, f"Compared with {args.compare}", comparison.facts())
