"""Chooses the requests that verify drafts in a step, and keeps count of how often drafts are right.

A draft continues tokens that the host knows. So drafts are planned only while no plan is in flight,
and no plan is made while one with drafts is. A request with drafts is not in the decode batch until
its result is applied. Drafts never preempt a request: they use blocks and tokens that are left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.config import Config, Drafter
from headway.plan import Draft, Plan
from headway.request import Request
from headway.step_cost import StepWork

if TYPE_CHECKING:
    from headway.scheduler.state import SchedulerState

PRIOR = 0.5  # acceptance of a request without drafts so far
WEIGHT = 0.15  # of the latest draft in the acceptance
FORGETTING = 0.98  # of the distance from PRIOR, with each token without a draft
MAX_PAUSE = 32  # tokens until a request whose drafter found nothing is asked again


class Drafting:
    """The drafts of one scheduler, and what a draft rule may read (config.DraftStep)."""

    def __init__(self, config: Config) -> None:
        if config.drafter is None:
            from headway.drafters.ngram import ngram
        self._drafter: Drafter = (config.drafter or ngram())()
        self.work, self.tokens = StepWork(0, 0, 0, 0.0), 0.0

    def must_wait(self, state: SchedulerState) -> bool:
        """Whether the next plan has to know the tokens of the one in flight."""
        if any(planned.plan.drafts for planned in state.in_flight):
            return True
        if not state.in_flight or not (requests := self._eligible(state)):
            return False
        batch = state.decode_batch
        self._begin(len(batch.members), batch.context)
        best = max(requests, key=self.acceptance)
        assert state.policies.draft is not None, "there is a rule"
        return state.policies.draft(best, self) > 0

    def plan(self, plan: Plan, state: SchedulerState, num_tokens: int) -> None:
        """Move decoding requests with at most this many drafts from the batch to the plan."""
        batch, rule = state.decode_batch, state.policies.draft
        assert rule is not None, "there is a rule"
        requests = self._eligible(state)
        if not requests:
            return
        self._begin(len(batch.members), batch.context)
        num_blocks = state.kv.num_free - len(batch.due())
        if state.queue or state.prefilling:
            num_tokens //= 2  # prompts need the others
        for request in sorted(requests, key=self.acceptance, reverse=True):
            wanted = rule(request, self)
            if wanted <= 0 or num_tokens <= 0:
                break
            start = request.num_computed
            room = state.kv.num_slots(request, num_blocks) - start - 1
            most = min(wanted, num_tokens, room, request.limit - start - 2)
            tokens = self._propose(request, most)
            if not tokens:
                continue
            batch.leave(request)
            draft = Draft(request, start, len(tokens), tokens)
            request.computed_base = draft.end
            plan.drafts.append(draft)
            new = state.kv.extend(request, draft.end)
            plan.new_blocks += new
            # One block was counted for it above if it was due.
            num_blocks -= len(new) - (start % state.kv.block_size == 0)
            num_tokens -= len(tokens)
            self.work = self.work.with_more_rows(start, len(tokens))
            share = self.acceptance(request)
            self.tokens += sum(share**number for number in range(1, len(tokens) + 1))

    def record(self, draft: Draft, num_right: int) -> None:
        """Count how many drafts of a request were right."""
        history = draft.request.history
        history.num_drafted += draft.count
        history.num_accepted += num_right
        share = self.acceptance(draft.request)
        for _ in range(num_right):
            share += WEIGHT * (1 - share)
        if num_right < draft.count:
            share -= WEIGHT * share
        history.acceptance, history.drafts_from = share, draft.start + num_right + 1

    def acceptance(self, request: Request) -> float:
        """The probability that the next draft of a request is right."""
        history = request.history
        num_since = max(0, request.num_computed - history.drafts_from)
        return PRIOR + (history.acceptance - PRIOR) * FORGETTING**num_since

    def forget(self, request: Request) -> None:
        """The request has ended, or its output was discarded."""
        self._drafter.forget(request)

    def _begin(self, num_rows: int, context: int) -> None:
        self.work, self.tokens = StepWork(num_rows, num_rows, context, float(context)), num_rows

    def _eligible(self, state: SchedulerState) -> list[Request]:
        if state.kv.window is not None:  # a draft that is wrong may need a block already given back
            return []
        tick = state.decode_batch.tick
        return [
            request for request in state.decode_batch.members
            if request.history.drafts_from <= request.computed_base + tick < request.limit - 2
        ]  # fmt: skip

    def _propose(self, request: Request, most: int) -> tuple[int, ...]:
        """Drafts; if there are none, the request is left alone for some tokens."""
        history = request.history
        tokens = tuple(self._drafter.propose(request, most)) if most > 0 else ()
        if tokens:
            history.num_misses = 0
        else:
            history.num_misses += 1
            pause = min(MAX_PAUSE, 1 << min(history.num_misses, 16))
            history.drafts_from = request.num_computed + pause
        return tokens
