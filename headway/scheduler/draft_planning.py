"""Chooses the requests that verify drafts in a step, and how many drafts they get.

A draft continues tokens that the host knows. So drafts are planned only while no plan is in flight,
and no plan is made while one with drafts is. A request with drafts is not in the decode batch until
its result is applied. Drafts never preempt a request: they use blocks and tokens that are left.
"""

from __future__ import annotations

from headway.plan import Draft, Plan
from headway.request import Request
from headway.scheduler.drafting import Drafting
from headway.scheduler.state import SchedulerState


def must_wait(state: SchedulerState) -> bool:
    """Whether the next plan has to know the tokens of the one in flight."""
    drafting, rule = state.drafting, state.policies.draft
    if drafting is None or rule is None or not state.in_flight:
        return False
    if any(planned.plan.drafts for planned in state.in_flight):
        return True
    requests = _begin(drafting, state)
    return bool(requests) and rule(requests[0], drafting) > 0


def plan_drafts(plan: Plan, state: SchedulerState, num_tokens: int) -> None:
    """Move decoding requests with at most this many drafts from the batch to the plan."""
    drafting, rule = state.drafting, state.policies.draft
    if drafting is None or rule is None or state.in_flight:
        return
    num_blocks = state.kv.num_free - len(state.decode_batch.due())
    if state.queue or state.prefilling:
        num_tokens //= 2  # prompts need the others
    for request in _begin(drafting, state):
        wanted = rule(request, drafting)
        if wanted <= 0 or num_tokens <= 0:
            break
        drafting.num_left -= 1
        most = min(wanted, num_tokens, _room(request, num_blocks, state))
        if tokens := drafting.propose(request, most):
            draft = Draft(request, request.num_computed, len(tokens), tokens)
            num_tokens -= len(tokens)
            num_blocks -= _move(draft, plan, state)
            drafting.add(draft)


def _begin(drafting: Drafting, state: SchedulerState) -> list[Request]:
    """The requests that may get drafts, first those whose drafts are most often right."""
    batch = state.decode_batch
    requests = [
        request for request in batch.members
        if request.history.drafts_from <= request.computed_base + batch.tick < request.limit - 2
    ]  # fmt: skip
    if requests:
        drafting.begin(len(batch.members), batch.context, len(requests))
    return sorted(requests, key=drafting.acceptance, reverse=True)


def _room(request: Request, num_blocks: int, state: SchedulerState) -> int:
    """Drafts for which a request has blocks, with `num_blocks` more, and tokens up to its limit."""
    start, most = request.num_computed, state.kv.max_drafts
    room = min(state.kv.num_slots(request, num_blocks) - start - 1, request.limit - start - 2)
    return room if most is None else min(room, most)


def _move(draft: Draft, plan: Plan, state: SchedulerState) -> int:
    """Move a request from the batch to the plan; returns the blocks that its drafts take.

    The block that it needs without drafts is not one of them.
    """
    request, size = draft.request, state.kv.block_size
    state.decode_batch.leave(request)
    request.computed_base = draft.end
    plan.drafts.append(draft)
    new = state.kv.extend(request, draft.start, draft.end)
    plan.new_blocks += new
    return len(new) - (draft.start % size == 0)
