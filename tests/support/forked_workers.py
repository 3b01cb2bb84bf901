"""Runs tests in forks of the process that collected them: `pytest --forks 3`.

Processes of pytest-xdist import and collect everything again, in 8 s of CPU time each, and spend 3 ms
for each test on messages. Like its mode `worksteal`, this begins with equal parts of the list of
tests; a worker that has finished its part takes half of the longest part that is left.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe, connection
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import pytest

STOP_SECONDS = 60  # a worker that is stopped finishes its test, and ends the servers of fixtures


@dataclass
class Worker:
    """A fork. It has the tests `given`, and gets those of `part` one after the other."""

    number: int
    part: list[int]
    given: list[int] = field(default_factory=list)
    pid: int = 0
    pipe: Any = None

    def give(self, test: int | None) -> None:
        if test is not None:
            self.given.append(test)
        with suppress(OSError):  # of one that died, the end of its pipe is read later
            self.pipe.send(test)


class ForkedRun:
    """The tests of a session. Each worker calls `prepare` first."""

    def __init__(self, session: pytest.Session, count: int, prepare: Callable[[], None]) -> None:
        self._session, self._hook, self._prepare = session, session.config.hook, prepare
        total = len(session.items)
        starts = [total * number // count for number in range(count + 1)]
        self._workers = [
            Worker(number, [*range(starts[number], starts[number + 1])]) for number in range(count)
        ]

    def run(self) -> None:
        folders: Any = self._session.config._tmp_path_factory  # type: ignore[attr-defined]
        folders.getbasetemp()  # workers make folders in it
        with _awaited(self._workers):
            for worker in self._workers:
                self._start(worker)
            while busy := {worker.pipe: worker for worker in self._workers if worker.given}:
                for pipe in connection.wait([*busy]):
                    self._receive(busy[pipe])

    def _start(self, worker: Worker) -> None:
        """Fork a worker. It gets two tests: what a test leaves open depends on the next one."""
        worker.pipe, end = Pipe()
        sys.stdout.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # if a library has started a thread
            worker.pid = os.fork()
        if not worker.pid:
            for each in self._workers:
                if each.pipe is not None:
                    each.pipe.close()
            _work(self._session, worker.number, end, self._prepare)
        end.close()
        for _ in range(2):
            worker.give(self._next_test(worker))

    def _next_test(self, worker: Worker) -> int | None:
        if not worker.part:
            longest = max(self._workers, key=lambda each: len(each.part))
            middle = len(longest.part) // 2
            longest.part, worker.part = longest.part[:middle], longest.part[middle:]
        return worker.part.pop(0) if worker.part else None

    def _receive(self, worker: Worker) -> None:
        """Read the reports of one test."""
        try:
            found = worker.pipe.recv()
        except (EOFError, OSError):
            self._replace(worker)
            return
        if isinstance(found, str):
            pytest.exit(f"error outside of tests:\n{found}", returncode=3)
        test, config = worker.given.pop(0), self._session.config
        worker.give(self._next_test(worker))
        read = self._hook.pytest_report_from_serializable
        self._log(test, [read(config=config, data=each) for each in found])

    def _replace(self, worker: Worker) -> None:
        """The test of a worker that died has failed. Its other tests run in another fork."""
        worker.pipe.close()
        status = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        test, *rest = worker.given
        worker.part, worker.given = [*rest, *worker.part], []
        self._start(worker)
        item, why = self._session.items[test], f"its process ended with status {status}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call")
        self._log(test, [report])

    def _log(self, test: int, reports: list[pytest.TestReport]) -> None:
        item, hook = self._session.items[test], self._hook
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in reports:
            hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)


@contextmanager
def _awaited(workers: list[Worker]) -> Iterator[None]:
    """At the end, wait until all workers have ended. Without a pipe, they end after their test."""
    try:
        yield
    finally:
        started = [worker for worker in workers if worker.pid]
        for worker in started:
            worker.pipe.close()
        deadline = time.monotonic() + STOP_SECONDS
        for worker in started:
            while not os.waitpid(worker.pid, os.WNOHANG)[0]:
                if time.monotonic() > deadline:
                    os.kill(worker.pid, signal.SIGKILL)
                time.sleep(0.01)


def _work(
    session: pytest.Session, number: int, pipe: Connection, prepare: Callable[[], None]
) -> NoReturn:
    """All that a fork does."""
    status = 1
    try:
        _become_worker(session.config, number)
        prepare()
        with suppress(EOFError, OSError):  # no more tests are wanted
            _run_tests(session, pipe)
        session._setupstate.teardown_exact(None)
        status = 0
    except BaseException:
        with suppress(OSError):
            pipe.send(traceback.format_exc())
    finally:
        os._exit(status)


def _become_worker(config: pytest.Config, number: int) -> None:
    """Share no temporary folder and no captured output with other workers, and print nothing."""
    os.environ["PYTEST_XDIST_WORKER"] = f"gw{number}"  # the name that libraries know
    folders: Any = config._tmp_path_factory  # type: ignore[attr-defined]
    folders._basetemp = folders.getbasetemp() / f"worker{number}"
    folders._basetemp.mkdir(exist_ok=True)
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    capture.read_global_capture()
    capture.stop_global_capturing()
    capture.start_global_capturing()
    config.pluginmanager.unregister(name="terminalreporter")


class Reports:
    """A plugin that collects the reports of a test."""

    def __init__(self, config: pytest.Config) -> None:
        self.found, self._config = list[Any](), config
        config.pluginmanager.register(self)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        write = self._config.hook.pytest_report_to_serializable
        self.found.append(write(config=self._config, report=report))


def _run_tests(session: pytest.Session, pipe: Connection) -> None:
    reports, current = Reports(session.config), pipe.recv()
    while current is not None:
        following = pipe.recv()
        item = session.items[current]
        upcoming = None if following is None else session.items[following]
        item.ihook.pytest_runtest_protocol(item=item, nextitem=upcoming)
        pipe.send(reports.found)
        reports.found.clear()
        current = following
