"""Replicas and gateways as Ray Serve deployments.

Ray places, starts, restarts and scales replicas, checks their health, and keeps the list of them.
Requests and tokens do not go through Ray: a gateway and a replica have one TCP connection, because
a Serve call costs milliseconds. Replicas announce their address to an actor, the directory, where
any number of gateways read it; an entry outlives a restart of either side.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.schema import LoggingConfig

from headway.engine.async_engine import AsyncEngine
from headway.engine.queries import GetProblem
from headway.engine.thread_client import ThreadClient
from headway.errors import ExecutorError, HeadwayError
from headway.on_ray.directory import RayDirectory
from headway.on_ray.gateway import fleet_client
from headway.on_ray.options import FleetOptions
from headway.on_ray.private import is_stopping
from headway.on_ray.ranks import placement
from headway.on_ray.scaling import ScalingLoad, placed, replicas_needed
from headway.remote.auth import Address, Identity
from headway.remote.journal import Journal
from headway.remote.service import EngineService
from headway.server.process.serve import ServerFactory
from headway.server.process.shutdown import end_requests

ANNOUNCE_SECONDS = 5.0  # well below the directory's LEASE_SECONDS
STOP_INTERVAL = 0.2  # seconds between two looks whether Serve stops a gateway
STOP_SECONDS = 10.0  # for a replica without requests, or for the error events of a gateway
QUIET = LoggingConfig(log_level="WARNING", enable_access_log=False)
log = logging.getLogger(__name__)


class Replica:
    """One engine. Announces itself when it is ready, and drains before it stops."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, factory: ServerFactory, options: FleetOptions
    ) -> None:
        self._name = serve.get_replica_context().replica_id.unique_id
        self._address: Address | None = None  # once it is ready
        self._num_starting = 0  # replicas of the application
        self._service: EngineService | None = None
        self._drain_seconds = options.settings.drain_seconds
        self._directory = await asyncio.to_thread(RayDirectory.of, options)
        self._announcing = asyncio.create_task(self._announce())
        try:
            await self._start(factory, options)
        except Exception as error:  # the process that waits for the replicas reports it
            kind = "" if isinstance(error, HeadwayError) else f"{type(error).__name__}: "
            await self._call(self._directory.actor.fail, options.id, f"{kind}{error}")
            raise

    async def _call(self, method: Any, *arguments: Any) -> Any:
        return await asyncio.to_thread(self._directory.call, method, *arguments)

    async def _start(self, factory: ServerFactory, options: FleetOptions) -> None:
        self._teardown = factory.setup()
        self._served = served = await asyncio.to_thread(factory.make_engine)
        client = ThreadClient(served.engine, served.limits, report_load=True)
        served.prepare(client.loop)
        self._loop = client.loop
        identity = Identity(
            name=self._name, model=served.model_info.identity,
            block_size=served.engine.scheduler.config.block_size,
        )  # fmt: skip
        model = pickle.dumps((served.model_info, identity))
        await self._call(self._directory.actor.put_model, options.id, model)
        journal = Journal(options.settings.orphan_seconds)
        service = EngineService(client, identity, options.key, journal)
        self._address = await service.start((ray.util.get_node_ip_address(), 0))
        self._service = service
        await self._call(self._directory.actor.announce, self._name, self._address)

    async def _announce(self) -> None:
        """Announce this replica, also while it starts, as long as it runs."""
        while True:
            with suppress(Exception):  # the directory may be away for a while
                self._num_starting = await self._call(
                    self._directory.actor.announce, self._name, self._address
                )
            await asyncio.sleep(ANNOUNCE_SECONDS)

    async def check_health(self) -> None:
        """Raise if the engine makes no progress; Ray then replaces the replica. It cannot go on
        after it has stopped, for example with a rank: Ray replaces a process that ends at once.
        """
        if self._loop.ended is not None:
            log.error("the replica ends: %s", self._loop.ended)
            os._exit(1)
        if problem := self._loop.reply(GetProblem()).value:
            raise ExecutorError(problem)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The load that `scale` reads."""
        scheduler = self._loop.engine.scheduler
        config = scheduler.config
        waiting = sum(request.num_known - request.num_computed for request in [*scheduler.queue])
        load = ScalingLoad(
            waiting, config.max_num_batched_tokens, scheduler.num_free, config.num_blocks
        )
        return {**load._asdict(), "num_starting": self._num_starting}

    async def __del__(self) -> None:
        """Move all requests elsewhere or wait for their ends, then stop. Serve calls it before it
        ends the process.
        """
        self._announcing.cancel()
        with suppress(Exception):  # the requests must leave also if the directory is away
            await self._call(self._directory.actor.forget, self._name)
        if (service := self._service) is None:  # it did not start
            return
        await service.drain("the replica is stopping", self._drain_seconds)
        await service.close()
        self._served.close()
        self._teardown()


def scale(context: Any) -> tuple[int, dict[str, float]]:
    """Serve's autoscaling policy: see `replicas_needed` and `placed`."""
    metrics, target = context.aggregated_metrics or {}, context.target_num_replicas
    columns = [metrics.get(name, {}) for name in ScalingLoad._fields]
    running = context.running_replicas
    known = [id for id in running if all(id in column for column in columns)]
    needed, state = target, context.policy_state
    if len(known) == len(running) > 0:
        found = replicas_needed([ScalingLoad(*(c[id] for c in columns)) for id in known])
        needed = found if found != len(running) else target  # the load asks for no change
    num_starting = max(metrics.get("num_starting", {}).values(), default=0)
    num_placed = len(running) + int(num_starting)
    return placed(needed, target, num_placed, state, context.current_time)


