"""The cases of audits, on emulated device arrays."""

from tests.cpu.test_audit import *  # noqa: F403
