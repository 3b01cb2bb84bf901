"""The server's metrics equal the numbers of a log of every token, and memory stays bounded."""

from __future__ import annotations

import json
import random
import re
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headway import Engine, Plan, Scheduler, VirtualClock, preset
from headway.engine.loop import EngineLoop
from headway.engine.messages import FromLoop, QueryResult
from headway.engine.queries import GetMetrics, GetSnapshot
from headway.errors import RequestError
from headway.events import Completed, Event, Planned, ended_by, preempted_by
from headway.executor.simulated import Script, SimulatedExecutor
from headway.lab.cost import load_profile
from headway.lab.simulate import with_profile
from headway.lab.workload.synthetic import parse_synthetic
from headway.observe.prometheus import COUNTERS, GAUGES, HISTOGRAMS, ITL_BUCKETS, Histogram
from headway.observe.server_metrics import ServerMetrics
from headway.record.lines import CompletedLine
from headway.record.writer import LineMaker
from headway.request import Request, RequestParams
from tests.support.events import Events
from tests.support.journals import of_kind

ROOT = Path(__file__).parents[2]
PROFILE = load_profile("qwen3-0.6b-h200")
SMALL = {"block_size": 4, "num_blocks": 44, "max_num_seqs": 8, "max_num_batched_tokens": 128}
WORKLOAD = (
    "requests=40,arrivals=bursty(250,3),prompt=uniform(5,60),output=uniform(1,40),max_tokens=40,"
    "prefix=2x16@0.5,clients=3,priorities=3,n=2,accept=uniform(0.2,1),seed={}"
)
Samples = dict[tuple[str, ...], float]


class Log:
    """Records the time of every token, straight from the events."""

    def __init__(self) -> None:
        self.times: dict[Request, list[float]] = defaultdict(list)
        self.admitted: dict[Request, float] = {}
        self.ends: dict[Request, float] = {}
        self.totals: Counter[str] = Counter()
        self.swap_ins: list[float] = []
        self.accepted: list[int] = []  # the place of each accepted token in its draft

    def __call__(self, event: Event) -> None:
        if isinstance(event, Planned):
            for admission in event.plan.admitted:
                self.admitted.setdefault(admission.request, event.time)
        if isinstance(event, Completed):
            self._complete(event)
        for request in ended_by(event):
            self.ends[request] = event.time
        self.totals["preempted"] += len(preempted_by(event))

    def _complete(self, event: Completed) -> None:
        plan = event.plan
        for request, tokens in event.outputs():
            self.times[request] += [event.result.ended] * len(tokens)
        for request, num_cached, _, is_resume, *_ in plan.admitted:
            self.totals["queried"] += 0 if is_resume else request.num_prompt
            self.totals["hit"] += 0 if is_resume else num_cached
        self.totals["prefill"] += (num_prefill := sum(c.end - c.start for c in plan.chunks))
        self.totals["computed"] += num_prefill
        self.swap_ins += [event.result.swap_in] if plan.copies_in else []
        self.totals["computed"] += len(plan.decodes) * plan.num_steps + plan.num_drafted
        for draft, gained in zip(plan.drafts, event.result.draft_tokens, strict=True):
            if gained:
                self.totals["drafts"] += 1
                self.totals["drafted"] += draft.count
                self.totals["accepted"] += len(gained) - 1
                self.accepted += range(len(gained) - 1)
        self.totals["steps"] += 1
        self.totals["deferred"] += len(plan.deferred)
        self.totals["out"] += len(plan.copies_out)
        self.totals["in"] += len(plan.copies_in)

    def gaps(self) -> list[float]:
        return [b - a for times in self.times.values() for a, b in pairwise(times)]

    def completed(self) -> list[Request]:
        return [r for r in self.ends if r.finish_reason in ("stop", "length")]


