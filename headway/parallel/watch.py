"""Finds ranks that died, stopped or are stuck, on a thread of rank 0, and ends the group then.

A rank that is stopped (by a debugger, SIGSTOP or a frozen container) no longer advances its counter.
A rank that is stuck (in a lock, an endless loop or a call that never returns) does, but it stays
behind rank 0, which waits for it. It has several times as long as rank 0 needed for the same part of
the plan, so a long step is no failure. A rank that waits for a CPU is not stopped: on a busy machine
it continues, and one that has been killed exits. Ranks are killed, because a collective that waits
for them returns only when the connection breaks. The time between two looks of this thread counts up
to a limit, so that a pause of all processes is no failure, and a busy machine delays no error for long.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import BinaryIO, NamedTuple

from headway.parallel.link import RemoteRank
from headway.parallel.progress import Progress, SharedState

# All in seconds, except MAX_SLOWER.
INTERVAL = 0.04  # between two looks
MAX_COUNTED = 0.2  # of the time between two looks
MAX_STOPPED = 0.25  # without progress in a process that the system reports as stopped
MAX_SILENT = 0.5  # without progress while plans run
MAX_SILENT_LOADING = 30.0  # while weights are loaded: importing and packing hold Python's lock
MAX_SILENT_REMOTE = 2.0  # on another machine: a lost packet is sent again after up to 0.6 s
MAX_LATE = 0.6  # behind rank 0; longer than MAX_SILENT, so that a frozen rank is named as such
MAX_SLOWER = 4  # times what rank 0 needed, if that is more than MAX_LATE


Reason = tuple[int, str]  # a number that is lower for a likelier cause of the others, and a text


class RankProcess(NamedTuple):
    """A process of this group, and the socket to it."""

    rank: int
    process: subprocess.Popen[bytes] | RemoteRank
    control: socket.socket
    replies: BinaryIO  # what the rank sends
    host: str = ""  # of a rank on another machine


class Watch:
    """The processes of a group, and the reason for which it ended."""

    def __init__(self, ranks: list[RankProcess], shared: SharedState, progress: Progress) -> None:
        """`progress` is that of rank 0."""
        self.failure: str | None = None
        self.end_collectives: Callable[[], None] | None = None  # of rank 0; on any thread
        self.is_loading = True
        self._ranks, self._shared, self._progress = ranks, shared, progress
        self._late = (-1, -1, 0.0)  # positions of rank 0 and of the last rank, seconds there
        self._beats = dict.fromkeys((each.rank for each in ranks), (-1, 0.0))  # value, seconds
        self._failed, self._stopped = threading.Event(), threading.Event()
        self._on_failure: Callable[[str], None] | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="watch ranks", daemon=True)
        self._thread.start()

    def fail(self, reason: str) -> None:
        """End the group; the first reason is kept."""
        with self._lock:
            if self.failure is not None or self._stopped.is_set():
                return
            failure = f"{reason}; the tensor-parallel group has ended: restart the process"
            if self._on_failure is not None:
                self._on_failure(failure)  # before a step can fail for it
            self.failure = failure
            self._failed.set()
        for each in self._ranks:
            with suppress(ProcessLookupError):
                each.process.kill()
        if self.end_collectives is not None:
            self.end_collectives()

    def report_to(self, on_failure: Callable[[str], None]) -> None:
        """Call `on_failure` with the reason when the group ends, on any thread; now if it has."""
        with self._lock:
            self._on_failure = on_failure
            if self.failure is not None:
                on_failure(self.failure)

    def wait(self, seconds: float) -> str | None:
        """The failure, if one is found within this time."""
        self._failed.wait(seconds)
        return self.failure

    def close(self) -> None:
        """Stop watching and end all processes; they exit by themselves when their socket closes."""
        self._stopped.set()
        if self.end_collectives is not None and self.failure is None:
            self.end_collectives()  # before the other ranks: NCCL reports a lost peer as an error
        for each in self._ranks:
            with suppress(OSError):
                each.control.shutdown(socket.SHUT_RDWR)
            each.replies.close()
            each.control.close()
        for each in self._ranks:
            try:
                each.process.wait(timeout=1.0)
            except subprocess.TimeoutExpired:
                each.process.kill()
                each.process.wait()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        before = monotonic()
        while self.failure is None and not self._stopped.wait(INTERVAL):
            now = monotonic()
            if reasons := self._look(now - before):
                self.fail(min(reasons)[1])
            before = now

    def _look(self, passed: float) -> list[Reason]:
        """Why the group must end; `passed` are the seconds since the look before."""
        if reasons := [reason for each in self._ranks if (reason := self._death(each))]:
            return reasons
        passed = min(passed, MAX_COUNTED)
        reasons = [reason for each in self._ranks if (reason := self._stall(each, passed))]
        late = self._lateness(passed)
        return reasons or ([late] if late else [])

    def _death(self, each: RankProcess) -> Reason | None:
        code = each.process.poll()
        if code is None:
            return None
        if code < 0:
            return 0, f"rank {each.rank} was killed by {signal.Signals(-code).name}"
        report = self._shared.report_of(each.rank)
        if each.host and not report:
            return 0, f"rank {each.rank} at {each.host} closed its connection"
        how = f"failed: {report}" if report else f"ended with exit code {code}"
        return 1 if report else 2, f"rank {each.rank} {how}"

    def _stall(self, each: RankProcess, passed: float) -> Reason | None:
        beats, (before, seconds) = self._shared.beats(each.rank), self._beats[each.rank]
        seconds = seconds + passed if beats == before else 0.0
        self._beats[each.rank] = beats, seconds
        limit = MAX_SILENT_REMOTE if each.host else MAX_SILENT
        if self.is_loading:
            limit = MAX_SILENT_LOADING
        if seconds < min(limit, MAX_STOPPED):
            return None
        states = _thread_states(each.process.pid)
        is_stopped = states & {"T", "t"}  # by a signal or by a debugger
        if not is_stopped and (seconds < limit or ("R" in states and not self.is_loading)):
            return None
        return 0, f"rank {each.rank} did not run for {seconds:.1f} s"

    def _lateness(self, passed: float) -> Reason | None:
        """Whether the last rank stays where it is, and rank 0 waits for it."""
        own, position = self._progress, self._shared.position
        last = min((each.rank for each in self._ranks), key=position)
        where = own.position, position(last)
        *before, seconds = self._late
        is_late = own.is_waiting and not self.is_loading and where[1] < where[0]
        seconds = seconds + passed if is_late and where == (*before,) else 0.0
        self._late = *where, seconds
        # What a silent rank on another machine has reached is not known.
        silent = MAX_SILENT_REMOTE if any(each.host for each in self._ranks) else 0.0
        if seconds < max(MAX_LATE + silent, MAX_SLOWER * own.seconds):
            return None
        return 0, f"rank {last} made no progress for {seconds:.1f} s while rank 0 waited for it"


def _thread_states(pid: int) -> set[str]:
    """The states of a process's threads, as letters; empty where /proc does not say."""
    states = set[str]()
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):  # the thread has ended
            states.add(path.read_text(encoding="latin-1").rpartition(")")[2].split()[0])
    return states
