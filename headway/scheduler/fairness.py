"""Fair queueing between client groups: service counters, overtaking and reserved rows.

A queue rule with one group, as most are, never needs this. With several groups the queue serves the
group with the least service first. Order alone is not enough: a waiting request would find the
token budget taken by long prompts that are partially prefilled, and all rows taken by long outputs.
So it may overtake such prompts, and some rows are reserved for groups that have few.

A request is charged when it stops running. An idle group gains no advantage: when it returns, its
service is raised to that of the least served active group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from heapq import nsmallest

from headway.plan import Blocked
from headway.request import Request

OUTPUT_WEIGHT = 2.0  # an output token costs about twice a prompt token
MAX_IDLE = 1024  # idle groups remembered
RESERVED_SHARE = 8  # one row in this many is reserved for groups that have fewer
RECENT_STEPS = 4096  # after its last request, rows stay reserved for a group


def weighted_tokens(request: Request) -> float:
    """Service of the current run of a request: its prompt, if first, and its sampled tokens."""
    num_prompt = 0 if request.history.num_preemptions else request.num_prompt
    num_sampled = max(0, request.num_computed + 1 - request.prefill_end)  # planned ones included
    return num_prompt + OUTPUT_WEIGHT * num_sampled


class ServiceCounters:
    """Weighted tokens served to each group."""

    def __init__(self) -> None:
        self.served: dict[str, float] = {}  # by requests that have stopped running
        self._active: dict[str, int] = {}  # requests in the system
        self._idle: dict[str, int] = {}  # the step at which the group became idle, the latest last
        self._level = 0.0  # of the last group to leave an empty system
        self._current: dict[str, float] | None = None  # with the running requests; None: outdated

    def arrive(self, group: str) -> None:
        if group not in self._active:
            floor = min((self.served[g] for g in self._active), default=self._level)
            self.served[group] = max(self.served.get(group, 0.0), floor)
            self._idle.pop(group, None)
        self._active[group] = self._active.get(group, 0) + 1

    def depart(self, group: str, num_steps: int) -> None:
        """A request of the group has ended, after this number of steps."""
        self._active[group] -= 1
        if not self._active[group]:
            del self._active[group]
            self._idle[group] = num_steps
            if not self._active:
                self._level = max(self._level, self.served[group])
            if len(self._idle) > MAX_IDLE:
                self._forget_idle()

    def is_alone(self, num_steps: int) -> bool:
        """Whether one group is active, and no other was in the last RECENT_STEPS of the steps."""
        if len(self._active) > 1:
            return False
        latest = next(reversed(self._idle), None)
        return latest is None or num_steps - self._idle[latest] >= RECENT_STEPS

    def start(self, request: Request) -> None:
        """The request starts to run."""
        if self._current is not None:
            self._current[group_of(request)] += weighted_tokens(request)

    def charge(self, request: Request) -> None:
        """The request stops running; its group's service stays what it was."""
        self.served[group_of(request)] += weighted_tokens(request)

    def start_step(self) -> None:
        """Running requests have advanced since the previous step."""
        self._current = None

    def service(self, running: Iterable[Request]) -> dict[str, float]:
        """Service of each group; running requests count with their whole prompts."""
        if self._current is None:
            self._current = self.served.copy()
            for request in running:
                self._current[group_of(request)] += weighted_tokens(request)
        return self._current

    def _forget_idle(self) -> None:
        """Forget the least served idle groups: they would start level with the active ones."""
        for group in nsmallest(MAX_IDLE // 2, self._idle, key=self.served.__getitem__):
            del self.served[group], self._idle[group]


def group_of(request: Request) -> str:
    """The group of a queued request; the queue has set it."""
    assert request.history.group is not None, f"{request} was never queued"
    return request.history.group


def overtaking_limit(prefilling: Request, service: dict[str, float]) -> float:
    """The maximum service of a group whose request may overtake this prompt.

    A waiting request may overtake if its group's service, including the request's own tokens, stays
    at or below the limit. So the number of prompt tokens that it waits for is at most its own
    length, and groups with equal service never overtake one another.
    """
    num_left = max(0, prefilling.prefill_end - prefilling.num_computed)
    return service[group_of(prefilling)] - num_left


def check_reserved_rows(
    request: Request,
    running: Collection[Request],
    max_num_seqs: int,
    counters: ServiceCounters,
    num_steps: int,
) -> Blocked | None:
    """Blocked if the free rows are reserved for groups that have fewer than this request's."""
    num_free, num_reserved = max_num_seqs - len(running), max_num_seqs // RESERVED_SHARE
    if num_free > num_reserved or counters.is_alone(num_steps):
        return None
    group = group_of(request)
    num_rows = sum(group_of(other) == group for other in running)
    if num_rows < num_reserved:
        return None
    return Blocked(request, "reserved_rows", num_reserved + 1, num_free)
