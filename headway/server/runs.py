"""One prompt on its way through the engine: updates in, text and log probabilities out.

Ends a sample at its stop string, and the request when nobody iterates any more. Knows nothing of
connections and JSON.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import NamedTuple

from headway.engine.messages import End, Update
from headway.engine.text import TextStream
from headway.errors import RequestTooLong
from headway.sampling import SamplingParams, TokenLogprobs
from headway.server.context import Context
from headway.server.errors import ApiError

NO_SCORES: list[TokenLogprobs] = []


class Delta(NamedTuple):
    """What one sample gained."""

    sample: int
    text: str
    scores: list[TokenLogprobs] = NO_SCORES  # of the tokens that were asked for and may be seen
    finish_reason: str | None = None


def joined(deltas: Sequence[Delta]) -> Delta:
    """All that a sample gained, in one."""
    text = "".join(delta.text for delta in deltas)
    scores = [score for delta in deltas for score in delta.scores]
    return Delta(deltas[-1].sample, text, scores, deltas[-1].finish_reason)


class Sample:
    """One text as it grows: up to a stop string, and the tokens that belong to it."""

    __slots__ = ("_hidden", "_is_live", "_stops", "_tokens", "end", "num_kept", "stream")

    def __init__(
        self, context: Context, asked: SamplingParams, hidden: frozenset[int], is_live: bool
    ) -> None:
        tokenizer = context.asking.tokenizer
        self.stream: TextStream | None = None  # None: the model has no tokenizer here
        if tokenizer is not None:
            self.stream = TextStream(
                tokenizer, asked.stop_strings, asked.include_stop_str_in_output,
                asked.skip_special_tokens, hidden_ids=hidden,
            )  # fmt: skip
        self.num_kept = 0  # tokens generated, up to the one that completes a stop string
        self.end: End | None = None
        self._hidden = hidden
        self._stops = bool(asked.stop_strings)
        self._is_live = is_live or self._stops
        self._tokens: list[int] = []  # of a text that nobody reads before its end

    @property
    def is_stopped(self) -> bool:
        return self.stream is not None and self.stream.hit is not None

    def push(self, tokens: Sequence[int]) -> str:
        """The text that may be shown after these tokens."""
        if self.stream is None or not self._is_live:
            self._tokens += tokens
            self.num_kept += len(tokens)
            return ""
        if not self._stops:
            self.num_kept += len(tokens)
            return self.stream.push(tokens)
        text = ""
        for token in tokens:
            if self.is_stopped:
                break
            text += self.stream.push([token])
            self.num_kept += 1
        return text

    def finish(self, end: End) -> str:
        """The rest of the text."""
        self.end = end
        if self.stream is None:
            return ""
        return self.stream.push(self._tokens) + self.stream.finish()

    def seen(self, scores: Sequence[TokenLogprobs], num_kept: int) -> list[TokenLogprobs]:
        """Of newly generated tokens' scores those whose tokens are kept, and no end tokens."""
        return [score for score in scores[:num_kept] if score.token not in self._hidden]

    @property
    def finish_reason(self) -> str | None:
        if self.end is None:
            return None
        return "stop" if self.is_stopped else self.end.reason


class Run:
    """A prompt with its n samples.

    `field` is where the client wrote the prompt; `is_live`: text is wanted as it comes.
    """

    def __init__(
        self,
        context: Context,
        id: str,
        prompt: list[int],
        asked: SamplingParams,
        *,
        field: str,
        is_live: bool,
    ) -> None:
        self.id = id
        self.field = field
        self.prompt = prompt
        self.asked = asked
        self.params = context.asking.params(asked, id)
        self.samples = [
            Sample(context, asked, self.params.stops, is_live) for _ in range(asked.n)
        ]  # fmt: skip
        self.prompt_scores: dict[int, TokenLogprobs] = {}  # by place
        self._engine = context.engine

    @property
    def num_generated(self) -> int:
        return sum(sample.num_kept for sample in self.samples)

    @property
    def num_cached(self) -> int:
        end = self.samples[0].end
        return end.num_cached if end else 0

    async def deltas(self) -> AsyncGenerator[list[Delta], None]:
        """What the samples gain, until all have ended; all that is there at once comes at once."""
        stream = self._engine.stream(self.id, self.prompt, self.params)
        try:
            async with aclosing(stream) as batches:  # type: ignore[type-var]
                async for updates in batches:
                    gained = self._gain(updates)
                    if gained:
                        yield gained
        except RequestTooLong as error:
            code = "context_length_exceeded"
            raise ApiError(400, f"{self.field}: {error}", param=self.field, code=code) from error

    def _gain(self, updates: list[Update]) -> list[Delta]:
        for update in updates:
            if update.prompt_logprobs:
                self.prompt_scores.update(update.prompt_logprobs)
        if len(updates) == 1:
            return self._gain_of(updates[0].sample, updates)
        by_sample: dict[int, list[Update]] = {}
        for update in updates:
            by_sample.setdefault(update.sample, []).append(update)
        return [delta for of, theirs in by_sample.items() for delta in self._gain_of(of, theirs)]

    def _gain_of(self, number: int, updates: list[Update]) -> list[Delta]:
        """At most one delta: what all of these are together."""
        sample, end = self.samples[number], updates[-1].end
        if len(updates) == 1:
            tokens, found = updates[0].tokens, updates[0].logprobs or NO_SCORES
        else:
            tokens = [token for update in updates for token in update.tokens]
            found = [score for update in updates for score in update.logprobs or NO_SCORES]
        text, scores = "", NO_SCORES
        if not sample.is_stopped:
            before = sample.num_kept
            text = sample.push(tokens)
            if found:
                scores = sample.seen(found, sample.num_kept - before)
            if end is None and sample.is_stopped:
                self._engine.stop_sample(self.id, number)
        if end is not None:
            if end.reason in ("error", "abort") and not sample.is_stopped:
                raise self._failure(end)
            text += sample.finish(end)
        reason = sample.finish_reason
        return [Delta(number, text, scores, reason)] if text or scores or reason else []

    def _failure(self, end: End) -> ApiError:
        if end.reason == "error":
            return ApiError(500, f"a step of the engine failed: {end.error}", code="step_failed")
        if self._engine.is_closing:
            return ApiError(503, "the server is shutting down", code="shutting_down")
        return ApiError(500, "the request was aborted", code="aborted")


class Gained(NamedTuple):
    """What one of several runs gained."""

    run: int
    deltas: list[Delta]


async def together(runs: Sequence[Run]) -> AsyncGenerator[Gained, None]:
    """What several prompts gain, as it comes. The first that fails ends them all."""
    if len(runs) == 1:
        async with aclosing(runs[0].deltas()) as stream:
            async for deltas in stream:
                yield Gained(0, deltas)
        return
    news: asyncio.Queue[Gained | Exception | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(n, run, news)) for n, run in enumerate(runs)]
    try:
        num_open = len(tasks)
        while num_open:
            gained = await news.get()
            if isinstance(gained, Exception):
                raise gained
            if gained is None:
                num_open -= 1
            else:
                yield gained
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(number: int, run: Run, news: asyncio.Queue[Gained | Exception | None]) -> None:
    try:
        async for deltas in run.deltas():
            news.put_nowait(Gained(number, deltas))
        news.put_nowait(None)
    except Exception as error:
        news.put_nowait(error)
