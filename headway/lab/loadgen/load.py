"""The load generator: send a workload to a server and record what happens to every request.

Open loop: a request is sent at its arrival time, even if the server is slow, so that queues build up
as with real users. Closed loop: a new request is sent when another one ends.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import msgspec

from headway.errors import ConfigError
from headway.lab.loadgen.http_client import (
    Address,
    BadResponse,
    Client,
    ConnectionLost,
    EventReader,
    HttpResponse,
)
from headway.lab.loadgen.requests import RequestFormat
from headway.lab.workload.request import WorkloadRequest

MODEL_SECONDS = 10.0  # to name the first model
GOOD_ENDS = ("stop", "length", "tool_calls")
OnDone = Callable[[], object]  # called when a request has ended


@dataclass(slots=True)
class Outcome:
    """The result of one request. Times are seconds on one clock."""

    due: float  # scheduled sending time
    sent: float = 0.0
    first: float = 0.0  # arrival of the first token; 0.0 without one
    last: float = 0.0
    gaps: array[float] = field(default_factory=lambda: array("d"))  # between pieces of text
    num_input: int = 0
    num_output: int = 0
    error: str | None = None  # kind of error, a few words
    detail: str = ""

    @property
    def num_pieces(self) -> int:
        return len(self.gaps) + (self.first > 0)

    def record(self, now: float) -> None:
        """A piece of text has arrived."""
        if self.first:
            self.gaps.append(now - self.last)
        else:
            self.first = now
        self.last = now


class Usage(msgspec.Struct):
    """Token counts as the server reports them."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Delta(msgspec.Struct):
    """A piece of a chat's answer."""

    content: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None


class Choice(msgspec.Struct):
    """What one choice gains in an event; a completion has `text`, a chat `delta`."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def has_token(self) -> bool:
        """Whether it has text; a chat's first event has only the role, the last only its end."""
        if self.delta is None:
            return bool(self.text) or self.finish_reason is None
        return bool(self.delta.content or self.delta.reasoning_content or self.delta.tool_calls)


class StreamEvent(msgspec.Struct):
    """One event of a stream; other fields are not read."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None


class StreamRecorder:
    """Reads one streamed response and records when its tokens arrive."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.is_done = False  # [DONE] has arrived
        self._events = EventReader()
        self._usage = Usage()
        self._ends: list[str] = []

    def receive(self, body: bytes) -> None:
        now = perf_counter()
        for event in self._events.feed(body):
            if event == b"[DONE]":
                self.is_done = True
            else:
                self._read(_decode_event(event), now)

    def _read(self, event: StreamEvent, now: float) -> None:
        self._usage = event.usage or self._usage
        if event.error:
            self.outcome.error, self.outcome.detail = "error in stream", _message(event.error)
        for choice in event.choices or ():
            if choice.finish_reason:
                self._ends.append(choice.finish_reason)
            if choice.has_token:
                self.outcome.record(now)

    def finish(self, num_input: int) -> None:
        """Count the tokens of the complete response, and set an error if it is incomplete."""
        outcome, usage = self.outcome, self._usage
        outcome.num_input = num_input if usage.prompt_tokens is None else usage.prompt_tokens
        num_output = usage.completion_tokens
        outcome.num_output = outcome.num_pieces if num_output is None else num_output
        bad = [end for end in self._ends if end not in GOOD_ENDS]
        if outcome.error is None and not (self.is_done and self._ends):
            outcome.error = "incomplete stream"
        elif outcome.error is None and bad:
            outcome.error = f"finished by {bad[0]}"


_decode_event = msgspec.json.Decoder(StreamEvent).decode


