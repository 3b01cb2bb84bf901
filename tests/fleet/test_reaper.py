"""What a killed server leaves behind is ended, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from select import select
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


# Importing Ray takes seconds. For each line of its input, a fork of this program starts a Ray and
# prints the ids of itself and of a process of that Ray, and the folder; then its status is printed.
STARTING = """
import os, signal, subprocess, sys, time
import ray
from headway.on_ray import cluster as ray_cluster
from headway.on_ray.options import FleetOptions, prepare
while (line := sys.stdin.readline()) and (fork := os.fork()):
    print(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]), flush=True)
if not line:
    sys.exit()
prepare(None)
def init(**given):
    ray._private.utils.set_sigterm_handler(lambda number, _: sys.exit(number))  # as Ray does
    started = subprocess.Popen(["sleep", sys.argv[1]], start_new_session=True)
    try:
        print(os.getpid(), started.pid, given["_temp_dir"], flush=True)
        time.sleep(float(sys.argv[1]))
    except SystemExit:
        raise KeyboardInterrupt from None  # as Ray's calls do
ray.init = init
with ray_cluster.connected(FleetOptions(replicas=1)):
    pass
"""


@pytest.fixture(scope="module")
def starting() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", STARTING, LONG], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    yield process
    process.communicate(timeout=LIMIT)


def line_of(process: subprocess.Popen[str]) -> str:
    """The next line that a process prints."""
    assert process.stdout is not None
    assert select([process.stdout], [], [], LIMIT)[0], "it prints nothing"
    return process.stdout.readline()


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.parametrize(("sent", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, -2)])
def test_a_signal_while_ray_starts_ends_all_that_was_started(
    starting: subprocess.Popen[str], sent: signal.Signals, status: int
) -> None:
    assert starting.stdin is not None
    other = subprocess.Popen(["sleep", LONG], env={**os.environ, TOKEN: uuid4().hex})
    starting.stdin.write("\n")
    starting.stdin.flush()
    fork, pid, folder = line_of(starting).split()
    os.kill(int(fork), sent)
    assert int(line_of(starting)) == status
    wait_until(lambda: not is_running(int(pid)))  # it was killed
    assert not Path(folder).exists() and other.poll() is None
    other.kill()
    other.wait()
