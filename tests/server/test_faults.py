"""Injected faults: every stream ends with an error or [DONE], and other requests continue."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from headway.engine.async_engine import AsyncEngine
from headway.engine.engine import Engine
from headway.engine.input_processor import InputProcessor
from headway.engine.thread_client import ThreadClient
from headway.record.lines import CompletedLine
from headway.record.reader import read_journal
from headway.record.writer import JournalWriter, header
from headway.server.process import shutdown
from headway.server.process.serve import ServerFactory, bind, serve_http
from headway.server.process.shutdown import GracefulServer
from headway.server.settings import Settings
from headway.text.tokenizer import Tokenizer
from tests.engine.test_async_engine import within
from tests.support.drive import check_no_leaks
from tests.support.journals import of_kind
from tests.support.lettered import SlowCapitals, letters_app, letters_served
from tests.support.processes import PATIENT, Server, refuses_connections, stable_port
from tests.support.scripted import MiniApp, make_engine
from tests.support.waiting import LIMIT, on_loop, until

LONG = 1800  # letters; a stream of them takes longer than any pause
SLOW = 0.03  # seconds of half a step
ENDLESS = 10 * LIMIT  # seconds
each_layout = pytest.mark.parametrize("num_workers", [0, 2])


@dataclass
class Listening:
    """A server in this process with a real port."""

    client: httpx.AsyncClient
    engine: Engine
    http: GracefulServer

    async def streams(self, count: int) -> list[asyncio.Task[list[dict[str, Any]]]]:
        """Long streams that have all started."""
        begun: list[str] = []
        asked = [events(self.client, "abc" * 600, begun) for _ in range(count)]
        tasks = [asyncio.create_task(each) for each in asked]
        await until(lambda: len(begun) == count)
        return tasks

    async def capitals(self, prompt: str) -> str:
        """The text of a successful completion."""
        asked = {"prompt": prompt, "max_tokens": 3000}
        response = await self.client.post("/v1/completions", json=asked)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["text"])


async def events(client: httpx.AsyncClient, prompt: str, begun: list[str]) -> list[dict[str, Any]]:
    """The events of a stream, which must be terminated; signals when it has started."""
    asked = {"prompt": prompt, "max_tokens": 3000, "stream": True}
    lines: list[str] = []
    async with client.stream("POST", "/v1/completions", json=asked) as response:
        async for line in response.aiter_lines():
            if not lines:
                begun.append(line)
            lines += [line] if line else []
    if not lines[0].startswith("data: "):
        return [json.loads(line) for line in lines]  # refused before the first event
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def text_of(said: list[dict[str, Any]]) -> str:
    return "".join(e["choices"][0]["text"] for e in said if e.get("choices"))


def reason_of(said: list[dict[str, Any]]) -> str:
    """The finish reason of a stream, or the code of its error."""
    last = said[-1]
    return str(last["error"]["code"] if "error" in last else last["choices"][0]["finish_reason"])


@asynccontextmanager
async def listening(engine: Engine, app: Any, model_info: Any) -> AsyncIterator[Listening]:
    """Serve an engine from this event loop; at the end, stop it like a signal would."""
    factory = ServerFactory(
        make_engine=lambda: None, make_app=app, grace=5.0,  # type: ignore[arg-type,return-value]
        settings=Settings(**PATIENT),
    )  # fmt: skip
    bound, started = bind("127.0.0.1", 0), asyncio.Event()
    url = "http://{}:{}".format(*bound.getsockname())
    servers: list[GracefulServer] = []
    work = serve_http(
        factory, AsyncEngine(ThreadClient(engine)), model_info, bound,
        ready=lambda _: started.set(), on_start=servers.append,
    )  # fmt: skip
    task = asyncio.create_task(work)
    await started.wait()
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT) as client:
        yield Listening(client, engine, servers[0])
    servers[0].stop()
    await task


@asynccontextmanager
async def capitals(
    seconds: float = 0.0, tokenizer: Tokenizer | None = None
) -> AsyncIterator[Listening]:
    """The app over an engine whose output is the prompt in capitals."""
    served = letters_served(seconds)
    processor: InputProcessor = served.model_info
    if tokenizer is not None:
        processor = replace(processor, tokenizer=tokenizer)
    async with listening(served.engine, letters_app, processor) as server:
        yield server


@on_loop
async def test_every_stream_reports_that_the_engine_has_stopped() -> None:
    def broken() -> None:
        raise RuntimeError("fatal fault")

    async with capitals(SLOW) as server:
        streams = await server.streams(8)
        server.engine.step = broken  # type: ignore[method-assign]
        for said in await asyncio.gather(*streams):
            assert 0 < len(text_of(said)) < LONG and "ABC".startswith(text_of(said)[:3])
            assert "fatal fault" in said[-1]["error"]["message"]
        response = await server.client.post("/v1/completions", json={"prompt": "a"})
        assert response.status_code == 503
        health = await server.client.get("/health")
        assert health.status_code == 503 and "fatal fault" in health.text


@on_loop
async def test_a_failed_step_ends_its_requests_and_later_ones_work() -> None:
    async with capitals(SLOW) as server:
        streams = await server.streams(4)
        assert isinstance(server.engine.executor, SlowCapitals)
        server.engine.executor.fault = RuntimeError("the device fell off")
        for said in await asyncio.gather(*streams):
            assert reason_of(said) == "step_failed"
            assert "the device fell off" in said[-1]["error"]["message"]
        assert await server.capitals("later") == "LATER"
    check_no_leaks(server.engine.scheduler)


@on_loop
async def test_a_tokenizer_failure_fails_only_its_request() -> None:
    letters = letters_served(0.0).model_info.tokenizer

    class Delicate(Tokenizer):
        def encode(
            self, text: str, *, special: bool = True, max_tokens: int | None = None
        ) -> list[int]:
            if "poison" in text:
                raise RuntimeError("a bug in a tokenizer")
            return super().encode(text, special=special, max_tokens=max_tokens)

    delicate = Delicate(letters._backend, eos=letters.eos, chat_template=letters.chat_template)
    async with capitals(0.002, delicate) as server:
        going = asyncio.create_task(server.capitals("abc" * 60))
        for is_streamed in (False, True):
            asked = {"prompt": "poison", "stream": is_streamed}
            response = await server.client.post("/v1/completions", json=asked)
            assert response.status_code == 500
            assert response.json()["error"]["code"] == "internal_error"
        chat = {"messages": [{"role": "user", "content": "poison"}]}
        assert (await server.client.post("/v1/chat/completions", json=chat)).status_code == 500
        assert await going == "ABC" * 60
    check_no_leaks(server.engine.scheduler)


@on_loop
async def test_a_client_that_stops_reading_delays_no_other_and_uses_little_memory() -> None:
    engine = make_engine(num_blocks=3_000, max_model_len=10_000, max_num_batched_tokens=256)
    async with listening(engine, MiniApp, {}) as server:
        port = server.client.base_url.port
        asked = json.dumps({"id": "stuck", "prompt": [1], "num_output": 4_000, "padding": 9_000})
        head = f"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: {len(asked)}\r\n\r\n"
        stuck = socket.create_connection(("127.0.0.1", port))
        stuck.sendall((head + asked).encode())  # never reads the 36 MB of the response
        for number in range(10):
            body = {"id": f"{number}", "prompt": [1], "num_output": 50}
            lines = (await server.client.post("/", json=body)).text.splitlines()
            assert json.loads(lines[-1])["end"] == "stop"
        await until(lambda: not engine.has_work)  # unread tokens are kept as integers
        transports = [c.transport for c in server.http.server_state.connections]
        assert max(t.get_write_buffer_size() for t in transports) < 1_000_000
        stuck.close()
        await until(lambda: not server.http.server_state.tasks)
    check_no_leaks(engine.scheduler)


class SmallDisk(io.BytesIO):
    """A file on a disk with space for a few lines."""

    num_refused = 0

    def write(self, data: Any) -> int:
        if self.tell() > 3_000:
            self.num_refused += 1
            raise OSError(28, "No space left on device")
        return super().write(data)


def test_a_full_disk_ends_the_trace_with_one_warning_and_fails_no_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = SmallDisk()

    async def live() -> None:
        async with capitals() as server:
            config = server.engine.scheduler.config
            server.engine.observers.insert(0, JournalWriter(disk, header(config, False)))
            said = await asyncio.gather(*(server.capitals("abc" * 20) for _ in range(5)))
            assert said == ["ABC" * 20] * 5
            assert await server.capitals("later") == "LATER"

    with caplog.at_level(logging.WARNING):
        within(live())
    assert disk.num_refused == 1 and "JournalWriter" in caplog.text and "No space" in caplog.text
    assert len([r for r in caplog.records if r.name == "headway.engine.loop"]) == 1
    lines = disk.getvalue().splitlines()
    assert len(lines) > 5 and all(json.loads(line) for line in lines)


async def load(
    server: Server, lengths: list[int], signals: tuple[int, ...] = ()
) -> list[list[dict[str, Any]]]:
    """Open streams of the given lengths, and send the signals once all have started."""
    begun: list[str] = []
    async with httpx.AsyncClient(base_url=server.url, timeout=LIMIT) as client:
        asked = [events(client, "a" * length, begun) for length in lengths]
        streams = asyncio.gather(*asked)
        await until(lambda: not signals or len(begun) == len(lengths))
        for number in signals:
            server.process.send_signal(number)
            # So that the next signal is not merged with this one.
            await until(lambda: refuses_connections(server.port))
        return await streams


@each_layout
def test_sigterm_lets_requests_finish(num_workers: int) -> None:
    with Server(num_workers=num_workers, seconds=0.004, grace=ENDLESS, is_real=True) as server:
        ends = within(load(server, [60] * 8, (signal.SIGTERM,)))
        assert server.process.wait(LIMIT) == 0
    assert [reason_of(said) for said in ends] == ["stop"] * 8
    assert all(text_of(said) == "A" * 60 for said in ends)


@each_layout
def test_sigterm_cancels_requests_that_do_not_finish_in_time(num_workers: int) -> None:
    with Server(num_workers=num_workers, seconds=SLOW, grace=0.2, is_real=True) as server:
        ends = within(load(server, [LONG] * 8, (signal.SIGTERM,)))
        assert server.process.wait(LIMIT) == 0
    assert [reason_of(said) for said in ends] == ["shutting_down"] * 8
    assert all(set(text_of(said)) == {"A"} for said in ends)


@on_loop
async def test_each_stream_gets_an_error_at_the_end_although_the_engine_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after SIGTERM with a short grace, in a step that takes longer."""
    monkeypatch.setattr(shutdown, "DRAIN_TIMEOUT", 0.05)
    async with capitals(SLOW) as server:
        executor = server.engine.executor
        assert isinstance(executor, SlowCapitals)
        streams = await server.streams(4)
        executor.gate.clear()
        await until(lambda: executor.is_blocked)
        server.http._grace = 0.0
        server.http.stop()
        for said in await asyncio.gather(*streams):
            assert reason_of(said) == "shutting_down" and "ABC".startswith(text_of(said)[:3])
        executor.gate.set()


