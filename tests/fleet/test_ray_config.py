"""Config files of a fleet: they are valid, and serve on a Ray cluster with two machines."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from typer.testing import CliRunner

from bench.fleet.streams import Stream, command, descendants, streams_during
from bench.harness import ROOT
from headway.cli.commands import deploy
from headway.cli.main import app
from headway.engine.async_engine import AsyncEngine
from headway.engine.input_processor import InputProcessor
from headway.fleet.settings import FleetSettings
from headway.on_ray.options import CLUSTER_ENVIRONMENT, FleetOptions
from headway.server.app import create_app
from headway.server.context import Context
from headway.server.process import shutdown
from headway.server.process.serve import ServerFactory, restored_signal_handlers
from tests.fleet.test_discovery import KEY, Listed, start
from tests.fleet.test_discovery import MODEL as LETTERS
from tests.fleet.test_ray import is_served, run
from tests.support import real
from tests.support.served import END, HIDDEN_SIZE, MODEL, VOCAB_SIZE, Capitals, letters
from tests.support.waiting import LIMIT, on_loop, until, wait_until

pytestmark = [
    pytest.mark.skipif(
        find_spec("ray") is None, reason="Ray is not installed: pip install 'headway[ray]'"
    ),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of Ray's own modules
]
CONFIG, MANIFEST = ROOT / "examples/fleet.yaml", ROOT / "examples/rayservice.yaml"
SERVE = ("-m", "ray.serve.scripts", "run", "--non-blocking", "--address")
NUM_TOKENS = 3000  # a request runs for longer than a replica waits for moves


def read_yaml(text: str) -> Any:
    import yaml  # type: ignore[import-untyped]  # Ray has it

    return yaml.safe_load(text)


def printed(*flags: str) -> Any:
    """The config that `headway deploy --print-config` prints."""
    found = CliRunner().invoke(app, ["deploy", *flags, "--print-config"])
    assert found.exit_code == 0, found.output
    return read_yaml(found.output)


def test_the_config_file_is_what_the_command_in_it_prints() -> None:
    line = next(line for line in CONFIG.read_text().splitlines() if " headway deploy " in line)
    _, _, flags = line.partition(" headway deploy ")
    assert printed(*flags.replace("--print-config", "").split()) == read_yaml(CONFIG.read_text())


def test_the_manifest_has_a_config_that_ray_accepts_with_flags_that_exist() -> None:
    from ray.serve.schema import ServeDeploySchema

    manifest = read_yaml(MANIFEST.read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayService")
    config = read_yaml(manifest["spec"]["serveConfigV2"])
    assert config == read_yaml(CONFIG.read_text())
    (application,) = ServeDeploySchema.model_validate(config).applications
    assert application.import_path == deploy.IMPORT_PATH == f"{deploy.__name__}:app"
    flags = {field.name for part in deploy.PARTS for field in fields(part)} | {"app_name"}
    assert application.args.keys() <= flags and application.args["app_name"] == application.name


def test_the_workers_of_the_manifest_have_room_for_the_replicas() -> None:
    spec = read_yaml(MANIFEST.read_text())["spec"]
    args = read_yaml(spec["serveConfigV2"])["applications"][0]["args"]
    cluster = spec["rayClusterConfig"]
    (group,) = cluster["workerGroupSpecs"]
    for each in (cluster["headGroupSpec"], group):
        (container,) = each["template"]["spec"]["containers"]
        assert container["image"].endswith(f":{cluster['rayVersion']}")
    cpus = int(container["resources"]["limits"]["cpu"])
    assert group["replicas"] * (cpus // args["threads"]) >= args["replicas"]
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}


def test_serve_gives_a_replica_the_time_that_its_requests_have() -> None:
    from headway.on_ray.serve import replica_deployment

    factory = ServerFactory(make_engine=None, make_app=None)  # type: ignore[arg-type]
    options = FleetOptions(replicas=1, settings=FleetSettings(drain_seconds=45.0))
    deployment = replica_deployment(factory, options)._bound_deployment
    assert deployment._deployment_config.graceful_shutdown_timeout_s > 45.0


def letters_app(engine: AsyncEngine, _: object) -> FastAPI:
    processor = InputProcessor(
        tokenizer=letters(), vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE,
        eos_ids=frozenset({END}),
    )  # fmt: skip
    return create_app(Context(
        engine=engine, input_processor=processor, model_name=MODEL, max_model_len=256
    ))  # fmt: skip


@on_loop
async def test_a_gateway_that_serve_stops_ends_its_streams_with_an_error_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Serve would only cut them. Its controller is not here: the gateway asks whether it stops."""
    from headway.on_ray import serve

    directory, executor, is_stopping = Listed(), Capitals(), threading.Event()
    replica = await start("a", directory, executor)
    executor.num_free_steps = 3
    directory.model = partial(pickle.dumps, (None, LETTERS))  # type: ignore[attr-defined]
    monkeypatch.setattr(serve.RayDirectory, "of", lambda _: directory)
    monkeypatch.setattr(serve, "is_stopping", is_stopping.is_set)
    monkeypatch.setattr(serve, "STOP_INTERVAL", 0.01)
    monkeypatch.setattr(shutdown, "DRAIN_TIMEOUT", 0.05)  # until requests fail that no step ends
    factory = ServerFactory(make_engine=None, make_app=letters_app, grace=0.0)  # type: ignore[arg-type]
    settings = FleetSettings(hang_seconds=LIMIT, stall_seconds=LIMIT)
    stop = serve.Gateway.__del__
    monkeypatch.delattr(serve.Gateway, "__del__")  # Serve awaits it; here Python would call it
    gateway = object.__new__(serve.Gateway)
    await gateway.__init__(factory, FleetOptions(replicas=1, key=KEY, settings=settings), None)
    transport = httpx.ASGITransport(app=gateway.__serve_build_asgi_app__())
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 9, "stream": True}
        stream = asyncio.create_task(client.post("/v1/completions", json=body))
        await until(lambda: executor.is_blocked)
        is_stopping.set()
        *tokens, error, _ = (await stream).text.removesuffix("\n\n").split("\n\n")
    assert tokens and "shutting_down" in error, (tokens, error)
    executor.gate.set()
    await stop(gateway)
    await replica.close()


