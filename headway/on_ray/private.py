"""All that Headway uses of Ray without a promise of Ray; so pyproject.toml allows only Ray 2.60.

There is no public way to start a Ray without a dashboard process, to start only its GCS again, to
ask which proxies Serve has, or to learn while requests are open that Serve stops a replica. tests/fleet/test_ray.py covers all of it.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace
from ray._private import node, parameter, services, worker
from ray.serve.context import _get_global_client

OBJECT_STORE_BYTES = 80 << 20  # close to Ray's minimum; no tokens or weights go through it
PORT = "--gcs_server_port="


class PrivateRay(Struct, frozen=True, kw_only=True):
    """A Ray of one machine, as a file can describe it to a later process."""

    address: str  # of the GCS
    gcs: int  # process id
    raylet: int  # process id
    command: list[str]  # of the GCS
    folder: str  # of its files, and of the state of the GCS

    def restart_gcs(self) -> PrivateRay:
        """Start the GCS again at its address and with its state, in place of one that has ended."""
        command = [PORT + self.address.rpartition(":")[2] if word.startswith(PORT) else word
                   for word in self.command]  # fmt: skip
        process = subprocess.Popen(
            command, env={**os.environ, **_storage(self.folder)}, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        return replace(self, gcs=process.pid)


class _SmallNode(node.Node):  # type: ignore[misc]  # Ray has no types
    def start_api_server(self, **_: Any) -> None:
        """No dashboard process: without its pages it only sends usage statistics."""


def _storage(folder: str) -> dict[str, str]:
    return {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": f"{folder}/gcs"}


def start(folder: str) -> PrivateRay:
    """Start a Ray on the loopback address, which this process does not take with it.

    Its GCS keeps its state in the folder, which Ray makes writable for all users. It has no
    autoscaler, and no process that copies log lines.
    """
    os.environ.update(_storage(folder))
    parameters = parameter.RayParams(
        node_ip_address="127.0.0.1", num_cpus=os.cpu_count() or 1, include_dashboard=False,
        no_monitor=True, include_log_monitor=False, temp_dir=folder, object_store_memory=OBJECT_STORE_BYTES,
    )  # fmt: skip
    started = _SmallNode(parameters, head=True, shutdown_at_exit=False, spawn_reaper=False)
    gcs, raylet = (started.all_processes[kind][0].process for kind in ("gcs_server", "raylet"))
    return PrivateRay(
        address=started.address, gcs=gcs.pid, raylet=raylet.pid, command=list(gcs.args),
        folder=folder,
    )  # fmt: skip


def is_running(pid: int) -> bool:
    """Whether a process runs; not if it has ended and only its parent has not noticed."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def find_address() -> str:
    """The address of the Ray on this machine. ConnectionError if there is none."""
    return str(services.get_ray_address_from_environment("auto", None))


def is_stopping() -> bool:
    """Whether Serve stops the replica that this process is. Serve calls it only without requests."""
    actors = worker.global_worker.actors.values()
    return any(actor._replica_impl._shutting_down for actor in actors)


def proxy_address() -> tuple[str, int]:
    """Host and port of Serve's HTTP proxies."""
    found = _get_global_client().http_config
    return found.host, found.port
