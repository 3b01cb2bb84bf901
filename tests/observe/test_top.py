"""`headway top` draws any snapshot and reports why a server sends none."""

from __future__ import annotations

import io
import json
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, cast

import pytest
from rich.console import Console

from headway.cli.commands import top
from headway.cli.commands.top import NoResponse, first_snapshot, follow, get_snapshot
from headway.cli.view.top import picture
from headway.engine.thread_client import ThreadClient
from headway.errors import ConfigError
from headway.observe.server_metrics import ServerMetrics
from tests.support.gated import gated_engine, scripted
from tests.support.waiting import LIMIT


@pytest.fixture
def snapshot() -> dict[str, Any]:
    engine, _ = gated_engine()
    metrics = ServerMetrics(ThreadClient(engine).loop, "tiny")
    for id in ("a", "b\x1b[31m", "c"):
        engine.add(id, [1] * 9, scripted(client="[red]Bob"))
    engine.step()
    return cast(dict[str, Any], json.loads(json.dumps(metrics.snapshot())))


@pytest.mark.parametrize(("width", "height"), [(120, 40), (60, 12), (20, 4)])
def test_top_draws_any_snapshot_without_control_characters(
    snapshot: dict[str, Any], width: int, height: int
) -> None:
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    console.print(picture(snapshot, width, height, "lost"))
    text = cast(io.StringIO, console.file).getvalue()
    assert "\x1b" not in text and "lost" in text
    if width == 120:
        assert "2 running" in text and "1 waiting" in text and "[red]Bob" in text
        assert "(max_num_seqs)" in text and "2 of 2" in text and "a is admitted" in text


@pytest.mark.parametrize(("width", "height"), [(120, 40), (80, 24), (60, 20)])
def test_top_cuts_no_number_and_fits_the_terminal(
    snapshot: dict[str, Any], width: int, height: int
) -> None:
    long = {"id": f"chatcmpl-{'0123456789ab' * 2}-0", "client": "a client with a long name"}
    numbers: dict[str, Any] = {"prompt_tokens": 98_765, "computed_prompt_tokens": 43_210}
    numbers |= {"output_tokens": 7_654, "max_output_tokens": 8_000}
    numbers |= {"age": 99.5, "state": "prefill"}
    groups = {name: snapshot[name] for name in ("running", "waiting")}
    rows = [row for group in groups.values() for row in group["requests"]] * 30
    rows = [{**row, **long, **numbers, "why": "a reason of some length"} for row in rows]
    text = f"{long['id']} is admitted, 43210 tokens from the prefix cache, and more text after that"
    decisions = [{"step": 123_456, "kind": "admitted", "text": text}] * 30
    rates = {**snapshot["rates"], "ttft": 1.5, "output_tokens": 31_000.0}
    full = {**snapshot, "decisions": decisions, "rates": rates}
    full |= {name: {**group, "requests": rows} for name, group in groups.items()}
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    console.print(picture(full, width, height))
    lines = cast(io.StringIO, console.file).getvalue().splitlines()
    assert len(lines) <= height and max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "31,000 tokens/s" in text and "first token 1.5 s" in text and "012345678" not in text
    at = next(place for place, line in enumerate(lines) if line.startswith("2 running")) + 1
    assert all(
        part in lines[at] for part in ("01234567-0", "43,210/98,765", "7,654/8,000", "99.5 s")
    )
    at = next(place for place, line in enumerate(lines) if line.startswith("1 waiting")) + 1
    assert "99.5 s" in lines[at] and "a reason of some length" in lines[at]


