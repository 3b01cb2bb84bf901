"""Laws of `headway bench serve`: lengths and arrivals are kept, every request ends, counts are right."""

from __future__ import annotations

import asyncio
import io
import json
import selectors
import sys
import time
from array import array
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from headway.cli.commands.bench_serve import serve_command
from headway.cli.options.common import spread
from headway.errors import ConfigError, HeadwayError
from headway.lab import plots
from headway.lab.loadgen import http_client, report
from headway.lab.loadgen.load import LoadGenerator, Outcome, send
from headway.lab.loadgen.requests import (
    FIRST_PLAIN,
    LengthRange,
    RequestFormat,
    random_requests,
    truncate,
    with_poisson_arrivals,
)
from headway.lab.workload.files import read_workload
from headway.lab.workload.request import WorkloadRequest
from headway.server.process.serve import bind
from tests.support.fake_openai import FakeServer
from tests.support.waiting import LIMIT, until

KEYS = {
    "backend", "model_id", "num_prompts", "request_rate", "max_concurrency", "duration",
    "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
    "request_goodput", "output_throughput", "total_token_throughput", "max_concurrent_requests",
    "p99_send_delay_ms", "errors", "ttft_by_prompt",
}  # fmt: skip
TIMES = {f"{mark}_{name}_ms" for mark in ("mean", "median", "std", "p90", "p99", "p99.9", "max")
         for name in ("ttft", "tpot", "itl", "e2el", "stall")}  # fmt: skip


class Completed:
    """A finished command: its output and its exit code."""

    def __init__(self, *arguments: object) -> None:
        app = typer.Typer(pretty_exceptions_enable=False)
        app.command()(spread(serve_command))
        out, err = io.StringIO(), io.StringIO()
        self.error: HeadwayError | None = None
        with redirect_stdout(out), redirect_stderr(err):
            try:
                self.code = app([str(a) for a in arguments], standalone_mode=False) or 0
            except HeadwayError as error:
                self.code, self.error = 2, error
        self.out, self.err = out.getvalue(), err.getvalue()

    @property
    def result(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(self.out)
        return result


def same_requests(count: int, num_input: int = 5, num_output: int = 4) -> list[WorkloadRequest]:
    return random_requests(
        count, LengthRange(num_input, num_input), LengthRange(num_output, num_output), 0
    )


def load(
    server: FakeServer, model: str, requests: Sequence[WorkloadRequest], **more: Any
) -> list[Outcome]:
    address = http_client.Address.parse(server.url)
    return send(address, RequestFormat(model=model), requests, **more).outcomes


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(place % (len(data) + 1) for place in cuts)})
    return [data[a:b] for a, b in pairwise(places)]


