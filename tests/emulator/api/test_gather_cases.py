"""The cases of gathers, on emulated device arrays."""

from tests.cpu.test_gather import *  # noqa: F403

# Host arrays beside those of the backend, or of frameworks that the emulator is none of.
del test_a_read_only_cache_is_read  # noqa: F821
del test_torch_arrays_are_written_in_place  # noqa: F821
del test_jax_arrays_are_read_and_never_written  # noqa: F821
