"""Random worlds: any mix of policies, tiny pools, and whatever can happen to requests.

A world is made from its seed alone. `run` drives it to its end, with or without a plan in flight
while the next is made, checks the scheduler's laws after every event, and counts what happened, so
that a test can tell the laws were put under strain. Knows the scheduler's fields, not its ways.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from headway.config import Config, HeadroomRule, StepActions
from headway.config import SchedulerView as View
from headway.errors import RequestTooLong
from headway.plan import Plan
from headway.request import Params, Request, State
from headway.scheduler import Scheduler, policies, queues
from headway.scheduler import headroom as peak
from headway.scheduler.presets import SLOTS
from tests.support.shadow import EOS, VOCABULARY, Handle, ShadowExecutor, oracle

Tamper = Callable[[Plan, Scheduler], None]
MOMENTS = ("early", "launched", "late")  # before schedule, in flight, after complete


@dataclass(slots=True)
class World:
    """A config, its workload and its misfortunes."""

    config: Config
    async_scheduling: int  # plans in flight while the next is made
    arrivals: dict[int, list[Request]]  # by step
    aborts: dict[tuple[int, str], list[str]] = field(default_factory=dict)  # by step and moment
    resets: frozenset[int] = frozenset()  # steps before which the cache is emptied
    crash: int = -1  # the step that never comes back
    peeks: frozenset[int] = frozenset()  # steps at which everybody's tokens are read

    @property
    def requests(self) -> list[Request]:
        return [request for group in self.arrivals.values() for request in group]


# Policies nobody should write, and everybody may.


def wild_recipe(rng: random.Random) -> Callable[[StepActions], None]:
    """The verbs in any order and number, with any arguments, or none of them."""
    acts: list[Callable[[StepActions], None]] = [
        lambda step: step.decode(),
        lambda step: step.prefill(),
        lambda step: step.admit(),
        lambda step: step.decode(at_most=rng.randrange(-2, 4)),
        lambda step: step.decode(at_most=step.tokens_left),
        lambda step: step.admit_swapped(),
        lambda step: step.admit_swapped(),
        lambda step: step.admit(charge_cached=True),
    ]
    fixed = rng.choices(acts, k=rng.randrange(4)) if rng.random() < 0.5 else None

    def recipe(step: StepActions) -> None:
        for act in rng.choices(acts, k=rng.randrange(5)) if fixed is None else fixed:
            act(step)

    recipe.defers = rng.random() < 0.5  # type: ignore[attr-defined]
    return recipe


def wild_chunk(rng: random.Random) -> Callable[[int, int, bool], int]:
    amounts = rng.choice(((0, 1), (0, 1000), (1000,), (-5, 1, 2), (1,), (0, 0, 0, 3)))
    return lambda want, left, is_first: rng.choice(amounts)


def wild_headroom(rng: random.Random) -> HeadroomRule:
    amounts = rng.choice(((1 << 40,), (-(1 << 40),), (0, 1 << 40), (-3, 0, 1, 2, 5)))
    return lambda request, world: rng.choice(amounts)


@dataclass(frozen=True)
class wild_queue:
    """Keys that change whenever asked, clients as groups, preemption by lot."""

    rng: random.Random
    patience: int
    drifts: bool
    preempts: bool
    max_preemptions: int = 3

    def key(self, request: Request, world: View) -> Any:
        return self.rng.randrange(5)

    def group(self, request: Request) -> str:
        return request.params.client

    def outranks(self, waiting: Request, running: Request) -> bool:
        return (
            running.history.num_priority_preemptions < self.max_preemptions
            and self.rng.random() < 0.5
        )


def any_queue(rng: random.Random) -> Any:
    patience = rng.choice((0, 0, 1, 3))
    return rng.choice((
        queues.fcfs(patience),
        queues.priority(patience, rng.choice((0.0, 2.0)), rng.random() < 0.8),
        queues.priority(patience, preempts=True, max_preemptions=rng.randrange(1, 4)),
        queues.shortest_first(patience, rng.choice((0.01, 1.0))),
        queues.deadline(patience, rng.choice((1.0, 60.0))),
        queues.fair(patience),
        queues.custom(patience, lambda request, world: (-request.num_prompt, request.id)),
        queues.custom(patience, lambda request, world: rng.random()),
        wild_queue(rng, patience, rng.random() < 0.5, rng.random() < 0.5),
    ))  # fmt: skip


def any_headroom(rng: random.Random) -> HeadroomRule:
    base: HeadroomRule = rng.choice((
        policies.watermark(rng.choice((0.0, 0.1, 0.5, 1.0))),
        policies.reserve_outputs(rng.choice((0.2, 1.0, 3.0))),
        peak.future_peak(rng.choice((peak.limit, peak.learned(0.5))), rng.choice((0.0, 0.2))),
        policies.watermark(0.0),
        wild_headroom(rng),
    ))  # fmt: skip
    return policies.back_off(base, rng.choice((0.05, 0.3))) if rng.random() < 0.25 else base


def any_slots(rng: random.Random) -> dict[str, Any]:
    """One value for each of the six slots; every ready-made one can come up."""
    chunks = (*SLOTS["chunk"][:3], policies.at_most(rng.randrange(1, 6)), wild_chunk(rng))
    swaps = (
        *SLOTS["swap"][:2], policies.swap,
        policies.cheaper(start=rng.choice((0.0, 1e-4))),
        lambda request, world: rng.random() < 0.5,
    )  # fmt: skip
    victims = (
        *SLOTS["victim"],
        lambda request, world: rng.random(),
        lambda request, world: len(request.tokens),
    )
    return {
        "recipe": rng.choice((*SLOTS["recipe"], wild_recipe(rng))),
        "queue": any_queue(rng),
        "chunk": rng.choice(chunks),
        "headroom": any_headroom(rng),
        "victim": rng.choice(victims),
        "swap": rng.choice(swaps),
    }


def greedy(step: StepActions) -> None:
    """Grant first, and let the decodes find room where they can."""
    step.prefill()
    step.admit()
    step.decode(at_most=step.tokens_left)


greedy.defers = True  # type: ignore[attr-defined]


def storm(rng: random.Random) -> dict[str, Any]:
    """What makes for the most coming and going between device and host."""
    recipes = (greedy, greedy, policies.charged_in_full, *SLOTS["recipe"][:2])
    return {
        "recipe": rng.choice(recipes),
        "chunk": rng.choice((policies.split_any, policies.at_most(2))),
        "headroom": policies.watermark(0.0),
        "swap": policies.swap,
        "max_num_seqs": rng.randrange(3, 6),
        "block_size": rng.choice((1, 2, 4)),
        "num_blocks": rng.randrange(4, 9),
        "num_host_blocks": rng.choice((1, 2, 3, 8)),
    }


def any_config(rng: random.Random) -> Config:
    values: dict[str, Any] = {
        **any_slots(rng),
        "max_num_seqs": rng.randrange(1, 7),
        "block_size": rng.choice((1, 2, 3, 4, 8)),
        "num_blocks": rng.randrange(4, rng.choice((8, 25))),
        "num_host_blocks": rng.choice((0, rng.randrange(1, 17))),
    }
    if rng.random() < 0.3:
        values |= storm(rng)
    least = 1 if getattr(values["recipe"], "defers", False) else values["max_num_seqs"]
    return Config(
        **values,
        max_num_batched_tokens=rng.choice((least, least + rng.randrange(8), least + 12, 64)),
        num_scheduler_steps=rng.choice((1, 1, 2, 3, 4)),
        max_model_len=rng.choice((1 << 20, 1 << 20, rng.randrange(8, 30))),
    )


# The workload.


def any_tokens(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3) for _ in range(length)]


def any_params(rng: random.Random, max_tokens: int | None) -> Params:
    return Params(
        max_tokens=max_tokens,
        min_tokens=rng.choice((0, 0, 0, rng.randrange(6))),
        eos_ids=frozenset({EOS}),
        stop_ids=frozenset(rng.choice(((), (), (1,), (2, VOCABULARY - 1)))),
        ignore_eos=rng.random() < 0.5,
        priority=rng.randrange(3),
        client=rng.choice(("", "a", "b")),
        deadline=rng.choice((None, rng.random() * 30)),
        salt=rng.choice(("", "", "", "salt")),
        reads_cache=rng.random() < 0.85,
        n=rng.choice((1, 1, 1, 1, 2, 3)),
        sampling=rng.randrange(1 << 32),
    )


def most_tokens(config: Config) -> int:
    """About the longest request that is not refused."""
    room = min(config.num_blocks * config.block_size, config.max_model_len - 1)
    return min(room, config.max_num_batched_tokens) if config.chunk is policies.whole else room


def any_max_tokens(rng: random.Random, config: Config, room: int) -> int | None:
    """Mostly what fits beside the prompt; sometimes all of it, or more."""
    if config.max_model_len < 30 and rng.random() < 0.1:
        return None
    if rng.random() < 0.05:
        return room + 2 + rng.randrange(4)
    return max(1, room + 1 if rng.random() < 0.2 else rng.randrange(min(room, 15) + 1))


def any_requests(rng: random.Random, config: Config) -> dict[int, list[Request]]:
    """Prompts that share stems, sometimes sampled more than once, over some steps."""
    room = most_tokens(config)
    stems = [any_tokens(rng, rng.randrange(min(room, 20))) for _ in range(2)]
    arrivals: dict[int, list[Request]] = {}
    spread = rng.choice((1, 4, 20))
    for number in range(rng.randrange(1, 9)):
        stem = rng.choice((*stems, []))
        cut = len(stem) if rng.random() < 0.7 else rng.randrange(len(stem) + 1)
        tail = any_tokens(rng, rng.choice((0, 0, 1, 2, rng.randrange(8))))
        prompt = (stem[:cut] + tail)[: room if rng.random() < 0.97 else None] or [1]
        params = any_params(rng, any_max_tokens(rng, config, max(0, room - len(prompt))))
        step = rng.randrange(spread)
        samples = any_samples(rng, Request(f"{number}", prompt, params, arrival=float(step)))
        arrivals.setdefault(step, []).extend(samples)
    return arrivals


def any_samples(rng: random.Random, parent: Request) -> list[Request]:
    """The request, and as many more of its prompt as it asks for."""
    samples, params = [parent], parent.params
    for number in range(1, params.n):
        own = replace(params, sampling=rng.randrange(1 << 32))
        samples.append(
            Request(
                f"{parent.id}.{number}", parent.tokens, own, arrival=parent.arrival, parent=parent
            )
        )
    return samples


def any_world(seed: int, async_scheduling: int) -> World:
    """The world of a seed."""
    rng = random.Random(seed)
    config = any_config(rng)
    world = World(config, async_scheduling, any_requests(rng, config))
    for request in world.requests:
        if rng.random() < 0.12:
            key = rng.randrange(30), rng.choice(MOMENTS)
            world.aborts.setdefault(key, []).append(request.id)
    if rng.random() < 0.2:
        world.resets = frozenset(rng.choices(range(30), k=2))
    if rng.random() < 0.1:
        world.crash = rng.randrange(20)
    if rng.random() < 0.5:
        world.peeks = frozenset(rng.choices(range(60), k=rng.choice((3, 20))))
    return world


# The driver.


class Run:
    """One world on its way: the loop of an engine, with a check after everything that happens."""

    def __init__(self, world: World, tamper: Tamper | None = None) -> None:
        self.world = world
        self.scheduler = Scheduler(world.config)
        self.executor = ShadowExecutor(self.scheduler)
        self.pending: deque[tuple[Plan, Handle]] = deque()
        self.outputs: dict[Request, list[int]] = {}
        self.finished: list[Request] = []
        self.seen: Counter[str] = Counter()
        self.swapped: set[Request] = set()  # by their last preemption
        self._tamper = tamper

    def to_the_end(self) -> Counter[str]:
        """Step until all work is done; every request must end within a bound."""
        world, step = self.world, 0
        last_event = max((*world.arrivals, *(s for s, _ in world.aborts), *world.resets), default=0)
        work = sum(r.num_prompt + (r.params.max_tokens or 30) for r in world.requests)
        while step <= last_event or self.scheduler.requests or self.pending:
            self.step(step)
            step += 1
            assert step <= last_event + 100 + 20 * work, "this never ends"
        news = self.scheduler.take_pending_events()
        self.finished += news.finished if news else []
        plan = self.scheduler.schedule()
        assert plan.is_empty and not self.scheduler.in_flight
        self.check_end()
        return self.seen

    def step(self, step: int) -> None:
        self._arrive(step)
        self._abort(step, "early")
        if step in self.world.resets:
            self._reset()
        plan = self._launch()
        self._abort(step, "launched")
        if step in self.world.peeks:
            self.check_tokens()
        if step == self.world.crash and self.pending:
            self._crash()
        while len(self.pending) > (0 if plan.is_empty else self.world.async_scheduling):
            self._complete()
        self._abort(step, "late")

    def _arrive(self, step: int) -> None:
        for request in self.world.arrivals.get(step, ()):
            before = dict(self.scheduler.requests)
            try:
                self.scheduler.add(request)
            except RequestTooLong as error:
                assert error.need > error.limit or "chunk rule" in str(error)
                assert self.scheduler.requests == before and request.finish_reason is None
                self.seen["refused"] += 1
            else:
                self.outputs[request] = []
                self.seen["samples of one prompt"] += request.parent is not None

    def _launch(self) -> Plan:
        scheduler = self.scheduler
        has_work, idle = bool(scheduler.requests), not scheduler.in_flight
        plan = scheduler.schedule()
        assert not (idle and has_work and plan.is_empty), "an empty plan with work at hand"
        if not plan.is_empty:
            if self._tamper:
                self._tamper(plan, scheduler)
            self.pending.append((plan, self.executor.launch(plan)))
        self._check_plan(plan)
        self._count(plan)
        self.check_now()
        return plan

    def _complete(self) -> None:
        plan, handle = self.pending.popleft()
        report = self.scheduler.complete(plan, handle.wait())
        for request, tokens in report.outputs():
            assert tokens, f"{request} gained nothing, and it is reported"
            self.outputs[request] += tokens
        for request in report.finished:
            in_flight = any(request in later.decodes for later, _ in self.pending)
            self.seen["stops in flight"] += in_flight and request.finish_reason == "stop"
            self.seen[f"finish: {request.finish_reason}"] += 1
        self.finished += report.finished
        assert (
            not self.scheduler.state.preempted_in_flight
            and not self.scheduler.state.decode_batch.left_in_flight
        )
        self.check_now()

    def _abort(self, step: int, moment: str) -> None:
        for id in self.world.aborts.get((step, moment), ()):
            request = self.scheduler.requests.get(id)
            in_flight = {
                r for p, _ in self.pending for r in (*p.decodes, *(c[0] for c in p.chunks))
            }
            assert self.scheduler.abort(id) == (request is not None)
            if request is not None:
                self.seen["aborts"] += 1
                self.seen["aborts in flight"] += request in in_flight
                self.check_now()

    def _reset(self) -> None:
        while self.pending:
            self._complete()
        self.seen["resets while running"] += bool(self.scheduler.running)
        assert self.scheduler.reset_cache(force=True)
        assert not self.scheduler.kv.pool.index.block_of
        self.check_now()

    def _crash(self) -> None:
        plans = [plan for plan, _ in self.pending]
        self.executor.crash(plans)
        self.pending.clear()
        self.seen["crashes while swapping"] += any(plan.copies_out for plan in plans)
        self.scheduler.fail("it fell over")
        self.seen["crashes"] += 1
        self.check_now()

    # The laws.

    def _check_plan(self, plan: Plan) -> None:
        """The limits hold, and every waiting request is accounted for."""
        config = self.world.config
        assert plan.events.num_running <= config.max_num_seqs, "more requests than seats"
        over_budget = plan.num_tokens > config.max_num_batched_tokens
        assert not (plan.chunks and over_budget), "more tokens than a step may compute"
        behind = plan.not_considered.num_requests if plan.not_considered else 0
        assert len(plan.blocked) + behind == plan.events.num_waiting, "waiting without a reason"
        assert all(not b.request.is_finished for b in plan.blocked)
        assert len({b.request for b in plan.blocked}) == len(plan.blocked), "blocked twice"
        assert plan.events.num_free == self.scheduler.kv.num_free

    def check_now(self) -> None:
        """Blocks are counted right, the index is true, and every request is in its place."""
        scheduler, kv = self.scheduler, self.scheduler.kv
        held = [0] * kv.pool.num_blocks
        for block in (b for r in scheduler.running for b in r.kv.blocks):
            held[block] += 1
        assert held == kv.pool.refs, "references miscounted"
        assert kv.num_free == held.count(0), "free blocks miscounted"
        held = [0] * kv.host.num_blocks
        copies = (r.kv.host.blocks for r in scheduler.requests.values() if r.kv.host)
        for block in (b for blocks in (*copies, kv._leaving_host) for b in blocks):
            held[block] += 1
        assert held == kv.host.refs and max(held, default=0) < 2, "host blocks miscounted"
        self.executor.check_index()
        waiting = set(scheduler.queue)
        assert len(waiting) == len(scheduler.queue) and not waiting & scheduler.running.keys()
        assert waiting | scheduler.running.keys() == set(scheduler.requests.values())
        assert not any(r.kv.blocks or r.row >= 0 for r in waiting), "held while waiting"
        assert {r for r in waiting if r.state is State.SWAPPED} == scheduler.swapped.keys()
        rows = [r.row for r in scheduler.running]
        assert sorted(rows + scheduler.state.free_rows) == list(
            range(self.world.config.max_num_seqs)
        )

    def check_tokens(self) -> None:
        """What is known of a request is its prompt and all that was reported of it, at any time."""
        for request, reported in self.outputs.items():
            assert list(request.tokens[request.num_prompt :]) == reported, "not reported as it is"

    def check_end(self) -> None:
        """Nothing is left over, and everybody got what it would have got alone."""
        scheduler, decode_batch = self.scheduler, self.scheduler.state.decode_batch
        self.check_now()
        left = (
            scheduler.requests, scheduler.running, scheduler.state.prefilling, scheduler.swapped,
            scheduler.queue, scheduler.in_flight, scheduler.state.stop_tokens, decode_batch.members,
            decode_batch.due(), scheduler.queue._groups,
        )  # fmt: skip
        assert not any(left), f"left over: {left}"
        assert decode_batch.context == 0 and not any(scheduler.kv.pool.refs)
        assert scheduler.kv.host.num_free == scheduler.kv.host.num_blocks
        assert sorted(r.id for r in self.finished) == sorted(r.id for r in self.outputs)
        self.check_tokens()
        for request, reported in self.outputs.items():
            self._check_output(request, reported)

    def _check_output(self, request: Request, reported: list[int]) -> None:
        prompt = request.tokens[: request.num_prompt]
        longest = self.world.config.max_model_len
        if request.params.max_tokens is None:  # then it goes on as far as the cache allows
            longest = request.limit
        output, reason = oracle(prompt, request.params, longest)
        assert request.is_finished and request.row == -1 and not request.kv.blocks
        if request.finish_reason in ("abort", "error"):
            assert reported == output[: len(reported)]
        else:
            assert (reported, request.finish_reason) == (output, reason), "not what it gets alone"

    # What happened, so that no law goes untried.

    def _count(self, plan: Plan) -> None:
        seen, size = self.seen, self.world.config.block_size
        for preemption in plan.events.preempted:
            seen["preempted, swapped" if preemption.is_swap else "preempted, recomputed"] += 1
            seen["priority preemptions"] += preemption.is_priority
            seen["deferred, then preempted"] += preemption.request in plan.deferred
            if preemption.is_swap:
                self.swapped.add(preemption.request)
        for request, num_cached, num_swapped, is_resume in plan.admitted:
            seen["cache hits"] += num_cached > 0
            seen["resumed from cache and host"] += bool(num_cached and num_swapped)
            seen["resumed from host"] += num_swapped > 0
            seen["swapped in vain"] += request in self.swapped and not num_cached + num_swapped
            self.swapped.discard(request)
            seen["resumed from cache"] += is_resume and num_cached > 0
            seen["full hits"] += num_cached == request.num_prompt - 1 and num_cached % size > 0
        seen["full hits not stored again"] += sum(c.store_from > c.start for c in plan.chunks)
        seen["swaps both ways"] += bool(plan.copies_out and plan.copies_in)
        seen["cut prompts"] += sum(not chunk.is_last for chunk in plan.chunks)
        seen["multi-step plans"] += plan.num_steps > 1
        seen["ends within a multi-step plan"] += any(plan.reaching_limit[: plan.num_steps - 1])
        seen["deferred decodes"] += len(plan.deferred)
        seen["mixed batches"] += bool(plan.chunks and plan.decodes)
        seen["plans while another is in flight"] += len(self.pending) > 1
        for blocked in plan.blocked:
            seen[f"blocked: {blocked.reason}"] += 1
        if plan.not_considered:
            seen[f"not considered: {plan.not_considered.reason}"] += 1


def run(world: World, tamper: Tamper | None = None) -> Counter[str]:
    """Drive a world to its end; what happened in it."""
    return Run(world, tamper).to_the_end()
