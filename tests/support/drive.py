"""Drive a scheduler step by step, without executor and clock; the caller samples tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from headway import Completed, Scheduler, preset
from headway.plan import Column, Draft, Plan, StepResult
from headway.request import Request, RequestParams
from tests.support.events import Events

Sample = Callable[[Request, int], int]  # (request, position of the token) -> token
PARAMS = frozenset(RequestParams.__dataclass_fields__)


def count_up(request: Request, position: int) -> int:
    """A token that no other request or position has, so that no prefix is shared by chance."""
    return 1_000_000 + 10_000 * request.history.serial + position


class Row(NamedTuple):
    """The decisions of one step: ids, chunks and reasons; decodes in the order of admission."""

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
        preempted=names(p.request for p in plan.preempted),
        blocked=tuple((b.request.id, b.reason) for b in plan.blocked),
    )


def result(plan: Plan, sample: Sample = count_up) -> StepResult:
    """The result of an executor; call it once all earlier plans are complete."""
    columns: list[Column] = [
        [sample(r, len(r.tokens) + step) for r in plan.decodes]
        for step in range(plan.num_steps if plan.decodes else 0)
    ]
    first_tokens = [sample(c.request, c.end) for c in plan.chunks if c.is_last]
    drafted = [verified(draft, sample) for draft in plan.drafts]
    return StepResult(columns, first_tokens, draft_tokens=drafted)


def verified(draft: Draft, sample: Sample) -> list[int]:
    """The tokens up to the first that is not the next draft."""
    gained: list[int] = []
    for place, token in enumerate((*draft.tokens, None), start=draft.start + 1):
        gained.append(sample(draft.request, place))
        if gained[-1] != token:
            break
    return gained


class Driver:
    """A scheduler, the requests added to it, and the table of its steps."""

    def __init__(self, name: str = "headway", /, *, sample: Sample = count_up, **changes: Any):
        self.scheduler = Scheduler(preset(name, **changes))
        self.events = Events()
        self.scheduler.observe(self.events)
        self.sample = sample
        self.requests: dict[str, Request] = {}
        self.table: list[Row] = []

    def add(
        self, id: str, prompt: int | Iterable[int], max_tokens: int | None = 4, **more: Any
    ) -> Request:
        """Add a request with this prompt, or with a unique prompt of this length."""
        params = {k: more.pop(k) for k in list(more) if k in PARAMS}
        if isinstance(prompt, int):
            first = 1000 * (len(self.requests) + 1)
            prompt = range(first, first + prompt)
        request = Request(id, prompt, RequestParams(max_tokens=max_tokens, **params), **more)
        self.scheduler.add(request)
        self.requests[id] = request
        return request

    def add_all(self, **requests: tuple[int | Iterable[int], int | None]) -> list[Request]:
        """Add requests by id: the prompt and max_tokens of each."""
        return [self.add(id, *fields) for id, fields in requests.items()]

    def plan(self) -> Plan:
        """Schedule a step without completing it."""
        plan = self.scheduler.schedule()
        self.table.append(row(plan))
        return plan

    def finish(self, plan: Plan) -> Completed:
        return self.scheduler.complete(plan, result(plan, self.sample))

    def step(self) -> Plan:
        """Schedule a step and complete it."""
        plan = self.plan()
        if not plan.is_empty:
            self.finish(plan)
        return plan

    def steps(self, count: int) -> list[Row]:
        return [row(self.step()) for _ in range(count)]

    def run(self, max_steps: int = 10_000) -> list[Row]:
        """Step until all requests are finished; AssertionError after `max_steps` steps."""
        before = len(self.table)
        while self.scheduler.requests:
            assert len(self.table) - before < max_steps, "requests are still unfinished"
            plan = self.step()
            assert not plan.is_empty, "the plan is empty although there is work"
        return self.table[before:]

    def check_outputs(self) -> None:
        """Assert that every output has each token of `count_up` once, in order, up to its end."""
        for request in self.requests.values():
            positions = range(request.num_prompt, len(request.tokens))
            expected = [count_up(request, position) for position in positions]
            assert request.output.tolist() == expected, request
            if request.finish_reason == "length":
                assert len(request.tokens) == request.limit

    def check_empty(self) -> None:
        """Assert that the finished requests left nothing behind."""
        check_no_leaks(self.scheduler)


def small_driver(name: str = "vllm_v1", /, **changes: Any) -> Driver:
    """A driver with blocks of 4 tokens, 4 rows and a budget of 64 tokens, unless changed."""
    numbers = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    return Driver(name, **{**numbers, **changes})


def check_no_leaks(scheduler: Scheduler) -> None:
    """Assert that all blocks and rows are free, and that a request can still run."""
    kv = scheduler.kv
    assert not scheduler.requests and not scheduler.running and not scheduler.state.prefilling
    assert not scheduler.swapped and not scheduler.queue and not scheduler.in_flight
    batch = scheduler.state.decode_batch
    assert not batch.members and not any(batch._due) and not batch._ending
    kv.free_host_blocks()
    assert set(kv.pool.refs) == {0} and kv.num_free == kv.pool.num_blocks
    assert set(kv.host.refs) <= {0} and kv.host.num_free == kv.host.num_blocks
    scheduler.add(probe := Request("probe", [1], RequestParams(max_tokens=1)))
    plan = scheduler.schedule()
    assert 0 <= probe.row < scheduler.config.max_num_seqs
    scheduler.complete(plan, result(plan))
    assert probe.is_finished and not scheduler.requests
