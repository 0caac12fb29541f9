"""``cupy-mla demo``: fill the caches of a draft model in every format and verify each byte.

What the caches must hold is worked out a second time in `_rows`, by ml_dtypes casts alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from cupy_mla import GroupedCacheWriter, concat_and_cache_mla, read_slots
from cupy_mla.cli import _arguments, _console
from cupy_mla.cli._console import Column
from cupy_mla.cli._device import DEVICES, Device, select
from cupy_mla.cli._rows import Array, decode_rows, encode_rows
from cupy_mla.cli._step import Step, make_step
from cupy_mla.layouts import LAYOUT_NAMES, SCALE_FORMATS, CacheLayout, get_layout

SUMMARY = "fill caches in every format and verify each byte"
DESCRIPTION = (
    "Store one step of a draft model with five layers (kv_lora_rank 512, rope_dim 64) in paged "
    "caches of every format: all layers by one grouped insert, and again layer by layer. Both must "
    "equal, in every byte of the caches, rows that are worked out a second time by ml_dtypes. Runs "
    "on the GPU where there is one, else on NumPy. Exit status 1 when any byte differs."
)
EXAMPLES = (
    "cupy-mla demo",
    "cupy-mla demo --format fp8_ds_mla --scale-format ue8m0 --tokens 4096",
    "cupy-mla demo --device cpu --json > report.json",
)

KV_LORA_RANK = 512
ROPE_DIM = 64
#: What every byte of a cache is before the first insert.
SENTINEL = 0xA5


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.add_argument(
        "--format",
        action="append",
        type=_arguments.layout_name,
        metavar="NAME",
        dest="formats",
        help=f"a format to check, may be repeated: {', '.join(LAYOUT_NAMES)} (default: all)",
    )
    _arguments.add_scale_format(parser, "both, one after the other")
    parser.add_argument(
        "--layers",
        type=_arguments.integer(1),
        default=5,
        metavar="L",
        help="layers of the model (default: 5)",
    )
    parser.add_argument(
        "--tokens",
        type=_arguments.integer(1),
        default=512,
        metavar="T",
        help="tokens of the step, padding included (default: 512)",
    )
    parser.add_argument(
        "--block-size",
        type=_arguments.integer(1),
        default=64,
        metavar="B",
        help="rows a block (default: 64)",
    )
    parser.add_argument(
        "--seed",
        type=_arguments.integer(0),
        default=0,
        metavar="N",
        help="seed of the random rows and slots (default: 0)",
    )
    parser.add_argument(
        "--device",
        choices=DEVICES,
        default="auto",
        help="where to run (default: auto, the GPU where there is one)",
    )
    _arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Check the formats that `args` asks for and report; 1 when any byte differs."""
    device = select(args.device)
    layouts = _chosen(args)
    checks = []
    with _console.progress("checking", len(layouts)) as begin:
        for layout in layouts:
            begin(_label(layout))
            checks.append(check_format(layout, args, device))
    if args.json:
        _console.print_json(_document(args, device, checks))
        sys.stderr.writelines(f"{args.prog}: {line}\n" for line in _failures(checks))
    else:
        _print(device, checks)
    return 1 if any(check.differences for check in checks) else 0


def _chosen(args: argparse.Namespace) -> list[CacheLayout]:
    """Return the layouts to check; one with scales in its rows comes once a scale format."""
    layouts: dict[CacheLayout, None] = {}
    for name in args.formats or LAYOUT_NAMES:
        for scale_format in (args.scale_format,) if args.scale_format else SCALE_FORMATS:
            layouts[
                get_layout(
                    name,
                    kv_lora_rank=KV_LORA_RANK,
                    rope_dim=ROPE_DIM,
                    scale_format=scale_format,
                )
            ] = None
    return list(layouts)


def _label(layout: CacheLayout) -> str:
    return f"{layout.name} {layout.scale_format}" if layout.scale_format else layout.name


# ---------------------------------------------------------------- the check


@dataclass(frozen=True)
class Place:
    """The first byte that differs, or the first element that is read back wrong.

    Attributes
    ----------
    layer : int
    block, row : int or None
        None where a padding slot reads back as anything but zeros.
    byte : int
        Byte in the row.
    part : str
        Name of the row's part, and number of the element in it.
    found : dict
        What each source has there, in hexadecimal for bytes.
    """

    layer: int
    block: int | None
    row: int | None
    byte: int
    part: str
    found: dict[str, str]

    def describe(self) -> str:
        """Return the place and what was found there."""
        found = ", ".join(f"{source} {value}" for source, value in self.found.items())
        where = "a padding slot" if self.block is None else f"block {self.block}, row {self.row}"
        return (
            f"first difference in layer {self.layer}, {where}, byte {self.byte} ({self.part}): "
            f"{found}"
        )


