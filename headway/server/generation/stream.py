"""Responses as one JSON object or as server-sent events; a disconnect cancels the request.

The work of a request runs in a task while another task watches the connection. The work is
cancelled if the client disconnects, stops reading, or the request exceeds its time limit. Tokens
come from `PromptRun.deltas` (prompt_runs.py); an endpoint's `Output` makes their events.
"""

from __future__ import annotations

import asyncio
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, ClassVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from headway.errors import NotResumable
from headway.server.context import Context
from headway.server.generation.event_ids import (
    CURSOR,
    MAX_CHOICES,
    EventIds,
    cursor_of,
    wants_ids,
)
from headway.server.generation.prompt_runs import (
    Delta,
    DirectWriter,
    PromptRun,
    TextEvent,
    collect,
    merge_deltas,
)
from headway.server.http.connection import chunk_writer_of
from headway.server.http.errors import ApiError, api_error
from headway.server.http.json_output import MAX_PART_ITEMS, large_to_json, to_json
from headway.server.http.offload import MAX_INLINE_SIZE, offload
from headway.server.openai.protocol import StreamOptions
from headway.server.openai.response_models import CompletionDetails, Usage

SIZE_PER_TOKEN = 20  # upper estimate of the numbers that a response contains per token
DONE = b"data: [DONE]\n\n"
UNBUFFERED = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # for proxies
Prepare = Callable[[bool], Awaitable["Output"]]  # True: text is made as it is generated


class Output(ABC):
    """The output of one request in the format of an API, as one value or as events."""

    def __init__(
        self, context: Context, id: str, runs: Sequence[PromptRun], num_choices: int
    ) -> None:
        self.context, self.id = context, id
        cursor = CURSOR.get()
        self.created = int(time.time()) if cursor is None else cursor.created  # Unix seconds
        self.num_events = 0  # so far, in an API that numbers them
        self.runs, self.num_choices = runs, num_choices

    @abstractmethod
    async def value(self, deltas: list[Delta]) -> Any:
        """The complete response, from one delta for each choice."""

    @abstractmethod
    def encode(self, deltas: list[Delta]) -> bytes:
        """The events of deltas."""

    async def encode_batch(self, deltas: list[Delta]) -> bytes:
        """The events of deltas that are not written directly."""
        return self.encode(deltas)

    def text_event(self) -> TextEvent | None:
        """Encodes a text of the only choice; None if events depend on more than new text."""
        return None

    def first(self) -> bytes:
        """The events before those of the first deltas."""
        return b""

    def last(self) -> bytes:
        """The events after those of the last deltas."""
        return b""

    def error(self, failure: ApiError) -> bytes:
        """The last events of a stream that fails."""
        return b"data: " + to_json(failure.body) + b"\n\n" + DONE


class CancellableResponse(Response, ABC):
    """A response whose work is cancelled when its client disconnects or stops reading."""

    def __init__(self, context: Context, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(headers=headers, media_type=self.media_type)
        self._context = context
        self._sending_since: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._work(scope, receive, send))
        disconnect = asyncio.create_task(_wait_for_disconnect(receive))
        stall = self._context.settings.stall_timeout
        tasks = {work, disconnect}
        try:
            while not (await asyncio.wait(tasks, timeout=stall, return_when="FIRST_COMPLETED"))[0]:
                if self._is_stalled():
                    break
        finally:
            disconnect.cancel()
            work.cancel()
            await asyncio.wait({work})  # it cancels its requests in the engine
        if not work.cancelled():
            work.result()

    def _is_stalled(self) -> bool:
        """Whether the client has read nothing for `stall_timeout` seconds."""
        since, stall = self._sending_since, self._context.settings.stall_timeout
        return since is not None and asyncio.get_running_loop().time() - since >= stall

    @abstractmethod
    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    async def _send(self, send: Send, message: Message) -> None:
        """Send a message; ClientDisconnect where an ASGI server raises OSError."""
        self._sending_since = asyncio.get_running_loop().time()
        try:
            await send(message)
        except OSError as error:
            raise ClientDisconnect from error
        self._sending_since = None

    def _error(self, error: Exception) -> ApiError:
        return api_error(error, is_closing=self._context.engine.is_closing)


