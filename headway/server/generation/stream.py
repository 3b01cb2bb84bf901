"""Responses as one JSON object or as server-sent events; a disconnect cancels the request.

The work of a request runs in a task while another task watches the connection. The work is
cancelled if the client disconnects, stops reading, or the request exceeds its time limit.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headway.server.context import Context
from headway.server.generation.prompt_runs import Delta, concatenate_deltas
from headway.server.http.connection import ChunkWriter, chunk_writer_of
from headway.server.http.errors import ApiError, api_error
from headway.server.http.json_output import MAX_PART_ITEMS, large_to_json, to_json
from headway.server.http.offload import MAX_INLINE_SIZE, offload
from headway.server.openai.protocol import StreamOptions

SIZE_PER_TOKEN = 20  # upper estimate of the numbers that a response contains per token
DONE = b"data: [DONE]\n\n"
UNBUFFERED = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # for proxies


class CancellableResponse(Response):
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

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError

    async def _send(self, send: Send, body: bytes, *, more: bool) -> None:
        self._sending_since = asyncio.get_running_loop().time()
        await send({"type": "http.response.body", "body": body, "more_body": more})
        self._sending_since = None

    def _error(self, error: Exception) -> ApiError:
        return api_error(error, is_closing=self._context.engine.is_closing)


class CompleteResponse(CancellableResponse):
    """One JSON object, sent when `work` has returned it."""

    media_type = "application/json"

    def __init__(self, context: Context, work: Callable[[], Awaitable[Any]]) -> None:
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
    """Server-sent events. A failure before the first event is a plain error, later an event.

    While this response waits for the next event, the generator of the events may write directly to
    the chunk writer, if there is one.
    """

    media_type = "text/event-stream"
    last_event = DONE

    def __init__(
        self,
        context: Context,
        events: Callable[[ChunkWriter | None], AsyncGenerator[bytes, None]],
    ) -> None:
        super().__init__(context, UNBUFFERED)
        self._events = events

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_started = False
        try:
            async with (
                asyncio.timeout(self._context.settings.request_timeout),
                aclosing(self._events(chunk_writer_of(scope))) as events,
            ):
                async for event in events:
                    if not is_started:
                        await send(self._start())
                        is_started = True
                    await self._send(send, event, more=True)
        except OSError as error:
            if not isinstance(error, TimeoutError):
                return  # ASGI servers may signal a disconnect this way
            await self._fail(error, is_started, scope, receive, send)
        except Exception as error:
            await self._fail(error, is_started, scope, receive, send)
        else:
            await self._send(send, self.last_event, more=False)

    async def _fail(
        self, error: Exception, is_started: bool, scope: Scope, receive: Receive, send: Send
    ) -> None:
        failure = self._error(error)
        if not is_started:
            return await failure.response_at(scope["path"])(scope, receive, send)
        return await self._send(send, self.error_event(failure) + self.last_event, more=False)

    def error_event(self, failure: ApiError) -> bytes:
        """The event that reports a failure after the stream has started."""
        return b"data: " + to_json(failure.body) + b"\n\n"

    def _start(self) -> dict[str, Any]:
        headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        return {"type": "http.response.start", "status": 200, "headers": headers}


async def collect(batches: AsyncGenerator[list[Delta], None], num_choices: int) -> list[Delta]:
    """The complete output of each choice, once all choices have ended."""
    deltas_of: list[list[Delta]] = [[] for _ in range(num_choices)]
    async with aclosing(batches):
        async for deltas in batches:
            for delta in deltas:
                deltas_of[delta.choice].append(delta)
    return [concatenate_deltas(deltas) for deltas in deltas_of]


async def _to_json(value: Mapping[str, Any]) -> bytes:
    usage = value.get("usage") or {}
    size = SIZE_PER_TOKEN * (usage.get("total_tokens", 0) + value.get("count", 0))
    if size <= MAX_INLINE_SIZE:
        return to_json(value)
    return await offload(size, lambda: large_to_json(value))


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class ChunkEncoder:
    """Encodes the chunks of one streamed response; their common parts are encoded once.

    If the usage is requested, every chunk before the last contains `"usage": null`, as in OpenAI's
    API.
    """

    def __init__(
        self, context: Context, id: str, kind: str, created: int, options: StreamOptions | None
    ) -> None:
        common = f'"id":{quoted(id)},"object":"{kind}","created":{created}'
        common += f',"model":{quoted(context.model_name)}'
        if context.fingerprint:
            common += f',"system_fingerprint":{quoted(context.fingerprint)}'
        self.has_usage = bool(options and options.include_usage)
        self.is_continuous = self.has_usage and bool(options and options.continuous_usage_stats)
        self._head = f'data: {{{common},"choices":['
        self._tail = ('],"usage":null}' if self.has_usage else "]}") + "\n\n"

    def chunk(
        self,
        index: int,
        member: str,
        logprobs: Any = None,
        finish_reason: str | None = None,
        *,
        choice: Mapping[str, Any] | None = None,
        top: Mapping[str, Any] | None = None,
    ) -> str:
        """One event with one choice; `member` is its content as JSON, such as `"text":"..."`.

        `choice` has further members of the choice, `top` further members of the event.
        """
        if logprobs is None and finish_reason is None and not choice:
            rest = '"logprobs":null,"finish_reason":null'
        else:
            encoded = "null" if logprobs is None else _encode_logprobs(logprobs)
            rest = f'"logprobs":{encoded},{_members({"finish_reason": finish_reason, **(choice or {})})}'
        if not top:
            return f'{self._head}{{"index":{index},{member},{rest}}}{self._tail}'
        return f'{self._head}{{"index":{index},{member},{rest}}}],{_members(top)}}}\n\n'

    def usage(self, usage: Mapping[str, Any]) -> bytes:
        """The last event, with the usage and no choices."""
        return f'{self._head}],"usage":{to_json(usage).decode()}}}\n\n'.encode("ascii")


def _members(values: Mapping[str, Any]) -> str:
    """The members of an object as JSON, without the braces."""
    return to_json(values).decode()[1:-1]


def named_event(event: Mapping[str, Any]) -> bytes:
    """An event named by its type, as in the Responses and Messages APIs."""
    return f"event: {event['type']}\ndata: {to_json(event).decode()}\n\n".encode("ascii")


def _encode_logprobs(logprobs: Mapping[str, list[Any]]) -> str:
    """Log probabilities as JSON, encoded in parts if there are many."""
    is_long = len(next(iter(logprobs.values()))) > MAX_PART_ITEMS
    return (large_to_json(logprobs) if is_long else to_json(logprobs)).decode()


def new_id(kind: str) -> str:
    """A random id for a response and its requests. It need not be secret, so `random` suffices."""
    return f"{kind}-{random.getrandbits(96):024x}"


def usage_of(num_prompt: int, num_generated: int, num_cached: int) -> dict[str, Any]:
    """The member `usage` of completions and chats."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
