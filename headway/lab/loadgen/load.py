"""A load generator: jobs sent to a server, each at its time or as many at once as told.

Open loop: a request is sent when it is due, however slow the server is, so that queues show as
they would to real users. Closed loop: a new one when another ends. Every request ends: with its
last token, an error by kind, or its timeout. Counts nothing together; `serve_report` does.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from headway.errors import ConfigError
from headway.lab.loadgen.http_client import Address, Client, Reply
from headway.lab.loadgen.http_stream import BadResponse, ConnectionLost, EventReader
from headway.lab.loadgen.requests import Wording
from headway.lab.workload.jobs import Job

GOOD_ENDS = ("stop", "length", "tool_calls")
Tell = Callable[[], object]  # a request has ended


@dataclass(slots=True)
class Outcome:
    """What became of one request. Times are seconds on one clock."""

    due: float  # when it was to be sent
    sent: float = 0.0
    first: float = 0.0  # the first token; 0.0: none came
    last: float = 0.0
    gaps: array[float] = field(default_factory=lambda: array("d"))  # between pieces of text
    num_input: int = 0
    num_output: int = 0
    error: str | None = None  # its kind, few words
    detail: str = ""

    @property
    def num_pieces(self) -> int:
        return len(self.gaps) + (self.first > 0)


class Reading:
    """Follows one streamed response and notes when each token came."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.is_done = False  # [DONE] has come
        self._events = EventReader()
        self._usage: dict[str, Any] | None = None
        self._ends: list[str] = []

    def receive(self, body: bytes) -> None:
        now = perf_counter()
        for event in self._events.feed(body):
            if event == b"[DONE]":
                self.is_done = True
            else:
                self._read(json.loads(event), now)

    def _read(self, event: dict[str, Any], now: float) -> None:
        if event.get("usage"):
            self._usage = event["usage"]
        if event.get("error"):
            self.outcome.error, self.outcome.detail = "error in stream", _words(event["error"])
        for choice in event.get("choices") or ():
            if end := choice.get("finish_reason"):
                self._ends.append(end)
            if _has_token(choice):
                self._note(now)

    def _note(self, now: float) -> None:
        outcome = self.outcome
        if outcome.first:
            outcome.gaps.append(now - outcome.last)
        else:
            outcome.first = now
        outcome.last = now

    def settle(self, num_input: int) -> None:
        """The response is over: count its tokens, and say if it broke off."""
        outcome, usage = self.outcome, self._usage or {}
        outcome.num_input = usage.get("prompt_tokens", num_input)
        outcome.num_output = usage.get("completion_tokens", outcome.num_pieces)
        if outcome.error is None and not (self.is_done and self._ends):
            outcome.error = "stream broke off"
        bad = [end for end in self._ends if end not in GOOD_ENDS]
        if outcome.error is None and bad:
            outcome.error = f"finished by {bad[0]}"


def _has_token(choice: dict[str, Any]) -> bool:
    """A piece of text; not a chat's first line with the role, nor a bare finish reason."""
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text")) or choice.get("finish_reason") is None
    return any(delta.get(name) for name in ("content", "reasoning_content", "tool_calls"))


class Load:
    """Sends jobs to one server and keeps what became of each."""

    def __init__(self, client: Client, wording: Wording, timeout: float, tell: Tell) -> None:
        self.outcomes: list[Outcome] = []
        self.most_open = 0
        self._client, self._wording = client, wording
        self._timeout, self._tell = timeout, tell
        self._num_open = 0

    async def open_loop(self, jobs: Sequence[Job]) -> None:
        """Each job at its arrival, counted from now."""
        start, tasks = perf_counter(), []
        for job in sorted(jobs, key=lambda job: job.arrival):
            await asyncio.sleep(max(0.0, start + job.arrival - perf_counter()))
            tasks.append(asyncio.create_task(self.ask(job, start + job.arrival)))
        await asyncio.gather(*tasks)

    async def closed_loop(self, jobs: Sequence[Job], concurrency: int) -> None:
        """So many at once, until all are done."""
        left = iter(jobs)

        async def one_after_another(left: Iterator[Job]) -> None:
            for job in left:
                await self.ask(job, perf_counter())

        await asyncio.gather(*(one_after_another(left) for _ in range(concurrency)))

    async def ask(self, job: Job, due: float) -> None:
        """One request, to its end."""
        outcome = Outcome(due)
        reading, body = Reading(outcome), self._wording.body(job)
        self.outcomes.append(outcome)
        self._num_open += 1
        self.most_open = max(self.most_open, self._num_open)
        outcome.sent = perf_counter()
        try:
            async with asyncio.timeout(self._timeout):
                reply = await self._client.post(self._wording.path, body, reading.receive)
            if reply.status == 200:
                reading.settle(job.num_prompt)
            else:
                outcome.error, outcome.detail = f"HTTP {reply.status}", _body(reply)
        except (
            Exception
        ) as error:  # whatever a server may send: it is counted, and the load goes on
            outcome.error, outcome.detail = _kind(error), str(error)
        finally:
            self._num_open -= 1
            self._tell()


def _kind(error: Exception) -> str:
    """Few words, the same for all errors of a kind."""
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, ConnectionLost | ConnectionError):
        return "connection lost"
    return "cannot connect" if isinstance(error, OSError) else "bad response"


def _body(reply: Reply) -> str:
    """The message of an error's body, or its beginning if it is none of OpenAI's."""
    try:
        return _words(json.loads(reply.body)["error"])
    except (ValueError, KeyError, TypeError):
        return reply.body[:500].decode("utf-8", "replace")


def _words(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)


async def first_model(client: Client, timeout: float = 10.0) -> str:
    """The name of the model that a server has; ConfigError if it cannot be asked."""
    where = f"http{'s' * client.address.is_secure}://{client.address.host}:{client.address.port}"
    try:
        async with asyncio.timeout(timeout):
            reply = await client.get("/v1/models")
    except (OSError, ConnectionLost, BadResponse) as error:
        raise ConfigError(
            f"url: no server answers at {where} ({_kind(error)}); start one with `headway serve`"
        ) from None
    return _model_of(reply, where)


def _model_of(reply: Reply, where: str) -> str:
    if reply.status in (401, 403):
        raise ConfigError(
            f"api-key: the server at {where} does not accept it (HTTP {reply.status})"
        )
    try:
        return str(json.loads(reply.body)["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        raise ConfigError(
            f"url: {where}/v1/models names no model (HTTP {reply.status}); give --model"
        ) from None


def send(
    address: Address,
    wording: Wording,
    jobs: Sequence[Job],
    *,
    concurrency: int | None = None,
    timeout: float = 600.0,
    api_key: str | None = None,
    tell: Tell = lambda: None,
) -> Load:
    """All jobs, by their arrivals or, where a concurrency is given, so many at once."""

    async def run() -> Load:
        client = Client(address, api_key)
        load = Load(client, wording, timeout, tell)
        try:
            if concurrency is None:
                await load.open_loop(jobs)
            else:
                await load.closed_loop(jobs, concurrency)
        finally:
            client.close()
        return load

    return asyncio.run(run())


def find_model(address: Address, api_key: str | None = None) -> str:
    """The name of the first model that the server has."""

    async def run() -> str:
        client = Client(address, api_key)
        try:
            return await first_model(client)
        finally:
            client.close()

    return asyncio.run(run())
