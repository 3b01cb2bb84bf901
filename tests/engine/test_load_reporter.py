"""An engine loop in a fleet reports its load after each step and while it is idle or busy."""

from __future__ import annotations

import threading

import pytest
from msgspec.structs import replace

from headway.engine import loop as engine_loop
from headway.engine.loop import EngineLoop, LoadReporter
from headway.engine.messages import EngineStopped, FromLoop, LoadReport, Submit
from tests.support.gated import gated_engine, scripted
from tests.support.waiting import LIMIT, wait_until


def test_reports_follow_steps_and_heartbeats_fill_long_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_loop, "HEARTBEAT_SECONDS", 0.01)
    monkeypatch.setattr(engine_loop, "READ_SECONDS", LIMIT)  # both requests run in the first step
    engine, gate = gated_engine()
    before = set(threading.enumerate())
    batches: list[list[FromLoop]] = []
    loop = EngineLoop(engine, batches.append, report_load=True)
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    wait_until(lambda: len(batches) > 2)
    blocks = engine.scheduler.config.num_blocks
    idle = LoadReport(0, 0, 0, 0, blocks, blocks)
    assert batches[:3] == [[idle]] * 3
    gate.open.clear()
    loop.post([Submit(str(i), [5] * 9, scripted(3)) for i in range(2)])
    wait_until(lambda: engine.step_seconds is not None)
    num_before = len(batches)
    wait_until(lambda: len(batches) > num_before + 2)  # during a step that does not end
    assert batches[num_before:] and all(batch == [idle] for batch in batches[num_before:])
    gate.open.set()
    wait_until(lambda: not engine.has_work)
    loop.stop()
    thread.join()
    reports = [each for batch in batches for each in batch if isinstance(each, LoadReport)]
    assert any(each.num_running == 2 and each.step == 1 for each in reports)
    # A heartbeat may repeat an earlier report at the end.
    latest = max(reports, key=lambda report: report.step)
    assert latest == replace(idle, step=engine.scheduler.num_steps)
    wait_until(lambda: set(threading.enumerate()) <= before)  # no heartbeat after the end


class LateEvent(threading.Event):
    """A heartbeat is due at the moment at which the event is set, and not again."""

    def __init__(self, reporter: LoadReporter) -> None:
        super().__init__()
        self.reporter, self.is_due = reporter, True

    def wait(self, timeout: float | None = None) -> bool:
        super().wait()
        self.reporter._is_quiet = True
        was_due, self.is_due = self.is_due, False
        return not was_due


def test_no_heartbeat_follows_the_end_of_the_engine() -> None:
    engine, _ = gated_engine()
    before = set(threading.enumerate())
    received: list[FromLoop] = []
    loop = EngineLoop(engine, received.extend, report_load=True)
    reporter = loop._load_reporter
    reporter._is_stopped = LateEvent(reporter)
    loop.stop()
    loop.run()
    wait_until(lambda: set(threading.enumerate()) <= before)
    assert [type(each) for each in received] == [LoadReport, EngineStopped]
