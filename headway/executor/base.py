"""The interface between the engine and an executor. plan.py defines the order of work in a plan."""

from __future__ import annotations

from typing import Protocol

from headway.plan import Plan, StepResult
from headway.request import RequestParams


class Handle(Protocol):
    """A plan that was launched."""

    def wait(self) -> StepResult:
        """Block until the plan has run. Raise the error if the plan failed."""
        ...


class Executor(Protocol):
    """Runs plans one after the other, in launch order."""

    def launch(self, plan: Plan) -> Handle:
        """Start a plan. May return before the plan has run."""
        ...


class Preparation(Protocol):
    """Prepares a request's parameters before the engine sees the request. Thread-safe."""

    def ready(self, params: RequestParams) -> RequestParams | None:
        """Return the parameters that the executor needs, or None if preparing them takes long."""
        ...

    def make_ready(self, params: RequestParams) -> RequestParams:
        """Return the parameters that the executor needs, however long that takes."""
        ...
