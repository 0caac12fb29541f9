"""Command line ``cupy-mla``.

A command is one module of this package, named in `COMMANDS`. It holds ``SUMMARY`` (one line for
the list of commands), ``DESCRIPTION``, ``EXAMPLES`` (shown at the end of its help),
``configure(parser)`` and ``run(args) -> int``.

Exit status: 0 done, 1 what was checked is wrong, 2 bad arguments or a missing backend,
130 interrupted, 141 the reader of the output went away.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType

from cupy_mla.errors import BackendUnavailable, CompileError

__all__ = ["main"]

#: Modules of this package that are commands, in the order in which help lists them.
COMMANDS = ("demo", "layouts", "inspect", "bench", "warmup", "info")

_EXAMPLES = "examples:"

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

#: What a user can put right; anything else is a fault of the program and keeps its traceback.
_PLAIN_ERRORS = (ValueError, TypeError, MemoryError, BackendUnavailable, CompileError)


def _command(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name}")


def _examples(lines: Sequence[str]) -> str:
    return "\n".join([_EXAMPLES, *(f"  {line}" for line in lines)])


class _Formatter(argparse.HelpFormatter):
    """Wraps descriptions to the terminal, and leaves the lines of the examples alone."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith(_EXAMPLES):
            return text
        return super()._fill_text(text, width, indent)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    from cupy_mla._version import __version__

    parser = argparse.ArgumentParser(
        prog="cupy-mla",
        description="Write, read and inspect paged MLA KV caches: NumPy by default, CUDA "
        "through CuPy.",
        epilog=_examples(
            (
                "cupy-mla demo                 write a cache in every format and verify it",
                "cupy-mla layouts fp8_ds_mla   byte map of one row",
                "cupy-mla info                 versions, backend and GPU of this machine",
            )
        ),
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"cupy-mla {__version__}")
    parser.add_argument(
        "--traceback", action="store_true", help="show the Python traceback of an error"
    )
    commands = parser.add_subparsers(metavar="COMMAND", title="commands", dest="command")
    for name in COMMANDS:
        module = _command(name)
        command = commands.add_parser(
            name,
            help=module.SUMMARY,
            description=module.DESCRIPTION,
            epilog=_examples(module.EXAMPLES),
            formatter_class=_Formatter,
            allow_abbrev=False,
        )
        module.configure(command)
        command.set_defaults(run=module.run, prog=command.prog, parser=command)
    return parser


def _run(argv: Sequence[str] | None) -> int:
    parser = build_parser()
    try:
        args, unknown = parser.parse_known_args(argv)
        if unknown:  # reported with the usage of the command, not that of the program
            getattr(args, "parser", parser).error(f"unknown arguments: {' '.join(unknown)}")
    except SystemExit as stop:  # argparse has printed why
        return stop.code if isinstance(stop.code, int) else EXIT_USAGE
    if args.command is None:
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    try:
        code: int = args.run(args)
    except BrokenPipeError:
        raise
    except _PLAIN_ERRORS as error:
        if args.traceback:
            traceback.print_exc()
        text = str(error) or type(error).__name__
        text = text.removeprefix(f"{args.command}: ")  # named in front already
        sys.stderr.write(f"{args.prog}: error: {text}\n")
        return EXIT_USAGE
    return code


def _drop_stdout() -> None:
    """Point stdout at the null device, so that the flush at exit has nowhere to fail."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments without the program's name; those of the process by default.

    Returns
    -------
    int
        Exit status.
    """
    if sys.stdout is None:  # closed by the caller: `cupy-mla ... >&-`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  it stays for as long as the process
    try:
        code = _run(argv)
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stderr.write("cupy-mla: interrupted\n")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
        return EXIT_BROKEN_PIPE
    except OSError as error:  # a full disk, say
        _drop_stdout()
        sys.stderr.write(f"cupy-mla: error: {error}\n")
        return EXIT_USAGE
    return code
