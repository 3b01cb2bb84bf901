"""Time that the observers of a server take on the engine's thread, in steady decode steps.

    python -m bench.scheduler.observers            prints one JSON object

timeline_us       Timeline.follow: phases, gaps and longest stalls
metrics_us        ServerMetrics: Prometheus metrics, the live page, statistics of the last minute
recent_trace_us   RecentTrace: the steps that a trial of the doctor replays
Each value is the time per step by number of running requests, the best of several rounds.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from time import perf_counter

from bench.harness import Bench, Figures
from headway import Engine, Scheduler, VirtualClock, preset
from headway.engine.loop import EngineLoop
from headway.events import Event
from headway.executor.simulated import Script, SimulatedExecutor
from headway.lab.doctor.live import RecentTrace
from headway.observe.server_metrics import ServerMetrics
from headway.record.timeline import Timeline
from headway.request import RequestParams

SIZES, NUM_STEPS, NUM_ROUNDS = (64, 256, 1024), 500, 7


class TimedObserver:
    """Calls an observer and sums the time that it takes."""

    def __init__(self, observer: Callable[[Event], object]) -> None:
        self._observer = observer
        self.seconds = 0.0

    def __call__(self, event: Event) -> None:
        start = perf_counter()
        self._observer(event)
        self.seconds += perf_counter() - start


def measure(num_running: int) -> dict[str, float]:
    """Microseconds per step of each observer with this many running requests."""
    num_tokens = NUM_STEPS * NUM_ROUNDS + 100
    config = preset(
        "vllm_v1", max_num_seqs=num_running, max_num_batched_tokens=1 << 20,
        max_model_len=1 << 20, num_blocks=num_running * (num_tokens // 16 + 2),
    )  # fmt: skip
    clock = VirtualClock()
    engine = Engine(Scheduler(config), SimulatedExecutor(clock, lambda _: 0.01), clock)
    metrics, timeline = ServerMetrics(EngineLoop(engine, lambda _: None), "m"), Timeline()
    timed = {
        "timeline_us": TimedObserver(timeline.follow),
        "metrics_us": TimedObserver(metrics),
        "recent_trace_us": TimedObserver(RecentTrace(engine)),
    }
    engine.observers[:] = list(timed.values())
    for number in range(num_running):
        params = RequestParams(max_tokens=num_tokens, sampling=Script(num_tokens, 7, 2))
        engine.add(str(number), [number] * 16, params)
    for _ in range(20):
        engine.step()
    best = dict.fromkeys(timed, float("inf"))
    for _ in range(NUM_ROUNDS):
        for observer in timed.values():
            observer.seconds = 0.0
        for _ in range(NUM_STEPS):
            engine.step()
        for name, observer in timed.items():
            best[name] = min(best[name], observer.seconds / NUM_STEPS * 1e6)
    return best


def measure_all(_: object) -> Figures:
    gc.disable()
    found = {size: measure(size) for size in SIZES}
    names = next(iter(found.values()))
    return {n: {str(s): round(found[s][n], 1) for s in SIZES} for n in names}


if __name__ == "__main__":
    Bench(__doc__).main(measure_all)
