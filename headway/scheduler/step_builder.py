"""Builds the plan of one step: a batching rule calls decode, prefill and admit in the order it needs.

Requests are preempted before tokens are granted, so work that is in a plan is never removed from
it.
"""

from __future__ import annotations

from headway.plan import NotConsidered, Plan
from headway.request import Request
from headway.scheduler.admission import Admissions, grant
from headway.scheduler.draft_planning import plan_drafts
from headway.scheduler.policy_calls import call_batching
from headway.scheduler.state import SchedulerState


class StepBuilder:
    """The actions that a batching rule may call (config.StepActions), and what they do."""

    def __init__(self, state: SchedulerState, plan: Plan) -> None:
        self.plan, self._state, self._admissions = plan, state, Admissions(state)

    @property
    def tokens_left(self) -> int:
        return self._state.tokens_left

    @property
    def is_idle(self) -> bool:
        return not (self.plan.decodes or self.plan.drafts or self.plan.chunks)

    @property
    def num_decoding(self) -> int:
        return len(self._state.decode_batch.members)

    @property
    def prefill_streak(self) -> int:
        return self._state.prefill_streak

    def build(self) -> None:
        """Fill the plan; with work at hand it stays empty only if another plan is in flight."""
        state, plan = self._state, self.plan
        state.tokens_left = state.config.max_num_batched_tokens
        state.kv.start_plan(plan)
        if state.config.queue.preempts and state.queue:
            self._admissions.preempt_for_priority()
        call_batching(state.config.batching, self)
        if plan.is_empty and state.requests and not state.in_flight:
            self._force()
        num_rest = len(state.queue) - len(plan.blocked)
        if num_rest:
            plan.not_considered = NotConsidered(self._admissions.reason_of_rest, num_rest)
        state.kv.free_host_blocks()
        for chunk in plan.chunks:
            if chunk.is_last:
                state.start_decoding(chunk.request)

    # The actions of a batching rule.

    def decode(self, at_most: int | None = None) -> None:
        """Advance all decoding requests, as far as `at_most` and the token budget allow."""
        plan, state, batch = self.plan, self._state, self._state.decode_batch
        if plan.decodes or plan.drafts or not batch.members:
            return
        limit = state.tokens_left if at_most is None else min(at_most, state.tokens_left)
        plan.deferred = self._defer(max(0, limit)) if limit < len(batch.members) else []
        due = batch.due()
        while due and len(due) > state.kv.num_free:
            self._admissions.had_to_preempt = True
            state.preempt(self._choose_victim(), num_due=len(due))
            due = batch.due()
        if state.drafting is not None and not plan.preempted:
            plan_drafts(plan, state, limit - len(batch.members))
            state.tokens_left -= plan.num_drafted
            due = batch.due()
        if batch.members:
            members = batch.batch
            plan.decodes, plan.rows = members.requests, members.rows
            plan.decode_context = batch.context
            state.tokens_left -= len(plan.decodes)
            self._advance(due)
            if state.config.num_scheduler_steps > 1 and not plan.drafts:
                self._advance_further()
        for request in plan.deferred:
            if request in state.running:
                batch.join(request)

    def prefill(self) -> None:
        """Continue partially prefilled prompts; waiting requests of other groups may overtake."""
        state = self._state
        if not state.prefilling:
            return
        planned = {chunk.request for chunk in self.plan.chunks}
        partial = [request for request in state.prefilling if request not in planned]
        for place, request in enumerate(partial):
            if state.tokens_left <= 0:
                break
            if state.queue.has_other_groups(request):
                self._admissions.admit_overtaking(partial[place:])
            start = request.num_computed
            num_tokens, _ = grant(state, request.prefill_end - start, start)
            if num_tokens:
                state.compute(request, num_tokens)
                state.tokens_left -= num_tokens

    def admit(self, *, charge_cached: bool = False) -> None:
        """Admit waiting requests in queue order until one does not fit."""
        if self._state.queue:
            self._admissions.admit(self._state.queue.walk(), charge_cached)

    def admit_swapped(self) -> None:
        """Admit swapped requests only, reserving blocks and tokens for the decodes."""
        if self._state.swapped:
            self._admissions.admit_swapped()

    # What the actions consist of.

    def _defer(self, limit: int) -> list[Request]:
        """Take all but the `limit` requests that were admitted first out of the decode batch."""
        batch = self._state.decode_batch
        deferred = sorted(batch.members, key=lambda r: r.history.admission)[limit:]
        for request in deferred:
            batch.leave(request)
        return deferred

    def _advance(self, due: list[Request]) -> None:
        """One token for each decode, and blocks for the `due` ones."""
        if due:
            self.plan.new_blocks += self._state.kv.append_blocks(due)
        self._state.planned.reaching_limit.append(self._state.decode_batch.advance())

    def _advance_further(self) -> None:
        """More decode steps in one plan, while no request waits and none has to be preempted."""
        state, plan, batch = self._state, self.plan, self._state.decode_batch
        if state.queue or state.prefilling or plan.chunks or plan.deferred:
            return
        while plan.num_steps < state.config.num_scheduler_steps and batch.members:
            due = batch.due()
            if len(due) > state.kv.num_free:
                break
            self._advance(due)
            plan.num_steps += 1

    def _choose_victim(self) -> Request:
        """The running request to preempt, among those without work in this plan."""
        state, planned = self._state, {chunk.request for chunk in self.plan.chunks}
        requests = (*state.prefilling, *state.decode_batch.members, *self.plan.deferred)
        candidates = [r for r in requests if r not in planned and r in state.running]
        victim = max(candidates, key=lambda request: state.policies.victim(request, state.view))
        if state.planned.answers is not None:
            state.planned.answers.num_candidates[victim] = len(candidates)
        return victim

    def _force(self) -> None:
        """Do the first work at hand without asking policies, because they left the step empty."""
        state, budget = self._state, self._state.config.max_num_batched_tokens
        self.decode()
        if not self.plan.is_empty:
            return
        if not state.prefilling:
            request = next(state.queue.walk())
            state.admit(request, state.kv.admission_cost(request))
            self.plan.blocked = [b for b in self.plan.blocked if b.request is not request]
        request = next(iter(state.prefilling))
        state.compute(request, min(request.prefill_end - request.num_computed, budget))
