"""Laws of fair queueing: the wait of a small client does not depend on what heavy clients send."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway import Engine, Plan, VirtualClock
from headway.events import Completed, Event
from headway.executor.simulated import Script, SimulatedExecutor
from headway.lab.loadgen.requests import LengthRange, random_requests, with_poisson_arrivals
from headway.lab.workload.request import WorkloadRequest
from headway.record.lines import PlannedLine
from headway.record.replay import check_replay
from headway.record.writer import JournalWriter, header
from headway.request import Request, RequestParams
from headway.scheduler import Scheduler, fairness, preset
from headway.scheduler.fairness import RECENT_STEPS
from tests.support.drive import Driver
from tests.support.journals import Lines, of_kind
from tests.support.scenarios import MOMENTS, Scenario, run

GROUP = "client {}".format
Shapes = list[tuple[int, int, str]]  # prompt tokens, output tokens, client; repeated in order


def make_driver(**changes: Any) -> Driver:
    """A driver with more blocks and rows than the requests need, unless changed."""
    values = {"queue": "fair", "num_blocks": 8192, "block_size": 4, "max_num_seqs": 64}
    return Driver("vllm_v1", **{**values, "max_num_batched_tokens": 64, **changes})


def refill(driver: Driver, shapes: Shapes, num_waiting: int = 4) -> None:
    """Add requests of the heavy clients until this number of them waits."""
    waiting = sum(request.params.client != "small" for request in driver.scheduler.queue)
    for _ in range(waiting, num_waiting):
        number = len(driver.requests)
        length, max_tokens, client = shapes[number % len(shapes)]
        driver.add(f"h{number}", length, max_tokens, client=client, arrival=float(number))


shapes = st.lists(
    st.tuples(st.integers(8, 300), st.integers(1, 12), st.sampled_from(("heavy", "other"))),
    min_size=1, max_size=6,
)  # fmt: skip


def is_served_least(driver: Driver, client: str) -> bool:
    served = driver.scheduler.queue.counters.served
    active = {GROUP(request.params.client) for request in driver.scheduler.requests.values()}
    return all(served[GROUP(client)] <= served[group] for group in active)


@given(shapes, st.lists(st.tuples(st.integers(1, 9), st.integers(1, 200)), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_before_its_first_token_a_request_waits_for_at_most_its_own_length_of_each_client(
    heavy: Shapes, small: list[tuple[int, int]]
) -> None:
    """Up to the budget of one step; if its own client has the least service and none running."""
    driver = make_driver()
    for number, (pause, length) in enumerate(small):
        for _ in range(pause):
            refill(driver, heavy)
            driver.step()
        request = driver.add(f"s{number}", length, 3, client="small", arrival=1e6 + number)
        is_least, waited_for = is_served_least(driver, "small"), Counter[str]()
        while request.id in driver.scheduler.requests:
            refill(driver, heavy)
            plan = driver.step()
            if request.num_generated or not is_least:
                continue
            for chunk in plan.chunks:
                waited_for[chunk.request.params.client] += chunk.end - chunk.start
            del waited_for["small"]
            assert max(waited_for.values(), default=0) < length + 64


def test_a_short_request_overtakes_a_partially_prefilled_prompt() -> None:
    driver = make_driver(max_num_batched_tokens=10, max_num_seqs=10)
    driver.add("long", 1000, 4, client="heavy")
    driver.steps(3)  # computes 30 of its tokens
    driver.add("equal", 1000, 4, client="other")
    driver.add("short", 25, 1, client="small")
    table = driver.steps(4)
    assert [row.chunks for row in table] == [
        (("short", 0, 10),), (("short", 10, 20),), (("short", 20, 25), ("long", 30, 35)),
        (("long", 35, 45),),
    ]  # fmt: skip
    driver.run()
    driver.check_empty()


@given(st.integers(2, 8), st.integers(20, 90), st.integers(8, 30), st.integers(0, 6))
@settings(max_examples=40, deadline=None)
def test_equal_clients_do_not_overtake_each_other(
    num_clients: int, length: int, budget: int, gap: int
) -> None:
    """Each prompt is computed to its end before the next; alternating would delay all of them."""
    driver = make_driver(max_num_batched_tokens=budget, max_num_seqs=8)
    first_tokens: list[str] = []
    for number in range(num_clients):
        driver.add(str(number), length, 3, client=str(number), arrival=float(number))
        for _ in range(gap):
            first_tokens += [c.request.id for c in driver.step().chunks if c.is_last]
            assert len(driver.scheduler.state.prefilling) < 2
    while driver.scheduler.requests:
        first_tokens += [c.request.id for c in driver.step().chunks if c.is_last]
        assert len(driver.scheduler.state.prefilling) < 2
    assert first_tokens == [str(number) for number in range(num_clients)]


@given(st.integers(50, 400), st.lists(st.integers(1, 60), min_size=1, max_size=3))
@settings(max_examples=40, deadline=None)
def test_a_client_overtakes_by_at_most_the_service_it_has_less(
    length: int, lengths: list[int]
) -> None:
    """Whatever number of short requests arrives, so that no prompt starves."""
    driver = make_driver(max_num_batched_tokens=16, max_num_seqs=16)
    for number in range(6):
        driver.add(f"early {number}", 30, 9, client="heavy")
    long = driver.add("long", length, 1, client="heavy")
    overtook, before = Counter[str](), dict[str, float]()
    while not long.is_finished:
        for number, short in enumerate(lengths):
            name = str(number)
            if not any(r.params.client == name for r in driver.scheduler.queue):
                driver.add(f"{name}.{len(driver.requests)}", short, 1, client=name)
        driver.scheduler.queue.counters.start_step()  # as the next step does
        service = driver.scheduler.state.view.service()
        has_started = long.num_computed > 0
        if not has_started:
            before = {str(n): service[GROUP(n)] for n in range(len(lengths))}
        plan = driver.step()
        if has_started and not long.is_finished:
            overtook.update({a.request.params.client: a.request.num_prompt for a in plan.admitted})
            for name, num_tokens in overtook.items():
                assert num_tokens <= service[GROUP("heavy")] - before[name]


@pytest.mark.parametrize("max_num_seqs", [8, 16, 30])
def test_rows_are_reserved_for_clients_that_have_few(max_num_seqs: int) -> None:
    driver = make_driver(max_num_seqs=max_num_seqs, max_num_batched_tokens=64)
    num_reserved = max_num_seqs // 8
    driver.add("s", 4, 1, client="small")
    driver.run()  # from now on there are two groups
    for number in range(40):
        driver.add(f"h{number}", 4, 50, client="heavy")
    driver.steps(4)
    plan = driver.step()
    assert driver.scheduler.last_planned.num_running == max_num_seqs - num_reserved
    assert plan.blocked[0][1:] == ("reserved_rows", num_reserved + 1, num_reserved)
    for number in range(num_reserved):
        driver.add(f"s{number}", 4, 50, client="small")
    assert len(driver.step().admitted) == num_reserved
    driver.run()
    driver.check_empty()


def test_a_single_client_may_use_all_rows() -> None:
    driver = make_driver(max_num_seqs=16)
    for number in range(40):
        driver.add(f"h{number}", 4, 50, client="heavy")
    assert max(len(row.decodes.split()) for row in driver.run()) == 16


def test_a_client_that_left_long_ago_costs_no_rows() -> None:
    driver = make_driver(max_num_seqs=8)

    def most_running() -> int:
        for number in range(12):
            driver.add(f"{len(driver.table)}/{number}", 4, 5, client="heavy")
        return max(len(row.decodes.split()) for row in driver.run())

    driver.add("s", 4, 1, client="small")
    driver.run()
    assert most_running() == 7
    driver.add("long", 4, RECENT_STEPS, client="heavy")
    driver.run()
    assert most_running() == 8


@pytest.mark.parametrize("async_scheduling", [0, 1])
def test_the_end_of_a_reserve_replays(
    async_scheduling: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fairness, "RECENT_STEPS", 6)
    config = preset(queue="fair", num_blocks=400, max_num_seqs=8)
    clock, trace, rng, num_running = VirtualClock(), Lines(), random.Random(0), Counter[int]()
    engine = Engine(
        Scheduler(config), SimulatedExecutor(clock, lambda plan: 0.01), clock,
        async_scheduling=bool(async_scheduling),
        observers=[JournalWriter(trace, header(config, bool(async_scheduling)))],
    )  # fmt: skip
    for number in range(200):
        length, client = rng.randrange(1, 20), "small" if rng.random() < 0.05 else "heavy"
        script = Script(length, filler=7, end=0)
        params = RequestParams(max_tokens=length, client=client, sampling=script)
        engine.add(str(number), [1] * 4, params)
        if rng.random() < 0.1:
            engine.abort(str(number - rng.randrange(4)))
        if rng.random() < 0.9:
            engine.step()
        num_running[len(engine.scheduler.running)] += 1
    engine.run()
    assert num_running[7] > 10 and num_running[8] > 10, num_running
    check_replay(trace.read())


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=12))
@settings(max_examples=40, deadline=None)
def test_a_client_is_charged_for_each_prompt_once_and_for_each_output(
    requests: list[tuple[int, int]],
) -> None:
    """Also if requests are preempted and recomputed; an output token counts twice."""
    driver = make_driver(num_blocks=14, max_num_seqs=6, max_num_batched_tokens=12)
    expected: Counter[str] = Counter()
    for number, (length, max_tokens) in enumerate(requests):
        client = str(number % 2)
        driver.add(str(number), length, max_tokens, client=client)
        expected[GROUP(client)] += length + 2 * max_tokens
    driver.run()
    assert driver.scheduler.queue.counters.served == expected


# The scheduler's other laws hold while requests overtake.

SEEDS = {
    8: (42, 266, 361, 909, 955),
    16: (42, 123, 126, 139, 541),
}  # by token budget; seeds that once preempted


@pytest.mark.parametrize("budget", SEEDS)
def test_future_peak_with_exact_lengths_never_preempts_while_requests_overtake(budget: int) -> None:
    for seed in SEEDS[budget]:
        rng, size, num_blocks = random.Random(seed), 1 + seed % 5, 12 + seed % 16
        driver = make_driver(
            headroom="future_peak", num_blocks=num_blocks, block_size=size, max_num_batched_tokens=budget,
            max_num_seqs=6,
        )  # fmt: skip
        num_left, most = 24, num_blocks * size // 2
        while num_left or driver.scheduler.requests:
            while num_left and rng.random() < 0.4:
                num_left -= 1
                length, max_tokens = 1 + rng.randrange(most), 1 + rng.randrange(most)
                client, arrival = str(rng.choice((0, 0, 0, 1, 2))), float(24 - num_left)
                driver.add(str(num_left), length, max_tokens, client=client, arrival=arrival)
            assert not driver.step().preempted, f"seed {seed}"


SIZES = {"heavy": 200, "many": 20, "other": 8, "small": 4}  # longest prompts


def overtaking_scenario(seed: int, async_scheduling: int) -> Scenario:
    """Clients of different sizes that overtake, with few blocks or with reserved rows."""
    rng = random.Random(seed)
    num_blocks, max_num_seqs = rng.choice(((rng.randrange(20, 60), 4), (200, 9)))
    config = preset(
        "vllm_v1", queue="fair", block_size=rng.choice((1, 2, 4)), num_blocks=num_blocks,
        max_num_seqs=max_num_seqs, max_num_batched_tokens=rng.choice((9, 12)), num_host_blocks=16,
        chunk=rng.choice(("split_any", "at_most(3)", "split_first")),
        batching=rng.choice(("mixed", "swapped_first", "prefill_first", "prefill_first_charge_cached")),
        swap=rng.choice(("recompute", "swap")), victim=rng.choice(("newest", "served_last")),
    )  # fmt: skip
    driver, most = Scenario(config, async_scheduling, {}), config.num_blocks * config.block_size - 8
    for number in range(5 * max_num_seqs):
        client = rng.choice(("many", *SIZES))
        length = rng.randrange(1, min(SIZES[client], most) + 1)
        params = RequestParams(max_tokens=rng.randrange(1, 9), client=client, sampling=number)
        step, prompt = rng.randrange(40), [rng.randrange(3) for _ in range(length)]
        request = Request(str(number), prompt, params, arrival=float(step))
        driver.arrivals.setdefault(step, []).append(request)
        if rng.random() < 0.1:
            driver.aborts[rng.randrange(60), rng.choice(MOMENTS)] = [str(number)]
    return driver


@pytest.mark.parametrize("async_scheduling", [0, 1])
def test_every_law_of_the_scheduler_holds_while_requests_overtake(async_scheduling: int) -> None:
    seen, partial = Counter[str](), set[Request]()

    def observe(plan: Plan, scheduler: Scheduler) -> None:
        places = {chunk.request: place for place, chunk in enumerate(plan.chunks)}
        new = [admission.request for admission in plan.admitted if admission.request in places]
        seen["overtakes"] += any(
            places.get(old, len(places)) > places[request]
            and old.params.client != request.params.client
            for old in partial & scheduler.running.keys()
            for request in new
        )
        seen["reserved rows"] += any(blocked.reason == "reserved_rows" for blocked in plan.blocked)
        partial.clear()
        partial.update(scheduler.state.prefilling)

    for seed in range(34):
        partial.clear()
        seen += run(overtaking_scenario(seed, async_scheduling), observe)
    assert seen["overtakes"] > 50 and seen["reserved rows"] > 50, seen
    assert seen["preempted, swapped"] > 20 and seen["preempted, recomputed"] > 20


RATE, TIMES, NUM_SMALL = 1.0, 20, 20
LIKE_SMALL, LONG_PROMPTS = (
    (LengthRange(200, 300), LengthRange(8, 24)),
    (LengthRange(1000, 2000), LengthRange(8, 24)),
)
LONG_OUTPUTS = (LengthRange(200, 300), LengthRange(200, 300))


def jobs_of(heavy: tuple[LengthRange, LengthRange] | None) -> list[WorkloadRequest]:
    """Jobs of the small client, and of a heavy one that starts earlier and sends 20 times as many."""
    own = with_poisson_arrivals(random_requests(NUM_SMALL, *LIKE_SMALL, seed=0), RATE, seed=0)
    jobs = [replace(j, id=f"s{j.id}", client="small", arrival=j.arrival + 5) for j in own]
    if heavy:
        count = int(TIMES * RATE * jobs[-1].arrival)
        others = with_poisson_arrivals(random_requests(count, *heavy, seed=1), TIMES * RATE, seed=1)
        jobs += [replace(job, id=f"h{job.id}", client="heavy") for job in others]
    return sorted(jobs, key=lambda job: job.arrival)


def small_p90(
    queue: str, heavy: tuple[LengthRange, LengthRange] | None, trace: Lines | None = None
) -> Any:
    """The small client's p90 time to first token; steps take as long as on two CPU cores."""
    config = preset(queue=queue, num_blocks=3000, max_num_batched_tokens=64, max_num_seqs=32)
    clock, first_tokens, jobs = VirtualClock(), dict[str, float](), jobs_of(heavy)

    def observe(event: Event) -> None:
        for chunk in event.plan.chunks if isinstance(event, Completed) else ():
            if chunk.is_last and chunk.request.params.client == "small":
                first_tokens[chunk.request.id] = event.result.ended - chunk.request.arrival

    executor = SimulatedExecutor(clock, lambda plan: 0.008 + 0.0006 * plan.num_tokens)
    engine = Engine(Scheduler(config), executor, clock, observers=[observe])
    if trace is not None:
        engine.observers.append(JournalWriter(trace, header(config, False)))
    while len(first_tokens) < NUM_SMALL:
        while jobs and (jobs[0].arrival <= clock.now() or not engine.has_work):
            job = jobs.pop(0)
            clock.advance_to(job.arrival)
            engine.add(job.id, job.prompt(), job.params(), arrival=job.arrival)
        engine.step()
    for id in list(engine.scheduler.requests):
        engine.abort(id)
    engine.run()
    return statistics.quantiles(first_tokens.values(), n=10, method="inclusive")[8]


@cache
def alone_p90() -> Any:
    return small_p90("fair", None)


@pytest.mark.parametrize("heavy", [LIKE_SMALL, LONG_PROMPTS, LONG_OUTPUTS])
def test_a_client_with_20_times_the_requests_at_most_doubles_the_time_to_first_token(
    heavy: tuple[LengthRange, LengthRange],
) -> None:
    alone = alone_p90()
    assert small_p90("fair", heavy) <= 2 * alone
    assert small_p90("fcfs", heavy) > 10 * alone


def test_a_run_with_overtaking_replays_with_the_same_decisions() -> None:
    trace = Lines()
    small_p90("fair", LONG_PROMPTS, trace)
    plans = of_kind(PlannedLine, trace.read())
    chunks = [plan.chunks or [("", 0, 0, True)] for plan in plans]
    overtakes = [new for (*_, old), (new, *_) in pairwise(chunks) if not old[3] and not new[1]]
    assert len(overtakes) > NUM_SMALL / 2
    assert check_replay(trace.read()) == len(plans)
