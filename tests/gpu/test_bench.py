"""The benchmark on a GPU: it runs, its numbers hang together, and none is beyond the hardware.

No time is asserted: a rate above what any memory reaches is a fault of the measurement, not of the
machine's speed.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from cupy_mla import backends, get_layout
from cupy_mla._arrays import DeviceId
from cupy_mla._cuda.timing import CudaTimer
from cupy_mla.bench import baselines
from cupy_mla.bench.operations import OPERATIONS
from cupy_mla.bench.problem import Problem
from cupy_mla.cli import _device, bench, main
from tests.gpu.frameworks import cupy

#: Bytes a nanosecond that no device memory reaches today.
MOST_GB_PER_S = 5000
SMALL = ("--layers", "2", "--tokens", "1,300", "--block-size", "16", "--repeat", "5")


def run_json(capsys, *arguments):
    status = main(["bench", *arguments, "--json", "-"])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    return json.loads(captured.out)


def assert_sane(row):
    figures = [row["us"], row["ceiling"]["us"]]
    figures += [entry["us"] for entry in row["alternatives"].values()]
    for figure in figures:
        assert 0 < figure["min"] <= figure["median"] <= figure["p90"]
    assert 0 < row["empty_node_us"] < row["us"]["p90"]
    if row["cold"]:
        assert 0 < row["gb_per_s"] <= MOST_GB_PER_S
        assert 0 < row["ceiling"]["gb_per_s"] <= MOST_GB_PER_S
    for entry in row["alternatives"].values():
        assert entry["times"] == pytest.approx(entry["us"]["median"] / row["us"]["median"])
    assert row["percent_of_ceiling"] == pytest.approx(
        100 * row["ceiling"]["us"]["median"] / row["us"]["median"]
    )


@pytest.mark.parametrize("name", list(OPERATIONS))
def test_an_operation_is_checked_and_measured(capsys, name):
    document = run_json(capsys, name, *SMALL, "--check", "--sections", "gpu", "--cold", "--warm")
    assert document["timed"]
    assert document["device"].startswith("CUDA on ")
    assert document["machine"]["cuda"]["gpus"]
    assert {check["differences"] for check in document["checks"]} == {0}
    assert "cupy_mla" in {check["subject"] for check in document["checks"]}
    formats = len(OPERATIONS[name].formats)
    patterns = 3 if OPERATIONS[name].patterned else 2
    assert len(document["rows"]) == formats * patterns * 2
    for row in document["rows"]:
        assert_sane(row)
    if name == "insert":
        assert all({"scalar", "per layer"} <= set(row["alternatives"]) for row in document["rows"])
        subjects = {check["subject"] for check in document["checks"]}
        assert {"scalar", "per layer"} <= subjects


def test_large_calls_do_not_outrun_the_memory(capsys):
    """Buffers that stayed in the L2 cache would."""
    document = run_json(
        capsys, "--tokens", "8192", "--format", "fp8", "--sections", "gpu", "--repeat", "5"
    )
    for row in document["rows"]:
        assert_sane(row)
        assert row["rotation"]["buffers"] > 1
        assert not row["launch_bound"]


def test_host_times(capsys):
    document = run_json(
        capsys, "--tokens", "4", "--format", "fp8", "--sections", "host", "--pattern", "random"
    )
    names = {(row["name"], row["arrays"]) for row in document["host"]}
    assert {
        ("bind()", "CuPy"),
        ("GroupedCacheWriter.insert", "CuPy"),
        ("concat_and_cache_mla, one layer", "CuPy"),
        ("concat_and_cache_mla_grouped", "CuPy"),
        ("cupy.RawKernel, 15 arguments", "CuPy"),
    } <= names
    steps = {
        "looks of the arrays",
        "launch found by looks",
        "addresses filled in",
        "current stream",
        "kernel launched",
    }
    assert {(f"insert by step: {step}", "CuPy") for step in steps} <= names
    for row in document["host"]:
        assert 0 < row["us"]["min"] <= row["us"]["median"] <= row["us"]["p90"]
    if "torch" not in document["notes"]:
        assert ("GroupedCacheWriter.insert", "torch") in names
        op = ("torch custom op, same kernel", "torch") in names
        assert op != ("torch custom op" in document["notes"])


@pytest.mark.parametrize("tokens", [1, 300])
@pytest.mark.parametrize(
    ("name", "fmt"),
    [(name, fmt) for name in ("norm-rope", "q") for fmt in OPERATIONS[name].formats],
)
def test_kernels_of_triton_come_near_the_operation(name, fmt, tokens):
    pytest.importorskip("triton")
    operation, layout = OPERATIONS[name], get_layout(fmt)
    machine = bench.make_machine(_device.select("cuda"))
    problem = Problem(name, layout, 1, tokens, 64, "random")
    instance = operation.make(problem, machine.arrays, machine)
    machine.timer.synchronize()
    instance.alternatives["Triton"].call()
    machine.timer.synchronize()
    for output, expected in operation.expect(problem, instance):
        wrong = expected.differences(machine.arrays.to_host(instance.outputs[output]))
        # Another order of sums may round to the other side of a tie; bytes are not rounded.
        ties = 0 if expected.tolerance is None else expected.values.size // 500
        assert wrong <= ties, output


def test_compile_times(capsys):
    document = run_json(capsys, "--format", "fp8_ds_mla", "--sections", "compile")
    (row,) = document["compile"]
    assert row["kernel"] == "insert_fp8_ds_mla_bfloat16"
    assert row["cold_s"] > 0
    assert row["cached_s"] > 0


def test_a_step(capsys):
    document = run_json(
        capsys, "--tokens", "32", "--format", "fp8", "--format", "float16", "--pattern", "random",
        "--sections", "gpu", "--step", "--repeat", "3",
    )  # fmt: skip
    assert [row["format"] for row in document["steps"]] == ["fp8_e4m3", "float16"]
    for row in document["steps"]:
        assert {"nothing stored", "cupy_mla"} <= set(row["steps"])
        assert all(step["us"]["min"] > 0 for step in row["steps"].values())


def test_tables(capsys):
    arguments = ("--format", "fp8", "--sections", "gpu,host")
    assert main(["bench", *SMALL, *arguments]) == 0
    text = capsys.readouterr().out
    assert "insert, 2 layers, blocks of 16" in text
    assert "Host time of a call" in text


# --- the machinery --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seam():
    return backends.cuda(DeviceId("cuda", 0)).device


@pytest.mark.parametrize("variant", baselines.COPY_VARIANTS, ids=str)
@pytest.mark.parametrize(
    ("read", "written"), [(1 << 20, 1 << 20), (72 * 1600, 41 * 1600), (16, 64)]
)
def test_the_copy_writes_what_it_says(seam, variant, read, written):
    kernels = baselines.Baselines(seam)
    buffers = kernels.copy_buffers(read, written + 256)
    seam.upload(buffers[1], np.full(buffers[1].nbytes, 0xA5, np.uint8), kernels.stream())
    kernels.copy(buffers, read, written, variant)()
    found = seam.download(buffers[1], kernels.stream()).reshape(-1, 16)
    left = (found == 0xA5).all(axis=1)
    assert not left[: written // 16].any()
    assert left[written // 16 :].all()
    if read == written:
        source = seam.download(buffers[0], kernels.stream()).reshape(-1, 16)
        assert (found[: written // 16, :12] == source[:, :12]).all()


def test_a_wait_is_as_long_as_was_asked_for(seam):
    timer = CudaTimer(seam)
    kernels = baselines.Baselines(seam)
    graph = timer.capture([kernels.spin(200.0)])
    times = timer.replay(graph, 5, lambda microseconds: None)
    assert min(times) >= 200.0


def test_a_prelude_is_not_counted(seam):
    timer = CudaTimer(seam)
    kernels = baselines.Baselines(seam)
    graph = timer.capture([kernels.empty()] * 4)
    times = timer.replay(graph, 5, lambda microseconds: kernels.spin(20_000.0)())
    assert max(times) < 10_000.0


def test_a_recorded_launch_is_that_of_the_insert(seam):
    device = _device.select("cuda")
    machine = bench.make_machine(device)
    operation = OPERATIONS["insert"]
    settings = bench.Settings(layers=2, tokens=(7,), formats=("fp8_e4m3",), block_size=16)
    (problem, _) = bench.session.problems(settings, operation)

    def first():
        instance = operation.make(problem, machine.arrays)
        instance.run()
        return instance

    launch = machine.timer.recorded_launch(first)
    projection = launch.keep.arrays["projection"]
    assert int.from_bytes(launch.arguments[:8], "little") == projection.data.ptr
    assert launch.grid >= 2
    assert cupy.cuda.runtime.getDevice() == 0


def test_warmup(capsys):
    assert main(["warmup", "--layout", "fp8_ds_mla", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["count"] == len(document["kernels"]) > 0
    assert document["arch"].startswith("sm_")
