"""The cases of the NumPy backend, on emulated device arrays."""

from tests.cpu.test_cases_addressing import *  # noqa: F403
from tests.cpu.test_cases_ds_mla import *  # noqa: F403
from tests.cpu.test_cases_fp8 import *  # noqa: F403
from tests.cpu.test_cases_slots import *  # noqa: F403
