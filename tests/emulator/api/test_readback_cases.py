"""The cases of rows read back, on emulated device arrays."""

from tests.cpu.test_cases_readback import *  # noqa: F403
