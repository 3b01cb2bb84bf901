"""An existing Ray: connecting, deploying replicas and gateways, and removing them."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import ray
from ray import serve
from ray.serve.exceptions import RayServeException

from headway.errors import ConfigError
from headway.on_ray import private
from headway.on_ray.directory import NAMESPACE, RayDirectory
from headway.on_ray.options import FleetOptions, check_reachable, end_without_gcs, no_cluster
from headway.on_ray.serve import QUIET, application, num_running, wait_until_ready
from headway.server.process.serve import ServerFactory


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Connect to a Ray; ConfigError if there is none."""
    try:
        if address == "auto":
            check_reachable(private.find_address(), address)
        ray.init(address=address, log_to_driver=False, configure_logging=False, namespace=NAMESPACE)
    except (OSError, RuntimeError, ValueError) as error:
        raise no_cluster(address, str(error).strip().splitlines()[0]) from None
    logging.setLogRecordFactory(logging.LogRecord)  # Ray's adds a field to every line
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        yield
    finally:
        ray.shutdown()


def check_resources(options: FleetOptions) -> None:
    """ConfigError if the replicas do not fit into what is free, or those of their app have."""
    total = ray.cluster_resources()
    is_update = options.name in serve.status().applications
    have = total if is_update else ray.available_resources()
    for what, each in (("GPU", options.num_gpus), ("CPU", options.num_cpus)):
        needed, free = each * options.replicas, have.get(what, 0.0)
        if needed > free + 1e-6:
            flag = "--threads or --replicas" if what == "CPU" else "--replicas or use --device cpu"
            raise ConfigError(
                f"--replicas {options.replicas} needs {needed:g} {what}s ({each:g} each), but Ray "
                f"has {free:g} free of {total.get(what, 0.0):g}; lower {flag}"
            )


def run(app: Any, options: FleetOptions, route_prefix: str | None) -> None:
    """Start or update an application; ConfigError if another one is in its place."""
    target = serve.RunTarget(app, options.name, route_prefix, QUIET)
    try:
        serve.run_many([target], wait_for_applications_running=False)
    except RayServeException as error:
        reason = str(error).strip().splitlines()[-1].partition("Exception: ")[2]
        raise ConfigError(
            f"--name {options.name} cannot be deployed: {reason or error} Use the name of the other "
            "application to update it, or stop it with --delete"
        ) from None


def remove(name: str, directory: RayDirectory, *, stops_serve: bool) -> None:
    """Delete an application; `stops_serve`: also Serve, unless it has other applications by now."""
    with suppress(Exception):  # it may not be there yet
        serve.delete(name)
    with suppress(Exception):
        ray.kill(directory.actor)
        if stops_serve and not serve.status().applications:
            serve.shutdown()


def serve_is_used() -> bool:
    """Whether Serve has applications or proxies. Without both it can be started again or stopped."""
    found = serve.status()
    return bool(found.applications or found.proxies)


def deploy(
    factory: ServerFactory,
    options: FleetOptions,
    on_ready: Callable[[int], None],
    *,
    host: str,
    port: int,
    num_gateways: int,
) -> tuple[Any, str]:
    """Deploy replicas and gateways on an existing Ray; the model info and the URL.

    They stay when this process ends. An application of the same name is updated. `host` and `port`
    are those of Serve's proxies; ConfigError if Serve already runs with others.
    """
    with connected(options.address or "auto"):
        end_without_gcs(ray.get_runtime_context().gcs_address)
        check_resources(options)
        was_running, is_new = serve_is_used(), options.name not in serve.status().applications
        if not was_running:
            serve.start(proxy_location="EveryNode", http_options={"host": host, "port": port})
        directory = RayDirectory.of(options)
        try:
            url = _proxy_url(host, port)
            run(application(factory, options, num_gateways), options, route_prefix="/")
            model = wait_until_ready(directory, options, partial(num_running, options), on_ready)
        except BaseException:
            if is_new:
                remove(options.name, directory, stops_serve=not was_running)
            raise
        return pickle.loads(model)[0], url


def _proxy_url(host: str, port: int) -> str:
    """The URL of Serve's proxies; ConfigError if it has none, or others than asked for."""
    if not serve.status().proxies:
        raise ConfigError(
            "Serve runs on this cluster without HTTP proxies, so gateways cannot be reached; stop "
            "it with `serve shutdown` first, or use `headway serve --ray-address`"
        )
    if (found := private.proxy_address()) != (host, port):
        raise ConfigError(
            f"--host {host} --port {port}: Serve runs on this cluster with its proxies at "
            f"{found[0]}:{found[1]}; give these, or stop Serve with `serve shutdown` first"
        )
    return f"http://{host}:{port}"


def delete(options: FleetOptions) -> None:
    """Stop a deployed application; ConfigError if there is none of this name."""
    with connected(options.address or "auto"):
        end_without_gcs(ray.get_runtime_context().gcs_address)
        found = serve.status().applications
        if options.name not in found:
            known = ", ".join(found) or "none"
            raise ConfigError(f"no application {options.name!r} is deployed; deployed: {known}")
        with suppress(TimeoutError):  # requests that are open may need longer
            serve.delete(options.name)
        ray.kill(RayDirectory.of(options).actor)
