"""Where a command runs, and why."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from cupy_mla.cli import _device, main
from tests.cli.helpers import run_json


def test_without_cupy_auto_is_numpy_and_says_why(capsys, no_cupy):
    status, document = run_json(capsys, "demo", "--layers", "1", "--tokens", "9", "--format", "fp8")
    assert status == 0
    assert document["backend"] == "NumPy"
    assert "CuPy is not installed" in document["reason"]
    main(["demo", "--layers", "1", "--tokens", "9", "--format", "fp8"])
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("NumPy on the CPU (CuPy is not installed")


def test_without_cupy_a_demo_on_cuda_is_an_error_that_says_what_to_install(capsys, no_cupy):
    assert main(["demo", "--device", "cuda"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("cupy-mla demo: error: --device cuda: CuPy is not installed")
    assert "pip install 'cupy-mla[cuda12x]'" in captured.err


def test_devices_with_a_gpu(with_gpu):
    chosen = {request: _device.select(request) for request in _device.DEVICES}
    assert {request: device.backend for request, device in chosen.items()} == {
        "auto": "CUDA",
        "cpu": "NumPy",
        "cuda": "CUDA",
    }
    assert chosen["auto"].name == "NVIDIA GPU 1"  # the current device
    assert chosen["auto"].xp is with_gpu
    assert chosen["cpu"].xp is np
    assert chosen["cpu"].reason == "asked for by --device cpu"
    assert len({device.reason for device in chosen.values()}) == 3


def test_the_cpu_is_taken_without_a_look_at_cuda(monkeypatch):
    monkeypatch.setattr(_device, "cuda_missing", None)
    assert _device.select("cpu").backend == "NumPy"


def test_arrays_cross_to_a_device_and_back_with_their_dtype(with_gpu):
    """CuPy gets bytes only, as it does not know every dtype of ml_dtypes."""
    crossed = []

    def asarray(array):
        crossed.append(array.dtype)
        return array

    with_gpu.asarray = with_gpu.asnumpy = asarray
    device = _device.select("cuda")
    values = np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16)
    there = device.to_device(values)
    back = device.to_host(there)
    assert crossed == [np.dtype(np.uint8)] * 2
    assert there.dtype == back.dtype == values.dtype
    assert np.array_equal(there, values)
    assert np.array_equal(back, values)
