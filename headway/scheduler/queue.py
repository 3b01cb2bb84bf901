"""The waiting queue, kept in the order of a rule.

A rule is a sort key, so the queue inserts by bisection and never ranks all requests. If a rule's
keys can change while requests wait, the keys of a few requests are recomputed before every step.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any

from headway.config import ALL, QueueRule, SchedulerView
from headway.errors import policy_failed
from headway.request import Request
from headway.scheduler.fairness import ServiceCounters, group_of
from headway.scheduler.policy_calls import QUEUE_GROUP, QUEUE_KEY, checked

NUM_REFRESHED = 16  # requests at the front, and as many in turn, whose keys are refreshed per step
Entry = tuple[Any, Request]  # a sort key and its request


class WaitingQueue:
    """Waiting, preempted and swapped requests in the order of service."""

    def __init__(self, rule: QueueRule, view: SchedulerView) -> None:
        self.rule = rule
        self.counters = ServiceCounters()
        self._view = view
        self._key_of, self._group_of = checked(QUEUE_KEY, rule), checked(QUEUE_GROUP, rule)
        # Deques: insertion and removal near both ends take constant time.
        self._groups: dict[str, deque[Entry]] = {}
        self._keys: dict[Request, Any] = {}
        self._next_refresh: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Request]:
        """All requests, group by group; `walk` gives the order of service."""
        return (request for group in self._groups.values() for _, request in group)

    def sort_key(self, request: Request) -> Any:
        """Sorts requests, waiting or running, in the order of service."""
        key, group = self._key(request), group_of(request)
        return key if group == ALL else (self._view.service().get(group, 0.0), key)

    def push(self, request: Request) -> None:
        """Insert a request; PolicyError, and no change, if its key or group cannot be used."""
        if request.history.group is None:  # the rule is asked once: groups never change
            request.history.group = self._group_of(request)
        name, key = request.history.group, self._key(request)
        group = self._groups.get(name, deque())
        try:
            if group and key < group[-1][0]:
                insort(group, (key, request), key=_first)
            else:
                group.append((key, request))
        except Exception as error:
            where = f"to compare request {request.id!r}"
            raise policy_failed("queue", self.rule, where, error, request.id) from error
        self._groups[name] = group
        self._keys[request] = key

    def remove(self, request: Request) -> None:
        """Remove a request, even if the order of the keys is not consistent."""
        name, key = group_of(request), self._keys.pop(request)
        group = self._groups[name]
        del group[_position(group, key, request)]
        if not group:
            del self._groups[name]
            self._next_refresh.pop(name, None)

    def change_rule(self, rule: QueueRule, running: Iterable[Request]) -> None:
        """Sort by another rule; groups start again with no service but that of running requests.

        PolicyError, and no change, if the rule cannot be used.
        """
        other, requests = WaitingQueue(rule, self._view), [*self, *running]
        before, groups = self.counters, [request.history.group for request in requests]
        try:
            for request in requests:
                request.history.group = other._group_of(request)
                other.counters.arrive(group_of(request))
            self.counters = other.counters  # now, as keys may read the service
            for request in self:
                other.push(request)
        except BaseException:
            self.counters = before
            for request, group in zip(requests, groups, strict=True):
                request.history.group = group
            raise
        vars(self).update(vars(other))

    def walk(self, max_service: float = inf) -> Iterator[Request]:
        """The order of service; the request just yielded may be removed before the next.

        Skips a request if admitting it would raise its group's service above `max_service`.
        """
        if self.rule.keys_change:
            self._refresh_keys()
        if len(self._groups) > 1 or max_service < inf:
            yield from self._walk_groups(max_service)
            return
        for group in list(self._groups.values()):
            passed = 0
            while passed < len(group):
                length = len(self._keys)
                yield group[passed][1]
                passed += len(self._keys) == length  # it was not removed

    def has_other_groups(self, request: Request) -> bool:
        """Whether a request of another group waits."""
        return len(self._groups) > (group_of(request) in self._groups)

    def _walk_groups(self, max_service: float) -> Iterator[Request]:
        """The group with the least service first; admitting a request adds to it."""
        service = self._view.service
        heap = [(service().get(n, 0.0), g[0][0], n, 0) for n, g in self._groups.items()]
        heapify(heap)
        while heap:
            served, _, name, passed = heappop(heap)
            group, length = self._groups[name], len(self._keys)
            if served + group[passed][1].num_known > max_service:
                continue
            yield group[passed][1]
            passed += len(self._keys) == length
            if passed < len(group):
                heappush(heap, (service().get(name, 0.0), group[passed][0], name, passed))

    def _key(self, request: Request) -> Any:
        return self._key_of(request, self._view), request.history.serial

    def _refresh_keys(self) -> None:
        """Ask for drifting keys again: at the front in every step, elsewhere in turn."""
        for name, group in self._groups.items():
            start = self._next_refresh.get(name, 0) + NUM_REFRESHED
            if start >= len(group):
                start = NUM_REFRESHED
            self._next_refresh[name] = start
            places = range(len(group))
            refreshed = (*places[:NUM_REFRESHED], *places[start:][:NUM_REFRESHED])
            old = [(place, group[place]) for place in refreshed]
            new = [(self._key(request), request) for _, (_, request) in old]
            try:
                moved = [(o, n) for o, n in zip(old, new, strict=True) if o[1][0] != n[0]]
                self._move(group, moved)
            except Exception as error:  # keys that do not compare
                where = "to compare waiting requests"
                raise policy_failed("queue", self.rule, where, error) from error

    def _move(self, group: deque[Entry], moved: list[tuple[tuple[int, Entry], Entry]]) -> None:
        """Sort entries by their new keys; if keys do not compare, the group stays as it is."""
        for (place, _), _ in reversed(moved):
            del group[place]
        inserted: list[Entry] = []
        try:
            for _, entry in moved:
                insort(group, entry, key=_first)
                inserted.append(entry)
        except Exception:
            for entry in inserted:
                del group[_position(group, *entry)]
            for (place, entry), _ in moved:
                group.insert(place, entry)
            raise
        self._keys.update((request, key) for key, request in inserted)


def _first(entry: Entry) -> Any:
    return entry[0]


def _position(group: deque[Entry], key: Any, request: Request) -> int:
    """The place of a request in its group: by bisection, or by linear search if the keys have no order."""
    if group[0][1] is request:
        return 0
    try:
        place = bisect_left(group, key, key=_first)
    except Exception:  # keys that do not compare
        place = len(group)
    if place < len(group) and group[place][1] is request:
        return place
    return next(place for place, (_, other) in enumerate(group) if other is request)
