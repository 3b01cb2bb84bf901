"""Limits of a fleet, and the counters of what has happened to it."""

from __future__ import annotations

from dataclasses import dataclass

from headway.checks import Checked, count, number
from headway.remote.journal import ORPHAN_SECONDS

MAX_SECONDS = 1e6
MAX_COUNT = 1000
MAX_HELD = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings(Checked):
    """When a replica is lost, and what requests wait for. ConfigError names a field."""

    prefix = ""
    # Without any message, heartbeats included: the replica is lost.
    hang_seconds: float = number(1.75, 0, MAX_SECONDS)
    # Heartbeats but no step, with work: the replica is lost.
    stall_seconds: float = number(60.0, 0, MAX_SECONDS)
    # The longest wait for signs of life of the other replicas after a loss.
    verdict_seconds: float = number(0.5, 0, MAX_SECONDS)
    # A replica that leaves ends requests that no other one can continue, for at most this long.
    drain_seconds: float = number(30.0, 0, MAX_SECONDS)
    # Requests of a lost gateway go on for this long, so that another gateway can continue them.
    orphan_seconds: float = number(ORPHAN_SECONDS, 0, MAX_SECONDS)
    # Requests wait this long for a replica, then fail.
    no_replica_seconds: float = number(30.0, 0, MAX_SECONDS)
    # Without a replica, this many requests wait; more are refused with NoReplica.
    max_waiting: int = count(1024, 0, MAX_HELD)
    # Losses after which a request runs alone on a replica: counted ones in a row, and all.
    max_replica_losses: int = count(2, 1, MAX_COUNT)
    max_total_losses: int = count(8, 1, MAX_COUNT)


@dataclass(slots=True)
class FleetCounters:
    """What has happened since the fleet started."""

    num_moves: int = 0
    num_losses: int = 0  # replicas that were lost or hung
    num_drains: int = 0
    num_resumed_tokens: int = 0  # tokens that moved requests had already generated
    resume_seconds: float = 0.0  # from sending moved requests to their next tokens, added up
    num_isolated: int = 0  # requests that ran alone on a replica after several losses
    num_failed: int = 0  # requests that no replica could continue
    num_frames: int = 0  # messages received, each with the tokens of all requests of a step
