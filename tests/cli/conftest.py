"""The machine as the command line sees it: its terminal, CuPy and GPUs."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest

from cupy_mla import backends
from cupy_mla.cli import _device, bench
from tests.cli.bench_machine import make_machine


@pytest.fixture(autouse=True)
def wide_plain_terminal(monkeypatch):
    """Print for 120 columns without colour, whatever the machine's own terminal is."""
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture
def no_cupy(monkeypatch):
    """A machine on which CuPy is not installed."""
    real = _device.installed
    monkeypatch.setattr(_device, "installed", lambda name: name != "cupy" and real(name))
    monkeypatch.delitem(sys.modules, "cupy", raising=False)


def fake_cupy():
    """What `info` and `select` read of CuPy, for a machine with two GPUs."""
    properties = {
        "name": b"NVIDIA H200",
        "major": 9,
        "minor": 0,
        "totalGlobalMem": 150 << 30,
        "multiProcessorCount": 132,
    }
    runtime = types.SimpleNamespace(
        getDevice=lambda: 1,
        getDeviceCount=lambda: 2,
        getDeviceProperties=lambda index: properties | {"name": f"NVIDIA GPU {index}".encode()},
        driverGetVersion=lambda: 13000,
        runtimeGetVersion=lambda: 12090,
    )
    module = types.ModuleType("cupy")
    module.cuda = types.SimpleNamespace(
        runtime=runtime, nvrtc=types.SimpleNamespace(getVersion=lambda: (12, 9))
    )
    return module


@pytest.fixture
def with_gpu(monkeypatch, tmp_path):
    """A machine where CuPy and two GPUs can be used."""
    module = fake_cupy()
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(backends, "cuda", lambda device: object())
    monkeypatch.delenv("CUPY_CACHE_IN_MEMORY", raising=False)
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.82.07  Wed Aug 27\n")
    monkeypatch.setattr(_device, "_DRIVER_FILE", driver)
    return module


@pytest.fixture
def machine(monkeypatch):
    """For the benchmark: a CUDA device with made-up times in place of whatever there is."""
    made = make_machine()
    device = _device.Device("CUDA", "Emulated GPU", "for a test", np, repeats=3)
    monkeypatch.setattr(bench, "select", lambda request: device)
    monkeypatch.setattr(bench, "make_machine", lambda device: made)
    return made