def test_an_idle_server_exits_without_waiting_for_requests() -> None:
    with (
        Server(grace=ENDLESS, is_real=True) as server,
        httpx.Client(timeout=LIMIT) as client,  # an idle keep-alive connection
    ):
        assert client.get(server.url + "health").is_success
        assert server.end(signal.SIGINT) == 0


@each_layout
def test_a_second_signal_exits_at_once(num_workers: int) -> None:
    with Server(num_workers=num_workers, seconds=SLOW, grace=ENDLESS, is_real=True) as server:
        with pytest.raises(httpx.HTTPError):
            within(load(server, [LONG], (signal.SIGTERM, signal.SIGTERM)))
        assert server.process.wait(LIMIT) == 128 + signal.SIGTERM


def test_after_a_kill_the_port_is_free_and_the_trace_is_complete(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    port = stable_port()
    with Server(seconds=SLOW, is_real=True, trace=str(trace), port=port) as server:
        with pytest.raises(httpx.HTTPError):  # without an end, which clients treat as an error
            within(load(server, [LONG] * 8, (signal.SIGKILL,)))
        server.process.wait(LIMIT)
        first, *lines = read_journal(trace)
        steps = [line.step for line in of_kind(CompletedLine, lines)]
        assert first.headway_trace and steps == list(range(len(steps))) != []
        with Server(is_real=True, port=port) as again:
            assert again.port == server.port == port
            [said] = within(load(again, [5]))
            assert text_of(said) == "AAAAA" and again.end() == 0
