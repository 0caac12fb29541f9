"""The kernels that read rows under the address and undefined-behaviour sanitizers.

Those see what the emulator lets pass: accesses of words off their alignment, and beyond an array.
"""

from __future__ import annotations

import pytest

from tests.emulator.test_sanitizers import run

CASES = "alignments or byte_caches or other_widths or indexer_keys or slots or go_to_the_host"


@pytest.mark.parametrize("name", ["test_gather.py", "test_convert.py"])
def test_reads_pass_under_sanitizers(name):
    done = run(
        *("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-n", "0", "-k", CASES),
        f"tests/emulator/{name}",
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout
