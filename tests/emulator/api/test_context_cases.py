"""The cases of insert_context, on emulated device arrays."""

from tests.cpu.test_insert_context import *  # noqa: F403
