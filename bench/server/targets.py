"""The processes that bench/server/overhead.py measures: two kinds of servers, and an engine without one.

    python -m bench.server.targets real --quantization none --steps FILE --port N
    python -m bench.server.targets simulated --seconds 0.02 --api-server-count 2 --port N

Both use the app and the logging of `headway serve`. `real` serves the bundled model and records the
time of each step. `simulated` uses the bundled model's tokenizer and an executor that generates one
token per request after a sleep, or at once.
"""

from __future__ import annotations

import argparse
import struct
import sys
import time
from dataclasses import asdict
from functools import cache, partial
from mmap import mmap

import numpy as np

from headway import LLM, Engine, RealClock, SamplingParams, Scheduler, preset
from headway.engine.input_processor import InputProcessor
from headway.engine.loop import EngineLoop
from headway.engine.queue_limits import QueueLimits
from headway.events import Completed, Event
from headway.lab.loadgen.requests import RequestFormat
from headway.lab.workload.request import WorkloadRequest
from headway.loading import find_tokenizer
from headway.model.registry import resolve
from headway.observe.server_metrics import ServerMetrics
from headway.options import EngineOptions
from headway.plan import Column, Plan, StepResult
from headway.server.process.log_setup import setup
from headway.server.process.serve import ServedEngine, ServerFactory, bind, serve_single_process
from headway.server.process.workers import Supervisor
from headway.server.serving import ModelInfo, ServerOptions, make_app, make_engine
from headway.server.settings import Settings

MODEL, VOCAB = "smollm2-135m", 49_152
CONCURRENCY, STREAMS = 32, 256
MAX_STEPS = 1 << 20
TIME = struct.Struct("d")  # seconds on the system's monotonic clock


def model_options(quantization: str) -> EngineOptions:
    """Options for the served and the offline model: max_num_seqs is the concurrency."""
    return EngineOptions(
        model=MODEL, device="cpu", quantization=quantization, max_num_seqs=CONCURRENCY,
        num_blocks=1024,
    )  # fmt: skip


def load(options: EngineOptions) -> LLM:
    return LLM(**asdict(options))


def real(quantization: str, steps: str) -> ServedEngine:
    served = make_engine(ServerOptions(engine=model_options(quantization)), load)
    served.engine.observers.append(StepTimes(steps))
    return served


class StepTimes:
    """An observer that records when the engine reports each step.

    Uses memory shared with the measuring process, because writing to a file would take time.
    """

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            file.truncate(MAX_STEPS * TIME.size)
            self._times = mmap(file.fileno(), 0)
        self._place = 0

    def __call__(self, event: Event) -> None:
        if not isinstance(event, Completed):
            return
        TIME.pack_into(self._times, self._place, time.perf_counter())
        self._place += TIME.size


class SleepingExecutor:
    """An executor whose steps take a fixed time."""

    def __init__(self, clock: RealClock, seconds: float) -> None:
        self._clock, self._seconds = clock, seconds
        self._column = 0
        self._result = StepResult()

    def launch(self, plan: Plan) -> SleepingExecutor:
        now = self._clock.now()
        columns: list[Column] = []
        for _ in range(plan.num_steps if plan.decodes else 0):
            self._column = (self._column + 1) % 1000
            columns.append(np.full(len(plan.decodes), 1000 + self._column, dtype=np.intc))
        first_tokens = [1000 for chunk in plan.chunks if chunk.is_last]
        # Without async scheduling there is one plan at a time.
        self._result = StepResult(columns, first_tokens, now, now + self._seconds)
        return self

    def wait(self) -> StepResult:
        if self._seconds:
            time.sleep(max(0.0, self._result.ended - self._clock.now()))
        return self._result


def simulated(seconds: float) -> ServedEngine:
    config = preset(
        "headway", block_size=16, num_blocks=STREAMS * 64, max_num_seqs=STREAMS, max_num_batched_tokens=8192,
        max_model_len=2048, num_scheduler_steps=1,
    )  # fmt: skip
    clock = RealClock()
    executor = SleepingExecutor(clock, seconds)
    engine = Engine(Scheduler(config), executor, clock, async_scheduling=0)
    tokenizer = find_tokenizer(resolve(MODEL))
    processor = InputProcessor(
        tokenizer=tokenizer, vocab_size=VOCAB, hidden_size=8, eos_ids=frozenset({2})
    )
    info = ModelInfo(
        input_processor=processor, model_name=MODEL, max_model_len=config.max_model_len,
        preset="headway", description="", execution="simulated",
    )  # fmt: skip
    limits = QueueLimits(max_waiting=1024, max_waiting_tokens=1 << 20)
    return ServedEngine(engine=engine, model_info=info, limits=limits, prepare=watch)


def watch(loop: EngineLoop) -> None:
    ServerMetrics(loop, MODEL)


@cache
def offline_model(quantization: str) -> LLM:
    return load(model_options(quantization))


def run_offline(quantization: str, jobs: list[WorkloadRequest], seed: int) -> dict[str, float]:
    """Run jobs without a server; the model is loaded by the first call in a process."""
    llm = offline_model(quantization)
    wording = RequestFormat(model=MODEL, vocab_size=VOCAB, seed=seed)
    steps: list[tuple[float, int]] = []  # end time and number of decoding requests of each step

    def record(event: Event) -> None:
        if isinstance(event, Completed):
            steps.append((event.result.ended, len(event.plan.decodes)))

    llm.engine.observers.append(record)
    begun = time.perf_counter()
    results = llm.generate(
        [wording.tokens(job) for job in jobs],
        [SamplingParams(temperature=0, max_tokens=job.num_output, ignore_eos=True)
         for job in jobs],
        use_tqdm=False,
    )  # fmt: skip
    seconds = time.perf_counter() - begun
    llm.engine.observers.remove(record)
    assert not any(result.outputs[0].error for result in results)
    ended, num_rows = np.array(steps).T
    gaps = np.repeat(np.diff(ended), num_rows[1:].astype(int))
    return {"seconds": seconds, "median_itl_ms": float(np.median(gaps)) * 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kind", choices=("real", "simulated"))
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--steps", default="")
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--api-server-count", type=int, default=0)
    parser.add_argument("--port", type=int, default=0)
    asked = parser.parse_args()
    make = (
        partial(simulated, asked.seconds)
        if asked.kind == "simulated"
        else partial(real, asked.quantization, asked.steps)
    )
    factory = ServerFactory(
        make_engine=make, make_app=partial(make_app, Settings()),
        setup=partial(setup, "human", "info"),
    )  # fmt: skip
    bound, end_logs = bind("127.0.0.1", asked.port), factory.setup()
    if asked.api_server_count:
        status = Supervisor(factory, bound, asked.api_server_count).run(lambda _: None)
    else:
        status = serve_single_process(factory, bound, lambda _: None)
    end_logs()
    sys.exit(status)


if __name__ == "__main__":
    main()
