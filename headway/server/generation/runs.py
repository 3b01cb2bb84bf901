"""One prompt on its way through the engine: updates in, text and log probabilities out.

Ends a sample at its stop string, and the request when nobody iterates any more. Knows nothing of
connections and JSON.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from headway.engine.async_engine import AsyncEngine
from headway.engine.messages import End, Update
from headway.errors import InvalidGrammar, Overloaded, RequestTooLong
from headway.request import Params
from headway.sampling_params import SamplingParams, TokenLogprobs
from headway.server.context import Context
from headway.server.generation.response_format import grammar_error
from headway.server.generation.samples import Sample
from headway.server.http.errors import ApiError
from headway.server.http.middleware import TRACEPARENT

AT_ONCE = 32  # prompts that are opened or sent between two looks at other streams
NO_SCORES: list[TokenLogprobs] = []


class Delta(NamedTuple):
    """What one sample gained."""

    choice: int  # its place among the answer's texts
    text: str
    scores: list[TokenLogprobs] = NO_SCORES  # of the tokens that were asked for and may be seen
    finish_reason: str | None = None


def joined(deltas: Sequence[Delta]) -> Delta:
    """All that a sample gained, in one."""
    text = "".join(delta.text for delta in deltas)
    scores = [score for delta in deltas for score in delta.scores]
    return Delta(deltas[-1].choice, text, scores, deltas[-1].finish_reason)


class Outlet(Protocol):
    """Takes what is written to it at once, while it is open."""

    @property
    def is_open(self) -> bool: ...
    def write(self, body: bytes) -> None: ...


class Straight(NamedTuple):
    """A way past whoever iterates over deltas, and how they look there."""

    outlet: Outlet
    form: Callable[[list[Delta]], bytes]


class Run:
    """A prompt with its n samples.

    `field` is where the client wrote the prompt; `is_live`: text is wanted as it comes; `number`
    counts the prompts of one answer; `params` are those of `asked` if they are known already.
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
        number: int = 0,
        params: Params | None = None,
    ) -> None:
        self.id = id
        self.field = field
        self.prompt = prompt
        self.asked = asked
        self.params = context.input_processor.params(asked, id) if params is None else params
        self.samples = [
            Sample(context, asked, self.params.stops, is_live) for _ in range(asked.n)
        ]  # fmt: skip
        self.prompt_scores: dict[int, TokenLogprobs] = {}  # by place
        self._first_choice = number * asked.n
        self._broken: Exception | None = None  # of something that went straight
        self._engine = context.engine

    @property
    def num_generated(self) -> int:
        return sum(sample.num_kept for sample in self.samples)

    @property
    def num_cached(self) -> int:
        end = self.samples[0].end
        return end.num_cached if end else 0

    @property
    def can_wait(self) -> bool:
        """Whether it makes sense to send the prompt again later."""
        return not self._engine.is_closing

    async def deltas(self, straight: Straight | None = None) -> AsyncGenerator[list[Delta], None]:
        """What the samples gain, until all have ended; all that is there at once comes at once.

        What goes straight is left out; while an iteration is not waited for, nothing does.
        """
        try:
            asked = self.id, self.prompt, self.params, TRACEPARENT.get()
            with self._engine.submitted(*asked) as stream:
                if straight is not None and len(self.samples) == 1:
                    stream.sink = partial(self._went_straight, straight)
                while stream.num_open:
                    updates = await stream.take()
                    if self._broken is not None:
                        raise self._broken
                    gained = self._gain(updates)
                    if gained:
                        yield gained
        except InvalidGrammar as error:
            raise grammar_error(self.asked.grammar, str(error)) from error
        except RequestTooLong as error:
            raise too_long(error, self.field) from error

    def _went_straight(self, straight: Straight, update: Update) -> bool:
        if update.end is not None or not straight.outlet.is_open:
            return False
        try:
            gained = self._gain_of(update)
            if gained and (event := straight.form(gained)):  # held-back text forms no event
                straight.outlet.write(event)
        except Exception as error:  # it is this request's alone: its reader is told
            self._broken = error
        return self._broken is None

    def _gain(self, updates: list[Update]) -> list[Delta]:
        if len(updates) == 1:
            return self._gain_of(updates[0])
        by_sample: dict[int, list[Update]] = {}
        for update in updates:
            by_sample.setdefault(update.sample, []).append(update)
        return [delta for own in by_sample.values() for delta in self._gain_of(_as_one(own))]

    def _gain_of(self, update: Update) -> list[Delta]:
        """At most one delta."""
        _, number, tokens, found, prompt_scores, end, _ = update
        sample, text, scores = self.samples[number], "", NO_SCORES
        if prompt_scores:
            self.prompt_scores.update(prompt_scores)
        if not sample.is_stopped:
            before = sample.num_kept
            text = sample.push(tokens)
            if found:
                scores = sample.seen(found, sample.num_kept - before)
            if end is None and sample.is_stopped:
                self._engine.stop_sample(self.id, number)
        if end is not None:
            if end.reason in ("error", "abort") and not sample.is_stopped:
                if end.error_code == "grammar":
                    raise grammar_error(self.asked.grammar, end.error or "", "grammar_failed")
                raise failure(self._engine, end)
            text += sample.finish(end)
        if not (text or scores or end):
            return []
        return [Delta(self._first_choice + number, text, scores, sample.finish_reason)]


