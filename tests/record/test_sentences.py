"""Every sentence about a decision agrees with the plan, the state and the config."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, get_args

import pytest

from headway import Config, Engine, Scheduler, VirtualClock, preset
from headway.engine.loop import EngineLoop
from headway.events import Added, Event, Planned, Reset, ended_by, preempted_by
from headway.executor.simulated import Script, SimulatedExecutor
from headway.lab.workload.synthetic import parse_synthetic
from headway.observe.server_metrics import ServerMetrics
from headway.plan import Blocked, Plan, Reason
from headway.record.reader import EventReader
from headway.record.sentences import (
    BLOCKED,
    NOT_CONSIDERED,
    DecisionLog,
    Kind,
    decisions_of,
    why_blocked,
    why_not_considered,
)
from headway.record.writer import LineMaker, header
from headway.request import Request, RequestParams

WORKLOAD = (
    "requests=12,arrivals=bursty(300,3),prompt=uniform(5,60),output=uniform(1,40),max_tokens=40,"
    "clients=3,priorities=3,n=2,seed={}"
)
VIEW_EVERY = 3  # steps
RESET_AT = 40  # step
MIXES: list[dict[str, Any]] = [
    {"name": "headway", "queue": "fair", "max_num_seqs": 8, "num_blocks": 200},
    {"name": "vllm_v1", "max_num_seqs": 3, "num_blocks": 60},
    {"name": "vllm_v1", "queue": "priority(aging=0,preempts=True)", "num_blocks": 30},
    {
        "name": "vllm_v1",
        "queue": "priority(aging=0,preempts=True,max_overtakes=4)",
        "num_blocks": 44,
    },
    {"name": "vllm_v1", "headroom": "back_off(watermark(0.05),share=0.05)", "num_blocks": 30},
    {"name": "vllm", "swap": "swap", "num_host_blocks": 30, "num_blocks": 30},
    {"name": "minivllm", "num_blocks": 36},
    {"name": "minivllm", "num_blocks": 300, "max_num_batched_tokens": 5, "chunk": "split_any"},
    {"name": "static", "num_blocks": 60},
    {"name": "vllm_v1", "num_blocks": 300, "sliding_window": 10, "num_window_blocks": 30},
]


def engine_of(async_scheduling: bool, name: str, **changes: Any) -> Engine:
    sizes = {"block_size": 4, "num_blocks": 44, "max_num_seqs": 8, "max_num_batched_tokens": 128}
    config, clock = preset(name, **{**sizes, **changes}), VirtualClock()
    executor = SimulatedExecutor(clock, lambda plan: 0.002)
    return Engine(Scheduler(config), executor, clock, async_scheduling=async_scheduling)


def numbers_in(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


class Checker:
    """Checks the sentences of each plan as it is made, and counts them by kind and reason."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.seen = engine, Counter[str]()
        self.metrics = ServerMetrics(EngineLoop(engine, lambda _: None), "tiny")
        config = engine.scheduler.config
        self.log = DecisionLog(config.max_num_seqs)
        self.reader = EventReader(header(config, engine.async_scheduling))
        engine.observers.append(self.check_event)

    def check_plan(self, plan: Plan) -> None:
        config = self.engine.scheduler.config
        for blocked in plan.blocked:
            self.check_blocked(blocked, plan, config)
        if rest := plan.not_considered:
            text = why_not_considered(rest.reason, config.max_num_seqs)
            if rest.reason == "max_num_seqs":
                assert (
                    numbers_in(text)
                    == [config.max_num_seqs]
                    == [self.engine.scheduler.last_planned.num_running]
                )
            else:
                assert not numbers_in(text)
            if rest.reason == "after_preemption":
                assert self.engine.scheduler.state.outputs.pressure > 0
            assert ("ahead" in text) == (rest.reason == "behind_blocked")
            assert (rest.reason == "behind_blocked") <= bool(plan.blocked)
            self.seen[f"not considered: {rest.reason}"] += 1

    def check_blocked(self, blocked: Blocked, plan: Plan, config: Config) -> None:
        text = why_blocked(blocked.reason, blocked.need, blocked.have)
        if blocked.reason in ("parent", "just_preempted"):
            assert not numbers_in(text) and "block" not in text
        else:
            assert numbers_in(text) == [blocked.need, blocked.have]
            assert blocked.need > blocked.have
        if blocked.reason == "just_preempted":
            assert blocked.request.history.num_preemptions > 0 and blocked.request.row < 0
        elif blocked.reason == "parent":
            assert blocked.request.parent is not None
        elif blocked.reason == "reserved_rows":
            assert (
                blocked.have
                == config.max_num_seqs - self.engine.scheduler.last_planned.num_running
                > 0
            )
        elif blocked.reason == "window_blocks":
            assert "sliding-window" in text
            assert blocked.have <= self.engine.scheduler.kv.num_window_free
        elif blocked.reason != "token_budget":
            is_later = bool(plan.preempted)  # a later preemption may free more blocks
            assert "block" in text and (
                is_later or blocked.have >= self.engine.scheduler.last_planned.num_free
            )
        self.seen[f"blocked: {blocked.reason}"] += 1

    def check_event(self, event: Event) -> None:
        """The log words the decisions of the event, and of its line, with the event's numbers."""
        limit, log = self.engine.scheduler.config.max_num_seqs, self.log.follow(event)
        sentences = [each.text for each in decisions_of(event, limit)]
        read = self.reader.event(LineMaker().line(event))
        assert sentences == [each.text for each in decisions_of(read, limit)]
        assert {each.text for each in log} <= set(sentences)
        texts = {kind: [d.text for d in log if d.kind == kind] for kind in get_args(Kind)}
        added = event.requests if isinstance(event, Added) else ()
        for text, request in zip(texts["arrived"], added, strict=True):
            self.check_numbers(text, request, [request.num_prompt])
        for text, preemption in zip(texts["preempted"], preempted_by(event), strict=True):
            blocks = [preemption.num_due, preemption.num_free] if preemption.num_due else []
            self.check_numbers(text, preemption.request, [*blocks, preemption.num_lost])
            assert ("priority" in text) == preemption.is_priority
            assert ("reset" in text) == isinstance(event, Reset)
            assert ("swapped out" in text) == preemption.is_swap
        for text, request in zip(texts["finished"], ended_by(event), strict=True):
            self.check_numbers(text, request, [request.num_generated])
            assert str(request.finish_reason) in text
        assert len(texts["reset"]) == isinstance(event, Reset)
        self.check_planned(texts, event.plan if isinstance(event, Planned) else Plan(-1))
        self.seen.update(d.kind for d in log)

    def check_planned(self, texts: dict[Kind, list[str]], plan: Plan) -> None:
        for text, admission in zip(texts["admitted"], plan.admitted, strict=True):
            expected = [n for n in (admission.num_cached, admission.num_swapped) if n]
            self.check_numbers(text, admission.request, expected)
            assert ("again" in text) == admission.is_resume
        copies = [n for n in (len(plan.copies_out), len(plan.copies_in)) if n]
        assert [numbers_in(text) for text in texts["copied"]] == ([copies] if copies else [])
        assert all(numbers_in(text) == [len(plan.deferred)] for text in texts["deferred"])

    def check_numbers(self, text: str, request: Request, expected: list[int]) -> None:
        assert text.startswith(f"request {request.id} ")
        assert numbers_in(text.removeprefix(f"request {request.id}")) == expected

    def check_views(self) -> None:
        """The page, `headway top` and `why` show the sentences of the latest plan."""
        scheduler, shown = self.engine.scheduler, self.metrics.snapshot()
        assert shown["running"]["count"] == len(scheduler.running)
        plan, why = scheduler.last_planned.plan, self.engine.why()
        sentences = {b.request.id: why_blocked(b.reason, b.need, b.have) for b in plan.blocked}
        for row in shown["waiting"]["requests"]:
            if row["id"] in sentences:
                assert row["why"] == sentences[row["id"]]
                self.seen["views"] += 1
        listed = [b for b in plan.blocked if b.request.id in {r.id for r in scheduler.queue}][:5]
        assert all(
            f"request {b.request.id} waits: {sentences[b.request.id]}." in why for b in listed
        )


