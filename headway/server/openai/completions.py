"""POST /v1/completions: prompts in, texts that go on from them out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, NamedTuple

from headway.engine.input_processor import Prompt
from headway.sampling_params import SamplingParams, TokenLogprobs
from headway.server.context import Context
from headway.server.generation.limits import check_echoed_logprobs
from headway.server.generation.logprobs import Columns, prompt_shape
from headway.server.generation.request_fields import (
    check_model,
    check_num_choices,
    most_tokens,
    prompts_of,
    sampling,
    tokens_of,
    truncated,
)  # fmt: skip
from headway.server.generation.response_format import grammar_of
from headway.server.generation.runs import AT_ONCE, Delta, Outlet, Run, Straight, joined, together
from headway.server.generation.stream import Chunks, Events, Watched, Whole, new_id, usage_of
from headway.server.http.errors import refused, shown
from headway.server.http.offload import aside
from headway.server.openai.protocol import CompletionRequest

KIND = "text_completion"
DEFAULT_MAX_TOKENS = 16  # OpenAI's
Scored = list[tuple[int, TokenLogprobs | None]]  # tokens; the first of a prompt has no score


def completions(context: Context, body: CompletionRequest) -> Watched:
    """The answer to one request, streamed or whole."""
    if body.stream:
        return Events(context, lambda outlet: _events(context, body, outlet))
    return Whole(context, lambda: _answer(context, body))


class Opened(NamedTuple):
    """A request that has been read: one run for each prompt, one choice for each sample."""

    id: str
    created: int  # Unix seconds
    runs: list[Run]
    choices: list[Choice]  # those of the first prompt first

    @property
    def usage(self) -> dict[str, Any]:
        is_shown = self.choices[0].shows_output
        return usage_of(
            sum(len(run.prompt) for run in self.runs),
            sum(run.num_generated for run in self.runs) if is_shown else 0,
            sum(run.num_cached for run in self.runs),
        )


class Choice:
    """One text of an answer: its echo, its logprobs, and whether what is generated shows."""

    def __init__(
        self,
        context: Context,
        body: CompletionRequest,
        run: Run,
        prompt: Prompt,
        echo: str,
        sample: int,
    ) -> None:
        self.echo = echo
        self.shows_output = body.max_tokens != 0
        self._run, self._sample = run, run.samples[sample]
        self._has_ids = bool(body.return_token_ids)
        self._num_sent = -1  # token ids; -1: the prompt's are to be sent, too
        self._is_first = bool(body.echo)
        self._columns: Columns | None = None  # of what is generated
        self._echoed: Columns | None = None
        if body.logprobs is not None:
            tokenizer = context.asking.need_tokenizer()
            skips, as_ids = run.asked.skip_special_tokens, bool(body.return_tokens_as_token_ids)
            start = len(self.echo)
            self._columns = Columns(tokenizer, start=start, skip_special=skips, as_ids=as_ids)
            is_text = isinstance(prompt, str)
            self._echoed = Columns(tokenizer, skip_special=not is_text, as_ids=as_ids)

    def news(self, delta: Delta) -> tuple[str, dict[str, Any] | None]:
        """Text and logprobs of a delta, after the echo if it is the first."""
        text = delta.text if self.shows_output else ""
        scores = delta.scores if self.shows_output else []
        shaped = None
        if self._columns is not None:
            shaped = self._columns.shape([(each.token, each) for each in scores])
        if not self._is_first:
            return text, shaped
        self._is_first = False
        if self._echoed is not None and shaped is not None:
            echoed = self._echoed.shape(self._prompt_scores())
            shaped = {name: echoed[name] + shaped[name] for name in shaped}
        return self.echo + text, shaped

    def size(self, delta: Delta) -> int:
        """Log probabilities that `news` has to write."""
        if self._columns is None:
            return 0
        num_echoed = len(self._run.prompt) if self._is_first else 0
        return (num_echoed + len(delta.scores)) * ((self._run.asked.logprobs or 0) + 1)

    def finish_reason(self, delta: Delta) -> str | None:
        is_cut = delta.finish_reason is not None and not self.shows_output
        return "length" if is_cut else delta.finish_reason

    def token_ids(self) -> dict[str, Any]:
        """Token ids that were not returned before, if they are wanted."""
        if not self._has_ids:
            return {}
        tokens = self._sample.tokens if self.shows_output else []
        found: dict[str, Any] = {"token_ids": tokens[max(0, self._num_sent) :]}
        if self._num_sent < 0:
            found["prompt_token_ids"] = self._run.prompt
        self._num_sent = len(tokens)
        return found

    def prompt_logprobs(self, context: Context) -> list[dict[str, Any] | None]:
        """vLLM's shape of the prompt's log probabilities."""
        run = self._run
        return prompt_shape(context.asking.need_tokenizer(), len(run.prompt), run.prompt_scores)

    def _prompt_scores(self) -> Scored:
        scores = self._run.prompt_scores
        return [(token, scores.get(place)) for place, token in enumerate(self._run.prompt)]


def _echo(context: Context, prompt: Prompt) -> str:
    """A prompt as text."""
    if isinstance(prompt, str):
        return prompt
    return context.asking.need_tokenizer().decode(prompt)


async def _echoes(context: Context, prompts: list[Prompt]) -> list[str]:
    return await aside(
        sum(map(len, prompts)), lambda: [_echo(context, prompt) for prompt in prompts]
    )


async def _open(context: Context, body: CompletionRequest, *, is_live: bool) -> Opened:
    check_model(context, body.model)
    if body.suffix:
        raise refused("suffix", "is not supported: the model only goes on from a prompt's end")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise refused("best_of", f"must be what n is ({body.n or 1}), not {body.best_of}")
    prompts = prompts_of(body.prompt)
    check_num_choices(context, len(prompts), body.n or 1)
    asked = await _sampling(context, body)
    is_framed = body.add_special_tokens is not False
    most = most_tokens(context, body)
    found = await tokens_of(context, prompts, max_tokens=most, special=is_framed)
    tokens = [truncated(each, body) for each in found]
    num_tokens = asked.n * sum(map(len, tokens))
    if body.prompt_logprobs is not None:
        check_echoed_logprobs(num_tokens, body.prompt_logprobs, "prompt_logprobs")
    if body.echo:
        check_echoed_logprobs(num_tokens, body.logprobs)
    echoes = await _echoes(context, prompts) if body.echo else [""] * len(prompts)
    id = new_id("cmpl")
    ids = [f"{id}-{number}" for number in range(len(tokens))]
    params = context.asking.params_of_each(asked, ids)
    runs = []
    for number, each in enumerate(tokens):
        run = Run(
            context, ids[number], each, asked, field="prompt", is_live=is_live, number=number,
            params=params[number],
        )  # fmt: skip
        runs.append(run)
        if number % AT_ONCE == AT_ONCE - 1:
            await asyncio.sleep(0)  # other streams go on meanwhile
    choices = [
        Choice(context, body, run, prompt, echo, sample)
        for run, prompt, echo in zip(runs, prompts, echoes, strict=True)
        for sample in range(asked.n)
    ]
    return Opened(id, int(time.time()), runs, choices)


async def _sampling(context: Context, body: CompletionRequest) -> SamplingParams:
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens < 1 and not (max_tokens == 0 and body.echo):
        raise refused("max_tokens", f"must be at least 1, or 0 with echo, not {shown(max_tokens)}")
    max_tokens = max(1, max_tokens)  # the engine has to sample one token; it is not shown
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
    return await sampling(
        context,
        body,
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=await grammar_of(body, context.settings),
    )


async def _answer(context: Context, body: CompletionRequest) -> dict[str, Any]:
    opened = await _open(context, body, is_live=False)
    gained: list[list[Delta]] = [[] for _ in opened.choices]
    async with aclosing(together(opened.runs)) as news:
        async for deltas in news:
            for delta in deltas:
                gained[delta.choice].append(delta)
    choices = []
    for index, (choice, deltas) in enumerate(zip(opened.choices, gained, strict=True)):
        whole = joined(deltas)
        text, logprobs = await aside(choice.size(whole), partial(choice.news, whole))
        reason = choice.finish_reason(whole)
        about = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        if body.prompt_logprobs is not None:
            size = (body.prompt_logprobs + 1) * len(opened.runs[index // (body.n or 1)].prompt)
            write = partial(choice.prompt_logprobs, context)
            about["prompt_logprobs"] = await aside(size, write)
        choices.append({**about, **choice.token_ids()})
    return {
        "id": opened.id, "object": KIND, "created": opened.created, "model": context.model_name,
        "system_fingerprint": context.fingerprint or None, "choices": choices,
        "usage": opened.usage,
    }  # fmt: skip


async def _events(
    context: Context, body: CompletionRequest, outlet: Outlet | None
) -> AsyncGenerator[bytes, None]:
    opened = await _open(context, body, is_live=True)
    chunks = Chunks(context, opened.id, KIND, opened.created, body.stream_options)

    def form(deltas: list[Delta]) -> bytes:
        top = {"usage": opened.usage} if chunks.is_continuous else None
        events = [_event(opened.choices[delta.choice], chunks, delta, top) for delta in deltas]
        return "".join(events).encode("ascii")

    straight = Straight(outlet, form) if outlet else None
    async with aclosing(together(opened.runs, straight)) as news:
        async for deltas in news:
            if body.logprobs is None:
                yield form(deltas)
                continue
            size = sum(opened.choices[delta.choice].size(delta) for delta in deltas)
            yield await aside(size, partial(form, deltas))
    if chunks.has_usage:
        yield chunks.usage(opened.usage)


def _event(choice: Choice, chunks: Chunks, delta: Delta, top: dict[str, Any] | None) -> str:
    text, logprobs = choice.news(delta)
    reason, member = choice.finish_reason(delta), f'"text":{quoted(text)}'
    ids = choice.token_ids()
    return chunks.chunk(delta.choice, member, logprobs, reason, choice=ids, top=top)
