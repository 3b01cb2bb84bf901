"""An engine that runs by itself: takes messages from any thread, steps while there is work.

What the engine reports becomes messages again, one batch for each step, handed to `deliver` on the
loop's own thread. Knows no sockets, no text and no asyncio.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sized
from dataclasses import dataclass
from typing import Any

from headway.engine.engine import Engine, Observer
from headway.engine.latest import Latest
from headway.engine.messages import (
    Cancel,
    EngineStopped,
    FromLoop,
    Query,
    QueryResult,
    Submit,
    ToLoop,
    refusal_of,
)  # fmt: skip
from headway.engine.news import News
from headway.errors import ExecutorError, Overloaded, PolicyError, RequestError
from headway.plan import StepReport
from headway.request import Request

Deliver = Callable[[list[FromLoop]], None]
Answer = Callable[[Any], Any]
OnSubmit = Callable[[Submit, list[Request]], None]
READ_SECONDS = 0.05  # a request of thousands of prompts must not hold up the next step for longer
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What may wait before newcomers are refused; None: any number."""

    max_waiting: int | None = None
    max_waiting_tokens: int | None = None
    max_per_client: int | None = None  # requests of one client, running or waiting


class EngineLoop:
    """Runs an engine on the thread that calls `run`, until `stop`."""

    def __init__(self, engine: Engine, deliver: Deliver, limits: Limits | None = None) -> None:
        self.engine = engine
        self.limits = limits or Limits()
        why = Latest(engine, engine.why)
        self.answers: dict[str, Answer] = {  # given between two steps
            "reset_prefix_cache": lambda _: engine.scheduler.reset_cache(),
        }
        self.observations: dict[str, Answer] = {  # given at once, on any thread, also during a step
            "why": lambda _: why.get()[0],
            "now": lambda _: engine.clock.now(),
            "load": lambda _: self._load(),
        }
        self.on_submit: list[OnSubmit] = []  # called on the loop's thread, before the first step
        self.begin: Callable[[], None] = lambda: None  # on the loop's thread, before anything else
        self.ended: str | None = None  # why the loop is over; None while it runs
        self._deliver = deliver
        self._inbox: deque[ToLoop] = deque()
        self._wake = threading.Condition()
        self._is_stopping = False
        self._news = News(engine)
        self._outbox: list[FromLoop] = []
        self._waiting_tokens: int | None = None  # counted once between two steps, if need be
        engine.observers.append(self._observe)
        engine.forgive = self._leave_out

    # From any thread.

    def post(self, messages: Iterable[ToLoop]) -> None:
        """Hand messages to the loop; they are read before its next step."""
        with self._wake:
            self._inbox.extend(messages)
            self._wake.notify()

    def stop(self) -> None:
        """End the loop after the step it is in. What is open is told that it is gone."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()

    @property
    def num_unread(self) -> int:
        """Requests that were received during the running step and are not scheduled yet."""
        with self._wake:
            return sum(max(1, each.params.n) for each in self._inbox if isinstance(each, Submit))

    def reply(self, message: Query) -> QueryResult:
        """The answer to a query; the reply names the error if it cannot be answered."""
        try:
            answer = self.observations.get(message.what) or self.answers[message.what]
            return QueryResult(message.number, answer(message.details))
        except Exception as error:  # a query that fails must not end the loop
            return QueryResult(message.number, None, f"{type(error).__name__}: {error}")

    # On the loop's thread.

    def run(self) -> None:
        """Until `stop`, or until something breaks that no step may break."""
        try:
            self.begin()
            while self._wait_for_work():
                self._read()
                if self.engine.has_work:
                    self.engine.step()
                self._flush()
            self.ended = "the engine was stopped"
        except BaseException as error:
            self.ended = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._outbox.append(EngineStopped(self.ended or "the engine has ended"))
            self._flush()

    def _wait_for_work(self) -> bool:
        """True once there is something to do; False if the loop is to end."""
        if self.engine.has_work:
            return not self._is_stopping
        with self._wake:
            while not (self._inbox or self._is_stopping):
                self._wake.wait()
        return not self._is_stopping

    def _read(self) -> None:
        """Read messages in order; after `READ_SECONDS` the rest waits for the next step to end."""
        self._waiting_tokens = None
        ends_at = time.perf_counter() + READ_SECONDS
        while self._inbox and time.perf_counter() < ends_at:
            with self._wake:
                message = self._inbox.popleft()
            with self.engine.lock:
                self._take(message)

    def _take(self, message: ToLoop) -> None:
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Cancel):
            self._cancel(message)
        else:
            self._outbox.append(self.reply(message))

    def _submit(self, message: Submit) -> None:
        try:
            self._check_room(message)
            requests = self.engine.add(message.id, message.prompt, message.params)
        except (RequestError, PolicyError, ExecutorError) as error:
            self._outbox.append(refusal_of(message.id, error))
            return
        self._news.expect(requests)
        for notify in self.on_submit:
            notify(message, requests)
        if self._waiting_tokens is not None:
            self._waiting_tokens += len(requests) * requests[0].num_prompt

    def _check_room(self, message: Submit) -> None:
        """Overloaded if the queue, or the client's part of it, is full."""
        scheduler, limits = self.engine.scheduler, self.limits
        num_waiting = len(scheduler.queue)
        if limits.max_waiting is not None and num_waiting >= limits.max_waiting:
            raise Overloaded(f"{num_waiting} requests wait, and no more than that may")
        if limits.max_waiting_tokens is not None:
            waiting = self._num_waiting_tokens()
            # The engine refuses a prompt that has no length.
            num_prompt = len(message.prompt) if isinstance(message.prompt, Sized) else 0
            if num_waiting and waiting + num_prompt > limits.max_waiting_tokens:
                raise Overloaded(
                    f"{waiting} tokens wait; with {num_prompt} more they would be over "
                    f"{limits.max_waiting_tokens}"
                )
        if limits.max_per_client is not None:
            client = message.params.client
            open_ = sum(r.params.client == client for r in scheduler.requests.values())
            if open_ >= limits.max_per_client:
                raise Overloaded(f"client {client!r} has {open_} requests open, which is the most")

    def _num_waiting_tokens(self) -> int:
        """Tokens of all who wait; those cancelled since the latest step may still be among them."""
        if self._waiting_tokens is None:
            waiting = self.engine.scheduler.queue  # in any order: a rule need not be asked
            self._waiting_tokens = sum(request.num_known for request in waiting)
        return self._waiting_tokens

    def _cancel(self, message: Cancel) -> None:
        if message.sample is None:
            self.engine.abort(message.id)
        else:
            self.engine.stop(f"{message.id}/{message.sample}" if message.sample else message.id)

    def _load(self) -> dict[str, float]:
        scheduler, age = self.engine.scheduler, self.engine.step_seconds or 0.0
        num_waiting = len(scheduler.queue) + self.num_unread
        return {"running": len(scheduler.running), "waiting": num_waiting, "age": age}

    def _flush(self) -> None:
        if self._outbox:
            messages, self._outbox = self._outbox, []
            self._deliver(messages)

    def _leave_out(self, observer: Observer, error: Exception) -> None:
        """An observer that raises, as a trace on a full disk: requests go on without it."""
        if observer == self._observe:
            raise error
        self.engine.observers.remove(observer)
        name = getattr(observer, "__qualname__", type(observer).__qualname__)
        log.warning("%s has failed and is left out from now on: %s", name, error)

    def _observe(self, report: StepReport) -> None:
        """What a step brought goes out before anything else is done about it."""
        self._outbox += self._news.of(report)
        self._flush()