def follow(engine: Engine) -> Counter[str]:
    """Run a workload and check every sentence of every step."""
    checker = Checker(engine)
    jobs = list(parse_synthetic(WORKLOAD.format(1)).generate())[::-1]
    while jobs or engine.has_work:
        while jobs and jobs[-1].arrival <= engine.clock.now():
            job = jobs.pop()
            engine.add(job.id, job.prompt(), job.params(), job.arrival)
        if not engine.has_work:
            engine.clock.advance_to(jobs[-1].arrival)  # type: ignore[attr-defined]
            continue
        if engine.scheduler.num_steps == RESET_AT:
            engine.scheduler.reset_cache(force=True)
        engine.step()
        checker.check_plan(engine.scheduler.last_planned.plan)
        if engine.scheduler.num_steps % VIEW_EVERY == 0:
            checker.check_views()
    assert engine.fault is None and checker.check_event in engine.observers  # no check failed
    return checker.seen


def test_every_sentence_agrees_with_its_plan() -> None:
    seen: Counter[str] = Counter()
    for mix in MIXES:
        for async_scheduling in (False, True):
            seen += follow(engine_of(async_scheduling, **mix))
    blocked = [f"blocked: {reason}" for reason in BLOCKED]
    rest = [f"not considered: {reason}" for reason in NOT_CONSIDERED]
    for kind in (*blocked, *rest, *get_args(Kind)):
        assert seen[kind] > 0, kind
    assert seen["views"] > 800


