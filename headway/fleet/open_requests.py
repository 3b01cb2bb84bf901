"""What a fleet keeps of its open requests, so that other replicas can continue them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from msgspec.structs import replace

from headway.checks import token_array
from headway.engine.clock import Clock
from headway.engine.gained import Gained
from headway.engine.messages import (
    FinishInfo,
    FromLoop,
    Refusal,
    SampleUpdate,
    Submit,
    refusal_of,
)
from headway.errors import ExecutorError, NoReplica
from headway.fleet.settings import FleetCounters, FleetSettings
from headway.request import Request

NO_REPLICA = "no_replica"  # error code of a request that waited for a replica, and of the refusal


@dataclass(slots=True, eq=False)
class OpenSample(Gained):
    """What one sample has gained, and whether a stop was requested or its end was sent."""

    is_stopping: bool = False
    is_ended: bool = False


@dataclass(slots=True, eq=False)
class OpenRequest:
    """An open request, where it runs, and how often it has moved."""

    submit: Submit
    arrived: float  # on the fleet's clock, as all times here
    samples: list[OpenSample]
    replica: str | None = None  # None: it waits for a replica
    num_sent: int = 0  # replicas that it was sent to
    sent_at: float | None = None  # to its replica; None once that has sent a token
    num_unproved: int = 0  # tokens that its replica must send until earlier losses do not count
    num_moves: int = 0
    num_losses: int = 0  # replicas that were lost while this request was there, or a step failed
    num_in_row: int = 0  # those that count against it, since its latest token
    lost_on: object = field(default=None, repr=False)  # the replica of the latest loss
    min_answer: int = 0  # a replica that has answered no query with this number may be lost, too
    sent_before: int = 0  # the next query's number when it was sent to its replica
    reason: str = ""  # why it left its latest replica
    first_token: float | None = None
    num_scored: int = 0  # prompt positions whose log probabilities were passed on
    is_cancelled: bool = False
    is_resuming: bool = False  # only its replica knows the tokens so far
    avoids: set[str] = field(default_factory=set)  # replicas that were full, or failed with it

    @classmethod
    def of(cls, submit: Submit, now: float) -> OpenRequest:
        """The open request for a valid Submit; RequestError if its prompt is malformed."""
        prompt = token_array(f"request {submit.id!r}: prompt", submit.prompt)
        outputs = submit.outputs or ((),) * submit.params.n
        samples = [OpenSample(list(each or ()), is_ended=each is None) for each in outputs]
        return cls(replace(submit, prompt=prompt), now - submit.age, samples)

    @property
    def id(self) -> str:
        return self.submit.id

    @property
    def replica_id(self) -> str:
        """The id at its replica: a new one for each move, so that old and new are never mixed up."""
        return self.id if self.num_sent <= 1 else f"{self.id}~{self.num_sent - 1}"

    @property
    def num_tokens(self) -> int:
        """Tokens that its open samples have generated."""
        return sum(len(sample.tokens) for _, sample in self.open_samples())

    @property
    def is_ended(self) -> bool:
        return all(sample.is_ended for sample in self.samples)

    @property
    def has_begun(self) -> bool:
        """Whether a replica has accepted it, or a sample has gained tokens or ended."""
        has_gained = any(sample.is_ended or sample.tokens for sample in self.samples)
        return self.num_moves > 0 or has_gained

    def open_samples(self) -> Iterator[tuple[int, OpenSample]]:
        return ((i, each) for i, each in enumerate(self.samples) if not each.is_ended)

    def is_suspect(self, settings: FleetSettings) -> bool:
        """Whether it may be the cause of losses, and must be alone on a replica."""
        in_row, total = settings.max_replica_losses, settings.max_total_losses
        return self.num_in_row >= in_row or self.num_losses >= total

    def loss_problem(self) -> str:
        return (
            f"{self.num_losses} replicas failed while it was there, the latest while it was there "
            f"alone, so it is probably the cause; the latest failure: {self.reason}"
        )

    def known(self) -> Request:
        """Its first open sample, with the tokens so far; RequestError if it is malformed."""
        _, sample = next(self.open_samples())
        return Request(self.id, self.submit.prompt, self.submit.params, output=sample.tokens)

    def message(self, now: float) -> Submit:
        """The message that starts the request on a replica, or continues it there."""
        outputs, history = self.submit.outputs, self.submit.history
        if self.has_begun:
            outputs = tuple(None if each.is_ended else tuple(each.tokens) for each in self.samples)
            history = tuple(
                each.update(self.id, number) for number, each in enumerate(self.samples)
                if each.is_ended or each.logprobs or each.prompt_logprobs
            )  # fmt: skip
        deadline = self.submit.params.deadline
        return replace(
            self.submit, id=self.replica_id, outputs=outputs, age=max(0.0, now - self.arrived),
            deadline_in=None if deadline is None else deadline - now, history=history,
        )  # fmt: skip

    def apply(self, update: SampleUpdate) -> SampleUpdate | None:
        """Keep what a sample gained; returns the update for the caller, None if it has ended."""
        sample = self.samples[update.sample]
        if sample.is_ended:
            return None
        scores, end = update.prompt_logprobs, update.end
        if scores:  # a replica that continues the request computes the prompt again
            scores = [each for each in scores if each[0] > self.num_scored] or None
            self.num_scored = scores[-1][0] if scores else self.num_scored
        if end is not None:
            sample.is_ended = True
            if self.num_moves and self.first_token is not None:
                # As the caller saw it: the first token may have come from an earlier replica.
                first = self.first_token - self.arrived
                end = end._replace(queue=min(end.queue, first), first_token=first)
        passed = replace(update, id=self.id, prompt_logprobs=scores, end=end)
        sample.add(passed)
        return passed

    def end(
        self,
        number: int,
        reason: str,
        now: float,
        error: str | None = None,
        code: str | None = None,
    ) -> SampleUpdate:
        total = now - self.arrived
        first = total if self.first_token is None else self.first_token - self.arrived
        info = FinishInfo(reason, None, error, 0, 0, first, first, total, code)
        self.samples[number].is_ended, self.samples[number].end = True, info
        return SampleUpdate(self.id, number, [], end=info)


class RequestTable:
    """All open requests of a fleet, and how they end without a replica."""

    def __init__(
        self, clock: Clock, counters: FleetCounters, emit: Callable[[FromLoop], None]
    ) -> None:
        self.open: dict[str, OpenRequest] = {}  # by id
        self.waiting: dict[OpenRequest, float] = {}  # for a replica, and since when
        self._clock, self._counters, self._emit = clock, counters, emit

    def wait(self, request: OpenRequest, max_waiting: int) -> None:
        """Keep a request until there is a replica for it; a new one is refused above the limit."""
        num_waiting = len(self.waiting)
        if num_waiting >= max_waiting and not request.has_begun and request not in self.waiting:
            problem = f"no replica is available, and {num_waiting} requests wait for one"
            self.fail(request, f"{problem} (limit {max_waiting})", NO_REPLICA)
            return
        self.waiting.setdefault(request, self._clock.now())

    def expire(self, limit: float, since: float) -> None:
        """End the requests that have waited for a replica for `limit` seconds.

        `since`: when a replica was there or was being started; before, they waited for another reason.
        """
        for request, began in list(self.waiting.items()):
            if self._clock.now() - max(began, since) >= limit:
                after = f" after it had to leave another one: {request.reason}" * bool(
                    request.reason
                )
                self.fail(request, f"no replica was available for {limit:g} s{after}", NO_REPLICA)

    def refuse(self, request: OpenRequest, refusal: Refusal) -> None:
        """Refuse a new request; one that has begun ends with the same text as its error."""
        if request.has_begun:
            self.fail(request, f"it could not be continued: {refusal.message}", "not_continued")
        else:
            self.forget(request)
            self._emit(refusal)

    def fail(self, request: OpenRequest, problem: str, code: str) -> None:
        """End a request with an error and its code; a new one is refused."""
        self._counters.num_failed += 1
        now, text = self._clock.now(), f"request {request.id!r} failed: {problem}"
        if not request.has_begun:
            kind = NoReplica if code == NO_REPLICA else ExecutorError
            self.refuse(request, refusal_of(request.id, kind(text)))
            return
        for number, _ in list(request.open_samples()):
            self._emit(request.end(number, "error", now, text, code))
        self.forget(request)

    def end_requested(self, request: OpenRequest) -> None:
        """End the samples whose end was requested, for a request that no replica has."""
        now = self._clock.now()
        for number, sample in list(request.open_samples()):
            if sample.is_stopping or request.is_cancelled:
                reason = "stop" if sample.is_stopping else "abort"
                self._emit(request.end(number, reason, now))
        if request.is_ended:
            self.forget(request)

    def forget(self, request: OpenRequest) -> None:
        self.waiting.pop(request, None)
        del self.open[request.id]
