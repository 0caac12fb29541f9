"""`cupy-mla bench`: the whole command, without a GPU and on a machine with made-up times."""

from __future__ import annotations

import json
import re
import sys
import types

import numpy as np
import pytest

from cupy_mla import _kernel_files
from cupy_mla.bench import baselines, compile_time, session, step
from cupy_mla.bench.operations import OPERATIONS
from cupy_mla.bench.problem import SENTINEL
from cupy_mla.bench.session import Settings
from cupy_mla.cli import _bench_tables, bench, main
from cupy_mla.cli._device import Device
from tests.cli import bench_machine
from tests.cli.bench_machine import COPY, EMPTY, OURS, PRICES
from tests.cli.helpers import python, table_rows

SMALL = ("--layers", "2", "--tokens", "1,5", "--block-size", "4", "--format", "fp8")
GPU = ("--sections", "gpu", "--repeat", "5")


def run_json(capsys, *arguments):
    status = main(["bench", *arguments, "--json", "-"])
    captured = capsys.readouterr()
    return status, json.loads(captured.out), captured.err


# --- without a GPU --------------------------------------------------------------------------------


def test_without_a_gpu_it_says_so_counts_bytes_and_checks(capsys, no_cupy):
    assert main(["bench", *SMALL]) == 0
    text = capsys.readouterr().out
    assert text.startswith("NumPy on the CPU (CuPy is not installed")
    assert "Without a GPU nothing is timed" in text
    assert [row[:3] for row in table_rows(text, "Operation")] == [
        ["insert", "fp8_e4m3", "1"],
        ["insert", "fp8_e4m3", "5"],
    ]
    # Two layers of 5 tokens: rows in and out, slots, scales.
    read, written = 2 * 5 * 1152 + 5 * 8 + 2 * 4, 2 * 5 * 576
    assert table_rows(text, "Operation")[1][3:6] == [
        f"{size:,}" for size in (read, written, read + written)
    ]
    assert "No difference in" in text
    assert "reference against ml_dtypes and float64" in text


def test_without_a_gpu_json_has_bytes_and_no_times(capsys, no_cupy):
    status, document, err = run_json(capsys, *SMALL)
    assert (status, err) == (0, "")
    assert document["timed"] is False
    assert document["ok"] is True
    assert document["rows"] == document["host"] == document["compile"] == document["steps"] == []
    assert [(entry["tokens"], entry["pattern"]) for entry in document["counted"]] == [
        (1, "contiguous"),
        (5, "contiguous"),
        (5, "random"),
    ]
    assert document["counted"][0]["bytes"]["kinds"]["outputs"] == 2 * 576
    assert {check["subject"] for check in document["checks"]} == {"reference"}
    assert document["machine"]["backend"] == "NumPy"


@pytest.mark.parametrize("name", list(OPERATIONS))
def test_every_operation_is_checked_without_a_gpu(capsys, no_cupy, name):
    status, document, _ = run_json(capsys, name, *SMALL[:4], "--block-size", "4")
    assert status == 0
    formats = {check["format"] for check in document["checks"]}
    assert formats == set(OPERATIONS[name].formats)
    assert {check["differences"] for check in document["checks"]} == {0}


