"""Admits waiting requests into the plan of one step, and records why others have to wait.

A request is admitted if its dependencies are computed and rows, tokens and blocks are free. For each
request that is considered but not admitted, the plan records the reason, what the request needed
and what was available.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from headway.kv.cache import AdmissionCost
from headway.plan import Blocked, Reason
from headway.request import Request, RequestState
from headway.scheduler.fairness import check_reserved_rows, overtaking_limit
from headway.scheduler.preemption import choose_victims
from headway.scheduler.state import SchedulerState
from headway.step_cost import work_of

NOT_COMPUTED = frozenset({RequestState.WAITING, RequestState.PREFILL, RequestState.SWAPPED})


def grant(state: SchedulerState, num_wanted: int, start: int) -> tuple[int, int]:
    """Tokens of a prompt that the chunk rule allows, from `start` on, and those that were left.

    The tokens left are those of the budget and, while requests decode, of the step's time. The first
    prompt may always compute a block, so that a limit of time never stops a prompt.
    """
    plan, policies, left = state.plan, state.policies, state.tokens_left
    if left > 0 and policies.most_tokens and (plan.decodes or state.decode_batch.members):
        most = policies.most_tokens(num_wanted, work_of(plan), start)
        left = min(left, max(most, 0 if plan.chunks else state.config.block_size))
    if left <= 0:
        return 0, left
    num_tokens = policies.chunk(num_wanted, left, not plan.chunks)
    return int(max(min(num_tokens, num_wanted, left), 0)), left


class Admissions:
    """Decides which waiting requests the step under construction admits."""

    had_to_preempt = False  # set if blocks were missing for decodes
    _closed: Reason | None = None  # why no more requests can be admitted
    _blocks_for_decodes = 0  # reserved while swapped requests are admitted
    _preempted_for: Request | None = None  # others were preempted for it: it needs no headroom

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    @property
    def reason_of_rest(self) -> Reason:
        """Why the waiting requests that are not blocked were not considered."""
        open_reason: Reason = "behind_blocked" if self._state.plan.blocked else "not_reached"
        return "after_preemption" if self.had_to_preempt else self._closed or open_reason

    def preempt_for_priority(self) -> None:
        """Preempt running requests that the first waiting one outranks, as many as it needs."""
        first = next(self._state.queue.walk())
        if self._check_dependencies(first):
            return
        for request in choose_victims(first, self._state):
            self._state.preempt(request, is_priority=True)
            self._preempted_for = first

    def admit_swapped(self) -> None:
        """Admit swapped requests, except from what the decodes need."""
        state = self._state
        if self._preempted_for:
            return
        tokens_for_decodes = min(len(state.decode_batch.members), state.tokens_left)
        state.tokens_left -= tokens_for_decodes
        self._blocks_for_decodes = len(state.decode_batch.due())
        self.admit(sorted(state.swapped, key=state.view.queue_key))
        state.tokens_left += tokens_for_decodes
        self._blocks_for_decodes = 0

    def admit_overtaking(self, partial: list[Request]) -> None:
        """Admit requests that may overtake `partial[0]`, and move them ahead of all of `partial`."""
        state, num_running = self._state, len(self._state.running)
        candidates = state.queue.walk(overtaking_limit(partial[0], state.view.service()))
        first = next(candidates, None)
        if first is not None:
            self.admit(chain((first,), candidates))
        if len(state.running) > num_running:
            for request in partial:
                state.prefilling[request] = state.prefilling.pop(request)

    def admit(self, candidates: Iterable[Request], charge_cached: bool = False) -> None:
        """Admit the candidates in their order until one does not fit."""
        state, passed = self._state, list[Request]()
        plan, max_overtakes = state.plan, state.config.queue.max_overtakes
        plan.blocked = []
        self._closed = self._reason_to_close()
        if self._closed:
            return
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
        state = self._state
        if self.had_to_preempt:
            return "after_preemption"  # admitted requests would compete with those just preempted
        if len(state.running) >= state.config.max_num_seqs:
            return "max_num_seqs"
        return "token_budget" if state.tokens_left <= 0 else None

    def _try_admit(self, request: Request, charge_cached: bool) -> Blocked | None:
        """Admit a request if rows, tokens and blocks allow; otherwise return what is missing."""
        state = self._state
        blocked = self._check_dependencies(request) or check_reserved_rows(
            request, state.running, state.config.max_num_seqs, state.queue.counters,
            state.num_steps,
        )  # fmt: skip
        if blocked:
            return blocked
        cost = state.kv.admission_cost(request)
        num_left = request.num_known - cost.num_computed
        num_charged = request.num_known if charge_cached else num_left
        num_granted, tokens_left = grant(state, num_charged, cost.num_computed)
        if not num_granted:
            return Blocked(request, "token_budget", num_charged, tokens_left)
        if blocked := self._check_blocks(request, cost):
            return blocked
        state.tokens_left -= num_granted
        state.admit(request, cost)
        state.compute(request, min(num_left, num_granted))
        return None

    def _check_dependencies(self, request: Request) -> Blocked | None:
        """Blocked if its parent has not computed the prompt, or if it has just been preempted."""
        parent = request.parent
        if parent is not None and parent.state in NOT_COMPUTED and not _has_sampled(parent):
            return Blocked(request, "parent", 1, 0)
        if request in self._state.preempted_in_flight:
            return Blocked(request, "just_preempted", 1, 0)
        return None

    def _check_blocks(self, request: Request, cost: AdmissionCost) -> Blocked | None:
        """Blocked if the request's blocks, with the headroom, are not free."""
        state, kv = self._state, self._state.kv
        if blocked := kv.check_admission(request, cost):
            return blocked
        is_alone = not (state.running or state.in_flight)
        if is_alone or request is self._preempted_for:
            return None
        headroom = state.policies.headroom(request, state.view)
        if state.planned.answers is not None:
            state.planned.answers.headroom[request] = headroom
        room, free = self._blocks_for_decodes + headroom, kv.num_free
        if cost.num_blocks + room <= free:
            return None
        need = kv.num_blocks_needed(request, cost)
        if need + room <= free:
            return None
        reason: Reason = "back_off" if need + headroom.base <= free else "headroom"
        return Blocked(request, reason, need + room, free)


def _has_sampled(request: Request) -> bool:
    """Whether a token of the request was sampled here, so that its prompt has been computed."""
    return request.num_generated > len(request.history.resumed)
