"""Chooses running requests to preempt so that a waiting one of a higher priority runs in this step.

A waiting request needs a row, blocks and tokens of the step's budget. How many tokens are left for
it depends on the batching rule: some put decodes and prompts into one step, some do not, and one
admits nothing while a batch decodes. So `DryRun` runs the rule against counters instead of the real
state. This module does not change the state.
"""

from __future__ import annotations

from headway.request import Request
from headway.scheduler.policy_calls import call_batching, call_chunk, call_victim
from headway.scheduler.state import SchedulerState

MAX_PREEMPTIONS = 16  # of one request for a higher priority, whatever the queue's rule allows


class DryRun:
    """Runs the batching rule over counters, as if the requests `without` were preempted."""

    def __init__(
        self, request: Request, state: SchedulerState, without: set[Request], prefill_streak: int
    ) -> None:
        members = state.decode_batch.members
        self.num_decoding = len(members) - sum(other in members for other in without)
        self.tokens_left = state.config.max_num_batched_tokens
        self.prefill_streak = prefill_streak
        self.num_granted: int | None = None  # tokens for the request; None: nothing is admitted
        self._request, self._state = request, state
        self._partial = [other for other in state.prefilling if other not in without]
        self._has_decodes = self._has_chunks = False
        call_batching(state.config.batching, self)

    @property
    def is_idle(self) -> bool:
        return not (self._has_decodes or self._has_chunks)

    def decode(self, at_most: int | None = None) -> None:
        if self._has_decodes:
            return
        limits = (
            self.num_decoding,
            self.tokens_left,
            self.num_decoding if at_most is None else at_most,
        )
        num_tokens = max(0, min(limits))
        self.tokens_left -= num_tokens
        self._has_decodes = num_tokens > 0

    def prefill(self) -> None:
        for other in self._partial:
            self._grant(self._state.view.num_uncached(other))
        self._partial = []

    def admit(self, *, charge_cached: bool = False) -> None:
        if not self.num_granted:
            request = self._request
            uncached = self._state.view.num_uncached
            self.num_granted = self._grant(
                request.num_known if charge_cached else uncached(request)
            )

    def admit_swapped(self) -> None:
        """Nothing: the request that room is made for goes before swapped ones."""

    def _grant(self, num_wanted: int) -> int:
        if self.tokens_left <= 0:
            return 0
        rule, is_first = self._state.config.chunk, not self._has_chunks
        if self._has_chunks and hasattr(rule, "most_tokens"):
            return 0  # a limit of time promises tokens only to the first prompt of a step
        num_tokens = call_chunk(rule, num_wanted, self.tokens_left, is_first)
        self.tokens_left -= num_tokens
        self._has_chunks = self._has_chunks or num_tokens > 0
        return num_tokens


class Shortage:
    """What a waiting request lacks of rows, blocks and tokens."""

    def __init__(self, request: Request, state: SchedulerState) -> None:
        kv, batch = state.kv, state.decode_batch
        self._request, self._state = request, state
        cost = kv.admission_cost(request)
        needed = kv.num_blocks_needed(request, cost) + len(batch.due())
        self._num_blocks = needed - kv.num_free
        self._num_window_blocks = cost.num_window_blocks - kv.num_window_free
        self._num_rows = 1 + len(state.running) - state.config.max_num_seqs
        self._freed: dict[Request, int] = {}  # blocks that preempting a request would free

    def is_met(self, preempted: list[Request]) -> bool:
        """Whether the request could be admitted in this step if these were preempted first."""
        if len(preempted) < self._num_rows:
            return False
        for request in preempted:
            if request not in self._freed:
                self._freed[request] = self._state.kv.num_private_blocks(request)
        if sum(self._freed[request] for request in preempted) < self._num_blocks:
            return False
        reserved = sum(r.kv.window.num_reserved for r in preempted if r.kv.window is not None)
        if reserved < self._num_window_blocks:
            return False
        streak = self._state.prefill_streak
        return bool(DryRun(self._request, self._state, set(preempted), streak).num_granted)


def choose_victims(first: Request, state: SchedulerState) -> list[Request]:
    """The running requests to preempt for the first in the queue, in the order of the victim rule.

    Empty if it needs none, if all requests that it outranks would not be enough, or if the batching
    rule admits nothing in this step but will after the next decodes.
    """
    outranks, victim = state.config.queue.outranks, state.config.victim
    outranked = [
        request
        for request in (*state.prefilling, *state.decode_batch.members)
        if request.history.num_priority_preemptions < MAX_PREEMPTIONS and outranks(first, request)
    ]
    if not outranked:
        return []
    shortage = Shortage(first, state)
    if shortage.is_met([]) or not shortage.is_met(outranked) or _is_turn_of_decodes(first, state):
        return []
    # The largest key is preempted first; on ties, partially prefilled requests.
    outranked.sort(key=lambda request: call_victim(victim, request, state.view), reverse=True)
    counts = range(1, len(outranked) + 1)
    # A random batching rule may admit nothing at any count; then nothing is preempted.
    num_chosen = next((count for count in counts if shortage.is_met(outranked[:count])), 0)
    return _without_spare(outranked[:num_chosen], shortage)


def _without_spare(chosen: list[Request], shortage: Shortage) -> list[Request]:
    """The victims without those that are not needed; the last one chosen always is."""
    for request in chosen[-2::-1]:
        others = [other for other in chosen if other is not request]
        if shortage.is_met(others):
            chosen = others
    return chosen


def _is_turn_of_decodes(first: Request, state: SchedulerState) -> bool:
    """Whether nothing is admitted only because many consecutive steps had no decodes."""
    if not state.prefill_streak or not state.decode_batch.members:
        return False
    now, later = (
        DryRun(first, state, set(), streak).num_granted for streak in (state.prefill_streak, 0)
    )
    return now is None and later is not None
