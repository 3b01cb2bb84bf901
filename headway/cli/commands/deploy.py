"""`headway deploy`: replicas and gateways on an existing Ray cluster, until they are deleted."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from headway.cli.commands.serve import Model, make_factory
from headway.cli.options.common import panel, spread
from headway.cli.options.fleet import FleetFlags, anywhere
from headway.cli.options.model import ModelOptions
from headway.cli.options.packages import check_extras
from headway.cli.options.serve import ServeOptions
from headway.errors import ConfigError

_deploy = panel("Deployment")
IMPORT_PATH = "headway.cli.commands.deploy:app"


@dataclass(frozen=True, kw_only=True)
class DeployFlags:
    """Name and form of the deployment."""

    app_name: Annotated[str, _deploy("Name of the Serve application.", "--name")] = "headway"
    delete: Annotated[bool, _deploy("Stop the application of this name instead.", "--delete")] = (
        False
    )
    print_config: Annotated[
        bool,
        _deploy("Print a config file for `serve deploy` instead of deploying.", "--print-config"),
    ] = False
    json_output: Annotated[bool, _deploy("Print the result as JSON.", "--json")] = False


@spread
def deploy_command(
    name: Model = None,
    *,
    deployment: DeployFlags,
    serving: ServeOptions,
    fleet: FleetFlags,
    model: ModelOptions,
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
        serving, model = anywhere(serving, model)
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
    if serving.port == 0:
        raise ConfigError(
            "--port 0 cannot be used with headway deploy: Serve's proxies need a port"
        )
    if serving.engine_process is not None:
        raise ConfigError(
            "--engine-process cannot be used with headway deploy: every replica is a process"
        )


def _deploy_now(
    deployment: DeployFlags, serving: ServeOptions, fleet: FleetFlags, model: ModelOptions
) -> None:
    from headway.on_ray.cluster import deploy

    options = fleet.options(model, name=deployment.app_name)
    assert options is not None, "--replicas has a value"
    model = replace(model, threads=fleet.threads(model))
    factory = make_factory(serving, model, serving.settings())
    console = Console(stderr=True, highlight=False, soft_wrap=True)
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


PARTS: tuple[Any, ...] = (ServeOptions, FleetFlags, ModelOptions)
FILES = ("chat_template", "api_key_file")  # args that are paths


def config_file(name: str, serving: ServeOptions, fleet: FleetFlags, model: ModelOptions) -> str:
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

    from headway.on_ray.serve import application, shared

    def part(kind: type[Any]) -> Any:
        return kind(**{key: value for key, value in args.items() if known[key] is kind})

    serving, fleet, model = part(ServeOptions), part(FleetFlags), part(ModelOptions)
    fleet = replace(fleet, replicas=fleet.replicas or 1, ray_address="auto")
    options = fleet.options(model, name=name)
    assert options is not None, "replicas has a value"
    serving, model = anywhere(serving, replace(model, threads=fleet.threads(model)))
    return application(
        make_factory(serving, model, serving.settings()), shared(options), serving.api_server_count
    )
