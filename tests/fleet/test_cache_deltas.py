"""The engine loop's CacheDelta messages: a tracker that follows them equals the engine's index."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import astuple

from headway.engine.engine import Engine
from headway.engine.loop import EngineLoop
from headway.engine.messages import CacheDelta, FromLoop, Query, SampleUpdate, Submit
from headway.engine.queries import ReportCache, ResetPrefixCache
from headway.fleet.prefix_tracker import PrefixTracker
from headway.request import RequestParams
from tests.support.scripted import make_engine, script
from tests.support.tracked import holds


def submit(number: int, params: RequestParams | None = None) -> Submit:
    prompt = [number % 3 + 1] * 9 + [number + 1] * 8
    return Submit(f"r{number}", prompt, params or script(5))


class Follower:
    """A loop with a tracker; compares the tracker with the index after every batch."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.tracker = engine, PrefixTracker()
        self.loop = EngineLoop(engine, self.deliver)
        self.loop.report_cache = True
        self.deltas: list[CacheDelta] = []
        self.num_open = 0

    def deliver(self, messages: list[FromLoop]) -> None:
        for message in messages:
            if isinstance(message, CacheDelta):
                self.deltas.append(message)
                self.tracker.apply("a", *astuple(message))
            elif isinstance(message, SampleUpdate) and message.end:
                self.num_open -= 1
                if not self.num_open:
                    self.loop.stop()
        assert holds(self.tracker, "a", self.held)

    @property
    def held(self) -> set[bytes]:
        return set(self.engine.scheduler.kv.pool.index.block_of)

    def run(self, *messages: Submit | Query[Any]) -> None:
        """Run until all requests have ended."""
        self.num_open += sum(isinstance(message, Submit) for message in messages)
        self.loop._is_stopping = False
        if self.loop._observe not in self.engine.observers:  # a loop runs only once elsewhere
            self.engine.observers.append(self.loop._observe)
        self.loop.post(messages)
        self.loop.run()


@pytest.mark.parametrize("async_scheduling", [0, 1])
def test_a_tracker_follows_evictions_and_a_reset(async_scheduling: int) -> None:
    follower = Follower(make_engine(async_scheduling=async_scheduling, num_blocks=24))
    follower.run(*map(submit, range(20)))
    assert any(delta.removed for delta in follower.deltas)
    assert [delta.cleared for delta in follower.deltas] == [True] + [False] * (
        len(follower.deltas) - 1
    )
    follower.engine.run()  # no plan is in flight
    follower.deltas.clear()
    follower.run(ResetPrefixCache(), submit(21))
    assert follower.deltas[0].cleared and not follower.deltas[0].removed


def test_an_engine_that_restarts_clears_the_tracker() -> None:
    follower = Follower(make_engine())
    follower.run(submit(1))
    before = follower.held
    follower.engine.restart()  # a new scheduler, with an empty cache and no journal
    follower.run(submit(2))
    assert before - follower.held


def test_a_reader_that_connects_later_gets_all_keys() -> None:
    follower = Follower(make_engine())
    follower.run(submit(1))
    follower.tracker.clear("a")
    follower.run(ReportCache(), submit(2))
    assert follower.deltas[-1].cleared or any(delta.cleared for delta in follower.deltas[1:])


def test_nothing_is_sent_unless_asked_for() -> None:
    follower = Follower(make_engine())
    follower.loop.report_cache = False
    sent: list[FromLoop] = []
    follower.loop._deliver = lambda messages: (sent.extend(messages), follower.loop.stop())[0]
    follower.run(submit(1))
    assert sent and not any(isinstance(message, CacheDelta) for message in sent)
    assert follower.engine.scheduler.kv.pool.index.journal is None
