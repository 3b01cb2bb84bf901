"""Laws of what a person sees of a running server: snapshots, page, `top`, health and logs."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import logging
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI
from rich.console import Console
from starlette.types import Receive, Scope, Send

from headway.cli.commands.top import NoAnswer, first_look, follow, look
from headway.cli.view.top import picture
from headway.config import SchedulerView
from headway.engine.async_engine import AsyncEngine, ThreadPort
from headway.engine.clock import RealClock
from headway.engine.engine import MAX_FAULTS, Engine
from headway.engine.messages import FromLoop, ToLoop
from headway.errors import ConfigError
from headway.executor.base import Handle
from headway.executor.simulated import Script, SimulatedExecutor
from headway.observe.server_metrics import ServerMetrics
from headway.plan import Plan, StepResult
from headway.request import Params, Request
from headway.scheduler import Scheduler, preset
from headway.scheduler.queues import custom
from headway.server import live
from headway.server.context import Context
from headway.server.health import RemoteWatchdog, Watchdog, watch
from headway.server.http import validation_errors as problems
from headway.server.http.middleware import AccessLogMiddleware
from headway.server.process.log_setup import setup

SIZES = {"block_size": 4, "num_blocks": 40, "max_num_seqs": 2, "max_num_batched_tokens": 64}
SECRET = 31337  # a prompt's token


class WallClock(RealClock):
    def advance_to(self, time: float) -> None:
        """Time passes by itself."""


class Gate:
    """An executor whose steps end when the gate is open, and fail when told to."""

    def __init__(self, clock: WallClock, is_open: bool = True) -> None:
        self._inner = SimulatedExecutor(clock, lambda plan: 0.0)
        self.open = threading.Event()
        self.num_faults = 0
        if is_open:
            self.open.set()

    def launch(self, plan: Plan) -> Handle:
        if self.num_faults:
            self.num_faults -= 1
            raise OSError("the device is on fire")
        return cast(Handle, SimpleNamespace(wait=lambda: self._wait(self._inner.launch(plan))))

    def _wait(self, handle: Any) -> StepResult:
        assert self.open.wait(10)
        result: StepResult = handle.wait()
        return result


def made(is_open: bool = True, **changes: Any) -> tuple[Engine, Gate]:
    clock = WallClock()
    gate = Gate(clock, is_open)
    return Engine(Scheduler(preset("vllm_v1", **{**SIZES, **changes})), gate, clock), gate


def asked(num_output: int = 5, **more: Any) -> Params:
    return Params(max_tokens=num_output, sampling=Script(num_output, 7, 1), **more)


async def drain(engine: AsyncEngine, id: str, params: Params) -> None:
    async for _ in engine.stream(id, [SECRET] * 9, params):
        pass


def client(engine: AsyncEngine) -> httpx.AsyncClient:
    app = FastAPI()
    problems.install(app)
    app.include_router(live.router(cast(Context, SimpleNamespace(engine=engine))))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here")


def served(test: Callable[[AsyncEngine, httpx.AsyncClient, Gate], Awaitable[None]]) -> None:
    """Run a test against an engine on its thread."""

    async def serve() -> None:
        engine, gate = made()
        port = ThreadPort(engine)
        ServerMetrics(port.loop, "tiny")
        running = AsyncEngine(port)
        await running.start()
        try:
            async with client(running) as http:
                await test(running, http, gate)
        finally:
            gate.open.set()
            await running.close()

    asyncio.run(serve())


# Snapshots and the page.


def test_a_snapshot_tells_who_runs_who_waits_and_why_and_no_prompt() -> None:
    engine, _ = made()
    metrics = ServerMetrics(ThreadPort(engine).loop, "tiny")
    for id in ("a", "b", "c", "d"):
        engine.add(id, [SECRET] * 9, asked(client="<b>Bob</b>"))
    engine.step()
    text = json.dumps(metrics.snapshot())
    s = json.loads(text)
    assert [r["id"] for r in s["running"]] == ["a", "b"] and s["num_running"] == 2
    assert [r["id"] for r in s["waiting"]] == ["c", "d"] and s["num_waiting"] == 2
    assert all("all 2 seats are taken" in r["reason"] for r in s["waiting"])
    assert s["seats"] == {"taken": 2, "limit": 2}
    assert s["blocks"]["held"] == 40 - engine.scheduler.num_free > 0
    assert str(SECRET) not in text
    engine.run()
    said = [d["words"] for d in metrics.snapshot()["decisions"]]
    for id in ("a", "b", "c", "d"):
        assert any(words.startswith(f"{id} is seated") for words in said), id
        assert f"{id} ends after 5 tokens (length)" in said
    assert any(words.startswith("2 in the queue wait because all 2 seats") for words in said)


def test_looking_asks_no_policy_anything() -> None:
    asked_for: list[str] = []

    def key(request: Request, view: SchedulerView) -> float:
        asked_for.append(request.id)
        return request.arrival

    engine, _ = made(queue=custom(function=key))
    metrics = ServerMetrics(ThreadPort(engine).loop, "tiny")
    for number in range(40):
        engine.add(str(number), [number] * 9, asked())
    engine.step()
    num_asked = len(asked_for)
    metrics.snapshot()
    metrics.text()
    assert len(asked_for) == num_asked > 40


def test_a_snapshot_lists_no_more_than_a_page_can_show() -> None:
    engine, _ = made(max_num_seqs=200, num_blocks=2000, max_num_batched_tokens=4000)
    metrics = ServerMetrics(ThreadPort(engine).loop, "tiny")
    for number in range(1000):
        engine.add(str(number), [1] * 9, asked(20))
    engine.step()
    s = metrics.snapshot()
    assert s["num_running"] == 200 and s["num_waiting"] == 800
    assert len(s["running"]) == len(s["waiting"]) == 64
    engine.run()
    assert len(json.dumps(metrics.snapshot())) < 20_000


def test_rates_are_taken_over_a_window_that_slides_through_seconds() -> None:
    engine, _ = made()
    metrics = ServerMetrics(ThreadPort(engine).loop, "tiny")
    clock = cast(Any, engine.clock)
    for second in range(10):
        clock.now = lambda second=second: second + 0.5
        engine.add(str(second), [1, 2, 3], asked(10 + second))
        engine.run()
    s = metrics.snapshot()
    assert s["history"]["output_tokens"][-9:] == list(range(10, 19))  # the tenth is not over
    # From 4.5 to 9.5: half of second 4, which had 14 tokens, and all of 5 to 9.
    assert s["rates"]["output_tokens"] == pytest.approx((14 / 2 + sum(range(15, 20))) / 5)
    assert s["rates"]["requests"] == pytest.approx(5.5 / 5)
    assert s["rates"]["prompt_tokens"] == pytest.approx(3 * 5.5 / 5)
    clock.now = lambda: 9.75
    assert metrics.snapshot()["rates"]["requests"] == pytest.approx(5.25 / 5), "it moves smoothly"
    clock.now = lambda: 100.5
    later = metrics.snapshot()
    assert set(later["history"]["output_tokens"]) == {0} and later["rates"]["ttft"] == 0
    assert set(later["history"]["ttft"]) == set(later["history"]["itl"]) == {None}
    assert later["minute"] == {"errors": 0, "aborts": 0, "prefix_cache_hit_rate": None}


def test_a_snapshot_has_the_time_between_tokens_hits_errors_and_aborts() -> None:
    engine, gate = made()
    metrics = ServerMetrics(ThreadPort(engine).loop, "tiny")
    clock, now = cast(Any, engine.clock), 10.0
    clock.now = lambda: now
    for id in ("a", "b"):
        engine.add(id, [1] * 9, asked(5))
        while engine.has_work:
            now += 0.25
            engine.step()
    s = metrics.snapshot()
    assert s["rates"]["itl"] == pytest.approx(0.25)
    known = [v for v in s["history"]["itl"] if v is not None]
    assert known and known == pytest.approx([0.25] * len(known))
    assert s["minute"]["prefix_cache_hit_rate"] == pytest.approx(8 / 18)  # of the second prompt
    engine.add("c", [2] * 9, asked())
    engine.step()
    engine.abort("c")
    engine.run()
    gate.num_faults = 1
    engine.add("d", [3] * 9, asked())
    engine.run()
    s = metrics.snapshot()
    assert (s["minute"]["errors"], s["minute"]["aborts"]) == (1, 1)
    assert (s["totals"]["errors"], s["totals"]["aborts"]) == (1, 1)
    now += 120
    s = metrics.snapshot()
    assert (s["minute"]["errors"], s["totals"]["errors"]) == (0, 1)


def test_the_page_runs_its_own_script_and_nothing_else() -> None:
    async def test(engine: AsyncEngine, http: httpx.AsyncClient, gate: Gate) -> None:
        answer = await http.get("/")
        policy = answer.headers["content-security-policy"]
        for tag in ("style", "script"):
            (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", answer.text, re.S)
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            assert f"{tag}-src 'sha256-{digest}'" in policy
        assert not re.search(r"(src|href)=\"(?!data:)", answer.text)
        assert not re.search(r"innerHTML|document\.write|eval\(", answer.text)
        ids = set(re.findall(r'id="(\w+)"', answer.text))
        wanted = set(re.findall(r'\bat\("(\w+)"\)', answer.text))
        assert wanted <= ids, wanted - ids

    served(test)


def test_however_many_watch_the_engine_is_asked_once() -> None:
    async def test(engine: AsyncEngine, http: httpx.AsyncClient, gate: Gate) -> None:
        loop = cast(ThreadPort, engine.port).loop
        answer, num_asked = loop.observations["snapshot"], 0

        def counted(details: Any) -> Any:
            nonlocal num_asked
            num_asked += 1
            return answer(details)

        loop.observations["snapshot"] = counted
        await drain(engine, "a", asked())
        # Answered between steps: after it, the totals include the step that ended the request.
        await engine.ask("reset_prefix_cache")
        answers = await asyncio.gather(*(http.get("/live") for _ in range(20)))
        assert {a.status_code for a in answers} == {200} and num_asked == 1
        totals = {"requests": 1, "output_tokens": 5, "errors": 0, "aborts": 0}
        assert answers[0].json()["totals"] == totals

    served(test)


def test_the_page_is_told_when_the_engines_process_is_stuck_or_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "TIMEOUT", 0.2)
    monkeypatch.setattr(live, "SECONDS_KEPT", 0.0)

    async def test() -> None:
        engine, _ = made()
        port = ThreadPort(engine)
        ServerMetrics(port.loop, "tiny")
        far = Far(port)
        remote = AsyncEngine(far)
        await remote.start()
        async with client(remote) as http:
            assert (await http.get("/live")).status_code == 200
            far.is_silent = True
            await asyncio.sleep(0.01)
            for answer in await asyncio.gather(http.get("/live"), http.get("/live")):
                assert answer.status_code == 503 and answer.headers["retry-after"]
                assert "not responded" in answer.json()["error"]["message"]
            far.is_silent = False
            await remote.close()
            await asyncio.sleep(0.05)
            answer = await http.get("/live")
            assert answer.status_code == 503

    asyncio.run(test())


# Health.


def test_a_watchdog_tells_of_a_step_that_never_returns_and_of_its_end() -> None:
    async def test(engine: AsyncEngine, http: httpx.AsyncClient, gate: Gate) -> None:
        dog = watch(engine, patience=0.4)
        assert isinstance(dog, Watchdog) and await dog(engine) is None
        await asyncio.sleep(0.5)
        assert await dog(engine) is None, "without work nothing need move"
        gate.open.clear()
        stuck = asyncio.create_task(drain(engine, "a", asked()))
        await asyncio.sleep(0.05)
        assert await dog(engine) is None, "it was idle before, which does not count"
        await asyncio.sleep(0.5)
        problem = await dog(engine)
        assert problem is not None and "no progress for 0." in problem
        assert "1 of 2 seats taken" in problem, "it says why"
        gate.open.set()
        await stuck
        assert await dog(engine) is None
        await engine.close()
        assert "the engine was stopped" in (await dog(engine) or "")

    served(test)


def test_a_fault_counts_until_a_step_succeeds_or_is_long_past() -> None:
    engine, gate = made()
    dog = Watchdog(ThreadPort(engine).loop, patience=0.3)
    gate.num_faults = 1
    engine.add("a", [1], asked())
    engine.run()
    assert dog.problem() == "the latest step failed: OSError: the device is on fire"
    time.sleep(0.35)
    assert dog.problem() is None, "else nobody would send it the work that shows it is well"
    gate.num_faults = 1
    engine.add("b", [1], asked())
    engine.run()
    assert dog.problem() is not None
    engine.add("c", [1], asked())
    engine.run()
    assert dog.problem() is None


def test_an_engine_that_has_given_up_stays_unhealthy() -> None:
    engine, gate = made()
    dog = Watchdog(ThreadPort(engine).loop, patience=0.01)
    gate.num_faults = MAX_FAULTS
    for number in range(MAX_FAULTS):
        engine.add(str(number), [1], asked())
        engine.run()
    time.sleep(0.02)
    assert "too many steps" in (dog.problem() or "")


class Far:
    """A port to an engine that may be silent."""

    def __init__(self, port: ThreadPort) -> None:
        self._port = port
        self.is_silent = False

    async def open(self, receive: Callable[[list[FromLoop]], None]) -> None:
        await self._port.open(receive)

    def send(self, messages: list[ToLoop]) -> None:
        if not self.is_silent:
            self._port.send(messages)

    async def close(self) -> None:
        await self._port.close()


def test_an_engine_in_another_process_is_healthy_while_it_answers() -> None:
    async def test() -> None:
        engine, gate = made()
        port = ThreadPort(engine)
        Watchdog(port.loop)
        far = Far(port)
        remote = AsyncEngine(far)
        await remote.start()
        dog = watch(remote, patience=0.1)
        assert isinstance(dog, RemoteWatchdog)
        assert await asyncio.gather(*(dog(remote) for _ in range(5))) == [None] * 5
        gate.num_faults = 1
        with pytest.raises(AssertionError, match="error"):
            async for updates in remote.stream("a", [1], asked()):
                assert updates[-1].end is None, updates[-1].end
        assert "the device is on fire" in (await dog(remote) or "")
        far.is_silent = True
        assert "not answered" in (await dog(remote) or "")
        far.is_silent = False
        await remote.close()

    asyncio.run(test())


@pytest.mark.parametrize("patience", [0, -1, float("nan")])
def test_patience_must_be_something(patience: float) -> None:
    with pytest.raises(ConfigError, match="patience"):
        RemoteWatchdog(patience)


# `headway top`.


@pytest.fixture
def snapshot() -> dict[str, Any]:
    engine, _ = made()
    metrics = ServerMetrics(ThreadPort(engine).loop, "tiny")
    for id in ("a", "b\x1b[31m", "c"):
        engine.add(id, [SECRET] * 9, asked(client="[red]Bob"))
    engine.step()
    return cast(dict[str, Any], json.loads(json.dumps(metrics.snapshot())))


@pytest.mark.parametrize(("width", "height"), [(120, 40), (60, 12), (20, 4)])
def test_top_draws_any_snapshot_and_no_name_steers_the_terminal(
    snapshot: dict[str, Any], width: int, height: int
) -> None:
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    console.print(picture(snapshot, width, height, "lost"))
    text = cast(io.StringIO, console.file).getvalue()
    assert "\x1b" not in text and "lost" in text
    if width == 120:
        assert "2 running" in text and "1 waiting" in text and "[red]Bob" in text
        assert "all 2 seats are taken" in text and "2 of 2" in text and "a is seated" in text


@pytest.mark.parametrize(("width", "height"), [(120, 40), (80, 24), (60, 20)])
def test_top_cuts_no_number_and_takes_no_more_than_the_screen(
    snapshot: dict[str, Any], width: int, height: int
) -> None:
    long = {"id": f"chatcmpl-{'0123456789ab' * 2}-0", "client": "a client with a long name"}
    numbers = {"prompt": 98_765, "computed": 43_210, "output": 7_654, "most": 8_000}
    numbers |= {"age": 99.5, "state": "prefill"}
    rows = [{**row, **long, **numbers} for row in snapshot["running"] + snapshot["waiting"]] * 30
    rows = [{"reason": "all 2 seats are taken", **row} for row in rows]
    words = f"{long['id']} is seated, 43,210 of 98,765 tokens from the cache and so on"
    said = [{"step": 123_456, "kind": "seated", "words": words}] * 30
    rates = {**snapshot["rates"], "ttft": 1.5, "output_tokens": 31_000.0}
    full = {**snapshot, "running": rows, "waiting": rows, "decisions": said, "rates": rates}
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    console.print(picture(full, width, height))
    lines = cast(io.StringIO, console.file).getvalue().splitlines()
    assert len(lines) <= height and max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "31,000 tokens/s" in text and "first token 1.5 s" in text and "012345678" not in text
    at = next(place for place, line in enumerate(lines) if "running" in line) + 1
    assert all(
        part in lines[at] for part in ("01234567-0", "43,210/98,765", "7,654/8,000", "99.5 s")
    )
    at = next(place for place, line in enumerate(lines) if "waiting" in line) + 1
    assert "99.5 s" in lines[at] and "all 2 seats are taken" in lines[at]


@pytest.fixture
def answering() -> Iterator[Callable[[int, bytes], str]]:
    """A server that answers everything in one way."""
    servers: list[HTTPServer] = []

    def start(status: int, body: bytes) -> str:
        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                is_asked = self.path == "/live" and self.headers["Authorization"] == "Bearer key"
                self.send_response(status if is_asked else 418)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Quietly."""

        servers.append(HTTPServer(("127.0.0.1", 0), Answer))
        threading.Thread(target=servers[-1].serve_forever, kwargs={"poll_interval": 0.01}).start()
        return f"127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_top_reads_what_a_server_shows_or_says_why_not(
    snapshot: dict[str, Any], answering: Callable[[int, bytes], str]
) -> None:
    assert look(answering(200, json.dumps(snapshot).encode()), "key") == snapshot
    wrong = {
        (401, b"{}"): "wants an API key",
        (503, b'{"error": {"message": "the engine has ended"}}'): "the engine has ended",
        (404, b"nothing"): "answers 404",
        (200, b"[]"): "is no Headway server",
        (200, b"<html>"): "no Headway server answers",
    }
    for (status, body), words in wrong.items():
        with pytest.raises(ConfigError, match=words):
            look(answering(status, body), "key")
    with pytest.raises(ConfigError, match="no Headway server answers at http://127.0.0.1:1"):
        look("127.0.0.1:1", None)


