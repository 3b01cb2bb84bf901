"""Chat requests of all chat APIs, validated and tokenized.

Chat completions, responses and messages are all read as a `ChatRequest`. The APIs differ only in
how they write the output: text and tool calls. Knows no connections and writes no JSON.
"""

from __future__ import annotations

from typing import NamedTuple

from headway.sampling_params import SamplingParams
from headway.server.context import Context
from headway.server.generation.prompt_runs import Delta, PromptRun
from headway.server.generation.prompts import chat_tokens_of, max_prompt_tokens, truncate_prompt
from headway.server.generation.request_fields import (
    check_model,
    check_num_choices,
    sampling_params_of,
)
from headway.server.generation.response_format import check_in_thread, grammar_of
from headway.server.generation.stream import new_id
from headway.server.http.errors import attribute_errors_to, field_error
from headway.server.openai.protocol import ChatRequest
from headway.server.toolcalls.choice import ToolUse, tool_use
from headway.server.toolcalls.formats import OutputPiece
from headway.server.toolcalls.parser import ToolCallParser
from headway.text.tokenizer import Tokenizer


class OutputParser:
    """Splits the output of one sample into text and tool calls."""

    def __init__(self, parser: ToolCallParser | None) -> None:
        self._parser, self.has_tools = parser, parser is not None

    def push(self, delta: Delta) -> list[OutputPiece]:
        """The text and the parts of tool calls that a delta adds."""
        if self._parser is None:
            return [delta.text] if delta.text else []
        pieces = self._parser.push(delta.text)
        if delta.finish_reason == "length":
            pieces += self._parser.cut_off()
        elif delta.finish_reason is not None:
            pieces += self._parser.finish()
        return pieces

    def finish_reason(self, reason: str | None) -> str | None:
        """The finish reason, or "tool_calls" if the output ended after a call."""
        has_called = self._parser is not None and self._parser.num_calls > 0
        return "tool_calls" if has_called and reason == "stop" else reason


class PreparedChat(NamedTuple):
    """A validated and tokenized chat request."""

    id: str
    run: PromptRun
    parsers: list[OutputParser]  # one per sample
    tokenizer: Tokenizer


async def prepare_chat(
    context: Context, body: ChatRequest, *, id_prefix: str, is_live: bool, field: str = "messages"
) -> PreparedChat:
    """Validate and tokenize a request; ApiError names the field that is wrong.

    `field` is the name of the conversation in the request's API.
    """
    check_model(context, body.model)
    check_num_choices(context, 1, body.n or 1)
    tokenizer = context.input_processor.need_tokenizer()
    use = tool_use(
        tokenizer.chat_template, body.tools, body.tool_choice,
        parallel=body.parallel_tool_calls is not False, parser=context.settings.tool_call_parser,
        disable_additional_properties=context.settings.disable_additional_properties,
    )  # fmt: skip
    params = await _sampling_params(context, body, use, tokenizer)
    tokens = await chat_tokens_of(context, body, use, max_prompt_tokens(context, body))
    id = new_id(id_prefix)
    parsers = [
        OutputParser(use.parser(f"{id}/{sample}") if use else None) for sample in range(params.n)
    ]
    prompt = truncate_prompt(tokens, body)
    run = PromptRun(context, id, prompt, params, field=field, is_live=is_live)
    return PreparedChat(id, run, parsers, tokenizer)


async def _sampling_params(
    context: Context, body: ChatRequest, use: ToolUse | None, tokenizer: Tokenizer
) -> SamplingParams:
    if body.top_logprobs is not None and not body.logprobs:
        raise field_error("top_logprobs", "is allowed only with logprobs: true")
    grammar = await grammar_of(body, context.settings)
    if use is not None and use.grammar is not None:
        if grammar is not None:
            problem = "requires a tool call, which excludes response_format and structured_outputs"
            raise field_error("tool_choice", problem)
        grammar = use.grammar
        with attribute_errors_to("tools"):
            await check_in_thread(grammar, use.check)
    if use is not None and tokenizer.id_of(use.format.open) in tokenizer.special_ids:
        # The tag that opens a call is a special token, which the parser must see.
        body = body.model_copy(update={"skip_special_tokens": False})
    return await sampling_params_of(
        context,
        body,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        grammar=grammar,
    )
