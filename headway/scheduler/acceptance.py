"""Estimates how often the next draft of a request is right.

An average over all requests follows their latest drafts, an average of each request its own. The
more the requests differ, by more than chance explains, the more a request's own average counts.
Without drafts an estimate returns to a high one, so that requests are tried again after a time.
"""

from __future__ import annotations

from headway.request import Request

FIRST = 0.8  # estimate before any draft
NUM_FIRST = 4  # drafts that it counts as
WEIGHT = 0.15  # of the latest draft in the average of a request
NUM_RECENT = 200  # drafts in the average of all requests
FORGETTING = 0.997  # of the distance from FIRST, with each token without a draft
CHANCE = WEIGHT / (2 - WEIGHT)  # variance of a request's average, for drafts of variance 1


class Acceptance:
    """The averages of one scheduler; those of requests are in their history."""

    def __init__(self) -> None:
        self._share, self._spread, self._num_seen = FIRST, 0.0, NUM_FIRST
        self._own_part = 0.0  # of a request's own average in its estimate

    def record(self, request: Request, count: int, num_right: int) -> None:
        """The first `num_right` of `count` drafts were right, and the next one, if any, was not."""
        history = request.history
        own = history.acceptance if history.num_drafted else self._share
        # The wrong one first: a step ends with it, so it would always count most.
        for is_right in [0] * (num_right < count) + [1] * num_right:
            own += WEIGHT * (is_right - own)
            self._num_seen = min(self._num_seen + 1, NUM_RECENT)
            self._share += (is_right - self._share) / self._num_seen
        share = self._share
        self._spread += ((own - share) ** 2 - self._spread) / self._num_seen
        by_chance = CHANCE * share * (1 - share)
        is_wider = self._spread > by_chance
        self._own_part = 1 - by_chance / self._spread if is_wider else 0.0
        history.num_drafted += count
        history.num_accepted += num_right
        history.acceptance = own

    def of(self, request: Request) -> float:
        """The probability that the next draft of a request is right."""
        history, share = request.history, self._share
        if history.num_drafted:
            share += self._own_part * (history.acceptance - share)
        num_since = request.num_computed - max(history.drafts_from, request.num_prompt)
        return FIRST + (share - FIRST) * FORGETTING**num_since if num_since > 0 else share
