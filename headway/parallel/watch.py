"""Finds ranks that died, stopped or are stuck, on a thread of rank 0, and ends the group then.

A rank that is stopped (by a debugger, SIGSTOP or a frozen container) no longer advances its counter.
A rank that is stuck (in a lock, an endless loop or a call that never returns) does, but it stays
behind rank 0, which waits for it. It has several times as long as rank 0 needed for the same part of
the plan, so a long step is no failure. Ranks are killed, because a collective that waits for them
returns only when the connection breaks. Time is counted in looks of this thread, so that a pause of
all processes is no failure.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from headway.parallel.channel import Channel
from headway.parallel.progress import Progress

INTERVAL = 0.04  # seconds between two looks
MAX_MISSED = 13  # looks without progress while plans run; about 0.5 s
MAX_LATE = 16  # looks at a rank that stays behind; longer, so that a stopped rank is named as such
MAX_SLOWER = 4  # times what rank 0 needed, if that is more than MAX_LATE looks
MAX_MISSED_LOADING = 750  # while weights are loaded: importing and packing hold Python's lock


class RankProcess(NamedTuple):
    """A process of this group, and the socket to it."""

    rank: int
    process: subprocess.Popen[bytes]
    control: socket.socket
    replies: BinaryIO  # what the rank sends


class Watch:
    """The processes of a group, and the reason for which it ended."""

    def __init__(self, ranks: list[RankProcess], channel: Channel, progress: Progress) -> None:
        """`progress` is that of rank 0."""
        self.failure: str | None = None
        self.end_collectives: Callable[[], None] | None = None  # of rank 0; on any thread
        self.is_loading = True
        self.channel = channel
        self._ranks, self._progress = ranks, progress
        self._late = (-1, -1, 0)  # positions of rank 0 and of the last rank, looks at them
        self._beats = dict.fromkeys((each.rank for each in ranks), (-1, 0))  # value, looks at it
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch ranks", daemon=True)
        self._thread.start()

    def fail(self, reason: str) -> None:
        """End the group; the first reason is kept."""
        with self._lock:
            if self.failure is not None or self._stopped.is_set():
                return
            self.failure = f"{reason}; the tensor-parallel group has ended: restart the process"
        for each in self._ranks:
            with suppress(ProcessLookupError):
                each.process.kill()
        if self.end_collectives is not None:
            self.end_collectives()

    def wait(self, seconds: float) -> str | None:
        """The failure, if one is found within this time."""
        looks = 0
        while self.failure is None and looks * INTERVAL < seconds:
            self._stopped.wait(INTERVAL)
            looks += 1
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
        while self.failure is None and not self._stopped.wait(INTERVAL):
            reasons = [reason for each in self._ranks if (reason := self._death(each))]
            if not reasons:
                reasons = [reason for each in self._ranks if (reason := self._stall(each))]
            if not reasons and (reason := self._lateness()):
                reasons = [reason]
            if reasons:
                self.fail(min(reasons)[1])

    def _death(self, each: RankProcess) -> tuple[int, str] | None:
        """Why a process ended, after a number that is lower for a likelier cause of the others."""
        code = each.process.poll()
        if code is None:
            return None
        if code < 0:
            return 0, f"rank {each.rank} was killed by {signal.Signals(-code).name}"
        report = self.channel.report_of(each.rank)
        how = f"failed: {report}" if report else f"ended with exit code {code}"
        return 1 if report else 2, f"rank {each.rank} {how}"

    def _stall(self, each: RankProcess) -> tuple[int, str] | None:
        beats, (before, missed) = self.channel.beats(each.rank), self._beats[each.rank]
        self._beats[each.rank] = (beats, missed + 1 if beats == before else 0)
        is_patient = self.is_loading and not _is_stopped(each.process.pid)
        limit = MAX_MISSED_LOADING if is_patient else MAX_MISSED
        if missed < limit:
            return None
        return 0, f"rank {each.rank} did not run for {limit * INTERVAL:.1f} s"

    def _lateness(self) -> tuple[int, str] | None:
        """Whether the last rank stays where it is, and rank 0 waits for it."""
        own, position = self._progress, self.channel.position
        last = min((each.rank for each in self._ranks), key=position)
        where = own.position, position(last)
        *before, looks = self._late
        is_late = own.is_waiting and not self.is_loading and where[1] < where[0]
        looks = looks + 1 if is_late and where == (*before,) else 0
        self._late = *where, looks
        if looks < max(MAX_LATE, MAX_SLOWER * own.seconds / INTERVAL):
            return None
        seconds = f"{looks * INTERVAL:.1f} s"
        return 0, f"rank {last} made no progress for {seconds} while rank 0 waited for it"


def _is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped a process; False where /proc does not say."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="latin-1").rpartition(")")[2]
    except OSError:
        return False
    return state.split()[0] in "Tt"