def test_a_gpu_that_was_asked_for_and_is_not_there_is_an_error(capsys, no_cupy):
    assert main(["bench", *SMALL, "--device", "cuda"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("cupy-mla bench: error: --device cuda: CuPy is not installed")


def test_a_wrong_reference_exits_1_and_is_named(capsys, no_cupy, monkeypatch):
    operation = OPERATIONS["insert"]

    def make(problem, arrays, machine=None):
        instance = operation.make(problem, arrays)
        instance.outputs["cache 1"].view(np.uint8)[-1, -1, 3] ^= 1
        return instance

    broken = bench.session.Operation(**{**vars(operation), "make": make})
    monkeypatch.setitem(OPERATIONS, "insert", broken)
    arguments = [*SMALL, "--pattern", "random"]
    assert main(["bench", *arguments]) == 1
    captured = capsys.readouterr()
    assert "2 of 2 comparisons found differences" in captured.out
    assert captured.err.startswith(
        "cupy-mla bench: insert fp8_e4m3 1 random: reference differs from ml_dtypes and float64 "
        "in 1 places, first in cache 1"
    )
    status, document, err = run_json(capsys, *arguments)
    assert (status, document["ok"]) == (1, False)
    assert "first in cache 1" in err


# --- with made-up times ---------------------------------------------------------------------------


def test_the_document_holds_what_was_measured(capsys, machine):
    status, document, _ = run_json(capsys, *SMALL, *GPU, "--check")
    assert status == 0
    assert document["schema"] == 1
    assert document["timed"] is True
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", document["date"])
    assert document["machine"]["kernel_sources"]["sha256"] == _kernel_files.digest()
    assert document["machine"]["baselines_sha256"] == baselines.digest()
    assert {"python", "platform", "packages", "cuda"} <= set(document["machine"])
    assert document["settings"]["tokens"] == [1, 5]
    assert [(row["tokens"], row["pattern"]) for row in document["rows"]] == [
        (1, "contiguous"),
        (5, "contiguous"),
        (5, "random"),
    ]
    row = document["rows"][2]
    assert {key: row[key] for key in ("operation", "format", "input", "layers", "cold")} == {
        "operation": "insert",
        "format": "fp8_e4m3",
        "input": "bfloat16",
        "layers": 2,
        "cold": True,
    }
    # The third of five replays, each 1 % longer than the one before.
    assert row["us"]["median"] == pytest.approx(1.02 * OURS)
    assert row["us"]["min"] == pytest.approx(OURS)
    assert row["us"]["p90"] == pytest.approx(1.036 * OURS)
    assert row["empty_node_us"] == pytest.approx(1.02 * EMPTY)
    assert row["us_above_empty_node"] == pytest.approx(1.02 * (OURS - EMPTY))
    assert row["launch_bound"] is False
    assert row["ceiling"]["us"]["median"] == pytest.approx(1.02 * COPY)
    assert row["ceiling"]["variant"] == "4 tiles a block, plain stores"
    assert row["percent_of_ceiling"] == pytest.approx(100 * COPY / OURS)
    assert row["gb_per_s"] == pytest.approx(row["bytes"]["total"] / row["us"]["median"] / 1e3)
    assert {name: entry["times"] for name, entry in row["alternatives"].items()} == {
        "per layer": pytest.approx(PRICES["per_layer"] / OURS),
        "scalar": pytest.approx(PRICES["bench_scalar"] / OURS),
    }
    assert [check["subject"] for check in document["checks"][:3]] == [
        "cupy_mla",
        "per layer",
        "scalar",
    ]
    assert document["notes"] == {"torch": "not wanted here"}


def test_the_command_in_the_document_measures_the_same_again(capsys, machine):
    arguments = [*SMALL, *GPU, "--pattern", "random", "--warm"]
    _, first, _ = run_json(capsys, "insert", "gather", *arguments)
    assert first["command"][:2] == ["cupy-mla", "bench"]
    _, second, _ = run_json(capsys, *first["command"][2:])
    for document in (first, second):
        del document["date"]
    assert first == second


def test_tables_begin_with_ratios(capsys, machine):
    assert main(["bench", *SMALL, *GPU]) == 0
    text = capsys.readouterr().out
    assert text.startswith("CUDA on Emulated GPU (for a test)\n")
    assert "insert, 2 layers, blocks of 4, cold buffers" in text
    rows = table_rows(text, "Format ")
    assert rows[2] == [
        "fp8_e4m3", "5", "random", "80 %", "2.50x", "7.50x", "10.2", "10.0", "10.4",
        "8.16", rows[2][10], "9.69", "bytes",
    ]  # fmt: skip
    assert "less than 5 empty kernel nodes (0.51 us each)" in " ".join(text.split())
    assert re.search(r"^Not measured\n  torch  not wanted here$", text, re.MULTILINE)


def test_launch_bound_rows_are_flagged(capsys, machine, monkeypatch):
    monkeypatch.setitem(PRICES, "bench_empty", OURS / 4)
    assert main(["bench", *SMALL, *GPU]) == 0
    assert [row[-1] for row in table_rows(capsys.readouterr().out, "Format ")] == ["launch"] * 3


@pytest.mark.parametrize(
    ("options", "temperatures"),
    [
        ([], ["cold"]),
        (["--cold"], ["cold"]),
        (["--warm"], ["warm"]),
        (["--cold", "--warm"], ["cold", "warm"]),
    ],
)
def test_cold_and_warm(capsys, machine, options, temperatures):
    arguments = ("--layers", "1", "--tokens", "1", "--format", "bfloat16", *GPU)
    _, document, _ = run_json(capsys, *arguments, *options)
    assert ["cold" if row["cold"] else "warm" for row in document["rows"]] == temperatures
    for row in document["rows"]:
        if row["cold"]:
            footprint = row["rotation"]["footprint"]
            assert footprint - row["bytes"]["total"] >= 5 * bench_machine.L2_BYTES
        else:
            assert row["rotation"]["buffers"] == 1
    main(["bench", *arguments, *options])
    text = capsys.readouterr().out
    if len(temperatures) == 1:
        assert f"blocks of 64, {temperatures[0]} buffers" in text
    else:
        assert [row[3] for row in table_rows(text, "Format ")] == temperatures


def test_only_cold_replays_empty_the_cache(capsys, machine):
    entries = {}
    for option in ("--cold", "--warm"):
        machine.baselines.device.launches.clear()
        run_json(capsys, "--layers", "1", "--tokens", "1", "--format", "bfloat16", *GPU, option)
        entries[option] = [entry for entry, _, _ in machine.baselines.device.launches]
    assert "bench_read_all" in entries["--cold"]
    assert "bench_read_all" not in entries["--warm"]
    assert "bench_spin" in entries["--warm"]


def test_check_finds_a_wrong_alternative(capsys, machine, monkeypatch):
    real = baselines.Launch.__call__

    def broken(launch):
        real(launch)
        if launch.function[0].startswith("bench_scalar"):
            values = np.frombuffer(launch.arguments.buffer, baselines.SCALAR_PARAMS.dtype)
            assert values["tokens"][0] in (1, 5)
            machine.spoiled[0][...] = SENTINEL

    machine.spoiled = []
    operation = OPERATIONS["insert"]

    def make(problem, arrays, machine_=None):
        instance = operation.make(problem, arrays, machine_)
        machine.spoiled[:] = [instance.arrays["caches"][0]]
        return instance

    monkeypatch.setattr(baselines.Launch, "__call__", broken)
    monkeypatch.setitem(
        OPERATIONS, "insert", bench.session.Operation(**{**vars(operation), "make": make})
    )
    status, document, err = run_json(capsys, *SMALL, *GPU, "--check")
    assert status == 1
    wrong = [check for check in document["checks"] if check["differences"]]
    assert {check["subject"] for check in wrong} == {"scalar"}
    assert wrong[0]["first"].startswith("cache 0, byte 0: A5, not ")
    assert "scalar differs from NumPy reference" in err


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "insert"])
def test_every_operation_is_measured(capsys, machine, name):
    status, document, _ = run_json(capsys, name, *SMALL, *GPU, "--check", "--pattern", "random")
    assert status == 0
    wanted = [4, 8] if name == "convert" else [1, 5]  # which works on whole blocks
    assert [row["tokens"] for row in document["rows"]] == wanted
    assert {row["layers"] for row in document["rows"]} == {2 if name == "context" else 1}
    assert all(row["percent_of_ceiling"] > 0 for row in document["rows"])
    if name == "context":
        assert set(document["rows"][0]["alternatives"]) == {"insert alone"}


