"""Faults of an engine in a fleet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headway import Completed, Engine, Plan


class Faults:
    """Ends the loop of an engine at a step, fails single steps, or calls a function at a step."""

    def __init__(self, engine: Engine) -> None:
        self._step, self._launch = engine.step, engine.executor.launch
        self.dies_at: int | None = None
        self.fails_at: set[int] = set()
        self.calls: dict[int, Callable[[], None]] = {}
        engine.step, engine.executor = self.step, self  # type: ignore[method-assign]
        self._scheduler = engine.scheduler

    def step(self) -> Completed | None:
        if self._scheduler.num_steps == self.dies_at:
            raise RuntimeError("the process was killed")  # not handled by the engine
        return self._step()

    def launch(self, plan: Plan) -> Any:
        if call := self.calls.pop(plan.step, None):
            call()
        if plan.step in self.fails_at:
            raise RuntimeError("the device was lost")
        return self._launch(plan)
