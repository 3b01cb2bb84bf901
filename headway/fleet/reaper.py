"""Ends what is left of a private Ray if the process that started it was killed.

Runs as a program of its own: waits until its standard input closes, which happens when the parent
ends, then kills all processes that have the token of this Ray in their environment, and removes
its folder. Imports nothing of Headway, because it starts with every private Ray.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TOKEN = "RAY_AUTH_TOKEN"  # only the processes of one private Ray, and its parent, have the same


@contextmanager
def reaper(folder: str) -> Iterator[None]:
    """A reaper that has nothing to do if this context ends; TOKEN must be set."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, folder], stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL, start_new_session=True,  # Ctrl-C is for the parent
    )  # fmt: skip
    try:
        yield
    finally:
        process.kill()
        process.communicate()


def end_all(token: bytes) -> None:
    """Kill all other processes that have this token, where /proc shows their environment."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if token in (entry / "environ").read_bytes() and int(entry.name) != os.getpid():
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:  # it has ended, or is not ours
            continue


if __name__ == "__main__":
    sys.stdin.buffer.read()
    end_all(f"{TOKEN}={os.environ[TOKEN]}".encode())
    shutil.rmtree(sys.argv[1], ignore_errors=True)
