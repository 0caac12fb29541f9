"""The cases of rows read back, on device arrays of each framework."""

from tests.cpu.test_cases_readback import *  # noqa: F403
