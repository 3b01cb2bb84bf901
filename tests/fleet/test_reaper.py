"""What a killed server leaves behind is ended, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headway.fleet.reaper import TOKEN

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
PARENT = """
import os, subprocess, sys, time
from headway.fleet.reaper import reaper
with reaper(sys.argv[1]):
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    print(child.pid, flush=True)
    time.sleep(float(sys.argv[2]))
child.kill()
"""


def started(folder: Path, seconds: float, token: str) -> tuple[subprocess.Popen[str], int]:
    """A process that starts a reaper and another process, and the pid of the latter."""
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(folder), str(seconds)],
        stdout=subprocess.PIPE, text=True, env={**os.environ, TOKEN: token},
    )  # fmt: skip
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def is_running(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_after_a_kill_the_processes_with_the_token_end_and_the_folder_is_removed(
    tmp_path: Path,
) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "other").mkdir()
    other, other_child = started(tmp_path / "other", 60.0, "other")
    process, child = started(tmp_path / "ray", 60.0, "mine")
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    deadline = time.perf_counter() + 10
    while is_running(child) or (tmp_path / "ray").exists():
        assert time.perf_counter() < deadline
        time.sleep(0.01)
    assert is_running(other.pid) and is_running(other_child) and (tmp_path / "other").exists()
    other.kill()
    other.communicate()
    while is_running(other_child):
        assert time.perf_counter() < deadline
        time.sleep(0.01)


def test_a_process_that_ends_leaves_nothing_to_do(tmp_path: Path) -> None:
    process, _ = started(tmp_path, 0.0, "mine")
    assert process.wait(10) == 0 and tmp_path.exists()
    process.communicate()
