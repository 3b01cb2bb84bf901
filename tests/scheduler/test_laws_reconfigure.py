"""Laws of `reconfigure`: a new queue rule counts for those that wait, or nothing changes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import permutations
from math import nan
from typing import Any

import pytest

from headway import Plan, Request, SchedulerView
from headway.errors import ConfigError, PolicyError
from headway.scheduler.fairness import group_of, weighted_tokens
from headway.scheduler.policies import queue as queues
from tests.support.drive import Driver, Row, small_driver
from tests.support.scenarios import ScenarioRun, random_headroom, random_scenario

RULES: dict[str, Any] = {
    "fcfs": queues.fcfs(),
    "priority": queues.priority(0.0, preempts=True, max_overtakes=1),
    "shortest_first": queues.shortest_first(max_overtakes=2),
    "earliest_deadline": queues.earliest_deadline(),
    "fair": queues.fair(),
    "custom": queues.custom(lambda request, view: -request.num_prompt),
}


def a_world(seed: int, queue: Any) -> Iterator[Driver]:
    """A busy scheduler with requests whose order depends on the rule; yielded before each step."""
    rng = random.Random(seed)
    world = small_driver(
        "vllm", queue=queue, num_blocks=24, num_host_blocks=8, max_num_seqs=3,
        max_num_batched_tokens=24, swap="swap", headroom="watermark(0)",
    )  # fmt: skip
    for number in range(10):
        world.add(
            f"r{number}", rng.randint(1, 20), rng.randint(1, 12), arrival=rng.random() * 9,
            priority=rng.randrange(4), client=rng.choice("abc"),
            deadline=rng.choice((None, rng.random() * 99)),
        )  # fmt: skip
    while world.scheduler.requests:
        yield world
        world.step()
    world.check_outputs()
    world.check_empty()


def change(world: Driver, queue: Any) -> None:
    world.scheduler.reconfigure(replace(world.scheduler.config, queue=queue))


@pytest.mark.parametrize("first, second", [*permutations(RULES, 2)])
def test_a_rule_that_replaces_another_before_the_first_step_decides_alone(
    first: str, second: str
) -> None:
    def table(first: str) -> list[Row]:
        for number, world in enumerate(a_world(7, RULES[first])):
            if number == 0 and first != second:
                change(world, RULES[second])
        return world.table

    assert table(first) == table(second)


WAYS = ["key raises", "key has no order", "keys do not compare", "group is no text"]


@dataclass(frozen=True)
class unusable(queues.Rule):
    """Fails for one of the requests, in one of the WAYS."""

    bad: str = ""
    way: str = ""

    def key(self, request: Request, view: SchedulerView) -> Any:
        if request.id != self.bad:
            return -request.arrival
        if self.way == "key raises":
            raise ValueError("no key")
        return nan if self.way == "key has no order" else "text"

    def group(self, request: Request) -> Any:
        if request.id == self.bad and self.way == "group is no text":
            return None
        return "all in one" if self.way == "keys do not compare" else f"group {request.id}"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["fcfs", "fair"])
def test_a_rule_that_cannot_be_used_changes_no_decision(name: str, way: str) -> None:
    for seed in range(4):
        *_, undisturbed = a_world(seed, RULES[name])
        rng, num_refused = random.Random(seed), 0
        for world in a_world(seed, RULES[name]):
            config = world.scheduler.config
            ids = [request.id for request in world.scheduler.queue]
            if len(ids) > 1:
                with pytest.raises(PolicyError):
                    change(world, unusable(bad=rng.choice(ids), way=way))
                num_refused += 1
            with pytest.raises(ConfigError, match="num_blocks"):
                changed = replace(config, num_blocks=99, queue=RULES["custom"])
                world.scheduler.reconfigure(changed)
            assert world.scheduler.config is config is world.scheduler.state.config
        assert world.table == undisturbed.table and num_refused > 3


@dataclass(frozen=True)
class reading(queues.fair):
    """Its keys read the service of each group."""

    read: list[dict[str, float]] = field(default_factory=list)

    def key(self, request: Request, view: SchedulerView) -> Any:
        self.read.append(dict(view.service()))
        return request.arrival


def test_the_keys_of_a_new_rule_read_the_service_of_its_own_groups() -> None:
    for world in a_world(3, RULES["fcfs"]):
        scheduler, rule = world.scheduler, reading()
        if scheduler.num_steps == 4:
            num_waiting = len(scheduler.queue)
            change(world, rule)
            assert rule.read == [scheduler.state.view.service()] * num_waiting
            assert num_waiting > 2 and len(rule.read[0]) == 3 and any(rule.read[0].values())


# Rules that change at any time, above an executor that checks every slot.


class ChangingRules(ScenarioRun):
    """Before some plans, also while another is in flight, the rules for queue and headroom change."""

    rng = random.Random()

    def _launch(self) -> Plan:
        if self.rng.random() < 0.3:
            config = self.scheduler.config
            rule = self.rng.choice([rule for rule in RULES.values() if rule is not config.queue])
            headroom = random_headroom(self.rng)
            self.scheduler.reconfigure(replace(config, queue=rule, headroom=headroom))
            self._check_order()
            self.check_now()
        return super()._launch()

    def _check_order(self) -> None:
        """The new rule orders those that wait; groups have the service of those that run."""
        scheduler, view = self.scheduler, self.scheduler.state.view
        waiting = list(scheduler.queue)
        assert list(scheduler.queue.walk()) == sorted(waiting, key=view.queue_key)
        service = dict.fromkeys(map(group_of, waiting), 0.0)
        for request in scheduler.running:
            group = group_of(request)
            service[group] = service.get(group, 0.0) + weighted_tokens(request)
        assert view.service() == service
        self.seen["waiting"] += len(waiting) > 1
        self.seen["swapped"] += bool(scheduler.swapped)
        self.seen["in flight"] += bool(scheduler.in_flight and waiting)
        self.seen["groups"] += len(service) > 1

    def check_end(self) -> None:
        super().check_end()
        assert not self.scheduler.queue.counters._active


def test_rules_that_change_while_requests_wait_lose_neither_requests_nor_blocks() -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        for async_scheduling in (0, 1):
            scenario = random_scenario(seed, async_scheduling)
            world = ChangingRules(scenario)
            world.rng = random.Random(seed)
            seen += world.run()
    least = {"waiting": 50, "swapped": 5, "in flight": 20, "groups": 20}
    assert {name: seen[name] for name in least if seen[name] < least[name]} == {}
