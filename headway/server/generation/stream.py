"""Answers as they go out: one JSON, or server-sent events. Whoever goes away ends the work.

The work of a request runs beside a watch on its connection: the client leaving, the request's
time being over, or a client that no longer takes what it is sent, each cancel it.
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
from headway.server.http.connection import Outlet, outlet_of
from headway.server.http.errors import ApiError, api_error, to_json
from headway.server.http.json_output import PART, large_to_json
from headway.server.http.offload import SHORT, aside
from headway.server.openai.protocol import StreamOptions

PER_TOKEN = 20  # numbers that an answer may hold for each of its tokens, often far fewer
DONE = b"data: [DONE]\n\n"
EVENTS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # no proxy holds them back


class Watched(Response):
    """An answer whose work is cancelled when nobody waits for it any more."""

    def __init__(self, context: Context, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(headers=headers, media_type=self.media_type)
        self._context = context
        self._sending_since: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._work(scope, receive, send))
        gone = asyncio.create_task(_until_gone(receive))
        stall = self._context.settings.stall_timeout
        tasks = {work, gone}
        try:
            while not (await asyncio.wait(tasks, timeout=stall, return_when="FIRST_COMPLETED"))[0]:
                if self._is_stalled():
                    break
        finally:
            gone.cancel()
            work.cancel()
            await asyncio.wait({work})  # it still has requests to end
        if not work.cancelled():
            work.result()

    def _is_stalled(self) -> bool:
        """Whether the client has taken nothing for as long as is allowed."""
        since, stall = self._sending_since, self._context.settings.stall_timeout
        if since is None or stall is None:
            return False
        return asyncio.get_running_loop().time() - since >= stall

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError

    async def _send(self, send: Send, body: bytes, *, more: bool) -> None:
        self._sending_since = asyncio.get_running_loop().time()
        await send({"type": "http.response.body", "body": body, "more_body": more})
        self._sending_since = None

    def _error(self, error: Exception) -> ApiError:
        return api_error(error, is_closing=self._context.engine.is_closing)


class Whole(Watched):
    """One JSON, once it is there."""

    media_type = "application/json"

    def __init__(self, context: Context, work: Callable[[], Awaitable[Any]]) -> None:
        super().__init__(context)
        self._make = work

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._context.settings.request_timeout):
                value = await self._make()
            response = Response(await _to_json(value), media_type=self.media_type)
        except Exception as error:
            response = self._error(error).response_at(scope["path"])
        await response(scope, receive, send)


class Events(Watched):
    """Server-sent events. What fails before the first is an ordinary error, later an event.

    Who makes them may write to the outlet, if there is one, while nobody has asked for the next.
    """

    media_type = "text/event-stream"
    last = DONE

    def __init__(
        self,
        context: Context,
        events: Callable[[Outlet | None], AsyncGenerator[bytes, None]],
    ) -> None:
        super().__init__(context, EVENTS)
        self._events = events

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False
        try:
            async with (
                asyncio.timeout(self._context.settings.request_timeout),
                aclosing(self._events(outlet_of(scope))) as events,
            ):
                async for event in events:
                    if not has_begun:
                        await send(self._start())
                        has_begun = True
                    await self._send(send, event, more=True)
        except OSError as error:
            if not isinstance(error, TimeoutError):
                return  # the client has gone; a server may say so by this
            await self._fail(error, has_begun, scope, receive, send)
        except Exception as error:
            await self._fail(error, has_begun, scope, receive, send)
        else:
            await self._send(send, self.last, more=False)

    async def _fail(
        self, error: Exception, has_begun: bool, scope: Scope, receive: Receive, send: Send
    ) -> None:
        failure = self._error(error)
        if not has_begun:
            return await failure.response_at(scope["path"])(scope, receive, send)
        return await self._send(send, self.failed(failure) + self.last, more=False)

    def failed(self, failure: ApiError) -> bytes:
        """The event that tells of a failure after the stream has begun."""
        return b"data: " + to_json(failure.body) + b"\n\n"

    def _start(self) -> dict[str, Any]:
        headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        return {"type": "http.response.start", "status": 200, "headers": headers}


async def _to_json(value: Mapping[str, Any]) -> bytes:
    usage = value.get("usage") or {}
    size = PER_TOKEN * (usage.get("total_tokens", 0) + value.get("count", 0))
    return to_json(value) if size <= SHORT else await aside(size, lambda: large_to_json(value))


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Chunks:
    """Writes the events of one answer; the parts that all of them share are made once.

    Every chunk carries `"usage": null` where the usage comes at the end, as OpenAI's do.
    """

    def __init__(
        self, context: Context, id: str, kind: str, created: int, options: StreamOptions | None
    ) -> None:
        about = f'"id":{quoted(id)},"object":"{kind}","created":{created}'
        about += f',"model":{quoted(context.model_name)}'
        if context.fingerprint:
            about += f',"system_fingerprint":{quoted(context.fingerprint)}'
        self.has_usage = bool(options and options.include_usage)
        self.is_continuous = self.has_usage and bool(options and options.continuous_usage_stats)
        self._head = f'data: {{{about},"choices":['
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
        """One choice's part; `member` is the text as JSON, such as `"text":"..."`.

        `choice` are further members of the choice, `top` of the event.
        """
        if logprobs is None and finish_reason is None and not choice:
            rest = '"logprobs":null,"finish_reason":null'
        else:
            scores = "null" if logprobs is None else _dumped(logprobs)
            rest = f'"logprobs":{scores},{_members({"finish_reason": finish_reason, **(choice or {})})}'
        if not top:
            return f'{self._head}{{"index":{index},{member},{rest}}}{self._tail}'
        return f'{self._head}{{"index":{index},{member},{rest}}}],{_members(top)}}}\n\n'

    def usage(self, usage: Mapping[str, Any]) -> bytes:
        """The last event, which has no choices."""
        return f'{self._head}],"usage":{to_json(usage).decode()}}}\n\n'.encode("ascii")


def _members(values: Mapping[str, Any]) -> str:
    """The members of an object as JSON, without its braces."""
    return to_json(values).decode()[1:-1]


def named_event(event: Mapping[str, Any]) -> bytes:
    """An event whose name is its type, as OpenAI's newer and Anthropic's API have them."""
    return f"event: {event['type']}\ndata: {to_json(event).decode()}\n\n".encode("ascii")


def _dumped(logprobs: Mapping[str, list[Any]]) -> str:
    """Log probabilities as JSON, in parts if they are those of a long prompt."""
    is_long = len(next(iter(logprobs.values()))) > PART
    return (large_to_json(logprobs) if is_long else to_json(logprobs)).decode()


def new_id(kind: str) -> str:
    """An id for an answer and its requests; no secret, so it costs no call to the system."""
    return f"{kind}-{random.getrandbits(96):024x}"


def usage_of(num_prompt: int, num_generated: int, num_cached: int) -> dict[str, Any]:
    """Tokens, as both endpoints count them."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
