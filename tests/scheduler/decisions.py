"""Simulated runs whose scheduling decisions are recorded, so that a refactoring cannot change them.

A run is made from its seed alone: a preset with some slots and numbers changed, and a workload with
shared prefixes, priorities, clients, deadlines, several samples of a prompt, and aborts. The digest
of all its decisions is kept in decisions.json.

    python -m tests.scheduler.decisions                 compare all runs with the recorded digests
    python -m tests.scheduler.decisions --show SEED     print the decisions of a run, a step per line
    python -m tests.scheduler.decisions --write         record the digests again

To see what a change does to a run, compare the output of --show before and after it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from headway import Engine, Scheduler, VirtualClock, preset
from headway.events import Aborted, Added, Completed, Event, Planned
from headway.executor.simulated import Script, SimulatedExecutor
from headway.plan import Plan, Preemption
from headway.request import Request, RequestParams

RECORDED = Path(__file__).with_name("decisions.json")
NUM_RUNS = 280
NUM_PLAIN_RUNS = 84  # the first runs use the presets' own slots
NAMES = ("headway", "nano_vllm", "deep_dive", "vllm", "vllm_v1", "minivllm", "static")
SLOTS = {
    "queue": (
        "fcfs", "fcfs(max_overtakes=2)", "priority(aging=0)", "priority(preempts=True)",
        "priority(aging=0, preempts=True)", "shortest_first", "fair", "fair(max_overtakes=1)", "earliest_deadline",
    ),
    "headroom": (
        "watermark(0.0)", "watermark(0.05)", "back_off(watermark(0.02))", "reserve_outputs(1.0)",
        "reserve_outputs(0.3)", "future_peak(limit)", "future_peak(learned)",
        "back_off(future_peak(learned))",
    ),
    "victim": ("newest", "served_last", "least_work", "lowest_priority", "fewest_private_blocks"),
    "swap": ("recompute", "swap", "swap_if_cheaper"),
}  # fmt: skip
CHUNKS = ("split_any", "split_first", "at_most(24)")
VOCABULARY = range(1, 50_000)  # of prompts
FILLER, END = 60_000, 0  # generated tokens are FILLER plus the request's number, then END


class Arrival(NamedTuple):
    time: float
    id: str
    prompt: list[int]
    params: RequestParams


class Abort(NamedTuple):
    time: float
    id: str


@dataclass(slots=True)
class Workload:
    """What clients send, in the order of time."""

    arrivals: list[Arrival]
    aborts: list[Abort]

    @property
    def next_time(self) -> float:
        """When the next request arrives or is aborted; infinite if none is left."""
        return min(
            (events[0].time for events in (self.arrivals, self.aborts) if events), default=inf
        )


def changes_of(seed: int) -> tuple[str, dict[str, Any]]:
    """The preset of a run and its changes."""
    rng = random.Random(seed)
    name = NAMES[seed % len(NAMES)]
    changes: dict[str, Any] = {
        "max_num_seqs": rng.choice((4, 12, 32)),
        "max_num_batched_tokens": rng.choice((64, 128, 512)),
        "num_scheduler_steps": rng.choice((1, 1, 4)),
        "block_size": rng.choice((4, 16)),
        "num_host_blocks": rng.choice((0, 32, 200)),
        "max_model_len": 700,
    }
    changes["num_blocks"] = rng.choice((700, 1100, 2400)) // changes["block_size"]
    if seed >= NUM_PLAIN_RUNS:
        changes |= {slot: rng.choice(choices) for slot, choices in SLOTS.items()}
        if name != "minivllm":
            changes["chunk"] = rng.choice(CHUNKS)
    if name == "minivllm":  # it does not split prompts
        changes["max_num_batched_tokens"] = 1024
    return name, changes


def tokens(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCABULARY.start, VOCABULARY.stop) for _ in range(length)]


def workload_of(seed: int) -> Workload:
    """The requests of a run: a burst or a stream; half of the prompts start with a shared prefix."""
    rng = random.Random(1000 + seed)
    prefixes = [tokens(rng, rng.randrange(16, 120)) for _ in range(3)]
    rate, time, arrivals = rng.choice((5.0, 40.0, 1e9)), 0.0, []
    for number in range(rng.choice((24, 60))):
        time += rng.expovariate(rate)
        prompt = tokens(rng, rng.randrange(1, rng.choice((40, 200))))
        if rng.random() < 0.5:
            prompt = rng.choice(prefixes) + prompt
        arrivals.append(Arrival(time, f"r{number}", prompt, params(rng, number, time)))
    aborts = [
        Abort(rng.random() * (time + 3), f"r{rng.randrange(len(arrivals))}")
        for _ in range(rng.randrange(6))
    ]
    return Workload(arrivals, sorted(aborts))


def params(rng: random.Random, number: int, time: float) -> RequestParams:
    """Options of a request; max_tokens is exact, too large or absent."""
    num_output, choice = rng.randrange(1, 90), rng.random()
    max_tokens: int | None = None
    if choice < 0.3:
        max_tokens = num_output
    elif choice < 0.8:
        max_tokens = rng.randrange(num_output, 120)
    return RequestParams(
        max_tokens=max_tokens,
        n=rng.choice((1, 1, 1, 1, 3)),
        priority=rng.randrange(4),
        client=rng.choice("abc"),
        deadline=time + rng.random() * 5 if rng.random() < 0.5 else None,
        salt=rng.choice(("", "", "", "x")),
        reads_cache=rng.random() < 0.9,
        eos_ids=frozenset({END}),
        sampling=Script(num_output, FILLER + number, END),
    )


def step_seconds(plan: Plan) -> float:
    """The duration of a step; it decides how many requests arrive meanwhile."""
    num_copies = len(plan.copies_out) + len(plan.copies_in)
    seconds = 0.01 + 2e-5 * plan.num_tokens + 1e-6 * plan.decode_context + 1e-4 * num_copies
    return seconds + 0.005 * (plan.num_steps - 1)


@dataclass(slots=True)
class Step:
    """A plan, and what happened around it."""

    planned: Planned
    num_in_flight: int  # plans without a result when it was made
    added: list[Request]  # since the previous plan
    aborted: list[Request]  # since the previous plan, and while it was in flight
    preempted: list[Preemption]


class Steps:
    """An observer of an engine that describes its run step by step."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._added: list[Request] = []
        self._aborted: list[Request] = []
        self._preempted: list[Preemption] = []
        self._in_flight: deque[Step] = deque()

    def __call__(self, event: Event) -> None:
        match event:
            case Added(requests):
                self._added += requests
            case Aborted(request):
                is_new = request in self._added or not self._in_flight
                (self._aborted if is_new else self._in_flight[-1].aborted).append(request)
            case Planned(plan):
                self._preempted += plan.preempted
                if not plan.is_empty:
                    self._in_flight.append(self._step(event))
            case Completed():
                step = self._in_flight.popleft()
                self._write(step, event.finished)

    def _step(self, planned: Planned) -> Step:
        step = Step(planned, len(self._in_flight), self._added, self._aborted, self._preempted)
        self._added, self._aborted, self._preempted = [], [], []
        return step

    def settle(self, scheduler: Scheduler) -> None:
        """Describe what no plan follows."""
        if not self._in_flight and (self._added or self._aborted):
            levels = scheduler.num_free, len(scheduler.running), len(scheduler.queue)
            self._write(self._step(Planned(Plan(-1), *levels)), [])

    def _write(self, step: Step, ended: list[Request]) -> None:
        self.lines.append(json.dumps(describe(step, [*step.aborted, *ended])))


