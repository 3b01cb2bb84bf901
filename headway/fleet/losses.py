"""Which losses of replicas count against the requests that ran there, and when requests may move.

A request may have ended its replica, but most losses have other causes, and often several replicas
are lost at once. All losses that can be known are collected first: the other replicas are asked for
a sign of life, and nothing moves before they have answered, are lost too, or are late.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from math import ceil
from typing import NamedTuple

from headway.fleet.open_requests import OpenRequest
from headway.fleet.replica import TICK_SECONDS, Replica
from headway.fleet.settings import FleetSettings


class Loss(NamedTuple):
    """A request that lost its replica, or a step of it."""

    request: OpenRequest
    replica: Replica
    was_there: bool  # the replica had answered after the request was sent to it
    was_alone: bool  # no other request was there


class Losses:
    """The losses that are not judged yet."""

    def __init__(self) -> None:
        self.check = 0  # replicas that have answered the query of this number are alive
        self._losses: list[Loss] = []
        self._replicas: set[Replica] = set()
        self._num_ticks = 1 << 30  # since the latest loss

    def add(
        self,
        replica: Replica,
        requests: Iterable[OpenRequest],
        alone: OpenRequest | None,
        check: int,
    ) -> None:
        """These requests lost their replica, or a step of it; `alone` was the only one there.

        The other replicas are asked with the number `check`.
        """
        self._replicas.add(replica)
        self.check, self._num_ticks = check, 0
        for request in requests:
            request.min_answer = check
            was_there = replica.answered >= request.sent_before
            self._losses.append(Loss(request, replica, was_there, request is alone))

    @property
    def are_judged(self) -> bool:
        return not self._replicas

    def tick(self) -> None:
        self._num_ticks += 1

    def is_calm(self, settings: FleetSettings) -> bool:
        """Whether the latest loss is so long ago that no other one belongs to it."""
        return self._num_ticks >= ceil(settings.verdict_seconds / TICK_SECONDS)

    def can_judge(self, replicas: Collection[Replica], settings: FleetSettings) -> bool:
        """Whether each replica has answered since the latest loss, or is late."""
        return self.is_calm(settings) or all(each.answered >= self.check for each in replicas)

    def judge(self, settings: FleetSettings) -> Iterator[OpenRequest]:
        """Count all losses; the requests that must fail.

        A loss counts if the replica had the request and is the only one that was lost; for a
        replica whose steps fail, once. A request fails if it has been a suspect and was alone.
        """
        is_single, losses = len(self._replicas) == 1, self._losses
        self._losses, self._replicas = [], set()
        for request, replica, was_there, was_alone in losses:
            request.num_losses += 1
            counts = was_there and is_single and request.lost_on is not replica
            request.num_in_row += counts
            request.lost_on = replica
            is_proved = counts or request.num_losses >= 2 * settings.max_total_losses
            if was_alone and is_proved and request.is_suspect(settings) and not request.is_ended:
                yield request