class CompleteResponse(CancellableResponse):
    """One JSON object, sent when `work` has returned it."""

    media_type = "application/json"

    def __init__(self, context: Context, work: Callable[[], Awaitable[object]]) -> None:
        super().__init__(context)
        self._compute = work

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._context.settings.request_timeout):
                value = await self._compute()
            response = Response(await _to_json(value), media_type=self.media_type)
        except Exception as error:
            response = self._error(error).response_at(scope["path"])
        await response(scope, receive, send)


class EventStreamResponse(CancellableResponse):
    """Server-sent events. A failure before the first event is a plain error, later an event."""

    media_type = "text/event-stream"

    def __init__(self, context: Context, prepare: Prepare) -> None:
        super().__init__(context, UNBUFFERED)
        self._prepare = prepare
        self._started: Output | None = None  # once its first event is sent

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._context.settings.request_timeout):
                last = await self._send_events(scope, send)
        except ClientDisconnect:
            return
        except Exception as error:
            failure = self._error(error)
            if self._started is None:
                await failure.response_at(scope["path"])(scope, receive, send)
                return
            last = self._started.error(failure)
        with suppress(ClientDisconnect):
            await self._send(send, _body(last, more=False))

    async def _send_events(self, scope: Scope, send: Send) -> bytes:
        """Send all events except the last ones, which are returned."""
        cursor = cursor_of(scope)
        CURSOR.set(cursor)
        output, writer = await self._prepare(True), chunk_writer_of(scope)
        if cursor is None and not (wants_ids(scope) and output.num_choices <= MAX_CHOICES):
            source: Output | EventIds = output
        else:
            source = EventIds(output, cursor)
        direct_writer = DirectWriter(writer, source.encode, source.text_event()) if writer else None
        first = source.first()
        async with aclosing(merge_deltas(output.runs, direct_writer)) as batches:
            async for deltas in batches:
                events = first + await source.encode_batch(deltas)
                if self._started is None:
                    await self._send(send, self._start())
                    self._started, first = output, b""
                await self._send(send, _body(events, more=True))
        return source.last()

    def _start(self) -> Message:
        headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        return {"type": "http.response.start", "status": 200, "headers": headers}


