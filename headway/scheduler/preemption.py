"""Chooses running requests to preempt so that a waiting one of a higher priority runs in this step.

A waiting request needs a row, blocks and tokens of the step's budget; the victims are counted until
they free enough of each. This module does not change the state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache

from headway.request import Request
from headway.scheduler.policy_calls import call_batching
from headway.scheduler.state import SchedulerState

MAX_PREEMPTIONS = 16  # of one request for a higher priority, whatever the queue's rule allows


class TokenCount:
    """Counts the tokens that a batching rule leaves for a request if others are preempted.

    The rule decides whether decodes and prompts come first, and whether it admits anything: some
    admit nothing while a batch decodes.
    """

    def __init__(
        self, request: Request, state: SchedulerState, preempted: Collection[Request], streak: int
    ) -> None:
        self.num_decoding = sum(r not in preempted for r in state.decode_batch.members)
        self.tokens_left, self.prefill_streak = state.config.max_num_batched_tokens, streak
        self.num_granted: int | None = None  # tokens for the request; None: nothing is admitted
        self.is_idle = True
        self._request, self._policies = request, state.policies
        self._num_uncached = state.view.num_uncached
        self._partial = [r for r in state.prefilling if r not in preempted]
        self._has_decodes = self._has_chunks = False
        call_batching(state.config.batching, self)

    def decode(self, at_most: int | None = None) -> None:
        if not self._has_decodes:
            most = self.num_decoding if at_most is None else min(at_most, self.num_decoding)
            num_tokens = max(0, min(most, self.tokens_left))
            self._has_decodes = self._spend(num_tokens)

    def prefill(self) -> None:
        for request in self._partial:
            self._grant(self._num_uncached(request))
        self._partial = []

    def admit(self, *, charge_cached: bool = False) -> None:
        if not self.num_granted:
            request = self._request
            num_wanted = request.num_known if charge_cached else self._num_uncached(request)
            self.num_granted = self._grant(num_wanted)

    def admit_swapped(self) -> None:
        """Nothing: the request that room is made for goes before swapped ones."""

    def _grant(self, num_wanted: int) -> int:
        # A limit of time promises tokens only to the first prompt of a step.
        if self.tokens_left <= 0 or (self._has_chunks and self._policies.most_tokens):
            return 0
        allowed = self._policies.chunk(num_wanted, self.tokens_left, not self._has_chunks)
        num_tokens = int(max(min(allowed, num_wanted, self.tokens_left), 0))
        self._has_chunks |= self._spend(num_tokens)
        return num_tokens

    def _spend(self, num_tokens: int) -> bool:
        self.tokens_left -= num_tokens
        self.is_idle &= not num_tokens
        return num_tokens > 0


def choose_victims(first: Request, state: SchedulerState) -> list[Request]:
    """The running requests to preempt for the first in the queue, in the order of the victim rule.

    Empty if it needs none, if all requests that it outranks would not be enough, or if the batching
    rule admits nothing in this step but will after the next decodes.
    """
    outranks, key = state.policies.outranks, state.policies.victim
    outranked = [
        request
        for request in (*state.prefilling, *state.decode_batch.members)
        if request.history.num_priority_preemptions < MAX_PREEMPTIONS and outranks(first, request)
    ]
    if not outranked:
        return []
    is_enough = _count_missing(first, state)
    if is_enough([]) or not is_enough(outranked) or _is_turn_of_decodes(first, state):
        return []
    # The largest key is preempted first; on ties, partially prefilled requests.
    outranked.sort(key=lambda request: key(request, state.view), reverse=True)
    counts = range(1, len(outranked) + 1)
    # A random batching rule may admit nothing at any count; then nothing is preempted.
    chosen = outranked[: next((n for n in counts if is_enough(outranked[:n])), 0)]
    for request in chosen[-2::-1]:  # spare those that are not needed; the last one always is
        others = [other for other in chosen if other is not request]
        if is_enough(others):
            chosen = others
    return chosen


def _count_missing(first: Request, state: SchedulerState) -> Callable[[list[Request]], bool]:
    """Returns whether the first could be admitted in this step if the given requests left."""
    kv, streak = state.kv, state.prefill_streak
    num_rows = 1 + len(state.running) - state.config.max_num_seqs
    missing = (num_rows, *kv.num_missing(first, len(state.decode_batch.due())))
    num_freed = cache(kv.num_freed)

    def is_enough(chosen: list[Request]) -> bool:
        freed = ((1, *num_freed(request)) for request in chosen)
        total = map(sum, zip((0, 0, 0), *freed, strict=True))
        has_room = all(have >= need for have, need in zip(total, missing, strict=True))
        return has_room and bool(TokenCount(first, state, set(chosen), streak).num_granted)

    return is_enough


def _is_turn_of_decodes(first: Request, state: SchedulerState) -> bool:
    """Whether nothing is admitted only because many consecutive steps had no decodes."""
    if not state.prefill_streak or not state.decode_batch.members:
        return False
    now, later = (
        TokenCount(first, state, (), streak).num_granted for streak in (state.prefill_streak, 0)
    )
    return now is None and later is not None
