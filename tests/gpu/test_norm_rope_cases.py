"""The cases of fused_norm_rope, on device arrays of each framework."""

from tests.cpu.test_norm_rope import *  # noqa: F403
from tests.cpu.test_norm_rope_layer import *  # noqa: F403
from tests.cpu.test_norm_rope_rules import *  # noqa: F403

# Of NumPy alone, or of arrays in host memory.
del test_the_tree_adds_in_the_order_it_says  # noqa: F821
del test_norms_of_any_float32_bits  # noqa: F821
del test_the_tree_is_not_the_plain_order  # noqa: F821
del test_torch_tensors_give_a_torch_tensor  # noqa: F821
del test_jax_arrays_give_a_jax_array_and_are_no_destination  # noqa: F821