@dataclass(frozen=True)
class Check:
    """What was checked of one format, and what came of it."""

    label: str
    layout: CacheLayout
    layers: int
    tokens: int
    rows_written: int
    rows_checked: int
    bytes_checked: int
    differences: int
    first: Place | None
    seconds_grouped: float
    seconds_per_layer: float


def insert_grouped(writer: GroupedCacheWriter, kv_c: Any, k_pe: Any, slots: Any) -> None:
    """Store all layers at once."""
    writer.insert(kv_c, k_pe, slots)


def insert_per_layer(
    layout: CacheLayout,
    caches: Sequence[Any],
    kv_c: Any,
    k_pe: Any,
    slots: Any,
    scales: Sequence[float] | None,
) -> None:
    """Store one layer after the other."""
    for layer, cache in enumerate(caches):
        concat_and_cache_mla(
            kv_c[layer],
            k_pe[layer],
            cache,
            slots[layer],
            layout.name,
            None if scales is None else scales[layer],
            scale_format=layout.scale_format or "float32",
        )


def check_format(layout: CacheLayout, args: argparse.Namespace, device: Device) -> Check:
    """Fill caches of one format in both ways and compare every byte of them."""
    step = make_step(layout, args.layers, args.tokens, args.block_size, args.seed)
    projection = device.to_device(step.projection)
    slots = device.to_device(step.slots)
    by_layer = projection.transpose(1, 0, 2)  # [L, T, R + P]: strided, nothing is copied
    kv_c, k_pe = by_layer[..., : layout.kv_lora_rank], by_layer[..., layout.kv_lora_rank :]
    grouped, single = (
        [_new_cache(layout, step.num_blocks, args.block_size, device) for _ in range(args.layers)]
        for _ in range(2)
    )
    writer = GroupedCacheWriter(
        grouped,
        layout.name,
        step.scales,
        kv_lora_rank=layout.kv_lora_rank,
        rope_dim=layout.rope_dim,
        scale_format=layout.scale_format or "float32",
    )

    def all_at_once() -> None:
        insert_grouped(writer, kv_c, k_pe, slots)

    def one_by_one() -> None:
        insert_per_layer(layout, single, kv_c, k_pe, slots, step.scales)

    all_at_once()
    one_by_one()
    differences, first = 0, None
    for layer in range(args.layers):
        count, place = _compare_layer(layout, step, layer, grouped[layer], single[layer], device)
        differences += count
        first = first or place
    rows = args.layers * step.num_blocks * args.block_size
    return Check(
        label=_label(layout),
        layout=layout,
        layers=args.layers,
        tokens=args.tokens,
        rows_written=int((step.slots >= 0).sum()),
        rows_checked=rows,
        bytes_checked=rows * layout.row_bytes,
        differences=differences,
        first=first,
        seconds_grouped=_time(all_at_once, device),
        seconds_per_layer=_time(one_by_one, device),
    )


def _new_cache(layout: CacheLayout, num_blocks: int, block_size: int, device: Device) -> Any:
    cache = layout.empty(num_blocks, block_size, device.xp)
    cache.view(np.uint8)[...] = SENTINEL
    return cache


def _time(insert: Callable[[], None], device: Device) -> float:
    """Return the seconds that an insert takes, from call to done; it was called before."""
    seconds = []
    for _ in range(device.repeats):
        device.synchronize()
        start = perf_counter()
        insert()
        device.synchronize()
        seconds.append(perf_counter() - start)
    return median(seconds)


def _compare_layer(
    layout: CacheLayout, step: Step, layer: int, grouped: Any, single: Any, device: Device
) -> tuple[int, Place | None]:
    """Compare the two caches of a layer with the rows as worked out here, and read them back."""
    found = {
        "grouped": _bytes(device.to_host(grouped), layout),
        "per layer": _bytes(device.to_host(single), layout),
    }
    slots = step.slots[layer]
    stored = slots >= 0
    expected = np.full_like(found["grouped"], SENTINEL)
    rows = step.projection[stored, layer]
    expected.reshape(-1, layout.row_bytes)[slots[stored]] = encode_rows(
        layout, rows, step.scale(layer)
    )
    found["ml_dtypes"] = expected
    differs = (found["grouped"] != expected) | (found["per layer"] != expected)
    if differs.any():
        block, row, byte = (int(index) for index in np.argwhere(differs)[0])
        values = {name: f"{array[block, row, byte]:02X}" for name, array in found.items()}
        return int(differs.sum()), Place(layer, block, row, byte, _part(layout, byte), values)
    return _compare_read(layout, step, layer, grouped, expected, device)


def _bytes(cache: Array, layout: CacheLayout) -> Array:
    return cache.view(np.uint8).reshape(*cache.shape[:2], layout.row_bytes)


