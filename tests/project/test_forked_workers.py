"""Forked workers run every test once, and the death of one fails a single test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

CONFTEST = """
from tests.support.forked_workers import ForkedRun
def pytest_runtestloop(session):
    ForkedRun(session, 3, lambda: None).run()
    return True
"""
# The log has a line for every start of the shared fixture and of a test.
TESTS = """
import os, pathlib, pytest
LOG = pathlib.Path(__file__).with_name("log")
def note(line):
    with LOG.open("a") as file:
        file.write(f"{os.getpid()} {line}\\n")
@pytest.fixture(scope="module")
def shared():
    note("opened")
    yield os.getpid()
    note("closed")
@pytest.mark.parametrize("n", range(40))
def test_it(n, shared, tmp_path, capfd):
    note(n)
    os.system("echo child; echo error >&2")
    assert capfd.readouterr() == ("child\\n", "error\\n") and shared == os.getpid()
    (tmp_path / "file").mkdir()
    if n == 7: os._exit(5)
    if n == 20: pytest.skip("why")
    assert n != 30, "wrong"
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[list[str]]]:
    """What pytest printed, and the lines of the log."""
    folder = tmp_path_factory.mktemp("forked")
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_forty.py").write_text(TESTS)
    plugins = [f"-pno:{name}" for name in ("hypothesispytest", "schemathesis", "anyio", "xdist")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rfs", "-c", os.devnull, *plugins, str(folder)],
        capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout, [line.split() for line in (folder / "log").read_text().splitlines()]


def test_every_test_runs_once_and_is_reported_once(ran: tuple[str, list[list[str]]]) -> None:
    printed, log = ran
    runs = Counter(line for _, line in log if line.isdigit())
    assert runs == {str(number): 1 for number in range(40)}
    assert "2 failed, 37 passed, 1 skipped" in printed


def test_a_worker_that_dies_fails_only_its_test(ran: tuple[str, list[list[str]]]) -> None:
    printed, log = ran
    failed = re.findall(r"^FAILED \S+test_it\[(\d+)\]", printed, re.MULTILINE)
    assert sorted(failed) == ["30", "7"] and "its process ended with status 5" in printed
    assert len({pid for pid, _ in log}) == 4, "one replaces it"


def test_fixtures_of_a_module_are_set_up_once_in_each_worker(
    ran: tuple[str, list[list[str]]],
) -> None:
    _, log = ran
    opened = Counter(pid for pid, line in log if line == "opened")
    closed = Counter(pid for pid, line in log if line == "closed")
    (died,) = (pid for pid, line in log if line == "7")
    assert set(opened.values()) == {1} and opened - closed == {died: 1}
