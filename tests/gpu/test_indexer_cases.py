"""The cases of indexer_k_quant_and_cache, on device arrays of each framework."""

from tests.cpu.test_indexer import *  # noqa: F403

# Of NumPy alone, or of arrays in host memory.
del test_any_bits  # noqa: F821
del test_float8_and_head_axis  # noqa: F821
del test_torch_tensors  # noqa: F821
del test_what_does_not_fit_is_refused_and_nothing_written  # noqa: F821
del test_a_read_only_cache_is_refused  # noqa: F821
