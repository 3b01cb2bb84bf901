"""The engine: plan a step, launch it, apply its result, give all events to the observers.

With async scheduling the next plan is made and launched while one is in flight; without it, a
plan is completed before the next is made. Knows nothing of text, devices or networks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from headway.checks import number_problem
from headway.engine.clock import Clock, RealClock
from headway.errors import (
    ConfigError,
    ExecutorError,
    InvalidRequest,
    PolicyError,
    ReplayMismatch,
    shorten,
)
from headway.events import Completed, Event, Planned
from headway.executor.base import Executor, Handle, Preparation
from headway.plan import Plan
from headway.record.sentences import explain
from headway.request import Request, RequestParams
from headway.scheduler import Scheduler

Observer = Callable[[Event], None]
OnObserverError = Callable[[Observer, Exception], None]
PLAIN = RequestParams()
MAX_SAMPLES = 1024
MAX_FAULTS = 3  # consecutive failed steps after which the engine stops


class Engine:
    """A scheduler, an executor and a clock, run step by step."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Clock | None = None,
        *,
        async_scheduling: bool = False,
        observers: Iterable[Observer] = (),
        in_flight: Iterable[tuple[Plan, Handle]] = (),
        preparation: Preparation | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """`in_flight` are plans that the scheduler has made before, oldest first."""
        if async_scheduling not in (False, True):
            raise ConfigError(f"async_scheduling must be True or False, not {async_scheduling!r}")
        self.scheduler = scheduler
        self.executor = executor
        self.clock = clock or RealClock()
        self.async_scheduling = bool(async_scheduling)
        self.observers = list(observers)
        # Called if an observer raises; None: the first error is raised after the last observer.
        self.on_observer_error: OnObserverError | None = None
        self.preparation = preparation  # of requests, before a server adds them
        self.vocab_size = vocab_size  # of the model; None: there is no model
        self.fault: str | None = None  # why the latest step failed; None once one succeeds
        self.lock = threading.RLock()  # held while scheduler state changes, never while a plan runs
        self.step_began: float | None = None  # clock time; None between two steps
        self._num_faults = 0
        self._flight: deque[tuple[Plan, Handle]] = deque(in_flight)
        self._last_progress = self.clock.now()
        self._events: deque[Event] = deque()  # that the observers have not had
        self.scheduler.observe(self._note)

    def _note(self, event: Event) -> None:
        event.time = self.clock.now()
        if isinstance(event, Planned):
            event.began = event.time if self.step_began is None else self.step_began
        self._events.append(event)

    @property
    def is_healthy(self) -> bool:
        return self.fault is None

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.requests or self._flight or self._events)

    @property
    def num_in_flight(self) -> int:
        return len(self._flight)

    @property
    def seconds_since_progress(self) -> float:
        """Seconds since a step ended, or since work arrived at an idle engine."""
        return self.clock.now() - self._last_progress

    @property
    def step_seconds(self) -> float | None:
        """Duration of the running step so far; None between steps. Safe from any thread."""
        began = self.step_began
        return None if began is None else max(0.0, self.clock.now() - began)

    @property
    def has_given_up(self) -> bool:
        """Whether MAX_FAULTS consecutive steps have failed; it then takes no more requests."""
        return self._num_faults >= MAX_FAULTS

    @property
    def stop_message(self) -> str:
        return (
            f"the engine has stopped after {self._num_faults} consecutive failed steps; the latest "
            f"error: {self.fault}; restart the process"
        )

    def add(
        self,
        id: str,
        prompt: Iterable[int],
        params: RequestParams = PLAIN,
        arrival: float | None = None,
        outputs: Sequence[Sequence[int] | None] = (),
    ) -> list[Request]:
        """Add a request; n samples become n requests that share the prompt's blocks.

        `outputs` continue a request that another engine has begun: for each sample, the tokens that
        it has generated, or None if it has ended. Then the open samples are added, the first of
        them with the id of the request. All samples are added or none. RequestError if the request
        is wrong, PolicyError if a policy failed; then nothing has changed.
        """
        if self.has_given_up:
            raise ExecutorError(self.stop_message)
        check_call(id, params)
        now = self.clock.now()
        arrival = now if arrival is None else arrival
        known = _open_outputs(id, params.n, outputs)
        (first, output), *others = known.items()
        parent = Request(id, prompt, params, arrival=arrival, sample=first, output=output)
        samples = [parent] + [
            Request(
                f"{id}/{i}", parent.prompt, params, arrival=arrival, parent=parent, sample=i,
                output=output,
            )
            for i, output in others
        ]  # fmt: skip
        if not self.has_work:  # before there is work, for other threads that look at both
            self._last_progress = now
        self.scheduler.add(*samples)
        return samples

    def abort(self, id: str) -> bool:
        """End a request and its samples at once. False if there is none."""
        alive = self.scheduler.requests
        parent = alive.get(id)
        if parent is None:  # it has ended; other samples may still run
            candidates = list(alive.values())
        else:
            names = (f"{id}/{i}" for i in range(1, parent.params.n))
            candidates = [alive[name] for name in names if name in alive]
        samples = [r.id for r in candidates if r.parent and r.parent.id == id]
        return sum(self.scheduler.abort(each) for each in (id, *samples)) > 0

    def stop(self, id: str) -> bool:
        """End one sample with finish reason "stop"; False if there is none."""
        return self.scheduler.abort(id, "stop")

    def stop_sample(self, id: str, sample: int) -> bool:
        """Like `stop`, for a sample given by its number."""
        first = self.scheduler.requests.get(id)  # not sample 0 if that had ended elsewhere
        is_first = first is not None and first.sample == sample
        return self.stop(id) if is_first else sample > 0 and self.stop(f"{id}/{sample}")

    def step(self) -> Completed | None:
        """Launch the next plan, complete the oldest (None: none was due), tell the observers."""
        if self.scheduler.is_idle and not self._flight:
            self.tell()
            return None
        self.step_began = self.clock.now()
        refused: PolicyError | None = None
        try:  # an error in a policy or the executor ends requests, not the engine
            try:
                with self.lock:
                    plan = self.scheduler.schedule()
            except PolicyError as error:
                if error.request_id not in self.scheduler.requests:
                    raise
                plan, refused = Plan(-1), error  # the policy failed for one request
            is_empty = plan.is_empty
            if not is_empty:
                self._flight.append((plan, self.executor.launch(plan)))
            is_due = self._flight and (is_empty or len(self._flight) > self.async_scheduling)
            completed = self._complete_oldest() if is_due else None
            if refused is not None:
                self._end_request(refused)
        except ReplayMismatch:
            raise  # no step failed: the recorded run ends here
        except Exception as failure:
            self._fail(failure)
            return None
        except BaseException:
            self._interrupt()
            raise
        finally:
            self.step_began = None
        self.tell()
        if refused is not None:
            self.fault = _text_of(refused)
        return completed

    def _interrupt(self) -> None:
        """Leave no request half done."""
        self._flight.clear()
        try:
            self.scheduler.fail("interrupted")
        except Exception:  # interrupted in the middle of a change
            self.restart()

    def _complete_oldest(self) -> Completed:
        """Wait for the oldest plan in flight, without the lock, and apply its result."""
        plan, handle = self._flight[0]
        result = handle.wait()
        with self.lock:
            completed = self.scheduler.complete(plan, result)
            self._flight.popleft()
        return completed

    def run(self) -> None:
        """Step until no work is left."""
        while self.has_work:
            self.step()

    def restart(self) -> None:
        """Start over without requests and cache, after a step was interrupted in the middle."""
        self._flight.clear()
        self._events.clear()
        before = self.scheduler
        self.scheduler = Scheduler(before.config, records_answers=before.records_answers)
        self.scheduler.observe(self._note)

    def why(self) -> str:
        """Explain the current state in sentences: what runs, what waits and why."""
        return explain(self.scheduler, len(self._flight), self.seconds_since_progress, self.fault)

    def tell(self) -> None:
        """Give the observers all events that they have not had; every step does."""
        errors: list[Exception] = []
        while self._events:
            event = self._events.popleft()
            self._last_progress = event.time
            if isinstance(event, Completed):
                self.fault, self._num_faults = None, 0
            for observe in tuple(self.observers):
                try:
                    observe(event)
                except Exception as error:
                    if self.on_observer_error is None:
                        errors.append(error)
                    else:
                        self.on_observer_error(observe, error)
        if errors:  # only now: every observer has had every event
            raise errors[0]

    def _end_request(self, error: PolicyError) -> None:
        """End the request that a policy failed for; recompute the others, as its plan is not run."""
        assert error.request_id is not None and not self._flight, "the step before it is complete"
        with self.lock:
            self.scheduler.fail(_text_of(error))
            self.scheduler.abort(error.request_id, "error", _text_of(error))

    def _fail(self, error: Exception) -> None:
        """End the requests in flight; after MAX_FAULTS consecutive failures, all requests."""
        self.fault = _text_of(error)
        self._num_faults += 1
        with self.lock:
            self._flight.clear()
            self.scheduler.fail(self.fault)
            if self.has_given_up:
                for id in list(self.scheduler.requests):
                    self.scheduler.abort(id, "error", self.fault)
        self.tell()


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _open_outputs(
    id: str, n: int, outputs: Sequence[Sequence[int] | None]
) -> dict[int, Sequence[int]]:
    """The output of each open sample, by number; InvalidRequest unless `outputs` has n entries."""
    if outputs and len(outputs) != n:
        raise InvalidRequest(f"request {id!r}: outputs must have {n} entries, not {len(outputs)}")
    known = {i: each for i, each in enumerate(outputs or [()] * n) if each is not None}
    if not known:
        raise InvalidRequest(f"request {id!r}: all {n} samples have ended; nothing is left to do")
    return known


def check_call(id: object, params: object) -> None:
    """InvalidRequest unless id and params have the right types and n is in its range."""
    if not isinstance(id, str):
        raise InvalidRequest(f"the id of a request must be a string, not {shorten(id)}")
    if not isinstance(params, RequestParams):
        raise InvalidRequest(
            f"request {id!r}: params must be a RequestParams, not {shorten(params)}"
        )
    if problem := number_problem(params.n, 1, MAX_SAMPLES, whole=True):
        raise InvalidRequest(f"request {id!r}: n {problem}")