def _body(body: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


def generate(context: Context, is_streamed: bool | None, prepare: Prepare) -> CancellableResponse:
    """The response to one request, streamed or complete."""
    if is_streamed:
        return EventStreamResponse(context, prepare)

    async def work() -> Any:
        output = await prepare(False)
        return await output.value(await collect(output.runs, output.num_choices))

    return CompleteResponse(context, work)


async def _to_json(value: Any) -> bytes:
    usage = value.get("usage") or {}
    size = SIZE_PER_TOKEN * (usage.get("total_tokens", 0) + value.get("count", 0))
    if size <= MAX_INLINE_SIZE:
        return to_json(value)
    return await offload(size, lambda: large_to_json(value))


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class ChunkOutput(Output):
    """An output whose events are chunks; their common parts are encoded once.

    If the usage is requested, every chunk before the last contains `"usage": null`, as in OpenAI's
    API.
    """

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    text_member: ClassVar[tuple[str, str]]  # what is before and after the text in a choice
    shows_output = True  # False: only the prompt is echoed
    is_plain = False  # True: new text is all that changes from chunk to chunk

    def __init__(
        self,
        context: Context,
        id: str,
        runs: Sequence[PromptRun],
        num_choices: int,
        options: StreamOptions | None,
    ) -> None:
        super().__init__(context, id, runs, num_choices)
        common = f'"id":{quoted(id)},"object":"{self.chunk_kind}","created":{self.created}'
        common += f',"model":{quoted(context.model_name)}'
        if context.fingerprint:
            common += f',"system_fingerprint":{quoted(context.fingerprint)}'
        self.has_usage = bool(options and options.include_usage)
        self.is_continuous = self.has_usage and bool(options and options.continuous_usage_stats)
        self._head = f'data: {{{common},"choices":['
        self._tail = ('],"usage":null}' if self.has_usage else "]}") + "\n\n"

    @abstractmethod
    def chunks(self, delta: Delta, top: Mapping[str, object] | None) -> str:
        """The chunks of a delta; `top` has their members other than the choices."""

    def encode(self, deltas: list[Delta]) -> bytes:
        top = {"usage": self.usage} if self.is_continuous else None
        return "".join([self.chunks(delta, top) for delta in deltas]).encode("ascii")

    def text_event(self) -> TextEvent | None:
        if not self.is_plain or self.is_continuous or self.num_choices != 1:
            return None
        begin, end = self.text_member
        before = f'{self._head}{{"index":0,{begin}'
        after = f'{end},"logprobs":null,"finish_reason":null}}{self._tail}'
        return lambda text: f"{before}{quoted(text)}{after}".encode("ascii")

    def last(self) -> bytes:
        """The usage, if it is requested, and [DONE]."""
        if not self.has_usage:
            return DONE
        return f'{self._head}],"usage":{to_json(self.usage).decode()}}}\n\n'.encode("ascii") + DONE

    @property
    def usage(self) -> Usage:
        num_prompt = sum(len(run.prompt) for run in self.runs)
        num_generated = sum(run.num_generated for run in self.runs) if self.shows_output else 0
        usage: Usage = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
            "prompt_tokens_details": {"cached_tokens": sum(run.num_cached for run in self.runs)},
        }
        if details := self.completion_details:
            usage["completion_tokens_details"] = details
        return usage

    @property
    def completion_details(self) -> CompletionDetails:
        """The numbers of drafts, if there are drafts or the request has a prediction."""
        num_drafted = sum(run.num_drafted for run in self.runs)
        if not num_drafted and self.runs[0].params.prediction is None:
            return {}
        num_accepted = sum(run.num_accepted for run in self.runs)
        return {
            "accepted_prediction_tokens": num_accepted,
            "rejected_prediction_tokens": num_drafted - num_accepted,
        }

    def response(self, choices: Sequence[object]) -> dict[str, Any]:
        """The complete response with these choices."""
        return {
            "id": self.id, "object": self.kind, "created": self.created,
            "model": self.context.model_name,
            "system_fingerprint": self.context.fingerprint or None,
            "choices": choices, "usage": self.usage,
        }  # fmt: skip

    def chunk(
        self,
        index: int,
        member: str,
        logprobs: Mapping[str, Any] | None = None,
        finish_reason: str | None = None,
        *,
        choice: Mapping[str, object] | None = None,
        top: Mapping[str, object] | None = None,
    ) -> str:
        """One event with one choice; `member` is its content as JSON, such as `"text":"..."`.

        `choice` has further members of the choice, `top` further members of the event.
        """
        if logprobs is None and finish_reason is None and not choice:
            rest = '"logprobs":null,"finish_reason":null'
        else:
            encoded = "null" if logprobs is None else _encode_logprobs(logprobs)
            members = _members({"finish_reason": finish_reason, **(choice or {})})
            rest = f'"logprobs":{encoded},{members}'
        if not top:
            return f'{self._head}{{"index":{index},{member},{rest}}}{self._tail}'
        return f'{self._head}{{"index":{index},{member},{rest}}}],{_members(top)}}}\n\n'


def _members(values: Mapping[str, object]) -> str:
    """The members of an object as JSON, without the braces."""
    return to_json(values).decode()[1:-1]


def named_event(event: Mapping[str, object]) -> bytes:
    """An event named by its type, as in the Responses and Messages APIs."""
    return f"event: {event['type']}\ndata: {to_json(event).decode()}\n\n".encode("ascii")


def _encode_logprobs(logprobs: Mapping[str, list[Any]]) -> str:
    """Log probabilities as JSON, encoded in parts if there are many."""
    is_long = len(next(iter(logprobs.values()))) > MAX_PART_ITEMS
    return (large_to_json(logprobs) if is_long else to_json(logprobs)).decode()


def new_id(kind: str) -> str:
    """A random id for a response and its requests. It need not be secret, so `random` suffices.

    A response that is resumed keeps its id; NotResumable if it is one of another API.
    """
    if (cursor := CURSOR.get()) is not None:
        if cursor.response_id.partition("-")[0] != kind:
            raise NotResumable("Last-Event-ID is from another endpoint", differs=True)
        return cursor.response_id
    return f"{kind}-{random.getrandbits(96):024x}"