def test_host_times_of_each_number_of_tokens(capsys, machine):
    sizes = ("--layers", "2", "--tokens", "300,1", "--format", "fp8", "--format", "bfloat16")
    _, document, _ = run_json(capsys, *sizes, "--sections", "host")
    assert document["rows"] == []
    calls = ["bind()", "GroupedCacheWriter.insert", "concat_and_cache_mla, one layer"]
    others = ["insert by step: kernel launched with cupy", "cupy.RawKernel, 15 arguments"]
    assert [(row["tokens"], row["name"]) for row in document["host"]] == [
        *((1, name) for name in (*calls, *others)),
        *((300, name) for name in calls),
    ]
    assert {row["format"] for row in document["host"]} == {"fp8_e4m3"}
    main(["bench", *sizes, "--sections", "host"])
    rows = table_rows(capsys.readouterr().out, "Host time")
    assert rows[0] == ["bind()", "fp8_e4m3", "1", "CuPy", "24.5", "5.00", "40.1"]


def test_a_step_by_cupy_multiplies_float16(capsys, machine, monkeypatch):
    monkeypatch.setattr(step, "HIDDEN", 16)
    arguments = ("--layers", "2", "--tokens", "5", "--pattern", "random", *GPU, "--step")
    formats = ("--format", "float16", "--format", "fp8", "--format", "fp8_ds_mla")
    status, document, _ = run_json(capsys, *arguments, *formats)
    assert status == 0
    assert [(row["format"], row["framework"]) for row in document["steps"]] == [
        ("float16", "CuPy"),
        ("fp8_e4m3", "CuPy"),
    ]
    assert set(document["steps"][0]["steps"]) == {"nothing stored", "cupy_mla", "framework"}
    assert set(document["steps"][1]["steps"]) == {"nothing stored", "cupy_mla"}
    assert document["notes"]["step, fp8_ds_mla"] == "needs torch, which is not at hand"
    main(["bench", *arguments, *formats])
    text = capsys.readouterr().out
    assert "A step in one graph: product (CuPy), insert, read of the rows; us" in text


