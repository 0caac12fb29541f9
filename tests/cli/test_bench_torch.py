"""What the benchmark does with torch, on host tensors: the same bytes as the operations."""

from __future__ import annotations

import functools
import os
import sys
import types

import ml_dtypes
import numpy as np
import pytest

from cupy_mla import get_layout
from cupy_mla.bench import host_calls, oracle, peers, pipelines, step, torch_op, verify
from cupy_mla.bench.measure import Bench
from cupy_mla.bench.operations import OPERATIONS
from cupy_mla.bench.problem import Problem, random_values
from tests.cli.bench_machine import make_machine

torch = pytest.importorskip("torch")

FORMATS = ("bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla")
RNG = np.random.default_rng(5)


def problem(name="insert", fmt="fp8_e4m3", layers=1, tokens=9, pattern="random"):
    return Problem(name, get_layout(fmt), layers, tokens, 4, pattern)


def host(tensor):
    return tensor.contiguous().view(torch.uint8).numpy()


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "float8_e4m3fn", "int64"])
def test_a_tensor_shares_the_array_s_memory(name):
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    array = np.arange(12).reshape(3, 4).astype(dtype)
    tensor = pipelines.tensor(torch, array)
    assert tensor.dtype == getattr(torch, name)
    assert tensor.shape == (3, 4)
    assert tensor.data_ptr() == array.ctypes.data


def test_a_tensor_of_no_axis():
    tensor = pipelines.tensor(torch, np.array(2.5, np.float32))
    assert (tensor.shape, float(tensor)) == ((), 2.5)


@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_of_torch_are_those_of_ml_dtypes(fmt):
    layout = get_layout(fmt)
    rows = random_values((37, 576), layout.input_dtypes[0], seed=7)
    scale = np.float32(0.0375)
    stored = pipelines.encode_rows(
        torch, pipelines.tensor(torch, rows), layout, torch.tensor(float(scale))
    )
    expected = oracle.stored_rows(layout, rows, float(scale))
    if layout.tile:  # torch multiplies by 1 / 448
        scales = slice(512, 528)
        ours, theirs = (part[:, scales].copy().view("<f4") for part in (expected, host(stored)))
        np.testing.assert_array_max_ulp(ours, theirs, maxulp=1)
        same = (ours.view(np.uint32) == theirs.view(np.uint32)).all(axis=1)
        assert same.any()
        assert (host(stored)[same] == expected[same]).all()
    else:
        assert (host(stored) == expected).all()
    read = pipelines.decode_rows(
        torch, torch.from_numpy(expected), layout, torch.tensor(float(scale))
    )
    want = oracle.read_rows(layout, expected, float(scale))
    assert (read.numpy() == want).all()


def test_norms_and_rope_of_torch_are_those_of_float64():
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    rows = random_values((11, 64), bfloat16)
    weight, bias = (random_values((64,), bfloat16, seed=seed) for seed in (1, 2))
    table = RNG.standard_normal((11, 64)).astype(np.float32)
    tensors = [pipelines.tensor(torch, array) for array in (rows, weight, bias, table)]
    pairs = [
        (pipelines.rms_norm(*tensors[:2], 1e-6), oracle.rms_norm(rows, weight, 1e-6)),
        (
            pipelines.layer_norm(torch, *tensors[:3], 1e-6),
            oracle.layer_norm(rows, weight, bias, 1e-6),
        ),
    ]
    for is_neox in (False, True):
        rotated = pipelines.rotate(torch, tensors[0], tensors[3], is_neox=is_neox)
        pairs.append((rotated, oracle.rotate(rows, table, is_neox=is_neox)))
    for found, wanted in pairs:
        assert found.dtype == torch.bfloat16
        expected = oracle.close(wanted, bfloat16, rotated=True)
        assert expected.differences(host(found).view(bfloat16)) == 0


def test_index_keys_of_torch():
    rows = torch.tensor([[3.5] * 127 + [-448.0], [0.0] * 128, [1.0] * 127 + [449.0]])
    codes, scales = pipelines.index_key(torch, rows)
    assert scales.tolist() == [1.0, 2.0**-22, 2.0]
    assert codes[0, -1] == 0xFE
    assert codes.shape == (3, 128)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", list(OPERATIONS))
