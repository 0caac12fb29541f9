"""The fused kernels under the address and undefined-behaviour sanitizers."""

from __future__ import annotations

import pytest

from tests.emulator.test_sanitizers import run

# One specialisation of each kind: compiling them all with sanitizers takes minutes.
KINDS = "bfloat16-bfloat16 or e5m2-float32 or ds_mla"
CASES = {
    "test_context.py": f"{KINDS} or far_slots",
    "test_norm_rope.py": f"{KINDS} or query_widths or rotary or rows_of_indices or any_keys",
    "test_query.py": "test",
}


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_tests_pass_under_sanitizers(name):
    done = run(
        *("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-n", "0"),
        *("-k", f"({CASES[name]}) and not any_case"),
        f"tests/emulator/{name}",
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout
