"""One emulated device for a run: kernels are compiled once, and found again by the next run."""

from __future__ import annotations

import pytest

from tests.emulator.device import EmulatorDevice

pytest.register_assert_rewrite("tests.emulator.harness")


@pytest.fixture(scope="session")
def device() -> EmulatorDevice:
    """Host memory in place of a GPU."""
    return EmulatorDevice()