def test_ways_of_torch_run_on_the_buffers_of_an_operation(name, fmt):
    """And those that are said to be exact are, by the check that `--check` makes."""
    operation = OPERATIONS[name]
    machine = make_machine(torch)
    chosen = problem(name, fmt, 2 if operation.layered else 1)
    instance = operation.make(chosen, machine.arrays, machine)
    ours = {key: value for key, value in instance.alternatives.items() if value.torch}
    assert ours or name == "convert"
    for alternative in ours.values():
        alternative.call()
    checks = verify.check_device(operation, chosen, machine)
    exact = [key for key, value in instance.alternatives.items() if value.exact]
    assert [check.subject for check in checks] == ["cupy_mla", *exact]
    assert ("torch" in exact) == ((name == "insert" and fmt != "fp8_ds_mla") or name == "gather")
    assert [check.first for check in checks] == [None] * len(checks)


@pytest.mark.parametrize("name", ["context", "norm-rope", "q"])
def test_ways_of_torch_come_near_the_operation(name):
    operation = OPERATIONS[name]
    machine = make_machine(torch)
    chosen = problem(name, "float32", 2 if operation.layered else 1)
    instance = operation.make(chosen, machine.arrays, machine)
    way = instance.alternatives["torch, six steps" if name == "context" else "torch"]
    way.call()
    for output, expected in operation.expect(chosen, instance):
        if output != "indexer cache":  # its rows are computed, and not put in place
            wrong = expected.differences(instance.outputs[output])
            # Another order of sums may round to the other side of a tie; bytes are not rounded.
            ties = 0 if expected.tolerance is None else expected.values.size // 500
            assert wrong <= ties, output


def test_other_libraries_are_noted_where_they_are_missing():
    machine = make_machine(torch)
    OPERATIONS["insert"].make(problem(fmt="bfloat16"), machine.arrays, machine)
    assert set(machine.notes) == {"vLLM", "vLLM grouped", "FlashInfer", "SGLang"}
    assert all(note.startswith("not importable") for note in machine.notes.values())


def fake_vllm(monkeypatch, calls):
    """Register what vLLM registers: operations that store what the pipeline stores."""

    def insert(kv_c, k_pe, cache, slots, name, scale):
        calls.append((name, scale.shape, cache.dtype))
        layout = get_layout(name if name != "auto" else str(cache.dtype).partition(".")[2])
        stored = pipelines.encode_rows(torch, torch.cat([kv_c, k_pe], 1), layout, scale[0])
        pipelines.store_rows(cache.view(torch.uint8), slots, stored)

    def grouped(kv_c, k_pe, pointers, slots, block_size, block_stride, row_stride, scales, name):
        calls.append((name, slots.shape, block_size, block_stride, row_stride, len(pointers)))

    ops = types.SimpleNamespace(concat_and_cache_mla=insert, concat_and_cache_mla_grouped=grouped)
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm._C", types.ModuleType("vllm._C"))
    monkeypatch.setattr(torch.ops, "_C_cache_ops", ops, raising=False)


@pytest.mark.parametrize(
    ("fmt", "name", "dtype"),
    [
        ("bfloat16", "auto", torch.bfloat16),
        ("fp8_e5m2", "fp8_e5m2", torch.uint8),
        ("fp8_ds_mla", "fp8_ds_mla", torch.uint8),
    ],
)
def test_vllm_is_called_as_it_wants_to_be(monkeypatch, fmt, name, dtype):
    calls = []
    fake_vllm(monkeypatch, calls)
    machine = make_machine(torch)
    instance = OPERATIONS["insert"].make(problem(fmt=fmt, layers=3), machine.arrays, machine)
    instance.alternatives["vLLM"].call()
    assert calls == [(name, (1,), dtype)] * 3
    assert instance.alternatives["vLLM"].exact == (fmt != "fp8_ds_mla")
    width = 656 if fmt == "fp8_ds_mla" else 576
    instance.alternatives["vLLM grouped"].call()
    assert calls[3:] == [(name, (3, 9), 4, 4 * width, width, 3)]


