"""Chooses a replica for every request, and moves requests from replicas that are lost or leave.

Nothing moves at once: a request leaves its replica and waits, and `settle` places all that wait when
the losses so far are judged. A moved request goes to a replica that has answered since the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from headway.engine.clock import Clock
from headway.engine.messages import Cancel, Query, QueryResult, refusal_of
from headway.engine.queries import CACHE_PARTS, CountRequests, GetProblem, ReportCache
from headway.errors import NotResumable, PolicyError
from headway.fleet.isolation import Isolation
from headway.fleet.losses import Losses
from headway.fleet.open_requests import OpenRequest, RequestTable
from headway.fleet.prefixes.prompt_keys import PromptKeys
from headway.fleet.queries import FleetQueries
from headway.fleet.replica import Replica
from headway.fleet.router import Choice, Router
from headway.fleet.settings import FleetCounters, FleetSettings


class Placement:
    """Which request is on which replica."""

    def __init__(
        self,
        router: Router,
        settings: FleetSettings,
        clock: Clock,
        counters: FleetCounters,
        table: RequestTable,
        queries: FleetQueries,
    ) -> None:
        self.router, self.settings, self.clock, self.counters = router, settings, clock, counters
        self.table, self.queries, self.replicas = table, queries, queries.replicas
        self.losses, self.isolation = Losses(), Isolation()
        self.changed: dict[Replica, None] = {}  # their loads are not known to the router yet
        self.troubled: set[Replica] = set()  # with a problem
        self.is_changed = False  # a request that waits may have a place now

    def ready(self) -> list[Replica]:
        return [each for each in self.replicas.values() if each.takes_requests]

    def place(self, request: OpenRequest) -> None:
        """Send a request to the replica that the rule chooses; without any, it waits."""
        try:
            choice = self._choose(request)
        except PolicyError as error:
            self.table.refuse(request, refusal_of(request.id, error))
            return
        if choice is None:
            self.table.wait(request, self.settings.max_waiting)
            return
        self.table.waiting.pop(request, None)
        request.num_sent += 1
        request.sent_at = now = self.clock.now()
        # The first tokens are those of the prompt, which is computed again. A decode proves more.
        request.num_unproved = sum(not each.is_ended for each in request.samples) + 1
        request.sent_before = self.queries.next_number
        replica = self.replicas[choice.replica]
        replica.assign(request, choice.num_new)
        replica.post(request.message(now))
        self.changed[replica] = None

    def leave(self, request: OpenRequest, replica: Replica, reason: str) -> None:
        """Take a request from its replica, which may still answer; it waits for another one."""
        replica.open.pop(request.replica_id, None)
        request.avoids, request.replica, request.reason = {replica.name}, None, reason
        if request is self.isolation.request:
            self._end_isolation()
        if request.is_resuming:  # its tokens are lost
            problem = f"request {request.id!r} cannot be resumed: {reason}"
            self.table.refuse(request, refusal_of(request.id, NotResumable(problem)))
            return
        self.table.end_requested(request)
        if not request.is_ended:
            request.num_moves += 1
            self.counters.num_moves += 1
            self.counters.num_resumed_tokens += request.num_tokens
            self.table.wait(request, self.settings.max_waiting)
        self.is_changed = True

    def move_all(self, replica: Replica, reason: str) -> None:
        """Cancel and move all requests of a replica that is connected."""
        requests = list(replica.open.values())
        for request in requests:
            replica.post(Cancel(request.replica_id))
            self.leave(request, replica, reason)

    def lose(self, requests: Collection[OpenRequest], replica: Replica, reason: str) -> None:
        """These requests lost their replica, or a step of it. They move once the loss is judged."""
        check = self.queries.take_number()
        self.losses.add(replica, requests, self.isolation.alone, check)
        if replica.problem is not None:
            self.troubled.add(replica)
        for request in requests:
            self.leave(request, replica, reason)
        for each in self.ready():
            self.ping(each)

    def ping(self, replica: Replica) -> None:
        """Ask for a sign of life, and for a problem; a replica with one is the last choice."""

        replica.is_unconfirmed = False
        self._ask(replica, GetProblem(), partial(setattr, replica, "problem"))

    def follow(self, replica: Replica, part: int = 0) -> None:
        """Ask for the keys of a replica's cache, one part after the other."""

        def use(keys: Any) -> None:
            self.router.tracker.apply(replica.name, keys or [], [])
            if part + 1 < CACHE_PARTS:
                self.follow(replica, part + 1)

        self._ask(replica, ReportCache(part), use)

    def tick(self) -> None:
        """Call it every TICK_SECONDS."""
        self.losses.tick()
        self.is_changed = True
        self.troubled = {each for each in self.replicas.values() if each.problem is not None}
        for replica in self.troubled:
            self.ping(replica)
        if self.isolation.is_waiting:
            self.isolation.num_ticks += 1
            self._count()

    def settle(self) -> None:
        """Judge the losses once all replicas have answered; then place all requests that wait."""
        if self.isolation.is_over(self.settings):
            self._end_isolation()
            self.is_changed = True
        if not self.is_changed:
            return
        self.is_changed = False
        if self.losses.are_judged and not self.table.waiting:
            return
        if not self.losses.can_judge(self.ready(), self.settings):
            return
        for request in list(self.losses.judge(self.settings)):
            self.table.fail(request, request.loss_problem(), "replicas_failed")
        for request in list(self.table.waiting):
            self.place(request)

    def _choose(self, request: OpenRequest) -> Choice | None:
        """The replica for a request; None if it must wait, PolicyError if the rule fails."""
        if request.is_suspect(self.settings):
            name = self._isolated(request)
            return Choice(name, request.known().num_known) if name else None
        self._tell_router()
        if not self.router.num_ready:
            return None
        known = request.known()
        keys = PromptKeys(known, self.router.block_size) if known.params.reads_cache else ()
        bad = {each.name for each in self.troubled if not each.is_trusted}
        late = set[str]()
        if request.min_answer:
            late = {each.name for each in self.ready() if each.answered < request.min_answer}
        for avoids in (late | request.avoids | bad, late | request.avoids, late):
            choice = self.router.choose(
                request.id, known.num_known, keys, known.params.client, avoids
            )
            if choice is not None:
                return choice
        return None

    def _tell_router(self) -> None:
        """Tell the router what has changed, so that placing a request does not read all replicas."""
        for replica in self.changed:
            is_there = self.replicas.get(replica.name) is replica
            if is_there and replica.takes_requests and replica is not self.isolation.replica:
                self.router.update(replica.router_load())
            elif is_there:
                self.router.remove(replica.name)
        self.changed.clear()

    def _isolated(self, request: OpenRequest) -> str | None:
        """The replica where a suspect can run alone now; None if it must wait."""
        isolation = self.isolation
        ready = [each for each in self.ready() if each.answered >= request.min_answer]
        if isolation.request is None and ready and self.losses.is_calm(self.settings):
            self._isolate(
                request, min(ready, key=lambda each: (not each.is_trusted, len(each.open)))
            )
        if isolation.request is request and isolation.is_ready(self.settings):
            return next((each.name for each in ready if each is isolation.replica), None)
        return None

    def _isolate(self, request: OpenRequest, replica: Replica) -> None:
        self.isolation = Isolation(request, replica)
        self.changed[replica] = None
        self.counters.num_isolated += 1
        self.move_all(replica, "a request that may have ended replicas needed its own alone")
        self._count()

    def _end_isolation(self) -> None:
        if self.isolation.replica is not None:
            self.changed[self.isolation.replica] = None
        self.isolation = Isolation()

    def _count(self) -> None:
        """Ask how many requests the engine has left; late answers do not matter."""
        isolation = self.isolation
        assert isolation.replica is not None, "a suspect is isolated"

        def use(num_others: Any) -> None:
            if isolation.is_waiting:
                isolation.num_others = num_others

        self._ask(isolation.replica, CountRequests(), use)

    def _ask(self, replica: Replica, query: Query[Any], use: Callable[[Any], None]) -> None:
        """Ask for the fleet itself; `use` gets the answer, None if the replica has none."""

        def answer(result: QueryResult) -> None:
            self.is_changed = True
            if not replica.is_gone:
                use(result.value)

        self.queries.ask_one(replica, query, answer)