def replicas(node: Any) -> list[int]:
    """The processes of replicas on a node of Ray."""
    (raylet,) = node.all_processes["raylet"]
    below = descendants(raylet.process.pid)
    return [pid for pid in below if command(pid).startswith("ray::ServeReplica:headway:Rep")]


@contextmanager
def new_cluster() -> Iterator[Any]:
    """A Ray cluster of one machine, which has the gateways; other machines can be added."""
    from ray.cluster_utils import Cluster

    own = {
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": str(LIMIT), "RAY_worker_niceness": "0",
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch, restored_signal_handlers():
        for name, value in (*CLUSTER_ENVIRONMENT.items(), *own.items()):
            patch.setenv(name, value)
        cluster = Cluster()
        try:
            add_node(cluster, num_cpus=2, resources={"gateway": 2.0}, include_dashboard=False)
            yield cluster
        finally:
            cluster.shutdown()


def has_started(client: httpx.Client) -> bool:
    time.sleep(0.2)  # it takes seconds
    return is_served(client)


def add_node(cluster: Any, **given: Any) -> Any:
    """A new machine. Ray gives it 30 s to start, which a busy computer may exceed."""
    for _ in range(3):
        with suppress(Exception):
            return cluster.add_node(**given)
    return cluster.add_node(**given)


@pytest.mark.skipif(
    not os.environ.get("HEADWAY_TEST_DEPLOY"), reason="takes a minute: make test-deploy"
)
def test_streams_outlive_a_machine_and_an_update_of_a_fleet_from_a_config_file(
    tmp_path: Path,
) -> None:
    import yaml

    model = str(real.write_tiny(tmp_path, max_position_embeddings=4096))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    flags = (
        model, "--replicas", "2", "--device", "cpu", "--threads", "1", "--port", port,
        "--fleet-hang-seconds", "20", "--route", "round_robin",
        "--grace", str(LIMIT), "--fleet-drain-seconds", str(LIMIT),
    )  # fmt: skip
    config = printed(*flags) | {"proxy_location": "HeadOnly"}
    gateway = {"name": "Gateway", "ray_actor_options": {"num_cpus": 0, "resources": {"gateway": 1}}}
    config["applications"][0]["deployments"] = [gateway]
    (tmp_path / "app.yaml").write_text(yaml.safe_dump(config))
    url = f"http://127.0.0.1:{port}"
    sent = [
        {"model": tmp_path.name, "prompt": [7, 9, number], "stream": True, "ignore_eos": True,
         "max_tokens": NUM_TOKENS, "seed": number, "temperature": number % 2}
        for number in range(1, 5)
    ]  # fmt: skip

    def streams(work: Any) -> list[Stream]:
        found = streams_during(url, sent, work, after=8)
        assert [stream.error for stream in found if stream.error] == []
        return found

    with new_cluster() as cluster, httpx.Client(base_url=url, timeout=LIMIT) as client:
        other, head = add_node(cluster, num_cpus=2), cluster.head_node
        run(*SERVE, cluster.address, str(tmp_path / "app.yaml"), environment={})
        wait_until(partial(has_started, client))
        wait_until(lambda: len(replicas(head) + replicas(other)) == 2)
        assert replicas(other), "each machine has a replica"
        before = [stream.choices for stream in streams(lambda: None)]
        remove = partial(cluster.remove_node, other, allow_graceful=False)
        assert [stream.choices for stream in streams(remove)] == before
        wait_until(lambda: len(replicas(head)) == 2)
        metrics = wait_until(lambda: client.get("/metrics").text)
        assert "headway_fleet:moves_total 0.0" not in metrics
        address = ("--ray-address", cluster.address)
        deploy = partial(run, "-m", "headway", "deploy", *address, environment={})
        update = partial(deploy, *flags, "--max-model-len", "3500", "--grace", "0")
        assert [stream.choices for stream in streams(update)] == before
        wait_until(lambda: client.get("/v1/models").json()["data"][0]["max_model_len"] == 3500)
        # These gateways have no grace.
        ended = streams_during(url, sent, partial(deploy, "--delete"), after=8)
        assert ["shutting_down" in (stream.error or "") for stream in ended] == [True] * len(sent)