def test_flashinfer_and_sglang_are_called_as_they_want_to_be(monkeypatch):
    calls = []
    page = types.ModuleType("flashinfer.page")
    page.append_paged_mla_kv_cache = lambda *arrays: calls.append([a.shape for a in arrays])
    utils = types.ModuleType("sglang.srt.mem_cache.utils")

    def set_mla_kv_buffer_triton(buffer, loc, nope, rope):
        assert nope.shape[1:] == (1, 512)
        buffer[loc] = torch.cat([nope, rope], dim=2)

    utils.set_mla_kv_buffer_triton = set_mla_kv_buffer_triton
    for module in (page, utils):
        parts = module.__name__.split(".")
        for count in range(1, len(parts)):
            name = ".".join(parts[:count])
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    machine = make_machine(torch)
    chosen = problem(fmt="bfloat16", layers=2)
    instance = OPERATIONS["insert"].make(chosen, machine.arrays, machine)
    instance.alternatives["FlashInfer"].call()
    cache = torch.Size((chosen.pool_blocks, 4))
    assert (
        calls
        == [[(9, 512), (9, 64), (9,), (9,), (*cache, 512), (*cache, 64), (9,), (10,), (9,)]] * 2
    )
    checks = verify.check_device(OPERATIONS["insert"], chosen, machine)
    assert "SGLang" in [check.subject for check in checks]
    assert [check.differences for check in checks] == [0] * len(checks)