def replica_deployment(factory: ServerFactory, options: FleetOptions) -> Any:
    """The Serve application of the replicas alone."""
    count: dict[str, object] = {"num_replicas": options.replicas}
    if options.max_replicas is not None:
        scaling = AutoscalingConfig(
            min_replicas=options.replicas, max_replicas=options.max_replicas,
            policy=AutoscalingPolicy(policy_function=scale), metrics_interval_s=1.0,
            look_back_period_s=2.0, upscale_delay_s=options.upscale_seconds,
            downscale_delay_s=options.downscale_seconds,
        )  # fmt: skip
        count = {"autoscaling_config": scaling}
    deployment = serve.deployment(
        Replica, name="Replica", **count,
        **placement(options),
        health_check_period_s=2.0, health_check_timeout_s=5.0, graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=options.settings.drain_seconds + STOP_SECONDS,
        max_constructor_retry_count=3, logging_config=QUIET,
    )  # fmt: skip
    return deployment.bind(factory, options)


def wait_until_ready(
    directory: RayDirectory,
    options: FleetOptions,
    num_ready: Callable[[], int],
    on_ready: Callable[[int], None] = lambda _: None,
) -> bytes:
    """The pickled model once `num_ready` replicas are all; ExecutorError if one cannot start."""
    ends_at, known = time.monotonic() + options.start_seconds, -1
    while True:
        if (now_ready := num_ready()) != known:
            known = now_ready
            on_ready(known)
        if known >= options.replicas and (model := directory.model()) is not None:
            return model
        if (error := directory.read().error) is not None:
            raise ExecutorError(f"a replica cannot start: {error}")
        if time.monotonic() > ends_at:
            raise ExecutorError(
                f"{known} of {options.replicas} replicas became ready within "
                f"{options.start_seconds:g} s; {status(options.name)}"
            )
        time.sleep(0.1)


def num_running(options: FleetOptions) -> int:
    """Replicas of an application that Serve has started; all once the gateways run, too."""
    found = serve.status().applications.get(options.name)
    if found is None or found.status == "DEPLOY_FAILED":
        raise ExecutorError(f"{options.name!r} could not be deployed: {status(options.name)}")
    if found.status == "RUNNING":
        return options.replicas
    states = found.deployments["Replica"].replica_states if found.deployments else {}
    return min(int(states.get("RUNNING", 0)), options.replicas - 1)


def status(app: str) -> str:
    """What Serve says about the replicas, in one line."""
    found = serve.status().applications.get(app)
    deployment = found.deployments.get("Replica") if found is not None else None
    said = deployment.message if deployment is not None else "Serve does not know the application"
    return " ".join(said.split())[:500]


class Gateway:
    """The HTTP server of a fleet, behind Serve's proxies."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, factory: ServerFactory, options: FleetOptions, replicas: Any
    ) -> None:
        """`replicas` is unused; it makes Serve start the replicas with the gateway."""
        directory = await asyncio.to_thread(RayDirectory.of, options)
        async with asyncio.timeout(options.start_seconds):
            while (model := await asyncio.to_thread(directory.model)) is None:
                await asyncio.sleep(0.1)
        info, identity = pickle.loads(model)
        self._engine = AsyncEngine(fleet_client(directory, identity, options))
        await self._engine.start()
        self._app = factory.make_app(self._engine, info)
        self._stopping = asyncio.create_task(self._stop(factory.grace))

    async def _stop(self, grace: float) -> None:
        """End the streams that are still open `grace` seconds after Serve has begun to stop this
        gateway, each with an error event. Serve would only cut them.
        """
        while not is_stopping():
            await asyncio.sleep(STOP_INTERVAL)
        await asyncio.sleep(grace)
        await end_requests(self._engine)

    def __serve_build_asgi_app__(self) -> Any:
        return self._app

    async def __del__(self) -> None:
        if hasattr(self, "_stopping"):  # it did start
            self._stopping.cancel()
            await self._engine.close()


def application(factory: ServerFactory, options: FleetOptions, num_gateways: int = 1) -> Any:
    """A Serve application with replicas and gateways, for `serve.run` or a config file.

    All deployments of the application have one key, so that the gateways of one can use the
    replicas of another.
    """
    options = replace(options, key=RayDirectory.of(options).key)
    gateway = serve.deployment(
        serve.ingress()(Gateway), name="Gateway", num_replicas=num_gateways,
        ray_actor_options={"num_cpus": 0.0}, max_ongoing_requests=10_000,
        health_check_period_s=2.0, health_check_timeout_s=5.0, logging_config=QUIET,
        graceful_shutdown_timeout_s=factory.grace + STOP_SECONDS,
    )  # fmt: skip
    return gateway.bind(factory, options, replica_deployment(factory, options))
