"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from headway.errors import InvalidRequest
from headway.server.anthropic.messages_input import (
    RENAMED,
    CountRequest,
    MessagesRequest,
    chat_request,
)
from headway.server.context import Context
from headway.server.generation.conversation import Conversation, open_conversation, template_options
from headway.server.generation.request_fields import chat_tokens_of, check_model
from headway.server.generation.runs import Delta, Outlet, Straight
from headway.server.generation.stream import Events, Watched, Whole, named_event
from headway.server.http.errors import ApiError, api_error, renamed
from headway.server.toolcalls.choice import tool_use
from headway.server.toolcalls.formats import Piece, gathered

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def messages(context: Context, body: MessagesRequest) -> Watched:
    """The answer to one request, streamed or whole."""
    if body.stream:
        return MessageEvents(context, lambda outlet: _events(context, body, outlet))
    return Whole(context, lambda: _answer(context, body))


async def count_tokens(context: Context, body: CountRequest) -> dict[str, int]:
    """The number of tokens that a conversation has for this model."""
    check_model(context, body.model)
    chat = chat_request(body)
    template = context.asking.need_tokenizer().chat_template
    use = tool_use(template, chat.tools, chat.tool_choice, parser=context.tool_call_parser)
    tokens = await chat_tokens_of(context, chat.messages, use, template_options(chat, use))
    return {"input_tokens": len(tokens)}


class MessageEvents(Events):
    """Events that are named; `message_stop` is the last."""

    last = b""

    def failed(self, failure: ApiError) -> bytes:
        return named_event(failure.anthropic_body)


class Message:
    """One message in the making, as events."""

    def __init__(self, context: Context, opened: Conversation) -> None:
        self._context, self._opened = context, opened
        self._answer = opened.answers[0]
        self._num_blocks = 0
        self._open: str | None = None  # the kind of the block that grows

    def value(self, content: list[dict[str, Any]], reason: str | None) -> dict[str, Any]:
        """The message; `reason` is why the answer ended, None while it goes on."""
        return {
            "id": self._opened.id, "type": "message", "role": "assistant",
            "model": self._context.model_name, "content": content, **self._stop(reason),
            "usage": self._usage(),
        }  # fmt: skip

    def push(self, delta: Delta) -> list[dict[str, Any]]:
        """The events of what the answer gained."""
        events = [event for piece in self._answer.pieces(delta) for event in self._grow(piece)]
        if delta.finish_reason is not None:
            reason = self._answer.finish_reason(delta.finish_reason)
            ended = {"type": "message_delta", "delta": self._stop(reason), "usage": self._usage()}
            events += [*self._close(), ended, {"type": "message_stop"}]
        return events

    def _grow(self, piece: Piece) -> list[dict[str, Any]]:
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
        """Why the answer ended, in Anthropic's words."""
        stop_string = self._opened.run.samples[0].stop_string
        if reason == "stop" and stop_string is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop_string}
        return {"stop_reason": STOP_REASONS.get(reason or ""), "stop_sequence": None}

    def _usage(self) -> dict[str, int]:
        """Tokens; Anthropic's input tokens leave out those found in the cache."""
        run = self._opened.run
        return {
            "input_tokens": len(run.prompt) - run.num_cached, "output_tokens": run.num_generated,
            "cache_creation_input_tokens": 0, "cache_read_input_tokens": run.num_cached,
        }  # fmt: skip


async def _open(context: Context, body: MessagesRequest, *, is_live: bool) -> Conversation:
    try:
        chat = chat_request(body)
        return await open_conversation(context, chat, id_prefix="msg", is_live=is_live)
    except (ApiError, InvalidRequest) as error:
        raise renamed(api_error(error), RENAMED) from error


async def _answer(context: Context, body: MessagesRequest) -> dict[str, Any]:
    opened = await _open(context, body, is_live=False)
    (delta,) = await opened.all_deltas()
    answer = opened.answers[0]
    parsed = gathered(answer.pieces(delta))
    content: list[dict[str, Any]] = []
    if parsed.content:
        content.append({"type": "text", "text": parsed.content})
    for call in parsed.calls:
        block = {"type": "tool_use", "id": call.id, "name": call.name}
        content.append({**block, "input": _object(call.arguments)})
    return Message(context, opened).value(content, answer.finish_reason(delta.finish_reason))


async def _events(
    context: Context, body: MessagesRequest, outlet: Outlet | None
) -> AsyncGenerator[bytes, None]:
    opened = await _open(context, body, is_live=True)
    message = Message(context, opened)
    before = named_event({"type": "message_start", "message": message.value([], None)})

    def form(deltas: list[Delta]) -> bytes:
        return b"".join(named_event(event) for delta in deltas for event in message.push(delta))

    straight = Straight(outlet, form) if outlet else None
    async with aclosing(opened.run.deltas(straight)) as news:
        async for deltas in news:
            yield before + form(deltas)
            before = b""


def _object(arguments: str) -> Any:
    """Arguments as an object; a call that was cut has none that can be read."""
    try:
        found = json.loads(arguments)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