def test_top_goes_on_when_a_server_does_not_answer_once(snapshot: dict[str, Any]) -> None:
    later = {**snapshot, "step": 99}
    answers: Iterator[Any] = iter([NoAnswer("lost for now"), ConfigError("wants a key"), later])
    shown: list[tuple[int, str]] = []

    def ask() -> dict[str, Any]:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return cast(dict[str, Any], answer)

    def show(snapshot: dict[str, Any], problem: str) -> None:
        shown.append((snapshot["step"], problem))

    follow(snapshot, ask, show, lambda: len(shown) == 4)
    step = snapshot["step"]
    assert shown == [(step, ""), (step, "lost for now"), (step, "wants a key"), (99, "")]


def test_top_asks_again_for_its_first_answer_but_not_for_ever(
    snapshot: dict[str, Any], answering: Callable[[int, bytes], str]
) -> None:
    url = answering(200, json.dumps(snapshot).encode())
    busy = answering(503, b'{"error": {"message": "busy"}}')
    with pytest.raises(NoAnswer, match="busy"):
        first_look(busy, "key", patience=0.3)
    begun = time.monotonic()
    with pytest.raises(ConfigError, match="wants an API key"):
        first_look(answering(401, b"{}"), "key", patience=60)
    assert time.monotonic() - begun < 30, "a wrong key stays wrong"
    assert first_look(url, "key")["step"] == snapshot["step"]


