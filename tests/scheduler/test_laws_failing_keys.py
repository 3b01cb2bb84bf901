"""Laws of a queue key that raises, above all while its request is preempted.

Block counts stay right, and a request ends only if its own key has raised. All others keep their
tokens.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from headway import Plan, preset
from headway.errors import PolicyError
from headway.request import Request, RequestParams
from headway.scheduler.policies import queue as queues
from tests.support.drive import Driver, small_driver
from tests.support.scenarios import Scenario, ScenarioRun, random_scenario


class Failing:
    """A key for queues.custom that raises with the given chances, a higher one for running requests."""

    def __init__(self, seed: int, chance: float = 0.0, chance_running: float = 0.0) -> None:
        self.rng, self.chance, self.chance_running = random.Random(seed), chance, chance_running
        self.raised: set[str] = set()
        self.num_raised_running = 0

    def __call__(self, request: Request, view: object) -> float:
        is_running = request.row >= 0
        if self.rng.random() < (self.chance_running if is_running else self.chance):
            self.raised.add(request.id)
            self.num_raised_running += is_running
            raise RuntimeError("no key")
        return request.arrival


def everything(world: Driver) -> Any:
    """All that a preemption changes."""
    scheduler, state, kv = world.scheduler, world.scheduler.state, world.scheduler.kv
    requests = [
        (r.id, r.state, r.row, r.num_computed, r.prefill_end, *r.kv.blocks, r.kv.host, *r.tokens)
        for r in scheduler.requests.values()
    ]
    history = [
        (r.history.num_preemptions, r.history.group, r.history.max_num_computed)
        for r in scheduler.requests.values()
    ]
    return (
        requests, history, list(scheduler.running), list(scheduler.queue), list(scheduler.swapped),
        list(state.prefilling), list(state.decode_batch.members), list(state.free_rows),
        list(kv.pool.refs), list(kv.host.refs), list(kv.pool.index.key_of), kv.num_free,
        set(state.preempted_in_flight), len(state.preempted), state.outputs.pressure,
        len(state.plan.copies_out), dict(scheduler.queue.counters.served),
    )  # fmt: skip


@pytest.mark.parametrize("swap", ["recompute", "swap", "discard_output"])
def test_a_preemption_whose_key_raises_changes_nothing(swap: str) -> None:
    """Neither now nor later: the run decides as if none had been tried."""

    def run(chance: float) -> Driver:
        rng, key = random.Random(2), Failing(0)
        world = small_driver(
            "vllm", queue=queues.custom(key), swap=swap, headroom="watermark(0)",
            num_blocks=14, num_host_blocks=6, max_num_batched_tokens=16,
        )  # fmt: skip
        for number in range(9):
            world.add(f"r{number}", rng.randint(1, 20), rng.randint(1, 20), arrival=float(number))
        while world.scheduler.requests:
            plan, before = world.plan(), everything(world)
            key.chance_running = chance
            for request in list(world.scheduler.running) if chance else ():
                with pytest.raises(PolicyError, match=request.id):
                    world.scheduler.state.preempt(request)
                assert everything(world) == before
            key.chance_running = 0.0
            world.finish(plan)
        world.check_outputs()
        world.check_empty()
        return world

    undisturbed, disturbed = run(0.0), run(1.0)
    assert disturbed.table == undisturbed.table
    assert sum(bool(row.preempted) for row in disturbed.table) > 2


# Keys that raise at any time, above an executor that checks every slot.


class FailingRun(ScenarioRun):
    """A step whose key raises is not run; then the caller does what the engine does."""

    def __init__(self, scenario: Scenario, key: Failing) -> None:
        self.key, self.is_failing = key, False
        super().__init__(scenario)

    def _arrive(self, step: int) -> None:
        for request in self.scenario.arrivals.get(step, []).copy():
            self.scenario.arrivals[step] = [request]
            try:
                super()._arrive(step)
            except PolicyError:
                assert request.id not in self.scheduler.requests
                self.check_now()

    def _launch(self) -> Plan:
        try:
            return super()._launch()
        except PolicyError as error:
            self._recover(error)
            return Plan(-1)

    def _recover(self, error: PolicyError) -> None:
        """Complete the plan in flight, end the request whose key raised, recompute all others."""
        assert error.request_id is not None
        self.is_failing = True  # the prefix index lists blocks that no plan has filled
        self.check_now()
        while self.pending:
            self._complete()
        self.executor.crash([])
        self.seen["failed after a swap"] += bool(self.scheduler.last_planned.plan.copies_out)
        before, already = set(self.scheduler.requests), set(self.key.raised)
        self.key.raised.clear()
        self.scheduler.fail(str(error))
        self.scheduler.abort(error.request_id, "error", str(error))
        self.is_failing = False
        assert self.scheduler.kv.is_unused
        assert before - set(self.scheduler.requests) <= self.key.raised | {error.request_id}
        self.seen["ended while others were queued again"] += bool(self.key.raised)
        self.key.raised |= already
        self.check_now()
        self.check_tokens()
        self.seen["failed steps"] += 1

    def _reset(self) -> None:
        before = set(self.scheduler.requests)
        while True:
            try:
                super()._reset()
            except PolicyError:
                self.check_now()
                assert set(self.scheduler.requests) <= before and not self.pending
                self.seen["failed resets"] += 1
            else:
                return

    def check_now(self) -> None:
        self.check_counts()
        if not self.is_failing:
            self.executor.check_index()

    def check_end(self) -> None:
        super().check_end()
        ended = {request.id for request in self.finished if request.finish_reason == "error"}
        assert ended <= self.key.raised


def all_due_at_once(async_scheduling: int) -> Scenario:
    """Four requests that need a block in the same step, in which two of them are swapped out."""
    config = preset(
        "vllm", swap="swap", headroom="watermark(0)", block_size=4, num_blocks=4,
        num_host_blocks=8, max_num_seqs=4, max_num_batched_tokens=64,
    )  # fmt: skip
    params = RequestParams(max_tokens=9, sampling=1)
    requests = [Request(str(token), [token] * 4, params) for token in range(4)]
    return Scenario(config, async_scheduling, {0: requests})


def test_keys_that_raise_at_any_time_end_their_own_requests_and_leak_nothing() -> None:
    seen: Counter[str] = Counter()
    for seed in range(60):
        for async_scheduling in (0, 1):
            key = Failing(seed, 0.01, 0.3)
            if seed % 4:
                scenario = random_scenario(seed, async_scheduling)
                scenario.crash = -1
            else:
                scenario = all_due_at_once(async_scheduling)
            scenario.config = replace(scenario.config, queue=queues.custom(key, max_overtakes=1))
            seen += FailingRun(scenario, key).run()
            seen["raised for a running request"] += key.num_raised_running
    least = {
        "failed steps": 40, "failed resets": 3, "raised for a running request": 40,
        "ended while others were queued again": 10, "failed after a swap": 3,
    }  # fmt: skip
    assert {name: seen[name] for name in least if seen[name] < least[name]} == {}
