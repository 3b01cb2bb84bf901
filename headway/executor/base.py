"""What the engine asks of an executor. The order of work within and between plans is in plan.py."""

from __future__ import annotations

from typing import Protocol

from headway.plan import Plan, StepResult
from headway.request import Params


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


class Preparation(Protocol):
    """What may be done for a request before it comes to the engine. Called on any thread."""

    def ready(self, params: Params) -> Params | None:
        """The params as the executor wants them; None if making them takes long."""
        ...

    def make_ready(self, params: Params) -> Params:
        """The same, however long it takes."""
        ...