def test_a_library_of_another_signature_is_noted(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm._C", types.ModuleType("vllm._C"))
    monkeypatch.setattr(torch.ops, "_C_cache_ops", types.SimpleNamespace(), raising=False)
    machine = make_machine(torch)
    OPERATIONS["insert"].make(problem(), machine.arrays, machine)
    assert machine.notes["vLLM"].startswith("failed (AttributeError: ")


def test_what_fails_while_it_is_measured_is_noted_and_the_rest_goes_on(monkeypatch):
    def refuse(step, machine):
        def call():
            raise RuntimeError("no kernel image\nis available")

        return peers.Alternative(call, torch=True)

    monkeypatch.setattr(peers, "_torch", refuse)
    machine = make_machine(torch)
    row = Bench(machine, 3).row(OPERATIONS["insert"], problem(), cold=True)
    assert machine.notes["torch"] == "failed (RuntimeError: no kernel image)"
    assert "torch" not in row.alternatives
    assert "scalar" in row.alternatives


@pytest.mark.parametrize("fmt", FORMATS)
def test_host_calls_are_measured_with_arrays_of_both_frameworks(fmt):
    machine = make_machine(torch)
    rows = host_calls.measure(
        OPERATIONS["insert"], [problem(fmt=fmt, layers=2)], machine, batch=2, rounds=3
    )
    functions = ["bind()", "GroupedCacheWriter.insert", "concat_and_cache_mla, one layer"]
    names = [(row.name, row.arrays) for row in rows]
    steps = ["looks of the arrays", "launch found by looks", "kernel launched with torch"]
    assert names[:4] == [
        *((name, "CuPy") for name in functions),
        ("insert by step: kernel launched with cupy", "CuPy"),
    ]
    assert names[4:10] == [
        *((name, "torch") for name in functions),
        *((f"insert by step: {name}", "torch") for name in steps),
    ]
    assert names[-1] == ("cupy.RawKernel, 15 arguments", "CuPy")
    assert rows[0].to_dict()["us"] == {"median": 6.0, "min": 5.0, "p90": pytest.approx(6.8)}


@pytest.fixture
def triton(monkeypatch):
    """Put a module in the place of the one that needs Triton; return the calls of its kernels."""
    calls = []

    def maker(name):
        def make(problem, instance, module):
            assert module is torch
            run = functools.partial(calls.append, (name, problem.tokens))
            return peers.Alternative(run, exact=False, torch=True)

        return make

    module = types.ModuleType("cupy_mla.bench.triton_ways")
    module.norm_rope, module.query = maker("norm_rope"), maker("query")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls


@pytest.mark.parametrize(("name", "made"), [("norm-rope", "norm_rope"), ("q", "query")])
def test_kernels_of_triton_are_measured_beside_an_operation(triton, name, made):
    machine = make_machine(torch)
    sizes = [problem(name, "bfloat16", tokens=tokens) for tokens in (1, 5)]
    row = Bench(machine, 3).row(OPERATIONS[name], sizes[0], cold=True)
    assert {"torch", "Triton"} <= set(row.alternatives)
    assert set(triton) == {(made, 1)}
    rows = host_calls.measure(OPERATIONS[name], sizes, machine, batch=2, rounds=3)
    assert [row.problem.tokens for row in rows if row.name == "Triton"] == [1]
    ours = [row.problem.tokens for row in rows if row.name.startswith("fused_")]
    assert sorted(set(ours)) == [1, 5]
    assert machine.notes == {}


def test_kernels_of_triton_that_fail_are_noted(triton, monkeypatch):
    def refuse(*_):
        raise RuntimeError("no such type")

    machine = make_machine(torch)
    chosen = [problem("q", "bfloat16", tokens=1)]
    ways = sys.modules["cupy_mla.bench.triton_ways"]
    monkeypatch.setattr(ways, "query", lambda *_: peers.Alternative(refuse, torch=True))
    rows = host_calls.measure(OPERATIONS["q"], chosen, machine, batch=2, rounds=3)
    assert "Triton" not in {row.name for row in rows}
    assert machine.notes == {"Triton, host times": "failed (RuntimeError: no such type)"}
    monkeypatch.setattr(ways, "query", refuse)
    row = Bench(machine, 3).row(OPERATIONS["q"], chosen[0], cold=True)
    assert "Triton" not in row.alternatives
    assert machine.notes["Triton"] == "failed (RuntimeError: no such type)"


def test_arrays_of_torch_and_back():
    arrays = host_calls.TorchArrays(torch, "cpu")
    values = np.arange(6).reshape(2, 3).astype(ml_dtypes.float8_e5m2)
    tensor = arrays.to_device(values)
    assert tensor.dtype == torch.float8_e5m2
    assert (arrays.to_host(tensor) == values.view(np.uint8)).all()


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_step_with_torch(monkeypatch, fmt):
    monkeypatch.setattr(step, "HIDDEN", 32)
    machine = make_machine(torch)
    row = step.measure(problem(fmt=fmt, layers=2, tokens=5), machine, Bench(machine, 2))
    assert row.framework == "torch"
    assert list(row.figures) == [step.NOTHING, step.OURS, step.FRAMEWORK]
    assert row.to_dict()["steps"][step.OURS]["added_us"] == pytest.approx(0.0)


def test_without_a_compiler_there_is_no_torch_op(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match="no C\\+\\+ compiler"):
        torch_op.build(torch)


def test_a_torch_op_that_does_not_compile_says_why(monkeypatch, tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'x.cpp:1:2: error: no such header' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(torch_op, "_folder", lambda: tmp_path)
    with pytest.raises(RuntimeError, match=r"^x\.cpp:1:2: error: no such header$"):
        torch_op.build(torch)
    assert [path.name for path in tmp_path.iterdir()] == ["compiler"]


def test_a_torch_op_is_compiled_once(monkeypatch, tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text(
        "#!/bin/sh\nwhile [ $# -gt 1 ]; do [ $1 = -o ] && echo made >> $2; shift; done\n"
        f"echo run >> {tmp_path}/runs\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(torch_op, "_folder", lambda: tmp_path)
    first, second = torch_op.build(torch), torch_op.build(torch)
    assert first == second
    assert first.read_text() == "made\n"
    assert (tmp_path / "runs").read_text() == "run\n"


def test_the_folder_of_the_torch_op_is_the_user_s_own(monkeypatch, tmp_path):
    monkeypatch.setattr(torch_op.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = torch_op._folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    (tmp_path / "cupy_mla_bench_12345").mkdir()
    with pytest.raises(RuntimeError, match="belongs to somebody else"):
        torch_op._folder()
