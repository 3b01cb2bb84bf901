"""Runs an engine on a thread: takes messages from any thread and steps while there is work.

The events of a step become a batch of messages (`StepUpdates` in messages.py), which `deliver`
receives on the loop's thread (ThreadClient; in two processes remote/service.py has the next step).
Knows no sockets, no text and no asyncio.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Generic, TypeVar

from headway.engine.engine import Engine, Observer
from headway.engine.messages import (
    CacheDelta,
    Cancel,
    EngineStopped,
    FromLoop,
    LoadReport,
    Query,
    QueryResult,
    StepUpdates,
    Submit,
    ToLoop,
    refusal_of,
)
from headway.engine.queries import (
    CACHE_PARTS,
    CountRequests,
    EngineLoad,
    ExplainQueue,
    FindRequest,
    GetLoad,
    GetTime,
    ReportCache,
    ResetPrefixCache,
)
from headway.engine.queue_limits import QueueLimiter, QueueLimits
from headway.engine.submit_check import check_submit
from headway.errors import ExecutorError, PolicyError, RequestError
from headway.events import Added, Event, Planned
from headway.request import Request
from headway.scheduler import Scheduler

Deliver = Callable[[list[FromLoop]], None]
OnSubmit = Callable[[Submit, list[Request]], None]
Value = TypeVar("Value")
READ_SECONDS = 0.05  # a batch of thousands of requests must not delay the next step for longer
LOCK_SECONDS = 0.05  # how long a reader waits for the scheduler to release the engine's lock
HEARTBEAT_SECONDS = 0.25  # the longest time without a load report
MAX_COUNTED = 64  # requests; a longer queue is counted at most every COUNT_SECONDS
COUNT_SECONDS = 0.05
log = logging.getLogger(__name__)


class CachedReader(Generic[Value]):
    """The latest value of `read`, which must not change the engine's state.

    The engine's lock is free while a plan runs, so other threads read a consistent state even
    during a long step. If the scheduler holds the lock for long, the previous value is returned.
    """

    def __init__(self, engine: Engine, read: Callable[[], Value]) -> None:
        self._engine, self._read = engine, read
        with engine.lock:
            self._value, self._as_of = read(), engine.clock.now()

    def get(self) -> tuple[Value, float]:
        """The value and the age in seconds of the state that it shows. May be called on any thread.

        During a step, the state is that of the step's start.
        """
        engine = self._engine
        if engine.lock.acquire(timeout=LOCK_SECONDS):
            try:
                self._value, began = self._read(), engine.step_began
                self._as_of = engine.clock.now() if began is None else began
            finally:
                engine.lock.release()
        return self._value, max(0.0, engine.clock.now() - self._as_of)


class LoadReporter:
    """Tells a fleet how busy an engine is, and that its process is alive.

    A report follows every step. While the engine is idle or a step takes long, a thread repeats the
    latest report. `deliver` must accept calls from any thread.
    """

    def __init__(self, deliver: Deliver) -> None:
        self._is_stopped = threading.Event()
        self._lock = threading.Lock()  # held while a heartbeat is sent
        self._deliver = deliver
        self._latest: LoadReport | None = None
        self._is_quiet = True  # no report since the latest heartbeat
        self._waiting_tokens, self._counted_at = 0, -COUNT_SECONDS

    def start(self, scheduler: Scheduler) -> None:
        """Send the first report, and heartbeats from now on."""
        self._deliver([self.report(scheduler)])
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def stop(self) -> None:
        """Send no heartbeat once this returns."""
        with self._lock:
            self._is_stopped.set()

    def report(self, scheduler: Scheduler) -> LoadReport:
        """The present load; called on the loop's thread after every step."""
        queue, now = scheduler.queue, time.monotonic()
        if len(queue) <= MAX_COUNTED or now - self._counted_at > COUNT_SECONDS:
            # A waiting request has no tokens outside these two lists.
            self._waiting_tokens = sum([r.num_prompt + len(r.flushed_tokens) for r in queue])
            self._counted_at = now
        left = [r.prefill_end - r.num_computed for r in scheduler.state.prefilling]
        self._is_quiet = False
        self._latest = LoadReport(
            scheduler.num_steps, len(scheduler.running), len(queue),
            self._waiting_tokens + sum(left), scheduler.num_free, scheduler.config.num_blocks,
        )  # fmt: skip
        return self._latest

    def _beat(self) -> None:
        while not self._is_stopped.wait(HEARTBEAT_SECONDS):
            with self._lock:  # the loop may have ended since
                if self._is_quiet and self._latest and not self._is_stopped.is_set():
                    self._deliver([self._latest])
            self._is_quiet = True


