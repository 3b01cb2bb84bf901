"""An engine in a separate process: workers share it without affecting each other."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from select import select

import httpx
import pytest

from headway.engine.async_engine import AsyncEngine
from headway.engine.engine import Engine
from headway.engine.queue_limits import QueueLimits
from headway.engine.thread_client import ThreadClient
from headway.errors import ConfigError, ExecutorError, InvalidRequest, Overloaded, RequestTooLong
from headway.remote.client import SocketClient
from headway.remote.journal import Journal
from headway.remote.service import EngineService
from headway.server.process.serve import ServerFactory, bind, listen, serve_single_process
from headway.server.process.workers import SharedListener, Supervisor
from tests.engine.test_async_engine import (
    PROMPT,
    SLOW,
    SLOWER,
    ask_randomly,
    read,
    samples_of,
    within,
)
from tests.support.drive import check_no_leaks
from tests.support.processes import FORKS, Server, refuses_connections, stable_port
from tests.support.scripted import END, Double, GetPid, MiniApp, make_engine, mini_served, script
from tests.support.waiting import LIMIT, on_loop, until, wait_until


@asynccontextmanager
async def workers(
    engine: Engine, count: int = 2, limits: QueueLimits | None = None, orphan_seconds: float = LIMIT
) -> AsyncIterator[tuple[EngineService, list[AsyncEngine]]]:
    """An engine behind a socket and several clients of it; at the end no request may be left."""
    with tempfile.TemporaryDirectory() as folder:
        client = ThreadClient(engine, limits)
        service = EngineService(client, journal=Journal(orphan_seconds))
        await service.start(path := Path(folder) / "engine")
        async with AsyncExitStack() as stack:
            engines = [AsyncEngine(SocketClient(path)) for _ in range(count)]
            for each in engines:
                await each.start()
                stack.push_async_callback(each.close)
            yield service, engines
            await until(
                lambda: (
                    service.stopped is not None
                    or not (engine.has_work or any(e._abandoned for e in engines))
                )
            )
        await until(lambda: not service.clients)
        await service.close()
    assert not service._queries and all(
        not each.num_open and not each._abandoned for each in engines
    )
    if not engine.scheduler.requests:
        check_no_leaks(engine.scheduler)


@on_loop
async def test_each_worker_gets_its_own_tokens() -> None:
    async with workers(make_engine(), 3) as (_, engines):
        reading = [read(e, "same id", PROMPT, script(i + 2, i + 1)) for i, e in enumerate(engines)]
        for i, updates in enumerate(await asyncio.gather(*reading)):
            assert {update.id for update in updates} == {"same id"}
            [(tokens, end)] = samples_of(updates)
            assert tokens == [i + 1] * (i + 1) + [END] and end.reason == "stop"


@on_loop
async def test_query_results_go_to_the_worker_that_asked() -> None:
    async with workers(make_engine(SLOW)) as (service, (one, other)):
        assert isinstance(service._client, ThreadClient)
        service._client.loop.handle(Double, lambda query: 2 * query.value)
        reading = asyncio.create_task(read(one, "a", PROMPT, script(30)))
        asked = [e.ask(Double(10 * i + j)) for i in range(9) for j, e in enumerate((one, other))]
        assert await asyncio.gather(*asked) == [2 * (10 * i + j) for i in range(9) for j in (0, 1)]
        with pytest.raises(ExecutorError):
            await other.ask(GetPid())
        await reading


@on_loop
async def test_errors_cross_the_socket_unchanged() -> None:
    async with workers(make_engine(SLOW), 2, QueueLimits(max_waiting=0)) as (_, (one, _other)):
        with pytest.raises(Overloaded):
            await read(one, "a", PROMPT, script(2))
    async with workers(make_engine()) as (_, (_one, other)):
        with pytest.raises(RequestTooLong) as caught:
            await read(other, "long", PROMPT, script(4, max_tokens=5000))
        assert caught.value.need > caught.value.limit > 0
        # without the worker's prefix
        with pytest.raises(InvalidRequest, match="^request 'wrong'"):
            await read(other, "wrong", [], script(1))


@on_loop
async def test_a_disconnected_worker_has_its_requests_cancelled() -> None:
    inner = make_engine(SLOWER, num_blocks=2_000)
    async with workers(inner, orphan_seconds=0.0) as (service, (one, other)):
        going = [asyncio.create_task(read(one, f"{i}", PROMPT, script(900, n=2))) for i in "abc"]
        staying = asyncio.create_task(read(other, "a", PROMPT, script(60)))
        await until(lambda: len(inner.scheduler.requests) == 7)
        assert isinstance(one.client, SocketClient) and one.client._writer is not None
        one.client._writer.transport.abort()  # like a killed process
        for answer in await asyncio.gather(*going, return_exceptions=True):
            assert isinstance(answer, ExecutorError)
        assert len(samples_of(await staying)[0][0]) == 60
        await until(lambda: not inner.scheduler.requests and len(service.clients) == 1)
        assert inner.scheduler.num_steps < 900, "they were cancelled"
        with pytest.raises(ExecutorError, match="lost"):
            await read(one, "later", PROMPT, script(1))


@on_loop
async def test_all_workers_learn_that_the_engine_has_stopped() -> None:
    def broken() -> None:
        raise RuntimeError("fatal fault")

    inner = make_engine(SLOWER, num_blocks=2_000)
    async with workers(inner, 3) as (_service, engines):
        reading = [asyncio.create_task(read(e, "a", PROMPT, script(900))) for e in engines]
        await until(lambda: len(inner.scheduler.requests) == 3)
        inner.step = broken  # type: ignore[method-assign]
        for answer in await asyncio.gather(*reading, return_exceptions=True):
            assert isinstance(answer, ExecutorError) and "fatal fault" in str(answer)
        assert isinstance(engines[0].client, SocketClient)
        late = AsyncEngine(SocketClient(engines[0].client.address))
        await late.start()
        assert "fatal fault" in await until(lambda: late.stop_reason)
        await late.close()


def test_a_port_without_an_engine_raises() -> None:
    with pytest.raises(ExecutorError, match="/nowhere"):
        within(AsyncEngine(SocketClient(Path("/nowhere"))).start())


@on_loop
async def test_a_worker_that_does_not_read_delays_no_other() -> None:
    inner = make_engine(num_blocks=2_000, max_model_len=8_000)
    async with workers(inner) as (_, (stuck, other)):
        assert isinstance(stuck.client, SocketClient) and stuck.client._writer is not None
        transport = stuck.client._writer.transport
        transport.pause_reading()  # type: ignore[attr-defined]
        reading = asyncio.create_task(read(stuck, "a", PROMPT, script(5_000)))
        await until(lambda: inner.scheduler.num_steps)
        assert len(samples_of(await read(other, "a", PROMPT, script(200)))[0][0]) == 200
        await until(lambda: not inner.has_work)
        assert not reading.done()
        transport.resume_reading()  # type: ignore[attr-defined]
        assert len(samples_of(await reading)[0][0]) == 5_000


@pytest.mark.parametrize("seed", range(4))
def test_with_random_workers_every_request_has_one_result(seed: int) -> None:
    rng = random.Random(seed)

    async def live() -> list[str]:
        limits = rng.choice(
            (QueueLimits(), QueueLimits(max_waiting=8), QueueLimits(max_per_client=5))
        )
        inner = make_engine(
            rng.choice((0.0, 0.0005)), async_scheduling=seed % 2, num_blocks=rng.choice((24, 60)),
            num_scheduler_steps=rng.choice((1, 3)),
        )  # fmt: skip
        async with workers(inner, 3, limits) as (_, engines):
            rngs = [random.Random(rng.random()) for _ in range(45)]
            clients = [ask_randomly(engines[i % 3], own, f"{i // 3}") for i, own in enumerate(rngs)]
            return list(await asyncio.gather(*clients))

    outcomes = within(live())
    assert len(outcomes) == 45 and {"read", "left"} <= set(outcomes)


@pytest.mark.parametrize("is_ready", [False, True])
def test_an_error_for_a_used_port_says_what_to_do(is_ready: bool) -> None:
    taken = bind("127.0.0.1", 0)
    if is_ready:
        listen(taken)
    number = taken.getsockname()[1]
    with pytest.raises(ConfigError, match=f"127.0.0.1:{number}.*--port"):
        bind("127.0.0.1", number)
    taken.close()
    with pytest.raises(ConfigError, match="no.such.host.invalid"):
        bind("no.such.host.invalid", 0)
    with pytest.raises(ConfigError, match="65535, not 70000"):
        bind("127.0.0.1", 70_000)


def test_a_port_can_be_used_again_right_after_a_crash() -> None:
    crashed = bind("127.0.0.1", stable_port())
    listen(crashed)
    address = crashed.getsockname()
    with socket.create_connection(address) as client:
        crashed.accept()[0].close()  # closed first by the server: its port stays in TIME_WAIT
        assert client.recv(1) == b""
    crashed.close()
    with bind(*address) as again:
        listen(again)


def run_single_process(factory: ServerFactory, bound: socket.socket) -> int:
    return serve_single_process(factory, bound, lambda _: None)


def run_with_workers(factory: ServerFactory, bound: socket.socket) -> int:
    return Supervisor(factory, bound, 1).run(lambda _: None)


@pytest.mark.parametrize("run", [run_single_process, run_with_workers])
def test_a_port_that_is_taken_while_the_model_loads_is_reported(
    run: Callable[[ServerFactory, socket.socket], int],
) -> None:
    factory = ServerFactory(make_engine=partial(mini_served, 0.0), make_app=MiniApp)
    with socket.socket() as first:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        first.bind(("127.0.0.1", 0))
        second = socket.socket()
        second.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        second.bind(first.getsockname())
        first.listen()
        with second, pytest.raises(ConfigError, match=r"Address already in use.*--port"):
            run(factory, second)


def test_a_signal_that_arrives_when_a_server_is_ready_stops_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headway.server.process.workers.CONTEXT", FORKS)
    factory = ServerFactory(make_engine=partial(mini_served, 0.0), make_app=MiniApp)
    before = signal.getsignal(signal.SIGTERM)

    def ready(_: object) -> None:
        assert signal.getsignal(signal.SIGTERM) is not before
        os.kill(os.getpid(), signal.SIGTERM)

    assert Supervisor(factory, bind("127.0.0.1", 0), 1).run(ready) == 0


def test_a_shared_listener_accepts_one_connection_per_wakeup() -> None:
    bound = bind("127.0.0.1", 0)
    with SharedListener(fileno=bound.detach()) as shared:
        shared.listen()
        shared.setblocking(False)
        for _ in range(3):
            with (
                socket.create_connection(shared.getsockname()),
                accepted(shared),
                pytest.raises(BlockingIOError),
            ):
                shared.accept()


def accepted(shared: SharedListener) -> socket.socket:
    """The next connection, which may arrive after its client has connected."""
    assert select([shared], [], [], LIMIT)[0]
    return shared.accept()[0]


def is_alive(number: int) -> bool:
    try:
        return bool(Path(f"/proc/{number}/cmdline").read_bytes())  # empty for a zombie process
    except OSError:
        return False


def test_workers_share_a_port_and_stop_in_order() -> None:
    with Server(num_workers=2, seconds=0.002, is_forked=False) as server:
        children = server.children()
        assert len(children) >= 3
        assert all(httpx.get(server.url, timeout=LIMIT).json()["model"] == "none" for _ in range(6))
        lines = server.generate("a", 30)
        assert sum(len(line.get("tokens", ())) for line in lines) == 30
        assert lines[-1]["end"] == "stop"
        for child in children:  # Ctrl-C in a terminal signals the whole process group
            os.kill(child, signal.SIGINT)
        assert server.end(signal.SIGINT) == 0
        wait_until(lambda: not any(map(is_alive, children)))


def test_a_dead_worker_is_replaced_and_a_dead_engine_is_reported() -> None:
    with Server(num_workers=1, seconds=0.002) as server:
        first = server.pids()
        os.kill(first["worker"], signal.SIGKILL)
        wait_until(lambda: not is_alive(first["worker"]) and server.is_serving())
        again = server.pids()
        assert again["engine"] == first["engine"] and again["worker"] != first["worker"]
        os.kill(first["engine"], signal.SIGKILL)
        assert server.process.stderr is not None
        assert any("the engine exited" in line for line in server.process.stderr)
        wait_until(lambda: "lost" in (server.generate("a", 3)[-1]["error"] or ""))
        assert server.end() == 1


def test_children_do_not_outlive_a_killed_supervisor() -> None:
    with Server(num_workers=2, port=stable_port()) as server:
        children = [*server.pids().values()]
        server.process.kill()
        # `pids` knows one of the workers.
        wait_until(lambda: not any(map(is_alive, children)) and refuses_connections(server.port))
        with Server(num_workers=1, port=server.port) as again:
            assert again.port == server.port and again.generate("a", 1)[-1]["end"] == "stop"
