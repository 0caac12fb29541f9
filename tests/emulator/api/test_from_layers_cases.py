"""The cases of from_layers, on emulated device arrays."""

from tests.cpu.test_from_layers import *  # noqa: F403
