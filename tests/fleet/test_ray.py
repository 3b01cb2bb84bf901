"""Replicas on a real Ray: kills, hangs, scaling, monitoring, and what is left at the end.

One test, because it starts Ray once. Most engines have no model, so that a replica starts in few
seconds; the others have a small one. bench/fleet/replicas.py repeats the kills with SmolLM2.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from bench.fleet.streams import (
    ROOT,
    FleetServer,
    Stream,
    all_streams,
    bodies,
    command,
    descendants,
    fleet_server,
    served,
    stopped,
    streams_during,
)
from headway.cli.main import app
from headway.on_ray.options import environment
from tests.support import real
from tests.support.held import Hold
from tests.support.letters_fleet import HANG_SECONDS, NUM_REPLICAS, SETTINGS
from tests.support.waiting import LIMIT, wait_until

pytestmark = pytest.mark.skipif(  # without an import, which takes a second of every collection
    find_spec("ray") is None, reason="Ray is not installed: pip install 'headway[ray]'"
)
LETTERS = ("-c", "from tests.support.letters_fleet import main; main()")
SERVE = ("-c", "from headway.cli.main import main; main()")
PATIENT = tuple(  # the gateway waits longer for messages and steps of a replica
    f"--fleet-{name.replace('_', '-')}={getattr(SETTINGS, name)}"
    for name in ("hang_seconds", "stall_seconds", "no_replica_seconds")
)
METHODS = (
    "/ray.serve.ASGIService/HandleRequestWithRejection",
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
    "/ray.rpc.NodeManagerService/GetNodeStats",
)
REFUSALS = {"UNAUTHENTICATED", "UNIMPLEMENTED", "UNAVAILABLE"}  # the last: it is no gRPC server
NUM_HELD = 10  # tokens that a request gets before a replica is killed or replaced
NUM_QUEUED = 40  # requests that need a second replica
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
FEATURES: list[dict[str, Any]] = [{}, {"n": 2}, {"logprobs": 2}, {"stop": ["ZA"]}, {"n": 3}]


def letter_bodies(number: int = 32, length: int = 30) -> list[dict[str, Any]]:
    """Requests for capitals, each with another prompt."""
    return [
        {
            "model": "letters", "prompt": (ALPHABET * (length // 26 + 2))[i % 26 :][:length],
            "stream": True, "max_tokens": length, **FEATURES[i % len(FEATURES)],
        }
        for i in range(number)
    ]  # fmt: skip


def texts(body: dict[str, Any]) -> list[str]:
    """The texts that a request for capitals must get."""
    capitals = body["prompt"].upper()
    cut = capitals.find("ZA") if "stop" in body else len(capitals)
    return [capitals[k:][:cut] for k in range(body.get("n", 1))]


def check_letters(streams: list[Stream], sent: list[dict[str, Any]]) -> None:
    """No stream failed, and each has every token once."""
    assert [stream.error for stream in streams if stream.error] == []
    for stream, body in zip(streams, sent, strict=True):
        found = [choice for _, choice in sorted(stream.choices.items())]
        assert [choice["text"] for choice in found] == texts(body)
        assert all(choice["finish"] in ("stop", "length") for choice in found)
        for choice in found:
            wanted = len(choice["text"]) if "logprobs" in body else 0
            assert len(choice["logprobs"]) == wanted


def run_with(server: FleetServer, sent: list[dict[str, Any]], work: Callable[[], object]) -> None:
    """Send requests for capitals; do `work` when the first has a token, and wait for both."""
    check_letters(streams_during(server.url, sent, work), sent)


def kills(server: FleetServer, hold: Hold) -> None:
    """A replica with streams is killed while 32 run; Ray starts a new one meanwhile."""

    def kill() -> None:
        wait_until(lambda: len(placed(server, 30)) > 24)  # a few may have ended at a stop string
        os.kill(server.replica_pids()[-1], signal.SIGKILL)
        hold.release()

    wait_for_replicas(server, NUM_REPLICAS)
    hold.set(NUM_HELD)
    run_with(server, letter_bodies(), kill)
    assert server.metric("headway_fleet:moves_total") > 0
    wait_for_replicas(server, NUM_REPLICAS)
    assert server.metric("headway_fleet:deaths_total") == 1


def hang(server: FleetServer, hold: Hold) -> None:
    """A stopped process is noticed, and comes back when it continues."""
    victim, known, lost = server.replica_pids()[0], len(server.lines), list[str]()

    def stop() -> None:
        wait_until(lambda: len(placed(server, 30)) > 24)
        os.kill(victim, signal.SIGSTOP)
        hold.release()
        lost.extend(wait_until(lambda: logged(server, known, "was lost")))
        os.kill(victim, signal.SIGCONT)

    hold.set(NUM_HELD)
    run_with(server, letter_bodies(), stop)
    assert len(lost) == 1 and f"it sent nothing for {HANG_SECONDS:g} s" in lost[0]
    wait_for_replicas(server, NUM_REPLICAS)


def wait_for_replicas(server: FleetServer, number: int) -> None:
    """Wait until the gateway has this number of replicas."""

    def has_joined() -> bool:
        time.sleep(0.1)  # they take seconds
        return bool(server.client.get("/replicas").json() == number)

    wait_until(has_joined)


def placed(server: FleetServer, length: int) -> list[str]:
    """The replicas of all open requests whose prompts have this length."""
    return [
        replica for num_prompt, replica in server.client.get("/open").json() if num_prompt == length
    ]


def logged(server: FleetServer, known: int, words: str) -> list[str]:
    """The lines of the log with these words, after the first `known` lines."""
    return [line for line in server.lines[known:] if words in line]


def update(server: FleetServer, **options: float) -> None:
    """Replace the replicas by those of other options."""
    assert server.process.stdin is not None, "a pipe was asked for"
    server.process.stdin.write(json.dumps(options) + "\n")
    server.process.stdin.flush()


def redeploy(server: FleetServer, hold: Hold) -> int:
    """All replicas are replaced by one; they hand their long streams over and end.

    Returns the number of lines of the log before that.
    """
    moves, deaths = (server.metric(f"headway_fleet:{name}_total") for name in ("moves", "deaths"))
    known, old = len(server.lines), server.replica_pids()
    # By name: meanwhile the new deployment may add a replica and drain it again.
    names = {row["name"] for row in live_rows(server)}
    assert len(names) == len(old)

    def drained_names() -> list[str]:
        text = "".join(server.lines[known:])
        return [name for name in re.findall(r"replica (\S+) is drained", text) if name in names]

    def replace() -> None:
        wait_until(lambda: len(set(placed(server, 60))) == len(names))
        update(server, replicas=1, max_replicas=2, upscale_seconds=0.5, downscale_seconds=1.0)
        wait_until(drained_names)
        hold.release()
        wait_until(lambda: not any(map(command, old)))

    hold.set(NUM_HELD)
    run_with(server, letter_bodies(8, 60), replace)
    wait_for_replicas(server, 1)
    assert server.metric("headway_fleet:moves_total") > moves
    assert server.metric("headway_fleet:deaths_total") == deaths
    assert sorted(drained_names()) == sorted(names), "each is drained once"
    assert server.metric("headway_fleet:failed_total") == 0
    return known


def autoscaling(server: FleetServer, hold: Hold, deployed: int) -> None:
    """A queue adds a replica; when it is gone, one replica hands its long streams over and ends.

    `deployed` is the number of lines of the log before the deployment.
    """
    moves, deaths = (server.metric(f"headway_fleet:{name}_total") for name in ("moves", "deaths"))
    length, long = 60, 200  # of the requests that make a queue, and of those that move

    def grow_and_shrink() -> None:
        wait_until(lambda: len(placed(server, length)) == NUM_QUEUED)
        hold.set(2 * NUM_HELD)  # with these steps the engine reads what came while it was held
        wait_for_replicas(server, 2)
        # Open on both replicas until one of them is drained. They begin while the queue is held.
        run_with(server, letter_bodies(3, long), shrink)

    def shrink() -> None:
        wait_until(lambda: len(set(placed(server, long))) == 2)
        known = len(server.lines)
        hold.set(length)
        wait_until(lambda: logged(server, known, " is drained"))
        hold.release()

    hold.set(NUM_HELD)
    run_with(server, letter_bodies(NUM_QUEUED, length), grow_and_shrink)
    wait_for_replicas(server, 1)
    # On a busy machine the queue may come back, and with it another replica.
    text = "".join(server.lines[deployed:])
    joined, drained = (
        re.findall(rf"replica (\S+) {what}", text) for what in ("joined", "is drained")
    )
    assert len(set(joined) - set(drained)) == 1, "from one replica to one"
    assert len(set(drained)) == len(drained), "each is drained once"
    assert server.metric("headway_fleet:deaths_total") == deaths
    assert server.metric("headway_fleet:moves_total") > moves
    assert server.metric("headway_fleet:failed_total") == 0


def monitoring(server: FleetServer) -> None:
    """Every replica is in the metrics and on the live page, and the sums are sums."""
    wait_until(lambda: is_healthy(server))
    text = wait_until(lambda: answered(server, "/metrics")).text
    each = re.findall(r'^headway:generation_tokens_total\{.*replica="(.+)"\} (\S+)$', text, re.M)
    total = re.search(r"^headway_fleet:generation_tokens_total\{.*\} (\S+)$", text, re.M)
    assert len({name for name, _ in each}) == NUM_REPLICAS and total is not None
    assert sum(float(value) for _, value in each) == float(total[1])
    assert sorted(row["name"] for row in live_rows(server)) == sorted(name for name, _ in each)


def answered(server: FleetServer, path: str) -> httpx.Response | None:
    """The response to a GET; None if a replica has not answered in time."""
    response = server.client.get(path)
    return response if response.is_success else None


def live_rows(server: FleetServer) -> list[dict[str, Any]]:
    """The replicas of the live page."""
    rows: list[dict[str, Any]] = wait_until(lambda: answered(server, "/live")).json()["replicas"]
    return rows


def client_errors(server: FleetServer) -> None:
    """Requests that are refused count against no replica."""
    for body, status in (
        ({"max_tokens": 0}, 400), ({"prompt": "a" * 9999}, 400), ({"model": "other"}, 404),
    ):  # fmt: skip
        sent = {"model": "letters", "prompt": "abc", **body}
        for _ in range(2 * NUM_REPLICAS):
            assert server.client.post("/v1/completions", json=sent).status_code == status
    assert server.num_replicas() == NUM_REPLICAS
    for name in ("deaths", "moves", "failed"):
        assert server.metric(f"headway_fleet:{name}_total") == 0


def processes(server: FleetServer) -> None:
    """Replicas have the server's priority, and no process of Ray runs without a purpose."""
    pids = descendants(server.process.pid)
    assert not re.search(r"dashboard\.py|monitor\.py", " ".join(command(pid) for pid in pids))
    usual = os.getpriority(os.PRIO_PROCESS, server.process.pid)
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in server.replica_pids()} == {usual}


