"""Groups whose processes start in milliseconds: forks of one that has imported what they need."""

from __future__ import annotations

import os
import signal
import sys
import time
from multiprocessing import reduction
from multiprocessing.connection import Connection
from subprocess import DEVNULL, PIPE, TimeoutExpired
from typing import Any

import msgspec

from headway import LLM, SamplingParams
from headway.parallel import watch, worker
from headway.parallel.launch import Invitation
from tests.support.processes import FORKS


class ForkedRank:
    """Has what Popen has for the product."""

    def __init__(self, threads: int, *arguments: int, stdin: int = DEVNULL) -> None:
        """The parameters of `start_rank`."""
        rank, files = arguments[:1], [reduction.DupFd(file) for file in arguments[1:]]
        reader, writer = FORKS.Pipe(duplex=False)
        self._process = FORKS.Process(target=_run, args=(rank, files, reader))
        self._process.start()
        reader.close()
        self.stdin = os.fdopen(os.dup(writer.fileno()), "wb") if stdin == PIPE else None
        writer.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None, "it was started"
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutExpired(f"rank {self.pid}", timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def fork_invited(invitation: Invitation) -> ForkedRank:
    """`start_invited`, with a fork."""
    process = ForkedRank(invitation.threads, stdin=PIPE)
    assert process.stdin is not None, "a pipe was asked for"
    with process.stdin as stdin:
        stdin.write(msgspec.msgpack.encode(invitation))
    return process


def _run(rank: tuple[int, ...], files: list[Any], stdin: Connection) -> None:
    """Main function of a forked rank. Its main thread sleeps after SIGUSR1; the others run."""
    signal.signal(signal.SIGUSR1, lambda *_: time.sleep(3600))
    sys.stdin = os.fdopen(os.dup(stdin.fileno()))
    numbers = (os.getppid(), *rank, *(file.detach() for file in files))
    sys.argv = ["worker", *map(str, numbers)]
    worker.main()


def run_rank_0(model: str, settings: dict[str, Any], out: Connection) -> None:
    """Main function of a forked process that starts another rank, sends its id and never ends."""
    # no rank is late on a busy machine
    watch.MAX_SILENT = watch.MAX_SILENT_LOADING = watch.MAX_LATE = 1e9
    llm = LLM(model, tensor_parallel_size=2, **settings)
    assert llm.loaded.ranks is not None
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1))
    out.send([each.process.pid for each in llm.loaded.ranks.watch._ranks])
    while True:
        llm.generate([[1, 2, 3]] * 4, SamplingParams(max_tokens=100, ignore_eos=True))
