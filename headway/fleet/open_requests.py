"""What a fleet keeps of an open request, so that another replica can continue it."""

from __future__ import annotations

from dataclasses import dataclass, field

from headway.engine.messages import Submit


@dataclass(slots=True, eq=False)
class OpenSample:
    """One sample: the tokens so far, and whether a stop was requested or its end was sent."""

    tokens: list[int] = field(default_factory=list)
    is_stopping: bool = False
    is_ended: bool = False


@dataclass(slots=True, eq=False)
class OpenRequest:
    """An open request, where it runs, and how often it has moved."""

    submit: Submit
    arrived: float  # on the fleet's clock
    samples: list[OpenSample]
    replica: str | None = None  # None: it waits for a replica
    num_moves: int = 0
    num_deaths: int = 0  # replicas that were lost with this request on board
