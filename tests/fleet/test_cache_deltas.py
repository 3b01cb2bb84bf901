"""The engine loop's CacheDelta messages: a tracker that follows them equals the engine's index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import astuple

from headway.engine.engine import Engine
from headway.engine.loop import EngineLoop
from headway.engine.messages import (
    CacheDelta,
    FromLoop,
    LoadReport,
    Query,
    QueryResult,
    SampleUpdate,
    Submit,
)
from headway.engine.queries import CACHE_PARTS, ReportCache, ResetPrefixCache
from headway.errors import ExecutorError
from headway.fleet.prefixes.tracker import PrefixTracker
from headway.remote import codec
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
        self.parts = list[int]()  # their numbers of keys
        self.num_open, self.is_following = 0, True

    def deliver(self, messages: list[FromLoop]) -> None:
        for message in messages:
            if isinstance(message, CacheDelta):
                self.deltas.append(message)
                self.tracker.apply("a", *astuple(message))
            elif isinstance(message, SampleUpdate) and message.end:
                self.num_open -= 1
            elif isinstance(message, QueryResult) and message.number < 0:
                self.tracker.apply("a", message.value, [])
                self.parts.append(len(message.value))
                self.num_open -= 1
        if not self.num_open:
            self.loop.stop()
        if self.is_following:
            assert holds(self.tracker, "a", self.held)

    @property
    def held(self) -> set[bytes]:
        return set(self.engine.scheduler.kv.pool.index.block_of)

    def follow(self, between: Callable[[int], list[Submit]] = lambda _: []) -> None:
        """Ask for all parts of the keys, one after the other, and run requests in between."""
        self.is_following = False
        for part in range(CACHE_PARTS):
            self.num_open += 1
            self.run(ReportCache(part, number=~part), *between(part))
        self.is_following = True
        assert holds(self.tracker, "a", self.held)

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
    follower.deltas.clear()
    follower.follow()
    assert not any(delta.cleared for delta in follower.deltas)  # other readers keep their keys


def test_the_parts_of_a_large_cache_are_small_and_changes_between_them_are_not_lost() -> None:
    follower = Follower(make_engine(num_blocks=300))
    follower.run(*map(submit, range(60)))
    follower.tracker.clear("a")
    follower.follow(between=lambda part: [submit(100 + part), submit(part)])
    assert len(follower.held) > 100 and max(follower.parts) < len(follower.held) / 4


def test_nothing_is_sent_unless_asked_for() -> None:
    follower = Follower(make_engine())
    follower.loop.report_cache = False
    sent: list[FromLoop] = []
    follower.loop._deliver = lambda messages: (sent.extend(messages), follower.loop.stop())[0]
    follower.run(submit(1))
    assert sent and not any(isinstance(message, CacheDelta) for message in sent)
    assert follower.engine.scheduler.kv.pool.index.journal is None


@pytest.mark.parametrize(
    "message",
    [
        CacheDelta([b"a key that is too long"], [], False),
        CacheDelta([], [b"short"], False),
        LoadReport(1, 0, 0, -1, 0, 0),
        LoadReport(1, 1 << 63, 0, 0, 0, 0),
    ],
)
def test_keys_and_numbers_that_the_router_cannot_store_are_refused(message: FromLoop) -> None:
    """They would break the router's index for all replicas; as frames they end one connection."""
    with pytest.raises(ExecutorError):
        codec.from_engine().decode(codec.encode([message]))
