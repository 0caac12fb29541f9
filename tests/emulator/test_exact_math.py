"""The host twins of the inline PTX, against NumPy: the emulator rests on them."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_mla._cuda.device import Arguments
from tests import oracle
from tests.emulator import probe


def run(device, a, b, c) -> dict[str, np.ndarray]:
    """Run the probe on a device whose memory is the host's."""
    out = np.zeros((len(probe.OPERATIONS), a.size), np.uint32)
    pointers = [array.ctypes.data for array in (a, b, c, out)]
    function = device.compile(probe.source(), probe.ENTRY)
    arguments = Arguments(np.array([*pointers, a.size], np.uint64).tobytes())
    device.launch(function, -(-a.size // 128), (128, 1), arguments, 0)
    return dict(zip(probe.OPERATIONS, out, strict=True))


@pytest.fixture(scope="module")
def results(device):
    a, b, c = probe.operands(np.random.default_rng(7))
    return a, b, run(device, a, b, c), probe.expected(a, b, c)


@pytest.mark.parametrize("name", probe.OPERATIONS)
def test_operation(results, name):
    a, b, got, want = results
    wrong = probe.differences(name, a, b, got[name], want[name])
    assert not wrong.size, [
        f"{name}({a[i]!r}, {b[i]!r}) = {got[name][i]:08X}, not {want[name][i]:08X}"
        for i in wrong[:5]
    ]
    assert probe.comparable(name, a, b, want[name]).sum() > 10_000


def test_every_code_is_reached(results):
    _, _, got, _ = results
    assert len(np.unique(got["cvt_e4m3_soft"])) == 255  # FF is a NaN without its sign: 7F
    assert len(np.unique(got["cvt_e5m2_soft"])) == 249  # as are 7C to 7E, and Inf saturates
    codes = np.arange(256, dtype=np.uint8)
    for fmt, name in (("fp8_e4m3", "cvt_e4m3_soft"), ("fp8_e5m2", "cvt_e5m2_soft")):
        numbers = codes.view(oracle.CODE_DTYPES[fmt]).astype(np.float32)
        assert np.isin(codes[np.isfinite(numbers)], got[name]).all()
