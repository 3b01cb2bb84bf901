"""The options of several replicas on Ray, and how `headway serve` starts them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.cli.options.common import option, stderr
from headway.cli.options.model import load_model, uses_gpu
from headway.cli.options.packages import check_extras
from headway.errors import ConfigError
from headway.fleet.settings import FleetSettings

if TYPE_CHECKING:
    from headway.cli.options.serve import ServeOptions
    from headway.llm import LLM
    from headway.on_ray.options import FleetOptions
    from headway.options import EngineOptions
    from headway.server.process.serve import ServerFactory

_fleet = partial(option, panel="Replicas")
DEFAULTS, PREFIX = FleetSettings(), "fleet_"
DEVICES = Path("/dev")
GPU_FILES = ("nvidia*", "nvhost*", "nvgpu*", "dxg", "kfd")  # made by the drivers of GPUs


@dataclass(frozen=True, kw_only=True)
class FleetFlags:
    """Replicas on Ray."""

    replicas: int | None = _fleet(
        None, "Run this many engines on Ray behind one server.", min=1,
        show_default="one engine, no Ray",
    )  # fmt: skip
    max_replicas: int | None = _fleet(
        None, "Add replicas up to this number while prompts wait.", show_default="no scaling"
    )
    ray_address: str | None = _fleet(
        None,
        "Use the Ray cluster at host:port; auto finds the one on this machine.",
        show_default="start a local Ray",
    )
    route: str = _fleet(
        "prefix_load", "Rule that picks the replica of a request, as in headway simulate."
    )

    # These are the fields of FleetSettings.
    fleet_hang_seconds: float = _fleet(
        DEFAULTS.hang_seconds, "A replica that sends nothing for this long is lost."
    )
    fleet_stall_seconds: float = _fleet(
        DEFAULTS.stall_seconds, "A replica with work that makes no step for this long is lost."
    )
    fleet_verdict_seconds: float = _fleet(
        DEFAULTS.verdict_seconds, "After a loss, wait this long for signs of life of the others."
    )
    fleet_drain_seconds: float = _fleet(
        DEFAULTS.drain_seconds,
        "A replica that leaves has this long to end requests that no other one can continue.",
    )
    fleet_orphan_seconds: float = _fleet(
        DEFAULTS.orphan_seconds, "Requests of a lost gateway can be resumed for this long."
    )
    fleet_no_replica_seconds: float = _fleet(
        DEFAULTS.no_replica_seconds, "Requests wait this long for a replica, then fail."
    )
    fleet_max_waiting: int = _fleet(
        DEFAULTS.max_waiting,
        "Maximum number of requests that wait for a replica; further requests get a 503.",
    )
    fleet_max_replica_losses: int = _fleet(
        DEFAULTS.max_replica_losses,
        "After losing this many replicas in a row a request runs alone on one.",
    )
    fleet_max_total_losses: int = _fleet(
        DEFAULTS.max_total_losses, "After losing this many replicas in all, too."
    )

    @property
    def settings(self) -> FleetSettings:
        """ConfigError for a value that is out of range."""
        names = [each.name for each in fields(FleetSettings)]
        return FleetSettings(**{name: getattr(self, PREFIX + name) for name in names})

    def options(self, model: EngineOptions, name: str = "") -> FleetOptions | None:
        """The fleet that the flags describe; None without --replicas. ConfigError without Ray.

        `name` is that of the application; by default one that no other has.
        """
        if self.replicas is None:
            for each in fields(self):
                value = getattr(self, each.name)
                if value != each.default:
                    raise ConfigError(f"--{each.name.replace('_', '-')} {value} needs --replicas")
            return None
        check_extras("--replicas", "ray")
        from headway.fleet.routing import parse_route
        from headway.on_ray.options import FleetOptions

        settings = self.settings  # report an error before anything starts
        parse_route(self.route)
        # Without a GPU's files torch is not imported; a gateway does not need it.
        is_possible = model.device != "auto" or any(any(DEVICES.glob(n)) for n in GPU_FILES)
        on_gpu = is_possible and uses_gpu(model.device)
        return FleetOptions(
            replicas=self.replicas, max_replicas=self.max_replicas, address=self.ray_address,
            num_cpus=1.0 if on_gpu else self._num_cpus(model),
            num_gpus=float(model.tensor_parallel_size) if on_gpu else 0.0,
            num_ranks=self._num_machines(model),
            route=self.route, name=name, settings=settings,
        )  # fmt: skip

    def check(self, serving: ServeOptions) -> None:
        """ConfigError for a flag that has no meaning with replicas."""
        if serving.engine_process is not None:
            raise ConfigError(
                f"--engine-process cannot be used with --replicas {self.replicas}: every replica is "
                "a process of its own"
            )

    def threads(self, model: EngineOptions) -> int:
        """CPU threads of each process: as given, or an equal share of this machine's cores."""
        num_processes = (self.max_replicas or self.replicas or 1) * model.tensor_parallel_size
        return model.threads or max(1, (os.cpu_count() or 1) // num_processes)

    def _num_machines(self, model: EngineOptions) -> int:
        """Those of a cluster that a replica may need: one for each rank."""
        return 1 if self.ray_address is None else model.tensor_parallel_size

    def loader(self, model: EngineOptions) -> Callable[[EngineOptions], LLM]:
        """What loads the model in a replica."""
        return load_model if self._num_machines(model) == 1 else load_on_machines

    def _num_cpus(self, model: EngineOptions) -> float:
        """What Ray reserves: the threads; less if the replicas share this machine's cores."""
        threads = self.threads(model) * model.tensor_parallel_size
        if self.ray_address is not None or model.threads is not None:
            return threads
        return min(threads, (os.cpu_count() or 1) / (self.max_replicas or self.replicas or 1))


def load_on_machines(model: EngineOptions) -> LLM:
    """Load the model in a replica whose ranks are in the bundles of its placement group."""
    from headway.on_ray.ranks import LAUNCHER

    return load_model(model, rank_launcher=LAUNCHER)


def anywhere(model: EngineOptions) -> EngineOptions:
    """The options for processes that run in other folders; ConfigError for a trace file."""
    if model.trace_out is not None:
        raise ConfigError(
            f"--trace-out {model.trace_out} cannot be used with replicas, which would all write the "
            "same file"
        )
    from headway.model.registry import BUNDLED

    template, path = model.chat_template, Path(model.model).expanduser()
    if model.model not in BUNDLED and path.exists():
        model = replace(model, model=str(path.absolute()))
    return replace(model, chat_template=template and Path(template).expanduser().absolute())


def run_fleet(
    factory: ServerFactory,
    bound: socket.socket,
    ready: Callable[[Any], None],
    options: FleetOptions,
    num_gateways: int,
) -> int:
    """Serve over replicas on Ray until a signal; return the exit status."""
    from headway.on_ray.options import prepare

    prepare(options.address)
    with stderr().status("starting Ray") as status:

        def show(num_ready: int) -> None:
            status.update(f"starting replicas: {num_ready} of {options.replicas} ready")

        def is_ready(info: Any) -> None:
            status.stop()
            ready(info)

        from headway.on_ray.gateway import serve_fleet

        return serve_fleet(factory, bound, is_ready, options, show, num_gateways)
