"""What ends a group, and the reason that is given for it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headway.parallel import watch
from headway.parallel.progress import Progress, SharedState, anonymous_file
from tests.support.waiting import LIMIT, wait_until

NEVER = 20.0  # seconds


class Group:
    """Processes of another program in place of ranks."""

    def __init__(self, count: int, program: tuple[str, ...]) -> None:
        self.file = anonymous_file()
        self.shared = SharedState(self.file, 0)
        self.own = [SharedState(self.file, rank) for rank in range(1, count + 1)]
        self.processes, self.others = [], []
        for rank in range(1, count + 1):
            control, other = socket.socketpair()
            process = subprocess.Popen(program)
            self.others.append(other)
            self.processes.append(watch.RankProcess(rank, process, control, control.makefile("rb")))
        self.progress = Progress()  # of rank 0
        self.watch = watch.Watch(self.processes, self.shared, self.progress)

    def found(self, *, beating: list[int]) -> str:
        """The reason that is found while these ranks advance their counters."""

        def look() -> list[tuple[int, str]]:
            for rank in beating:
                self.own[rank - 1].beat()
            return self.watch._look(watch.INTERVAL)

        ((_, reason),) = wait_until(look)
        return reason


@contextmanager
def group(
    count: int, program: tuple[str, ...] = ("sleep", str(10 * LIMIT)), *, is_watched: bool = False
) -> Iterator[Group]:
    """A group that is watched by a thread, or only when a test looks."""
    made = Group(count, program)
    if not is_watched:
        made.watch._stopped.set()
        made.watch._thread.join()
        for rank in made.own:
            rank.beat()  # what the thread has seen does not count
    try:
        yield made
    finally:
        for each in made.processes:
            each.process.kill()
        made.watch.close()
        for other in made.others:
            other.close()
        os.close(made.file)


def test_a_signal_is_the_cause_and_an_error_that_follows_is_not() -> None:
    with group(3, is_watched=True) as made:
        made.own[1].report("RuntimeError: Connection closed by peer")
        ended = list[str]()
        made.watch.end_collectives = lambda: ended.append("aborted")
        made.processes[1].process.terminate()
        made.processes[2].process.kill()
        failure = wait_until(lambda: made.watch.failure)
        assert "was killed by SIG" in failure and "restart the process" in failure
        assert all(each.process.wait(LIMIT) is not None for each in made.processes)
        wait_until(lambda: ended)
        assert ended == ["aborted"]
        made.watch.fail("later")
        assert made.watch.failure == failure


def test_the_report_of_a_rank_is_the_reason() -> None:
    made = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
    made.wait()
    with group(1) as other:
        other.own[0].report("OutOfMemoryError: 3 GiB")
        exited = other.processes[0]._replace(process=made)
        assert other.watch._death(exited) == (1, "rank 1 failed: OutOfMemoryError: 3 GiB")


def test_a_rank_that_no_longer_advances_is_ended_while_plans_run() -> None:
    with group(2) as made:
        made.watch.is_loading = False
        for _ in range(int(watch.MAX_SILENT / watch.INTERVAL)):
            made.own[0].beat()
            assert made.watch._look(watch.INTERVAL) == []
        assert "rank 2 did not run for" in made.found(beating=[1])


def test_while_weights_are_loaded_only_a_stopped_rank_is_ended() -> None:
    with group(2) as made:
        for _ in range(3 * int(watch.MAX_SILENT / watch.INTERVAL)):
            assert made.watch._look(watch.INTERVAL) == []
        made.processes[1].process.send_signal(signal.SIGSTOP)
        assert "rank 2 did not run for" in made.found(beating=[1])


def test_a_rank_that_runs_but_stays_behind_is_ended() -> None:
    with group(2) as made:
        made.watch.is_loading = False
        made.progress.begin_plan()
        made.progress.enter()
        made.own[0].publish(made.progress.position)
        assert "rank 2 made no progress for 0." in made.found(beating=[1, 2])


def test_a_stopped_process_is_found_before_one_that_is_only_silent() -> None:
    with group(1) as made:
        made.watch.is_loading = False
        for _ in range(int(watch.MAX_STOPPED / watch.INTERVAL) + 2):
            assert made.watch._look(watch.INTERVAL) == []
        made.processes[0].process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, made.processes[0].process.pid, os.WSTOPPED)
        ((_, reason),) = made.watch._look(watch.INTERVAL)
        assert "rank 1 did not run for 0.3 s" in reason


def test_a_pause_of_all_processes_is_no_failure() -> None:
    with group(1) as made:
        made.watch.is_loading = False
        assert [made.watch._look(passed) for passed in (0.0, watch.INTERVAL, 10.0)] == [[], [], []]
        assert "rank 1 did not run for" in made.found(beating=[])


def test_a_rank_that_waits_for_a_cpu_is_not_stopped() -> None:
    with group(1, program=("sh", "-c", "while :; do :; done")) as made:
        made.watch.is_loading = False
        stat = Path(f"/proc/{made.processes[0].process.pid}/stat")
        # Ticks of CPU time.
        wait_until(lambda: int(stat.read_text().rpartition(")")[2].split()[11]))
        for _ in range(3 * int(watch.MAX_SILENT / watch.INTERVAL)):
            assert made.watch._look(watch.INTERVAL) == []
        made.processes[0].process.kill()
        made.processes[0].process.wait()
        assert made.watch._look(watch.INTERVAL) == [(0, "rank 1 was killed by SIGKILL")]


def seconds_until_late(made: Group, changed: Callable[[int], object] = lambda _: None) -> float:
    """Seconds after which a rank is late, at most NEVER; `changed` is called before each look."""
    for look in range(int(NEVER / watch.INTERVAL)):
        changed(look)
        if made.watch._lateness(watch.INTERVAL):
            return look * watch.INTERVAL
    return NEVER


def test_a_rank_has_several_times_as_long_as_rank_0_needed() -> None:
    with group(1) as made:
        made.watch.is_loading = False
        made.progress.begin_plan()
        made.progress.enter()
        made.progress.seconds = 4.0
        assert seconds_until_late(made) >= watch.MAX_SLOWER * 4.0
        made.progress.leave()
        made.progress.enter()
        made.progress.seconds = 0.0  # quickly
        assert seconds_until_late(made) == pytest.approx(watch.MAX_LATE, abs=watch.INTERVAL)


def test_no_rank_is_late_unless_rank_0_waits_for_it() -> None:
    with group(1) as made:
        progress, rank = made.progress, made.own[0]
        progress.begin_plan()
        progress.enter()
        assert seconds_until_late(made) == NEVER  # weights are loaded
        made.watch.is_loading = False
        assert seconds_until_late(made, rank.publish) == NEVER  # it moves
        rank.publish(progress.position)
        assert seconds_until_late(made) == NEVER  # a collective that all ranks have joined
        rank.publish(0)
        progress.leave()
        assert seconds_until_late(made) == NEVER  # rank 0 computes
        progress.end_plan()
        progress.seconds = 0.0
        progress.is_waiting = True
        # for a captured step
        assert seconds_until_late(made) == pytest.approx(watch.MAX_LATE, abs=watch.INTERVAL)


def test_positions_of_equal_plans_are_equal_whatever_was_before() -> None:
    found = [list[int](), list[int]()]
    for each, num_warm_up in zip(found, (0, 7), strict=True):
        progress = Progress(each.append)
        for _ in range(num_warm_up):
            progress.enter()
            progress.leave()
        each.clear()
        for num_collectives in (3, 0):
            progress.begin_plan()
            for _ in range(num_collectives):
                progress.enter()
                progress.leave()
            progress.end_plan()
    assert found[0] == found[1] == sorted(set(found[0])) and len(found[0]) == 7


def test_closing_waits_for_processes_and_closes_their_sockets() -> None:
    with group(1) as made:
        made.processes[0].process.kill()
        made.watch.close()
        assert made.processes[0].process.returncode == -signal.SIGKILL
        with pytest.raises(OSError, match="closed|descriptor"):
            made.processes[0].control.sendall(json.dumps({}).encode())
