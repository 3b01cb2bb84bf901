"""A conversation on its way through the engine, whatever API it came by.

Chat completions, responses and messages are all read as a `ChatRequest`. They differ in how the
pieces of an answer, text and tool calls, are written. Knows no connection and writes no JSON.
"""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import Any, NamedTuple

from headway.sampling_params import SamplingParams
from headway.server.context import Context
from headway.server.generation.request_fields import (
    chat_tokens_of,
    check_model,
    check_num_choices,
    most_tokens,
    naming,
    sampling,
    truncated,
)  # fmt: skip
from headway.server.generation.response_format import checked, grammar_of
from headway.server.generation.runs import Delta, Run, joined
from headway.server.generation.stream import new_id
from headway.server.http.errors import refused
from headway.server.openai.protocol import ChatRequest
from headway.server.toolcalls.choice import ToolUse, tool_use
from headway.server.toolcalls.formats import Piece
from headway.server.toolcalls.parser import ToolCallParser
from headway.text.tokenizer import Tokenizer

TEMPLATE_NAMES = ("template", "messages", "tools", "bos", "eos", "special")


class Answer:
    """One sample's answer: its deltas as text and tool calls."""

    def __init__(self, parser: ToolCallParser | None) -> None:
        self._parser = parser  # None: no tools

    def pieces(self, delta: Delta) -> list[Piece]:
        """What a delta adds: text, and parts of calls."""
        if self._parser is None:
            return [delta.text] if delta.text else []
        pieces = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            pieces += self._parser.finish()
        return pieces

    def finish_reason(self, reason: str | None) -> str | None:
        has_called = self._parser is not None and self._parser.num_calls > 0
        return "tool_calls" if has_called and reason == "stop" else reason


class Conversation(NamedTuple):
    """A request that has been read."""

    id: str
    created: int  # Unix seconds
    run: Run
    answers: list[Answer]
    tokenizer: Tokenizer

    async def all_deltas(self) -> list[Delta]:
        """Everything that each sample gains, joined, once all have ended."""
        gained: list[list[Delta]] = [[] for _ in self.answers]
        async with aclosing(self.run.deltas()) as news:
            async for deltas in news:
                for delta in deltas:
                    gained[delta.choice].append(delta)
        return [joined(deltas) for deltas in gained]


async def open_conversation(
    context: Context, body: ChatRequest, *, id_prefix: str, is_live: bool, field: str = "messages"
) -> Conversation:
    """Check a request and turn it into tokens; ApiError names the field that is wrong.

    `field` is the name of the conversation in the request's API.
    """
    check_model(context, body.model)
    check_num_choices(context, 1, body.n or 1)
    tokenizer = context.asking.need_tokenizer()
    use = tool_use(
        tokenizer.chat_template, body.tools, body.tool_choice,
        parallel=body.parallel_tool_calls is not False, parser=context.tool_call_parser,
        disable_additional_properties=context.settings.disable_additional_properties,
    )  # fmt: skip
    asked = await _sampling(context, body, use, tokenizer)
    options, most = template_options(body, use), most_tokens(context, body)
    tokens = await chat_tokens_of(context, body.messages, use, options, most)
    id = new_id(id_prefix)
    answers = [Answer(use.parser() if use else None) for _ in range(asked.n)]
    prompt = truncated(tokens, body)
    run = Run(context, id, prompt, asked, field=field, is_live=is_live)
    return Conversation(id, int(time.time()), run, answers, tokenizer)


async def _sampling(
    context: Context, body: ChatRequest, use: ToolUse | None, tokenizer: Tokenizer
) -> SamplingParams:
    if body.top_logprobs is not None and not body.logprobs:
        raise refused("top_logprobs", "is only for requests with logprobs: true")
    grammar = await grammar_of(body, context.settings)
    if use is not None and use.grammar is not None:
        if grammar is not None:
            raise refused("tool_choice", "asks for a call, response_format for something else")
        grammar = use.grammar
        with naming("tools"):
            await checked(grammar, use.check)
    if use is not None and tokenizer.id_of(use.format.open) in tokenizer.special_ids:
        body = body.model_copy(update={"skip_special_tokens": False})  # the call's tag is one
    return await sampling(
        context,
        body,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        grammar=grammar,
    )


def template_options(body: ChatRequest, use: ToolUse | None) -> dict[str, Any]:
    """The template's variables beside the messages."""
    options = dict(body.chat_template_kwargs or {})
    for name in TEMPLATE_NAMES:
        if name in options:
            raise refused("chat_template_kwargs", f"must not have {name}")
    for name in ("add_generation_prompt", "documents", "reasoning_effort"):
        if (value := getattr(body, name)) is not None:
            options[name] = value
    if body.continue_final_message:
        options["continue_final_message"] = True
    if body.add_special_tokens is not None:
        options["special"] = body.add_special_tokens
    if use is not None and not use.is_described:
        options["tools"] = list(use.tools)
    return options
