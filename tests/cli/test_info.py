"""`cupy-mla info`."""

from __future__ import annotations

import functools
import importlib.metadata
import re
import sys
from importlib.util import find_spec

import ml_dtypes
import numpy as np
import pytest

import cupy_mla
from cupy_mla import BackendUnavailable, backends
from cupy_mla.cli import _device, info, main
from tests.cli.helpers import run_json


def install(folder, monkeypatch, *distributions):
    """Make these the only distributions: (name, version) each."""
    for name, version in distributions:
        metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        metadata.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (metadata / "METADATA").write_text(text)
    found = functools.partial(importlib.metadata.distributions, path=[str(folder)])
    monkeypatch.setattr(importlib.metadata, "distributions", found)


def test_info_tells_the_versions_that_are_installed(capsys, no_cupy):
    status, document = run_json(capsys, "info")
    assert status == 0
    assert document["cupy_mla"] == cupy_mla.__version__
    assert document["python"] == ".".join(str(part) for part in sys.version_info[:3])
    assert document["packages"]["numpy"] == np.__version__
    assert document["packages"]["ml_dtypes"] == ml_dtypes.__version__
    assert (document["packages"]["cupy"] is None) == (find_spec("cupy") is None)
    assert set(document["packages"]) == {"numpy", "ml_dtypes", "torch", "triton", "jax", "cupy"}
    assert document["backend"] == "NumPy"
    assert "CuPy is not installed" in document["reason"]
    assert document["cuda"] is None
    assert document["warnings"] == []
    assert re.fullmatch("[0-9a-f]{64}", document["kernel_sources"]["sha256"])
    assert document["kernel_sources"]["files"] > 0


def test_info_text_has_everything_that_its_json_has(capsys, no_cupy):
    _, document = run_json(capsys, "info")
    main(["info"])
    text = capsys.readouterr().out
    shown = dict(re.findall(r"^  (\S+(?: \S+)*)\s{2,}(\S.*?)\s*$", text, re.MULTILINE))
    for name, version in document["packages"].items():
        assert shown[name] == (version or "not installed")
    assert shown["cupy_mla"] == document["cupy_mla"]
    assert shown["python"] == document["python"]
    assert shown["platform"] == document["platform"]
    assert shown["default"] == document["backend"]
    assert shown["why"] == document["reason"]
    assert document["kernel_sources"]["sha256"][:16] in shown["kernel sources"]


def test_info_tells_which_modules_are_missing(capsys, monkeypatch):
    monkeypatch.setattr(_device, "installed", lambda name: name in ("numpy", "ml_dtypes"))
    _, document = run_json(capsys, "info")
    missing = {name for name, version in document["packages"].items() if version is None}
    assert {"torch", "jax"} <= missing