class LoadGenerator:
    """Sends requests to one server and keeps the outcome of each."""

    def __init__(
        self, client: Client, request_format: RequestFormat, timeout: float, on_done: OnDone
    ) -> None:
        self.outcomes: list[Outcome] = []
        self.max_concurrency = 0  # highest number of open requests
        self._client, self._format = client, request_format
        self._timeout, self._on_done = timeout, on_done
        self._num_open = 0

    async def open_loop(self, requests: Sequence[WorkloadRequest]) -> None:
        """Send each request at its arrival time, counted from now."""
        start, tasks = perf_counter(), []
        for request in sorted(requests, key=lambda request: request.arrival):
            await asyncio.sleep(max(0.0, start + request.arrival - perf_counter()))
            tasks.append(asyncio.create_task(self.send(request, start + request.arrival)))
        await asyncio.gather(*tasks)

    async def closed_loop(self, requests: Sequence[WorkloadRequest], concurrency: int) -> None:
        """Keep `concurrency` requests open until all are done."""
        left = iter(requests)

        async def send_in_turn() -> None:
            for request in left:
                await self.send(request, perf_counter())

        await asyncio.gather(*(send_in_turn() for _ in range(concurrency)))

    async def send(self, request: WorkloadRequest, due: float) -> None:
        outcome = Outcome(due)
        recorder, body = StreamRecorder(outcome), self._format.body(request)
        self.outcomes.append(outcome)
        self._num_open += 1
        self.max_concurrency = max(self.max_concurrency, self._num_open)
        outcome.sent = perf_counter()
        try:
            async with asyncio.timeout(self._timeout):
                response = await self._client.post(self._format.path, body, recorder.receive)
            if response.status == 200:
                recorder.finish(request.num_prompt)
            else:
                outcome.error, outcome.detail = f"HTTP {response.status}", _body(response)
        except Exception as error:  # a server may send anything: count the error and continue
            outcome.error, outcome.detail = _kind(error), str(error)
        finally:
            self._num_open -= 1
            self._on_done()


def _kind(error: Exception) -> str:
    """The kind of an error in a few words, for counting."""
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, ConnectionLost | ConnectionError):
        return "connection lost"
    return "cannot connect" if isinstance(error, OSError) else "bad response"


def _body(response: HttpResponse) -> str:
    """The message of an OpenAI error, or the beginning of any other body."""
    try:
        return _message(json.loads(response.body)["error"])
    except (ValueError, KeyError, TypeError):
        return response.body[:500].decode("utf-8", "replace")


def _message(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)


def find_model(address: Address, api_key: str | None = None) -> str:
    """The name of the first model of a server; ConfigError if it cannot be read."""
    where = f"http{'s' * address.is_secure}://{address.host}:{address.port}"

    async def get() -> HttpResponse:
        with closing(Client(address, api_key)) as client:
            async with asyncio.timeout(MODEL_SECONDS):
                return await client.get("/v1/models")

    try:
        response = asyncio.run(get())
    except (OSError, ConnectionLost, BadResponse) as error:
        raise ConfigError(
            f"no server at {where} ({_kind(error)}); start one with `headway serve` or set --base-url"
        ) from None
    if response.status in (401, 403):
        raise ConfigError(
            f"the server at {where} rejects the API key (HTTP {response.status}); set --api-key"
        )
    try:
        return str(json.loads(response.body)["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        raise ConfigError(
            f"{where}/v1/models lists no model (HTTP {response.status}); set --model"
        ) from None


def send(
    address: Address,
    request_format: RequestFormat,
    requests: Sequence[WorkloadRequest],
    *,
    concurrency: int | None = None,
    timeout: float = 600.0,
    api_key: str | None = None,
    on_done: OnDone = lambda: None,
) -> LoadGenerator:
    """Send all requests: at their arrival times, or in a closed loop of that concurrency."""

    async def run() -> LoadGenerator:
        with closing(Client(address, api_key)) as client:
            load = LoadGenerator(client, request_format, timeout, on_done)
            if concurrency is None:
                await load.open_loop(requests)
            else:
                await load.closed_loop(requests, concurrency)
            return load

    return asyncio.run(run())
