"""Builds the plan of one step: a batching rule calls decode, prefill and admit in the order it needs.

Requests are preempted before tokens are granted, so work that is in a plan is never removed from
it. For each request that is considered but not admitted, the plan records the reason, what the
request needed and what was available.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from headway.kv.cache import AdmissionCost
from headway.plan import Blocked, Chunk, NotConsidered, Plan, Reason
from headway.request import Request, RequestState
from headway.scheduler.fairness import check_reserved_rows, overtaking_limit
from headway.scheduler.policies.headroom import back_off
from headway.scheduler.policy_calls import (
    call_batching,
    call_chunk,
    call_headroom,
    call_most_tokens,
    call_victim,
)
from headway.scheduler.preemption import choose_victims
from headway.scheduler.state import SchedulerState
from headway.step_cost import work_of

NOT_COMPUTED = frozenset({RequestState.WAITING, RequestState.PREFILL, RequestState.SWAPPED})


class StepBuilder:
    """The actions that a batching rule may call (config.StepActions), and what they do."""

    def __init__(self, state: SchedulerState, plan: Plan) -> None:
        self.plan = plan
        self._state, self._config = state, state.config
        state.tokens_left = state.config.max_num_batched_tokens
        self._had_to_preempt = False
        self._closed: Reason | None = None  # why no more requests can be admitted
        self._blocks_for_decodes = 0  # reserved by admit_swapped
        self._preempted_for: Request | None = (
            None  # others were preempted for it: no headroom check
        )

    @property
    def tokens_left(self) -> int:
        return self._state.tokens_left

    @property
    def is_idle(self) -> bool:
        return not (self.plan.decodes or self.plan.chunks)

    @property
    def num_decoding(self) -> int:
        return len(self._state.decode_batch.members)

    @property
    def prefill_streak(self) -> int:
        return self._state.prefill_streak

    def build(self) -> None:
        """Fill the plan; with work at hand it stays empty only if another plan is in flight."""
        state = self._state
        if self._config.queue.preempts and state.queue:
            self._preempt_for_priority()
        call_batching(self._config.batching, self)
        if self.plan.is_empty and state.requests and not state.in_flight:
            self._force()
        num_rest = len(state.queue) - len(self.plan.blocked)
        if num_rest:
            open_reason: Reason = "behind_blocked" if self.plan.blocked else "not_reached"
            reason = "after_preemption" if self._had_to_preempt else self._closed or open_reason
            self.plan.not_considered = NotConsidered(reason, num_rest)
        state.kv.free_host_blocks()
        for chunk in self.plan.chunks:
            if chunk.is_last:
                state.start_decoding(chunk.request)

    # The actions of a batching rule.

    def decode(self, at_most: int | None = None) -> None:
        """Advance all decoding requests, as far as `at_most` and the token budget allow."""
        plan, state, batch = self.plan, self._state, self._state.decode_batch
        if plan.decodes or not batch.members:
            return
        if plan.deferred:  # of an earlier call that granted no tokens
            plan.deferred = []
        limit = state.tokens_left if at_most is None else min(at_most, state.tokens_left)
        if limit < len(batch.members):
            oldest_first = sorted(batch.members, key=lambda r: r.history.admission)
            plan.deferred = oldest_first[max(0, limit) :]
            for request in plan.deferred:
                batch.leave(request)
        due = batch.due()
        while len(due) > state.kv.num_free:
            self._had_to_preempt = True
            state.preempt(self._choose_victim(), num_due=len(due))
            due = batch.due()
        if batch.members:
            members = batch.batch
            plan.decodes, plan.rows = members.requests, members.rows
            plan.decode_context = batch.context
            state.tokens_left -= len(plan.decodes)
            self._advance(due)
            if self._config.num_scheduler_steps > 1:
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
                self._admit_overtaking(partial[place:])
            num_tokens = self._grant(
                request.prefill_end - request.num_computed, request.num_computed
            )
            if num_tokens:
                self._compute(request, num_tokens)
                state.tokens_left -= num_tokens

    def admit(self, *, charge_cached: bool = False) -> None:
        """Admit waiting requests in queue order until one does not fit."""
        if self._state.queue:
            self._admit(self._state.queue.walk(), charge_cached)

    def admit_swapped(self) -> None:
        """Admit swapped requests first, reserving blocks and tokens for the decodes."""
        state = self._state
        if not state.swapped or self._preempted_for:
            return
        self._blocks_for_decodes = len(state.decode_batch.due())
        tokens_for_decodes = min(self.num_decoding, state.tokens_left)
        state.tokens_left -= tokens_for_decodes
        self._admit(sorted(state.swapped, key=state.view.queue_key))
        state.tokens_left += tokens_for_decodes
        self._blocks_for_decodes = 0

    # Decodes.

    def _advance(self, due: list[Request]) -> None:
        """One token for each decode, and blocks for the `due` ones."""
        if due:
            self.plan.new_blocks += self._state.kv.append_blocks(due)
            if self._state.kv.window is not None:
                for request in due:
                    self._extend_window(request, request.num_computed, request.num_computed + 1)
        self.plan.reaching_limit.append(self._state.decode_batch.advance())

    def _extend_window(self, request: Request, start: int, end: int) -> None:
        """Give a request the blocks of sliding-window layers for tokens [start, end)."""
        window = self._state.kv.window
        new = None if window is None else window.extend(request, start, end)
        if new is not None:
            self.plan.window_blocks.append(new)

    def _advance_further(self) -> None:
        """More decode steps in one plan, while no request waits and none has to be preempted."""
        state, plan, batch = self._state, self.plan, self._state.decode_batch
        if state.queue or state.prefilling or plan.chunks or plan.deferred:
            return
        while plan.num_steps < self._config.num_scheduler_steps and batch.members:
            due = batch.due()
            if len(due) > state.kv.num_free:
                break
            self._advance(due)
            plan.num_steps += 1

    def _choose_victim(self) -> Request:
        """The running request to preempt, among those without work in this plan."""
        state, planned = self._state, {chunk.request for chunk in self.plan.chunks}
        candidates = (*state.prefilling, *state.decode_batch.members, *self.plan.deferred)
        return max(
            (r for r in candidates if r not in planned and r in state.running),
            key=lambda r: call_victim(self._config.victim, r, state.view),
        )

    def _preempt_for_priority(self) -> None:
        """Preempt running requests that the first waiting one outranks, as many as it needs."""
        first = next(self._state.queue.walk())
        if self._check_dependencies(first):
            return
        for request in choose_victims(first, self._state):
            self._state.preempt(request, is_priority=True)
            self._preempted_for = first

    # Prompts.

    def _grant(self, num_wanted: int, start: int) -> int:
        """Tokens of `num_wanted`, from `start` on, that the chunk rule allows now."""
        left = self._num_left(num_wanted, start)
        if left <= 0:
            return 0
        return call_chunk(self._config.chunk, num_wanted, left, not self.plan.chunks)

    def _num_left(self, num_wanted: int, start: int) -> int:
        """Tokens left in this step: of its budget and, while requests decode, of its time.

        The first prompt may always compute a block, so that a limit of time delays no prompt for
        ever.
        """
        left, rule = self._state.tokens_left, self._config.chunk
        has_decodes = self.plan.decodes or self._state.decode_batch.members
        if left <= 0 or not has_decodes or not hasattr(rule, "most_tokens"):
            return left
        most = call_most_tokens(rule, num_wanted, work_of(self.plan), start)
        least = 0 if self.plan.chunks else self._config.block_size
        return min(left, max(most, least))

    def _compute(self, request: Request, num_tokens: int) -> None:
        """Put the next tokens of a prompt into the plan."""
        kv, history, size = self._state.kv, request.history, self._config.block_size
        start = request.num_computed
        end = request.computed_base = start + num_tokens
        # Only a full hit starts in a published block, which must not be written.
        is_stored = kv.pool.index.key_of[request.kv.blocks[start // size]] is not None
        is_last = end == request.prefill_end
        self.plan.chunks.append(Chunk(request, start, end, end if is_stored else start, is_last))
        self._extend_window(request, start, end)
        kv.publish(request, start // size, end // size)
        history.num_recomputed += max(0, min(end, history.max_num_computed) - start)
        if is_last:
            del self._state.prefilling[request]

    def _force(self) -> None:
        """The policies left the step empty although there is work: do the first piece of it."""
        state, budget = self._state, self._config.max_num_batched_tokens
        self.decode()
        if not self.plan.is_empty:
            return
        if not state.prefilling:
            request = next(state.queue.walk())
            state.start(request, state.kv.admission_cost(request))
            self.plan.blocked = [b for b in self.plan.blocked if b.request is not request]
        request = next(iter(state.prefilling))
        self._compute(request, min(request.prefill_end - request.num_computed, budget))

    # Admissions.

    def _admit_overtaking(self, partial: list[Request]) -> None:
        """Admit requests that may overtake `partial[0]`, and move them ahead of all of `partial`."""
        state, num_running = self._state, len(self._state.running)
        candidates = state.queue.walk(overtaking_limit(partial[0], state.view.service()))
        first = next(candidates, None)
        if first is not None:
            self._admit(chain((first,), candidates))
        if len(state.running) > num_running:
            for request in partial:
                state.prefilling[request] = state.prefilling.pop(request)

    def _admit(self, candidates: Iterable[Request], charge_cached: bool = False) -> None:
        plan, max_overtakes = self.plan, self._config.queue.max_overtakes
        plan.blocked = []
        self._closed = self._reason_to_close()
        if self._closed:
            return
        passed: list[Request] = []
        for request in candidates:
            blocked = self._try_admit(request, charge_cached)
            if blocked is None:
                for other in passed:
                    other.history.num_overtaken += 1
                self._closed = self._reason_to_close()
            else:
                plan.blocked.append(blocked)
                if blocked.reason == "parent":  # it does not wait for room
                    continue
                passed.append(request)
            out_of_tokens = blocked is not None and blocked.reason == "token_budget"
            if self._closed or out_of_tokens or len(passed) > max_overtakes:
                break
            if any(other.history.num_overtaken >= max_overtakes for other in passed):
                break

    def _reason_to_close(self) -> Reason | None:
        """Why no more requests can be admitted in this step."""
        if self._had_to_preempt:
            return "after_preemption"  # admitted requests would compete with those just preempted
        if len(self._state.running) >= self._config.max_num_seqs:
            return "max_num_seqs"
        return "token_budget" if self._state.tokens_left <= 0 else None

    def _try_admit(self, request: Request, charge_cached: bool) -> Blocked | None:
        """Admit a request if rows, tokens and blocks allow; otherwise return what is missing."""
        state = self._state
        blocked = self._check_dependencies(request) or check_reserved_rows(
            request, state.running, self._config.max_num_seqs, state.queue.counters
        )
        if blocked:
            return blocked
        cost = state.kv.admission_cost(request)
        num_left = request.num_known - cost.num_computed
        num_charged = request.num_known if charge_cached else num_left
        num_granted = self._grant(num_charged, cost.num_computed)
        if not num_granted:
            left = self._num_left(num_charged, cost.num_computed)
            return Blocked(request, "token_budget", num_charged, left)
        if blocked := self._check_blocks(request, cost):
            return blocked
        state.tokens_left -= num_granted
        state.start(request, cost)
        self._compute(request, min(num_left, num_granted))
        return None

    def _check_dependencies(self, request: Request) -> Blocked | None:
        """Blocked if its parent has not computed the prompt, or a token of it is in flight."""
        parent = request.parent
        if parent is not None and parent.state in NOT_COMPUTED and not _has_sampled(parent):
            return Blocked(request, "parent", 1, 0)
        if request in self._state.preempted_in_flight:
            return Blocked(request, "just_preempted", 1, 0)
        return None

    def _check_blocks(self, request: Request, cost: AdmissionCost) -> Blocked | None:
        """Blocked if the request's blocks, with the headroom, are not free."""
        state, kv, free = self._state, self._state.kv, self._state.kv.num_free
        need = cost.num_blocks - cost.num_hits
        if need <= free < cost.num_blocks:  # it depends on how many hits have holders
            need = kv.num_blocks_needed(request, cost)
        if need > free:
            return Blocked(request, "blocks", need, free)
        if cost.num_window_blocks > kv.num_window_free:
            have = kv.num_window_free
            return Blocked(request, "window_blocks", cost.num_window_blocks, have)
        is_alone = not (state.running or state.in_flight)
        if is_alone or request is self._preempted_for:
            return None
        headroom = call_headroom(self._config.headroom, request, state.view)
        room = self._blocks_for_decodes + headroom
        if cost.num_blocks + room > free:
            need = kv.num_blocks_needed(request, cost)
        if need + room <= free:
            return None
        rule = self._config.headroom  # only the reason depends on which rule it is
        is_back_off = isinstance(rule, back_off) and need + rule.base(request, state.view) <= free
        return Blocked(request, "back_off" if is_back_off else "headroom", need + room, free)


def _has_sampled(request: Request) -> bool:
    """Whether a token of the request was sampled here, so that its prompt has been computed."""
    return request.num_generated > len(request.history.resumed)
