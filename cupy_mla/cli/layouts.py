"""``cupy-mla layouts``: byte maps of the cache formats."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from cupy_mla import _byte_map
from cupy_mla.cli import _arguments, _console
from cupy_mla.cli._console import Column
from cupy_mla.layouts import INDEXER_LAYOUT, LAYOUT_NAMES, CacheLayout, get_layout

SUMMARY = "byte maps of the cache formats"
DESCRIPTION = (
    "Show where every byte of a cached row lies: one table a layout, and the memory that a "
    "model's cache takes when --layers or --tokens is given."
)
EXAMPLES = (
    "cupy-mla layouts",
    "cupy-mla layouts fp8_ds_mla indexer_fp8 --scale-format ue8m0",
    "cupy-mla layouts bfloat16 fp8 --layers 61 --tokens 131072",
    "cupy-mla layouts --kv-lora-rank 256 --rope-dim 0 --markdown",
)

_FIELD_COLUMNS = (
    Column("Part"),
    Column("Offset", "right"),
    Column("Bytes", "right"),
    Column("Dtype"),
    Column("Count", "right"),
    Column("Note", wrap=True),
)
_GIB = 1 << 30


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.add_argument(
        "names",
        nargs="*",
        type=_arguments.any_layout_name,
        metavar="NAME",
        help=(
            f"{', '.join(LAYOUT_NAMES)}, or fp8 for fp8_e4m3 (default: all of these); "
            f"{INDEXER_LAYOUT}, keys of the sparse indexer, of one size"
        ),
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
        help="elements of the rotary part, 0 for models without RoPE (default: 64)",
    )
    _arguments.add_scale_format(parser, "float32")
    parser.add_argument(
        "--layers",
        type=_arguments.integer(1),
        metavar="N",
        help="show the bytes of a token in a model of N layers",
    )
    parser.add_argument(
        "--tokens",
        type=_arguments.integer(1),
        metavar="T",
        help="show the bytes of T tokens in all layers",
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help=_arguments.JSON_HELP)
    output.add_argument("--markdown", action="store_true", help="print Markdown tables")


def run(args: argparse.Namespace) -> int:
    """Print the layouts that `args` asks for."""
    layouts, skipped = _chosen(args)
    if args.json:
        _console.print_json(_document(args, layouts, skipped))
    elif args.markdown:
        sys.stdout.write(_markdown(args, layouts, skipped))
    else:
        _print(args, layouts, skipped)
    return 0


def _chosen(args: argparse.Namespace) -> tuple[list[CacheLayout], dict[str, str]]:
    """Return the layouts, and why some have no such size.

    A layout asked for by name that has no such size is an error; in a list of all it is left
    out.
    """
    layouts = []
    skipped = {}
    for name in dict.fromkeys(args.names or LAYOUT_NAMES):
        try:
            layout = get_layout(
                name,
                kv_lora_rank=args.kv_lora_rank,
                rope_dim=args.rope_dim,
                scale_format=args.scale_format or "float32",
            )
        except ValueError as error:
            if args.names:
                raise
            skipped[name] = str(error).removeprefix("get_layout: ")
        else:
            layouts.append(layout)
    return layouts, skipped


def _field_rows(layout: CacheLayout) -> list[list[str]]:
    return [
        [
            field.name,
            _byte_map.place(layout, field),
            str(field.nbytes),
            field.dtype.name,
            str(field.count),
            field.note,
        ]
        for field in layout.fields
    ]


def _memory(args: argparse.Namespace, layout: CacheLayout) -> dict[str, int]:
    """Return the bytes that a model's cache takes; empty where nobody asked."""
    if args.layers is None and args.tokens is None:
        return {}
    layers = args.layers or 1
    memory = {"layers": layers, "bytes_per_token": layers * layout.row_bytes}
    if args.tokens is not None:
        memory["tokens"] = args.tokens
        memory["total_bytes"] = args.tokens * memory["bytes_per_token"]
    return memory


def _memory_table(
    args: argparse.Namespace, layouts: list[CacheLayout]
) -> tuple[list[Column], list[list[str]]]:
    columns = [
        Column("Layout"),
        Column("Row bytes", "right"),
        Column("Layers", "right"),
        Column("Bytes a token", "right"),
    ]
    if args.tokens is not None:
        columns += [Column("Tokens", "right"), Column("Bytes", "right"), Column("GiB", "right")]
    rows = []
    for layout in layouts:
        memory = _memory(args, layout)
        row = [
            layout.name,
            str(layout.row_bytes),
            str(memory["layers"]),
            f"{memory['bytes_per_token']:,}",
        ]
        if args.tokens is not None:
            total = memory["total_bytes"]
            row += [f"{args.tokens:,}", f"{total:,}", f"{total / _GIB:.2f}"]
        rows.append(row)
    return columns, rows


def _document(
    args: argparse.Namespace, layouts: list[CacheLayout], skipped: dict[str, str]
) -> dict[str, Any]:
    return {
        "layouts": [
            layout.to_dict() | ({"memory": memory} if (memory := _memory(args, layout)) else {})
            for layout in layouts
        ],
        "skipped": [{"name": name, "reason": reason} for name, reason in skipped.items()],
    }


def _print(args: argparse.Namespace, layouts: list[CacheLayout], skipped: dict[str, str]) -> None:
    out = _console.console()
    for number, layout in enumerate(layouts):
        if number:
            out.print()
        out.print(_byte_map.title(layout), style="bold")
        _console.print_table(out, _FIELD_COLUMNS, _field_rows(layout))
    if args.layers is not None or args.tokens is not None:
        out.print()
        out.print("Memory, without padding between blocks", style="bold")
        _console.print_table(out, *_memory_table(args, layouts))
    for name, reason in skipped.items():
        out.print()
        out.print(f"Left out {name}: {reason}")


def _markdown_table(columns: list[Column], rows: list[list[str]]) -> list[str]:
    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cell.replace("*", r"\*") for cell in cells) + " |"

    rule = ["---:" if column.justify == "right" else "---" for column in columns]
    return [line([column.title for column in columns]), line(rule), *(line(row) for row in rows)]


def _markdown(args: argparse.Namespace, layouts: list[CacheLayout], skipped: dict[str, str]) -> str:
    parts = []
    for layout in layouts:
        table = _markdown_table(list(_FIELD_COLUMNS), _field_rows(layout))
        parts.append("\n".join([f"**{_byte_map.title(layout)}**", "", *table]))
    if args.layers is not None or args.tokens is not None:
        table = _markdown_table(*_memory_table(args, layouts))
        parts.append("\n".join(["**Memory, without padding between blocks**", "", *table]))
    parts += [f"Left out {name}: {reason}" for name, reason in skipped.items()]
    return "\n\n".join(parts) + "\n"
