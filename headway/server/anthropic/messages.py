"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API."""

from __future__ import annotations

import json
from typing import Any

from headway.server.anthropic.protocol import (
    FIELD_NAMES,
    CountRequest,
    CountResponse,
    MessagesRequest,
    chat_request,
)
from headway.server.context import Context
from headway.server.generation.prepared_chat import PreparedChat, prepare_chat
from headway.server.generation.prompt_runs import Delta
from headway.server.generation.prompts import chat_tokens_of
from headway.server.generation.request_fields import check_model
from headway.server.generation.stream import Output, named_event
from headway.server.http.errors import ApiError, rename_params
from headway.server.http.offload import offload
from headway.server.toolcalls.choice import tool_use
from headway.server.toolcalls.formats import (
    OutputPiece,
    ReasoningDelta,
    merge_pieces,
    merge_reasoning,
)

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


async def messages(context: Context, body: MessagesRequest, is_live: bool) -> MessageOutput:
    """Validate and tokenize a request; ApiError names the field that is wrong."""
    with rename_params(FIELD_NAMES):
        chat = chat_request(body)
        context.ignored_fields.report(body.model_extra or {})
        return MessageOutput(
            context, await prepare_chat(context, chat, id_prefix="msg", is_live=is_live)
        )


async def count_tokens(context: Context, body: CountRequest) -> CountResponse:
    """The number of tokens of a conversation."""
    check_model(context, body.model)
    chat = chat_request(body)
    template = context.input_processor.need_tokenizer().chat_template
    use = tool_use(template, chat.tools, chat.tool_choice, parser=context.tool_call_parser)
    tokens = await chat_tokens_of(context, chat, use, context.max_model_len)
    return {"input_tokens": len(tokens)}


class MessageOutput(Output):
    """One message object, or named events; the last one is `message_stop`."""

    def __init__(self, context: Context, chat: PreparedChat) -> None:
        super().__init__(context, chat.id, [chat.run], 1)
        self._run, self._parser = chat.run, chat.parsers[0]
        self._num_blocks = 0
        self._open: str | None = None  # the type of the open content block

    async def value(self, deltas: list[Delta]) -> object:
        (delta,), parser = deltas, self._parser
        pieces = await offload(parser.work(delta), lambda: parser.push(delta))
        parsed, content = merge_pieces(pieces), list[object]()
        if thinking := merge_reasoning(pieces):
            content.append({"type": "thinking", "thinking": thinking, "signature": self.id})
        if parsed.content:
            content.append({"type": "text", "text": parsed.content})
        for call in parsed.calls:
            block = {"type": "tool_use", "id": call.id, "name": call.name}
            content.append({**block, "input": _object(call.arguments)})
        return self._message(content, parser.finish_reason(delta.finish_reason))

    def first(self) -> bytes:
        return named_event({"type": "message_start", "message": self._message([], None)})

    def encode(self, deltas: list[Delta]) -> bytes:
        encoded = b""
        for delta in deltas:
            for piece in self._parser.push(delta):
                encoded += self._extend(piece)
            if delta.finish_reason is not None:
                stop = self._stop(self._parser.finish_reason(delta.finish_reason))
                last = {"type": "message_delta", "delta": stop, "usage": self._usage()}
                encoded += self._close() + named_event(last) + named_event({"type": "message_stop"})
        return encoded

    def error(self, failure: ApiError) -> bytes:
        return named_event(failure.anthropic_body)

    def _message(self, content: list[object], reason: str | None) -> object:
        """The message object; `reason` is the finish reason, None while generation continues."""
        return {
            "id": self.id, "type": "message", "role": "assistant",
            "model": self.context.model_name, "content": content, **self._stop(reason),
            "usage": self._usage(),
        }  # fmt: skip

    def _extend(self, piece: OutputPiece) -> bytes:
        """The events of a part of a content block."""
        if isinstance(piece, str):
            begun = b"" if self._open == "text" else self._begin("text", text="")
            return begun + self._delta(type="text_delta", text=piece)
        if isinstance(piece, ReasoningDelta):
            begun = b""
            if self._open != "thinking":
                begun = self._begin("thinking", thinking="", signature="")
            return begun + self._delta(type="thinking_delta", thinking=piece.text)
        begun = b""
        if piece.id is not None:
            begun = self._begin("tool_use", id=piece.id, name=piece.name, input={})
        if not piece.arguments:
            return begun
        return begun + self._delta(type="input_json_delta", partial_json=piece.arguments)

    def _begin(self, type: str, **members: object) -> bytes:
        closed, index = self._close(), self._num_blocks
        self._open = type
        self._num_blocks += 1
        block = {"type": type, **members}
        begun = {"type": "content_block_start", "index": index, "content_block": block}
        return closed + named_event(begun)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        signed = b""
        if self._open == "thinking":  # clients return only signed thinking
            signed = self._delta(type="signature_delta", signature=self.id)
        self._open = None
        return signed + named_event({"type": "content_block_stop", "index": self._num_blocks - 1})

    def _delta(self, **delta: str) -> bytes:
        index = self._num_blocks - 1
        return named_event({"type": "content_block_delta", "index": index, "delta": delta})

    def _stop(self, reason: str | None) -> dict[str, str | None]:
        """The finish reason in the terms of Anthropic's API."""
        stop_string = self._run.samples[0].stop_string
        if reason == "stop" and stop_string is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop_string}
        return {"stop_reason": STOP_REASONS.get(reason or ""), "stop_sequence": None}

    def _usage(self) -> dict[str, object]:
        """Token counts; Anthropic's input tokens exclude cached ones."""
        run, details = self._run, dict[str, object]()
        if self._parser.has_reasoning:
            num_thinking = self._parser.num_reasoning_tokens
            details["output_tokens_details"] = {"thinking_tokens": num_thinking}
        return {
            **details,
            "input_tokens": len(run.prompt) - run.num_cached, "output_tokens": run.num_generated,
            "cache_creation_input_tokens": 0, "cache_read_input_tokens": run.num_cached,
        }  # fmt: skip


def _object(arguments: str) -> Any:
    """Tool arguments as an object; empty if they are incomplete or not an object."""
    try:
        found = json.loads(arguments)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
