"""The cases of audits, on device arrays of each framework."""

from tests.cpu.test_audit import *  # noqa: F403

# Host arrays alone.
del test_memory_does_not_grow_with_the_cache  # noqa: F821
del test_torch_caches_are_read  # noqa: F821
