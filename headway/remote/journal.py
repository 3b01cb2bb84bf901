"""Requests of an engine's clients, with all they have gained, so that another client can continue.

A request whose client is lost without a Goodbye goes on as an orphan for a while, and one that has
ended is kept as long: a client that finds it by its id takes it over, from its first token.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from msgspec import structs

from headway.engine.gained import Gained
from headway.engine.messages import Submit, refusal_of
from headway.errors import ExecutorError, NotResumable
from headway.request import RequestParams
from headway.sampling_params import Sampling

if TYPE_CHECKING:
    from headway.remote.service import ClientConnection

ORPHAN_SECONDS = 30.0


@dataclass(slots=True, eq=False)
class HeldRequest:
    """One request: who gets what it gains, and all it has gained."""

    id: str  # of its client
    engine_id: str
    submit: Submit  # without what it had gained before
    owner: ClientConnection | None  # None: an orphan
    num_open: int  # samples
    samples: dict[int, Gained] = field(default_factory=lambda: defaultdict(Gained))  # by number
    expires: float = math.inf
    is_cancelled: bool = False


class Journal:
    """All requests that are open, or have ended less than `seconds` ago."""

    def __init__(
        self, seconds: float = ORPHAN_SECONDS, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.requests: dict[str, HeldRequest] = {}  # by the engine's ids
        self._latest: dict[str, HeldRequest] = {}  # by the ids that their first clients gave
        self._seconds, self._now = seconds, now
        self._expiring = deque[tuple[float, HeldRequest]]()  # in order of time

    def add(self, submit: Submit, engine_id: str, owner: ClientConnection) -> HeldRequest:
        """Keep a request that is sent to the engine."""
        kept = structs.replace(submit, outputs=(), history=())
        request = HeldRequest(submit.id, engine_id, kept, owner, submit.num_open)
        for number, output in enumerate(submit.outputs):
            request.samples[number].tokens += output or ()
        for update in submit.history:
            request.samples[update.sample] = sample = Gained()
            sample.add(update)
        self.requests[engine_id] = self._latest[_first_id(submit.id)] = request
        owner.open[submit.id] = request
        return request

    def find(self, id: str) -> HeldRequest | None:
        """The request with this id, under its latest id: each move to a replica adds a number."""
        found = self._latest.get(id)
        return None if found is None or found.is_cancelled else found

    def resume(self, held_id: str, submit: Submit, owner: ClientConnection) -> HeldRequest:
        """Give a request to another client; NotResumable unless it is held and has equal params."""
        request = self.find(_first_id(held_id))
        if request is None or request.id != held_id:
            raise NotResumable(f"request {held_id!r} is not known; send it without Last-Event-ID")
        if request.submit.prompt != submit.prompt or _shown(request.submit) != _shown(submit):
            raise NotResumable(
                f"request {held_id!r} has another prompt or other parameters; send the body again "
                "that began the stream",
                differs=True,
            )
        if request.owner is not None:
            problem = f"request {held_id!r} continues at another connection"
            request.owner.send([refusal_of(held_id, NotResumable(problem))])
            del request.owner.open[held_id]
        if held_id in owner.open:
            raise ExecutorError(f"it resumed {held_id!r}, which it has open")
        if request.num_open:
            request.owner, request.expires = owner, math.inf
            owner.open[request.id] = request
        return request

    def end(self, request: HeldRequest) -> None:
        """All samples have ended: the request can be resumed for a while, unless it was cancelled."""
        if request.owner is not None:
            request.owner.open.pop(request.id, None)
        request.num_open, request.owner = 0, None
        if request.is_cancelled:
            self.forget(request)
        else:
            self._expire_later(request)

    def orphan(self, owner: ClientConnection) -> None:
        """The client was lost: its requests can be resumed for a while."""
        for request in owner.open.values():
            request.owner = None
            if request.is_cancelled:  # the engine ends it
                self.forget(request)
            else:
                self._expire_later(request)
        owner.open.clear()

    def cancel(self, owner: ClientConnection) -> list[str]:
        """The client has left as planned; returns the engine's ids of its requests."""
        ids = [request.engine_id for request in owner.open.values()]
        for request in list(owner.open.values()):
            self.forget(request)
        owner.open.clear()
        return ids

    def forget(self, request: HeldRequest) -> None:
        del self.requests[request.engine_id]
        if self._latest.get(key := _first_id(request.id)) is request:
            del self._latest[key]

    def expire(self) -> list[str]:
        """Forget what is due; returns the engine's ids of those that have not ended."""
        ids = list[str]()
        while self._expiring and self._expiring[0][0] <= self._now():
            due, request = self._expiring.popleft()
            if request.expires == due and self.requests.get(request.engine_id) is request:
                self.forget(request)
                ids += [request.engine_id] * bool(request.num_open)
        return ids

    def _expire_later(self, request: HeldRequest) -> None:
        request.expires = self._now() + self._seconds
        self._expiring.append((request.expires, request))


def _first_id(id: str) -> str:
    """The id of a request before it moved."""
    return id.partition("~")[0]


def _shown(submit: Submit) -> RequestParams:
    """The params that do not differ between two calls: without absolute times, and without a seed.

    A request without a seed gets one at random.
    """
    sampling = submit.params.sampling
    if isinstance(sampling, Sampling):
        sampling = replace(sampling, seed=0)
    return replace(submit.params, deadline=None, sampling=sampling)