def describe(step: Step, finished: list[Request]) -> dict[str, Any]:
    """The decisions of a step. Lists without an order of their own are sorted."""
    planned, plan = step.planned, step.planned.plan
    rest = plan.not_considered
    return {
        "step": plan.step,
        "decodes": sorted(r.id for r in plan.decodes),
        "num_steps": plan.num_steps,
        "decode_context": plan.decode_context,
        "deferred": sorted(r.id for r in plan.deferred),
        "new_blocks": sorted((r.id, block) for r, block in plan.new_blocks),
        "chunks": [(c.request.id, c.start, c.end, c.store_from, c.is_last) for c in plan.chunks],
        "copies_out": plan.copies_out,
        "copies_in": plan.copies_in,
        "added": [r.id for r in step.added],
        "admitted": [
            (a.request.id, a.num_cached, a.num_swapped, a.is_resume) for a in plan.admitted
        ],
        "preempted": [(p.request.id, p.is_swap, p.num_lost, p.is_priority) for p in step.preempted],
        "blocked": [(b.request.id, b.reason, b.need, b.have) for b in plan.blocked],
        "not_considered": rest and (rest.reason, rest.num_requests),
        "num_free": planned.num_free,
        "num_running": planned.num_running,
        "num_waiting": planned.num_waiting,
        "num_in_flight": step.num_in_flight,
        "finished": sorted((r.id, r.finish_reason, r.num_generated) for r in finished),
    }


