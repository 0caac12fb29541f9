"""The cases of fused_norm_rope, on emulated device arrays."""

from tests.cpu.test_norm_rope import *  # noqa: F403
from tests.cpu.test_norm_rope_layer import *  # noqa: F403
from tests.cpu.test_norm_rope_rules import *  # noqa: F403
