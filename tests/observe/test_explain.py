"""Laws of the sentences that say why requests wait: each agrees with the plan and the config."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from headway.config import Config
from headway.engine.clock import VirtualClock
from headway.engine.engine import Engine
from headway.engine.loop import EngineLoop
from headway.executor.simulated import Script, SimulatedExecutor
from headway.lab.workload.synthetic import parse_synthetic
from headway.observe.explain import UNSETTLED, why_blocked, why_not_considered
from headway.observe.server_metrics import ServerMetrics
from headway.plan import Blocked, NotConsidered
from headway.request import Params, Request
from headway.scheduler import Scheduler, preset

WORKLOAD = (
    "requests=60,arrivals=bursty(300,3),prompt=uniform(5,60),output=uniform(1,40),max_tokens=40,"
    "clients=3,priorities=3,n=2,seed={}"
)
MIXES: list[dict[str, Any]] = [
    {"name": "headway", "queue": "fair", "max_num_seqs": 8, "num_blocks": 200},
    {"name": "vllm_v1", "max_num_seqs": 3, "num_blocks": 60},
    {"name": "vllm_v1", "queue": "priority(aging=0,preempts=True)", "num_blocks": 30},
    {"name": "vllm_v1", "queue": "priority(aging=0,preempts=True,patience=4)", "num_blocks": 44},
    {"name": "vllm_v1", "headroom": "back_off(watermark(0.05),share=0.05)", "num_blocks": 30},
    {"name": "minivllm", "num_blocks": 36},
]


def engine_of(async_scheduling: int, name: str, **changes: Any) -> Engine:
    sizes = {"block_size": 4, "num_blocks": 44, "max_num_seqs": 8, "max_num_batched_tokens": 128}
    clock = VirtualClock()
    executor = SimulatedExecutor(clock, lambda plan: 0.002)
    return Engine(
        Scheduler(preset(name, **{**sizes, **changes})), executor, clock, async_scheduling=async_scheduling
    )  # fmt: skip


def check_blocked(blocked: Blocked, num_running: int, config: Config) -> str:
    """The numbers in a sentence are those of the plan and the config; says which kind it is."""
    text = why_blocked(blocked, num_running, config)
    limit, numbers = config.max_num_seqs, [int(n) for n in re.findall(r"\d+", text)]
    if blocked.reason == "max_num_seqs" and text.startswith("all") and "are taken" in text:
        assert numbers == [limit] and num_running == limit
        return "all seats"
    if blocked.reason == "max_num_seqs" and "kept" in text:
        assert numbers == [limit - num_running, limit] and num_running < limit
        return "kept seats"
    if text == UNSETTLED:
        assert blocked.reason == "back_off" and blocked.request.history.num_preemptions > 0
        return "unsettled"
    if blocked.reason == "order":
        assert not numbers
    else:
        assert numbers == [blocked.need, blocked.have] and blocked.need > blocked.have
    return blocked.reason


def check_behind(behind: NotConsidered, num_running: int, config: Config) -> None:
    text = why_not_considered(behind, num_running, config)
    if f"all {config.max_num_seqs} seats are taken" in text:
        assert behind.reason == "max_num_seqs" and num_running == config.max_num_seqs


def test_every_sentence_agrees_with_its_plan() -> None:
    kinds: Counter[str] = Counter()
    for mix in MIXES:
        for async_scheduling in (0, 1):
            kinds += follow(engine_of(async_scheduling, **mix))
    for kind in ("kept seats", "unsettled", "blocks", "back_off", "order", "token_budget"):
        assert kinds[kind] > 0, kind


def follow(engine: Engine) -> Counter[str]:
    """Run a workload, check every sentence of every plan, count their kinds."""
    kinds: Counter[str] = Counter()
    metrics = ServerMetrics(EngineLoop(engine, lambda _: None), "tiny")
    jobs = list(parse_synthetic(WORKLOAD.format(1)).generate())[::-1]
    while jobs or engine.has_work:
        while jobs and jobs[-1].arrival <= engine.clock.now():
            job = jobs.pop()
            engine.add(job.id, job.prompt(), job.params(), job.arrival)
        if not engine.has_work:
            engine.clock.advance_to(jobs[-1].arrival)  # type: ignore[attr-defined]
            continue
        engine.step()
        plan, config = engine.scheduler.last_plan, engine.scheduler.config
        for blocked in plan.blocked:
            kinds[check_blocked(blocked, plan.events.num_running, config)] += 1
        if plan.not_considered:
            check_behind(plan.not_considered, plan.events.num_running, config)
        check_shown(metrics, engine)
    assert engine.fault is None
    return kinds


def check_shown(metrics: ServerMetrics, engine: Engine) -> None:
    """Page, `top` and `why` show the same sentences, and never all seats taken beside fewer."""
    shown, num_running = metrics.snapshot(), len(engine.scheduler.running)
    texts = [row["reason"] for row in shown["waiting"]] + [engine.why()]
    for text in texts:
        for number in re.findall(r"all (\d+) seats are taken", text):
            assert int(number) == num_running == shown["seats"]["taken"]
    sentences = {
        b.request.id: why_blocked(b, num_running, engine.scheduler.config)
        for b in engine.scheduler.last_plan.blocked
    }
    for row in shown["waiting"]:
        if row["id"] in sentences:
            assert row["reason"] == sentences[row["id"]]


def test_a_request_with_a_token_in_flight_is_not_said_to_ask_for_blocks() -> None:
    queue = "priority(aging=0,preempts=True)"
    engine = engine_of(0, "vllm_v1", queue=queue, num_blocks=8, max_num_seqs=4)
    script = Script(8, 7, 1)
    engine.add("low", [1] * 12, Params(max_tokens=8, priority=5, sampling=script))
    engine.add("lower", [2] * 12, Params(max_tokens=8, priority=6, sampling=script))
    engine.step()
    engine.add("urgent", [3] * 8, Params(max_tokens=8, priority=0, sampling=script))
    engine.step()
    plan = engine.scheduler.last_plan
    (blocked,) = plan.blocked
    assert (blocked.request.id, *blocked[1:]) == ("lower", "back_off", 1, 0)
    assert plan.events.num_free > 0
    assert UNSETTLED in engine.why() and "asks for" not in engine.why()


def test_one_block_is_one_block_and_a_real_back_off_keeps_its_numbers() -> None:
    config = preset("vllm_v1", num_blocks=8)
    fresh = Request("a", [1], Params())
    assert "1 free KV block and" in why_blocked(Blocked(fresh, "blocks", 1, 0), 0, config)
    assert "asks for 1 block and 0" in why_blocked(Blocked(fresh, "back_off", 1, 0), 0, config)
    fresh.history.num_preemptions = 1
    assert "asks for 5 blocks and 4" in why_blocked(Blocked(fresh, "back_off", 5, 4), 0, config)


def test_seats_that_came_free_after_the_plan_are_not_said_to_be_taken() -> None:
    config = preset("vllm_v1", max_num_seqs=4)
    request = Request("a", [1], Params())
    for text in (
        why_blocked(Blocked(request, "max_num_seqs", 1, 0), 3, config),
        why_not_considered(NotConsidered("max_num_seqs", 7), 3, config),
    ):
        assert "are taken" not in text and "were taken" in text
    assert "all 4 seats are taken" in why_not_considered(
        NotConsidered("max_num_seqs", 7), 4, config
    )
