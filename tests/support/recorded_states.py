"""What a scheduler knows and what a recording shows after a plan, in one form, to compare them."""

from __future__ import annotations

from typing import Any

from headway import Plan, RequestState, Scheduler
from headway.lab.recording.builder import REASONS
from headway.lab.recording.state import RecordedState, Status

STATUS = {
    RequestState.WAITING: Status.WAITING, RequestState.PREFILL: Status.PREFILL,
    RequestState.DECODING: Status.DECODING, RequestState.SWAPPED: Status.SWAPPED,
}  # fmt: skip
State = dict[str, Any]


def state_of(scheduler: Scheduler) -> State:
    """What the scheduler knows right after it has made a plan."""
    pool, plan = scheduler.kv.pool, scheduler.last_planned.plan
    blocked = {b.request: (REASONS.index(b.reason), b.need, b.have) for b in plan.blocked}
    rest = plan.not_considered
    return {
        "requests": {
            r.id: (
                STATUS[r.state], r.num_computed, r.num_generated, list(r.kv.blocks),
                list(r.kv.host.blocks) if r.kv.host else [], blocked.get(r),
                r.history.num_preemptions,
            )
            for r in scheduler.requests.values()
        },
        "joined": {r.id for r in scheduler.state.decode_batch.members},
        "held": {block: count for block, count in enumerate(pool.refs) if count},
        "cached": {
            block for block, key in enumerate(pool.index.key_of) if key is not None and not pool.refs[block]
        },
        "rest": (REASONS.index(rest.reason), rest.num_requests) if rest else None,
    }  # fmt: skip


def shown(recording: RecordedState, ids: list[str]) -> State:
    """The same of a recording."""
    names = [ids[r] for r in recording.requests]
    assert len(set(names)) == len(names), "a request is shown once"
    return {
        "requests": {
            ids[r]: (
                each.status, recording.computed(r), recording.generated(r), each.blocks, each.host,
                each.blocked, each.num_preemptions,
            )
            for r, each in recording.requests.items()
        },
        "joined": {ids[r] for r in recording.joined},
        "held": recording.refs,
        "cached": recording.published - recording.refs.keys(),
        "rest": recording.rest,
    }  # fmt: skip


def note_states(scheduler: Scheduler) -> dict[int, State]:
    """The state after each plan with work, by step; it grows while the scheduler runs."""
    states, schedule = dict[int, State](), scheduler.schedule

    def noting() -> Plan:
        plan = schedule()
        if not plan.is_empty:
            states[plan.step] = state_of(scheduler)
        return plan

    scheduler.schedule = noting  # type: ignore[method-assign]
    return states
