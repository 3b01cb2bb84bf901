"""Runs batches of prompts to their end on the calling thread.

Consumes the same messages as a server does, without a queue or a second thread. Interrupts may
come at any line: they end all requests, and the engine stays usable.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

from headway.engine.engine import Engine
from headway.engine.messages import SampleUpdate, StepUpdates, TokenBatch
from headway.engine.outputs import Delta, OutputBuilder
from headway.errors import ExecutorError, HeadwayError
from headway.events import Event
from headway.request import RequestParams
from headway.sampling_params import SamplingParams
from headway.text.tokenizer import Tokenizer


class PromptBatch:
    """The prompts of one call: their builders, or the errors that refused them."""

    def __init__(self, *, is_streamed: bool = False) -> None:
        self.is_streamed = is_streamed
        self.results: list[OutputBuilder | HeadwayError] = []  # in the order of the prompts
        self.num_open = 0
        self.num_choices = 0  # samples of all prompts
        self.deltas: list[Delta] = []  # of a streamed batch, not taken yet
        self.finished: list[int] = []  # positions of prompts that have ended, not taken yet

    @property
    def builders(self) -> list[OutputBuilder]:
        return [each for each in self.results if isinstance(each, OutputBuilder)]

    @property
    def refusal(self) -> tuple[int, HeadwayError] | None:
        """The first refused prompt and its error."""
        found = enumerate(self.results)
        return next(((i, each) for i, each in found if isinstance(each, HeadwayError)), None)

    def take_deltas(self) -> list[Delta]:
        taken, self.deltas = self.deltas, []
        return taken

    def take_finished(self) -> list[int]:
        taken, self.finished = self.finished, []
        return taken


class OfflineRunner:
    """Adds prompts to an engine and steps it. Observes the engine."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None) -> None:
        self.engine = engine
        self.open: dict[str, tuple[PromptBatch, int]] = {}  # batch and position of a request
        self._tokenizer = tokenizer
        self._updates = StepUpdates(engine.clock)
        engine.observers.append(self._observe)

    @property
    def is_idle(self) -> bool:
        return not (self.open or self._updates.times)

    def add(
        self,
        batch: PromptBatch,
        id: str,
        prompt: tuple[str | None, array[int]],
        sampling_params: SamplingParams,
        params: RequestParams,
    ) -> None:
        """Add a prompt, given as text (if it has one) and tokens; raises what engine.add raises."""
        text, tokens = prompt
        requests = self.engine.add(id, tokens, params)
        builder = OutputBuilder(
            id, tokens, sampling_params, self._tokenizer, partial(self._stop_sample, id),
            hidden=params.stops, is_live=batch.is_streamed, prompt_text=text,
            first_choice=batch.num_choices,
        )  # fmt: skip
        self.open[id] = batch, len(batch.results)
        batch.results.append(builder)
        batch.num_open += 1
        batch.num_choices += params.n
        needs_each_step = sampling_params.stop_strings or sampling_params.logprobs is not None
        is_live = batch.is_streamed or bool(needs_each_step)
        self._updates.add(requests, is_live=is_live)

    def run(self, batch: PromptBatch) -> Iterator[None]:
        """Step until the batch has ended, yielding after each step; an exception aborts it.

        The steps of another call on this thread may end the batch between two yields.
        """
        try:
            while batch.num_open:
                if not self.engine.has_work:
                    raise ExecutorError("a KeyboardInterrupt during another call ended this one")
                self.engine.step()
                yield
            if batch.deltas or batch.finished:  # from the steps of another call
                yield
        except (Exception, GeneratorExit):  # `interruptible` handles KeyboardInterrupt
            self.close(batch)
            raise
        self.close(batch)

    def close(self, batch: PromptBatch) -> None:
        """Abort what is open of a batch, and step until they have ended."""
        for builder in batch.builders:
            if builder.num_open:
                with suppress(ExecutorError):
                    self.engine.abort(builder.id)
        while self.engine.has_work and batch.num_open:
            self.engine.step()
        while self.engine.has_work and not self.open:
            self.engine.step()  # a plan in flight whose requests have ended

    def close_all(self) -> None:
        """Abort everything that is open."""
        for batch in {id(batch): batch for batch, _ in self.open.values()}.values():
            self.close(batch)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """After a KeyboardInterrupt, abort everything; restart the engine if it is broken."""
        try:
            yield
        except (Exception, GeneratorExit):
            raise  # these leave the engine in a consistent state
        except BaseException:
            try:
                self.close_all()
                is_sound = not self.engine.has_work and self.engine.scheduler.is_idle
            except Exception:
                is_sound = False
            if not is_sound:
                self.engine.restart()
            self.open.clear()
            self._updates.clear()
            raise

    def _stop_sample(self, id: str, sample: int) -> None:
        self.engine.stop_sample(id, sample)

    def _observe(self, event: Event) -> None:
        if not self.open:
            return  # the engine may have other users, such as a server
        for message in self._updates.of(event):
            if isinstance(message, TokenBatch):
                for id, tokens in zip(message.ids, message.tokens, strict=True):
                    self._add(SampleUpdate(id, 0, tokens))
            else:
                self._add(message)

    def _add(self, update: SampleUpdate) -> None:
        if update.id not in self.open:
            return
        batch, position = self.open[update.id]
        builder = batch.results[position]
        assert isinstance(builder, OutputBuilder), "a refused prompt is not open"
        delta = builder.add_one(update)
        if batch.is_streamed:
            batch.deltas.append(delta)
        if not builder.num_open:
            del self.open[update.id]
            batch.num_open -= 1
            batch.finished.append(position)
