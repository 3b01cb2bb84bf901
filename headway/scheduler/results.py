"""What became of a plan: hand out its tokens, find who stops or reaches its length."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

import numpy as np

from headway.errors import ExecutorError
from headway.plan import Column, Plan, StepResult
from headway.request import Request

if TYPE_CHECKING:
    from headway.scheduler.scheduler import Scheduler

MAX_COMPARED = 8  # stop tokens looked for one by one, which is faster for a few


def check_result(plan: Plan, result: StepResult) -> None:
    """ExecutorError unless the result has one token for everything that the plan samples."""
    num_columns = plan.num_steps if plan.decodes else 0
    num_firsts = sum(chunk.is_last for chunk in plan.chunks)
    lengths = [len(column) for column in result.columns]
    if lengths != [len(plan.decodes)] * num_columns or len(result.firsts) != num_firsts:
        raise ExecutorError(
            f"step {plan.step} samples {num_columns} x {len(plan.decodes)} decodes and "
            f"{num_firsts} firsts; the executor gave columns of {lengths} and {len(result.firsts)}"
        )


def settle(plan: Plan, result: StepResult, scheduler: Scheduler) -> list[Request]:
    """Hand out what was sampled; the requests that finished with it, retired."""
    finished: list[Request] = []
    sampled = [chunk.request for chunk in plan.chunks if chunk.is_last]
    for request, token in zip(sampled, result.firsts, strict=True):
        if request not in plan.tokens_kept:
            request.written.append(token)
    finished += _stop(plan, 0, sampled, result.firsts, scheduler)
    for step, column in enumerate(result.columns):
        _deliver(plan, column, scheduler)
        finished += _stop(plan, step, plan.decodes, column, scheduler)
        finished += _end(plan, step, scheduler)
    if not result.columns:
        finished += _end(plan, 0, scheduler)
    return finished


def _deliver(plan: Plan, column: Column, scheduler: Scheduler) -> None:
    """One token for each decode: those in decode_batch together, those who left it singly."""
    decode_batch = scheduler.decode_batch
    singly = [
        r for r in decode_batch.strayed.union(*plan.reaching_limit) if not decode_batch.awaits(r)
    ]
    decode_batch.deliver(plan.rows, column)
    places = {request: place for place, request in enumerate(plan.decodes)} if singly else {}
    for request in singly:
        if request not in plan.tokens_kept and request in places:
            request.written.append(int(column[places[request]]))


def _stop(
    plan: Plan, step: int, requests: list[Request], column: Column, scheduler: Scheduler
) -> list[Request]:
    """Retire those whose token of this step is one of their stop tokens, in order of admission."""
    stopped = []
    places = _watch(column, list(scheduler.watched))
    for place in sorted(places, key=lambda i: requests[i].history.admission):
        request, token = requests[place], int(column[place])
        is_over = request in plan.tokens_kept or request.num_generated < request.params.min_tokens
        if token in request.stops and not is_over:
            request.stop_token = token
            plan.tokens_kept[request] = step + 1
            scheduler.retire(request, "stop")
            stopped.append(request)
    return stopped


def _watch(column: Column, watched: list[int]) -> list[int]:
    """The places of a column that hold a token somebody may stop at."""
    if not watched or not len(column):
        return []
    tokens = np.asarray(column)
    if len(watched) > MAX_COMPARED:
        found = np.isin(tokens, watched)
    else:
        found = reduce(or_, (tokens == token for token in watched))
    places: list[int] = np.flatnonzero(found).tolist()
    return places


def _end(plan: Plan, step: int, scheduler: Scheduler) -> list[Request]:
    """Retire who reaches its length with this step of the plan."""
    ended = (
        [r for r in plan.reaching_limit[step] if r not in plan.tokens_kept]
        if step < len(plan.reaching_limit)
        else []
    )
    for request in ended:
        plan.tokens_kept[request] = step + 1
        scheduler.retire(request, "length")
    return ended