def test_info_of_a_module_without_metadata(capsys, monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    _, document = run_json(capsys, "info")
    assert document["packages"]["numpy"] == "of unknown version"


@pytest.mark.parametrize(
    "wheels",
    [
        [("cupy-cuda12x", "14.2.0"), ("cupy-cuda13x", "14.1.0")],
        [("cupy", "14.2.0"), ("cupy_cuda12x", "14.2.0")],
        [("CuPy", "13.6.0"), ("cupy-rocm-5-0", "13.6.0")],
        [("cupy-cuda115", "9.0"), ("cupy-cuda12x", "14.2.0"), ("cupy-cuda13x", "14.2.0")],
    ],
)
def test_info_warns_of_cupy_wheels_side_by_side(capsys, monkeypatch, tmp_path, no_cupy, wheels):
    install(tmp_path, monkeypatch, *wheels, ("numpy", "2.0"), ("cupy-chol", "0.1"))
    _, document = run_json(capsys, "info")
    [warning] = document["warnings"]
    names = [name.lower().replace("_", "-") for name, _ in wheels]
    assert " and ".join(names) in warning
    assert f"pip uninstall {' '.join(names)}," in warning
    assert "cupy-chol" not in warning
    for name, (_, version) in zip(names, wheels, strict=True):
        assert f"{version} ({name})" in document["packages"]["cupy"]
    assert main(["info"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"Warning: {warning}" in text


@pytest.mark.parametrize(
    "wheels", [[], [("cupy-cuda13x", "14.2.0")], [("cupy-xarray", "1"), ("cupy", "14.2.0")]]
)
def test_info_has_nothing_to_warn_of_with_one_cupy_wheel(
    capsys, monkeypatch, tmp_path, no_cupy, wheels
):
    install(tmp_path, monkeypatch, *wheels)
    _, document = run_json(capsys, "info")
    assert document["warnings"] == []
    main(["info"])
    assert "Warning" not in capsys.readouterr().out


def test_info_describes_gpus_driver_and_compiler(capsys, with_gpu, tmp_path):
    _, document = run_json(capsys, "info")
    assert document["backend"] == "CUDA"
    cuda = document["cuda"]
    assert [gpu["name"] for gpu in cuda["gpus"]] == ["NVIDIA GPU 0", "NVIDIA GPU 1"]
    assert cuda["gpus"][1] == {
        "index": 1,
        "name": "NVIDIA GPU 1",
        "compute_capability": "9.0",
        "memory_bytes": 150 << 30,
        "multiprocessors": 132,
    }
    assert cuda["driver"] == "580.82.07"
    assert (cuda["driver_cuda"], cuda["runtime_cuda"], cuda["nvrtc"]) == ("13.0", "12.9", "12.9")
    assert cuda["kernel_cache_dir"] == str(tmp_path)
    main(["info"])
    text = capsys.readouterr().out
    for expected in (
        r"default +CUDA",
        r"driver +580\.82\.07 \(CUDA 13\.0\)",
        r"NVRTC +12\.9",
        r"name +NVIDIA GPU 1",
        r"memory +150\.0 GiB",
        rf"kernel cache +{re.escape(str(tmp_path)[:40])}",
    ):
        assert re.search(expected, text)


def test_info_shows_the_default_cache_folder_and_the_cache_in_memory(capsys, monkeypatch, with_gpu):
    monkeypatch.delenv("CUPY_CACHE_DIR")
    _, document = run_json(capsys, "info")
    assert document["cuda"]["kernel_cache_dir"] == "~/.cupy/kernel_cache"
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")
    _, document = run_json(capsys, "info")
    assert document["cuda"]["kernel_cache_dir"] is None
    main(["info"])
    assert "in memory (CUPY_CACHE_IN_MEMORY=1)" in capsys.readouterr().out


def test_info_says_unknown_where_cupy_cannot_tell(capsys, monkeypatch, with_gpu, tmp_path):
    def fail(*_):
        raise RuntimeError("libnvrtc.so is missing")

    monkeypatch.setattr(with_gpu.cuda.nvrtc, "getVersion", fail)
    monkeypatch.setattr(with_gpu.cuda.runtime, "getDeviceCount", fail)
    monkeypatch.setattr(_device, "_DRIVER_FILE", tmp_path / "nothing")
    status, document = run_json(capsys, "info")
    assert status == 0
    assert document["cuda"]["nvrtc"] is None
    assert document["cuda"]["gpus"] == []
    assert document["cuda"]["driver"] is None
    main(["info"])
    assert re.search(r"NVRTC +unknown", capsys.readouterr().out)


@pytest.mark.parametrize("error", [BackendUnavailable, ImportError])
def test_info_gives_the_backends_own_reason(capsys, monkeypatch, with_gpu, error):
    def unavailable(device):
        raise error("the NVIDIA driver is too old")

    monkeypatch.setattr(backends, "cuda", unavailable)
    _, document = run_json(capsys, "info")
    assert document["backend"] == "NumPy"
    assert document["reason"] == "the NVIDIA driver is too old"


def test_info_without_kernel_sources(capsys, monkeypatch, no_cupy):
    def missing():
        raise FileNotFoundError("no sources")

    monkeypatch.setattr(info._kernel_files, "names", missing)
    status, document = run_json(capsys, "info")
    assert status == 0
    assert document["kernel_sources"] is None
    main(["info"])
    assert re.search(r"kernel sources +missing", capsys.readouterr().out)