def held_streams(server: FleetServer, hold: Hold, work: Callable[[], object]) -> None:
    """Streams that have tokens before `work`, which runs while they wait, and get the rest later."""

    def act() -> None:
        try:
            wait_until(lambda: len(placed(server, 30)) > 24)
            work()
        finally:
            hold.release()

    hold.set(NUM_HELD)
    run_with(server, letter_bodies(), act)


def is_replaced(server: FleetServer) -> None:
    """A replica is killed, and another one takes its place: Ray works."""
    pids = server.replica_pids()
    os.kill(pids[0], signal.SIGKILL)
    wait_until(lambda: len(set(server.replica_pids()) - set(pids)) == 1)
    wait_for_replicas(server, NUM_REPLICAS)


def outages(server: FleetServer, hold: Hold) -> None:
    """Parts of Ray and the process that keeps it are killed; streams go on, and placement resumes."""

    def pid(name: str) -> int:
        return int(ray_state(server)[name])

    def kill(name: str) -> None:
        known, killed = len(server.lines), pid(name)
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: pid(name) != killed)
        wait_until(lambda: logged(server, known, "GCS" if name == "gcs" else "raylet"))

    def kill_keeper() -> None:
        known = len(server.lines)
        os.kill(keepers(server)[0], signal.SIGKILL)
        wait_until(lambda: logged(server, known, "is started again"))

    def stop_gcs() -> None:
        os.kill(stopped := pid("gcs"), signal.SIGSTOP)
        wait_until(lambda: server.client.get("/health").json()["status"] == "degraded")
        assert server.metric("headway_fleet:directory_ok") == 0
        os.kill(stopped, signal.SIGCONT)

    failed = server.metric("headway_fleet:failed_total")
    kill_gcs, replicas = partial(kill, "gcs"), server.replica_pids()
    for work in (kill_gcs, kill_keeper, kill_gcs, stop_gcs):
        wait_until(lambda: is_healthy(server))  # after an earlier outage
        held_streams(server, hold, work)
        assert server.replica_pids() == replicas, "no replica ends with the GCS or the keeper"
    is_replaced(server)
    kill("raylet")  # its replicas end with it
    wait_for_replicas(server, NUM_REPLICAS)
    check_letters(asyncio.run(all_streams(server.url, sent := letter_bodies(4))), sent)
    wait_until(lambda: is_healthy(server))
    assert server.metric("headway_fleet:failed_total") == failed


