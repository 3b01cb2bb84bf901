"""POST /v1/completions: prompts in, texts that go on from them out."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, NamedTuple

from headway.engine.asking import Prompt
from headway.sampling import SamplingParams, TokenLogprobs
from headway.server.context import Context
from headway.server.errors import refused
from headway.server.logprobs import Columns
from headway.server.protocol import CompletionRequest
from headway.server.runs import Delta, Outlet, Run, Straight, joined, together
from headway.server.streaming import Chunks, Events, Watched, Whole, new_id, usage_of
from headway.server.structure import grammar_of
from headway.server.wishes import check_model, check_num_choices, prompts_of, sampling, tokens_of

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

    def __init__(self, context: Context, body: CompletionRequest, run: Run, prompt: Prompt) -> None:
        self.echo = _echo(context, prompt) if body.echo else ""
        self.shows_output = body.max_tokens != 0
        self._run = run
        self._is_first = bool(body.echo)
        self._columns: Columns | None = None  # of what is generated
        self._echoed: Columns | None = None
        if body.logprobs is not None:
            tokenizer = context.asking.need_tokenizer()
            skips = run.asked.skip_special_tokens
            start = len(self.echo)
            self._columns = Columns(tokenizer, start=start, skip_special=skips)
            self._echoed = Columns(tokenizer, skip_special=not isinstance(prompt, str))

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

    def finish_reason(self, delta: Delta) -> str | None:
        is_cut = delta.finish_reason is not None and not self.shows_output
        return "length" if is_cut else delta.finish_reason

    def _prompt_scores(self) -> Scored:
        scores = self._run.prompt_scores
        return [(token, scores.get(place)) for place, token in enumerate(self._run.prompt)]


def _echo(context: Context, prompt: Prompt) -> str:
    """A prompt as text."""
    if isinstance(prompt, str):
        return prompt
    return context.asking.need_tokenizer().decode(prompt)


async def _open(context: Context, body: CompletionRequest, *, is_live: bool) -> Opened:
    check_model(context, body.model)
    if body.suffix:
        raise refused("suffix", "is not supported: the model only goes on from a prompt's end")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise refused("best_of", f"must be what n is ({body.n or 1}), not {body.best_of}")
    prompts = prompts_of(body)
    check_num_choices(context, len(prompts), body.n or 1)
    asked = await _sampling(context, body)
    tokens = await tokens_of(context, prompts)
    id = new_id("cmpl")
    runs = [
        Run(context, f"{id}-{number}", each, asked, field="prompt", is_live=is_live, number=number)
        for number, each in enumerate(tokens)
    ]
    choices = [
        Choice(context, body, run, prompt)
        for run, prompt in zip(runs, prompts, strict=True)
        for _ in range(asked.n)
    ]
    return Opened(id, int(time.time()), runs, choices)


async def _sampling(context: Context, body: CompletionRequest) -> SamplingParams:
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0:
        if not body.echo:
            raise refused("max_tokens", "must be at least 1 unless echo is true, not 0")
        max_tokens = 1  # the engine has to make one; nobody sees it
    return await sampling(
        context,
        body,
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
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
        text, logprobs = choice.news(whole)
        reason = choice.finish_reason(whole)
        choices.append(
            {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        )
    about = {"id": opened.id, "object": KIND, "created": opened.created}
    return {**about, "model": context.model_name, "choices": choices, "usage": opened.usage}


async def _events(
    context: Context, body: CompletionRequest, outlet: Outlet | None
) -> AsyncGenerator[bytes, None]:
    opened = await _open(context, body, is_live=True)
    has_usage = bool(body.stream_options and body.stream_options.include_usage)
    chunks = Chunks(opened.id, KIND, opened.created, context.model_name, has_usage)

    def form(deltas: list[Delta]) -> bytes:
        events = [_event(opened.choices[delta.choice], chunks, delta) for delta in deltas]
        return "".join(events).encode("ascii")

    straight = Straight(outlet, form) if outlet else None
    async with aclosing(together(opened.runs, straight)) as news:
        async for deltas in news:
            yield form(deltas)
    if has_usage:
        yield chunks.usage(opened.usage)


def _event(choice: Choice, chunks: Chunks, delta: Delta) -> str:
    text, logprobs = choice.news(delta)
    reason = choice.finish_reason(delta)
    return chunks.chunk(delta.choice, f'"text":{quoted(text)}', logprobs, reason)
