"""What the engine asks of an executor. The order of work within and between plans is in plan.py."""

from __future__ import annotations

from typing import Protocol

from headway.plan import Plan, StepResult


class Handle(Protocol):
    """A plan on its way."""

    def wait(self) -> StepResult:
        """Block until the plan has run; raises whatever made it fail."""
        ...


class Executor(Protocol):
    """Runs plans, one after the other, in the order they are launched."""

    def launch(self, plan: Plan) -> Handle:
        """Start a plan. May return before it is done, or only then."""
        ...
