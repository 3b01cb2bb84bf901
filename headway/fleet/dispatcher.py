"""Places requests on replicas, and moves them when a replica is lost, hangs or is drained.

The caller of the fleet sees one engine: every request gets its tokens once and ends once. Messages
of a replica that is gone are ignored. Does no I/O; `tick` must be called every TICK_SECONDS (replica.py).
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
    Resume,
    SampleUpdate,
    Submit,
    TokenBatch,
    refusal_of,
)
from headway.errors import NotResumable, RequestError
from headway.fleet.open_requests import OpenRequest, RequestTable
from headway.fleet.placement import Placement
from headway.fleet.queries import FleetQueries
from headway.fleet.replica import Replica
from headway.fleet.router import Router
from headway.fleet.settings import FleetCounters, FleetSettings

OnReplica = Callable[[Replica], None]
DRAINED = "replica {} was drained"
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
        self._unsent: dict[Replica, None] = {}  # so that a frame of one replica reads no others
        self.num_starting = 0  # replicas that are being started; requests wait for them
        self.table = RequestTable(clock, self.counters, emit)
        self.requests = self.table.open
        self.queries = FleetQueries(self.replicas, emit)
        self.placement = Placement(router, settings, clock, self.counters, self.table, self.queries)
        self._emit, self._on_gone = emit, on_gone
        self._failed_steps: dict[OpenRequest, str] = {}  # of one batch, with the errors
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
        self.placement.place(request)

    def resume(self, message: Resume) -> None:
        """Go on with a request of a lost gateway, on the replica that holds it."""
        submit, replica = message.submit, self.replicas.get(message.replica)
        if replica is None:
            problem = f"request {submit.id!r} was on replica {message.replica}, which is lost"
            self._emit(refusal_of(submit.id, NotResumable(problem)))
            return
        request = self.requests[submit.id] = OpenRequest.of(submit, self.clock.now())
        request.is_resuming = True
        request.num_sent = int(message.held_id.partition("~")[2] or 0) + 1
        request.sent_before = self.queries.next_number
        replica.assign(request, 0)
        replica.post(message)

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
        """Move what can move, and send what was queued for the replicas, one batch for each."""
        self.placement.settle()
        while self._unsent:
            for replica in list(self._unsent):
                if replica.is_unconfirmed:
                    self.placement.ping(replica)
                replica.flush()
            self.placement.settle()  # an engine of this process has answered already

    # From replicas.

    def add(self, replica: Replica) -> None:
        """A replica takes requests from now on."""
        if (before := self.replicas.get(replica.name)) is not None:
            self.lose(before, "it has connected again")
        self.replicas[replica.name] = replica
        replica.unsent = self._unsent
        self.placement.changed[replica] = None
        replica.answered = self.queries.next_number - 1  # it has just connected
        self.placement.follow(replica)
        for leaving in self.replicas.values():
            if leaving.is_draining:
                self.placement.move_all(leaving, DRAINED.format(leaving.name))
        self.placement.is_changed = True

    def receive(self, replica: Replica, messages: list[FromLoop]) -> None:
        """Process a batch of a replica; ignored if the replica is gone."""
        replica.quiet_ticks = 0
        self.placement.changed[replica] = None
        self.counters.num_frames += not replica.is_gone
        for message in messages:
            if replica.is_gone:
                break
            self._on_message[type(message)](replica, message)
        if self._failed_steps:
            self._end_step(replica)

    def lose(self, replica: Replica, reason: str) -> None:
        """A replica has ended or hangs: its requests continue elsewhere."""
        if replica.is_gone:
            return
        self.counters.num_losses += self.replicas.get(replica.name) is replica
        log.warning(
            "replica %s was lost with %d requests: %s", replica.name, len(replica.open), reason
        )
        text = f"replica {replica.name} was lost: {reason}"
        self.placement.lose(self._release(replica, reason), replica, text)

    def drain(self, replica: Replica) -> None:
        """Move the requests of a replica elsewhere; without another one they stay and end there.

        It gets no new ones.
        """
        if not replica.takes_requests:
            return
        replica.is_draining = True
        self.placement.changed[replica] = None
        self.counters.num_drains += 1
        can_move = bool(self.placement.ready())
        what = "move" if can_move else "end there: no other replica can continue them"
        log.info("replica %s is drained; %d requests %s", replica.name, len(replica.open), what)
        if can_move:
            self.placement.move_all(replica, DRAINED.format(replica.name))

    def remove(self, replica: Replica) -> None:
        """A replica leaves as planned."""
        self.drain(replica)
        self.placement.move_all(replica, DRAINED.format(replica.name))
        if not replica.is_gone:
            replica.flush()
            self._release(replica, "the replica was removed")

    def tick(self) -> None:
        """Find replicas that hang, and requests that have waited too long for a replica."""
        for replica in list(self.replicas.values()):
            if problem := replica.tick(self.settings):
                self.lose(replica, problem)
        self.placement.tick()
        if self.num_starting or self.placement.ready():
            self._had_hope = self.clock.now()
        self.table.expire(self.settings.no_replica_seconds, since=self._had_hope)

    # One request.

    def _end_step(self, replica: Replica) -> None:
        """Requests were ended by a failed step: they move, and all others with them."""
        failed, self._failed_steps = self._failed_steps, {}
        reason = f"replica {replica.name}: {next(iter(failed.values()))}"
        self.placement.lose(failed, replica, reason)
        if replica.problem is not None and len(self.placement.ready()) > 1:
            self.placement.move_all(replica, reason)

    def _take_tokens(self, replica: Replica, batch: TokenBatch) -> None:
        ids, tokens, now = list[str](), list[list[int]](), self.clock.now()
        for id, gained in zip(batch.ids, batch.tokens, strict=True):
            request = replica.open.get(id)
            if request is not None:
                request.samples[0].tokens += gained
                if request.num_unproved:
                    self._prove(request, len(gained), now)
                ids.append(request.id)
                tokens.append(gained)
        if ids:
            self._emit(TokenBatch(ids, tokens))

    def _prove(self, request: OpenRequest, num_tokens: int, now: float) -> None:
        """The first tokens from a replica arrive."""
        request.num_unproved = max(0, request.num_unproved - num_tokens)
        if not request.num_unproved:
            request.num_in_row, request.lost_on = 0, None
        if request.sent_at is None:
            return
        seconds, request.sent_at = now - request.sent_at, None
        if request.first_token is None:
            request.first_token = now
        if request.num_moves:
            self.counters.resume_seconds += seconds
            text = "request %s continues on replica %s after %.3f s"
            log.info(text, request.id, request.replica, seconds)

    def _take_update(self, replica: Replica, update: SampleUpdate) -> None:
        request = replica.open.get(update.id)
        if request is None:
            return
        end, request.is_resuming = update.end, False
        # A step failed; with a code, the request itself caused the error.
        has_failed = end is not None and end.reason == "error" and end.error_code is None
        if has_failed:
            update = replace(update, end=None)
        if update.tokens and request.num_unproved:
            self._prove(request, len(update.tokens), self.clock.now())
        if update.end or update.tokens or update.prompt_logprobs:
            passed = request.apply(update)
            if passed is not None:
                self._emit(passed)
        if has_failed:
            del replica.open[request.replica_id]
            replica.post(Cancel(request.replica_id))  # its other samples
            error = (end and end.error) or "a step failed"
            replica.fail_step(error)
            self._failed_steps[request] = error
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
            if not request.avoids.issuperset(each.name for each in self.placement.ready()):
                self.placement.place(request)
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