def is_healthy(server: FleetServer) -> bool:
    return bool(server.client.get("/health").json() == {"status": "ok"})


def ray_state(server: FleetServer) -> dict[str, Any]:
    """What is known of the private Ray, which may have been replaced."""
    found: dict[str, Any] = json.loads((Path(said(server, "folder")) / "ray.json").read_text())
    return found


def keepers(server: FleetServer) -> list[int]:
    """The process that keeps Ray; empty while it is started again."""
    folder = said(server, "folder")
    return [
        pid for pid in descendants(server.process.pid)
        if command(pid).rstrip().endswith(folder) and "reaper" not in command(pid)
    ]  # fmt: skip


def listeners(server: FleetServer) -> dict[tuple[str, int], str]:
    """The command of every process of the fleet that listens, by address and port."""
    found: dict[tuple[str, int], str] = {}
    sockets = {
        row.split()[9]: row.split()[1]
        for name in ("tcp", "tcp6")
        for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        if row.split()[3] == "0A"  # it listens
    }
    for pid in descendants(server.process.pid):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                address = sockets.get(os.readlink(file).removeprefix("socket:[").rstrip("]"), "")
                host, _, port = address.partition(":")
                if host:
                    found[(address_of(host), int(port, 16))] = command(pid)
    return found


def address_of(text: str) -> str:
    """The address that /proc/net/tcp or tcp6 shows as hexadecimal words of this machine."""
    words = [struct.pack("=I", int(text[i : i + 8], 16)) for i in range(0, len(text), 8)]
    kind = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(kind, b"".join(words)).removeprefix("::ffff:")