def samples(text: str, prefix: str = "headway") -> Samples:
    """Values by name and by the labels that not every metric has."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            own = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            found[(sample.name.removeprefix(f"{prefix}:"), *own.values())] = sample.value
    return found


def engine_of(name: str, async_scheduling: int, **changes: Any) -> tuple[Engine, VirtualClock]:
    config = with_profile(preset(name, **{**SMALL, **changes}), PROFILE)
    clock = VirtualClock()
    size = config.block_size
    executor = SimulatedExecutor(
        clock, lambda plan: PROFILE.step_seconds(plan, size),
        swap_in=lambda plan: PROFILE.copy_seconds(len(plan.copies_in) * size),
    )  # fmt: skip
    return Engine(Scheduler(config), executor, clock, async_scheduling=async_scheduling), clock


def run(
    name: str, async_scheduling: int, seed: int, **changes: Any
) -> tuple[ServerMetrics, Log, Engine]:
    """Run a workload to its end and abort some requests."""
    engine, clock = engine_of(name, async_scheduling, **changes)
    metrics, log = ServerMetrics(EngineLoop(engine, lambda _: None), "tiny"), Log()
    engine.observers.append(log)
    jobs = list(parse_synthetic(WORKLOAD.format(seed)).generate())[::-1]
    chance = random.Random(seed)
    while jobs or engine.has_work:
        while jobs and jobs[-1].arrival <= clock.now():
            job = jobs.pop()
            engine.add(job.id, job.prompt(), job.params(), job.arrival)
        if chance.random() < 0.05 and engine.scheduler.requests:
            engine.abort(chance.choice(list(engine.scheduler.requests)))
        if engine.has_work:
            engine.step()
        else:
            clock.advance_to(jobs[-1].arrival)
    assert engine.fault is None
    return metrics, log, engine


def check_histogram(found: Samples, name: str, values: list[float]) -> None:
    """Count, sum and every bucket equal those of the values."""
    bounds = sorted(float(key[1]) for key in found if key[0] == f"{name}_bucket")
    assert found[f"{name}_count",] == len(values), name
    assert found[f"{name}_sum",] == pytest.approx(sum(values)), name
    ordered = sorted(round(value, 9) for value in values)
    for bound in bounds[:-1]:
        share = [v for v in ordered if v <= bound + 1e-9]
        # rounding may put them into either bucket
        near = sum(abs(v - bound) < 2e-9 for v in ordered)
        label = next(k[1] for k in found if k[0] == f"{name}_bucket" and float(k[1]) == bound)
        assert abs(found[f"{name}_bucket", label] - len(share)) <= near, (name, bound)


def test_builds_are_counted_and_traced() -> None:
    engine, _ = engine_of("headway", 0)
    metrics, events = ServerMetrics(EngineLoop(engine, lambda _: None), "tiny"), Events()
    engine.observers.append(events)
    launch, builds = engine.executor.launch, iter([2, 0, 3])

    def building(plan: Plan) -> Any:
        handle = launch(plan)
        result = handle.wait()
        result.num_builds = next(builds, 0)
        return SimpleNamespace(wait=lambda: result)

    engine.executor.launch = building  # type: ignore[method-assign]
    (job,) = parse_synthetic("requests=1,prompt=fixed(3),output=fixed(6)").generate()
    engine.add(job.id, job.prompt(), job.params())
    engine.run()
    lines = [LineMaker().line(event) for event in events.completed]
    assert [line.builds for line in of_kind(CompletedLine, lines)[:4]] == [2, 0, 3, 0]
    assert samples(metrics.text())["builds_total",] == 5


@pytest.mark.parametrize("async_scheduling", [0, 1])
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("headway", {}),
        ("headway", {"num_scheduler_steps": 4}),
        ("vllm", {"num_blocks": 30, "num_host_blocks": 20, "swap": "swap"}),
        ("vllm_v1", {"num_blocks": 30}),
        ("vllm_v1", {"max_num_batched_tokens": 12}),
        ("minivllm", {"num_blocks": 36}),
        ("minivllm", {"num_blocks": 300, "max_num_batched_tokens": 5, "chunk": "split_any"}),
        ("headway", {"draft": "fixed(3)"}),
        ("vllm_v1", {"draft": "by_cost(most=5)", "num_blocks": 30}),
    ],
)
def test_metrics_equal_a_log_of_every_token(
    name: str, changes: dict[str, Any], async_scheduling: int
) -> None:
    metrics, log, _ = run(name, async_scheduling, async_scheduling, **changes)
    found, done = samples(metrics.text()), log.completed()
    first = [times[0] - r.arrival for r, times in log.times.items()]
    check_histogram(found, "time_to_first_token_seconds", first)
    check_histogram(found, "inter_token_latency_seconds", log.gaps())
    check_histogram(found, "swap_in_seconds", log.swap_ins)
    assert bool(log.swap_ins) == (name == "vllm")
    ends, admitted, times = log.ends, log.admitted, log.times
    waits = {
        "e2e_request_latency_seconds": [ends[r] - r.arrival for r in done],
        "request_queue_time_seconds": [admitted[r] - r.arrival for r in done],
        "request_prefill_time_seconds": [times[r][0] - admitted[r] for r in done],
        "request_decode_time_seconds": [ends[r] - times[r][0] for r in done],
        "request_inference_time_seconds": [ends[r] - admitted[r] for r in done],
        "request_longest_stall_seconds": [
            max(b - a for a, b in pairwise(times[r])) for r in done if len(times[r]) > 1
        ],
        "request_prompt_tokens": [float(r.num_prompt) for r in done],
        "request_generation_tokens": [float(r.num_generated) for r in done],
        "request_params_max_tokens": [float(r.params.max_tokens or 0) for r in done],
        "request_params_n": [float(r.params.n) for r in done if r.parent is None],
    }
    for histogram, values in waits.items():
        check_histogram(found, histogram, values)
    check_counters(found, log)


def check_counters(found: Samples, log: Log) -> None:
    totals = log.totals
    reasons = Counter(request.finish_reason for request in log.ends)
    expected = {
        ("generation_tokens_total",): sum(map(len, log.times.values())),
        ("prompt_tokens_total",): sum(r.num_prompt for r in log.times),
        ("prefix_cache_queries_total",): totals["queried"],
        ("prefix_cache_hits_total",): totals["hit"],
        ("num_preemptions_total",): totals["preempted"],
        ("recomputed_tokens_total",): sum(r.history.num_recomputed for r in log.ends),
        ("prefill_tokens_total",): log.totals["prefill"],
        ("swapped_blocks_total", "out"): totals["out"],
        ("swapped_blocks_total", "in"): totals["in"],
        ("iteration_tokens_total_sum",): totals["computed"],
        ("iteration_tokens_total_count",): totals["steps"],
        ("scheduler_step_seconds_count",): totals["steps"],
    }
    expected |= {
        ("request_success_total", reason): reasons[reason]
        for reason in ("stop", "length", "abort", "error")
    }
    name = "spec_decode_num"
    expected |= {
        (f"{name}_drafts_total",): totals["drafts"],
        (f"{name}_draft_tokens_total",): sum(r.history.num_drafted for r in log.ends),
        (f"{name}_accepted_tokens_total",): sum(r.history.num_accepted for r in log.ends),
    }
    assert totals["drafted"] == sum(r.history.num_drafted for r in log.ends)
    by_place, per_position = Counter(log.accepted), f"{name}_accepted_tokens_per_pos_total"
    places = {key[1] for key in found if key[0] == per_position}
    assert {*map(str, by_place), "0"} <= places
    expected |= {(per_position, place): by_place[int(place)] for place in places}
    assert {key: found[key] for key in expected} == expected


def test_the_runs_include_preemptions_swaps_recomputation_and_aborts() -> None:
    totals: Counter[str] = Counter()
    swapping = {"num_host_blocks": 20, "swap": "swap"}
    for name, changes in (("vllm", swapping), ("vllm_v1", {})):
        metrics, log, _ = run(name, 1, 0, num_blocks=30, **changes)
        totals += Counter({key[0]: int(v) for key, v in samples(metrics.text()).items()})
        totals["swapped"] += log.totals["out"] * log.totals["in"]
        totals["aborted"] += sum(r.finish_reason == "abort" for r in log.ends)
    _, log, _ = run("minivllm", 1, 0, num_blocks=300, max_num_batched_tokens=5, chunk="split_any")
    totals["deferred"] = log.totals["deferred"]
    for draft in ("fixed(3)", "by_cost(most=5)"):
        _, log, _ = run("headway", 0, 0, draft=draft)
        totals["accepted"] = log.totals["accepted"]
        totals["rejected"] = log.totals["drafted"] - log.totals["accepted"]
    counts = (
        "num_preemptions_total", "recomputed_tokens_total", "deferred", "swapped", "aborted",
        "accepted", "rejected",
    )  # fmt: skip
    assert all(totals[name] > 0 for name in counts), totals


def test_no_state_is_kept_for_finished_requests() -> None:
    metrics, _, engine = run("vllm_v1", 1, 1, num_blocks=30)
    assert engine.scheduler.is_idle
    timeline, builder = metrics._timeline, metrics._builder
    assert not (timeline.open or timeline._last_token or timeline._preempted)
    assert not list(timeline._shared.keys)
    assert not [request for request in builder._log._waits if request is not None]
    assert len(builder._window._seconds) <= 61 and len(builder._decisions) <= 32


def test_gauges_equal_the_scheduler_state_and_reasons_add_up() -> None:
    engine, _ = engine_of("vllm_v1", 0, num_blocks=20, max_num_seqs=2)
    metrics = ServerMetrics(EngineLoop(engine, lambda _: None), "tiny")
    script = RequestParams(max_tokens=30, sampling=Script(30, 7, 1))
    seen_waiting = False
    for number in range(12):
        engine.add(str(number), [number + 1] * 9, script)
        engine.step()
        found, scheduler = samples(metrics.text()), engine.scheduler
        assert found["num_requests_running",] == len(scheduler.running)
        assert found["num_requests_waiting",] == len(scheduler.queue)
        assert found["kv_cache_usage_perc",] == pytest.approx(1 - scheduler.num_free / 20)
        reasons = {key[1]: v for key, v in found.items() if key[0] == "waiting_by_reason"}
        assert sum(reasons.values()) == len(scheduler.queue)
        seen_waiting |= reasons["max_num_seqs"] + reasons["blocks"] > 0
    assert seen_waiting
    engine.add("new", [1] * 9, script)
    assert samples(metrics.text())["waiting_by_reason", "new"] == 1


def test_an_embedding_counts_as_prompt_and_not_as_generation() -> None:
    engine, _ = engine_of("headway", 0)
    metrics = ServerMetrics(EngineLoop(engine, lambda _: None), "tiny")
    params = RequestParams(max_tokens=1, pooling="last", sampling=Script(1, 7, 1))
    engine.add("a", range(9), params)
    engine.run()
    found = samples(metrics.text())
    for name in (
        "generation_tokens_total", "time_to_first_token_seconds_count",
        "request_generation_tokens_count", "request_params_max_tokens_count",
        "request_decode_time_seconds_count", "inter_token_latency_seconds_count",
    ):  # fmt: skip
        assert found[name,] == 0, name
    for name in (
        "e2e_request_latency_seconds_count", "request_queue_time_seconds_count",
        "request_prefill_time_seconds_count", "request_prompt_tokens_count",
    ):  # fmt: skip
        assert found[name,] == 1, name
    assert found["prompt_tokens_total",] == found["request_prompt_tokens_sum",] == 9
    assert found["request_success_total", "length"] == 1
    prefill, whole = (f"request_{kind}_time_seconds_sum" for kind in ("prefill", "inference"))
    assert found[prefill,] == found[whole,]
    snapshot = metrics.snapshot()
    assert snapshot["totals"]["output_tokens"] == 0
    assert "embedding" in snapshot["decisions"][-1]["text"]
    assert not (metrics._timeline.open or metrics._timeline._last_token)


def test_another_prefix_has_the_same_names() -> None:
    metrics, _, _ = run("headway", 0, 0)
    ours, theirs = metrics.text(), metrics.text("vllm")
    names = [set(samples(ours)), set(samples(theirs, "vllm"))]
    assert names[0] == names[1]
    assert "vllm:time_to_first_token_seconds_bucket{" in theirs and "headway" not in theirs
    for name in (*GAUGES, *HISTOGRAMS, *(f"{counter}_total" for counter in COUNTERS)):
        assert re.search(rf'^headway:{name}\w*{{.*engine="0".*model_name="tiny"', ours, re.M), name


def test_a_weighted_observation_equals_single_observations() -> None:
    singly, at_once, chance = Histogram(ITL_BUCKETS), Histogram(ITL_BUCKETS), random.Random(0)
    for _ in range(200):
        value, count = chance.choice([*ITL_BUCKETS, chance.expovariate(1)]), chance.randrange(1, 9)
        at_once.observe(value, count)
        for _ in range(count):
            singly.observe(value)
    assert at_once.counts == singly.counts and at_once.total == pytest.approx(singly.total)


def test_a_value_equal_to_a_bound_is_in_the_bucket_below() -> None:
    histogram = Histogram((0.5, 1))
    for value in (0.5, 0.75, 1, 1.25):
        histogram.observe(value)
    assert histogram.buckets() == [("0.5", 1), ("1.0", 3), ("+Inf", 4)]


def test_the_loop_answers_metrics_queries() -> None:
    engine, _ = engine_of("headway", 0)
    received: list[FromLoop] = []
    loop = EngineLoop(engine, received.extend)
    ServerMetrics(loop, "tiny")
    loop.post([GetMetrics("vllm"), GetMetrics(), GetSnapshot()])
    while loop._inbox:  # it reads for a limited time
        loop._read()
    loop._flush()
    texts = [message.value for message in received if isinstance(message, QueryResult)]
    assert texts[0].startswith("# HELP vllm:") and texts[1].startswith("# HELP headway:")
    assert json.loads(json.dumps(texts[2]))["running"]["count"] == 0


def test_a_failure_in_the_metrics_does_not_stop_the_engine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, _ = engine_of("headway", 0)
    metrics = ServerMetrics(EngineLoop(engine, lambda _: None), "tiny")
    metrics.values.histograms.clear()
    (request,) = engine.add("a", [1, 2, 3], RequestParams(max_tokens=3, sampling=Script(3, 7, 1)))
    engine.run()
    assert request.is_finished and "metrics" in caplog.text


def test_a_refused_request_is_not_counted() -> None:
    engine, _ = engine_of("headway", 0)
    metrics = ServerMetrics(EngineLoop(engine, lambda _: None), "tiny")
    with pytest.raises(RequestError):
        engine.add("a", [], RequestParams())
    assert not metrics._timeline.open


def test_every_metric_is_documented_and_on_the_dashboard() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    board = json.loads((ROOT / "docs" / "grafana.json").read_text(encoding="utf-8"))
    queries = " ".join(t["expr"] for panel in board["panels"] for t in panel.get("targets", ()))
    for name in (*GAUGES, *COUNTERS, *HISTOGRAMS):
        assert f"`{name}" in page, name
        assert f"headway:{name}" in queries, name
    real = {*GAUGES, *(f"{name}_total" for name in COUNTERS)}
    real |= {f"{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "sum", "count")}
    assert set(re.findall(r"headway:(\w+)", queries)) <= real