def test_top_says_how_old_its_picture_is(snapshot: dict[str, Any]) -> None:
    old = {**snapshot, "age": 3.2, "step_seconds": 3.2, "num_new": 5}
    texts = []
    for each in (snapshot, old):
        console = Console(file=io.StringIO(), width=120, height=40, color_system=None)
        console.print(picture(each, 120, 40))
        texts.append(cast(io.StringIO, console.file).getvalue())
    assert "as of" not in texts[0]
    assert "as of 3.2 s ago, step running for 3.2 s; 5 requests received since" in texts[1]


# Logs.


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    logging.getLogger("headway.test").info("inside", extra={"tokens": 3})
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def call(headers: dict[str, str]) -> httpx.Response:
    async def get() -> httpx.Response:
        transport = httpx.ASGITransport(AccessLogMiddleware(hello))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
            return await http.get("/v1/a%0Ab?key=sesame", headers=headers)

    return asyncio.run(get())


def test_every_line_of_a_request_has_its_id_and_no_secret() -> None:
    file = io.StringIO()
    stop = setup("json", "info", file)
    answer = call({"X-Request-Id": "mine-1", "Authorization": "Bearer sesame"})
    stop()
    lines = [json.loads(line) for line in file.getvalue().splitlines()]
    ours = [line for line in lines if line["logger"].startswith("headway.")]
    assert answer.headers["x-request-id"] == "mine-1"
    assert [line["request_id"] for line in ours] == ["mine-1"] * 2
    assert ours[0]["tokens"] == 3 and ours[1]["status"] == 200 and ours[1]["ms"] >= 0
    assert "sesame" not in json.dumps(ours)


