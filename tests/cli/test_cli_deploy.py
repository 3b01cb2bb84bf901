"""Flags of replicas on Ray: what is refused before anything starts, and config files."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from headway.cli.commands.deploy import app as deployed_app
from headway.cli.main import app
from headway.cli.options import fleet
from headway.errors import ConfigError, ExecutorError
from headway.model import devices
from headway.on_ray.gateway import Published
from headway.on_ray.options import (
    HTTP2_SETTINGS,
    FleetOptions,
    check_reachable,
    end_without_gcs,
)
from headway.options import EngineOptions
from tests.support.waiting import LIMIT

# Ray's own modules use old features of pydantic.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def problem(*arguments: str) -> str:
    """The sentence with which a command ends."""
    found = CliRunner().invoke(app, list(arguments))
    assert isinstance(found.exception, ConfigError), found.output
    assert "\n" not in str(found.exception)
    return str(found.exception)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--replicas", "0"), ("--replicas 0", "1")),
        (("--max-replicas", "3"), ("--max-replicas 3", "--replicas")),
        (("--ray-address", "auto"), ("--ray-address auto", "--replicas")),
        (("--replicas", "3", "--max-replicas", "2"), ("--max-replicas", "3", "2")),
        (("--replicas", "2", "--route", "nearest"), ("nearest", "prefix_load", "round_robin")),
        (("--replicas", "2", "--ray-address", "ray://host:1"), ("ray://host:1", "host:port")),
        (("--replicas", "2", "--ray-address", "nowhere"), ("nowhere", "host:port")),
        (("--replicas", "2", "--engine-process"), ("--engine-process", "--replicas 2")),
        (("--replicas", "2", "--trace-out", "t.jsonl"), ("--trace-out t.jsonl", "replicas")),
    ],
)
def test_wrong_flags_are_refused_in_one_sentence(
    flags: tuple[str, ...], words: tuple[str, ...]
) -> None:
    said = problem("serve", "--device", "cpu", *flags)
    assert all(word in said for word in words), said


@pytest.mark.parametrize("flags", [("--port", "0"), ("--engine-process",)])
def test_flags_without_meaning_behind_proxies_are_refused(flags: tuple[str, ...]) -> None:
    assert " ".join(flags) in problem("deploy", *flags)


@pytest.mark.parametrize("command", [("serve", "--replicas", "2"), ("deploy",)])
def test_without_ray_the_command_says_how_to_install_it(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    said = problem(*command)
    assert "ray" in said and "pip install" in said


@pytest.mark.parametrize(
    ("files", "problem", "num_gpus"), [((), None, 0), (("nvidia0",), None, 2), (("kfd",), "old", 0)]
)
def test_a_replica_gets_gpus_where_torch_can_use_them(
    files: tuple[str, ...],
    problem: str | None,
    num_gpus: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch is asked only if a driver has made its files."""
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.setattr(fleet, "DEVICES", tmp_path)
    monkeypatch.setattr(devices, "why_no_cuda", lambda: problem)
    options = fleet.FleetFlags(replicas=1).options(EngineOptions(tensor_parallel_size=2))
    assert options is not None and options.num_gpus == num_gpus


def test_a_config_file_has_the_flags_that_were_given() -> None:
    flags = ["--replicas", "2", "--max-num-seqs", "8", "--port", "9000", "--name", "mine"]
    found = CliRunner().invoke(app, ["deploy", "qwen", *flags, "--print-config"])
    assert found.exit_code == 0, found.output
    written = json.loads(found.output)
    (application,) = written["applications"]
    assert written["http_options"]["port"] == 9000 and application["name"] == "mine"
    assert application["args"] == {
        "app_name": "mine", "model": "qwen", "replicas": 2, "max_num_seqs": 8, "port": 9000,
    }  # fmt: skip


def test_replicas_get_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may run in another folder. Their config file is read as it was written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    flags = ["--chat-template", "chat.jinja", "--api-key-file", "keys"]
    found = CliRunner().invoke(app, ["deploy", "tiny", *flags, "--print-config"])
    (application,) = json.loads(found.output)["applications"]
    args = application["args"]
    assert args["model"] == str(tmp_path / "tiny")
    assert args["chat_template"] == str(tmp_path / "chat.jinja")
    (tmp_path / "keys").write_text("secret\n")
    ray_serve = pytest.importorskip("headway.on_ray.serve")
    monkeypatch.setattr(ray_serve, "application", lambda factory, options, gateways: factory)
    assert deployed_app(args).settings.api_keys == ("secret",)


def test_a_config_file_does_not_lose_the_key_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HEADWAY_API_KEY", "secret")
    said = problem("deploy", "--print-config")
    assert "HEADWAY_API_KEY" in said and "--api-key-file" in said and "secret" not in said


def test_a_config_file_with_an_unknown_flag_is_refused() -> None:
    with pytest.raises(ConfigError, match="replica_count.*known: .*replicas"):
        deployed_app({"model": "qwen", "replica_count": 2})


@dataclass
class NoReplicas:
    """A directory in which no replica is announced."""

    error: str | None = None

    def read(self) -> Published:
        return Published(replicas={}, error=self.error)


def test_replicas_that_do_not_start_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    ray_serve = pytest.importorskip("headway.on_ray.serve")
    monkeypatch.setattr(ray_serve, "status", lambda app: "waiting for 2 CPUs")
    options = FleetOptions(replicas=2, start_seconds=0.01)
    with pytest.raises(ExecutorError, match="1 of 2 replicas.*0.01 s; waiting for 2 CPUs"):
        ray_serve.wait_until_ready(NoReplicas(), options, lambda: 1)
    with pytest.raises(ExecutorError, match="a replica cannot start: no model 'x'"):
        ray_serve.wait_until_ready(NoReplicas("no model 'x'"), options, lambda: 0)


