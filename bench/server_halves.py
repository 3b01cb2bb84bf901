"""The processes that bench/server.py measures: servers of two kinds, and the engine without one.

    python bench/server_halves.py real --quantization none --steps FILE --port N
    python bench/server_halves.py simulated --seconds 0.02 --api-workers 2 --port N

Both serve as `headway serve` does, with its app and its logs. `real` has the bundled model and
writes when each step was done. `simulated` has the bundled model's tokenizer over an executor
that makes a token for everybody after some seconds of sleep, or at once.
"""

from __future__ import annotations

import argparse
import struct
import sys
import time
from functools import partial
from mmap import mmap
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from headway import LLM, SamplingParams
from headway.cli.commands.serve import Facts, make_app, make_engine, set_up_logs
from headway.cli.options.model import ModelOptions
from headway.cli.options.serve import ServeOptions
from headway.engine.clock import RealClock
from headway.engine.engine import Engine
from headway.engine.input_processor import InputProcessor
from headway.engine.loop import EngineLoop
from headway.lab.loadgen.requests import Wording
from headway.lab.workload.jobs import Job
from headway.loading import find_tokenizer
from headway.model.registry import resolve
from headway.observe.server_metrics import ServerMetrics
from headway.plan import Column, Plan, StepReport, StepResult
from headway.scheduler import Scheduler, preset
from headway.server.process.serve import Recipe, Served, bind, serve_here
from headway.server.process.workers import Supervisor
from headway.server.settings import Settings

MODEL, VOCAB = "smollm2-135m", 49_152
SEATS, STREAMS = 32, 256
MAX_STEPS = 1 << 20
MOMENT = struct.Struct("d")  # seconds on the system's monotonic clock


def model_options(quantization: str) -> ModelOptions:
    """The same for both: a model with as many seats as there are requests at once."""
    return ModelOptions(
        model=MODEL, device="cpu", quantization=quantization, max_num_seqs=SEATS, num_blocks=1024
    )


def real(quantization: str, steps: str) -> Served:
    served = make_engine(ServeOptions(), model_options(quantization))
    served.engine.observers.append(StepTimes(steps))
    return served


class StepTimes:
    """An observer that notes when the engine told of each step: then who uses it has its tokens.

    In memory that it shares with who measures: to write to a file would be part of the time.
    """

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            file.truncate(MAX_STEPS * MOMENT.size)
            self._moments = mmap(file.fileno(), 0)
        self._place = 0

    def __call__(self, report: StepReport) -> None:
        MOMENT.pack_into(self._moments, self._place, time.perf_counter())
        self._place += MOMENT.size


class Asleep:
    """An executor that has the tokens of a plan after so many seconds of sleep."""

    def __init__(self, clock: RealClock, seconds: float) -> None:
        self._clock, self._seconds = clock, seconds
        self._column = 0
        self._result = StepResult()

    def launch(self, plan: Plan) -> Asleep:
        now = self._clock.now()
        columns: list[Column] = []
        for _ in range(plan.num_steps if plan.decodes else 0):
            self._column = (self._column + 1) % 1000
            columns.append(np.full(len(plan.decodes), 1000 + self._column, dtype=np.intc))
        firsts = [1000 for chunk in plan.chunks if chunk.is_last]
        # Depth 0: one plan at a time.
        self._result = StepResult(columns, firsts, now, now + self._seconds)
        return self

    def wait(self) -> StepResult:
        if self._seconds:
            time.sleep(max(0.0, self._result.ended - self._clock.now()))
        return self._result


def simulated(seconds: float) -> Served:
    config = preset(
        "headway", block_size=16, num_blocks=STREAMS * 64, max_num_seqs=STREAMS, max_num_batched_tokens=8192,
        max_model_len=2048, num_scheduler_steps=1,
    )  # fmt: skip
    clock = RealClock()
    engine = Engine(Scheduler(config), Asleep(clock, seconds), clock, async_scheduling=0)
    tokenizer = find_tokenizer(resolve(MODEL))
    asking = InputProcessor(
        tokenizer=tokenizer, vocab_size=VOCAB, hidden_size=8, eos_ids=frozenset({2})
    )
    facts = Facts(asking=asking, model_name=MODEL, max_model_len=config.max_model_len, words="")
    return Served(engine=engine, facts=facts, limits=ServeOptions().limits(), prepare=watch)


def watch(loop: EngineLoop) -> None:
    ServerMetrics(loop, MODEL)


def answer_offline(quantization: str, control: Connection) -> None:
    """Load the model, then run whatever jobs come, without any server; None ends it."""
    llm = model_options(quantization).load()
    control.send("ready")
    while (asked := control.recv()) is not None:
        jobs, seed = asked
        control.send(run_offline(llm, jobs, seed))


def run_offline(llm: LLM, jobs: list[Job], seed: int) -> dict[str, float]:
    wording = Wording(model=MODEL, vocab_size=VOCAB, seed=seed)
    steps: list[tuple[float, int]] = []  # when each had its tokens, and how many decode in it

    def note(report: StepReport) -> None:
        steps.append((report.result.ended, len(report.plan.decodes)))

    llm.engine.observers.append(note)
    begun = time.perf_counter()
    results = llm.generate(
        [wording.tokens(job) for job in jobs],
        [SamplingParams(temperature=0, max_tokens=job.num_output, ignore_eos=True)
         for job in jobs],
        use_tqdm=False,
    )  # fmt: skip
    seconds = time.perf_counter() - begun
    llm.engine.observers.remove(note)
    assert not any(result.outputs[0].error for result in results)
    ended, num_rows = np.array(steps).T
    gaps = np.repeat(np.diff(ended), num_rows[1:].astype(int))
    return {
        "seconds": seconds,
        "median_itl_ms": float(np.median(gaps)) * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("real", "simulated"))
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--steps", default="")
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--api-workers", type=int, default=0)
    parser.add_argument("--port", type=int, default=0)
    asked = parser.parse_args()
    make = (
        partial(simulated, asked.seconds)
        if asked.kind == "simulated"
        else partial(real, asked.quantization, asked.steps)
    )
    recipe = Recipe(
        make_engine=make, make_app=partial(make_app, Settings(), 30.0),
        setup=partial(set_up_logs, "human", "info"),
    )  # fmt: skip
    bound, end_logs = bind("127.0.0.1", asked.port), recipe.setup()
    if asked.api_workers:
        status = Supervisor(recipe, bound, asked.api_workers).run(lambda _: None)
    else:
        status = serve_here(recipe, bound, lambda _: None)
    end_logs()
    sys.exit(status)


if __name__ == "__main__":
    main()