def test_an_id_that_is_no_plain_word_is_replaced_and_a_path_stays_on_its_line() -> None:
    file = io.StringIO()
    stop = setup("human", "info", file)
    answer = call({"X-Request-Id": "a b; drop"})
    stop()
    (line,) = (text for text in file.getvalue().splitlines() if "info    GET" in text)
    assert "GET /v1/a\ufffdb 200" in line and "request_id=" in line
    assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])


class Slow(io.StringIO):
    """A file that takes nothing until it may."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()

    def write(self, text: str) -> int:
        assert self.open.wait(10)
        return super().write(text)


def test_a_file_that_takes_nothing_holds_nobody_up() -> None:
    file = Slow()
    stop = setup("human", "info", file)
    begun = time.perf_counter()
    for number in range(10_500):
        logging.getLogger("headway.test").info("%d", number)
    assert time.perf_counter() - begun < 5
    file.open.set()
    stop()
    assert re.search(r"\d+ lines were dropped", file.getvalue())


def test_a_traceback_is_in_the_log() -> None:
    file = io.StringIO()
    stop = setup("json", "info", file)
    try:
        raise OSError("gone")
    except OSError:
        logging.getLogger("headway.test").exception("failed")
    stop()
    assert "OSError: gone" in json.loads(file.getvalue().splitlines()[0])["exception"]
