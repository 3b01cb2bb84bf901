"""The offline API: a model, a scheduler and an engine in one object.

    llm = LLM("smollm2-135m")
    for result in llm.generate(["Hello, my name is"], SamplingParams(temperature=0)):
        print(result.text)

One thread; calls do not overlap. Everything the scheduler does can be set, watched and recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from headway.config import Config
from headway.engine.clock import RealClock
from headway.engine.engine import Engine, Observer
from headway.engine.input_processor import (
    InputProcessor,
    Message,
    Prompt,
    embedding_params,
    is_single,
)
from headway.engine.outputs import Delta, Result, ResultBuilder, drop_sample
from headway.errors import ExecutorError, FormatError, InvalidRequest, PolicyError, RequestError
from headway.executor.factory import count_blocks, make_executor
from headway.executor.gpu.swap_cost import Timed, measured
from headway.gatherer import OutputCollector
from headway.loading import Loaded, LoadOptions, Progress, load
from headway.observe.trace import TraceWriter
from headway.request import Params, Pooling, Request
from headway.sampling_params import SamplingParams
from headway.scheduler import Scheduler
from headway.scheduler.policies import cheaper

GREEDY = SamplingParams(temperature=0.0)


class LLM:
    """A model that answers prompts, many at a time.

    `device` is auto (a GPU if one can be used), cpu, cuda or cuda:1. `dtype` is auto (float32 on a
    CPU, bfloat16 on a GPU), float32, bfloat16 or float16. `quantization` on a CPU is int8, or auto
    (what a measurement finds fastest: see `headway models`). `kv_memory` is in bytes, or a text
    such as "2GiB". `async_scheduling` is on for a GPU and off for a CPU, unless given. `settings` are the
    scheduler's: slots and numbers, as in `headway.preset`.
    """

    def __init__(
        self,
        model: str = "smollm2-135m",
        *,
        device: str = "auto",
        dtype: str = "auto",
        quantization: str | None = None,
        preset: str = "headway",
        load_format: str = "auto",
        kv_cache_dtype: str = "auto",
        attention: str = "triton",
        kv_memory: int | str | None = None,
        gpu_memory_utilization: float = 0.9,
        threads: int | None = None,
        async_scheduling: bool | None = None,
        trace_out: str | Path | None = None,
        progress: Progress | None = None,
        observers: Iterable[Observer] = (),
        **settings: Any,
    ) -> None:
        options = LoadOptions(
            device=device, dtype=dtype, quantization=quantization, load_format=load_format, attention=attention,
            kv_cache_dtype=kv_cache_dtype, kv_memory=kv_memory, threads=threads,
            gpu_memory_utilization=gpu_memory_utilization,
        )  # fmt: skip
        self.loaded: Loaded = load(
            model, options, preset_name=preset, settings=settings, progress=progress,
            measure=count_blocks,
        )  # fmt: skip
        self.model_name = model
        self.tokenizer = self.loaded.tokenizer
        self.asking = InputProcessor(
            tokenizer=self.tokenizer, vocab_size=self.loaded.decoder.config.vocab_size,
            hidden_size=self.loaded.decoder.config.hidden_size, eos_ids=self.loaded.eos_ids,
        )  # fmt: skip
        self.config = self.loaded.config
        self.executor = make_executor(self.loaded.decoder, self.config, progress)
        matchers = self.executor.sampler.grammars.matchers
        matchers.use(self.tokenizer, self.loaded.eos_ids)
        clock = RealClock()
        self.executor.now = clock.now
        if self.loaded.is_on_gpu:
            self.config = with_measured_swap(self.config, self.executor)
        async_scheduling = self.loaded.is_on_gpu if async_scheduling is None else async_scheduling
        self.engine = Engine(
            Scheduler(self.config), self.executor, clock, async_scheduling=async_scheduling
        )
        self.engine.preparation = matchers
        self._trace: IO[str] | None = None
        if trace_out is not None:
            self._trace = _opened(Path(trace_out))
            self.engine.observers.append(TraceWriter(self._trace, self.config, async_scheduling))
        self._gatherer = OutputCollector(clock)
        self.engine.observers += [self._gatherer, *observers]
        self._numbers = count()

    # What a user asks.

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_finish: Callable[[Result], None] | None = None,
    ) -> list[Result]:
        """Results in the order of the prompts. `on_finish` is told of each as soon as it is done.

        Of several prompts, one that is refused has its error in its result and the others go on;
        a single one raises it.
        """
        return self._complete(prompts, params, on_finish)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[Result]:
        """Answers to one conversation, or to several; `options` go to the model's template."""
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        talks: Sequence[Any] = [messages] if is_one else messages
        return self.generate([self.chat_tokens(talk, **options) for talk in talks], params)

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, pooling: Pooling = "mean"
    ) -> list[Result]:
        """Embeddings in the order of the prompts: `result.embedding`, float32, of length 1.

        `pooling` is "mean" (over all prompt tokens) or "last" (the last one). A refused prompt is
        reported as by `generate`. Raises ExecutorError if a step fails.
        """
        results = self._complete(prompts, fixed=embedding_params(pooling))
        for result in results:
            drop_sample(result)
        return results

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[Delta]:
        """New text as it is generated. Leaving the loop early ends the requests."""
        results: list[Result] = []
        with self._interruptible():
            gatherings = self._open(_listed(prompts), params, is_watched=True, results=results)
            refused = next((result.error for result in results if result.error), None)
            if refused:
                self._close(gatherings)
                raise refused
            for _ in self._run(gatherings):
                for place, gathering in enumerate(gatherings):
                    deltas, gathering.deltas = gathering.deltas, []
                    for delta in deltas:
                        delta.index = place
                        yield delta

    def chat_tokens(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """A conversation as the model's template writes it, up to where the answer begins."""
        return self.asking.chat_tokens(messages, **options)

    def reset_cache(self) -> bool:
        """Forget all cached prefixes; False while requests hold some."""
        return self.engine.scheduler.reset_cache()

    def close(self) -> None:
        """End what runs and close the trace file."""
        for gathering in set(self._gatherer.gatherings.values()):
            self._close([gathering])
        if self._trace is not None:
            self._trace.close()
            self._trace = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    # From prompts to requests.

    def _open(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        is_watched: bool,
        results: list[Result],
        fixed: Params | None = None,
    ) -> list[ResultBuilder]:
        """Hand every prompt to the engine; what is refused leaves its error in its result.

        `fixed` is what the engine reads of every request, in place of `params`.
        """
        each = [params or GREEDY] * len(prompts) if not isinstance(params, Sequence) else params
        if len(each) != len(prompts):
            raise InvalidRequest(f"{len(prompts)} prompts, but {len(each)} sampling parameters")
        gatherings: list[ResultBuilder] = []
        try:
            for prompt, asked in zip(prompts, each, strict=True):
                text = prompt if isinstance(prompt, str) else None
                result = Result(id=str(next(self._numbers)), prompt=text, prompt_token_ids=[])
                results.append(result)
                if requests := self._add(prompt, asked, result, fixed):
                    gathering = ResultBuilder(
                        result, requests, asked, self.tokenizer, is_watched=is_watched
                    )
                    gatherings.append(gathering)
                    self._gatherer.gatherings.update(dict.fromkeys(requests, gathering))
        except Exception:  # the prompts before this one must not stay in the engine
            self._close(gatherings)
            raise
        return gatherings

    def _add(
        self, prompt: Prompt, asked: SamplingParams, result: Result, fixed: Params | None
    ) -> list[Request]:
        """Give one prompt to the engine; none, and the error in the result, if it is refused."""
        try:
            result.prompt_token_ids = self.asking.tokens(prompt)
            params = fixed or self.asking.params(asked, result.id)
            return self.engine.add(result.id, result.prompt_token_ids, params)
        except (RequestError, PolicyError) as error:
            result.error = error
            return []

    # The loop.

    def _complete(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_finish: Callable[[Result], None] | None = None,
        fixed: Params | None = None,
    ) -> list[Result]:
        """Run all prompts to their end; see `generate` and `_open`."""
        results: list[Result] = []
        with self._interruptible():
            gatherings = self._open(
                _listed(prompts), params, is_watched=False, results=results, fixed=fixed
            )
            if is_single(prompts) and results[0].error:
                raise results[0].error
            waiting = list(gatherings)
            for _ in self._run(gatherings):
                if on_finish:
                    for gathering in [g for g in waiting if not g.num_open]:
                        waiting.remove(gathering)
                        on_finish(gathering.result)
        return results

    def _run(self, gatherings: Sequence[ResultBuilder]) -> Iterator[None]:
        """Step until all of these are done; whatever interrupts it ends those that are not."""
        try:
            while any(gathering.num_open for gathering in gatherings):
                self.engine.step()
                for request in [r for r in self._gatherer.kept if not r.is_finished]:
                    self.engine.stop(request.id)
                yield
        except (Exception, GeneratorExit):  # a key press is for `_interruptible`
            self._close(gatherings)
            raise
        self._close(gatherings)

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """A key press may come at any line: whatever it breaks off is ended, or thrown away."""
        try:
            yield
        except (Exception, GeneratorExit):
            raise  # these end requests, but break nothing off
        except BaseException:
            try:
                self._close(list(set(self._gatherer.gatherings.values())))
                is_sound = not self.engine.has_work and self.engine.scheduler.is_idle
            except Exception:
                is_sound = False
            if not is_sound:
                self.engine.restart()
            self._gatherer.clear()
            raise

    def _close(self, gatherings: Sequence[ResultBuilder]) -> None:
        for gathering in gatherings:
            if gathering.num_open:
                with suppress(ExecutorError):
                    self.engine.abort(gathering.result.id)
        while self.engine.has_work and any(gathering.num_open for gathering in gatherings):
            self.engine.step()
        while self.engine.has_work and not self._gatherer.gatherings:
            self.engine.step()  # a plan in flight that nobody waits for any more


def with_measured_swap(config: Config, executor: Timed) -> Config:
    """The default swap rule `cheaper` with this device's times; any other is left as it is."""
    if config.swap != cheaper() or not config.num_host_blocks:
        return config
    return replace(config, swap=cheaper(**measured(executor, config)._asdict()))


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    return [prompts] if is_single(prompts) else list(prompts)


def _opened(path: Path) -> IO[str]:
    """A trace file, line by line on disk, so that an end without warning leaves whole lines."""
    try:
        return path.open("w", 1, encoding="utf-8")
    except OSError as error:
        raise FormatError(path, None, f"cannot be written: {error.strerror}") from None
