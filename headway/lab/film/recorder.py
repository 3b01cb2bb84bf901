"""Records what the policies of a scheduler answer, step by step.

Policies are pure, so wrapping them changes no decision. A recording says what a plan does not: the
keys of all candidates for preemption, the headroom that was asked for, and the two times that a
swap rule compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from headway.config import Config, HeadroomRule, SchedulerView, SwapRule, VictimRule
from headway.plan import Plan
from headway.request import Request
from headway.scheduler import Scheduler
from headway.scheduler.policies.swap import swap_if_cheaper

MAX_STEPS = 4  # that are remembered until they are taken


@dataclass(slots=True)
class Answers:
    """What the policies answered while one plan was made; requests by id."""

    victims: list[list[tuple[str, Any]]] = field(default_factory=list)  # candidates, per preemption
    headroom: dict[str, int] = field(default_factory=dict)  # blocks, at the latest check
    swap_seconds: dict[str, tuple[float, float]] = field(default_factory=dict)  # swap, recompute


class PolicyRecorder:
    """Wraps the policies of a scheduler, which must not have made a plan yet."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._now = Answers()
        self._by_step: dict[int, Answers] = {}
        self._asked: list[tuple[str, Any]] = []
        self.reconfigure(scheduler.config)
        self._schedule = scheduler.schedule
        scheduler.schedule = self._recording  # type: ignore[method-assign]

    def reconfigure(self, config: Config) -> None:
        """Use the policies of this config from the next plan on, and record them."""
        self._scheduler.reconfigure(
            replace(
                config, victim=self._victim(config.victim), swap=self._swap(config.swap),
                headroom=self._headroom(config.headroom),
            )
        )  # fmt: skip

    def take(self, step: int) -> Answers | None:
        """The answers for the plan of a step, once."""
        return self._by_step.pop(step, None)

    def _recording(self) -> Plan:
        self._now, self._asked = Answers(), []
        plan = self._schedule()
        self._close_victims()
        if not plan.is_empty:
            self._by_step[plan.step] = self._now
            while len(self._by_step) > MAX_STEPS:
                del self._by_step[next(iter(self._by_step))]
        return plan

    def _close_victims(self) -> None:
        if self._asked:
            self._now.victims.append(self._asked)
            self._asked = []

    def _victim(self, rule: VictimRule) -> VictimRule:
        def recorded(request: Request, view: SchedulerView) -> Any:
            key = rule(request, view)
            self._asked.append((request.id, key))
            return key

        return recorded

    def _swap(self, rule: SwapRule) -> SwapRule:
        def recorded(request: Request, view: SchedulerView) -> bool | Literal["discard"]:
            self._close_victims()  # the victim is chosen: the next keys are for another one
            if isinstance(rule, swap_if_cheaper):
                self._now.swap_seconds[request.id] = rule.seconds(request, view)
            return rule(request, view)

        return recorded

    def _headroom(self, rule: HeadroomRule) -> HeadroomRule:
        def record(request: Request, blocks: int) -> int:
            self._now.headroom[request.id] = max(0, int(blocks))
            return blocks

        return lambda request, view: record(request, rule(request, view))
