"""POST /v1/responses: OpenAI's Responses API, without stored responses."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from itertools import count
from typing import Any

from headway.errors import InvalidRequest
from headway.server.context import Context
from headway.server.generation.logprobs import token_entries
from headway.server.generation.prepared_chat import PreparedChat, prepare_chat
from headway.server.generation.prompt_runs import Delta, DirectWriter
from headway.server.generation.stream import (
    CancellableResponse,
    CompleteResponse,
    EventStreamResponse,
    named_event,
)
from headway.server.http.connection import ChunkWriter
from headway.server.http.errors import ApiError, api_error, rename_param
from headway.server.openai.responses_input import FIELD_NAMES, ResponsesRequest, chat_request
from headway.server.openai.responses_items import OutputItems

INCOMPLETE = {"length": "max_output_tokens"}


def responses(context: Context, body: ResponsesRequest) -> CancellableResponse:
    """The response to one request, streamed or complete."""
    if body.stream:
        return ResponsesEventStream(context, body)
    return CompleteResponse(context, lambda: _response(context, body))


class ResponsesEventStream(EventStreamResponse):
    """Named and numbered events; the last one has the final status of the response."""

    last_event = b""

    def __init__(self, context: Context, body: ResponsesRequest) -> None:
        self._numbers = count()
        super().__init__(context, lambda writer: _events(context, body, writer, self._numbers))

    def error_event(self, failure: ApiError) -> bytes:
        error = failure.body["error"]
        members = {name: error[name] for name in ("code", "message", "param")}
        return named_event({"type": "error", **members, "sequence_number": next(self._numbers)})


class ResponseBuilder:
    """Builds one response object and its events."""

    def __init__(self, context: Context, body: ResponsesRequest, chat: PreparedChat) -> None:
        self.items = OutputItems(chat.parsers[0])
        self._context, self._body, self._chat = context, body, chat

    def push(self, delta: Delta) -> list[dict[str, Any]]:
        """The events of a delta; the last delta closes the open item."""
        logprobs = None
        if self._body.wants_logprobs:
            logprobs = token_entries(self._chat.tokenizer, delta.logprobs)
        events = self.items.push(delta, logprobs)
        if delta.finish_reason is not None:
            status = "incomplete" if delta.finish_reason in INCOMPLETE else "completed"
            events += self.items.close(status)
            response = self.value(delta.finish_reason)
            events.append({"type": f"response.{response['status']}", "response": response})
        return events

    def value(self, reason: str | None) -> dict[str, Any]:
        """The response object; `reason` is the finish reason, None while generation continues."""
        body, chat, limit = self._body, self._chat, INCOMPLETE.get(reason or "")
        status = "in_progress" if reason is None else "incomplete" if limit else "completed"
        text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {}
        return {
            "id": chat.id, "object": "response", "created_at": chat.created,
            "status": status, "background": False, "error": None,
            "incomplete_details": {"reason": limit} if limit else None,
            "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
            "model": self._context.model_name, "output": self.items.output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None, "reasoning": {"effort": None, "summary": None},
            "store": False, "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": body.tool_choice or "auto", "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p, "truncation": "disabled",
            "usage": None if reason is None else self._usage(), "user": body.user,
            "metadata": body.metadata or {},
        }  # fmt: skip

    def _usage(self) -> dict[str, Any]:
        run = self._chat.run
        num_prompt, num_generated = len(run.prompt), run.num_generated
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": run.num_cached},
            "output_tokens": num_generated,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + num_generated,
        }


async def _open(context: Context, body: ResponsesRequest, *, is_live: bool) -> PreparedChat:
    try:
        chat = chat_request(body)
        return await prepare_chat(context, chat, id_prefix="resp", field="input", is_live=is_live)
    except (ApiError, InvalidRequest) as error:
        raise rename_param(api_error(error), FIELD_NAMES) from error


async def _response(context: Context, body: ResponsesRequest) -> dict[str, Any]:
    chat = await _open(context, body, is_live=False)
    response = ResponseBuilder(context, body, chat)
    (delta,) = await chat.all_deltas()
    response.push(delta)
    return response.value(delta.finish_reason)


async def _events(
    context: Context, body: ResponsesRequest, writer: ChunkWriter | None, numbers: Iterator[int]
) -> AsyncGenerator[bytes, None]:
    chat = await _open(context, body, is_live=True)
    response = ResponseBuilder(context, body, chat)
    first_events = [
        {"type": f"response.{status}", "response": response.value(None)}
        for status in ("created", "in_progress")
    ]

    def numbered(events: list[dict[str, Any]]) -> bytes:
        return b"".join(
            named_event({**event, "sequence_number": next(numbers)}) for event in events
        )

    def encode(deltas: list[Delta]) -> bytes:
        return numbered([event for delta in deltas for event in response.push(delta)])

    direct_writer = DirectWriter(writer, encode) if writer else None
    async with aclosing(chat.run.deltas(direct_writer)) as batches:
        async for deltas in batches:
            yield numbered(first_events) + encode(deltas)
            first_events = []
