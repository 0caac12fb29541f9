"""``cupy-mla bench``: what the operations cost, beside what bounds them and other ways to do it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from cupy_mla import backends
from cupy_mla._arrays import DeviceId
from cupy_mla._cuda.timing import CudaTimer
from cupy_mla.bench import baselines, plot, session
from cupy_mla.bench.machine import Machine, optional
from cupy_mla.bench.operations import OPERATIONS
from cupy_mla.bench.problem import PATTERNS
from cupy_mla.bench.report import Report
from cupy_mla.bench.session import SECTIONS, Settings
from cupy_mla.bench.verify import REFERENCE_LAYERS, REFERENCE_TOKENS
from cupy_mla.cli import _arguments, _bench_tables, _console, info
from cupy_mla.cli._device import DEVICES, Device, select

SUMMARY = "time the operations beside a copy and other ways"
DESCRIPTION = (
    "Measure operations on the GPU: device time from replays of graphs whose calls take turns with "
    "buffers, host time of a call, and compile time. In the same run and as often: a copy of as "
    "many bytes in the same ratio of reads to writes (the ceiling), a grouped insert in the "
    "published scalar shape, one launch a layer, and what Triton and other libraries do "
    "where they are installed. Without a GPU the NumPy reference is checked and bytes are counted. "
    "Exit status 1 when anything that is compared differs."
)
EXAMPLES = (
    "cupy-mla bench",
    "cupy-mla bench insert --format fp8 --tokens 1,8192 --pattern random --check",
    "cupy-mla bench gather convert --sections gpu --json results.json --plot results.png",
    "cupy-mla bench --step --tokens 64,8192 --sections gpu",
    "cupy-mla bench --device cpu --json - > bytes.json",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    defaults = Settings()
    parser.add_argument(
        "operations",
        nargs="*",
        type=_operation,
        metavar="OPERATION",
        help=f"{', '.join(OPERATIONS)} (default: insert)",
    )
    parser.add_argument(
        "--layers",
        type=_arguments.integer(1),
        default=defaults.layers,
        metavar="L",
        help=f"layers of insert and context (default: {defaults.layers})",
    )
    parser.add_argument(
        "--tokens",
        type=_token_list,
        default=(),
        metavar="T,T,...",
        help="tokens of a call (default: each operation's own)",
    )
    parser.add_argument(
        "--format",
        action="append",
        type=_arguments.layout_name,
        metavar="NAME",
        dest="formats",
        help="format of the cache, may be repeated (default: each operation's own)",
    )
    parser.add_argument(
        "--pattern",
        action="append",
        choices=PATTERNS,
        dest="patterns",
        help="where rows lie in the cache (default: both)",
    )
    parser.add_argument(
        "--block-size",
        type=_arguments.integer(1),
        default=defaults.block_size,
        metavar="B",
        help=f"rows a block (default: {defaults.block_size})",
    )
    parser.add_argument(
        "--cold",
        action="store_true",
        help="buffers in device memory: they take turns, five times the L2 cache (default)",
    )
    parser.add_argument("--warm", action="store_true", help="one buffer, left in the L2 cache")
    parser.add_argument(
        "--check", action="store_true", help="compare all bytes with the NumPy reference first"
    )
    parser.add_argument(
        "--step",
        action="store_true",
        help="measure insert between the product that makes rows and a read of them, too",
    )
    parser.add_argument(
        "--sections",
        type=_section_list,
        default=SECTIONS,
        metavar="NAME,...",
        help=f"what is measured, of {', '.join(SECTIONS)} (default: all)",
    )
    parser.add_argument(
        "--repeat",
        type=_arguments.integer(1),
        default=defaults.repeats,
        metavar="N",
        help=f"replays of each graph (default: {defaults.repeats})",
    )
    parser.add_argument(
        "--device",
        choices=DEVICES,
        default="auto",
        help="where to run (default: auto, the GPU where there is one)",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write all results as JSON; - for stdout, without tables"
    )
    parser.add_argument(
        "--plot", metavar="FILE", help="draw percent of the ceiling and times (needs matplotlib)"
    )


def _operation(text: str) -> str:
    if text not in OPERATIONS:
        raise argparse.ArgumentTypeError(
            f"unknown operation {text!r} (choose from {', '.join(OPERATIONS)})"
        )
    return text


def _token_list(text: str) -> tuple[int, ...]:
    parse = _arguments.integer(1)
    return tuple(dict.fromkeys(parse(part) for part in text.split(",")))


def _section_list(text: str) -> tuple[str, ...]:
    names = text.split(",")
    for name in names:
        if name not in SECTIONS:
            raise argparse.ArgumentTypeError(
                f"unknown section {name!r} (choose from {', '.join(SECTIONS)})"
            )
    return tuple(name for name in SECTIONS if name in names)


def run(args: argparse.Namespace) -> int:
    """Measure what `args` asks for and report; 1 when anything that is compared differs."""
    settings = _settings(args)
    if args.plot is not None:
        plot.check_path(args.plot)
    for path in (args.json, args.plot):
        if path not in (None, "-"):
            _check_writable(path)
    device = select(args.device)
    report = _measure(settings, device)
    document = report.to_dict(_command(args, settings), settings.to_dict())
    if args.json == "-":
        _console.print_json(document)
    else:
        _bench_tables.show(_console.console(), report)
        if args.json is not None:
            _write(args.json, json.dumps(document, indent=2, allow_nan=False) + "\n")
    if args.plot is not None:
        _plot(args, report)
    if not report.timed:
        _say_what_was_left_out(args)
    for line in _failures(report):
        sys.stderr.write(f"{args.prog}: {line}\n")
    return 0 if report.ok else 1


def _say_what_was_left_out(args: argparse.Namespace) -> None:
    """Tell who asked for more than there is without a GPU."""
    left_out = [f"--{name}" for name in ("cold", "warm", "step") if getattr(args, name)]
    if left_out:
        names = " and ".join(left_out)
        sys.stderr.write(f"{args.prog}: {names} left out, since nothing is timed without a GPU\n")
    for most, wanted, what in (
        (REFERENCE_TOKENS, max(args.tokens, default=0), "tokens"),
        (REFERENCE_LAYERS, args.layers, "layers"),
    ):
        if wanted > most:
            sys.stderr.write(f"{args.prog}: the reference is checked at {most:,} {what} at most\n")


def _settings(args: argparse.Namespace) -> Settings:
    return Settings(
        operations=tuple(dict.fromkeys(args.operations)) or ("insert",),
        layers=args.layers,
        tokens=args.tokens,
        formats=tuple(dict.fromkeys(args.formats or ())),
        patterns=tuple(name for name in PATTERNS if name in (args.patterns or PATTERNS)),
        block_size=args.block_size,
        cold=args.cold or not args.warm,
        warm=args.warm,
        check=args.check,
        step=args.step,
        sections=args.sections,
        repeats=args.repeat,
    )


def _command(args: argparse.Namespace, settings: Settings) -> list[str]:
    """Return a command line that does the same, with the defaults written out."""
    words = [*args.prog.split(), *settings.operations]
    words += ["--layers", str(settings.layers), "--block-size", str(settings.block_size)]
    words += ["--repeat", str(settings.repeats), "--sections", ",".join(settings.sections)]
    if settings.tokens:
        words += ["--tokens", ",".join(map(str, settings.tokens))]
    for option, names in (("--format", settings.formats), ("--pattern", settings.patterns)):
        words += [word for name in names for word in (option, name)]
    words += [f"--{name}" for name in ("cold", "warm", "check", "step") if getattr(settings, name)]
    return [*words, "--device", args.device]


def _check_writable(path: str) -> None:
    """Raise for a file that could not be written, before minutes are spent."""
    new = not os.path.exists(path)
    try:
        with open(path, "ab"):
            pass
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from error
    if new:
        os.remove(path)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def _measure(settings: Settings, device: Device) -> Report:
    timed = device.backend == "CUDA"
    report = Report(
        device=f"{device.backend} on {device.name}",
        reason=device.reason,
        timed=timed,
        machine=info.collect() | {"baselines_sha256": baselines.digest()},
    )
    run: Callable[[Callable[[str], None]], None]
    if timed:
        run = session.GpuSession(settings, make_machine(device), report).run
    else:

        def run(begin: Callable[[str], None]) -> None:
            session.without_gpu(settings, report, begin)

    total = session.tasks(settings, timed=timed)
    with _console.progress("measuring" if timed else "checking", total) as begin:
        run(begin)
    return report


def make_machine(device: Device) -> Machine:
    """Return the current CUDA device with its timer and baseline kernels."""
    index = int(device.xp.cuda.runtime.getDevice())
    seam: Any = backends.cuda(DeviceId("cuda", index)).device
    notes: dict[str, str] = {}
    torch = optional("torch", notes)
    if torch is not None and not torch.cuda.is_available():
        torch, notes["torch"] = None, "is installed without CUDA, or does not find the device"
    on_cupy = baselines.Baselines(seam)
    on_torch = on_cupy if torch is None else baselines.Baselines(seam, "torch")
    return Machine(
        arrays=device,
        timer=CudaTimer(seam),
        baselines=on_cupy,
        torch=torch,
        torch_device=f"cuda:{index}",
        torch_baselines=on_torch,
        notes=notes,
    )


def _plot(args: argparse.Namespace, report: Report) -> None:
    if not report.rows:
        sys.stderr.write(f"{args.prog}: nothing was measured that --plot could draw\n")
        return
    digest = (report.machine["kernel_sources"] or {}).get("sha256", "unknown")
    plot.draw(report.rows, f"cupy_mla on {report.device}, kernels {digest[:12]}", args.plot)


def _failures(report: Report) -> Sequence[str]:
    return [
        f"{check.problem.label}: {check.subject} differs from {check.against} in "
        f"{check.differences} places, first in {check.first}"
        for check in report.checks
        if check.differences
    ]