# --- compile time ---------------------------------------------------------------------------------


def test_compile_times_are_of_one_kernel_a_format(capsys, machine, monkeypatch):
    runs = []

    def in_new_process(wanted, folder):
        runs.append((tuple(wanted), folder))
        return dict.fromkeys(wanted, 0.25 / len(runs))

    monkeypatch.setattr(compile_time, "_in_new_process", in_new_process)
    arguments = ["--format", "fp8", "--format", "fp8_ds_mla", "--sections", "compile"]
    _, document, _ = run_json(capsys, *arguments)
    kernels = ("insert_fp8_e4m3_bfloat16", "insert_fp8_ds_mla_bfloat16")
    assert document["compile"] == [
        {"kernel": kernel, "cold_s": 0.25, "cached_s": 0.125} for kernel in kernels
    ]
    assert [wanted for wanted, _ in runs] == [kernels, kernels]
    assert runs[0][1] == runs[1][1]  # the second one finds what the first one left
    runs.clear()
    main(["bench", *arguments])
    assert table_rows(capsys.readouterr().out, "First call")[0] == [
        "insert_fp8_e4m3_bfloat16",
        "250 ms",
        "125.0 ms",
    ]


def test_the_process_that_compiles_has_a_cache_of_its_own(monkeypatch):
    seen = []

    def run(command, env, **options):
        seen.append((command, env))
        return types.SimpleNamespace(returncode=0, stdout='{"a": 0.5}', stderr="")

    monkeypatch.setattr(compile_time.subprocess, "run", run)
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")
    assert compile_time.measure(["a"])[0].to_dict() == {
        "kernel": "a",
        "cold_s": 0.5,
        "cached_s": 0.5,
    }
    (command, first), (_, second) = seen
    assert command[1:] == ["-m", "cupy_mla.bench.compile_time", "a"]
    assert first["CUPY_CACHE_DIR"] == second["CUPY_CACHE_DIR"]
    assert "CUPY_CACHE_IN_MEMORY" not in first
    assert compile_time.measure([]) == []