def test_every_reason_has_a_sentence() -> None:
    assert {*BLOCKED, *NOT_CONSIDERED} == set(get_args(Reason))


def test_a_just_preempted_request_does_not_ask_for_blocks() -> None:
    queue = "priority(aging=0,preempts=True)"
    engine = engine_of(False, "vllm_v1", queue=queue, num_blocks=8, max_num_seqs=4)
    script = Script(8, 7, 1)
    engine.add("low", [1] * 12, RequestParams(max_tokens=8, priority=5, sampling=script))
    engine.add("lower", [2] * 12, RequestParams(max_tokens=8, priority=6, sampling=script))
    engine.step()
    engine.add("urgent", [3] * 8, RequestParams(max_tokens=8, priority=0, sampling=script))
    engine.step()
    plan = engine.scheduler.last_planned.plan
    (blocked,) = plan.blocked
    assert (blocked.request.id, blocked.reason) == ("lower", "just_preempted")
    assert engine.scheduler.last_planned.num_free > 0
    (line,) = [line for line in engine.why().splitlines() if "request lower waits" in line]
    assert "preempted" in line and "block" not in line


def test_reserved_rows_are_not_worded_as_the_limit() -> None:
    engine = engine_of(False, "headway", queue="fair", max_num_seqs=16, num_blocks=400)
    script = Script(8, 7, 1)
    engine.add("small", [1], RequestParams(max_tokens=8, client="small", sampling=script))
    for number in range(20):
        engine.add(
            f"r{number}", [number], RequestParams(max_tokens=8, client="large", sampling=script)
        )
    engine.step()
    blocked = engine.scheduler.last_planned.plan.blocked[0]
    assert (blocked.reason, blocked.need, blocked.have) == ("reserved_rows", 3, 2)
    assert "needs 3 free rows; 2 are free" in engine.why() and "limit" not in engine.why()


def test_preemptions_after_a_failed_step_name_the_failure() -> None:
    changes = {"max_num_batched_tokens": 2, "max_num_seqs": 4, "chunk": "split_any"}
    engine = engine_of(False, "minivllm", **changes)
    log, texts = DecisionLog(engine.scheduler.config.max_num_seqs), list[str]()
    engine.observers.append(lambda event: texts.extend(d.text for d in log.follow(event)))
    for id in "abc":
        engine.add(id, [ord(id)], RequestParams(max_tokens=8, sampling=Script(8, 7, 1)))
    while not engine.scheduler.last_planned.plan.deferred:
        engine.step()
    working = engine.executor

    class Failing:
        def launch(self, plan: Plan) -> Any:
            raise OSError("device lost")

    engine.executor = Failing()
    engine.step()
    engine.executor = working
    engine.run()
    preempted = [text for text in texts if "preempted" in text]
    assert preempted and all("a step failed" in text for text in preempted)


@pytest.mark.parametrize("reason", ["blocks", "back_off", "token_budget", "headroom"])
def test_a_count_of_1_is_singular(reason: str) -> None:
    assert "1 token" in why_blocked(reason, 1, 0) or "1 free KV block" in why_blocked(reason, 1, 0)
    assert not re.search(r"\b1 (free KV blocks|tokens)", why_blocked(reason, 1, 0))
    assert re.search(r"\b5 (free KV blocks|tokens)", why_blocked(reason, 5, 1))
