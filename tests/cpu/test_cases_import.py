"""Machines without CuPy, and machines with CuPy but without a driver."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

FAKES = """
    import numpy as np

    class Fake:
        pointer = 0x7F0000000000

        def __init__(self, shape, typestr):
            Fake.pointer += 1 << 20  # each has memory of its own
            self.shape, self.ndim, self.dtype = shape, len(shape), np.dtype(typestr)
            self.__cuda_array_interface__ = {
                "shape": shape, "typestr": typestr, "data": (self.pointer, False),
                "strides": None, "version": 3,
            }

        def __dlpack_device__(self):
            return (2, 0)
"""

PROGRAM = """
    import cupy_mla
    from cupy_mla import BackendUnavailable, GroupedCacheWriter, concat_and_cache_mla, read_slots

    cache = np.zeros((2, 4, 6), np.float32)
    kv_c, k_pe = np.full((1, 4), 2, np.float32), np.full((1, 2), 3, np.float32)
    concat_and_cache_mla(kv_c, k_pe, cache, np.array([5]))
    assert cache[1, 1].tolist() == [2, 2, 2, 2, 3, 3]
    writer = GroupedCacheWriter([cache], kv_lora_rank=4, rope_dim=2)
    writer.insert(kv_c[None], k_pe[None], np.array([2]))
    assert read_slots(cache, np.array([2, 5])).tolist() == [[2, 2, 2, 2, 3, 3]] * 2

    device = dict(
        kv_c=Fake((1, 4), "<f4"), k_pe=Fake((1, 2), "<f4"), kv_cache=Fake((2, 4, 6), "<f4"),
        slot_mapping=Fake((1,), "<i8"),
    )
    for call in (
        lambda: concat_and_cache_mla(**device),
        lambda: GroupedCacheWriter([device["kv_cache"]], kv_lora_rank=4, rope_dim=2),
        lambda: read_slots(device["kv_cache"], device["slot_mapping"]),
    ):
        try:
            call()
        except BackendUnavailable as error:
            assert isinstance(error, RuntimeError)
            assert WORD in str(error).lower(), error
            assert "\\n" not in str(error).strip(), error
        else:
            raise AssertionError("a device that is not there was used")
"""

# CuPy as it behaves without a driver: importing works, asking for a device does not.
CUPY_WITHOUT_DRIVER = """
    class CUDARuntimeError(RuntimeError):
        pass

    class _Runtime:
        is_hip = False

        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            if name == "CUDARuntimeError":
                return CUDARuntimeError

            def fail(*args, **kwargs):
                raise CUDARuntimeError("cudaErrorInsufficientDriver: driver version")

            return fail

    class ndarray:
        pass

    class _Cuda:
        runtime = _Runtime()

        def is_available(self):
            return False

        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            raise CUDARuntimeError("cudaErrorInsufficientDriver: driver version")

    cuda = _Cuda()
    __version__ = "14.2.0"
"""


def run_program(text, path=()):
    environment = dict(os.environ)
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    environment["PYTHONPATH"] = os.pathsep.join([*path, root])
    environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        [sys.executable, "-c", text],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_without_cupy_numpy_works_and_a_device_is_one_clear_error():
    hide = 'import sys\nsys.modules["cupy"] = None\nsys.modules["cupy_backends"] = None\n'
    word = 'WORD = "cupy"\n'
    run_program(hide + word + textwrap.dedent(FAKES) + textwrap.dedent(PROGRAM))


def test_with_cupy_but_no_driver_a_device_is_one_clear_error(tmp_path):
    package = tmp_path / "cupy"
    package.mkdir()
    (package / "__init__.py").write_text(textwrap.dedent(CUPY_WITHOUT_DRIVER))
    word = 'WORD = "driver"\n'
    run_program(word + textwrap.dedent(FAKES) + textwrap.dedent(PROGRAM), path=[str(tmp_path)])


@pytest.mark.parametrize("module", ["cupy", "torch", "jax"])
def test_import_does_not_import_a_framework(module):
    run_program(f"import sys, cupy_mla\nassert {module!r} not in sys.modules")
