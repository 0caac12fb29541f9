"""The cases of gathers, on device arrays of each framework."""

from tests.cpu.test_gather import *  # noqa: F403

# Host arrays: beside those of a device, or of frameworks that may prefer a device here.
del test_a_read_only_cache_is_read  # noqa: F821
del test_torch_arrays_are_written_in_place  # noqa: F821
del test_jax_arrays_are_read_and_never_written  # noqa: F821