def ports(server: FleetServer) -> None:
    """All ports are on the loopback address but one of each replica; none serves without a token."""
    found = listeners(server)
    outside = [each for (host, _), each in found.items() if host not in ("127.0.0.1", "::1")]
    assert len(outside) == NUM_REPLICAS and all("ServeReplica" in each for each in outside)
    for (host, port), each in found.items():
        answers = {without_token("127.0.0.1" if host == "::" else host, port, m) for m in METHODS}
        assert answers <= REFUSALS, (each, port, answers)
        if host == "::" or "gcs_server" in each:  # the others do not know all methods
            assert "UNAUTHENTICATED" in answers, (each, port, answers)


def without_token(host: str, port: int, method: str) -> str:
    """The status of a gRPC call without a token."""
    import grpc

    with grpc.insecure_channel(f"{host}:{port}") as channel:
        try:
            channel.unary_unary(method)(b"", timeout=LIMIT)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


def model_on_the_same_ray(server: FleetServer, given: dict[str, str], model: Path) -> None:
    """`headway serve --ray-address`: a killed replica, then a signal that ends only its own app."""
    # In turn, so that the replica that is killed has streams.
    flags = (
        "--replicas", "2", "--threads", "1", "--device", "cpu", "--route", "round_robin",
        "--ray-address", ray_state(server)["address"],
    )  # fmt: skip
    # By application: a replica of the first one that was killed may only start now.
    before = {"", *map(application, server.replica_pids())}
    program = (*SERVE, *served(str(model))[2:], *PATIENT)
    with fleet_server(*flags, program=program, environment=given) as other:
        # The model is quick: outputs must be longer than the way to here.
        sent = [{**each, "ignore_eos": "response_format" not in each} for each in bodies(6, 400)]
        alone = [answer(other, body) for body in sent]
        # A model is quick: the first kill may come when all streams of the replica have ended. Of
        # the second the replica does nothing before it is killed.
        for is_stopped in (False, True):
            other.wait_for_replicas(2)
            victim = max(pid for pid in server.replica_pids() if application(pid) not in before)
            slow_down(victim)
            kill = partial(os.kill, victim, signal.SIGKILL)
            if is_stopped:
                os.kill(victim, signal.SIGSTOP)
            # A new replica would only take CPU time.
            with stopped(server.ray_pids("ServeController")):
                streams = streams_during(other.url, sent, kill)
            assert [stream.error for stream in streams if stream.error] == []
            assert [stream.choices for stream in streams] == alone
            if other.metric("headway_fleet:moves_total"):
                break
        assert other.metric("headway_fleet:moves_total") > 0
    check_letters(asyncio.run(all_streams(server.url, sent := letter_bodies(4))), sent)


