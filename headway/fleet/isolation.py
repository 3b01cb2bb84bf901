"""Runs a suspect alone on one replica: a request that lost several replicas, so may be the cause.

One suspect at a time is isolated. The other requests of the replica move, and the suspect is sent
once the engine has none left. It is no longer a suspect after its second token.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.fleet.open_requests import OpenRequest
from headway.fleet.replica import TICK_SECONDS, Replica
from headway.fleet.settings import FleetSettings


@dataclass(slots=True)
class Isolation:
    """The suspect that is isolated, and its replica; both None between two of them."""

    request: OpenRequest | None = None
    replica: Replica | None = None
    num_others: int | None = None  # requests of the engine before the suspect is sent
    num_ticks: int = 0  # of waiting for them

    @property
    def is_waiting(self) -> bool:
        """Whether other requests must leave the engine first."""
        return self.request is not None and self.num_others != 0

    def is_over(self, settings: FleetSettings) -> bool:
        """Whether the suspect has ended or is none any more, or its replica takes no requests."""
        request, replica = self.request, self.replica
        return request is not None and replica is not None and (
            request.is_ended or not request.is_suspect(settings) or not replica.takes_requests
        )  # fmt: skip

    def is_ready(self, settings: FleetSettings) -> bool:
        """Whether the suspect may be sent: alone, or with requests of other gateways that stay."""
        return not self.is_waiting or self.num_ticks * TICK_SECONDS >= settings.hang_seconds

    @property
    def alone(self) -> OpenRequest | None:
        """The suspect, once the other requests have left the engine."""
        return None if self.is_waiting else self.request
