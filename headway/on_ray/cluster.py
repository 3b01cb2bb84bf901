"""A local Ray, or an existing one: connecting, starting replicas, serving, and ending all of it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import ray
from ray import serve
from ray._private import node, services, utils
from ray.serve.context import _get_global_client as get_client
from ray.serve.exceptions import RayServeException

from headway.errors import ConfigError
from headway.on_ray.directory import NAMESPACE, RayDirectory
from headway.on_ray.options import FleetOptions, check_reachable, no_cluster
from headway.on_ray.reaper import reaper
from headway.on_ray.serve import (
    QUIET,
    application,
    gateway_engine,
    num_running,
    replica_deployment,
    shared,
    wait_until_ready,
)
from headway.server.http.connection_table import Listener
from headway.server.process.serve import (
    Ready,
    ServerFactory,
    install_signal_handlers,
    restored_signal_handlers,
    serve_http,
)

OBJECT_STORE_BYTES = 80 << 20  # close to Ray's minimum; no tokens or weights go through it
START_ATTEMPTS = 4  # Ray gives its processes 30 s, which a busy machine may exceed
SLOW_START = "timed out during startup"  # in the message of Ray's exception


@contextmanager
def connected(options: FleetOptions) -> Iterator[None]:
    """Connect to a Ray, or start one that ends with this context and with this process."""
    with ExitStack() as stack:
        handle_sigterm = stack.enter_context(_ended_by_sigterm())
        if options.address is None:
            files = TemporaryDirectory(prefix="headway-ray-", ignore_cleanup_errors=True)
            folder = stack.enter_context(files)
            stack.enter_context(reaper(folder))
        stack.callback(ray.shutdown)
        _start(folder) if options.address is None else _connect(options.address)
        handle_sigterm()  # Ray's C++ code has replaced the handler by one that prints a stack trace
        logging.setLogRecordFactory(logging.LogRecord)  # Ray's adds a field to every line
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        yield


@contextmanager
def _ended_by_sigterm() -> Iterator[Callable[[], object]]:
    """End this process at SIGTERM as an exception does, so that all that was started ends.

    Ray would install a handler of its own, and its calls raise KeyboardInterrupt whatever a handler
    raises. Yields a function that installs the handler again.
    """
    received = list[int]()

    def end(number: int, _: object) -> NoReturn:
        received.append(128 + number)
        sys.exit(received[0])

    install, before = utils.set_sigterm_handler, signal.signal(signal.SIGTERM, end)
    utils.set_sigterm_handler = lambda _: None
    try:
        yield partial(signal.signal, signal.SIGTERM, end)
    except (KeyboardInterrupt, SystemExit):
        if received:
            sys.exit(received[0])
        raise
    finally:
        utils.set_sigterm_handler = install
        signal.signal(signal.SIGTERM, before)


def _start(folder: str) -> None:
    """Start a Ray on this machine, with its files in a private folder; again if it was too slow."""
    for num_left in reversed(range(START_ATTEMPTS)):
        try:
            with _fewer_processes():
                ray.init(
                    address="local", num_cpus=os.cpu_count() or 1, include_dashboard=False,
                    _temp_dir=folder, object_store_memory=OBJECT_STORE_BYTES, log_to_driver=False,
                    configure_logging=False, namespace=NAMESPACE,
                )  # fmt: skip
            return
        except Exception as error:
            ray.shutdown()
            if not num_left or SLOW_START not in str(error):
                raise


class _SmallNode(node.Node):  # type: ignore[misc]  # Ray has no types
    """A Ray without three processes that do nothing here and that `ray.init` waits for."""

    def start_monitor(self) -> None:
        """No autoscaler: there is one machine."""

    def start_log_monitor(self) -> None:
        """No copies of log lines: they are only read from the files."""

    def start_api_server(self, **_: Any) -> None:
        """No dashboard process: without its pages it only sends usage statistics."""


@contextmanager
def _fewer_processes() -> Iterator[None]:
    """`ray.init` has no arguments for it. In another version of Ray this may have no effect."""
    usual, node.Node = node.Node, _SmallNode
    try:
        yield
    finally:
        node.Node = usual


def _connect(address: str) -> None:
    try:
        if address == "auto":
            check_reachable(services.get_ray_address_from_environment(address, None), address)
        ray.init(address=address, log_to_driver=False, configure_logging=False, namespace=NAMESPACE)
    except (OSError, RuntimeError, ValueError) as error:
        raise no_cluster(address, str(error).strip().splitlines()[0]) from None


def _check_resources(options: FleetOptions) -> None:
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


def _run(app: Any, options: FleetOptions, route_prefix: str | None) -> None:
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


def _remove(directory: RayDirectory, *, stops_serve: bool) -> None:
    """Delete an application; `stops_serve`: also Serve, unless it has other applications by now."""
    with suppress(Exception):  # it may not be there yet
        serve.delete(directory.app)
    with suppress(Exception):
        directory.clear()
        if stops_serve and not serve.status().applications:
            serve.shutdown()


def _serve_is_running() -> bool:
    try:
        ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        return False
    return True


def serve_fleet(
    factory: ServerFactory,
    bound: socket.socket,
    ready: Ready,
    options: FleetOptions,
    on_ready: Callable[[int], None],
) -> int:
    """Serve over replicas on the connected Ray until a signal; return the exit status.

    `on_ready` gets the number of replicas that are ready, each time it changes.
    """
    with restored_signal_handlers():
        _check_resources(options)
        directory, was_running = RayDirectory.of(options), _serve_is_running()
        try:
            serve.start(proxy_location="Disabled", logging_config=QUIET)
            _run(replica_deployment(factory, options), options, route_prefix=None)
            num_ready = directory.num_announced
            info, identity = wait_until_ready(directory, options, num_ready, on_ready)
            engine = gateway_engine(directory, identity, options)
            serving = serve_http(
                factory, engine, info, Listener(fileno=bound.detach()), ready=ready,
                on_start=partial(install_signal_handlers, factory.grace),
            )  # fmt: skip
            asyncio.run(serving)
        finally:
            if options.address is not None:  # a local Ray ends anyway
                _remove(directory, stops_serve=not was_running)
    return 0


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
    with connected(options):
        _check_resources(options)
        was_running, is_new = _serve_is_running(), options.name not in serve.status().applications
        if not was_running:
            serve.start(proxy_location="EveryNode", http_options={"host": host, "port": port})
        options = shared(options)
        directory = RayDirectory.of(options)
        try:
            url = _proxy_url(host, port)
            _run(application(factory, options, num_gateways), options, route_prefix="/")
            info, _ = wait_until_ready(directory, options, partial(num_running, options), on_ready)
        except BaseException:
            if is_new:
                _remove(directory, stops_serve=not was_running)
            raise
        return info, url


def _proxy_url(host: str, port: int) -> str:
    """The URL of Serve's proxies; ConfigError if it has none, or others than asked for."""
    found = get_client().http_config
    if not serve.status().proxies:
        raise ConfigError(
            "Serve runs on this cluster without HTTP proxies, so gateways cannot be reached; stop "
            "it with `serve shutdown` first, or use `headway serve --ray-address`"
        )
    if (found.host, found.port) != (host, port):
        raise ConfigError(
            f"--host {host} --port {port}: Serve runs on this cluster with its proxies at "
            f"{found.host}:{found.port}; give these, or stop Serve with `serve shutdown` first"
        )
    return f"http://{host}:{port}"


def delete(options: FleetOptions) -> None:
    """Stop a deployed application; ConfigError if there is none of this name."""
    with connected(options):
        found = serve.status().applications
        if options.name not in found:
            known = ", ".join(found) or "none"
            raise ConfigError(f"no application {options.name!r} is deployed; deployed: {known}")
        serve.delete(options.name)
        RayDirectory.of(options).clear()