def failure(engine: AsyncEngine, end: End) -> ApiError:
    """The error of a request that ended with reason `error` or `abort`."""
    if end.reason == "error":
        return ApiError(500, f"a step of the engine failed: {end.error}", code="step_failed")
    if engine.is_closing:
        return ApiError(503, "the server is shutting down", code="shutting_down")
    return ApiError(500, "the request was aborted", code="aborted")


def too_long(error: RequestTooLong, field: str) -> ApiError:
    """The error of a prompt, written in `field`, that the engine refused for its length."""
    code = "context_length_exceeded"
    return ApiError(400, f"{field}: {error}", param=field, code=code)


def _as_one(updates: Sequence[Update]) -> Update:
    """What a sample gained in several steps, as if in one."""
    return updates[-1]._replace(
        tokens=[token for update in updates for token in update.tokens],
        logprobs=[score for update in updates for score in update.logprobs or ()],
        prompt_logprobs=[score for update in updates for score in update.prompt_logprobs or ()],
    )


News = tuple[Run, list[Delta] | Exception | None]  # None: all samples have ended


def together(
    runs: Sequence[Run], straight: Straight | None = None
) -> AsyncGenerator[list[Delta], None]:
    """What several prompts gain, as it comes. The first that fails ends them all."""
    return runs[0].deltas(straight) if len(runs) == 1 else _merged(runs)


async def _merged(runs: Sequence[Run]) -> AsyncGenerator[list[Delta], None]:
    """All at once. A prompt that finds the queue full is sent again when another one has ended,
    unless all of them find it full: a request with more prompts than may wait still runs."""
    news: asyncio.Queue[News] = asyncio.Queue()
    tasks: dict[Run, asyncio.Task[None]] = {}
    num_open, parked, is_admitted = len(runs), deque[Run](), False
    try:
        for number, run in enumerate(runs):
            tasks[run] = asyncio.create_task(_pump(run, news))
            if number % AT_ONCE == AT_ONCE - 1:
                await asyncio.sleep(0)  # other streams go on meanwhile
        while num_open:
            run, gained = await news.get()
            if isinstance(gained, Overloaded) and run.can_wait and (num_open > 1 or is_admitted):
                parked.append(run)
                if num_open > 1:
                    num_open -= 1
                    continue
                await asyncio.sleep(gained.retry_after)  # only other requests can make room
            elif isinstance(gained, Exception):
                raise gained
            elif gained is not None:
                is_admitted = True
                yield gained
                continue
            if parked:
                run = parked.popleft()
                tasks[run] = asyncio.create_task(_pump(run, news))
            else:
                num_open -= 1
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


async def _pump(run: Run, news: asyncio.Queue[News]) -> None:
    try:
        async for deltas in run.deltas():
            news.put_nowait((run, deltas))
        news.put_nowait((run, None))
    except Exception as error:
        news.put_nowait((run, error))
