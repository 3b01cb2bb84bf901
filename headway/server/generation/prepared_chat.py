"""Chat requests of all chat APIs, validated and tokenized.

Chat completions, responses and messages are all read as a `ChatRequest`. The APIs differ only in
how they write the output: reasoning, text and tool calls. Knows no connections and writes no JSON.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from random import Random
from typing import NamedTuple

from headway.grammar.grammar import Grammar
from headway.sampling_params import SamplingParams
from headway.server.context import Context
from headway.server.generation.output_parser import (
    OutputParser,
    ReasoningOutputParser,
    TokenKinds,
)
from headway.server.generation.prompt_runs import PromptRun
from headway.server.generation.prompts import (
    chat_tokens_of,
    max_prompt_tokens,
    prediction_of,
    truncate_prompt,
)
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
from headway.server.toolcalls.formats import HARMONY, new_call_id
from headway.text.detokenizer import Detokenizer
from headway.text.reasoning import Reasoning
from headway.text.split import Splitter
from headway.text.tokenizer import Tokenizer


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
        parallel=body.parallel_tool_calls is not False, parser=context.tool_call_parser,
        disable_additional_properties=context.settings.disable_additional_properties,
    )  # fmt: skip
    params = await _sampling_params(context, body, use, tokenizer)
    tokens = await chat_tokens_of(context, body, use, max_prompt_tokens(context, body))
    prediction = await prediction_of(context, body)
    id, prompt = new_id(id_prefix), truncate_prompt(tokens, body)
    make_run = partial(PromptRun, context, id, prompt, field=field, prediction=prediction)
    if (reasoning := context.reasoning) is None:
        run = make_run(params, is_live=is_live)
        parsers = [OutputParser(use.parser(f"{id}/{n}") if use else None) for n in range(params.n)]
        return PreparedChat(id, run, parsers, tokenizer)
    splitters = _splitters(reasoning, body, prompt, use)
    before = reasoning.grammar(splitters[0])
    if params.grammar is not None and before is not None:
        params = replace(params, grammar=Grammar.after(before, params.grammar))
    run = make_run(params, is_live=True, tokenizer=reasoning.tokenizer)
    parsers = _reasoning_parsers(run, reasoning, splitters, use)
    return PreparedChat(id, run, parsers, tokenizer)


def _splitters(
    reasoning: Reasoning, body: ChatRequest, prompt: list[int], use: ToolUse | None
) -> list[Splitter]:
    """A splitter for each sample."""
    names, continued = use.names if use else (), None
    if body.continue_final_message:
        content = body.messages[-1].content or ""
        texts = [content] if isinstance(content, str) else [part.text for part in content]
        continued = "\n".join(texts)
    return [reasoning.splitter(prompt, names, continued) for _ in range(body.n or 1)]


def _reasoning_parsers(
    run: PromptRun, reasoning: Reasoning, splitters: list[Splitter], use: ToolUse | None
) -> list[OutputParser]:
    parsers, skips = list[OutputParser](), run.sampling_params.skip_special_tokens
    for number, (splitter, sample) in enumerate(zip(splitters, run.samples, strict=True)):
        detokenizer, seed = (
            Detokenizer(reasoning.tokenizer, skip_special=skips),
            f"{run.id}/{number}",
        )
        kinds = TokenKinds(sample.tokens, detokenizer, run.params.stops)
        tools = None if use is None or use.format is HARMONY else use.parser(seed)
        new_id = partial(new_call_id, HARMONY, Random(seed))
        parsers.append(ReasoningOutputParser(tools, splitter, kinds, new_id))
    return parsers


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
