"""The functions with inline PTX, on the device: equal to NumPy, and so to their host twins."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from cupy_mla._cuda import backend as backends
from cupy_mla._cuda.device import Arguments, Memory
from tests.emulator import probe
from tests.gpu import ptx75
from tests.gpu.frameworks import cupy


@pytest.mark.parametrize("target", ["own", "sm_75"])
def test_device_functions_equal_numpy(rng, target):
    a, b, c = probe.operands(rng)
    want = probe.expected(a, b, c)
    with ptx75.installed() if target == "sm_75" else contextlib.nullcontext():
        device = backends.for_device(ptx75.FIRST).device
        function = device.compile(probe.source(), probe.ENTRY)
    arrays = [cupy.asarray(values) for values in (a, b, c)]
    out = cupy.full((len(probe.OPERATIONS), a.size), 0xA5A5A5A5, cupy.uint32)
    fields = np.array([x.data.ptr for x in (*arrays, out)] + [a.size], np.uint64)
    device.launch(function, a.size // 256, (256, 1), Arguments(fields.tobytes()), 0)
    got = device.download(Memory(out.data.ptr, out.nbytes, out), 0).view(np.uint32)
    got = got.reshape(out.shape)
    for row, name in zip(got, probe.OPERATIONS, strict=True):
        wrong = probe.differences(name, a, b, row, want[name])
        first = wrong[:1]
        assert wrong.size == 0, (
            f"{name}: {wrong.size} of {a.size} differ, first a={a[first]} b={b[first]} "
            f"c={c[first]}: got {row[first]}, expected {want[name][first]}"
        )
