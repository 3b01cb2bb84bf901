"""Drive a scheduler by hand: no executor, no clock; sampled tokens are whatever the caller says.

A step table lists what each step decided, in a form that can be written down and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from headway.plan import Column, Plan, StepReport, StepResult
from headway.request import Params, Request
from headway.scheduler import Scheduler, preset

Sample = Callable[[Request, int], int]  # (request, place in its tokens) -> token
PARAMS = frozenset(Params.__dataclass_fields__)


def count_up(request: Request, place: int) -> int:
    """Tokens that differ between requests and places, so that nothing is shared by chance."""
    return 1_000_000 + 10_000 * request.history.serial + place


class Row(NamedTuple):
    """One step, compactly: ids (of decodes in the order of admission), chunks, reasons."""

    admitted: str = ""
    decodes: str = ""
    chunks: tuple[tuple[str, int, int], ...] = ()
    preempted: str = ""
    blocked: tuple[tuple[str, str], ...] = ()


def names(requests: Iterable[Request]) -> str:
    return " ".join(request.id for request in requests)


def row(plan: Plan) -> Row:
    return Row(
        admitted=names(a.request for a in plan.admitted),
        decodes=names(sorted(plan.decodes, key=lambda r: r.history.admission)),
        chunks=tuple((c.request.id, c.start, c.end) for c in plan.chunks),
        preempted=names(p.request for p in plan.events.preempted),
        blocked=tuple((b.request.id, b.reason) for b in plan.blocked),
    )


def result(plan: Plan, sample: Sample = count_up) -> StepResult:
    """What an executor would return; to be asked when the plans before are complete."""
    columns: list[Column] = [
        [sample(r, len(r.tokens) + step) for r in plan.decodes]
        for step in range(plan.num_steps if plan.decodes else 0)
    ]
    return StepResult(columns, [sample(c.request, c.end) for c in plan.chunks if c.is_last])


class Drive:
    """A scheduler, the requests given to it, and the table of its steps."""

    def __init__(self, name: str = "headway", /, *, sample: Sample = count_up, **changes: Any):
        self.scheduler = Scheduler(preset(name, **changes))
        self.sample = sample
        self.requests: dict[str, Request] = {}
        self.table: list[Row] = []

    def add(
        self, id: str, prompt: int | Iterable[int], max_tokens: int | None = 4, **more: Any
    ) -> Request:
        """A request with this prompt, or with one of this length that nobody else has."""
        params = {k: more.pop(k) for k in list(more) if k in PARAMS}
        if isinstance(prompt, int):
            first = 1000 * (len(self.requests) + 1)
            prompt = range(first, first + prompt)
        request = Request(id, prompt, Params(max_tokens=max_tokens, **params), **more)
        self.scheduler.add(request)
        self.requests[id] = request
        return request

    def plan(self) -> Plan:
        """Schedule only."""
        plan = self.scheduler.schedule()
        self.table.append(row(plan))
        return plan

    def finish(self, plan: Plan) -> StepReport:
        return self.scheduler.complete(plan, result(plan, self.sample))

    def step(self) -> Plan:
        """Schedule and complete."""
        plan = self.plan()
        if not plan.is_empty:
            self.finish(plan)
        return plan

    def steps(self, count: int) -> list[Row]:
        return [row(self.step()) for _ in range(count)]

    def run(self, most: int = 10_000) -> list[Row]:
        """Step until everybody has finished; more than `most` steps is a hang."""
        before = len(self.table)
        while self.scheduler.requests:
            assert len(self.table) - before < most, "still unfinished: a hang"
            plan = self.step()
            assert not plan.is_empty, "work at hand, nothing in flight, and an empty plan"
        return self.table[before:]

    def check_empty(self) -> None:
        """Everybody is gone: nothing is held, counted or remembered for anyone."""
        check_no_leaks(self.scheduler)


def check_no_leaks(scheduler: Scheduler) -> None:
    kv = scheduler.kv
    assert not scheduler.requests and not scheduler.running and not scheduler.state.prefilling
    assert not scheduler.swapped and not scheduler.queue and not scheduler.in_flight
    assert not scheduler.state.decode_batch.members and not scheduler.state.decode_batch.due()
    kv.free_host_blocks()
    assert set(kv.pool.refs) == {0} and kv.num_free == kv.pool.num_blocks
    assert set(kv.host.refs) <= {0} and kv.host.num_free == kv.host.num_blocks
    scheduler.add(probe := Request("probe", [1], Params(max_tokens=1)))
    plan = scheduler.schedule()
    assert 0 <= probe.row < scheduler.config.max_num_seqs
    scheduler.complete(plan, result(plan))
    assert probe.is_finished and not scheduler.requests