class Responders:
    """Servers that always send the same response."""

    def __init__(self) -> None:
        self.servers: list[HTTPServer] = []
        self.num_requests: Counter[str] = Counter()  # by address

    def __call__(self, status: int, body: bytes) -> str:
        num_requests = self.num_requests

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                num_requests[f"127.0.0.1:{self.server.server_port}"] += 1  # type: ignore[attr-defined]
                is_valid = self.path == "/live" and self.headers["Authorization"] == "Bearer key"
                self.send_response(status if is_valid else 418)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        self.servers.append(server := HTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        return f"127.0.0.1:{server.server_port}"


@pytest.fixture
def serve_response(monkeypatch: pytest.MonkeyPatch) -> Iterator[Responders]:
    monkeypatch.setattr(top, "TIMEOUT", LIMIT)
    yield (responders := Responders())
    for server in responders.servers:
        server.shutdown()
        server.server_close()


def test_top_reads_a_snapshot_or_reports_the_problem(
    snapshot: dict[str, Any], serve_response: Responders
) -> None:
    assert get_snapshot(serve_response(200, json.dumps(snapshot).encode()), "key") == snapshot
    wrong = {
        (401, b"{}"): "--api-key",
        (503, b'{"error": {"message": "engine stopped"}}'): "engine stopped",
        (404, b"nothing"): "status 404",
        (200, b"[]"): "not a Headway server",
        (200, b"<html>"): "not a Headway server",
    }
    for (status, body), problem in wrong.items():
        with pytest.raises(ConfigError, match=problem):
            get_snapshot(serve_response(status, body), "key")
    with pytest.raises(ConfigError, match="http://127.0.0.1:1"):
        get_snapshot("127.0.0.1:1", None)


def test_top_continues_after_a_failed_query(snapshot: dict[str, Any]) -> None:
    later = {**snapshot, "step": 99}
    responses: Iterator[Any] = iter([NoResponse("no response"), ConfigError("key"), later])
    shown: list[tuple[int, str]] = []

    def get() -> dict[str, Any]:
        response = next(responses)
        if isinstance(response, Exception):
            raise response
        return cast(dict[str, Any], response)

    def show(snapshot: dict[str, Any], problem: str) -> None:
        shown.append((snapshot["step"], problem))

    follow(snapshot, get, show, lambda: len(shown) == 4)
    step = snapshot["step"]
    assert shown == [(step, ""), (step, "no response"), (step, "key"), (99, "")]


def test_top_retries_the_first_query_until_a_timeout(
    snapshot: dict[str, Any], serve_response: Responders
) -> None:
    url = serve_response(200, json.dumps(snapshot).encode())
    busy = serve_response(503, b'{"error": {"message": "busy"}}')
    with pytest.raises(NoResponse, match="busy"):
        first_snapshot(busy, "key", timeout=0.3)
    wrong = serve_response(401, b"{}")
    with pytest.raises(ConfigError, match="--api-key"):
        first_snapshot(wrong, "key", timeout=LIMIT)
    assert serve_response.num_requests[wrong] == 1, "a wrong key is not retried"
    assert first_snapshot(url, "key")["step"] == snapshot["step"]


def test_top_shows_the_age_of_an_old_snapshot(snapshot: dict[str, Any]) -> None:
    waiting = {**snapshot["waiting"], "new": 5}
    old = {**snapshot, "age": 3.2, "step_seconds": 3.2, "waiting": waiting}
    texts = []
    for each in (snapshot, old):
        console = Console(file=io.StringIO(), width=120, height=40, color_system=None)
        console.print(picture(each, 120, 40))
        texts.append(cast(io.StringIO, console.file).getvalue())
    assert "as of" not in texts[0]
    assert "as of 3.2 s ago" in texts[1] and "5 requests received" in texts[1]


@pytest.mark.parametrize(("width", "height"), [(120, 40), (80, 50)])
def test_a_tall_terminal_shows_every_vital_with_its_healthy_range(
    snapshot: dict[str, Any], width: int, height: int
) -> None:
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    console.print(picture(snapshot, width, height))
    text = cast(io.StringIO, console.file).getvalue()
    assert {"longest stall, p99", "longest stall, max"} < {v["name"] for v in snapshot["vitals"]}
    for vital in snapshot["vitals"]:
        assert vital["name"] in text and vital["healthy"] in text