def test_a_process_that_fails_says_why(monkeypatch):
    def run(command, **options):
        return types.SimpleNamespace(returncode=1, stdout="", stderr="Traceback\nKeyError: 'x'\n")

    monkeypatch.setattr(compile_time.subprocess, "run", run)
    with pytest.raises(RuntimeError, match=r"^compile time: the process failed: KeyError: 'x'$"):
        compile_time.measure(["x"])


def test_the_process_finds_this_package():
    """Without a usable GPU it gets as far as asking for one; with one, a wrong name is its end."""
    with pytest.raises(RuntimeError, match=r"BackendUnavailable|KeyError: 'nope'"):
        compile_time.measure(["nope"])


def test_load_times_are_by_kernel():
    class FakeDevice:
        arch, name = "sm_90", "fake"

        def __init__(self):
            self.functions, self.compiled = {}, []

        def compile(self, source, entry):
            self.compiled.append(entry)
            return entry

    device = FakeDevice()
    wanted = ["insert_fp8_ds_mla_bfloat16", "insert_bfloat16_bfloat16"]
    times = compile_time.load_times(device, wanted)
    assert list(times) == device.compiled == wanted
    assert min(times.values()) > 0


# --- files ----------------------------------------------------------------------------------------


def test_json_goes_to_a_file_beside_the_tables(capsys, machine, tmp_path):
    path = tmp_path / "results.json"
    assert main(["bench", *SMALL, *GPU, "--json", str(path)]) == 0
    assert "Format" in capsys.readouterr().out
    assert len(json.loads(path.read_text())["rows"]) == 3


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_file_that_cannot_be_written_is_told_before_anything_runs(
    capsys, machine, monkeypatch, tmp_path, option
):
    monkeypatch.setattr(bench.plot, "check_path", lambda path: None)
    monkeypatch.setattr(bench, "select", None)
    path = tmp_path / "missing" / "file"
    assert main(["bench", option, str(path)]) == 2
    expected = f"cupy-mla bench: error: cannot write {path}: No such file or directory\n"
    assert capsys.readouterr() == ("", expected)


