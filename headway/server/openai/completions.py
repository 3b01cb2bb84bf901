"""POST /v1/completions: generates texts that continue prompts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from itertools import takewhile
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, NamedTuple

from headway.engine.input_processor import Prompt
from headway.sampling_params import SamplingParams, TokenLogprobs
from headway.server.context import Context
from headway.server.generation.logprobs import CompletionLogprobsBuilder, prompt_logprobs_of
from headway.server.generation.prompt_runs import Delta, DirectWriter, PromptRun, merge_deltas
from headway.server.generation.prompts import (
    max_prompt_tokens,
    prompts_of,
    tokens_of,
    truncate_prompt,
)
from headway.server.generation.request_fields import (
    check_echoed_logprobs,
    check_model,
    check_num_choices,
    sampling_params_of,
)
from headway.server.generation.response_format import grammar_of
from headway.server.generation.stream import (
    CancellableResponse,
    ChunkEncoder,
    CompleteResponse,
    EventStreamResponse,
    collect,
    new_id,
    usage_of,
)
from headway.server.generation.submissions import AT_ONCE
from headway.server.http.connection import ChunkWriter
from headway.server.http.errors import field_error, format_value
from headway.server.http.offload import offload
from headway.server.openai.protocol import CompletionRequest
from headway.text.tokenizer import Tokenizer

KIND = "text_completion"
DEFAULT_MAX_TOKENS = 16  # as in OpenAI's API
TokensWithLogprobs = list[tuple[int, TokenLogprobs | None]]  # the first of a prompt has none


def completions(context: Context, body: CompletionRequest) -> CancellableResponse:
    """The response to one request, streamed or complete."""
    if body.stream:
        return EventStreamResponse(context, lambda writer: _events(context, body, writer))
    return CompleteResponse(context, lambda: _response(context, body))


class PreparedCompletion(NamedTuple):
    """A validated and tokenized request: one run per prompt, one choice per sample."""

    id: str
    created: int  # Unix seconds
    runs: list[PromptRun]
    choices: list[ChoiceBuilder]  # in the order of the prompts

    @property
    def usage(self) -> dict[str, Any]:
        shows_output = self.choices[0].shows_output
        return usage_of(
            sum(len(run.prompt) for run in self.runs),
            sum(run.num_generated for run in self.runs) if shows_output else 0,
            sum(run.num_cached for run in self.runs),
        )


class ChoiceBuilder:
    """Builds one choice of a response: echo, text, log probabilities and token ids."""

    def __init__(
        self,
        context: Context,
        body: CompletionRequest,
        run: PromptRun,
        prompt: Prompt,
        echo: str,
        sample: int,
    ) -> None:
        self.echo = echo
        self.shows_output = body.max_tokens != 0
        self._run, self._sample = run, run.samples[sample]
        self._has_ids = bool(body.return_token_ids)
        self._num_sent = -1  # token ids; -1: the prompt's token ids are not sent yet
        self._is_first = bool(body.echo)
        self._logprobs: CompletionLogprobsBuilder | None = None  # of the output
        self._echo_logprobs: CompletionLogprobsBuilder | None = None
        if body.logprobs is not None:
            tokenizer = context.input_processor.need_tokenizer()
            skips = run.sampling_params.skip_special_tokens
            as_ids = bool(body.return_tokens_as_token_ids)
            self._logprobs = CompletionLogprobsBuilder(
                tokenizer, start=len(self.echo), skip_special=skips, as_ids=as_ids
            )
            is_text = isinstance(prompt, str)
            num_hidden = _len_added(tokenizer, echo, run.prompt) if is_text else 0
            self._echo_logprobs = CompletionLogprobsBuilder(
                tokenizer, start=-num_hidden, skip_special=not is_text, as_ids=as_ids
            )

    def push(self, delta: Delta) -> tuple[str, dict[str, Any] | None]:
        """Text and logprobs of a delta; the first one includes the echo."""
        text = delta.text if self.shows_output else ""
        entries = delta.logprobs if self.shows_output else []
        logprobs = None
        if self._logprobs is not None:
            logprobs = self._logprobs.push([(each.token, each) for each in entries])
        if not self._is_first:
            return text, logprobs
        self._is_first = False
        if self._echo_logprobs is not None and logprobs is not None:
            echoed = self._echo_logprobs.push(self._prompt_with_logprobs())
            logprobs = {name: echoed[name] + logprobs[name] for name in logprobs}
        return self.echo + text, logprobs

    def size(self, delta: Delta) -> int:
        """Number of log probabilities that `push` formats."""
        if self._logprobs is None:
            return 0
        num_echoed = len(self._run.prompt) if self._is_first else 0
        return (num_echoed + len(delta.logprobs)) * ((self._run.sampling_params.logprobs or 0) + 1)

    def finish_reason(self, delta: Delta) -> str | None:
        is_hidden = delta.finish_reason is not None and not self.shows_output
        return "length" if is_hidden else delta.finish_reason

    def token_ids(self) -> dict[str, Any]:
        """New token ids, if the request asks for them."""
        if not self._has_ids:
            return {}
        tokens = self._sample.tokens if self.shows_output else []
        found: dict[str, Any] = {"token_ids": tokens[max(0, self._num_sent) :]}
        if self._num_sent < 0:
            found["prompt_token_ids"] = self._run.prompt
        self._num_sent = len(tokens)
        return found

    def prompt_logprobs(self, context: Context) -> list[dict[str, Any] | None]:
        """The prompt's log probabilities in vLLM's format."""
        run, tokenizer = self._run, context.input_processor.need_tokenizer()
        return prompt_logprobs_of(tokenizer, len(run.prompt), run.prompt_logprobs)

    def _prompt_with_logprobs(self) -> TokensWithLogprobs:
        entries = self._run.prompt_logprobs
        return [(token, entries.get(place)) for place, token in enumerate(self._run.prompt)]


def _len_added(tokenizer: Tokenizer, text: str, tokens: Sequence[int]) -> int:
    """Number of characters of the first token if the tokenizer has added it to the text."""
    num_first = len([*takewhile(lambda token: token == tokenizer.bos_id, tokens)])
    return 0 if text.startswith(tokenizer.bos * num_first) else len(tokenizer.bos)


async def _echoes(context: Context, prompts: list[Prompt]) -> list[str]:
    """Each prompt as text."""

    def echo(prompt: Prompt) -> str:
        if isinstance(prompt, str):
            return prompt
        return context.input_processor.need_tokenizer().decode(prompt)

    return await offload(sum(map(len, prompts)), lambda: [echo(prompt) for prompt in prompts])


async def _prepare(
    context: Context, body: CompletionRequest, *, is_live: bool
) -> PreparedCompletion:
    """Validate and tokenize a request; ApiError names the field that is wrong."""
    check_model(context, body.model)
    if body.suffix:
        raise field_error("suffix", "is not supported; the model can only continue a prompt")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise field_error("best_of", f"must be equal to n ({body.n or 1}), not {body.best_of}")
    prompts = prompts_of(body.prompt)
    check_num_choices(context, len(prompts), body.n or 1)
    params = await _sampling_params(context, body)
    special, limit = body.add_special_tokens is not False, max_prompt_tokens(context, body)
    complete = await tokens_of(context, prompts, max_tokens=limit, special=special)
    tokens = [truncate_prompt(each, body) for each in complete]
    prompts = [  # a truncated prompt is echoed as the tokens that are left
        prompt if len(kept) == len(given) else kept
        for prompt, given, kept in zip(prompts, complete, tokens, strict=True)
    ]
    num_tokens = params.n * sum(map(len, tokens))
    if body.prompt_logprobs is not None:
        check_echoed_logprobs(num_tokens, body.prompt_logprobs, "prompt_logprobs")
    if body.echo:
        check_echoed_logprobs(num_tokens, body.logprobs)
    echoes = await _echoes(context, prompts) if body.echo else [""] * len(prompts)
    id = new_id("cmpl")
    ids = [f"{id}-{number}" for number in range(len(tokens))]
    params_of_each = context.input_processor.params_of_each(params, ids)
    runs = []
    for number, prompt_tokens in enumerate(tokens):
        run = PromptRun(
            context, ids[number], prompt_tokens, params, field="prompt", is_live=is_live,
            number=number, params=params_of_each[number],
        )  # fmt: skip
        runs.append(run)
        if number % AT_ONCE == AT_ONCE - 1:
            await asyncio.sleep(0)  # let other streams continue
    choices = [
        ChoiceBuilder(context, body, run, prompt, echo, sample)
        for run, prompt, echo in zip(runs, prompts, echoes, strict=True)
        for sample in range(params.n)
    ]
    return PreparedCompletion(id, int(time.time()), runs, choices)


async def _sampling_params(context: Context, body: CompletionRequest) -> SamplingParams:
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens < 1 and not (max_tokens == 0 and body.echo):
        problem = f"must be at least 1, or 0 with echo, not {format_value(max_tokens)}"
        raise field_error("max_tokens", problem)
    max_tokens = max(1, max_tokens)  # the engine must sample one token, which is not returned
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
    return await sampling_params_of(
        context,
        body,
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=await grammar_of(body, context.settings),
    )


async def _response(context: Context, body: CompletionRequest) -> dict[str, Any]:
    prepared = await _prepare(context, body, is_live=False)
    outputs = await collect(merge_deltas(prepared.runs), len(prepared.choices))
    choices = []
    for index, (choice, complete) in enumerate(zip(prepared.choices, outputs, strict=True)):
        text, logprobs = await offload(choice.size(complete), partial(choice.push, complete))
        reason = choice.finish_reason(complete)
        value = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        if body.prompt_logprobs is not None:
            size = (body.prompt_logprobs + 1) * len(prepared.runs[index // (body.n or 1)].prompt)
            write = partial(choice.prompt_logprobs, context)
            value["prompt_logprobs"] = await offload(size, write)
        choices.append({**value, **choice.token_ids()})
    return {
        "id": prepared.id, "object": KIND, "created": prepared.created,
        "model": context.model_name, "system_fingerprint": context.fingerprint or None,
        "choices": choices, "usage": prepared.usage,
    }  # fmt: skip


async def _events(
    context: Context, body: CompletionRequest, writer: ChunkWriter | None
) -> AsyncGenerator[bytes, None]:
    prepared = await _prepare(context, body, is_live=True)
    encoder = ChunkEncoder(context, prepared.id, KIND, prepared.created, body.stream_options)

    def encode(deltas: list[Delta]) -> bytes:
        top = {"usage": prepared.usage} if encoder.is_continuous else None
        events = [_event(prepared.choices[delta.choice], encoder, delta, top) for delta in deltas]
        return "".join(events).encode("ascii")

    direct_writer = DirectWriter(writer, encode) if writer else None
    async with aclosing(merge_deltas(prepared.runs, direct_writer)) as batches:
        async for deltas in batches:
            if body.logprobs is None:
                yield encode(deltas)
                continue
            size = sum(prepared.choices[delta.choice].size(delta) for delta in deltas)
            yield await offload(size, partial(encode, deltas))
    if encoder.has_usage:
        yield encoder.usage(prepared.usage)


def _event(
    choice: ChoiceBuilder, encoder: ChunkEncoder, delta: Delta, top: dict[str, Any] | None
) -> str:
    text, logprobs = choice.push(delta)
    reason, member = choice.finish_reason(delta), f'"text":{quoted(text)}'
    ids = choice.token_ids()
    return encoder.chunk(delta.choice, member, logprobs, reason, choice=ids, top=top)
