"""The cases of fused_q, on emulated device arrays."""

from tests.cpu.test_fused_q import *  # noqa: F403
from tests.cpu.test_fused_q_arrays import *  # noqa: F403