def test_without_matplotlib_a_plot_is_an_error(capsys, machine, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["bench", *SMALL, "--plot", "x.png"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "error: --plot needs matplotlib" in captured.err
    assert "pip install matplotlib" in captured.err


def test_what_a_gpu_is_needed_for_is_left_out_aloud(capsys, no_cupy):
    sizes = ("--layers", "1", "--tokens", "1", "--format", "bfloat16")
    assert main(["bench", *sizes, "--warm", "--step"]) == 0
    text = capsys.readouterr().err
    assert "--warm and --step left out, since nothing is timed without a GPU" in text
    assert "tokens at most" not in text
    assert main(["bench", "q", "--tokens", "1025", "--format", "bfloat16"]) == 0
    text = capsys.readouterr().err
    assert "the reference is checked at 1,024 tokens at most" in text
    assert "left out" not in text


def test_the_reference_is_checked_at_few_layers_and_all_are_counted(capsys, no_cupy):
    sizes = ("--layers", "1000000", "--tokens", "1", "--format", "fp8")
    status, document, said = run_json(capsys, *sizes)
    assert status == 0
    assert document["counted"][0]["bytes"]["written"] == 1_000_000 * 576
    assert [check["compared_bytes"] for check in document["checks"]] == [64 * 64 * 576]
    assert "the reference is checked at 64 layers at most" in said


def test_the_query_is_what_attention_over_such_a_cache_takes(capsys, no_cupy):
    written = {}
    for fmt in ("bfloat16", "fp8_ds_mla", "fp8_e4m3"):
        arguments = ("q", "--tokens", "1", "--format", fmt)
        entry = run_json(capsys, *arguments)[1]["counted"][0]
        written[fmt] = entry["bytes"]["written"]
    assert written["fp8_ds_mla"] == written["bfloat16"] < written["fp8_e4m3"]


def test_conversions_are_of_whole_blocks(capsys, no_cupy):
    arguments = ("convert", "--tokens", "1,33,64", "--block-size", "32", "--format", "fp8")
    counted = run_json(capsys, *arguments)[1]["counted"]
    assert [entry["tokens"] for entry in counted] == [32, 64]
    assert {entry["bytes"]["total"] // entry["tokens"] for entry in counted} == {576 * 3}


def test_a_plot_without_rows_is_not_made(capsys, no_cupy, monkeypatch, tmp_path):
    monkeypatch.setattr(bench.plot, "check_path", lambda path: None)
    path = tmp_path / "x.png"
    assert main(["bench", *SMALL, "--plot", str(path)]) == 0
    assert "nothing was measured that --plot could draw" in capsys.readouterr().err
    assert not path.exists()


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nosuch"], "unknown operation 'nosuch' (choose from insert, context, norm-rope, q,"),
        (["--tokens", "1,x"], "'x' is no whole number of at least 1"),
        (["--tokens", "0"], "'0' is no whole number of at least 1"),
        (["--tokens", ""], "'' is no whole number of at least 1"),
        (["--format", "fp4"], "unknown layout 'fp4'"),
        (["--pattern", "zigzag"], "invalid choice: 'zigzag'"),
        (["--sections", "gpu,cpu"], "unknown section 'cpu' (choose from gpu, host, compile)"),
        (["--repeat", "0"], "'0' is no whole number of at least 1"),
    ],
)
def test_bad_arguments(capsys, arguments, message):
    assert main(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("usage: cupy-mla bench [-h]")
    assert message in captured.err


def test_defaults_are_the_operation_s_own():
    found = session.problems(Settings(), OPERATIONS["insert"])
    assert {problem.tokens for problem in found} == {1, 64, 256, 1024, 8192, 16384}
    assert {problem.layout.name for problem in found} == {"bfloat16", "fp8_e4m3", "fp8_ds_mla"}
    assert {problem.pattern for problem in found} == {"contiguous", "random"}
    assert {problem.layers for problem in found} == {5}
    assert len(found) == 3 * (1 + 5 * 2)  # one token has no pattern
    assert len(session.problems(Settings(), OPERATIONS["q"])) == 2 * 5


@pytest.mark.parametrize("timed", [True, False])
def test_the_progress_bar_has_a_step_for_each_name(machine, timed, monkeypatch):
    begun = []
    total = []

    class Progress:
        def __init__(self, description, count):
            total.append(count)

        def __enter__(self):
            return begun.append

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(bench._console, "progress", Progress)
    if not timed:
        device = Device("NumPy", "the CPU", "for a test", np, repeats=1)
        monkeypatch.setattr(bench, "select", lambda request: device)
    sections = ("--sections", "gpu,host", "--repeat", "2")
    assert main(["bench", "insert", "q", *SMALL, *sections, "--check", "--warm"]) == 0
    assert total == [len(begun)]
    assert begun[0].startswith("insert fp8_e4m3 1 contiguous")


@pytest.mark.parametrize(
    ("value", "text"), [(0.514, "0.51"), (9.994, "9.99"), (12.34, "12.3"), (271.4, "271")]
)
def test_times_have_three_digits(value, text):
    assert _bench_tables.microseconds(value) == text
    assert _bench_tables.times(value) == f"{text}x"


def test_what_was_not_measured_is_a_dash():
    assert _bench_tables.times(None) == "-"


def test_neither_torch_nor_rich_is_imported_for_json_without_a_gpu():
    code = """
import sys
from cupy_mla.cli import main
arguments = ["bench", "--device", "cpu", "--layers", "1", "--tokens", "1", "--json", "-"]
status = main(arguments)
loaded = {name.partition(".")[0] for name in sys.modules} & {"rich", "torch", "matplotlib"}
sys.exit(f"imported {loaded}" if loaded else status)
"""
    done = python("-c", code)
    assert (done.returncode, done.stderr) == (0, "")
