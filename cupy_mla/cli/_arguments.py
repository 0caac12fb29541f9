"""Argument types and options that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from cupy_mla.layouts import INDEXER_LAYOUT, LAYOUT_NAMES, SCALE_FORMATS, get_layout

JSON_HELP = "print one JSON document on stdout and nothing else"


def integer(least: int) -> Callable[[str], int]:
    """Return an argument type for whole numbers from `least` on."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
        return value

    return parse


def layout_name(text: str) -> str:
    """Argument type for the name of a layout of whole rows; ``fp8`` becomes ``fp8_e4m3``."""
    return _known_layout(text, LAYOUT_NAMES)


def any_layout_name(text: str) -> str:
    """Argument type for the name of any layout, the indexer's too."""
    return _known_layout(text, (*LAYOUT_NAMES, INDEXER_LAYOUT))


def _known_layout(text: str, names: tuple[str, ...]) -> str:
    try:
        # "auto" stands for the dtype of a cache, and there is none here.
        name = "auto" if text == "auto" else get_layout(text).name
    except ValueError:
        name = text
    if name not in names:
        raise argparse.ArgumentTypeError(
            f"unknown layout {text!r} (choose from {', '.join(names)}; fp8 is fp8_e4m3)"
        )
    return name


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help=JSON_HELP)


def add_scale_format(parser: argparse.ArgumentParser, default: str) -> None:
    """Add ``--scale-format``; `default` says in words what happens without it."""
    parser.add_argument(
        "--scale-format",
        choices=SCALE_FORMATS,
        help=f"how fp8_ds_mla rounds the scales in its rows (default: {default})",
    )
