"""Prompts of HTTP requests on their way through the engine.

A `PromptRun` submits one prompt and yields what its samples gain. It aborts the request when the
iteration is left. Tokens come from the request's `RequestStream` (engine/async_engine.py), as text
from `OutputBuilder`. They go to stream.py, or past it to the connection: see `DirectWriter`. Knows
nothing of connections and JSON.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple, Protocol

from headway.engine.async_engine import AsyncEngine, RequestStream
from headway.engine.gained import Gained
from headway.engine.messages import FinishInfo, SampleUpdate
from headway.engine.outputs import Delta as Delta  # the endpoints import it from here
from headway.engine.outputs import OutputBuilder
from headway.engine.queries import FindRequest
from headway.errors import ExecutorError, InvalidGrammar, NotResumable, RequestTooLong
from headway.request import RequestParams
from headway.sampling_params import SamplingParams
from headway.server.context import Context
from headway.server.generation.event_ids import CURSOR, START, Cursor, Position
from headway.server.generation.response_format import grammar_error
from headway.server.generation.submissions import merge_submissions
from headway.server.http.errors import RETRY_AFTER, ApiError, too_long
from headway.server.http.middleware import TRACEPARENT
from headway.text.tokenizer import Tokenizer

SEARCH_SECONDS = 2.0  # for replicas to be connected to a new gateway
SEARCH_INTERVAL = 0.05


class ResponseWriter(Protocol):
    """A connection that can be written to without waiting, while it is open."""

    @property
    def is_open(self) -> bool: ...
    def write(self, body: bytes) -> None: ...


TextEvent = Callable[[str], bytes]  # encodes a text that a choice gains


class DirectWriter(NamedTuple):
    """Writes deltas to a connection without waking the task that iterates over them."""

    writer: ResponseWriter
    encode: Callable[[list[Delta]], bytes]
    text_event: TextEvent | None = None


class PromptRun(OutputBuilder):
    """One prompt of an HTTP request, with its n samples.

    `field` is the body's field that holds the prompt. With `is_live`, text is made as it is
    generated. `number` is the position of the prompt in the body. `params` are the engine's
    params, if the caller has made them already. `tokenizer` makes the texts, by default the model's.
    `prediction` has tokens that the output may resemble.
    """

    def __init__(
        self,
        context: Context,
        id: str,
        prompt: list[int],
        sampling_params: SamplingParams,
        *,
        field: str,
        is_live: bool,
        number: int = 0,
        params: RequestParams | None = None,
        tokenizer: Tokenizer | None = None,
        prediction: array[int] | None = None,
    ) -> None:
        self.field = field
        processor = context.input_processor
        self.params = processor.params(sampling_params, id) if params is None else params
        if prediction is not None:
            self.params = replace(self.params, prediction=prediction)
        self.engine = context.engine
        self._broken: Exception | None = None  # raised while writing directly
        self._cursor = CURSOR.get()
        super().__init__(
            id, prompt, sampling_params, tokenizer or processor.tokenizer,
            partial(self.engine.stop_sample, id),
            hidden=self.params.stops, is_live=is_live, first_choice=number * sampling_params.n,
        )  # fmt: skip

    async def deltas(
        self, direct_writer: DirectWriter | None = None
    ) -> AsyncGenerator[list[Delta], None]:
        """Yield what the samples gain, until all have ended.

        Deltas that were written through `direct_writer` are not yielded. That happens only while the
        caller waits for the next item. Raises ApiError if the request is refused or fails.
        """
        try:
            submitted = self.id, self.prompt, self.params, TRACEPARENT.get()
            held = None if self._cursor is None else await self._find(self._cursor)
            with self.engine.submitted(*submitted, held) as stream:
                parts: list[list[SampleUpdate]] = []
                if self._cursor is not None and held is not None:
                    parts = await self._replay(stream, self._cursor)
                self._write_directly(stream, direct_writer)
                while parts or stream.num_open:
                    updates = parts.pop(0) if parts else await stream.take()
                    if self._broken is not None:
                        raise self._broken
                    gained = [delta for delta in self.add(updates) if _is_shown(delta)]
                    self._check_ends(updates)
                    if gained:
                        yield gained
        except InvalidGrammar as error:
            raise grammar_error(self.sampling_params.grammar, str(error)) from error
        except RequestTooLong as error:
            raise too_long(self.field, error) from error

    def _write_directly(self, stream: RequestStream, writer: DirectWriter | None) -> None:
        """Let the stream write what it can without this run's reader."""
        if writer is None or len(self.samples) != 1:
            return
        stream.sink = partial(self._write, writer)
        if writer.text_event and not self.sampling_params.stop_strings:
            stream.token_sink = self._token_writer(writer.writer, writer.text_event)

    async def _find(self, cursor: Cursor) -> tuple[str, str] | None:
        """Where the request is that the client resumes.

        None if it can begin anew; NotResumable if the client has a part of it, and no replica has.
        """
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + SEARCH_SECONDS
        while True:
            with suppress(ExecutorError):  # no replica is connected yet
                if (held := await self.engine.ask(FindRequest(self.id))) is not None:
                    return held
            if loop.time() >= ends_at or self.engine.stop_reason is not None:
                break
            await asyncio.sleep(SEARCH_INTERVAL)
        if any(after != START for _, after in self._positions(cursor)):
            raise NotResumable(
                "the stream has ended, or no replica has it; send it without Last-Event-ID"
            )
        return None

    def _positions(self, cursor: Cursor) -> list[tuple[Position, Position]]:
        """Before and after the batch of the cursor, for each sample."""
        own = slice(self.first_choice, self.first_choice + len(self.samples))
        return list(zip(cursor.before[own], cursor.after[own], strict=True))

    async def _replay(self, stream: RequestStream, cursor: Cursor) -> list[list[SampleUpdate]]:
        """All so far, divided where the batch of the cursor begins and ends."""
        gained, positions = [Gained() for _ in self.samples], self._positions(cursor)
        while any(
            len(each.tokens) < num or (each.end is None and is_ended)
            for each, (_, (num, is_ended)) in zip(gained, positions, strict=True)
        ):
            if not stream.num_open:
                raise NotResumable("Last-Event-ID is not from this response", differs=True)
            for update in await stream.take():
                gained[update.sample].add(update)
        parts: list[list[SampleUpdate]] = [[], [], []]
        for sample, (each, (before, after)) in enumerate(zip(gained, positions, strict=True)):
            self.prompt_logprobs.update(each.prompt_logprobs)
            # The engine may have added tokens after a stop string.
            last = after if after[1] else (len(each.tokens), each.end is not None)
            places = [START, before, after, last]
            for part, (start, end) in zip(parts, pairwise(places), strict=True):
                if start < end:
                    part.append(each.between(self.id, sample, start, end))
        return [part for part in parts if part]

    def _write(self, direct_writer: DirectWriter, update: SampleUpdate) -> bool:
        """Write an update directly; False if the reader has to take it."""
        if update.end is not None or not direct_writer.writer.is_open:
            return False
        try:
            delta = self.add_one(update)
            # Text that is held back makes no event.
            if _is_shown(delta) and (event := direct_writer.encode([delta])):
                direct_writer.writer.write(event)
        except Exception as error:  # fails this request alone: its reader raises it
            self._broken = error
        return self._broken is None

    def _token_writer(
        self, writer: ResponseWriter, encode: TextEvent
    ) -> Callable[[list[int]], bool]:
        """Writes new tokens directly if they can only add text: the hot path of most streams."""
        (sample,) = self.samples

        def write(tokens: list[int]) -> bool:
            if not writer.is_open:
                return False
            try:
                if text := sample.push(tokens):
                    writer.write(encode(text))
            except Exception as error:  # fails this request alone: its reader raises it
                self._broken = error
            return self._broken is None

        return write

    def _check_ends(self, updates: Sequence[SampleUpdate]) -> None:
        """ApiError if an error or an abort has ended a sample."""
        for update in updates:
            if update.end is not None and self.samples[update.sample].has_failed:
                if update.end.error_code == "grammar":
                    error = update.end.error or ""
                    raise grammar_error(self.sampling_params.grammar, error, "grammar_failed")
                raise failure(self.engine, update.end)


