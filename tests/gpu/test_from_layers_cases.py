"""The cases of from_layers that insert, on device arrays of each framework."""

from tests.cpu.test_from_layers import *  # noqa: F403

# On NumPy alone, or on tensors of the host.
del test_a_layer_that_does_not_go_with_the_first_one_is_named  # noqa: F821
del test_other_faults_name_the_layer_too  # noqa: F821
del test_no_layer_and_unknown_attributes  # noqa: F821
del test_layers_of_torch  # noqa: F821
