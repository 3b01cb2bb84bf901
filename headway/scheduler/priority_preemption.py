"""Which running requests to preempt so that a waiting one of a higher priority runs in this step.

A waiting request needs a row, blocks and tokens of the step's budget. How much of the budget it
finds depends on the recipe: some recipes put decodes and prompts into one step, some do not, and
one admits nothing while a batch decodes. So the recipe itself is asked, by a dry run over counters.
Reads the scheduler, changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.request import Request
from headway.scheduler.policy_calls import call_chunk

if TYPE_CHECKING:
    from headway.scheduler.scheduler import Scheduler

MAX_PREEMPTIONS = 16  # of one request for a higher priority, whatever the queue's rule allows


class DryRun:
    """The verbs of a recipe, over counters: would `request` be granted tokens without `gone`?"""

    def __init__(
        self, request: Request, scheduler: Scheduler, gone: set[Request], prefill_streak: int
    ) -> None:
        members = scheduler.decode_batch.members
        self.num_decoding = len(members) - sum(other in members for other in gone)
        self.tokens_left = scheduler.config.max_num_batched_tokens
        self.prefill_streak = prefill_streak
        self.num_granted: int | None = None  # tokens for the request; None: nothing is admitted
        self._request, self._scheduler = request, scheduler
        self._begun = [other for other in scheduler.prefilling if other not in gone]
        self._has_decodes = self._has_chunks = False
        scheduler.config.recipe(self)

    @property
    def is_idle(self) -> bool:
        return not (self._has_decodes or self._has_chunks)

    def decode(self, at_most: int | None = None) -> None:
        if self._has_decodes:
            return
        num_tokens = self.num_decoding if at_most is None else min(at_most, self.num_decoding)
        if self._has_chunks:  # they share the budget
            num_tokens = min(num_tokens, self.tokens_left)
        num_tokens = max(0, num_tokens)
        self.tokens_left -= num_tokens
        self._has_decodes = num_tokens > 0

    def prefill(self) -> None:
        for other in self._begun:
            self._grant(self._scheduler.num_uncached(other))
        self._begun = []

    def admit(self, *, charge_cached: bool = False) -> None:
        if not self.num_granted:
            request = self._request
            want = request.num_known if charge_cached else self._scheduler.num_uncached(request)
            self.num_granted = self._grant(want)

    def admit_swapped(self) -> None:
        """Nothing: the request that room is made for comes before swapped ones."""

    def _grant(self, want: int) -> int:
        if self.tokens_left <= 0:
            return 0
        rule, is_first = self._scheduler.config.chunk, not self._has_chunks
        num_tokens = call_chunk(rule, want, self.tokens_left, is_first)
        self.tokens_left -= num_tokens
        self._has_chunks = self._has_chunks or num_tokens > 0
        return num_tokens


class Shortage:
    """What a waiting request needs, against what is free once some running ones have gone."""

    def __init__(self, request: Request, scheduler: Scheduler) -> None:
        kv = scheduler.kv
        self._request, self._scheduler = request, scheduler
        self._num_blocks = kv.num_taken(request, kv.survey(request)) + len(
            scheduler.decode_batch.due
        )
        self._num_blocks -= kv.num_free
        self._num_rows = 1 + len(scheduler.running) - scheduler.config.max_num_seqs
        self._freed: dict[Request, int] = {}  # blocks, by the request that would give them back

    def is_met(self, gone: list[Request]) -> bool:
        """Whether the request could be admitted in this step if these were preempted first."""
        if len(gone) < self._num_rows:
            return False
        for request in gone:
            if request not in self._freed:
                self._freed[request] = self._scheduler.kv.num_private_blocks(request)
        if sum(self._freed[request] for request in gone) < self._num_blocks:
            return False
        streak = self._scheduler.prefill_streak
        return bool(DryRun(self._request, self._scheduler, set(gone), streak).num_granted)


def choose_victims(head: Request, scheduler: Scheduler) -> list[Request]:
    """The running requests to preempt for the first in the queue, in the order of the victim rule.

    Empty if it needs none, if all that it outranks together would not be enough, or if the recipe
    admits nothing in this step but will after the next decodes.
    """
    outranks, victim = scheduler.config.queue.outranks, scheduler.config.victim
    running = (*scheduler.prefilling, *scheduler.decode_batch.members)
    inferior = [
        r
        for r in running
        if r.history.num_priority_preemptions < MAX_PREEMPTIONS and outranks(head, r)
    ]
    if not inferior:
        return []
    shortage = Shortage(head, scheduler)
    if shortage.is_met([]) or not shortage.is_met(inferior) or _is_turn_of_decodes(head, scheduler):
        return []
    inferior.sort(key=lambda r: victim(r, scheduler))
    inferior.reverse()  # the largest key goes first
    counts = range(1, len(inferior) + 1)
    # A recipe that draws lots may admit nothing at any count; then nothing is preempted.
    num_chosen = next((count for count in counts if shortage.is_met(inferior[:count])), 0)
    chosen = inferior[:num_chosen]
    return _needed(chosen, shortage)


def _needed(chosen: list[Request], shortage: Shortage) -> list[Request]:
    """The victims without those that turn out to be spare; the last one chosen is needed."""
    for request in chosen[-2::-1]:
        others = [other for other in chosen if other is not request]
        if shortage.is_met(others):
            chosen = others
    return chosen


def _is_turn_of_decodes(head: Request, scheduler: Scheduler) -> bool:
    """Whether the recipe admits nothing only because many steps in a row have decoded nothing."""
    if not scheduler.prefill_streak or not scheduler.decode_batch.members:
        return False
    now, later = (
        DryRun(head, scheduler, set(), streak).num_granted
        for streak in (scheduler.prefill_streak, 0)
    )
    return now is None and later is not None
