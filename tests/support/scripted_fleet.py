"""Replicas without engines: each token of a request is a function of its id, sample and place.

A replica checks that a request continues with exactly the tokens that the caller has seen. A `World`
has a dispatcher with such replicas, and a caller that checks all it gets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil
from zlib import crc32

from xxhash import xxh3_128_digest

from headway.engine.async_engine import OnMessages
from headway.engine.clock import VirtualClock
from headway.engine.messages import (
    CacheDelta,
    Cancel,
    FinishInfo,
    FromLoop,
    LoadReport,
    Query,
    QueryResult,
    Refusal,
    SampleUpdate,
    Submit,
    TokenBatch,
    ToLoop,
)
from headway.engine.queries import CountRequests, EngineLoad, GetProblem, ReportCache
from headway.fleet.dispatcher import Dispatcher
from headway.fleet.replica import TICK_SECONDS, Replica
from headway.fleet.router import Router
from headway.fleet.routing import round_robin
from headway.fleet.settings import FleetSettings
from headway.request import RequestParams

SETTINGS = FleetSettings()


def expected_tokens(id: str, sample: int, num_tokens: int) -> list[int]:
    first = crc32(f"{id}/{sample}".encode()) % 1000
    return list(range(first, first + num_tokens))


def end_of(reason: str, error: str | None = None) -> FinishInfo:
    return FinishInfo(reason, None, error, 0, 0, 0.0, 0.0, 0.0)


@dataclass(eq=False)
class ScriptedReplica:
    """A client of a replica that advances when a test says so. `seen` returns a caller's tokens."""

    seen: Callable[[str, int], list[int] | None]  # of a request's sample; None: it has ended
    outbox: list[list[FromLoop]] = field(default_factory=list)  # batches on their way
    assigned: dict[str, dict[int, list[int]]] = field(default_factory=dict)  # tokens by sample
    submits: dict[str, Submit] = field(default_factory=dict)
    keys: set[bytes] = field(default_factory=set)  # of its cache
    reported_keys: set[bytes] = field(default_factory=set)  # those that it has reported
    num_steps: int = 0
    problem: str | None = None
    is_full: bool = False
    is_frozen: bool = False  # as a process that is stopped, or has ended: nothing is answered
    num_prefill_steps: Callable[[], int] = lambda: 0  # of a request, before its first token
    is_closed: bool = False
    _inbox: list[ToLoop] = field(default_factory=list)
    _answers: list[FromLoop] = field(default_factory=list)  # of the next step
    _unanswered: list[GetProblem] = field(default_factory=list)
    _prefill: dict[str, int] = field(default_factory=dict)  # steps left

    async def open(self, on_messages: OnMessages) -> None: ...

    async def close(self) -> None:
        self.is_closed = True

    def send(self, messages: list[ToLoop]) -> None:
        for message in messages:
            if isinstance(message, Submit):
                self._check(message)
        self._inbox += messages
        # Answered by the process, also while a step runs.
        self._unanswered += [each for each in messages if isinstance(each, GetProblem)]
        self.answer()

    def answer(self) -> None:
        if not self.is_frozen:
            self.outbox += [[QueryResult(each.number, self.problem)] for each in self._unanswered]
            self._unanswered.clear()

    def _check(self, message: Submit) -> None:
        """A continued request has all tokens that the caller has, and no more."""
        id, outputs = message.id.partition("~")[0], message.outputs or ((),) * message.params.n
        assert len(outputs) == message.params.n and any(each is not None for each in outputs)
        for sample, output in enumerate(outputs):
            seen = self.seen(id, sample)
            assert output == (None if seen is None else tuple(seen))
        assert message.id not in self.assigned, "an id is used once"

    def step(self, num_tokens: int = 1) -> None:
        """Read all messages, advance every sample, and queue one batch."""
        batch, self._answers = self.read(), []
        for wire_id in list(self.assigned):
            batch += self._advance(wire_id, num_tokens)
        self.num_steps += 1
        added, removed = self.keys - self.reported_keys, self.reported_keys - self.keys
        self.reported_keys = set(self.keys)
        if added or removed:  # as an engine
            batch.append(CacheDelta(sorted(added), sorted(removed), False))
        self.outbox.append([*batch, self.load()])

    def read(self) -> list[FromLoop]:
        """Read all messages without a step; what refers to them is sent with the next one."""
        for message in self._inbox:
            self._answers += self._read(message)
        self._inbox.clear()
        return self._answers

    def assign_for_another_gateway(self, id: str) -> None:
        """Assign a long request that this fleet does not know."""
        self.submits[id] = Submit(id, [5], RequestParams(max_tokens=1000))
        self.assigned[id], self._prefill[id] = {0: []}, 0

    def load(self) -> LoadReport:
        return LoadReport(self.num_steps, len(self.assigned), 0, 0, 10, 10)

    def fail_step(self) -> None:
        """All requests end with the error of the step."""
        ends: list[FromLoop] = [
            SampleUpdate(id, sample, [], end=end_of("error", "the device was lost"))
            for id, samples in self.assigned.items() for sample in samples
        ]  # fmt: skip
        self.assigned.clear()
        self.outbox.append(ends)

    def _read(self, message: ToLoop) -> list[FromLoop]:
        if isinstance(message, GetProblem):
            return []
        if isinstance(message, CountRequests):
            return [QueryResult(message.number, len(self.assigned))]
        if isinstance(message, Query):
            value = [] if isinstance(message, ReportCache) else EngineLoad(1, 0, 0.0)
            return [QueryResult(message.number, value)]
        if isinstance(message, Cancel):
            return self._cancel(message)
        if self.is_full and not message.outputs:
            fields = {"retry_after": 1.0}
            return [Refusal(message.id, "Overloaded", f"no room for {message.id}", fields)]
        outputs = message.outputs or ((),) * message.params.n
        self.submits[message.id] = message
        self.assigned[message.id] = {
            sample: list(output) for sample, output in enumerate(outputs) if output is not None
        }
        self._prefill[message.id] = self.num_prefill_steps()
        self.keys.add(xxh3_128_digest(message.id.partition("~")[0].encode()))
        return []

    def _cancel(self, message: Cancel) -> list[FromLoop]:
        samples = self.assigned.get(message.id, {})
        which = list(samples) if message.sample is None else [message.sample] * (
            message.sample in samples
        )  # fmt: skip
        for sample in which:
            del samples[sample]
        if not samples:
            self.assigned.pop(message.id, None)
        reason = "abort" if message.sample is None else "stop"
        return [SampleUpdate(message.id, sample, [], end=end_of(reason)) for sample in which]

    def _advance(self, wire_id: str, num_tokens: int) -> list[FromLoop]:
        id, updates = wire_id.partition("~")[0], list[FromLoop]()
        params, samples = self.submits[wire_id].params, self.assigned[wire_id]
        if self._prefill[wire_id]:
            self._prefill[wire_id] -= 1
            return []
        assert params.max_tokens is not None
        for sample, tokens in list(samples.items()):
            length = params.max_tokens + sample
            most = min(length, len(tokens) + num_tokens)
            tokens += (new := expected_tokens(id, sample, most)[len(tokens) :])
            if len(tokens) < length and params.n == 1:
                updates.append(TokenBatch([wire_id], [new]))
                continue
            end = end_of("length") if len(tokens) == length else None
            updates.append(SampleUpdate(wire_id, sample, new, end=end))
            if end is not None:
                del samples[sample]
        if not samples:
            del self.assigned[wire_id]
        return updates


class World:
    """A dispatcher, scripted replicas, and a caller that checks all it gets."""

    def __init__(self, settings: FleetSettings = SETTINGS) -> None:
        self.clock = VirtualClock()
        self.tokens: dict[str, list[list[int]]] = {}  # by request and sample
        self.ends: dict[str, dict[int, FinishInfo]] = {}
        self.refused: dict[str, Refusal] = {}
        self.answers: list[QueryResult] = []
        self.late: list[Replica] = []  # replicas that are gone, with batches on their way
        router = Router(round_robin, 4)
        self.fleet = Dispatcher(
            router, settings, self.clock, self.take, self.late.append, lambda _: None
        )

    def scripted(self, replica: Replica) -> ScriptedReplica:
        assert isinstance(replica.client, ScriptedReplica)
        return replica.client

    def take(self, message: FromLoop) -> None:
        if isinstance(message, TokenBatch):
            for id, tokens in zip(message.ids, message.tokens, strict=True):
                self._gain(id, 0, tokens)
        elif isinstance(message, SampleUpdate):
            self._gain(message.id, message.sample, message.tokens)
            if message.end is not None:
                self.ends[message.id][message.sample] = message.end
        elif isinstance(message, Refusal):
            assert message.id not in self.refused and not any(self.tokens[message.id])
            self.refused[message.id] = message
        else:
            assert isinstance(message, QueryResult)
            self.answers.append(message)

    def _gain(self, id: str, sample: int, tokens: list[int]) -> None:
        assert id not in self.refused and sample not in self.ends[id], "it has ended"
        self.tokens[id][sample] += tokens

    def seen(self, id: str, sample: int) -> list[int] | None:
        return None if sample in self.ends[id] else self.tokens[id][sample]

    def add(self, name: str) -> ScriptedReplica:
        client = ScriptedReplica(self.seen)
        self.fleet.add(Replica(name, client))
        self.fleet.flush()
        return client

    def submit(self, n: int = 1, length: int = 4) -> str:
        id = f"r{len(self.tokens)}"
        self.tokens[id], self.ends[id] = [[] for _ in range(n)], {}
        params = RequestParams(max_tokens=length, n=n)
        self.fleet.submit(Submit(id, [5, 6, 7, 8, 9], params))
        self.fleet.flush()
        return id

    def deliver(self, name: str, num_batches: int = 100) -> None:
        replica = self.fleet.replicas[name]
        outbox = self.scripted(replica).outbox
        for _ in range(min(num_batches, len(outbox))):
            self.fleet.receive(replica, outbox.pop(0))
        self.fleet.flush()

    def lose(self, name: str) -> None:
        """A replica is lost, and the others answer the fleet's questions."""
        self.fleet.lose(self.fleet.replicas[name], "killed")
        self.settle()

    def settle(self) -> None:
        """Deliver what is on its way until all has an answer."""
        self.fleet.flush()
        while any(self.scripted(each).outbox for each in self.fleet.replicas.values()):
            for name in tuple(self.fleet.replicas):
                self.deliver(name)

    def wait(self, seconds: float) -> None:
        """Time passes, and all replicas send heartbeats."""
        for _ in range(ceil(seconds / TICK_SECONDS)):
            self.clock.advance_to(self.clock.now() + TICK_SECONDS)
            for replica in self.fleet.replicas.values():
                replica.quiet_ticks = 0
            self.fleet.tick()
            self.settle()

    def step(self, *names: str) -> None:
        for name in names or tuple(self.fleet.replicas):
            self.scripted(self.fleet.replicas[name]).step()
            self.deliver(name)

    def where(self, id: str) -> str | None:
        return self.fleet.requests[id].replica
