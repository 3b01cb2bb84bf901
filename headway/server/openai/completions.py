"""POST /v1/completions: generates texts that continue prompts.

`server/app.py` passes `completions` to `stream.generate`, which sends what the output encodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import takewhile
from json.encoder import encode_basestring_ascii as quoted

from headway.engine.input_processor import Prompt
from headway.sampling_params import SamplingParams
from headway.server.context import Context
from headway.server.generation.logprobs import CompletionLogprobsBuilder, prompt_logprobs_of
from headway.server.generation.prompt_runs import Delta, PromptRun
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
from headway.server.generation.stream import ChunkOutput, new_id
from headway.server.generation.submissions import AT_ONCE
from headway.server.http.errors import field_error, format_value
from headway.server.http.offload import offload
from headway.server.openai.protocol import CompletionRequest
from headway.server.openai.response_models import CompletionLogprobs
from headway.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16  # as in OpenAI's API


class CompletionOutput(ChunkOutput):
    """The output of one request: one run per prompt, one choice per sample."""

    kind = chunk_kind = "text_completion"
    text_member = '"text":', ""

    def __init__(
        self,
        context: Context,
        body: CompletionRequest,
        id: str,
        runs: list[PromptRun],
        choices: list[ChoiceBuilder],
    ) -> None:
        super().__init__(context, id, runs, len(choices), body.stream_options)
        self.shows_output = choices[0].shows_output
        self._body, self._choices = body, choices  # in the order of the prompts
        is_more = body.echo or body.return_token_ids or body.logprobs is not None
        self.is_plain = self.shows_output and not is_more

    async def value(self, deltas: list[Delta]) -> object:
        values, num_logprobs = list[object](), self._body.prompt_logprobs
        for index, (choice, delta) in enumerate(zip(self._choices, deltas, strict=True)):
            text, logprobs = await offload(choice.size(delta), partial(choice.push, delta))
            reason = choice.finish_reason(delta)
            value = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
            if num_logprobs is not None:
                size = (num_logprobs + 1) * len(choice.run.prompt)
                tokenizer = self.context.input_processor.need_tokenizer()
                write = partial(prompt_logprobs_of, tokenizer, choice.run)
                value["prompt_logprobs"] = await offload(size, write)
            values.append({**value, **choice.token_ids()})
        return self.response(values)

    async def encode_batch(self, deltas: list[Delta]) -> bytes:
        if self._body.logprobs is None:
            return self.encode(deltas)
        size = sum(self._choices[delta.choice].size(delta) for delta in deltas)
        return await offload(size, partial(self.encode, deltas))

    def chunks(self, delta: Delta, top: Mapping[str, object] | None) -> str:
        choice = self._choices[delta.choice]
        text, logprobs = choice.push(delta)
        reason, member = choice.finish_reason(delta), f'"text":{quoted(text)}'
        ids = choice.token_ids(delta.num_tokens)
        return self.chunk(delta.choice, member, logprobs, reason, choice=ids, top=top)


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
        self.run, self.shows_output = run, body.max_tokens != 0
        self._echo, self._sample = echo, run.samples[sample]
        self._has_ids = bool(body.return_token_ids)
        self._num_sent = -1  # token ids; -1: the prompt's token ids are not sent yet
        self._is_first = bool(body.echo)
        self._logprobs: CompletionLogprobsBuilder | None = None  # of the output
        if body.logprobs is not None:
            tokenizer = context.input_processor.need_tokenizer()
            builder = partial(
                CompletionLogprobsBuilder, tokenizer, as_ids=bool(body.return_tokens_as_token_ids)
            )
            skips, is_text = run.sampling_params.skip_special_tokens, isinstance(prompt, str)
            self._logprobs = builder(start=len(echo), skip_special=skips)
            num_hidden = _len_added(tokenizer, echo, run.prompt) if is_text else 0
            self._echo_logprobs = builder(start=-num_hidden, skip_special=not is_text)

    def push(self, delta: Delta) -> tuple[str, CompletionLogprobs | None]:
        """Text and logprobs of a delta; the first one includes the echo."""
        text, entries = (delta.text, delta.logprobs) if self.shows_output else ("", [])
        is_first, self._is_first = self._is_first, False
        logprobs = None
        if self._logprobs is not None:
            if is_first:
                given = enumerate(self.run.prompt)
                of_prompt = [(token, self.run.prompt_logprobs.get(place)) for place, token in given]
                logprobs = self._echo_logprobs.push(of_prompt)
            logprobs = self._logprobs.push([(each.token, each) for each in entries], logprobs)
        return self._echo + text if is_first else text, logprobs

    def size(self, delta: Delta) -> int:
        """Number of log probabilities that `push` formats."""
        if self._logprobs is None:
            return 0
        num_echoed = len(self.run.prompt) if self._is_first else 0
        return (num_echoed + len(delta.logprobs)) * ((self.run.sampling_params.logprobs or 0) + 1)

    def finish_reason(self, delta: Delta) -> str | None:
        is_hidden = delta.finish_reason is not None and not self.shows_output
        return "length" if is_hidden else delta.finish_reason

    def token_ids(self, end: int | None = None) -> Mapping[str, Sequence[int]]:
        """New token ids up to the one before `end`, if the request asks for them."""
        if not self._has_ids:
            return {}
        tokens = self._sample.tokens[:end] if self.shows_output else []
        found: dict[str, Sequence[int]] = {"token_ids": tokens[max(0, self._num_sent) :]}
        if self._num_sent < 0:
            found["prompt_token_ids"] = self.run.prompt
        self._num_sent = len(tokens)
        return found


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


async def completions(context: Context, body: CompletionRequest, is_live: bool) -> CompletionOutput:
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
    check_echoed_logprobs(num_tokens, body.prompt_logprobs, "prompt_logprobs")
    if body.echo:
        check_echoed_logprobs(num_tokens, body.logprobs)
    echoes = await _echoes(context, prompts) if body.echo else [""] * len(prompts)
    id = new_id("cmpl")
    runs = await _runs(context, id, tokens, params, is_live=is_live)
    choices = [
        ChoiceBuilder(context, body, run, prompt, echo, sample)
        for run, prompt, echo in zip(runs, prompts, echoes, strict=True)
        for sample in range(params.n)
    ]
    return CompletionOutput(context, body, id, runs, choices)


async def _runs(
    context: Context, id: str, prompts: list[list[int]], params: SamplingParams, *, is_live: bool
) -> list[PromptRun]:
    ids = [f"{id}-{number}" for number in range(len(prompts))]
    params_of_each = context.input_processor.params_of_each(params, ids)
    runs = []
    for number, prompt in enumerate(prompts):
        runs.append(PromptRun(
            context, ids[number], prompt, params, field="prompt", is_live=is_live,
            number=number, params=params_of_each[number],
        ))  # fmt: skip
        if number % AT_ONCE == AT_ONCE - 1:
            await asyncio.sleep(0)  # let other streams continue
    return runs


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
