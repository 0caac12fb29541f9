"""pytest plugin: a skip counts as a failure, unless the test is marked ``gpu``.

Load it with ``-p no_skips`` and this directory on PYTHONPATH.

``--fail-on-skip``
    The run fails when any test is skipped that is not marked ``gpu``.
``--record-skips=FILE``
    Writes the test files that hold such skips into FILE, one a line, and leaves the result alone.

A test module that skips itself while it is being collected has no test whose marker could be read;
it counts as ``gpu`` when it lies in ``tests/gpu``.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

# Workers of pytest-xdist inherit it. Each process appends whole lines; the first one reads them.
_LOG_VARIABLE = "NO_SKIPS_LOG"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("skips")
    group.addoption("--fail-on-skip", action="store_true", help="fail on skips without marker gpu")
    group.addoption("--record-skips", metavar="FILE", help="write files that have such skips")


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def pytest_configure(config: pytest.Config) -> None:
    if not _is_worker(config):
        handle, log = tempfile.mkstemp(prefix="no_skips_")
        os.close(handle)
        os.environ[_LOG_VARIABLE] = log


def pytest_unconfigure(config: pytest.Config) -> None:
    if not _is_worker(config):
        Path(os.environ.pop(_LOG_VARIABLE)).unlink(missing_ok=True)


def _note(file: str, what: str, longrepr: object) -> None:
    reason = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    line = "\t".join(" ".join(part.split()) for part in (file, what, str(reason)))
    with Path(os.environ[_LOG_VARIABLE]).open("a", encoding="utf-8") as log:
        log.write(line + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    expected_failure = hasattr(report, "wasxfail")
    if report.skipped and not expected_failure and item.get_closest_marker("gpu") is None:
        _note(item.nodeid.split("::")[0], item.nodeid, report.longrepr)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    in_gpu_tests = collector.nodeid.startswith("tests/gpu/")
    if report.skipped and not in_gpu_tests:
        _note(collector.nodeid.split("::")[0], collector.nodeid, report.longrepr)
    return report


def _noted() -> list[list[str]]:
    text = Path(os.environ[_LOG_VARIABLE]).read_text(encoding="utf-8")
    # Every worker collects every module, so collection skips are noted once a worker.
    return [line.split("\t") for line in dict.fromkeys(text.splitlines())]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    config = session.config
    if _is_worker(config):
        return
    noted = _noted()
    record = config.getoption("--record-skips")
    if record:
        files = dict.fromkeys(file for file, _, _ in noted)
        Path(record).write_text("".join(f"{file}\n" for file in files), encoding="utf-8")
    if noted and config.getoption("--fail-on-skip") and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    config = terminalreporter.config
    noted = _noted()
    if not noted or not config.getoption("--fail-on-skip"):
        return
    terminalreporter.section("skips that are not allowed here", red=True)
    for _, what, reason in noted:
        terminalreporter.write_line(f"{what}: {reason}")
