"""An observer that keeps the events of a run, and what tests ask about them."""

from __future__ import annotations

from headway.events import Added, Completed, Event, Planned, ended_by, preempted_by
from headway.plan import Plan, Preemption
from headway.request import Request


class Events(list[Event]):
    """All events of an engine or a scheduler, in their order."""

    def __call__(self, event: Event) -> None:
        self.append(event)

    @property
    def completed(self) -> list[Completed]:
        return [event for event in self if isinstance(event, Completed)]

    @property
    def plans(self) -> list[Plan]:
        """The plans with work."""
        plans = [event.plan for event in self if isinstance(event, Planned)]
        return [plan for plan in plans if not plan.is_empty]

    @property
    def added(self) -> list[Request]:
        return [request for event in self if isinstance(event, Added) for request in event.requests]

    @property
    def ended(self) -> list[Request]:
        return [request for event in self for request in ended_by(event)]

    @property
    def preempted(self) -> list[Preemption]:
        return [preemption for event in self for preemption in preempted_by(event)]
