"""The cases of fused_q, on device arrays of each framework."""

from tests.cpu.test_fused_q import *  # noqa: F403
from tests.cpu.test_fused_q_arrays import *  # noqa: F403

# Of NumPy alone, or of arrays in host memory.
del test_any_bits  # noqa: F821
del test_torch_gets_torch_float8  # noqa: F821
del test_jax_gets_jax_float8  # noqa: F821
del test_numpy_gets_ml_dtypes_float8  # noqa: F821
del test_what_does_not_fit_is_refused_and_nothing_written  # noqa: F821
del test_an_unquantised_output_has_the_inputs_dtype  # noqa: F821
