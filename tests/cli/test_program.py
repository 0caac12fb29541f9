"""What all commands share: arguments, errors, exit status."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

import cupy_mla
from cupy_mla import BackendUnavailable, CompileError
from cupy_mla.cli import COMMANDS, demo, main
from tests.cli.helpers import SMALL, python


def test_help_lists_every_command_with_its_summary(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in COMMANDS:
        module = sys.modules[f"cupy_mla.cli.{name}"]
        assert re.search(rf"^    {name}\s+{module.SUMMARY}$", text, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_ends_with_examples_that_parse(capsys, monkeypatch, command):
    assert main([command, "--help"]) == 0
    help_text = capsys.readouterr().out
    assert help_text.startswith(f"usage: cupy-mla {command}")
    examples = help_text.partition("\nexamples:\n")[2].splitlines()
    assert examples
    monkeypatch.setattr(sys.modules[f"cupy_mla.cli.{command}"], "run", lambda args: 77)
    for line in examples:
        words = line.partition(">")[0].split()
        assert words[:2] == ["cupy-mla", command]
        assert main(words[1:]) == 77


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"cupy-mla {cupy_mla.__version__}\n"


def test_no_command_is_an_error_that_shows_help(capsys):
    assert main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("usage: cupy-mla")
    assert "demo" in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nosuch"], "invalid choice: 'nosuch'"),
        (["--nope"], "unknown arguments: --nope"),
        (["demo", "--nope"], "unknown arguments: --nope"),
        (["demo", "extra"], "unknown arguments: extra"),
        (["demo", "--lay", "3"], "unknown arguments: --lay 3"),
        (["demo", "--layers", "0"], "'0' is no whole number of at least 1"),
        (["demo", "--layers", "two"], "'two' is no whole number of at least 1"),
        (["demo", "--tokens", "-5"], "'-5' is no whole number of at least 1"),
        (["demo", "--tokens", "1.5"], "'1.5' is no whole number of at least 1"),
        (["demo", "--block-size", "0"], "'0' is no whole number of at least 1"),
        (["demo", "--seed", "-1"], "'-1' is no whole number of at least 0"),
        (["demo", "--format", "fp4"], "unknown layout 'fp4'"),
        (["demo", "--format", "auto"], "unknown layout 'auto'"),
        (["demo", "--scale-format", "e8m0"], "invalid choice: 'e8m0'"),
        (["demo", "--device", "tpu"], "invalid choice: 'tpu'"),
        (["layouts", "fp8", "nosuch"], "unknown layout 'nosuch' (choose from bfloat16, float16,"),
        (["layouts", "--kv-lora-rank", "0"], "'0' is no whole number of at least 1"),
        (["layouts", "--rope-dim", "-1"], "'-1' is no whole number of at least 0"),
        (["layouts", "--json", "--markdown"], "not allowed with argument"),
        (["info", "extra"], "unknown arguments: extra"),
    ],
)
def test_bad_arguments_print_the_usage_of_the_command_and_exit_2(capsys, arguments, message):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    prog = f"cupy-mla {arguments[0]}" if arguments[0] in COMMANDS else "cupy-mla"
    assert captured.err.startswith(f"usage: {prog} [-h]")
    assert f"\n{prog}: error: " in captured.err
    assert message in captured.err


@pytest.mark.parametrize(
    "error",
    [
        ValueError("slots must be sorted"),
        TypeError("slots must be sorted"),
        BackendUnavailable("slots must be sorted"),
        CompileError("slots must be sorted"),
        MemoryError("slots must be sorted"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_plain_errors_have_no_traceback_unless_asked_for(capsys, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(demo, "check_format", fail)
    assert main(["demo", *SMALL]) == 2
    assert capsys.readouterr() == ("", "cupy-mla demo: error: slots must be sorted\n")
    assert main(["--traceback", "demo", *SMALL]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback (most recent call last):")
    assert shown.endswith("cupy-mla demo: error: slots must be sorted\n")


def test_an_error_without_text_is_named(capsys, monkeypatch):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(demo, "check_format", fail)
    assert main(["demo", *SMALL]) == 2
    assert capsys.readouterr().err == "cupy-mla demo: error: MemoryError\n"


def test_other_errors_keep_their_traceback(monkeypatch):
    def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(demo, "check_format", fail)
    with pytest.raises(ZeroDivisionError):
        main(["demo", *SMALL])


def test_an_interrupt_exits_130(capsys, monkeypatch):
    # What SIGINT raises; the signal itself may reach Python a moment after os.kill is back.
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "check_format", interrupted)
    assert main(["demo", *SMALL]) == 130
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.strip() == "cupy-mla: interrupted"


@pytest.mark.parametrize(
    "arguments", [["layouts"], ["layouts", "--json"], ["layouts", "--markdown"], ["--help"]]
)
def test_a_reader_that_went_away_is_no_error_worth_a_word(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = python("-m", "cupy_mla", *arguments, stdout=writer)
    finally:
        os.close(writer)
    assert done.stderr == ""
    assert done.returncode == 141


def test_module_and_function_are_the_same_program(capsys):
    done = python("-m", "cupy_mla", "layouts", "fp8_ds_mla", COLUMNS="120")
    assert (done.returncode, done.stderr) == (0, "")
    assert main(["layouts", "fp8_ds_mla"]) == 0
    assert done.stdout == capsys.readouterr().out


def test_module_passes_the_exit_status_on():
    done = python("-m", "cupy_mla", "layouts", "nosuch")
    assert done.returncode == 2
    assert done.stdout == ""


@pytest.mark.parametrize("arguments", [["--help"], ["layouts", "--json"], ["info", "--json"]])
def test_rich_and_frameworks_are_not_imported_without_need(arguments):
    code = f"""
import sys
from cupy_mla.cli import main
status = main({arguments!r})
loaded = {{name.partition(".")[0] for name in sys.modules}} & {{"rich", "torch", "jax"}}
sys.exit(f"imported {{loaded}}" if loaded else status)
"""
    done = python("-c", code)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("target", "code"), [(">&-", 0), ("> /dev/full", 2)])
def test_an_output_that_cannot_be_written_is_no_traceback(target, code):
    command = f"{sys.executable} -m cupy_mla layouts fp8 {target}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