@contextmanager
def listening(answer: bytes) -> Iterator[str]:
    """The address of a server that is not Ray; without an answer, it stays silent."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError):
                connection, _ = server.accept()
                with connection:
                    connection.recv(100)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        if answer:
            thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        if answer:
            thread.join()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:99999", "no.such.host.invalid:6379"])
def test_an_address_without_ray_is_named(address: str) -> None:
    options = ("--device", "cpu", "--port", "0", "--replicas", "1", "--ray-address", address)
    said = problem("serve", *options)
    assert f"--ray-address {address}: " in said and "ray start" in said


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_a_server_that_is_not_ray_is_named(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.on_ray.options.CONNECT_SECONDS", LIMIT if answer else 0.5)
    with listening(answer) as address, pytest.raises(ConfigError) as refused:
        check_reachable(address, address)
    reason = "gRPC" if answer else "within 0.5 s"
    assert f"--ray-address {address}: " in str(refused.value) and reason in str(refused.value)


def test_a_server_that_speaks_grpc_is_reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.on_ray.options.CONNECT_SECONDS", LIMIT)
    with listening(b"\0\0\0" + HTTP2_SETTINGS + b"\0" * 5) as address:
        check_reachable(address, address)


def test_a_command_ends_with_an_error_when_its_ray_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("CONNECT", LIMIT), ("GONE", 0.01), ("PROBE", 0.01)):
        monkeypatch.setattr(f"headway.on_ray.options.{name}_SECONDS", seconds)
    ended = Queue[str]()
    with listening(b"\0\0\0" + HTTP2_SETTINGS + b"\0" * 5) as address:
        end_without_gcs(address, ended.put)
    assert f"Ray at {address} has not answered for 0 s" in ended.get(timeout=LIMIT)


def test_auto_names_the_address_of_a_ray_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ray_cluster = pytest.importorskip("headway.on_ray.cluster")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with (
        pytest.raises(ConfigError, match="--ray-address auto: .*ray start"),
        ray_cluster.connected("auto"),
    ):
        pass


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"num_cpus": 2.0}, ("--replicas 3 needs 6 CPUs", "4 free of 8", "--threads")),
        ({"num_gpus": 1.0}, ("--replicas 3 needs 3 GPUs", "1 free of 2", "--device cpu")),
    ],
)
def test_too_few_cpus_or_gpus_are_named(
    asked: dict[str, float], words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    ray_cluster = pytest.importorskip("headway.on_ray.cluster")
    resources = {
        "cluster_resources": {"CPU": 8.0, "GPU": 2.0},
        "available_resources": {"CPU": 4.0, "GPU": 1.0},
    }
    for name, found in resources.items():
        monkeypatch.setattr(ray_cluster.ray, name, lambda found=found: found)
    monkeypatch.setattr(ray_cluster.serve, "status", lambda: SimpleNamespace(applications={}))
    with pytest.raises(ConfigError) as refused:
        ray_cluster.check_resources(FleetOptions(replicas=3, **asked))
    assert all(word in str(refused.value) for word in words), refused.value


def test_another_application_in_the_same_place_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ray_cluster = pytest.importorskip("headway.on_ray.cluster")

    def refuse(*_: object, **__: object) -> None:
        text = 'Prefix / is being used by application "old".'
        raise ray_cluster.RayServeException(f"trace\nray.RayServeException: {text}")

    monkeypatch.setattr(ray_cluster.serve, "run_many", refuse)
    with pytest.raises(ConfigError, match=r'^--name new .*application "old"\. .*--delete$'):
        ray_cluster.run(None, FleetOptions(replicas=1, name="new"), "/")


@pytest.mark.parametrize(
    ("proxies", "words"), [({}, ("without HTTP proxies",)), ({"node": 1}, ("8000", "9000"))]
)
def test_proxies_that_are_off_or_elsewhere_are_reported(
    proxies: dict[str, int], words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    ray_cluster = pytest.importorskip("headway.on_ray.cluster")
    monkeypatch.setattr(ray_cluster.private, "proxy_address", lambda: ("127.0.0.1", 9000))
    status = SimpleNamespace(proxies=proxies)
    monkeypatch.setattr(ray_cluster.serve, "status", lambda: status)
    with pytest.raises(ConfigError) as refused:
        ray_cluster._proxy_url("127.0.0.1", 8000)
    assert all(word in str(refused.value) for word in ("serve shutdown", *words))
    status.proxies = {"node": 1}
    assert ray_cluster._proxy_url("127.0.0.1", 9000) == "http://127.0.0.1:9000"


def test_a_ray_that_starts_too_slowly_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = pytest.importorskip("headway.on_ray.keeper")
    private = pytest.importorskip("headway.on_ray.private")
    slow = Exception("The current node timed out during startup. This could happen because ...")
    problems: list[Exception | None] = []
    ended: list[int] = []

    def start(folder: str) -> object:
        if problem := problems.pop(0):
            raise problem
        return private.PrivateRay(address="::1:1", gcs=1, raylet=1, command=[], folder=folder)

    monkeypatch.setattr(keeper, "start", start)
    monkeypatch.setattr(keeper, "end_all", lambda *_: ended.append(len(problems)))
    kept = keeper.Keeper(tmp_path, None, FleetOptions(replicas=1))
    for given in ([slow] * 9, [ValueError("no folder"), None]):
        problems[:] = given
        with pytest.raises(type(given[0])):
            kept._address()
        assert len(problems) == (5 if given[0] is slow else 1)
    ended.clear()
    problems[:] = [slow, slow, None]
    assert kept._address() == "::1:1"
    assert not problems and ended == [2, 1]  # what had begun is ended before the next attempt