def slow_down(pid: int) -> None:
    """Let other processes run before this one, where all are busy."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, int(thread.name), 19)


def answer(server: FleetServer, body: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The choices of a request that is sent alone, and not as a stream."""
    found = Stream()
    found.add(server.client.post("/v1/completions", json={**body, "stream": False}).json(), 0.0)
    assert found.error is None
    return found.choices


def application(pid: int) -> str:
    """The name in the title of a replica's process, ray::ServeReplica:NAME:Replica; "" at its end."""
    return (command(pid).split(":") + [""] * 3)[3]


def said(server: FleetServer, name: str) -> str:
    """What the server has printed after a name."""
    return next(line.split()[1] for line in server.lines if line.startswith(f"{name} "))


def run(*arguments: str, environment: dict[str, str]) -> str:
    """The standard output of a program that must succeed."""
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=LIMIT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def deployments(server: FleetServer, given: dict[str, str], model: Path) -> None:
    """An application from a config file is updated by `headway deploy` while it answers."""
    ray, port = ("--ray-address", ray_state(server)["address"]), ("--port", said(server, "proxies"))
    flags = (str(model), "--device", "cpu", "--threads", "1", *port)
    config = CliRunner().invoke(app, ["deploy", *flags, "--print-config"])
    (model / "app.json").write_text(config.output)
    serve = ("-m", "ray.serve.scripts", "run", "--non-blocking", "--address", ray[1])
    run(*serve, str(model / "app.json"), environment=given)
    with httpx.Client(base_url=f"http://127.0.0.1:{port[1]}", timeout=LIMIT) as client:
        wait_until(lambda: is_served(client))
        body = {
            "model": model.name, "prompt": [1, 2, 3], "max_tokens": 500, "temperature": 0,
            "ignore_eos": True,
        }  # fmt: skip
        alone = client.post("/v1/completions", json=body)
        deploy = ("-m", "headway", "deploy", *flags, *ray, "--json")
        with ThreadPoolExecutor(1) as pool:
            updated, answers = pool.submit(run, *deploy, environment=given), [alone]
            while not updated.done():  # one request is always open
                answers.append(client.post("/v1/completions", json=body))
        assert [each.json()["choices"] for each in answers] == [alone.json()["choices"]] * len(
            answers
        )
        assert json.loads(updated.result())["url"] == str(client.base_url).rstrip("/")
        run("-m", "headway", "deploy", "--delete", *ray, environment=given)
        assert client.get("/health").status_code == 404


def is_served(client: httpx.Client) -> bool:
    try:
        return client.get("/health").is_success
    except httpx.HTTPError:
        return False


def test_a_fleet_on_ray(tmp_path: Path) -> None:
    given, model = environment(None), real.write_tiny(tmp_path, max_position_embeddings=4096)
    hold = Hold(str(tmp_path / "hold"))
    with fleet_server(hold.path, program=LETTERS, environment=given) as server:
        monitoring(server)
        client_errors(server)
        processes(server)
        ports(server)
        kills(server, hold)
        hang(server, hold)
        outages(server, hold)
        model_on_the_same_ray(server, given, model)
        autoscaling(server, hold, redeploy(server, hold))
        if os.environ.get("HEADWAY_TEST_DEPLOY"):  # half a minute; see `make test-deploy`
            deployments(server, given, model)
        started = descendants(server.process.pid)
    wait_until(lambda: not any(map(command, started)))
