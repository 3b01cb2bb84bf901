"""POST /v1/chat/completions: a conversation in, the assistant's next message out."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, NamedTuple

from headway.engine.tokenizer import Tokenizer
from headway.sampling import SamplingParams
from headway.server.context import Context
from headway.server.errors import refused, to_json
from headway.server.logprobs import chat_shape
from headway.server.protocol import ChatRequest
from headway.server.runs import Delta, Outlet, Run, Straight, joined
from headway.server.streaming import Chunks, Events, Watched, Whole, new_id, usage_of
from headway.server.structure import checked, grammar_of
from headway.server.tool_calls import CallReader, ToolCall
from headway.server.tools import ToolUse, tool_use
from headway.server.wishes import (
    chat_tokens_of,
    check_model,
    check_num_choices,
    naming,
    sampling,
)  # fmt: skip

KIND, CHUNK_KIND = "chat.completion", "chat.completion.chunk"
ROLE = '"delta":{"role":"assistant","content":""}'


def chat(context: Context, body: ChatRequest) -> Watched:
    """The answer to one request, streamed or whole."""
    if body.stream:
        return Events(context, lambda outlet: _events(context, body, outlet))
    return Whole(context, lambda: _answer(context, body))


class Opened(NamedTuple):
    """A request that has been read."""

    id: str
    created: int  # Unix seconds
    run: Run
    choices: list[Choice]

    @property
    def usage(self) -> dict[str, Any]:
        run = self.run
        return usage_of(len(run.prompt), run.num_generated, run.num_cached)


class Choice:
    """One answer: text and tool calls, and their logprobs where they are wanted."""

    def __init__(self, tokenizer: Tokenizer | None, reader: CallReader | None) -> None:
        self._tokenizer = tokenizer  # None: no logprobs
        self._reader = reader  # None: no tools

    def message(self, text: str) -> dict[str, Any]:
        """A whole answer as a message."""
        if self._reader is None:
            return {"role": "assistant", "content": text, "refusal": None}
        content, calls = self._reader.parse(text)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["tool_calls"] = [call.as_message() for call in calls]
        return message

    def members(self, delta: Delta) -> list[str]:
        """What a delta adds to the message, each as a chunk's `"delta":{...}`."""
        if self._reader is None:
            texts: list[str | ToolCall] = [delta.text] if delta.text else []
        else:
            texts = self._reader.push(delta.text)
            if delta.finish_reason is not None:
                texts += self._reader.finish()
        if not texts and delta.scores:
            texts = [""]
        number = (self._reader.num_calls if self._reader else 0) - sum(
            isinstance(each, ToolCall) for each in texts
        )
        members = []
        for each in texts:
            if isinstance(each, ToolCall):
                call = to_json(each.as_delta(number)).decode()
                members.append(f'"delta":{{"tool_calls":[{call}]}}')
                number += 1
            else:
                members.append(f'"delta":{{"content":{quoted(each)}}}')
        return members

    def finish_reason(self, reason: str | None) -> str | None:
        has_called = self._reader is not None and self._reader.num_calls > 0
        return "tool_calls" if has_called and reason == "stop" else reason

    def logprobs(self, delta: Delta) -> dict[str, Any] | None:
        return None if self._tokenizer is None else chat_shape(self._tokenizer, delta.scores)


async def _open(context: Context, body: ChatRequest, *, is_live: bool) -> Opened:
    check_model(context, body.model)
    check_num_choices(context, 1, body.n or 1)
    tokenizer = context.asking.need_tokenizer()
    is_parallel = body.parallel_tool_calls is not False
    use = tool_use(tokenizer.chat_template, body.tools, body.tool_choice, parallel=is_parallel)
    asked = await _sampling(context, body, use)
    tokens = await chat_tokens_of(context, body.messages, _options(body, use))
    id = new_id("chatcmpl")
    scored = tokenizer if body.logprobs else None
    choices = [Choice(scored, use.reader() if use else None) for _ in range(asked.n)]
    run = Run(context, id, tokens, asked, field="messages", is_live=is_live)
    return Opened(id, int(time.time()), run, choices)


async def _sampling(context: Context, body: ChatRequest, use: ToolUse | None) -> SamplingParams:
    if body.top_logprobs is not None and not body.logprobs:
        raise refused("top_logprobs", "is only for requests with logprobs: true")
    max_tokens = body.max_completion_tokens or body.max_tokens
    if max_tokens == 0:
        raise refused("max_tokens", "must be at least 1, not 0")
    grammar = await grammar_of(body, context.settings)
    if use is not None and use.grammar is not None:
        if grammar is not None:
            raise refused("tool_choice", "asks for a call, response_format for something else")
        grammar = use.grammar
        with naming("tools"):
            await checked(grammar, use.check)
    scores = (body.top_logprobs or 0) if body.logprobs else None
    return await sampling(context, body, max_tokens=max_tokens, logprobs=scores, grammar=grammar)


def _options(body: ChatRequest, use: ToolUse | None) -> dict[str, Any]:
    """What the template is told beside the messages."""
    options = dict(body.chat_template_kwargs or {})
    for name in ("template", "messages", "tools", "bos", "eos"):
        if name in options:
            raise refused("chat_template_kwargs", f"must not have {name}")
    if body.add_generation_prompt is not None:
        options["add_generation_prompt"] = body.add_generation_prompt
    if use is not None:
        options["tools"] = list(use.tools)
    return options


async def _answer(context: Context, body: ChatRequest) -> dict[str, Any]:
    opened = await _open(context, body, is_live=False)
    gained: list[list[Delta]] = [[] for _ in opened.choices]
    async with aclosing(opened.run.deltas()) as news:
        async for deltas in news:
            for delta in deltas:
                gained[delta.choice].append(delta)
    choices = []
    for index, (choice, deltas) in enumerate(zip(opened.choices, gained, strict=True)):
        whole = joined(deltas)
        message = choice.message(whole.text)
        about = {"index": index, "message": message, "logprobs": choice.logprobs(whole)}
        choices.append({**about, "finish_reason": choice.finish_reason(whole.finish_reason)})
    about = {"id": opened.id, "object": KIND, "created": opened.created}
    return {**about, "model": context.model_name, "choices": choices, "usage": opened.usage}


async def _events(
    context: Context, body: ChatRequest, outlet: Outlet | None
) -> AsyncGenerator[bytes, None]:
    opened = await _open(context, body, is_live=True)
    has_usage = bool(body.stream_options and body.stream_options.include_usage)
    chunks = Chunks(opened.id, CHUNK_KIND, opened.created, context.model_name, has_usage)
    roles = "".join(chunks.chunk(index, ROLE) for index in range(len(opened.choices)))

    def form(deltas: list[Delta]) -> bytes:
        events = [_event(opened.choices[delta.choice], chunks, delta) for delta in deltas]
        return "".join(events).encode("ascii")

    straight = Straight(outlet, form) if outlet else None
    async with aclosing(opened.run.deltas(straight)) as news:
        async for deltas in news:
            yield roles.encode("ascii") + form(deltas)
            roles = ""
    if has_usage:
        yield chunks.usage(opened.usage)


def _event(choice: Choice, chunks: Chunks, delta: Delta) -> str:
    """A delta's text and calls, and its end apart: clients take an end's delta for empty."""
    event, scores = "", choice.logprobs(delta)
    for member in choice.members(delta):
        event += chunks.chunk(delta.choice, member, scores)
        scores = None
    if delta.finish_reason is not None:
        reason = choice.finish_reason(delta.finish_reason)
        event += chunks.chunk(delta.choice, '"delta":{}', finish_reason=reason)
    return event
