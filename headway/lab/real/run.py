"""Run a workload on a loaded model in real time, so that it can be compared with a simulation.

Prompts are the workload's token ids, mapped to the model's vocabulary; prefixes that requests share
stay shared. A request ends after the workload's number of output tokens, whatever the model
generates: at `max_tokens`, or earlier by a stop, as an end token would end it.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from headway.config import Config
from headway.engine.engine import Engine, Observer
from headway.engine.gc_freeze import gc_freeze
from headway.errors import ConfigError, ExecutorError
from headway.events import Completed, Event, ended_by
from headway.lab.workload.request import WorkloadRequest
from headway.record.stats import RunStats
from headway.record.writer import header
from headway.request import Request, RequestParams
from headway.sampling_params import SamplingParams
from headway.scheduler import Scheduler

if TYPE_CHECKING:
    from headway.llm import LLM

MAX_SLEEP = 0.001  # seconds; a request is submitted at most this late
FITTING = (
    "block_size", "num_blocks", "num_host_blocks", "max_num_seqs", "max_num_batched_tokens",
    "max_model_len",
)  # fmt: skip


def run_workload(
    llm: LLM,
    requests: Iterable[WorkloadRequest],
    config: Config,
    *,
    async_scheduling: bool | None = None,
    observers: Iterable[Observer] = (),
    progress: Callable[[int], None] | None = None,
) -> RunStats:
    """Run all requests at their arrival times with a new scheduler on the loaded model.

    ConfigError if the model was loaded for less than the config needs; RequestError if a request is
    refused; ExecutorError if a step fails.
    """
    for name in FITTING:
        wanted, limit = getattr(config, name), getattr(llm.config, name)
        if wanted > limit or (name == "block_size" and wanted != limit):
            raise ConfigError(f"{name} {wanted}: the model was loaded with {name} {limit}")
    is_async = llm.engine.async_scheduling if async_scheduling is None else async_scheduling
    engine = Engine(Scheduler(config), llm.executor, llm.engine.clock, async_scheduling=is_async)
    stats, ends = RunStats(header(config, is_async)), Ends(engine)
    engine.observers += [stats, ends, *observers]
    if progress:
        engine.observers.append(lambda event: progress(len(ended_by(event))))
    coming = sorted(requests, key=lambda request: request.arrival)
    with gc_freeze():
        _run(llm, engine, coming, ends)
    if any(request.finish_reason == "error" for request in stats.requests):
        raise ExecutorError("a request of the workload failed in a step")
    return stats


class Ends:
    """Ends each request after its number of output tokens; an observer of the engine.

    A request gains at most one token in a decode step, so it is looked at again only when it may
    have reached its number.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_steps = 0  # decode steps so far
        self._due: list[tuple[int, int, Request, int]] = []  # by the step at which it may end
        self._order = count()

    def add(self, request: Request, num_output: int) -> None:
        earliest = self._num_steps + num_output - request.num_generated
        heapq.heappush(self._due, (earliest, next(self._order), request, num_output))

    def __call__(self, event: Event) -> None:
        if not isinstance(event, Completed):
            return
        self._num_steps += event.plan.num_steps
        while self._due and self._due[0][0] <= self._num_steps:
            _, _, request, num_output = heapq.heappop(self._due)
            if request.num_generated < num_output and not request.is_finished:
                self.add(request, num_output)
            else:
                self._engine.stop(request.id)


def _run(llm: LLM, engine: Engine, requests: list[WorkloadRequest], ends: Ends) -> None:
    """Step until every request has arrived and ended; sleep while there is nothing to do."""
    vocab_size, clock = llm.loaded.decoder.config.vocab_size, engine.clock
    coming = deque((request, _prompt(request, vocab_size)) for request in requests)
    start = clock.now()
    while coming or engine.has_work:
        while coming and coming[0][0].arrival <= clock.now() - start:
            request, prompt = coming.popleft()
            params = _params(llm, request, start)
            samples = engine.add(request.id, prompt, params, start + request.arrival)
            if request.num_output < request.max_tokens:
                for sample in samples:
                    ends.add(sample, request.num_output)
        if engine.has_work:
            engine.step()
            if engine.fault:
                raise ExecutorError(engine.fault)
        elif coming:
            time.sleep(max(0.0, min(MAX_SLEEP, coming[0][0].arrival - (clock.now() - start))))


def _params(llm: LLM, request: WorkloadRequest, start: float) -> RequestParams:
    deadline = None if request.deadline is None else start + request.deadline
    params = SamplingParams(
        temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True, n=request.n,
        priority=request.priority, client=request.client, deadline=deadline,
    )  # fmt: skip
    return llm.input_processor.params(params, request.id)


def _prompt(request: WorkloadRequest, vocab_size: int) -> list[int]:
    """Token ids of the vocabulary: equal for equal ids of the workload, as if random otherwise."""
    ids = np.asarray(request.prompt(), dtype=np.uint64)
    for shift in (30, 27):  # mixes the bits, so that two runs of consecutive ids do not match
        ids = (ids ^ (ids >> np.uint64(shift))) * np.uint64(0xBF58476D1CE4E5B9)
    tokens: list[int] = ((ids >> np.uint64(33)) % np.uint64(vocab_size)).tolist()
    return tokens
