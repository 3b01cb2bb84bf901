"""What a fleet on Ray needs to know before Ray is imported."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from headway.errors import ConfigError

# Of a Ray that this process starts. They must be set before Ray is imported.
LOCAL_ENVIRONMENT: Mapping[str, str] = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # use the loopback address, as on those systems
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_enable_metrics_collection": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # it would kill replicas when other programs use memory
    "RAY_worker_niceness": "0",  # by default 15: any other program would delay the replicas
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    # Less often than usual: on a small machine the replicas need the cores.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    "AUTOSCALER_UPDATE_INTERVAL_S": "600",
    "REPORTER_UPDATE_INTERVAL_MS": "600000",
}
ADDRESS = re.compile(r"auto|[^/]+:\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """Replicas, their resources, and the Ray that runs them."""

    replicas: int  # at the start; with `max_replicas` also the minimum
    max_replicas: int | None = None  # None: no autoscaling
    address: str | None = None  # host:port of an existing Ray, or auto; None: start one
    num_cpus: float = 1.0  # of one replica
    num_gpus: float = 0.0  # of one replica
    route: str = "prefix_load"
    name: str = ""  # of the application; empty: one that no other has
    start_seconds: float = 600.0  # for all replicas to become ready
    upscale_seconds: float = 3.0  # of load that needs another replica, until it is started
    downscale_seconds: float = 30.0  # of load that needs one replica less, until one is drained
    id: str = field(default_factory=lambda: secrets.token_hex(8))  # of this deployment
    key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", f"headway-{self.id}")
        if self.replicas < 1:
            raise ConfigError(f"--replicas must be at least 1, not {self.replicas}")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ConfigError(
                f"--max-replicas must be at least --replicas ({self.replicas}), not "
                f"{self.max_replicas}"
            )
        if self.address is not None and not ADDRESS.fullmatch(self.address):
            raise ConfigError(
                f"--ray-address {self.address}: give host:port of the cluster's GCS, or auto on a "
                "machine of the cluster; Ray Client addresses cannot carry the replicas' streams"
            )


def environment(address: str | None) -> dict[str, str]:
    """The variables for Ray: for one that this process starts, with a token of its own."""
    if address is not None:
        return {"RAY_USAGE_STATS_ENABLED": "0"}
    return {**LOCAL_ENVIRONMENT, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
