"""The insert kernel under the address and undefined-behaviour sanitizers, in a process of its own.

NumPy's memory comes from malloc, so that a byte beyond an input or a cache is seen.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulator import device as emulator

ROOT = Path(__file__).resolve().parent.parent.parent

OVERRUN = """
from dataclasses import replace
import numpy as np
from tests.emulator import harness
from tests.emulator.device import EmulatorDevice
case = harness.make_case(np.random.default_rng(1), "fp8_e4m3", "bfloat16", layers=1, tokens=3)
{change}
harness.launch(EmulatorDevice(), case, "inline")
"""


def _environment() -> dict[str, str]:
    libraries = [
        subprocess.run(
            [emulator.compiler()[0], f"-print-file-name={name}"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    return {
        **os.environ,
        "LD_PRELOAD": " ".join(libraries),
        # Python keeps memory to its end; and kernels' stacks are made by hand.
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:abort_on_error=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        emulator.SANITIZE: "1",
    }


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the sanitizers in front."""
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=_environment(), capture_output=True, text=True
    )


def test_the_kernel_tests_pass_under_sanitizers():
    tests = ("test_insert.py", "test_insert_values.py", "test_exact_math.py")
    done = run(
        *("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-n", "0"),
        *("-k", "not 2_gib and not more_tokens"),
        *(f"tests/emulator/{name}" for name in tests),
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize(
    "change",
    [
        "case.tokens = 4  # of 3",
        "case.kv_c, case.tokens = case.kv_c.copy()[:, ::-1], 4",
        "case.slots = np.array([0, 1])[:, None].copy()[:, 0]; case.tokens = 3",
        "case.caches[0].geometry = replace(case.caches[0].geometry, num_blocks=99)\n"
        "case.slots = np.array([0, 1, 16])  # of 16",
    ],
)
def test_an_access_beyond_an_array_is_seen(change):
    done = run("-c", OVERRUN.format(change=change))
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr, done.stderr[-3000:]


def test_undefined_behaviour_is_seen():
    body = """
from tests.emulator.test_emulator import run
run("out[0] = 1 << (thread + 1);")
"""
    done = run("-c", body)
    assert done.returncode != 0
    assert "runtime error: shift exponent" in done.stderr
