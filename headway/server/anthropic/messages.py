"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from headway.errors import InvalidRequest
from headway.server.anthropic.protocol import (
    FIELD_NAMES,
    CountRequest,
    MessagesRequest,
    chat_request,
)
from headway.server.context import Context
from headway.server.generation.prepared_chat import PreparedChat, prepare_chat
from headway.server.generation.prompt_runs import Delta, DirectWriter
from headway.server.generation.prompts import chat_tokens_of, template_options
from headway.server.generation.request_fields import check_model
from headway.server.generation.stream import (
    CancellableResponse,
    CompleteResponse,
    EventStreamResponse,
    named_event,
)
from headway.server.http.connection import ChunkWriter
from headway.server.http.errors import ApiError, api_error, rename_param
from headway.server.toolcalls.choice import tool_use
from headway.server.toolcalls.formats import OutputPiece, merge_pieces

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def messages(context: Context, body: MessagesRequest) -> CancellableResponse:
    """The response to one request, streamed or complete."""
    if body.stream:
        return MessageEventStream(context, lambda writer: _events(context, body, writer))
    return CompleteResponse(context, lambda: _response(context, body))


async def count_tokens(context: Context, body: CountRequest) -> dict[str, int]:
    """The number of tokens of a conversation."""
    check_model(context, body.model)
    chat = chat_request(body)
    template = context.input_processor.need_tokenizer().chat_template
    use = tool_use(template, chat.tools, chat.tool_choice, parser=context.settings.tool_call_parser)
    tokens = await chat_tokens_of(context, chat.messages, use, template_options(chat, use))
    return {"input_tokens": len(tokens)}


class MessageEventStream(EventStreamResponse):
    """Named events; the last one is `message_stop`."""

    last_event = b""

    def error_event(self, failure: ApiError) -> bytes:
        return named_event(failure.anthropic_body)


class MessageBuilder:
    """Builds one message object and its events."""

    def __init__(self, context: Context, chat: PreparedChat) -> None:
        self._context, self._chat = context, chat
        self._parser = chat.parsers[0]
        self._num_blocks = 0
        self._open: str | None = None  # the type of the open content block

    def value(self, content: list[dict[str, Any]], reason: str | None) -> dict[str, Any]:
        """The message object; `reason` is the finish reason, None while generation continues."""
        return {
            "id": self._chat.id, "type": "message", "role": "assistant",
            "model": self._context.model_name, "content": content, **self._stop(reason),
            "usage": self._usage(),
        }  # fmt: skip

    def push(self, delta: Delta) -> list[dict[str, Any]]:
        """The events of a delta."""
        events = [event for piece in self._parser.push(delta) for event in self._extend(piece)]
        if delta.finish_reason is not None:
            reason = self._parser.finish_reason(delta.finish_reason)
            last = {"type": "message_delta", "delta": self._stop(reason), "usage": self._usage()}
            events += [*self._close(), last, {"type": "message_stop"}]
        return events

    def _extend(self, piece: OutputPiece) -> list[dict[str, Any]]:
        if isinstance(piece, str):
            events = [] if self._open == "text" else self._begin({"type": "text", "text": ""})
            return [*events, self._delta({"type": "text_delta", "text": piece})]
        events = []
        if piece.id is not None:
            block: dict[str, Any] = {
                "type": "tool_use",
                "id": piece.id,
                "name": piece.name,
                "input": {},
            }
            events = self._begin(block)
        if piece.arguments:
            part = {"type": "input_json_delta", "partial_json": piece.arguments}
            events.append(self._delta(part))
        return events

    def _begin(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        ended = self._close()
        self._open = block["type"]
        index = self._num_blocks
        self._num_blocks += 1
        return [*ended, {"type": "content_block_start", "index": index, "content_block": block}]

    def _close(self) -> list[dict[str, Any]]:
        if self._open is None:
            return []
        self._open = None
        return [{"type": "content_block_stop", "index": self._num_blocks - 1}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta}

    def _stop(self, reason: str | None) -> dict[str, Any]:
        """The finish reason in the terms of Anthropic's API."""
        stop_string = self._chat.run.samples[0].stop_string
        if reason == "stop" and stop_string is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop_string}
        return {"stop_reason": STOP_REASONS.get(reason or ""), "stop_sequence": None}

    def _usage(self) -> dict[str, int]:
        """Token counts; Anthropic's input tokens exclude cached ones."""
        run = self._chat.run
        return {
            "input_tokens": len(run.prompt) - run.num_cached, "output_tokens": run.num_generated,
            "cache_creation_input_tokens": 0, "cache_read_input_tokens": run.num_cached,
        }  # fmt: skip


async def _open(context: Context, body: MessagesRequest, *, is_live: bool) -> PreparedChat:
    try:
        chat = chat_request(body)
        context.ignored_fields.report(body.model_extra or {})
        return await prepare_chat(context, chat, id_prefix="msg", is_live=is_live)
    except (ApiError, InvalidRequest) as error:
        raise rename_param(api_error(error), FIELD_NAMES) from error


async def _response(context: Context, body: MessagesRequest) -> dict[str, Any]:
    chat = await _open(context, body, is_live=False)
    (delta,) = await chat.all_deltas()
    parser = chat.parsers[0]
    parsed = merge_pieces(parser.push(delta))
    content: list[dict[str, Any]] = []
    if parsed.content:
        content.append({"type": "text", "text": parsed.content})
    for call in parsed.calls:
        block = {"type": "tool_use", "id": call.id, "name": call.name}
        content.append({**block, "input": _object(call.arguments)})
    builder = MessageBuilder(context, chat)
    return builder.value(content, parser.finish_reason(delta.finish_reason))


async def _events(
    context: Context, body: MessagesRequest, writer: ChunkWriter | None
) -> AsyncGenerator[bytes, None]:
    chat = await _open(context, body, is_live=True)
    builder = MessageBuilder(context, chat)
    first = named_event({"type": "message_start", "message": builder.value([], None)})

    def encode(deltas: list[Delta]) -> bytes:
        return b"".join(named_event(event) for delta in deltas for event in builder.push(delta))

    direct_writer = DirectWriter(writer, encode) if writer else None
    async with aclosing(chat.run.deltas(direct_writer)) as batches:
        async for deltas in batches:
            yield first + encode(deltas)
            first = b""


def _object(arguments: str) -> Any:
    """Tool arguments as an object; empty if they are incomplete or not an object."""
    try:
        found = json.loads(arguments)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
