"""Limits of a fleet, and the counters of what has happened to it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from headway.checks import number_problem
from headway.errors import ConfigError

MAX_SECONDS = 1e6
MAX_COUNT = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """When a replica counts as lost, and how often a request moves. ConfigError names a field."""

    hang_seconds: float = 1.75  # without any message, heartbeats included: the replica is lost
    stall_seconds: float = 60.0  # heartbeats but no step, with work: the replica is lost
    no_replica_seconds: float = 30.0  # requests wait this long for a replica, then fail
    max_moves: int = 3  # of one request
    max_deaths: int = 2  # a request fails after losing this many replicas

    def __post_init__(self) -> None:
        for field in fields(self):
            is_whole, value = field.name.startswith("max_"), getattr(self, field.name)
            low, high = (1, MAX_COUNT) if is_whole else (0, MAX_SECONDS)
            if problem := number_problem(value, low, high, whole=is_whole):
                raise ConfigError(f"{field.name} {problem}")


@dataclass(slots=True)
class FleetCounters:
    """What has happened since the fleet started."""

    num_moves: int = 0
    num_deaths: int = 0  # replicas that were lost or hung
    num_drains: int = 0
    num_resumed_tokens: int = 0  # tokens that moved requests had already generated
    resume_seconds: float = 0.0  # from sending moved requests to their next tokens, added up
    num_failed: int = 0  # requests that no replica could continue
    num_frames: int = 0  # messages received, each with the tokens of all requests of a step
