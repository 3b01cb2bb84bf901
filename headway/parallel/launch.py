"""Starts the processes of ranks: children of rank 0, or by a `RankLauncher` on other machines."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any, NamedTuple

import msgspec

ROOT = Path(__file__).parents[2]  # of this package, which may be in the working directory


class Invitation(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank on another machine needs to join its group. Its key is that of this group only."""

    rank: int
    address: tuple[str, int]  # of rank 0
    key: bytes
    threads: int


class RankLauncher(NamedTuple):
    """Starts ranks on other machines, each with a device of its own."""

    host: Callable[[], str]  # the address of this machine at which they reach rank 0
    start: Callable[
        [Invitation], Any
    ]  # calls `start_invited` there; has poll() and kill() of Popen


def start_rank(threads: int, *arguments: int, stdin: int = DEVNULL) -> Popen[bytes]:
    """Start a rank as a child of this process; `arguments` are those of LocalLink."""
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    return Popen(
        [sys.executable, "-P", "-m", "headway.parallel.worker", *map(str, (os.getpid(), *arguments))],
        stdin=stdin, pass_fds=arguments[1:],
        start_new_session=True,  # signals of the terminal are for rank 0
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)},
    )  # fmt: skip


def start_invited(invitation: Invitation) -> Popen[bytes]:
    """Start a rank as a child of this process, for rank 0 on another machine."""
    process = start_rank(invitation.threads, stdin=PIPE)
    assert process.stdin is not None, "a pipe was asked for"
    with process.stdin as stdin:
        stdin.write(msgspec.msgpack.encode(invitation))
    return process
