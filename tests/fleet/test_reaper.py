"""What a killed server leaves behind is ended, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest

from headway.on_ray.reaper import TOKEN
from tests.support.waiting import LIMIT, wait_until

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
LONG = str(10 * LIMIT)  # seconds; a process that sleeps so long ends only when it is killed
PARENT = """
import os, subprocess, sys, time
from headway.on_ray.reaper import reaper
with reaper(sys.argv[1]):
    child = subprocess.Popen(["sleep", sys.argv[3]], start_new_session=True)
    with open(sys.argv[1] + "/log", "w") as log:  # without the token, as after a change of title
        other = subprocess.Popen(["sleep", sys.argv[3]], pass_fds=[log.fileno()], env={})
    print(child.pid, other.pid, flush=True)
    time.sleep(float(sys.argv[2]))
"""


def started(folder: Path, seconds: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A process that starts a reaper and two other processes, and the pids of the latter."""
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(folder), seconds, LONG],
        stdout=subprocess.PIPE, text=True, env={**os.environ, TOKEN: uuid4().hex},
    )  # fmt: skip
    assert process.stdout is not None
    return process, [int(word) for word in process.stdout.readline().split()]


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
    other, other_children = started(tmp_path / "other", LONG)
    process, children = started(tmp_path / "ray", LONG)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    wait_until(lambda: not any(map(is_running, children)) and not (tmp_path / "ray").exists())
    assert all(map(is_running, [other.pid, *other_children])) and (tmp_path / "other").exists()
    other.kill()
    other.communicate()
    wait_until(lambda: not any(map(is_running, other_children)))


def test_a_context_that_ends_leaves_no_process_and_its_folder(tmp_path: Path) -> None:
    process, children = started(tmp_path, "0")
    assert process.wait(LIMIT) == 0 and tmp_path.exists()
    wait_until(lambda: not any(map(is_running, children)))  # they were killed
    process.communicate()
