"""One engine client over many replicas. No request is lost with a replica.

The client keeps prompt, params and tokens so far of every open request. If a replica is lost, hangs
or is drained, its requests continue elsewhere from the tokens already made, and the caller sees a
pause. Knows no Ray and no sockets: a `ReplicaLink` carries the messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from headway.engine.async_engine import OnMessages
from headway.engine.clock import Clock
from headway.engine.messages import ToLoop
from headway.fleet.links import ReplicaLink

Route = Callable[[Any, Sequence[Any]], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """Limits of a fleet. Times are in seconds."""

    hang_seconds: float = 1.5  # without any message, heartbeats included: the replica is lost
    stall_seconds: float = 60.0  # heartbeats but no step, with work: the replica is lost
    no_replica_seconds: float = 30.0  # requests wait this long for a replica, then fail
    max_moves: int = 3  # of one request
    max_deaths: int = 2  # a request on board at this many deaths fails


@dataclass(slots=True)
class FleetCounters:
    """What has happened since the fleet started."""

    num_moves: int = 0
    num_deaths: int = 0  # replicas that were lost or hung
    num_drains: int = 0
    num_resumed_tokens: int = 0  # tokens that moved requests had already generated
    num_failed_moves: int = 0  # requests that failed because of max_moves or max_deaths


class FleetClient:
    """An EngineClient over links that come and go."""

    def __init__(
        self,
        links: Iterable[ReplicaLink] = (),
        *,
        block_size: int,  # of the replicas' prefix keys
        route: Route | None = None,
        settings: FleetSettings | None = None,
        clock: Clock | None = None,
    ) -> None: ...

    async def open(self, on_messages: OnMessages) -> None:
        """Open all links. A link that cannot be opened is skipped with a warning."""

    def send(self, messages: list[ToLoop]) -> None: ...

    async def close(self) -> None: ...

    async def add(self, link: ReplicaLink) -> None:
        """Open a link and route requests to it; replaces a lost or drained one of that name."""

    async def drain(self, name: str) -> None:
        """Move the requests of a replica elsewhere at once; then close its link.

        Returns when the replica reports no work, or after DRAIN_SECONDS.
        """

    async def remove(self, name: str) -> None:
        """Close a link without waiting; its requests move as if it were drained."""

    def describe(self) -> dict[str, Any]:
        """Counters, and state and load of every replica; also the answer to the query "fleet"."""
        return {}
