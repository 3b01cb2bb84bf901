"""Runs batches of prompts to their end on the calling thread.

Consumes the same messages as a server does, without a queue or a second thread. Interrupts may
come at any line: they end all requests, and the engine stays usable.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from headway.engine.engine import Engine
from headway.engine.messages import SampleUpdate, StepUpdates, TokenBatch
from headway.engine.outputs import Delta, OutputBuilder, RequestOutput
from headway.engine.progress_bar import progress_bar
from headway.errors import ExecutorError, HeadwayError
from headway.events import Event
from headway.request import Request

OnFinish = Callable[[int, RequestOutput], None]  # (position of the prompt, its output)


@dataclass(slots=True, eq=False)
class PromptBatch:
    """The prompts of one call: their builders, or the errors that refused them."""

    is_streamed: bool = False
    results: list[OutputBuilder | HeadwayError] = field(default_factory=list)  # as the prompts
    num_open: int = 0
    num_choices: int = 0  # samples of all prompts
    deltas: deque[Delta] = field(default_factory=deque)  # of a streamed batch, not taken yet
    # Positions and builders of prompts that have ended, not taken yet.
    finished: deque[tuple[int, OutputBuilder]] = field(default_factory=deque)

    @property
    def builders(self) -> list[OutputBuilder]:
        return [each for each in self.results if isinstance(each, OutputBuilder)]


class OfflineRunner:
    """Collects what an engine generates for batches. Observes the engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.open: dict[str, tuple[PromptBatch, int, OutputBuilder]] = {}  # by id; with positions
        self._updates = StepUpdates(engine.clock)
        engine.observers.append(self._observe)

    @property
    def is_idle(self) -> bool:
        return not (self.open or self._updates.times)

    @contextmanager
    def batch(self, *, is_streamed: bool = False) -> Iterator[PromptBatch]:
        """A batch, which has ended when the context is left; an exception aborts it."""
        batch = PromptBatch(is_streamed)
        with self.interruptible():
            try:
                yield batch
            except (Exception, GeneratorExit):  # `interruptible` handles KeyboardInterrupt
                self.close(batch)
                raise
            self.close(batch)

    def watch(self, batch: PromptBatch, builder: OutputBuilder, added: Iterable[Request]) -> None:
        """Collect the output of a prompt that was added to the engine as these requests."""
        self.open[builder.id] = batch, len(batch.results), builder
        batch.results.append(builder)
        batch.num_open += 1
        batch.num_choices += builder.num_open
        params = builder.sampling_params
        needs_each_step = params.stop_strings or params.logprobs is not None
        self._updates.add(added, is_live=batch.is_streamed or bool(needs_each_step))

    def run(
        self, batch: PromptBatch, use_tqdm: bool, on_finish: OnFinish | None = None
    ) -> dict[int, RequestOutput]:
        """Run the batch to its end; returns the outputs by position."""
        outputs, num_prompts = dict[int, RequestOutput](), len(batch.builders)
        with progress_bar(num_prompts, use_tqdm) as advance:
            while len(outputs) < num_prompts:
                if not batch.finished:
                    self.check_work()
                    self.engine.step()
                while batch.finished:  # while the device runs the next step
                    position, builder = batch.finished.popleft()
                    outputs[position] = builder.output()
                    if on_finish is not None:
                        on_finish(position, outputs[position])
                    advance()
        return outputs

    def check_work(self) -> None:
        """ExecutorError if an open batch has lost its requests."""
        if not self.engine.has_work:
            raise ExecutorError("a KeyboardInterrupt during another call ended this one")

    def close(self, batch: PromptBatch) -> None:
        """Abort what is open of a batch, and step until they have ended."""
        for builder in batch.builders:
            if builder.num_open:
                with suppress(ExecutorError):
                    self.engine.abort(builder.id)
        while self.engine.has_work and (batch.num_open or not self.open):
            self.engine.step()  # also a plan in flight whose requests have ended

    def close_all(self) -> None:
        for batch in dict.fromkeys(batch for batch, *_ in self.open.values()):
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

    def _observe(self, event: Event) -> None:
        if not self.open:
            return  # the engine may have other users, such as a server
        for message in self._updates.of(event):
            if isinstance(message, TokenBatch):
                gained = zip(message.ids, message.tokens, strict=True)
                updates = [SampleUpdate(id, 0, tokens) for id, tokens in gained]
            else:
                updates = [message]
            for update in updates:
                if update.id not in self.open:
                    continue
                batch, position, builder = self.open[update.id]
                delta = builder.add_one(update)
                if batch.is_streamed:
                    batch.deltas.append(delta)
                if not builder.num_open:
                    del self.open[update.id]
                    batch.num_open -= 1
                    batch.finished.append((position, builder))
