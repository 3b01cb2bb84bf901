"""POST /v1/chat/completions: a conversation in, the assistant's next message out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import partial
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from headway.server.context import Context
from headway.server.generation.conversation import Conversation, open_conversation
from headway.server.generation.logprobs import chat_shape, prompt_shape
from headway.server.generation.runs import Delta, Outlet, Straight
from headway.server.generation.stream import Chunks, Events, Watched, Whole, usage_of
from headway.server.http.errors import to_json
from headway.server.http.offload import aside
from headway.server.openai.protocol import ChatRequest
from headway.server.toolcalls.formats import gathered

KIND, CHUNK_KIND = "chat.completion", "chat.completion.chunk"
ROLE = '"delta":{"role":"assistant","content":""}'


def chat(context: Context, body: ChatRequest) -> Watched:
    """The answer to one request, streamed or whole."""
    if body.stream:
        return Events(context, lambda outlet: _events(context, body, outlet))
    return Whole(context, lambda: _answer(context, body))


class Shape:
    """What the parts of one answer look like, by what its request asked for."""

    def __init__(self, body: ChatRequest, opened: Conversation) -> None:
        self.opened = opened
        self._has_logprobs, self._has_ids = bool(body.logprobs), bool(body.return_token_ids)
        self._are_tokens_ids = bool(body.return_tokens_as_token_ids)
        self._num_sent = [0] * len(opened.answers)  # token ids, by choice

    @property
    def usage(self) -> dict[str, Any]:
        run = self.opened.run
        return usage_of(len(run.prompt), run.num_generated, run.num_cached)

    @property
    def prompt_ids(self) -> dict[str, Any]:
        """The prompt's token ids, if they are wanted."""
        return {"prompt_token_ids": self.opened.run.prompt} if self._has_ids else {}

    def logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if not self._has_logprobs:
            return None
        tokenizer = self.opened.tokenizer
        return chat_shape(tokenizer, delta.scores, as_ids=self._are_tokens_ids)

    def token_ids(self, choice: int) -> dict[str, Any]:
        """Token ids of a choice that were not returned before, if they are wanted."""
        if not self._has_ids:
            return {}
        tokens = self.opened.run.samples[choice].tokens
        new = tokens[self._num_sent[choice] :]
        self._num_sent[choice] = len(tokens)
        return {"token_ids": new}


async def _answer(context: Context, body: ChatRequest) -> dict[str, Any]:
    opened = await open_conversation(context, body, id_prefix="chatcmpl", is_live=False)
    shape, choices = Shape(body, opened), []
    for index, delta in enumerate(await opened.all_deltas()):
        answer = opened.answers[index]
        size = len(delta.scores) * ((opened.run.asked.logprobs or 0) + 1)
        choices.append({
            "index": index,
            "message": _message(gathered(answer.pieces(delta))),
            "logprobs": await aside(size, partial(shape.logprobs, delta)),
            "finish_reason": answer.finish_reason(delta.finish_reason),
            **shape.token_ids(index),
        })  # fmt: skip
    value: dict[str, Any] = {
        "id": opened.id, "object": KIND, "created": opened.created, "model": context.model_name,
        "system_fingerprint": context.fingerprint or None, "choices": choices,
        "usage": shape.usage, **shape.prompt_ids,
    }  # fmt: skip
    if body.prompt_logprobs is not None:
        run = opened.run
        size, num_tokens = (body.prompt_logprobs + 1) * len(run.prompt), len(run.prompt)
        write = partial(prompt_shape, opened.tokenizer, num_tokens, run.prompt_scores)
        value["prompt_logprobs"] = await aside(size, write)
    return value


def _message(parsed: Any) -> dict[str, Any]:
    """A complete answer as a message."""
    message = {"role": "assistant", "content": parsed.content, "refusal": None}
    if parsed.calls:
        message["tool_calls"] = [call.as_message() for call in parsed.calls]
    return message


async def _events(
    context: Context, body: ChatRequest, outlet: Outlet | None
) -> AsyncGenerator[bytes, None]:
    opened = await open_conversation(context, body, id_prefix="chatcmpl", is_live=True)
    shape = Shape(body, opened)
    chunks = Chunks(context, opened.id, CHUNK_KIND, opened.created, body.stream_options)
    first = _top(chunks, shape, shape.prompt_ids)
    roles = "".join(chunks.chunk(index, ROLE, top=first) for index in range(len(opened.answers)))

    def form(deltas: list[Delta]) -> bytes:
        return "".join(_event(shape, chunks, delta) for delta in deltas).encode("ascii")

    straight = Straight(outlet, form) if outlet else None
    async with aclosing(opened.run.deltas(straight)) as news:
        async for deltas in news:
            yield roles.encode("ascii") + form(deltas)
            roles = ""
    if chunks.has_usage:
        yield chunks.usage(shape.usage)


def _event(shape: Shape, chunks: Chunks, delta: Delta) -> str:
    """A delta's text and calls, and its end apart: clients take an end's delta for empty."""
    answer = shape.opened.answers[delta.choice]
    members = [_member(piece) for piece in answer.pieces(delta)]
    scores = shape.logprobs(delta)
    if not members and delta.scores:
        members = [_member("")]
    event, top = "", _top(chunks, shape, {})
    for member in members:
        ids = shape.token_ids(delta.choice)
        event += chunks.chunk(delta.choice, member, scores, choice=ids, top=top)
        scores = None
    if delta.finish_reason is not None:
        reason = answer.finish_reason(delta.finish_reason)
        ids = shape.token_ids(delta.choice)
        event += chunks.chunk(delta.choice, '"delta":{}', finish_reason=reason, choice=ids, top=top)
    return event


def _member(piece: Any) -> str:
    """A piece as a chunk's `"delta":{...}`."""
    if isinstance(piece, str):
        return f'"delta":{{"content":{quoted(piece)}}}'
    return f'"delta":{{"tool_calls":[{to_json(piece.as_chunk()).decode()}]}}'


def _top(chunks: Chunks, shape: Shape, more: Mapping[str, Any]) -> dict[str, Any]:
    """Members of an event beside its choices."""
    if chunks.is_continuous:
        return {"usage": shape.usage, **more}
    return {**more, "usage": None} if more and chunks.has_usage else dict(more)