def engine_of(seed: int, **more: Any) -> Engine:
    """The engine of a run, before its first request, with `more` slots or numbers replaced."""
    name, changes = changes_of(seed)
    clock = VirtualClock()
    return Engine(
        Scheduler(preset(name, **{**changes, **more})),
        SimulatedExecutor(clock, step_seconds, 1e-4),
        clock,
        async_scheduling=bool(seed // len(NAMES) % 2),
    )


def run(engine: Engine, seed: int, after_idle: Callable[[], None] = lambda: None) -> None:
    """Send the requests of a run to its engine and step it to the end.

    `after_idle` is called after each step that completes no plan.
    """
    clock, workload = engine.clock, workload_of(seed)
    assert isinstance(clock, VirtualClock)
    while engine.has_work or workload.next_time < inf:
        while workload.arrivals and workload.arrivals[0].time <= clock.now():
            new = workload.arrivals.pop(0)
            engine.add(new.id, new.prompt, new.params, arrival=new.time)
        while workload.aborts and workload.aborts[0].time <= clock.now():
            engine.abort(workload.aborts.pop(0).id)
        if engine.has_work:
            if engine.step() is None:
                after_idle()
        elif workload.next_time < inf:
            clock.advance_to(workload.next_time)


def decisions_of(seed: int) -> list[str]:
    """Run a simulation to its end; returns its steps as lines of JSON."""
    engine, steps = engine_of(seed), Steps()
    engine.observers.append(steps)
    run(engine, seed, lambda: steps.settle(engine.scheduler))
    return steps.lines


def digest_of(seed: int) -> str:
    return hashlib.sha256("\n".join(decisions_of(seed)).encode()).hexdigest()[:20]


def recorded_digests() -> dict[int, str]:
    digests: dict[str, str] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return {int(seed): digest for seed, digest in digests.items()}


def changed_runs(seeds: Iterable[int]) -> Iterator[str]:
    """The runs whose decisions are not the recorded ones, each with its preset and changes."""
    recorded = recorded_digests()
    for seed in seeds:
        if digest_of(seed) != recorded[seed]:
            name, changes = changes_of(seed)
            yield f"run {seed}: {name}, " + ", ".join(f"{k}={v}" for k, v in changes.items())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.scheduler.decisions")
    parser.add_argument("--show", metavar="SEED", type=int, help="Print the decisions of one run.")
    parser.add_argument("--write", action="store_true", help="Record the digests of all runs.")
    arguments = parser.parse_args()
    if arguments.show is not None:
        print("\n".join(decisions_of(arguments.show)))
        return 0
    if arguments.write:
        digests = {seed: digest_of(seed) for seed in range(NUM_RUNS)}
        RECORDED.write_text(json.dumps(digests, indent=0) + "\n", encoding="utf-8")
        return 0
    changed = list(changed_runs(range(NUM_RUNS)))
    if changed:
        print(f"{len(changed)} of {NUM_RUNS} runs changed; the first is {changed[0]}")
        print(
            f"Compare the output of --show {changed[0].split()[1].rstrip(':')} with an earlier one."
        )
        return 1
    print(f"{NUM_RUNS} runs: all decisions as recorded")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
