"""What a fleet on Ray needs to know before Ray is imported."""

from __future__ import annotations

import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from headway.errors import ConfigError
from headway.fleet.settings import FleetSettings

# Of a Ray that this process starts. They must be set before Ray is imported.
LOCAL_ENVIRONMENT: Mapping[str, str] = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # use the loopback address, as on those systems
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_enable_metrics_collection": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # it would kill replicas when other programs use memory
    "RAY_worker_niceness": "0",  # by default 15: any other program would delay the replicas
    # The GCS may end, and is started again; raylet and replicas wait for it. By default for 60 s.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "86400",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    # Less often than usual: on a small machine the replicas need the cores.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    "REPORTER_UPDATE_INTERVAL_MS": "600000",
}
# Of a Ray that exists. It answers at once, or is not there; by default Ray tries for 20 s.
CLUSTER_ENVIRONMENT: Mapping[str, str] = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_gcs_server_port_wait_time_s": "1",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "86400",  # of this process, not of the cluster
}
CONNECT_SECONDS = 3.0  # for a connection to be made, and for an answer
GONE_SECONDS = 60.0  # without an answer of the GCS: a command on an existing Ray ends
PROBE_SECONDS = 2.0  # between two questions whether it is there
HTTP2_SETTINGS = b"\4"  # the type of the first frame in both directions
HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + HTTP2_SETTINGS + b"\0" * 5
ADDRESS = re.compile(r"auto|[^/]+:\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """Replicas, their resources, and the Ray that runs them."""

    replicas: int  # at the start; with `max_replicas` also the minimum
    max_replicas: int | None = None  # None: no autoscaling
    address: str | None = None  # host:port of an existing Ray, or auto; None: start one
    num_cpus: float = 1.0  # of one replica
    num_gpus: float = 0.0  # of one replica
    num_ranks: int = 1  # bundles of a replica's placement group, for tensor parallelism
    rank_strategy: str = "PACK"  # of the placement group; STRICT_SPREAD: on different machines
    route: str = "prefix_load"
    settings: FleetSettings = field(default_factory=FleetSettings)  # of the gateways
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
    own = {**LOCAL_ENVIRONMENT, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return own if address is None else dict(CLUSTER_ENVIRONMENT)


def prepare(address: str | None) -> None:
    """Set the variables for Ray before it is imported; ConfigError if the address is not reachable.

    `auto` is looked up by Ray, and checked when it is connected.
    """
    if address not in (None, "auto"):
        check_reachable(address, address)
    os.environ.update(environment(address))


def check_reachable(address: str, given: str) -> None:
    """ConfigError unless a gRPC server answers; `given` is the value of --ray-address.

    Begins an HTTP/2 connection, as gRPC does.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS) as connection:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return  # it would not answer without TLS
            connection.sendall(HTTP2_GREETING)
            answer = connection.recv(9, socket.MSG_WAITALL)  # the header of a frame
    except TimeoutError:
        raise no_cluster(given, f"it did not answer within {CONNECT_SECONDS:g} s") from None
    except (OSError, OverflowError) as error:
        raise no_cluster(given, str(error)) from None
    if answer[3:4] != HTTP2_SETTINGS:
        raise no_cluster(given, "the server there does not speak gRPC")


def _exit(problem: str) -> None:
    print(f"error: {problem}", file=sys.stderr, flush=True)
    os._exit(2)


def end_without_gcs(address: str, end: Callable[[str], None] = _exit) -> None:
    """End this process once no GCS has answered at its address for GONE_SECONDS.

    Calls of Ray would wait for it, also those that disconnect.
    """

    def watch() -> None:
        answered, silent = time.monotonic(), 0.0
        while silent <= GONE_SECONDS:
            time.sleep(PROBE_SECONDS)
            with suppress(ConfigError):
                check_reachable(address, address)
                answered = time.monotonic()
            silent = time.monotonic() - answered
        end(
            f"Ray at {address} has not answered for {silent:.0f} s; run the command again once "
            "`ray status` works there: it may not have done all"
        )

    threading.Thread(target=watch, daemon=True).start()


def no_cluster(given: str, reason: str) -> ConfigError:
    return ConfigError(
        f"no Ray cluster answers at --ray-address {given}: {reason}; start one with `ray start "
        "--head`, set RAY_AUTH_MODE=token if it has a token, or leave --ray-address out"
    )
