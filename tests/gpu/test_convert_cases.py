"""The cases of conversions, on device arrays of each framework."""

from tests.cpu.test_convert import *  # noqa: F403

# Host arrays alone.
del test_offsets_beyond_two_gigabytes  # noqa: F821
del test_no_float_copy_of_the_cache_is_made  # noqa: F821
