"""The fused kernels under the address and undefined-behaviour sanitizers."""

from __future__ import annotations

import pytest

from tests.emulator.test_sanitizers import run


@pytest.mark.parametrize("name", ["test_context.py", "test_norm_rope.py", "test_query.py"])
def test_the_kernel_tests_pass_under_sanitizers(name):
    done = run(
        *("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-n", "0"),
        f"tests/emulator/{name}",
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout
