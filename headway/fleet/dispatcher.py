"""Places requests on replicas, and moves them when a replica is lost, hangs or is drained.

The caller of the fleet sees one engine: every request gets its tokens once and ends once. Messages
of a replica that is gone are ignored. Does no I/O and reads time from
the clock it is given; `tick` must be called every TICK_SECONDS (replica.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from msgspec.structs import astuple, replace

from headway.engine.clock import Clock
from headway.engine.engine import check_call
from headway.engine.messages import (
    CacheDelta,
    Cancel,
    Drain,
    EngineStopped,
    FromLoop,
    LoadReport,
    QueryResult,
    Refusal,
    SampleUpdate,
    Submit,
    TokenBatch,
    refusal_of,
)
from headway.errors import PolicyError, RequestError
from headway.fleet.open_requests import OpenRequest, RequestTable
from headway.fleet.queries import FleetQueries
from headway.fleet.replica import Replica
from headway.fleet.router import Router
from headway.fleet.settings import FleetCounters, FleetSettings
from headway.kv.prompt_keys import PromptKeys

OnReplica = Callable[[Replica], None]
log = logging.getLogger(__name__)


class Dispatcher:
    """All replicas and all open requests of a fleet."""

    def __init__(
        self,
        router: Router,
        settings: FleetSettings,
        clock: Clock,
        emit: Callable[[FromLoop], None],
        on_gone: OnReplica,
        on_drain: OnReplica,
    ) -> None:
        """`emit` takes messages for the caller, `on_gone` replicas whose client must be closed.

        `on_drain` takes replicas that are about to stop.
        """
        self.router, self.settings, self.clock = router, settings, clock
        self.counters = FleetCounters()
        self._had_hope = clock.now()  # when a replica took requests or was being started
        self.replicas: dict[str, Replica] = {}
        self.num_starting = 0  # replicas that are being started; requests wait for them
        self.table = RequestTable(clock, self.counters, emit)
        self.requests = self.table.open
        self.queries = FleetQueries(self.replicas, self.counters, emit)
        self._emit, self._on_gone = emit, on_gone
        self._changed: dict[str, None] = {}  # replicas whose load the router does not know yet
        self._on_message: dict[type[FromLoop], Callable[[Replica, Any], None]] = {
            TokenBatch: self._take_tokens,
            SampleUpdate: self._take_update,
            LoadReport: Replica.report,
            CacheDelta: lambda replica, delta: router.tracker.apply(replica.name, *astuple(delta)),
            Refusal: self._take_refusal,
            QueryResult: self.queries.receive,
            Drain: lambda replica, _: on_drain(replica),
            EngineStopped: lambda replica, message: self.lose(replica, message.reason),
        }

    # From the caller.

    def submit(self, message: Submit) -> None:
        try:
            check_call(message.id, message.params)
            request = OpenRequest.of(message, self.clock.now())
            request.known()
        except RequestError as error:
            self._emit(refusal_of(message.id, error))
            return
        self.requests[message.id] = request
        self._place(request)

    def cancel(self, message: Cancel) -> None:
        request = self.requests.get(message.id)
        if request is None:
            return
        if message.sample is None:
            request.is_cancelled = True
        elif message.sample < len(request.samples):
            request.samples[message.sample].is_stopping = True
        if request.replica is None:
            self.table.end_requested(request)
        else:
            self.replicas[request.replica].post(Cancel(request.replica_id, message.sample))

    def flush(self) -> None:
        """Send what was queued for the replicas, one batch for each."""
        while ready := [each for each in self.replicas.values() if each.outgoing]:
            for replica in ready:
                replica.flush()

    # From replicas.

    def add(self, replica: Replica) -> None:
        """A replica takes requests from now on."""
        if (before := self.replicas.get(replica.name)) is not None:
            self.lose(before, "it has connected again")
        self.replicas[replica.name] = replica
        self._changed[replica.name] = None
        for request in list(self.table.waiting):
            self._place(request)

    def receive(self, replica: Replica, messages: list[FromLoop]) -> None:
        """Process a batch of a replica; ignored if the replica is gone."""
        replica.quiet_ticks = 0
        self._changed[replica.name] = None
        self.counters.num_frames += not replica.is_gone
        for message in messages:
            if replica.is_gone:
                return
            self._on_message[type(message)](replica, message)

    def lose(self, replica: Replica, reason: str) -> None:
        """A replica has ended or hangs: its requests continue elsewhere."""
        if replica.is_gone:
            return
        self.counters.num_losses += self.replicas.get(replica.name) is replica
        log.warning(
            "replica %s was lost with %d requests: %s", replica.name, len(replica.open), reason
        )
        for request in self._release(replica, reason):
            self._move(request, reason, is_loss=True)

    def drain(self, replica: Replica) -> None:
        """Move the requests of a replica elsewhere. It gets no new ones."""
        if not replica.takes_requests:
            return
        replica.is_draining = True
        self._changed[replica.name] = None
        self.counters.num_drains += 1
        requests, replica.open = list(replica.open.values()), {}
        log.info("replica %s is drained; %d requests move", replica.name, len(requests))
        for request in requests:
            replica.post(Cancel(request.replica_id))
        for request in requests:
            self._move(request, "its replica was drained")

    def remove(self, replica: Replica) -> None:
        """A replica leaves as planned."""
        self.drain(replica)
        if not replica.is_gone:
            replica.flush()
            self._release(replica, "the replica was removed")

    def tick(self) -> None:
        """Find replicas that hang, and requests that have waited too long for a replica."""
        for replica in list(self.replicas.values()):
            if problem := replica.tick(self.settings):
                self.lose(replica, problem)
        if any(each.takes_requests for each in self.replicas.values()) or self.num_starting:
            self._had_hope = self.clock.now()
        self.table.expire(self.settings.no_replica_seconds, since=self._had_hope)

    # One request.

    def _place(self, request: OpenRequest) -> None:
        """Send a request to the replica that the rule chooses; without any, it waits."""
        self._tell_router()
        known = request.known()
        keys = PromptKeys(known, self.router.block_size) if known.params.reads_cache else ()
        try:
            choice = self.router.choose(
                request.id, known.num_known, keys, known.params.client, request.avoids
            )
        except PolicyError as error:
            self.table.refuse(request, refusal_of(request.id, error))
            return
        if choice is None:
            self.table.wait(request, self.settings.max_waiting)
            return
        self.table.waiting.pop(request, None)
        request.num_sent += 1
        request.sent_at = now = self.clock.now()
        replica = self.replicas[choice.replica]
        replica.assign(request, choice.num_new)
        replica.post(request.message(now))
        self._changed[replica.name] = None

    def _tell_router(self) -> None:
        """Tell the router what has changed, so that placing a request does not read all replicas."""
        for name in self._changed:
            replica = self.replicas.get(name)
            if replica is not None and replica.takes_requests:
                self.router.update(replica.router_load())
            else:
                self.router.remove(name)
        self._changed.clear()

    def _move(self, request: OpenRequest, reason: str, *, is_loss: bool = False) -> None:
        """Continue a request elsewhere; it fails if it has reached a limit."""
        request.avoids = {request.replica or ""}
        request.replica = None
        self.table.end_requested(request)
        if request.is_ended:
            return
        request.num_losses += is_loss
        if problem := request.move_problem(self.settings, reason):
            self.table.fail(request, problem, "replicas_failed")
            return
        request.num_moves += 1
        self.counters.num_moves += 1
        self.counters.num_resumed_tokens += request.num_tokens
        self._place(request)

    def _take_tokens(self, replica: Replica, batch: TokenBatch) -> None:
        ids, tokens, now = list[str](), list[list[int]](), self.clock.now()
        for id, gained in zip(batch.ids, batch.tokens, strict=True):
            request = replica.open.get(id)
            if request is not None:
                request.samples[0].tokens += gained
                if request.sent_at is not None:
                    self._first_token(request, now - request.sent_at)
                ids.append(request.id)
                tokens.append(gained)
        if ids:
            self._emit(TokenBatch(ids, tokens))

    def _first_token(self, request: OpenRequest, seconds: float) -> None:
        """The first token from a replica arrives, `seconds` after the request was sent to it."""
        request.sent_at = None
        if request.first_token is None:
            request.first_token = self.clock.now()
        if request.num_moves:
            self.counters.resume_seconds += seconds
            text = "request %s continues on replica %s after %.3f s"
            log.info(text, request.id, request.replica, seconds)

    def _take_update(self, replica: Replica, update: SampleUpdate) -> None:
        request = replica.open.get(update.id)
        if request is None:
            return
        end = update.end
        # A step failed; with a code, the request itself caused the error.
        has_failed = end is not None and end.reason == "error" and end.error_code is None
        is_dropped = end is not None and end.reason == "abort" and not request.is_cancelled
        if has_failed or is_dropped:
            update = replace(update, end=None)
        if update.tokens and request.sent_at is not None:
            self._first_token(request, self.clock.now() - request.sent_at)
        if update.end or update.tokens or update.prompt_logprobs:
            passed = request.apply(update)
            if passed is not None:
                self._emit(passed)
        if has_failed or is_dropped:
            del replica.open[request.replica_id]
            replica.post(Cancel(request.replica_id))  # its other samples
            reason = (end and end.error) or "the replica aborted it"
            self._move(request, reason, is_loss=has_failed)
        elif request.is_ended:
            del replica.open[request.replica_id]
            self.table.forget(request)

    def _take_refusal(self, replica: Replica, message: Refusal) -> None:
        request = replica.open.get(message.id)
        if request is None:
            return
        if message.kind == "ExecutorError":  # the engine has given up: it refuses everything
            self.lose(replica, message.message)
            return
        del replica.open[message.id]
        request.replica = None
        if message.kind == "Overloaded":
            request.avoids.add(replica.name)
            ready = [each.name for each in self.replicas.values() if each.takes_requests]
            if not request.avoids.issuperset(ready):
                self._place(request)
                return
        text = message.message.replace(message.id, request.id)
        self.table.refuse(request, replace(message, id=request.id, message=text))

    def _release(self, replica: Replica, reason: str) -> list[OpenRequest]:
        """Take a replica out of the fleet; returns its requests."""
        replica.is_gone = True
        requests, replica.open = list(replica.open.values()), {}
        if self.replicas.get(replica.name) is replica:
            del self.replicas[replica.name]
            self.router.forget(replica.name)
        self.queries.fail(replica, reason)
        if requests:  # it may hang and come back
            replica.client.send([Cancel(request.replica_id) for request in requests])
        self._on_gone(replica)
        return requests
