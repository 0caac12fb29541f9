"""The cases of insert_context, on device arrays of each framework."""

from tests.cpu.test_insert_context import *  # noqa: F403

del test_any_bits  # noqa: F821  (on NumPy alone)