def _part(layout: CacheLayout, byte: int) -> str:
    for field in layout.fields:
        if field.offset <= byte < field.end:
            return f"{field.name} {(byte - field.offset) // field.dtype.itemsize}"
    return "padding"


def _compare_read(
    layout: CacheLayout, step: Step, layer: int, cache: Any, stored: Array, device: Device
) -> tuple[int, Place | None]:
    """Compare `read_slots` with the bytes decoded here; padding slots read as zeros."""
    slots = step.slots[layer]
    read = device.to_host(
        read_slots(
            cache,
            device.to_device(slots),
            layout.name,
            step.scale(layer),
            out_dtype="float32",
        )
    )
    expected = decode_rows(layout, stored.reshape(-1, layout.row_bytes)[slots], step.scale(layer))
    expected[slots < 0] = 0
    same = (read.view(np.uint32) == expected.view(np.uint32)) | (
        np.isnan(read) & np.isnan(expected)
    )
    if same.all():
        return 0, None
    token, element = (int(index) for index in np.argwhere(~same)[0])
    slot = int(slots[token])
    block, row = divmod(slot, stored.shape[1]) if slot >= 0 else (None, None)
    in_nope = element < layout.kv_lora_rank
    name, index = ("nope", element) if in_nope else ("rope", element - layout.kv_lora_rank)
    field = next(field for field in layout.fields if field.name == name)
    byte = field.offset + index * field.dtype.itemsize
    values = {
        "read_slots": repr(float(read[token, element])),
        "ml_dtypes": repr(float(expected[token, element])),
    }
    return int((~same).sum()), Place(layer, block, row, byte, f"{name} {index}", values)


# ---------------------------------------------------------------- the report


def _document(args: argparse.Namespace, device: Device, checks: Sequence[Check]) -> dict[str, Any]:
    return {
        "ok": not any(check.differences for check in checks),
        "backend": device.backend,
        "device": device.name,
        "reason": device.reason,
        "layers": args.layers,
        "tokens": args.tokens,
        "block_size": args.block_size,
        "kv_lora_rank": KV_LORA_RANK,
        "rope_dim": ROPE_DIM,
        "seed": args.seed,
        "formats": [_check_document(check) for check in checks],
    }


def _check_document(check: Check) -> dict[str, Any]:
    first = check.first
    return {
        "format": check.layout.name,
        "scale_format": check.layout.scale_format,
        "layers": check.layers,
        "tokens": check.tokens,
        "bytes_per_token": check.layout.row_bytes,
        "rows_written": check.rows_written,
        "rows_checked": check.rows_checked,
        "bytes_checked": check.bytes_checked,
        "differences": check.differences,
        "first_difference": None
        if first is None
        else {
            "layer": first.layer,
            "block": first.block,
            "row": first.row,
            "byte": first.byte,
            "part": first.part,
            "found": first.found,
        },
        "seconds_grouped": check.seconds_grouped,
        "seconds_per_layer": check.seconds_per_layer,
    }


def _failures(checks: Sequence[Check]) -> list[str]:
    return [
        f"{check.label}: {check.first.describe()}" for check in checks if check.first is not None
    ]


_COLUMNS = (
    Column("Format"),
    Column("Layers", "right"),
    Column("Tokens", "right"),
    Column("Bytes\na token", "right"),
    Column("Rows\nchecked", "right"),
    Column("Differ-\nences", "right"),
    Column("Grouped", "right"),
    Column("By layer", "right"),
)


def _duration(seconds: float) -> str:
    """Return a time with three digits."""
    unit, factor = ("s", 1.0) if seconds >= 1 else ("ms", 1e3) if seconds >= 1e-3 else ("us", 1e6)
    value = seconds * factor
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def _print(device: Device, checks: Sequence[Check]) -> None:
    out = _console.console()
    out.print(f"{device.backend} on {device.name} ({device.reason})")
    out.print()
    rows = [
        [
            check.label,
            str(check.layers),
            str(check.tokens),
            str(check.layout.row_bytes),
            str(check.rows_checked),
            str(check.differences),
            _duration(check.seconds_grouped),
            _duration(check.seconds_per_layer),
        ]
        for check in checks
    ]
    _console.print_table(out, _COLUMNS, rows)
    out.print()
    differences = sum(check.differences for check in checks)
    total = sum(check.bytes_checked for check in checks)
    if differences:
        noun = "difference" if differences == 1 else "differences"
        out.print(f"{differences:,} {noun} in {total:,} bytes.", style="bold red")
        for line in _failures(checks):
            out.print(line)
    else:
        out.print(
            f"No difference in {total:,} bytes: grouped insert, insert by layer and rows worked "
            "out by ml_dtypes agree.",
            style="bold green",
        )
