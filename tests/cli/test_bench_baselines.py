"""Kernels that operations are compared with: on the emulator they do what they stand for."""

from __future__ import annotations

import re

import numpy as np
import pytest

from cupy_mla import get_layout
from cupy_mla.bench import baselines, verify
from cupy_mla.bench.operations import OPERATIONS, insert
from cupy_mla.bench.problem import SENTINEL, Problem, spoil
from tests.cli.bench_machine import make_machine
from tests.emulator.device import EmulatorDevice
from tests.nvrtc import nvrtc

FORMATS = ("bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla")
VECTOR = 16
TILE = 1152


@pytest.fixture(scope="module")
def kernels():
    return baselines.Baselines(EmulatorDevice())


def memory_of(memory):
    return memory.owner.view(np.uint8)


@pytest.mark.parametrize("variant", baselines.COPY_VARIANTS, ids=str)
@pytest.mark.parametrize(
    ("reads", "writes"),
    [
        (1, 1),
        (TILE, TILE),
        (TILE + 1, TILE + 1),
        (5 * TILE - 7, 5 * TILE - 7),
        (72 * 50, 36 * 50),  # bfloat16 to fp8
        (72 * 50, 41 * 50),  # to fp8_ds_mla
        (144 * 40, 36 * 40),  # float32 to fp8
        (36 * 50, 72 * 50),  # fp8 read as bfloat16
        (3 * TILE, 1),
        (1, 3 * TILE),
    ],
)
def test_copy_writes_all_that_it_is_to_write_and_no_more(kernels, variant, reads, writes):
    source, destination = kernels.copy_buffers(reads * VECTOR, (writes + 1) * VECTOR)
    written = memory_of(destination)
    written[:] = SENTINEL
    call = kernels.copy((source, destination), reads * VECTOR, writes * VECTOR, variant)
    call()
    rows = written.reshape(-1, VECTOR)
    # Three words of each vector are those of one that was read, or zero where fewer are read.
    left = (rows == SENTINEL).all(axis=1)
    assert not left[:writes].any()
    assert left[writes:].all()
    if reads == writes:
        assert (rows[:writes, :12] == memory_of(source).reshape(-1, VECTOR)[:writes, :12]).all()


def test_copy_reads_as_much_as_it_says():
    """Each vector that is read decides a bit of what is written, or would be out of bounds."""
    kernels = baselines.Baselines(EmulatorDevice())
    reads, writes = 72 * 16, 41 * 16
    buffers = kernels.copy_buffers(reads * VECTOR, writes * VECTOR)
    call = kernels.copy(buffers, reads * VECTOR, writes * VECTOR, baselines.COPY_VARIANTS[0])
    call()
    before = memory_of(buffers[1]).copy()
    source = memory_of(buffers[0]).reshape(-1, VECTOR)
    # The words of a thread are mixed into the last word of what it stores; threads without any
    # store are those beyond the last tile_writes of a block.
    for vector in (0, 287, 288, 655, 700, 900):
        source[vector, 12] ^= 1
        call()
        assert (memory_of(buffers[1]) != before).any(), vector
        source[vector, 12] ^= 1


def test_bytes_are_rounded_up_to_vectors(kernels):
    source, destination = kernels.copy_buffers(17, 1)
    assert (source.nbytes, destination.nbytes) == (32, 16)


def test_source_of_a_copy_is_no_zeros(kernels):
    source, _ = kernels.copy_buffers(1 << 16, 16)
    assert len(np.unique(memory_of(source))) > 200


def problem(fmt, tokens=5, layers=2, block_size=4):
    return Problem("insert", get_layout(fmt), layers, tokens, block_size, "random")


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_published_shape_stores_the_same_bytes(fmt):
    machine = make_machine()
    checks = verify.check_device(OPERATIONS["insert"], problem(fmt), machine)
    assert [check.subject for check in checks] == ["cupy_mla", "per layer", "scalar"]
    assert [check.differences for check in checks] == [0, 0, 0]
    launched = [entry for entry, _, _ in machine.baselines.device.launches]
    assert launched == [f"bench_scalar_{fmt}_{problem(fmt).input_dtype.name}"]


@pytest.mark.parametrize("fmt", ["bfloat16", "fp8_ds_mla"])
def test_the_published_shape_is_a_block_a_token_and_layer(fmt):
    machine = make_machine()
    instance = OPERATIONS["insert"].make(problem(fmt), machine.arrays, machine)
    launch = instance.alternatives["scalar"].call
    assert launch.grid == 10
    assert launch.block == ((96, 1) if fmt == "fp8_ds_mla" else (512, 1))


