"""The cases of conversions, on emulated device arrays."""

from tests.cpu.test_convert import *  # noqa: F403
