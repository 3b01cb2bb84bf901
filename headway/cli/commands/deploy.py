"""`headway deploy`: replicas and gateways on an existing Ray cluster, until they are deleted."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.cli.commands.serve import MODEL
from headway.cli.options.common import option, stderr
from headway.cli.options.fleet import FleetFlags, anywhere
from headway.cli.options.model import ServedFlags
from headway.cli.options.packages import check_extras
from headway.cli.options.serve import ServeOptions
from headway.errors import ConfigError
from headway.options import EngineOptions

if TYPE_CHECKING:
    from headway.on_ray.options import FleetOptions
    from headway.server.process.serve import ServerFactory

_deploy = partial(option, panel="Deployment")
IMPORT_PATH = "headway.cli.commands.deploy:app"


@dataclass(frozen=True, kw_only=True)
class DeployFlags:
    """Name and form of the deployment."""

    app_name: str = _deploy("headway", "Name of the Serve application.", "--name")
    delete: bool = _deploy(False, "Stop the application of this name instead.", "--delete")
    print_config: bool = _deploy(
        False, "Print a config file for `serve deploy` instead of deploying.", "--print-config"
    )
    json_output: bool = _deploy(False, "Print the result as JSON.", "--json")


def deploy_command(
    name: str | None = MODEL,
    *,
    deployment: DeployFlags,
    serving: ServeOptions,
    fleet: FleetFlags,
    model: ServedFlags,
) -> None:
    """Deploy a model on a running Ray cluster: replicas, and the server behind Serve's proxies.

    It stays when this command ends; --delete stops it. --host and --port are those of Serve's
    proxies, and --api-server-count is the number of gateways. Limits of connections have no effect.
    """
    check_extras("headway deploy", "ray", "torch", "server")
    model = replace(model, model=name or model.model)
    fleet = replace(fleet, replicas=fleet.replicas or 1, ray_address=fleet.ray_address or "auto")
    if not deployment.delete:
        _check(serving)
        model = anywhere(model)
    if deployment.print_config:
        print(config_file(deployment.app_name, serving, fleet, model))
        return
    from headway.on_ray.options import FleetOptions, prepare

    prepare(fleet.ray_address)
    if deployment.delete:
        from headway.on_ray.cluster import delete

        name = deployment.app_name
        delete(FleetOptions(replicas=1, address=fleet.ray_address, name=name))
        print(json.dumps({"name": name}) if deployment.json_output else f"{name} is deleted")
        return
    _deploy_now(deployment, serving, fleet, model)


def _check(serving: ServeOptions) -> None:
    """ConfigError for flags that have no meaning behind Serve's proxies."""
    refused = "cannot be used with headway deploy"
    if serving.port == 0:
        raise ConfigError(f"--port 0 {refused}: Serve's proxies need a port")
    if serving.engine_process is not None:
        raise ConfigError(f"--engine-process {refused}: every replica is a process")


def _deploy_now(
    deployment: DeployFlags, serving: ServeOptions, fleet: FleetFlags, model: EngineOptions
) -> None:
    from headway.on_ray.cluster import deploy

    factory, options = _server(deployment.app_name, serving, fleet, model)
    console = stderr()
    with console.status("connecting to Ray") as status:

        def show(num_ready: int) -> None:
            status.update(f"starting replicas: {num_ready} of {options.replicas} run")

        info, url = deploy(
            factory, options, show, host=serving.host, port=serving.port,
            num_gateways=serving.api_server_count,
        )  # fmt: skip
    if deployment.json_output:
        print(json.dumps({"name": options.name, "model": info.model_name, "url": url}))
        return
    console.print(f"{info.model_name} at {url}; {info.description}; --replicas {options.replicas}")
    console.print(f"Stop it with `headway deploy --delete --name {options.name}`.")


def _server(
    name: str, serving: ServeOptions, fleet: FleetFlags, model: EngineOptions
) -> tuple[ServerFactory, FleetOptions]:
    """What makes the servers, and the replicas; `fleet` has a number of them."""
    from headway.server.serving import server_factory

    options = fleet.options(model, name=name)
    assert options is not None, "--replicas has a value"
    model = replace(model, threads=fleet.threads(model))
    return server_factory(serving.options(model), fleet.loader(model)), options


PARTS: tuple[Any, ...] = (ServeOptions, FleetFlags, EngineOptions)
FILES = ("chat_template", "api_key_file")  # args that are paths


def config_file(name: str, serving: ServeOptions, fleet: FleetFlags, model: EngineOptions) -> str:
    """A config file for `serve deploy` with all flags that differ from their defaults, as JSON.

    JSON is valid YAML, which `serve deploy` reads. ConfigError if it would lack an API key.
    """
    from headway.server.settings import KEY_VARIABLE

    if os.environ.get(KEY_VARIABLE):
        raise ConfigError(
            f"{KEY_VARIABLE} is set, and a config file does not contain it; unset it and use "
            "--api-key-file with a file on the machines of the cluster"
        )
    given = {**asdict(serving), **asdict(fleet), **asdict(model)}
    usual = {key: value for kind in PARTS for key, value in asdict(kind()).items()}
    changed = {key: value for key, value in given.items() if value != usual[key]}
    args = {"app_name": name, "model": model.model, **changed, "replicas": fleet.replicas}
    args.pop("ray_address", None)
    application = {"name": name, "route_prefix": "/", "import_path": IMPORT_PATH, "args": args}
    options = {"host": serving.host, "port": serving.port}
    return json.dumps(
        {"http_options": options, "applications": [application]}, indent=2, default=str
    )


def app(args: dict[str, Any]) -> Any:
    """The application of a config file: `args` has flags of `headway deploy` as Python names.

    `app_name` must be the name of the application, so that an update keeps its requests.
    """
    args = {key: Path(value) if key in FILES else value for key, value in args.items()}
    name = str(args.pop("app_name", "headway"))
    known = {field.name: part for part in PARTS for field in fields(part)}
    unknown = sorted(set(args) - set(known))
    if unknown:
        raise ConfigError(f"unknown args: {', '.join(unknown)}; known: {', '.join(sorted(known))}")

    from headway.on_ray.serve import application

    def part(kind: type[Any]) -> Any:
        return kind(**{key: value for key, value in args.items() if known[key] is kind})

    serving, fleet, model = part(ServeOptions), part(FleetFlags), part(EngineOptions)
    fleet = replace(fleet, replicas=fleet.replicas or 1, ray_address="auto")
    factory, options = _server(name, serving, fleet, anywhere(model))
    return application(factory, options, serving.api_server_count)
