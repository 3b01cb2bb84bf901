"""Time of the scheduler itself, without model and simulator, in steady decode steps.

    python -m bench.scheduler.step            prints one JSON object

step_us          schedule + complete by number of running requests, context about 1000, blocks of 16
plain_step_us    the same work by the plain model of nano-vLLM in tests/scheduler/reference/
admit_cold_us    add + schedule of a 4096-token prompt that is not in the prefix cache
admit_hit_us     the same with the whole prompt in the prefix cache
finish_us        extra time of the step that ends a request of 1000 prompt and 512 output tokens
blocked_us       extra time of a waiting request with a cached 4096-token prefix that does not fit
queue_us         take the first of that many waiting requests, fcfs, and queue another
headroom_us      extra time of a waiting request that the default headroom, future_peak, blocks
policy_overhead  the largest extra time of another policy at 256 requests, as a share of step_us
All values are medians over interleaved rounds, so that a slow moment of the machine affects all.
"""

from __future__ import annotations

import gc
import statistics
from time import perf_counter
from typing import Any

import numpy as np

from bench.harness import Bench, Figures
from headway import Plan, Scheduler, StepResult, preset
from headway.request import Request, RequestParams
from tests.scheduler.reference.blocks import Sequence
from tests.scheduler.reference.listing import Limits
from tests.scheduler.reference.nano_vllm import NanoVLLM

CONTEXT, BLOCK, SIZES, PROMPT = 1000, 16, (64, 256, 1024), 4096
EOS = frozenset({2})
NUM_STEPS, NUM_ROUNDS = 64, 9
NUM_WARM = 8  # untimed steps before each round, to fill the CPU caches
OTHERS = {
    "priority": {"queue": "priority(aging=30)"},
    "fair": {"queue": "fair"},
    "shortest_first": {"queue": "shortest_first"},
    "earliest_deadline": {"queue": "earliest_deadline"},
    "prefill_first": {"batching": "prefill_first"},
    "back_off": {"headroom": "back_off(watermark(0.01))"},
    "reserve_outputs": {"headroom": "reserve_outputs"},
    "least_work": {"victim": "least_work"},
    "swap": {"swap": "swap", "num_host_blocks": 1024},
}


class HeadwayRun:
    """Headway's scheduler with requests that decode without end."""

    def __init__(self, num_running: int, **changes: Any) -> None:
        blocks = (CONTEXT + NUM_STEPS * (NUM_ROUNDS + 4)) // BLOCK + 2
        num_blocks = num_running * blocks + 2 * PROMPT // BLOCK + 64
        numbers = {"max_num_seqs": num_running + 8, "max_num_batched_tokens": 1 << 20}
        numbers |= {"block_size": BLOCK, "num_blocks": num_blocks}
        self.scheduler = Scheduler(preset(**{**numbers, **changes}))
        most = num_blocks * BLOCK // max(1, num_running) - CONTEXT
        for i in range(num_running):
            prompt = range(i * 2000, i * 2000 + CONTEXT - i % BLOCK)
            self.scheduler.add(Request(str(i), prompt, RequestParams(eos_ids=EOS, max_tokens=most)))
        self.step()
        self.step()

    def step(self) -> None:
        plan = self.scheduler.schedule()
        self.scheduler.complete(plan, tokens_for(plan))

    def timed(self, num_steps: int = NUM_STEPS) -> float:
        """Microseconds per schedule + complete, without the executor's part."""
        scheduler, total = self.scheduler, 0.0
        for _ in range(NUM_WARM):
            self.step()
        for _ in range(num_steps):
            start = perf_counter()
            plan = scheduler.schedule()
            total += perf_counter() - start
            result = tokens_for(plan)
            start = perf_counter()
            scheduler.complete(plan, result)
            total += perf_counter() - start
        return total / num_steps * 1e6


def tokens_for(plan: Plan) -> StepResult:
    sampled = sum(chunk.is_last for chunk in plan.chunks)
    columns = [np.full(len(plan.decodes), 7, np.intc)] * plan.num_steps if plan.decodes else []
    return StepResult(columns, [7] * sampled)


class PlainRun:
    """The plain model with the same requests."""

    def __init__(self, num_running: int) -> None:
        blocks = (CONTEXT + NUM_STEPS * (NUM_ROUNDS + 4)) // BLOCK + 2
        self.scheduler = NanoVLLM(Limits(num_running, 1 << 30, num_running * blocks, BLOCK))
        for i in range(num_running):
            prompt = list(range(i * 2000, i * 2000 + CONTEXT - i % BLOCK))
            self.scheduler.add(Sequence(str(i), prompt, 1 << 20))
        self.tokens = {str(i): 7 for i in range(num_running)}
        self.step()
        self.step()

    def step(self) -> None:
        batch = self.scheduler.step()
        self.scheduler.postprocess(batch, self.tokens)

    def timed(self) -> float:
        scheduler, total = self.scheduler, 0.0
        for _ in range(NUM_WARM):
            self.step()
        for _ in range(NUM_STEPS):
            start = perf_counter()
            batch = scheduler.step()
            scheduler.postprocess(batch, self.tokens)
            total += perf_counter() - start
        return total / NUM_STEPS * 1e6