class EngineLoop:
    """Runs an engine on the thread that calls `run`, until `stop`."""

    def __init__(
        self,
        engine: Engine,
        deliver: Deliver,
        limits: QueueLimits | None = None,
        *,
        report_load: bool = False,
    ) -> None:
        """`report_load`: send LoadReports, with every step and as heartbeats."""
        self.engine = engine
        self._limiter = QueueLimiter(engine, limits or QueueLimits())
        self._answers: dict[type[Query[Any]], Callable[[Any], Any]] = {}
        why = CachedReader(engine, engine.why)
        self.handle(ExplainQueue, lambda _: why.get()[0])
        self.handle(GetTime, lambda _: engine.clock.now())
        self.handle(GetLoad, lambda _: self._load())
        self.handle(CountRequests, lambda _: len(engine.scheduler.requests) + engine.num_in_flight)
        self.handle(FindRequest, lambda _: None)  # a service of the engine may have a journal
        self.handle(ResetPrefixCache, lambda _: engine.scheduler.reset_cache())
        self.handle(ReportCache, self._report_cache)
        self._report_load = report_load
        self.report_cache = False  # send a CacheDelta with the updates of a step
        self.on_submit: list[OnSubmit] = []  # called on the loop's thread, before the first step
        self.on_begin: list[Callable[[], None]] = []  # called first on the loop's thread
        self.ended: str | None = None  # why the loop has ended; None while it runs
        self._failure: str | None = None  # why it must end at once
        self._deliver = deliver
        self._inbox: deque[ToLoop] = deque()
        self._wake = threading.Condition()
        self._is_stopping = False
        self._updates = StepUpdates(engine.clock)
        self._load_reporter = LoadReporter(deliver)
        self._outbox: list[FromLoop] = []
        engine.observers.insert(0, self._observe)
        engine.on_observer_error = self._remove_observer

    def handle(self, kind: type[Query[Value]], answer: Callable[[Any], Value]) -> None:
        """Register what answers the queries of a type; replaces what did before.

        `answer` gets the query, on the loop's thread if its type has `between_steps`.
        """
        self._answers[kind] = answer

    # From any thread.

    def post(self, messages: Iterable[ToLoop]) -> None:
        """Queue messages for the loop, which reads them before its next step."""
        with self._wake:
            self._inbox.extend(messages)
            self._wake.notify()

    def stop(self) -> None:
        """End the loop after the current step. Callers get an EngineStopped message."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()

    def fail(self, reason: str) -> None:
        """End the loop, because no later step can succeed.

        What the current step has delivered so far is its last update, so that no request ends with
        an error: callers get an EngineStopped message, and a fleet continues all requests elsewhere.
        """
        self._failure = reason
        self.stop()

    @property
    def num_unread(self) -> int:
        """Requests that arrived during the current step and are not scheduled yet."""
        with self._wake:
            return sum(each.num_open for each in self._inbox if isinstance(each, Submit))

    def reply(self, query: Query[Any]) -> QueryResult:
        """The answer to a query, or a result with an error."""
        answer = self._answers.get(type(query))
        if answer is None:
            known = ", ".join(sorted(kind.__name__ for kind in self._answers))
            problem = f"this engine does not answer {type(query).__name__}; it answers {known}"
            return QueryResult(query.number, None, problem)
        try:
            return QueryResult(query.number, answer(query))
        except Exception as error:  # a failed query must not end the loop
            return QueryResult(query.number, None, f"{type(error).__name__}: {error}")

    # On the loop's thread.

    def run(self) -> None:
        """Run until `stop`. Raises any error that the engine itself cannot handle."""
        try:
            for each in self.on_begin:
                each()
            if self._report_load:
                self._load_reporter.start(self.engine.scheduler)
            while self._wait_for_work():
                self._read()
                if self.engine.has_work:
                    self.engine.step()
                self._flush()
            self.ended = self._failure or "stop() was called"
        except BaseException as error:
            self.ended = f"{type(error).__name__}: {error}; restart the process"
            raise
        finally:
            self._load_reporter.stop()
            self.engine.observers.remove(self._observe)  # another loop may run the engine
            if self.engine.on_observer_error == self._remove_observer:
                self.engine.on_observer_error = None
            self._flush()
            self._deliver([EngineStopped(self.ended or "")])

    def _wait_for_work(self) -> bool:
        """Wait until there is work; False if the loop must end."""
        if self.engine.has_work:
            return not self._is_stopping
        with self._wake:
            while not (self._inbox or self._is_stopping):
                self._wake.wait()
        return not self._is_stopping

    def _read(self) -> None:
        """Process messages in order, for at most READ_SECONDS; the rest waits for the next step."""
        self._limiter.waiting_tokens = None
        ends_at = time.perf_counter() + READ_SECONDS
        while self._inbox and time.perf_counter() < ends_at:
            with self._wake:
                message = self._inbox.popleft()
            with self.engine.lock:
                if isinstance(message, Submit):
                    self._submit(message)
                elif isinstance(message, Query):
                    self._outbox.append(self.reply(message))
                elif isinstance(message, Cancel) and message.sample is None:
                    self.engine.abort(message.id)
                elif isinstance(message, Cancel) and message.sample is not None:
                    self.engine.stop_sample(message.id, message.sample)

    def _submit(self, message: Submit) -> None:
        try:
            check_submit(message, self.engine.vocab_size)
            if not message.outputs:  # the fleet has accepted a continued request before
                self._limiter.check(message)
            # Times that are relative to now become absolute.
            now, params = self.engine.clock.now(), message.params
            if message.deadline_in is not None:
                params = replace(params, deadline=now + message.deadline_in)
            arrival = now - message.age if message.age else None
            requests = self.engine.add(message.id, message.prompt, params, arrival, message.outputs)
        except (RequestError, PolicyError, ExecutorError) as error:
            self._outbox.append(refusal_of(message.id, error))
            return
        self._updates.add(requests)
        for notify in self.on_submit:
            notify(message, requests)
        self._limiter.count(requests)

    def _load(self) -> EngineLoad:
        scheduler, age = self.engine.scheduler, self.engine.step_seconds or 0.0
        return EngineLoad(len(scheduler.running), len(scheduler.queue) + self.num_unread, age)

    def _report_cache(self, query: ReportCache) -> list[bytes]:
        """A part of the keys now. Changes before come first: later deltas start from this state."""
        index = self.engine.scheduler.kv.pool.index
        if not self.report_cache:
            self.report_cache = True
            index.start_journal().drain()  # the parts have what is there now
        self._report_changes()
        return [key for key in index.block_of if key[0] % CACHE_PARTS == query.part]

    def _report_changes(self) -> None:
        index = self.engine.scheduler.kv.pool.index
        journal = index.journal or index.start_journal()  # a restarted engine has a new index
        if journal.has_changes:
            self._outbox.append(CacheDelta(*journal.drain()))

    def _flush(self) -> None:
        if self.report_cache:
            self._report_changes()
        if self._outbox and self._failure is None:
            messages, self._outbox = self._outbox, []
            self._deliver(messages)

    def _remove_observer(self, observer: Observer, error: Exception) -> None:
        """Remove an observer that raised, such as a trace writer on a full disk."""
        if observer == self._observe:
            raise error
        self.engine.observers.remove(observer)
        name = getattr(observer, "__qualname__", type(observer).__qualname__)
        log.warning("observer %s failed and was removed: %s", name, error)

    def _observe(self, event: Event) -> None:
        """Deliver the updates of a step before anything else reacts to them."""
        self._outbox += self._updates.of(event)
        if not isinstance(event, Added | Planned):
            if self._report_load:
                self._outbox.append(self._load_reporter.report(self.engine.scheduler))
            self._flush()
