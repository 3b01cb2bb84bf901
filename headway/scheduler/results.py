"""Applies the result of a plan: hands out sampled tokens, finishes requests that stop or end."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from headway.errors import ExecutorError
from headway.events import Planned
from headway.plan import Column, Draft, Plan, StepResult
from headway.request import Request
from headway.scheduler.state import SchedulerState

MAX_COMPARED = 8  # stop tokens that are compared one by one, which is faster for a few


def check_result(plan: Plan, result: StepResult) -> None:
    """ExecutorError unless the result has one token for everything that the plan samples."""
    num_columns = plan.num_steps if plan.decodes else 0
    num_first = sum([chunk.is_last for chunk in plan.chunks]) if plan.chunks else 0
    lengths = list(map(len, result.decode_tokens))
    if lengths != [len(plan.decodes)] * num_columns or len(result.first_tokens) != num_first:
        raise ExecutorError(
            f"step {plan.step} samples {num_columns} x {len(plan.decodes)} decode tokens and "
            f"{num_first} first tokens; the executor returned {lengths} and "
            f"{len(result.first_tokens)}"
        )
    counts = list(map(len, result.draft_tokens))
    if len(counts) != len(plan.drafts) or any(
        not 1 <= count <= draft.count + 1 for draft, count in zip(plan.drafts, counts, strict=True)
    ):
        wanted = [draft.count + 1 for draft in plan.drafts]
        raise ExecutorError(
            f"step {plan.step} samples at most {wanted} tokens after drafts, and at least one each; "
            f"the executor returned {counts}"
        )


def apply_result(planned: Planned, result: StepResult, state: SchedulerState) -> list[Request]:
    """Hand out what was sampled; returns the requests that finished with it."""
    plan = planned.plan
    finished = _apply_first_tokens(plan, result, state) if plan.chunks else []
    for step, column in enumerate(result.decode_tokens):
        _deliver(planned, column, state)
        finished += _finish_stopped(plan, step, plan.decodes, column, state)
        finished += _finish_at_limit(planned, step, state)
    if not result.decode_tokens:
        finished += _finish_at_limit(planned, 0, state)
    for draft, sampled in zip(plan.drafts, result.draft_tokens, strict=True):
        finished += _apply_draft(draft, sampled, plan, state)
    return finished


def end_failed(
    plan: Plan, result: StepResult, finished: list[Request], state: SchedulerState
) -> list[Request]:
    """End the requests that the executor could not continue; returns those not in `finished`."""
    ended, drafts = [], zip(plan.drafts, result.draft_tokens, strict=True)
    num_gained = {draft.request: len(tokens) for draft, tokens in drafts} | plan.tokens_kept
    for request, (step, reason, code) in result.failed.items():
        if step >= num_gained.get(request, plan.num_steps):
            continue  # it ended in an earlier step of the plan
        if request in finished:
            request.finish_reason = "error"
        elif not request.is_finished:
            state.finish(request, "error")
            ended.append(request)
        else:
            continue
        request.error, request.error_code = reason, code
    return ended


def _apply_first_tokens(plan: Plan, result: StepResult, state: SchedulerState) -> list[Request]:
    """Hand out the tokens that last chunks sampled; returns the requests that they stop."""
    sampled = [chunk.request for chunk in plan.chunks if chunk.is_last]
    for request, token in zip(sampled, result.first_tokens, strict=True):
        if request not in plan.tokens_kept:
            request.flushed_tokens.append(token)
    return _finish_stopped(plan, 0, sampled, result.first_tokens, state) if sampled else []


def _apply_draft(
    draft: Draft, sampled: list[int], plan: Plan, state: SchedulerState
) -> list[Request]:
    """Hand out the tokens up to a stop token; returns the request if it ends with them."""
    request, start = draft.request, draft.start
    if request in plan.tokens_kept:  # it has ended
        sampled.clear()
        return []
    stop = _first_stop(request, sampled)
    if stop is not None:
        del sampled[stop + 1 :]
    if state.drafting is not None:  # a replay knows only the tokens that were gained
        state.drafting.record(draft, len(sampled) - 1)
    request.flushed_tokens.extend(sampled)
    request.computed_base = start + len(sampled)
    state.kv.cut(request, request.computed_base)
    if stop is None and request.num_known < request.limit:
        state.decode_batch.join(request)
        return []
    request.stop_token = None if stop is None else sampled[stop]
    plan.tokens_kept[request] = len(sampled)
    state.finish(request, "length" if stop is None else "stop")
    return [request]


def _first_stop(request: Request, sampled: list[int]) -> int | None:
    """The place of the first token that stops the request."""
    least = request.params.min_tokens - request.num_generated - 1
    places = (i for i, token in enumerate(sampled) if token in request.stops and i >= least)
    return next(places, None)


def _deliver(planned: Planned, column: Column, state: SchedulerState) -> None:
    """One token for each decode: through the batch, or singly to requests that have left it."""
    plan, batch = planned.plan, state.decode_batch
    left = batch.left_in_flight.union(*planned.reaching_limit)
    singly = {request for request in left if not batch.expects_next(request)} if left else None
    batch.deliver(plan.rows, column)
    if not singly:
        return
    for request, place in plan.places_of(singly).items():
        if request not in plan.tokens_kept:
            request.flushed_tokens.append(int(column[place]))


def _finish_stopped(
    plan: Plan, step: int, requests: list[Request], column: Column, state: SchedulerState
) -> list[Request]:
    """Finish requests that sampled one of their stop tokens, in the order of admission."""
    stopped: list[Request] = []
    if not state.stop_tokens:
        return stopped
    places = _find_tokens(column, state.stop_tokens)
    for place in sorted(places, key=lambda i: requests[i].history.admission):
        request, token = requests[place], int(column[place])
        goes_on = request.num_generated < request.params.min_tokens
        if token in request.stops and request not in plan.tokens_kept and not goes_on:
            request.stop_token = token
            plan.tokens_kept[request] = step + 1
            state.finish(request, "stop")
            stopped.append(request)
    return stopped


def _find_tokens(column: Column, tokens: Collection[int]) -> list[int]:
    """The places of a column that hold one of the tokens, of which there is at least one."""
    if isinstance(column, list):
        return [place for place, token in enumerate(column) if token in tokens]
    values, (first, *others) = np.asarray(column), tokens
    if len(tokens) > MAX_COMPARED:
        found = np.isin(values, [first, *others])
    else:
        found = values == first
        for token in others:
            found |= values == token
    places: list[int] = found.nonzero()[0].tolist()
    return places


def _finish_at_limit(planned: Planned, step: int, state: SchedulerState) -> list[Request]:
    """Finish requests that reach their limit with this step of the plan."""
    reaching, kept = planned.reaching_limit, planned.plan.tokens_kept
    if step >= len(reaching) or not reaching[step]:
        return []
    ended = [request for request in reaching[step] if request not in kept]
    for request in ended:
        kept[request] = step + 1
        state.finish(request, "length")
    return ended
