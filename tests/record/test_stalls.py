"""The longest stall of a request equals that of a log of every token, whatever the scheduler does."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any

import pytest

from headway import Config, Engine, Plan, Scheduler, VirtualClock, preset
from headway.drafters.repeat import repeat_last
from headway.events import Aborted, Completed, Event, preempted_by
from headway.executor.simulated import Independent, Script, SimulatedExecutor
from headway.lab.simulate import simulate
from headway.lab.summary import summarize
from headway.lab.workload.request import TokenSpace, WorkloadRequest
from headway.record.reader import EventReader
from headway.record.shared_gaps import MIN_KEPT, SharedGaps
from headway.record.stats import by_prompt_length
from headway.record.timeline import Timeline
from headway.record.writer import LineMaker, header
from headway.request import Request, RequestParams
from tests.support.journals import PROFILE

END = 2
SMALL = {"block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 24, "max_model_len": 200}
DRAFTS = {  # some requests have drafts in a step, others decode
    "draft": lambda request, step: request.num_computed * 7 % 5, "drafter": repeat_last,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "recompute": {"num_blocks": 22, "headroom": "watermark(0.0)"},
    "swap": {"num_blocks": 22, "num_host_blocks": 30, "swap": "swap", "headroom": "watermark(0.0)"},
    "deferral": {
        "name": "minivllm", "num_blocks": 60, "max_num_batched_tokens": 3, "chunk": "split_any",
    },
    "deferral and preemption": {
        "name": "minivllm", "num_blocks": 18, "max_num_batched_tokens": 3, "chunk": "split_any",
    },
    "multi-step": {"num_blocks": 60, "num_scheduler_steps": 4},
    "priority": {"num_blocks": 40, "queue": "priority(preempts=True)"},
    "prefill first": {"num_blocks": 60, "batching": "prefill_first"},
    "drafts": {"num_blocks": 60, "draft": "fixed(3)", "drafter": repeat_last},
    "some drafts": {"num_blocks": 60, **DRAFTS},
    "drafts and preemption": {"num_blocks": 22, "headroom": "watermark(0.0)", **DRAFTS},
    "drafts and deferral": {
        "name": "minivllm", "num_blocks": 60, "max_num_batched_tokens": 5, "chunk": "split_any",
        **DRAFTS,
    },
    "drafts and swaps": {
        "num_blocks": 22, "num_host_blocks": 30, "swap": "swap", "headroom": "watermark(0.0)",
        "batching": "prefill_first", **DRAFTS,
    },
}  # fmt: skip


class Tokens:
    """The times of all tokens of each request, and what happened to the requests."""

    def __init__(self) -> None:
        self.times: dict[Request, list[float]] = defaultdict(list)
        self.seen: Counter[str] = Counter()

    def follow(self, event: Event) -> None:
        if isinstance(event, Completed):
            for request, tokens in event.outputs():
                self.times[request] += [event.result.ended] * len(tokens)
            self.seen["deferred"] += len(event.plan.deferred)
            self.seen["multi"] += event.plan.num_steps > 1
            self.seen["drafts right"] += sum(num_right for _, num_right in event.verified())
            self.seen["drafts and decodes"] += bool(event.plan.drafts and event.plan.decodes)
        self.seen["preempted"] += sum(not p.is_swap for p in preempted_by(event))
        self.seen["swapped"] += sum(p.is_swap for p in preempted_by(event))
        self.seen["aborted"] += isinstance(event, Aborted)

    def longest(self, request: Request) -> float:
        return max((b - a for a, b in pairwise(self.times[request])), default=0.0)


class Follower:
    """Follows an engine live and by its journal, and compares both with the log of tokens."""

    def __init__(self, config: Config, async_scheduling: bool) -> None:
        self.log, self.num_finished = Tokens(), 0
        self._live, self._read = Timeline(), Timeline()
        self._lines = LineMaker(redact=True)
        self._reader = EventReader(header(config, async_scheduling, is_redacted=True))

    def __call__(self, event: Event) -> None:
        mine = self._live.follow(event)
        other = self._read.follow(self._reader.event(self._lines.line(event)))
        self.log.follow(event)
        for (request, one), (_, two) in zip(mine.finished, other.finished, strict=True):
            assert one.longest_stall == two.longest_stall == self.log.longest(request), request.id
            self.num_finished += 1
        if isinstance(event, Completed) and event.plan.step % 7 == 0:
            self._live.update_stalls()
            for request, times in self._live.open.items():
                assert times.longest_stall == self.log.longest(request), request.id


def run_randomly(seed: int, async_scheduling: bool, **changes: Any) -> Follower:
    """Run random requests with steps of random duration; abort some of them at random times."""
    source, clock = random.Random(seed), VirtualClock()
    config = preset(**{"name": "vllm_v1", **SMALL, **changes})
    follower = Follower(config, async_scheduling)

    def seconds(plan: Plan) -> float:
        return source.choice((0.01, 0.01, 0.02, 0.3)) * source.random()

    engine = Engine(
        Scheduler(config), SimulatedExecutor(clock, seconds, 0.001), clock,
        async_scheduling=async_scheduling, observers=[follower],
    )  # fmt: skip
    num_added = 0
    while num_added < 40 or engine.has_work:
        if num_added < 40 and source.random() < 0.4:
            length, num_output = source.randint(1, 30), source.randint(1, 25)
            params = RequestParams(
                max_tokens=25, priority=source.randint(0, 2), stop_ids=frozenset({END}),
                sampling=Script(num_output, 7, END, accept=Independent(0.6)),
            )  # fmt: skip
            engine.add(str(num_added), [num_added] * length, params)
            num_added += 1
        if engine.scheduler.requests and source.random() < 0.05:
            engine.abort(source.choice(sorted(engine.scheduler.requests)))
        if engine.has_work:
            engine.step()
    return follower


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_the_longest_stall_is_that_of_the_tokens(name: str, async_scheduling: bool) -> None:
    seen: Counter[str] = Counter()
    for seed in range(3):
        follower = run_randomly(seed, async_scheduling, **VARIANTS[name])
        assert follower.num_finished == 40
        seen += follower.log.seen
    assert seen["aborted"] > 3
    assert seen["preempted"] > 3 or name not in ("recompute", "deferral and preemption")
    assert seen["swapped"] > 3 or name != "swap"
    assert seen["deferred"] > 3 or not name.startswith("deferral")
    assert seen["multi"] > 3 or name != "multi-step"
    assert (seen["drafts right"] > 9) == ("drafts" in name)
    assert seen["drafts and decodes"] > 9 or "drafts" not in name or name == "drafts"
    assert seen["preempted"] > 3 or name != "drafts and preemption"


def test_shared_gaps_equal_a_list_of_all_gaps() -> None:
    source, shared = random.Random(1), SharedGaps[int]()
    plain: dict[int, list[float]] = {}
    for number in range(5000):
        gap = 1 / (number + 1) if source.random() < 0.9 else source.random()  # mostly decreasing
        shared.add(gap)
        for gaps in plain.values():
            gaps.append(gap)
        if source.random() < 0.2:
            shared.join(number)
            plain[number] = []
        if len(plain) > 12:
            key = source.choice(sorted(plain))
            assert shared.leave(key) == max(plain.pop(key), default=0.0)
        for key in plain:
            assert shared.longest(key) == max(plain[key], default=0.0)
    assert set(shared.keys) == set(plain) and shared.leave(-1) == 0.0


def test_memory_for_gaps_is_bounded_by_the_requests() -> None:
    shared = SharedGaps[str]()
    shared.join("a")
    for number in range(10_000):
        shared.add(1 / (number + 1))
    assert len(shared._gaps) == len(shared._numbers) <= MIN_KEPT + 1
    assert shared.leave("a") == 1.0


def test_one_long_prompt_shows_in_the_maximum_and_in_the_longest_stalls() -> None:
    space = TokenSpace()
    jobs = [
        WorkloadRequest(id=str(i), pieces=(space.take(50),), num_output=200, max_tokens=200)
        for i in range(8)
    ]
    long = space.take(20_000)
    jobs.append(
        WorkloadRequest(id="long", pieces=(long,), num_output=2, max_tokens=2, arrival=0.05)
    )
    config = preset("vllm_v1", max_num_batched_tokens=32_768, chunk="whole")
    summary = summarize(simulate(jobs, config, PROFILE).metrics)
    between, stalls = summary["time_between_tokens"], summary["longest_stall"]
    assert between["p99"] < 0.01 < PROFILE.prefill_seconds(20_000) <= between["max"]
    assert stalls["p50"] == stalls["max"] == between["max"]
    short, long_ = summary["ttft_by_prompt"]
    assert (short["from"], short["to"], short["requests"]) == (0, 256, 8)
    assert (long_["from"], long_["to"], long_["requests"]) == (16384, 65536, 1)
    assert long_["p99"] > short["max"] > 0


def test_classes_of_prompt_length_begin_at_powers_of_four() -> None:
    values = [(0, 1.0), (255, 2.0), (256, 3.0), (1023, 4.0), (1024, 5.0), (70_000, 6.0)]
    assert list(by_prompt_length(reversed(values))) == [
        (0, 256, [2.0, 1.0]), (256, 1024, [4.0, 3.0]), (1024, 4096, [5.0]),
        (65536, 262144, [6.0]),
    ]  # fmt: skip
