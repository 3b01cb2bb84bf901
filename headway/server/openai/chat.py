"""POST /v1/chat/completions: generates the next message of a conversation."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import partial
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from headway.server.context import Context
from headway.server.generation.logprobs import chat_logprobs, prompt_logprobs_of
from headway.server.generation.prepared_chat import PreparedChat, prepare_chat
from headway.server.generation.prompt_runs import Delta, DirectWriter
from headway.server.generation.stream import (
    CancellableResponse,
    ChunkEncoder,
    CompleteResponse,
    EventStreamResponse,
    usage_of,
)
from headway.server.http.connection import ChunkWriter
from headway.server.http.json_output import to_json
from headway.server.http.offload import offload
from headway.server.openai.protocol import ChatRequest
from headway.server.toolcalls.formats import OutputPiece, ParsedOutput, merge_pieces

KIND, CHUNK_KIND = "chat.completion", "chat.completion.chunk"
ROLE = '"delta":{"role":"assistant","content":""}'


def chat(context: Context, body: ChatRequest) -> CancellableResponse:
    """The response to one request, streamed or complete."""
    if body.stream:
        return EventStreamResponse(context, lambda writer: _events(context, body, writer))
    return CompleteResponse(context, lambda: _response(context, body))


class ChatFormatter:
    """Formats the parts of one response as its request asks for."""

    def __init__(self, body: ChatRequest, prepared: PreparedChat) -> None:
        self.prepared = prepared
        self._has_logprobs, self._has_ids = bool(body.logprobs), bool(body.return_token_ids)
        self._tokens_as_ids = bool(body.return_tokens_as_token_ids)
        self._num_sent = [0] * len(prepared.parsers)  # token ids, by choice

    @property
    def usage(self) -> dict[str, Any]:
        run = self.prepared.run
        return usage_of(len(run.prompt), run.num_generated, run.num_cached)

    @property
    def prompt_ids(self) -> dict[str, Any]:
        """The prompt's token ids, if the request asks for them."""
        return {"prompt_token_ids": self.prepared.run.prompt} if self._has_ids else {}

    def logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if not self._has_logprobs:
            return None
        tokenizer = self.prepared.tokenizer
        return chat_logprobs(tokenizer, delta.logprobs, as_ids=self._tokens_as_ids)

    def token_ids(self, choice: int) -> dict[str, Any]:
        """New token ids of a choice, if the request asks for them."""
        if not self._has_ids:
            return {}
        tokens = self.prepared.run.samples[choice].tokens
        new = tokens[self._num_sent[choice] :]
        self._num_sent[choice] = len(tokens)
        return {"token_ids": new}


async def _response(context: Context, body: ChatRequest) -> dict[str, Any]:
    prepared = await prepare_chat(context, body, id_prefix="chatcmpl", is_live=False)
    formatter, choices, run = ChatFormatter(body, prepared), [], prepared.run
    for index, delta in enumerate(await prepared.all_deltas()):
        parser = prepared.parsers[index]
        size = len(delta.logprobs) * ((run.sampling_params.logprobs or 0) + 1)
        choices.append({
            "index": index,
            "message": _message(merge_pieces(parser.push(delta))),
            "logprobs": await offload(size, partial(formatter.logprobs, delta)),
            "finish_reason": parser.finish_reason(delta.finish_reason),
            **formatter.token_ids(index),
        })  # fmt: skip
    value: dict[str, Any] = {
        "id": prepared.id, "object": KIND, "created": prepared.created,
        "model": context.model_name,
        "system_fingerprint": context.fingerprint or None, "choices": choices,
        "usage": formatter.usage, **formatter.prompt_ids,
    }  # fmt: skip
    if body.prompt_logprobs is not None:
        size, num_tokens = (body.prompt_logprobs + 1) * len(run.prompt), len(run.prompt)
        write = partial(prompt_logprobs_of, prepared.tokenizer, num_tokens, run.prompt_logprobs)
        value["prompt_logprobs"] = await offload(size, write)
    return value


def _message(parsed: ParsedOutput) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant", "content": parsed.content, "refusal": None,
    }  # fmt: skip
    if parsed.calls:
        message["tool_calls"] = [call.as_message() for call in parsed.calls]
    return message


async def _events(
    context: Context, body: ChatRequest, writer: ChunkWriter | None
) -> AsyncGenerator[bytes, None]:
    prepared = await prepare_chat(context, body, id_prefix="chatcmpl", is_live=True)
    formatter = ChatFormatter(body, prepared)
    encoder = ChunkEncoder(context, prepared.id, CHUNK_KIND, prepared.created, body.stream_options)
    first = _top_members(encoder, formatter, formatter.prompt_ids)
    num_choices = len(prepared.parsers)
    roles = "".join(encoder.chunk(index, ROLE, top=first) for index in range(num_choices))

    def encode(deltas: list[Delta]) -> bytes:
        return "".join(_event(formatter, encoder, delta) for delta in deltas).encode("ascii")

    direct_writer = DirectWriter(writer, encode) if writer else None
    async with aclosing(prepared.run.deltas(direct_writer)) as batches:
        async for deltas in batches:
            yield roles.encode("ascii") + encode(deltas)
            roles = ""
    if encoder.has_usage:
        yield encoder.usage(formatter.usage)


def _event(formatter: ChatFormatter, encoder: ChunkEncoder, delta: Delta) -> str:
    """The chunks of a delta.

    The finish reason has its own chunk, because clients ignore the content of the last chunk.
    """
    parser = formatter.prepared.parsers[delta.choice]
    members = [_member(piece) for piece in parser.push(delta)]
    logprobs = formatter.logprobs(delta)
    if not members and delta.logprobs:
        members = [_member("")]
    event, top = "", _top_members(encoder, formatter, {})
    for member in members:
        ids = formatter.token_ids(delta.choice)
        event += encoder.chunk(delta.choice, member, logprobs, choice=ids, top=top)
        logprobs = None
    if delta.finish_reason is not None:
        reason = parser.finish_reason(delta.finish_reason)
        ids = formatter.token_ids(delta.choice)
        event += encoder.chunk(
            delta.choice, '"delta":{}', finish_reason=reason, choice=ids, top=top
        )
    return event


def _member(piece: OutputPiece) -> str:
    """A piece of output as the member `"delta":{...}` of a chunk."""
    if isinstance(piece, str):
        return f'"delta":{{"content":{quoted(piece)}}}'
    return f'"delta":{{"tool_calls":[{to_json(piece.as_chunk()).decode()}]}}'


def _top_members(
    encoder: ChunkEncoder, formatter: ChatFormatter, more: Mapping[str, Any]
) -> dict[str, Any]:
    """Members of an event other than its choices."""
    if encoder.is_continuous:
        return {"usage": formatter.usage, **more}
    return {**more, "usage": None} if more and encoder.has_usage else dict(more)
