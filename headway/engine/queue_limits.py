"""Limits on waiting and open requests: above them, new requests are refused with Overloaded."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass

from headway.engine.engine import Engine
from headway.engine.messages import Submit
from headway.errors import Overloaded
from headway.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Queue limits above which new requests are refused with Overloaded; None: no limit."""

    max_waiting: int | None = None
    max_waiting_tokens: int | None = None
    # Running and waiting requests of one client. Requests without a client count as one client.
    max_per_client: int | None = None


class QueueLimiter:
    """The limits of an engine, and the tokens in its queue."""

    def __init__(self, engine: Engine, limits: QueueLimits) -> None:
        self.engine, self.limits = engine, limits
        # Counted at most once between two steps; None: to be counted when it is needed.
        self.waiting_tokens: int | None = None

    def check(self, message: Submit) -> None:
        """Overloaded if the queue is full, or the client has too many open requests.

        Each of n samples counts. An empty queue takes any request, or it could never run.
        """
        n = message.params.n
        num_samples = n if isinstance(n, int) else 1  # the engine refuses any other n
        problem = (
            self._too_many_waiting(num_samples)
            or self._too_many_tokens(message.prompt, num_samples)
            or self._too_many_of_client(message.params.client, num_samples)
        )
        if problem:
            more = f", and this request has {num_samples} samples" if num_samples > 1 else ""
            raise Overloaded(problem + more)

    def count(self, requests: list[Request]) -> None:
        """Requests were added to the queue."""
        if self.waiting_tokens is not None:
            self.waiting_tokens += len(requests) * requests[0].num_prompt

    def _too_many_waiting(self, num_new: int) -> str:
        limit, num_waiting = self.limits.max_waiting, len(self.engine.scheduler.queue)
        if limit is None or not _exceeds(num_waiting, num_new, limit):
            return ""
        return f"queue is full: {num_waiting} requests waiting (limit {limit})"

    def _too_many_tokens(self, prompt: object, num_new: int) -> str:
        limit, queue = self.limits.max_waiting_tokens, self.engine.scheduler.queue
        if limit is None or not len(queue):
            return ""
        if self.waiting_tokens is None:  # may include requests aborted since the latest step
            self.waiting_tokens = sum(request.num_known for request in queue)  # unsorted
        num_prompt = len(prompt) if isinstance(prompt, Sized) else 0  # refused by the engine
        if self.waiting_tokens + num_new * num_prompt <= limit:
            return ""
        text = f"queue is full: {self.waiting_tokens} tokens waiting"
        return f"{text}, and this prompt has {num_prompt} (limit {limit})"

    def _too_many_of_client(self, client: str, num_new: int) -> str:
        limit, requests = self.limits.max_per_client, self.engine.scheduler.requests
        if limit is None:
            return ""
        num_open = sum(request.params.client == client for request in requests.values())
        if not _exceeds(num_open, num_new, limit):
            return ""
        if client:
            return f"client {client!r} has {num_open} open requests (limit {limit})"
        share = "requests without a client (field `user`) count as one client"
        return f"{share}: {num_open} of them are open (limit {limit})"


def _exceeds(num_present: int, num_new: int, limit: int) -> bool:
    """Whether more requests exceed a limit; a first request with many samples does not."""
    return num_present >= limit or (num_present > 0 and num_present + num_new > limit)