@given(
    texts=st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=1), max_size=5
    ),
    cuts=st.lists(st.integers(0, 10_000)),
    line_end=st.sampled_from([b"\n", b"\r\n"]),
    size=st.integers(1, 50),
    is_chunked=st.booleans(),
)
def test_events_do_not_depend_on_packet_boundaries(
    texts: list[str], cuts: list[int], line_end: bytes, size: int, is_chunked: bool
) -> None:
    body = b"".join(b": hi%b%bdata: %b%b%b" % (*[line_end] * 2, t.encode(), *[line_end] * 2)
                    for t in texts)  # fmt: skip
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    framed = b"".join(b"%x;a=b\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    head = b"HTTP/1.1 200 OK\r\n"
    if is_chunked:
        sent = head + b"Transfer-Encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n"
    else:
        sent = head + b"content-length: %d\r\n\r\n" % len(body) + body
    response, events, got = http_client.ResponseReader(), http_client.EventReader(), list[bytes]()
    for packet in split(sent, cuts):
        assert not response.is_done
        got += events.feed(response.feed(packet))
    assert response.is_done and response.status == 200 and response.stays_open
    assert got == [text.encode() for text in texts]


def test_the_final_response_follows_an_informational_one() -> None:
    response = http_client.ResponseReader()
    assert response.feed(b"HTTP/1.1 100 Continue\r\n\r\n") == b"" and response.status is None
    assert response.feed(b"HTTP/1.1 201 Made\r\nContent-Length: 2\r\n\r\nab") == b"ab"
    assert response.is_done and response.status == 201


def test_a_body_without_length_ends_with_the_connection() -> None:
    response = http_client.ResponseReader()
    assert response.feed(b"HTTP/1.1 500 Oh\r\nConnection: close\r\n\r\nit broke") == b"it broke"
    assert not response.is_done and not response.stays_open
    response.end()
    assert response.is_done


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf",
                                  b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab"])  # fmt: skip
def test_an_incomplete_response_is_an_error(sent: bytes) -> None:
    response = http_client.ResponseReader()
    response.feed(sent)
    with pytest.raises(http_client.ConnectionLost):
        response.end()


@pytest.mark.parametrize("sent", [b"SSH-2.0\r\n\r\n", b"HTTP/1.1 200\r\nContent-Length: x\r\n\r\n",
                                  b"HTTP/1.1 200\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n"])  # fmt: skip
def test_bytes_that_are_not_a_response_are_an_error(sent: bytes) -> None:
    with pytest.raises(http_client.BadResponse):
        http_client.ResponseReader().feed(sent)


@pytest.mark.parametrize(("url", "want"), [
    ("http://127.0.0.1:8000", http_client.Address("127.0.0.1", 8000, "", False)),
    ("localhost:9/v1/", http_client.Address("localhost", 9, "", False)),
    ("https://a.b/models/v1", http_client.Address("a.b", 443, "/models", True)),
])  # fmt: skip
def test_common_forms_of_a_url_are_parsed(url: str, want: http_client.Address) -> None:
    assert http_client.Address.parse(url) == want


def test_prompts_have_their_length_and_share_the_prefixes_of_the_trace(tmp_path: Path) -> None:
    file = tmp_path / "mooncake.jsonl"
    lines = [{"timestamp": 100 * i, "input_length": 600, "output_length": 3, "hash_ids": [7, i]}
             for i in range(20, 23)]  # fmt: skip
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    request_format = RequestFormat(model="m", vocab_size=1000)
    prompts = [request_format.tokens(request) for request in read_workload(file)]
    assert {len(prompt) for prompt in prompts} == {600}
    assert all(FIRST_PLAIN <= token < 1000 for prompt in prompts for token in prompt)
    assert prompts[0][:512] == prompts[1][:512] == prompts[2][:512]
    assert prompts[0][512:] != prompts[1][512:] and prompts[0][512:520] != prompts[0][:8]
    assert prompts != [replace_seed.tokens(request) for replace_seed in [RequestFormat(model="m", seed=1)]
                       for request in read_workload(file)]  # fmt: skip


def test_real_token_ids_are_sent_unchanged() -> None:
    request = WorkloadRequest(
        id="a", pieces=(array("i", [5, 0, 49_000]),), num_output=1, max_tokens=1
    )
    assert RequestFormat(model="m").tokens(request) == [5, 0, 49_000]


@pytest.mark.parametrize("kind", ["ids", "text", "chat"])
def test_every_kind_of_prompt_is_sent_and_counted(kind: str) -> None:
    with FakeServer(gap=0.002) as server:
        request_format = RequestFormat(model="good", kind=kind)
        outcomes = send(
            http_client.Address.parse(server.url), request_format, same_requests(3, 7, 4)
        ).outcomes
    assert [(o.error, o.num_output, o.num_pieces) for o in outcomes] == [(None, 4, 4)] * 3
    assert {o.num_input for o in outcomes} == {17 if kind == "chat" else 7}
    assert all(sum(o.gaps) == pytest.approx(o.last - o.first) for o in outcomes)
    assert all(o.due <= o.sent < o.first <= o.last for o in outcomes)
    assert all(a["stream"] and a["ignore_eos"] and a["max_tokens"] == 4 for a in server.asked)


def test_client_priority_and_deadline_are_sent() -> None:
    pieces = (range(1 << 20, (1 << 20) + 3),)
    request = WorkloadRequest(id="a", pieces=pieces, num_output=1, max_tokens=9, client="ann", priority=-2,
              arrival=5.0, deadline=7.5)  # fmt: skip
    asked = json.loads(RequestFormat(model="m").body(request))
    assert (asked["user"], asked["priority"], asked["max_tokens"]) == ("ann", -2, 1)
    assert asked["deadline"] == 2.5


@given(st.lists(st.integers(1, 9), min_size=1), st.integers(1, 40))
def test_a_truncated_prompt_is_the_beginning_of_the_prompt(lengths: list[int], most: int) -> None:
    pieces = tuple(range(1 << 20, (1 << 20) + length) for length in lengths)
    request = WorkloadRequest(id="a", pieces=pieces, num_output=5, max_tokens=9)
    short = truncate(request, most, 3)
    assert list(short.prompt()) == list(request.prompt())[:most] and all(short.pieces)
    assert (short.num_output, short.max_tokens) == (3, 3)
    assert list(truncate(request, None, None).prompt()) == list(request.prompt())


def test_arrivals_have_the_given_rate() -> None:
    requests = with_poisson_arrivals(same_requests(2000), 50.0, seed=1)
    gaps = np.diff([request.arrival for request in requests])
    assert (gaps >= 0).all() and 0.018 < gaps.mean() < 0.022
    assert 0.8 < gaps.std() / gaps.mean() < 1.2  # as in a Poisson process


class VirtualTimeSelector(selectors.DefaultSelector):
    """The selector of an event loop whose time advances at once when all tasks sleep."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        self.now += timeout or 0.0
        return super().select(0)


class SlowClient:
    """A client of a server that rejects a request after 100 s."""

    async def post(self, _path: str, _body: bytes, _receive: Any) -> http_client.HttpResponse:
        await asyncio.sleep(100.0)
        return http_client.HttpResponse(503, b"{}")


def test_requests_are_sent_when_they_are_due(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = with_poisson_arrivals(same_requests(12, num_output=3), 60.0, seed=3)
    selector = VirtualTimeSelector()
    loop = asyncio.SelectorEventLoop(selector)
    monkeypatch.setattr(loop, "time", lambda: selector.now)
    monkeypatch.setattr("headway.lab.loadgen.load.perf_counter", loop.time)
    sent = LoadGenerator(SlowClient(), RequestFormat(model="m"), 600.0, lambda: None)  # type: ignore[arg-type]
    loop.run_until_complete(sent.open_loop(requests))
    loop.close()
    assert sent.max_concurrency == 12
    assert [outcome.due for outcome in sent.outcomes] == [request.arrival for request in requests]
    assert all(0 <= outcome.sent - outcome.due < 1e-6 for outcome in sent.outcomes)


class MeetingServer(FakeServer):
    """A server that answers no request before it has this many."""

    def __init__(self, num_awaited: int) -> None:
        super().__init__()
        self._num_awaited = num_awaited

    async def _generate(self, asked: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        await until(lambda: len(self.asked) >= self._num_awaited)
        return await super()._generate(asked, writer)


def test_requests_are_sent_when_due_even_if_the_server_is_slow() -> None:
    requests = with_poisson_arrivals(same_requests(12, num_output=3), 60.0, seed=3)
    with MeetingServer(12) as server:
        outcomes = load(server, "good", requests)
    assert server.most_open == 12  # no request waited for another one
    assert all(outcome.error is None and outcome.sent >= outcome.due for outcome in outcomes)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_the_concurrency_is_not_exceeded_and_connections_are_reused(concurrency: int) -> None:
    with MeetingServer(concurrency) as server:
        outcomes = load(server, "good", same_requests(9), concurrency=concurrency)
    assert len(outcomes) == 9 and all(outcome.error is None for outcome in outcomes)
    assert server.most_open == server.num_connections == concurrency


@pytest.mark.parametrize("model", ["closing", "rude"])
def test_a_server_may_close_idle_connections(model: str) -> None:
    with FakeServer() as server:
        outcomes = load(server, model, same_requests(6), concurrency=2)
    assert [outcome.error for outcome in outcomes] == [None] * 6


@pytest.mark.parametrize(("model", "kind"), [
    ("busy", "HTTP 429"), ("broken", "connection lost"), ("mute", "timeout"),
    ("failing", "error in stream"), ("garbage", "bad response"), ("odd", "bad response"),
    ("aborting", "finished by abort"),
])  # fmt: skip
def test_every_failure_is_counted_by_kind(model: str, kind: str) -> None:
    with FakeServer() as server:
        seconds = 0.5 if kind == "timeout" else LIMIT
        outcomes = load(server, model, same_requests(3), timeout=seconds)
    assert {outcome.error for outcome in outcomes} == {kind}
    result = report.report(outcomes, 3)
    assert (result.completed, result.failed, result.errors) == (0, 3, {kind: 3})
    assert result.total_output_tokens == 0


def test_a_refused_connection_is_counted_as_failure() -> None:
    with bind("127.0.0.1", 0) as closed:  # it does not listen
        address = http_client.Address("127.0.0.1", closed.getsockname()[1], "", False)
        found = send(address, RequestFormat(model="good"), same_requests(2)).outcomes
    assert found[0].error == "connection refused"


def outcome(sent: float, first: float, gaps: list[float], error: str | None = None) -> Outcome:
    return Outcome(sent, sent, first, first + sum(gaps), array("d", gaps), 10, len(gaps) + 1, error)


def test_the_report_has_the_measured_times() -> None:
    outcomes = [outcome(0.0, 0.5, [0.1, 0.3]), outcome(1.0, 1.1, [0.2]), outcome(0.0, 0.0, [], "x")]
    result = report.report(outcomes, 2, {"ttft": 200.0, "tpot": 250.0})
    assert result.duration == pytest.approx(1.3)
    assert result.completed == 2 and result.errors == {"x": 1}
    assert result.output_throughput == pytest.approx(5 / 1.3)
    assert result.latencies["mean_ttft_ms"] == pytest.approx(300)
    latencies = result.latencies
    assert (latencies["mean_itl_ms"], latencies["median_tpot_ms"]) == pytest.approx((200, 200))
    assert latencies["mean_e2el_ms"] == pytest.approx((900 + 300) / 2)
    assert result.request_goodput == pytest.approx(1 / 1.3)  # the first one missed its limit


def test_goodput_counts_requests_that_meet_every_limit() -> None:
    one_token = outcome(0.0, 0.1, [])
    assert report.num_good(report.times_of([one_token]), {"tpot": 1.0}) == 1
    assert report.num_good(report.times_of([one_token]), {"ttft": 99.0}) == 0


@pytest.mark.parametrize("text", ["ttft", "ttft:", "speed:5", "ttft:-1", "ttft:0", ""])
def test_an_invalid_goodput_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="goodput"):
        report.parse_goodput(text)


@given(st.lists(st.floats(0.001, 1e6), min_size=1), st.lists(st.floats(0.001, 1e6)))
def test_a_text_plot_shows_every_curve_within_its_size(
    first: list[float], second: list[float]
) -> None:
    drawn = plots.text(plots.distribution("t", {"A": np.array(first), "B": np.array(second)}))
    lines = drawn.splitlines()
    assert len(lines) == plots.HEIGHT + 3 and "o A" in lines[0]
    assert ("+ B" in lines[0]) == bool(second)
    assert max(len(line) for line in lines[1:-1]) <= plots.WIDTH + 11


def test_json_output_has_the_keys_of_vllm() -> None:
    with FakeServer(gap=0.001) as server:
        done = Completed("--base-url", server.url, "--num-prompts", 6, "--request-rate", 200, "--input-len", "3-9",
                    "--output-len", 4, "--goodput", "ttft:1000000,tpot:1000000", "--json")  # fmt: skip
    assert set(done.result) == KEYS | TIMES
    assert (done.result["completed"], done.result["total_output_tokens"]) == (6, 24)
    assert (
        done.result["max_stall_ms"] == done.result["max_itl_ms"] >= done.result["p99_itl_ms"] >= 0
    )
    (short,) = done.result["ttft_by_prompt"]
    assert (short["from"], short["to"], short["requests"]) == (0, 256, 6)
    assert short["max_ttft_ms"] == done.result["max_ttft_ms"]
    assert done.result["request_goodput"] == pytest.approx(done.result["request_throughput"])
    assert len(server.asked) == 7  # including the warm-up request
    assert len({tuple(asked["prompt"][:3]) for asked in server.asked}) == 7


def test_a_sweep_measures_every_value_and_plots_them(tmp_path: Path) -> None:
    plot = tmp_path / "plot.txt"
    with FakeServer(gap=0.001) as server:
        options = ["--base-url", server.url, "--num-prompts", 8, "--output-len", 3, "--plot", plot]
        done = Completed(*options, "--max-concurrency", "1,4", "--json")
        assert len({tuple(asked["prompt"][:4]) for asked in server.asked}) == 1 + 2 * 8
        shown = Completed(*options, "--request-rate", "50,inf")
    assert [run["max_concurrent_requests"] for run in done.result["runs"]] == [1, 4]
    assert [run["completed"] for run in done.result["runs"]] == [8, 8]
    rows = [line.split() for line in shown.out.splitlines() if line.strip()]
    if rows[-1][0] not in ("50.0", "inf"):  # the warning of a slow machine
        rows = rows[:3]
    assert rows[0][0] == "rate" and [row[:3] for row in rows[1:]] == [
        ["50.0", "8", "0"], ["inf", "8", "0"]
    ]  # fmt: skip
    assert "p99_ttft_ms" in plot.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["azure.csv", "mooncake.jsonl", "own.jsonl"])
def test_a_trace_is_sent_with_its_arrivals_and_lengths(name: str, tmp_path: Path) -> None:
    text = {
        "azure.csv": "arrival_s,prompt_tokens,output_tokens\n0,600,2\n0.2,20,5\n",
        "mooncake.jsonl": '{"timestamp":0,"input_length":600,"output_length":2,"hash_ids":[1,2]}\n'
        '{"timestamp":200,"input_length":20,"output_length":5,"hash_ids":[3]}\n',
        "own.jsonl": '{"arrival":0,"prompt":600,"output":2}\n{"arrival":0.2,"prompt":20,"output":5}\n',
    }[name]
    (file := tmp_path / name).write_text(text)
    with FakeServer() as server:
        begun = time.perf_counter()
        done = Completed(
            "--base-url", server.url, "--trace", file, "--max-input-len", 100, "--json"
        )
    assert (done.result["total_input_tokens"], done.result["total_output_tokens"]) == (120, 7)
    assert server.times[2] - begun >= 0.2


@pytest.mark.parametrize("model", ["busy", "broken"])
def test_a_failed_warm_up_request_ends_the_command(model: str) -> None:
    with FakeServer(model=model) as server:
        done = Completed("--base-url", server.url, "--num-prompts", 3, "--timeout", LIMIT)
    assert done.code == 2 and "warm-up" in str(done.error) and len(server.asked) == 1


def test_the_api_key_is_sent_and_a_wrong_one_is_reported() -> None:
    with FakeServer(api_key="sesame") as server:
        assert (
            Completed("--base-url", server.url, "--num-prompts", 1, "--api-key", "sesame").code == 0
        )
        assert "api-key" in str(Completed("--base-url", server.url, "--api-key", "no").error)


@pytest.mark.parametrize(("options", "word"), [
    (["--request-rate", "1", "--max-concurrency", "2"], "--request-rate and --max"), (["--request-rate", "0"], "rate"),
    (["--request-rate", "x"], "rate"), (["--max-concurrency", "1.5"], "concurrency"),
    (["--prompts", "song"], "prompts"), (["--plot", "x.doc"], "plot"), (["--input-len", "0"], "input"),
    (["--base-url", "ftp://x"], "ftp://x"), (["--goodput", "ttft"], "goodput"),
    (["--base-url", "http://127.0.0.1:1"], "127.0.0.1:1"), (["--plot", "/nowhere/x.txt"], "/nowhere"),
])  # fmt: skip
def test_an_invalid_option_is_reported_before_any_load(options: list[str], word: str) -> None:
    done = Completed(*options)
    assert done.code == 2 and word in str(done.error)


@pytest.mark.parametrize("suffix", [".png", ".pdf"])
def test_a_plot_that_needs_matplotlib_is_refused_before_any_load(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with FakeServer() as server:
        done = Completed("--base-url", server.url, "--plot", tmp_path / f"x{suffix}")
    assert done.code == 2 and "matplotlib is not installed" in str(done.error)
    assert not server.asked and not list(tmp_path.iterdir())
