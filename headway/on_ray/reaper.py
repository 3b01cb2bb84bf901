"""Ends all processes of a private Ray, also if the process that started it was killed.

Runs as a program of its own: waits until its standard input closes, which happens when the parent
ends, then kills all processes of this Ray and removes its folder. They have its token in their
environment, or write to files in its folder: some of Ray's processes overwrite their environment
with a title. Imports nothing of Headway, because it starts with every private Ray.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TOKEN = "RAY_AUTH_TOKEN"  # only the processes of one private Ray, and its parent, have the same
MAX_LOOKS = 200  # 2 s for processes to end


@contextmanager
def reaper(folder: str) -> Iterator[None]:
    """A reaper for the case that this context does not end; TOKEN must be set.

    At its end, all other processes of this Ray end, in whatever state they are.
    """
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, folder], stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL, start_new_session=True,  # Ctrl-C is for the parent
    )  # fmt: skip
    try:
        yield
    finally:
        process.kill()
        end_all(os.environ[TOKEN], folder)
        process.communicate()


def end_all(token: str, folder: str) -> None:
    """Kill all other processes that have this token or folder, where /proc shows it."""
    for _ in range(MAX_LOOKS):
        pids = {int(entry.name) for entry in Path("/proc").glob("[0-9]*")} - {os.getpid()}
        found = [pid for pid in pids if _belongs(pid, token, folder)]
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return
        time.sleep(0.01)  # one of them may have started another


def _belongs(pid: int, token: str, folder: str) -> bool:
    process = Path("/proc", str(pid))
    with suppress(OSError):  # it has ended, or is not ours
        variables = (process / "environ").read_bytes().split(b"\0")
        return f"{TOKEN}={token}".encode() in variables or any(
            # The link of an open file is writable if the file is; others may read the logs of Ray.
            os.readlink(file).startswith(f"{folder}/") and file.lstat().st_mode & stat.S_IWUSR
            for file in (process / "fd").iterdir()
        )
    return False


if __name__ == "__main__":
    sys.stdin.buffer.read()
    end_all(os.environ[TOKEN], sys.argv[1])
    shutil.rmtree(sys.argv[1], ignore_errors=True)