def admission_us(scheduler: Scheduler, id: str, prompt: list[int]) -> float:
    request = Request(id, prompt, RequestParams(max_tokens=4))
    start = perf_counter()
    scheduler.add(request)
    plan = scheduler.schedule()
    took = perf_counter() - start
    assert plan.admitted[0].request is request
    scheduler.complete(plan, tokens_for(plan))
    while scheduler.requests:
        plan = scheduler.schedule()
        scheduler.complete(plan, tokens_for(plan))
    return took * 1e6


def admissions() -> dict[str, float]:
    cold, hit = [], []
    for i in range(2 * NUM_ROUNDS):
        numbers = {"num_blocks": 2048, "max_num_batched_tokens": 8192, "block_size": BLOCK}
        scheduler = Scheduler(preset(**numbers))
        prompt = list(range(i * PROMPT, (i + 1) * PROMPT))
        admission_us(scheduler, "warm", [1, 2, 3])
        cold.append(admission_us(scheduler, "cold", prompt))
        hit.append(admission_us(scheduler, "hit", prompt))
    return {"admit_cold_us": statistics.median(cold), "admit_hit_us": statistics.median(hit)}


def finish_us() -> float:
    """Extra time of a step in which one of 16 requests ends."""
    extra = []
    for _ in range(NUM_ROUNDS):
        ours = HeadwayRun(16, num_blocks=4096)
        ours.scheduler.add(
            Request("end", range(1 << 20, (1 << 20) + 1000), RequestParams(max_tokens=512))
        )
        times = []
        while "end" in ours.scheduler.requests:
            start = perf_counter()
            ours.step()
            times.append(perf_counter() - start)
        extra.append(times[-1] - statistics.median(times))
    return statistics.median(extra) * 1e6


def blocked_us() -> float:
    """Extra time of a waiting request with a cached prefix and no room, with 64 running ones."""
    extra = []
    for _ in range(3):
        ours = HeadwayRun(64, queue="fcfs", headroom="watermark(0.0)")
        prompt = list(range(1 << 20, (1 << 20) + PROMPT))
        run_first(ours, prompt)
        free = ours.timed()
        num_more = (ours.scheduler.kv.num_free + 1) * BLOCK
        tail = range(1 << 24, (1 << 24) + num_more)
        ours.scheduler.add(Request("head", [*prompt, *tail], RequestParams(max_tokens=1)))
        blocked = ours.timed()
        assert ours.scheduler.last_planned.plan.blocked[0].reason == "blocks"
        extra.append(blocked - free)
    return statistics.median(extra)


def headroom_us() -> float:
    """Extra time of a waiting request that the default headroom blocks, with 64 running ones."""
    extra = []
    for _ in range(3):
        ours = HeadwayRun(64, num_blocks=64 * 82)
        ours.scheduler.state.outputs.shares.extend([1.0] * 256)
        free = ours.timed()
        ours.scheduler.add(
            Request("head", range(1 << 24, (1 << 24) + 64), RequestParams(eos_ids=EOS))
        )
        blocked = ours.timed()
        assert ours.scheduler.last_planned.plan.blocked[0].reason == "headroom"
        extra.append(blocked - free)
    return statistics.median(extra)


def run_first(ours: HeadwayRun, prompt: list[int]) -> None:
    ours.scheduler.add(Request("first", prompt, RequestParams(max_tokens=1)))
    ours.step()


def overhead_of(changes: dict[str, Any]) -> float:
    """Extra time of a policy as a share of a step; the two alternate, a quarter round each."""
    ours, other = HeadwayRun(256), HeadwayRun(256, **changes)
    ratios = [other.timed(16) / ours.timed(16) for _ in range(25)]
    return statistics.median(ratios) - 1


def queue_us(num_waiting: int) -> float:
    """Time to remove the first waiting request and to add another at the end."""
    queue = Scheduler(preset("vllm_v1")).queue
    times = []
    for number in range(num_waiting + 500):
        request = Request(str(number), [1], RequestParams(), arrival=float(number))
        start = perf_counter()
        queue.push(request)
        if number >= num_waiting:
            queue.remove(next(queue.walk()))
            times.append((perf_counter() - start) * 1e6)
    return statistics.median(times)


def measure(_: object) -> Figures:
    gc.disable()
    runs: dict[str, Any] = {f"step {n}": HeadwayRun(n) for n in SIZES}
    runs |= {f"plain {n}": PlainRun(n) for n in SIZES}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(NUM_ROUNDS):
        for name, run in runs.items():
            times[name].append(run.timed())
    overhead = {name: overhead_of(changes) for name, changes in OTHERS.items()}
    median = {name: round(statistics.median(values), 1) for name, values in times.items()}
    return {
        "step_us": {str(n): median[f"step {n}"] for n in SIZES},
        "plain_step_us": {str(n): median[f"plain {n}"] for n in SIZES},
        **{name: round(value, 1) for name, value in admissions().items()},
        "finish_us": round(finish_us(), 1),
        "blocked_us": round(blocked_us(), 1),
        "headroom_us": round(headroom_us(), 1),
        "queue_us": {str(n): round(queue_us(n), 1) for n in (1000, 100_000)},
        "policy_overhead": round(max(overhead.values()), 3),
        "overhead_by_policy": {name: round(value, 3) for name, value in overhead.items()},
    }


if __name__ == "__main__":
    Bench(__doc__).main(measure)
