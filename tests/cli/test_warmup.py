"""`cupy-mla warmup`, on a device that only writes down what it is to compile."""

from __future__ import annotations

import json

import pytest

from cupy_mla import CompileError, backends
from cupy_mla._cuda import registry
from cupy_mla.cli import _console, main
from cupy_mla.cli.warmup import chosen


class FakeDevice:
    """Takes every source for compiled.

    Attributes
    ----------
    compiled : list of (str, str)
        Entry and source.
    """

    ordinal = 1
    name = "NVIDIA GPU 1"
    arch = "sm_90"

    def __init__(self):
        self.functions = {}
        self.compiled = []

    def compile(self, source, entry):
        self.compiled.append((entry, source))
        return len(self.compiled)


@pytest.fixture
def device(with_gpu, monkeypatch):
    made = FakeDevice()
    asked = []

    class Backend:
        device = made

    def cuda(device):
        asked.append(device.index)
        return Backend

    monkeypatch.setattr(backends, "cuda", cuda)
    made.asked = asked
    return made


def test_all_kernels_are_compiled_for_the_current_device(capsys, device):
    assert main(["warmup"]) == 0
    everything = list(registry.specialisations())
    assert {entry for entry, _ in device.compiled} == {special.entry for special in everything}
    assert all(f"\n{entry}(" in source for entry, source in device.compiled)
    assert device.asked[-1] == 1
    text = capsys.readouterr().out
    assert text.startswith(f"{len(everything)} kernels ready in ")
    assert "NVIDIA GPU 1 (sm_90)" in text


def test_json(capsys, device, tmp_path):
    arguments = ["--layout", "fp8", "--layout", "fp8_ds_mla", "--input", "bfloat16", "--json"]
    assert main(["warmup", *arguments]) == 0
    document = json.loads(capsys.readouterr().out)
    found = {
        (kernel["kernel"], kernel["layout"], kernel["input"]) for kernel in document["kernels"]
    }
    assert {("insert", "fp8_e4m3", "bfloat16"), ("insert", "fp8_ds_mla", "bfloat16")} <= found
    assert {layout for _, layout, _ in found} == {"fp8_e4m3", "fp8_ds_mla"}
    assert {dtype for _, _, dtype in found} == {"bfloat16"}
    assert document["count"] == len(document["kernels"]) == len(device.compiled)
    assert document["cache_dir"] == str(tmp_path)
    assert document["seconds"] >= sum(kernel["seconds"] for kernel in document["kernels"]) > 0
    assert (document["device"], document["arch"]) == ("NVIDIA GPU 1", "sm_90")
    assert len(document["kernel_sources_sha256"]) == 64


def test_kernels_that_only_planar_layouts_have_can_be_named(device):
    assert main(["warmup", "--layout", "indexer_fp8"]) == 0
    assert device.compiled


def test_chosen_kernels_are_those_of_all_names():
    everything = chosen(None, None)
    assert chosen([], []) == everything == list(registry.specialisations())
    one = chosen(["fp8_e5m2"], ["float16"])
    assert one
    assert {(s.format.layout, s.input.dtype) for s in one} == {("fp8_e5m2", "float16")}


def test_without_a_gpu_it_says_so(capsys, no_cupy):
    assert main(["warmup"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(
        "cupy-mla warmup: error: kernels are compiled for a GPU: CuPy is not installed"
    )


def test_layouts_without_a_kernel_for_the_inputs(capsys, device):
    assert main(["warmup", "--layout", "fp8", "--input", "uint8"]) == 2
    assert "no kernel is built for these layouts with these inputs" in capsys.readouterr().err
    assert device.compiled == []


def test_a_kernel_that_does_not_compile_is_named(capsys, device, monkeypatch):
    def compile(source, entry):
        raise CompileError("kernel.cu(1): error: expected a ';'")

    monkeypatch.setattr(device, "compile", compile)
    assert main(["warmup", "--layout", "fp8_ds_mla"]) == 2
    err = capsys.readouterr().err
    assert "insert (layout fp8_ds_mla, input bfloat16) does not compile for sm_90" in err
    assert "expected a ';'" in err


def test_the_progress_bar_names_each_kernel(device, monkeypatch):
    begun, totals = [], []

    class Progress:
        def __init__(self, description, total):
            totals.append(total)

        def __enter__(self):
            return begun.append

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(_console, "progress", Progress)
    assert main(["warmup", "--layout", "fp8_ds_mla"]) == 0
    assert totals == [len(begun)]
    assert begun[0] == "insert (layout fp8_ds_mla, input bfloat16)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layout", "fp4"], "unknown layout 'fp4' (choose from bfloat16, float16,"),
        (["--layout", "auto"], "unknown layout 'auto'"),
        (["--input", "float64"], "invalid choice: 'float64'"),
    ],
)
def test_bad_arguments(capsys, arguments, message):
    assert main(["warmup", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_cache_in_memory_is_told(capsys, device, monkeypatch):
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")
    assert main(["warmup", "--layout", "fp8_ds_mla"]) == 0
    assert "gone with the process" in capsys.readouterr().out