def _is_shown(delta: Delta) -> bool:
    return bool(delta.text or delta.logprobs or delta.finish_reason)


def failure(engine: AsyncEngine, end: FinishInfo) -> ApiError:
    """The error for a request that ended with reason `error` or `abort`."""
    if end.error_code == "no_replica":
        return ApiError(503, str(end.error), code="no_replica", headers=RETRY_AFTER)
    if end.error_code is not None:  # of a fleet: the text says what happened to the request
        return ApiError(500, str(end.error), code=end.error_code)
    if end.reason == "error":
        return ApiError(500, f"a step of the engine failed: {end.error}", code="step_failed")
    if engine.is_closing:
        return ApiError(503, "the server is shutting down", code="shutting_down")
    return ApiError(500, "the request was aborted", code="aborted")


def merge_deltas(
    runs: Sequence[PromptRun], direct_writer: DirectWriter | None = None
) -> AsyncGenerator[list[Delta], None]:
    """Yield what several prompts gain. The first that fails ends them all."""
    if len(runs) == 1:
        return runs[0].deltas(direct_writer)
    return merge_submissions(runs[0].engine, [run.deltas for run in runs])


async def collect(runs: Sequence[PromptRun], num_choices: int) -> list[Delta]:
    """The complete output of each choice, once all choices have ended."""
    deltas_of: list[list[Delta]] = [[] for _ in range(num_choices)]
    async with aclosing(merge_deltas(runs)) as batches:
        async for deltas in batches:
            for delta in deltas:
                deltas_of[delta.choice].append(delta)
    return [
        Delta(
            choice, "".join(delta.text for delta in deltas),
            [entry for delta in deltas for entry in delta.logprobs], deltas[-1].finish_reason,
            num_tokens=deltas[-1].num_tokens,
        )
        for choice, deltas in enumerate(deltas_of)
    ]  # fmt: skip
