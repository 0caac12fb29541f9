"""The plugin with which CI refuses skips: it has to notice each kind of skip, and only those."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PLUGIN_FOLDER = Path(__file__).resolve().parent.parent / ".ci"

SKIPS = {
    "call": "def test_it(): pytest.skip('no reason')",
    "marker": "@pytest.mark.skipif(True, reason='no reason')\ndef test_it(): pass",
    "setup": "@pytest.fixture\ndef f(): pytest.skip('no reason')\ndef test_it(f): pass",
    "module": "pytest.importorskip('no_such_module')\ndef test_it(): pass",
}
NO_SKIPS = {
    "gpu": "@pytest.mark.gpu\ndef test_it(): pytest.skip('no GPU')",
    "gpu module": "pytestmark = pytest.mark.gpu\ndef test_it(): pytest.skip('no GPU')",
    "xfail": "@pytest.mark.xfail\ndef test_it(): assert False",
    "pass": "def test_it(): pass",
}


def run(folder: Path, body: str, *options: str, file: str = "test_one.py") -> tuple[int, str]:
    """Run pytest on one passing test beside a file that holds `body`."""
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    (folder / "test_pass.py").write_text("def test_pass(): pass\n")
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(f"import pytest\n{body}\n")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(PLUGIN_FOLDER)
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # starts in a third of the time
    command = [sys.executable, "-m", "pytest", "-p", "no_skips", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *options], cwd=folder, env=environment, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("kind", SKIPS)
def test_a_skip_fails_the_run_and_is_named(tmp_path: Path, kind: str) -> None:
    status, output = run(tmp_path, SKIPS[kind], "--fail-on-skip")
    assert status == pytest.ExitCode.TESTS_FAILED
    assert "skips that are not allowed here" in output
    assert "test_one.py" in output.partition("not allowed here")[2]


@pytest.mark.parametrize("kind", NO_SKIPS)
def test_skips_of_gpu_tests_and_expected_failures_pass(tmp_path: Path, kind: str) -> None:
    status, output = run(tmp_path, NO_SKIPS[kind], "--fail-on-skip")
    assert status == pytest.ExitCode.OK, output


def test_a_module_in_tests_gpu_may_skip_itself(tmp_path: Path) -> None:
    status, output = run(tmp_path, SKIPS["module"], "--fail-on-skip", file="tests/gpu/test_one.py")
    assert status == pytest.ExitCode.OK, output


@pytest.mark.parametrize("kind", ["call", "module"])
def test_workers_report_their_skips(tmp_path: Path, kind: str) -> None:
    status, output = run(tmp_path, SKIPS[kind], "--fail-on-skip", "-p", "xdist", "-n", "2")
    assert status == pytest.ExitCode.TESTS_FAILED, output
    assert "test_one.py" in output.partition("not allowed here")[2]


@pytest.mark.parametrize(
    ("body", "recorded"), [(SKIPS["module"], "test_one.py\n"), (NO_SKIPS["gpu"], "")]
)
def test_recording_leaves_the_result_alone(tmp_path: Path, body: str, recorded: str) -> None:
    status, output = run(tmp_path, body, "--record-skips=skips.txt")
    assert status == pytest.ExitCode.OK, output
    assert (tmp_path / "skips.txt").read_text() == recorded


def test_a_failure_stays_a_failure(tmp_path: Path) -> None:
    status, _ = run(tmp_path, "def test_it(): assert False", "--fail-on-skip")
    assert status == pytest.ExitCode.TESTS_FAILED