def test_padding_is_not_stored():
    machine = make_machine()
    chosen = problem("fp8_e4m3")
    instance = OPERATIONS["insert"].make(chosen, machine.arrays, machine)
    instance.arrays["slots"][1:] = -1
    instance.alternatives["scalar"].call()
    for cache in instance.outputs.values():
        rows = cache.reshape(-1, 576)
        touched = np.flatnonzero((rows != SENTINEL).any(axis=1))
        assert touched.tolist() == [instance.arrays["slots"][0]]


@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_are_read_and_nothing_is_stored(kernels, fmt):
    chosen = problem(fmt, tokens=9)
    machine = make_machine()
    instance = OPERATIONS["insert"].make(chosen, machine.arrays)
    spoil(instance.outputs)
    slots = instance.arrays["slots"]
    read = kernels.read_rows(
        insert.caches_at(chosen, instance.arrays["caches"]), insert.address_of(slots), 9
    )
    read()
    assert (read.grid, read.block) == (2 * 2, (36, 8))
    assert all((cache.view(np.uint8) == SENTINEL).all() for cache in instance.outputs.values())


def test_what_keeps_a_device_busy_ends():
    device = EmulatorDevice()
    kernels = baselines.Baselines(device)
    for call in (kernels.empty(), kernels.spin(50.0), kernels.flush(1 << 14)):
        call()
    assert [entry for entry, _, _ in device.launches] == [
        "bench_empty",
        "bench_spin",
        "bench_read_all",
    ]


def test_a_wait_is_counted_in_cycles(kernels):
    cycles = np.frombuffer(kernels.spin(50.0).arguments.buffer, np.int64)
    assert cycles.tolist() == [150_000]


def test_a_kernel_is_compiled_once():
    device = EmulatorDevice()
    kernels = baselines.Baselines(device)
    for _ in range(3):
        kernels.empty()
    assert device.compiled == ["bench_empty"]


KERNELS = [
    ("empty", baselines.EMPTY_PARAMS),
    ("spin", baselines.SPIN_PARAMS),
    ("read_all", baselines.READ_ALL_PARAMS),
    ("copy", baselines.COPY_PARAMS),
    ("read_rows", baselines.READ_ROWS_PARAMS),
    ("scalar_ds_mla", baselines.SCALAR_PARAMS),
    ("scalar_insert<bench::Same<bench::Bfloat16>>", baselines.SCALAR_PARAMS),
    ("scalar_insert<bench::E4m3<bench::Bfloat16>>", baselines.SCALAR_PARAMS),
    ("scalar_insert<bench::E5m2<bench::Float32>>", baselines.SCALAR_PARAMS),
]


@pytest.mark.skipif(nvrtc.library() is None, reason="NVRTC is not installed (extra emulator)")
@pytest.mark.parametrize(("function", "params"), KERNELS, ids=[name for name, _ in KERNELS])
@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
def test_kernels_compile_without_local_memory(function, params, arch):
    compiled = nvrtc.compile_source(baselines.source(function, params, "bench_entry"), arch)
    assert (compiled.stack_bytes, compiled.spill_bytes) == (0, 0)


@pytest.mark.skipif(nvrtc.library() is None, reason="NVRTC is not installed (extra emulator)")
def test_what_is_only_read_is_read_by_vectors():
    """Loads whose values go nowhere are not left out, and are as wide as those of a copy."""
    for function, params in KERNELS[2:5]:
        ptx = nvrtc.compile_source(baselines.source(function, params, "bench_entry"), "sm_90").ptx
        assert "ld.global.v4.u32" in ptx or "ld.global.cs.v4.u32" in ptx, function


@pytest.mark.skipif(nvrtc.library() is None, reason="NVRTC is not installed (extra emulator)")
def test_the_published_shape_loads_and_stores_elements():
    source = baselines.source(*KERNELS[7], "bench_entry")
    ptx = nvrtc.compile_source(source, "sm_90").ptx
    accesses = re.findall(r"\b(ld|st)(?:\.global)?\.[a-z](8|16)\b", ptx)
    assert set(accesses) == {("ld", "16"), ("st", "8")}
    assert ".v4" not in ptx
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx


def test_the_digest_is_that_of_the_file():
    text = (baselines.importlib.resources.files(baselines.__package__) / "baselines.cu").read_text()
    assert baselines.hashlib.sha256(text.encode()).hexdigest() == baselines.digest()
