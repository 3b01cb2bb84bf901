"""Random scenarios: a mix of policies, tiny pools, aborts, cache resets and executor failures.

A scenario is made from its seed alone. `run` drives it to its end, checks the scheduler's laws
after every event, and counts the events, so that a test can check that each kind occurs. Knows the
scheduler's fields, not its algorithms.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from headway import Plan, Scheduler
from headway.config import Config, HeadroomRule, SchedulerView, StepActions
from headway.errors import RequestTooLong
from headway.events import Event, ended_by, preempted_by
from headway.kv.cache import KVCache
from headway.kv.window import most_useful_window_blocks
from headway.request import Request, RequestParams, RequestState
from headway.scheduler.policies import headroom
from headway.scheduler.policies import queue as queues
from headway.scheduler.policies.batching import prefill_first_charge_cached
from headway.scheduler.policies.chunk import at_most, hold_tbt, split_any, whole
from headway.scheduler.policies.draft import by_cost, fixed
from headway.scheduler.policies.presets import SLOTS
from headway.scheduler.policies.swap import swap, swap_if_cheaper
from tests.support.shadow import EOS, VOCABULARY, Handle, ShadowExecutor, draw, fold, oracle
from tests.support.window_shadow import WindowShadow

Tamper = Callable[[Plan, Scheduler], None]
MOMENTS = ("early", "launched", "late")  # before schedule, in flight, after complete


@dataclass(slots=True)
class Scenario:
    """A config, its workload, and the faults that occur."""

    config: Config
    async_scheduling: int  # 1: a plan is in flight while the next is made
    arrivals: dict[int, list[Request]]  # by step
    aborts: dict[tuple[int, str], list[str]] = field(default_factory=dict)  # by step and moment
    resets: frozenset[int] = frozenset()  # steps before which the cache is reset
    crash: int = -1  # the step in which the executor fails
    reads: frozenset[int] = frozenset()  # steps after which all tokens are read

    @property
    def requests(self) -> list[Request]:
        return [request for group in self.arrivals.values() for request in group]


def wild_batching(rng: random.Random) -> Callable[[StepActions], None]:
    """The actions of a step in any order and number, with any arguments, or none of them."""
    actions: list[Callable[[StepActions], None]] = [
        lambda step: step.decode(),
        lambda step: step.prefill(),
        lambda step: step.admit(),
        lambda step: step.decode(at_most=rng.randrange(-2, 4)),
        lambda step: step.decode(at_most=step.tokens_left),
        lambda step: step.admit_swapped(),
        lambda step: step.admit_swapped(),
        lambda step: step.admit(charge_cached=True),
    ]
    fixed = rng.choices(actions, k=rng.randrange(4)) if rng.random() < 0.5 else None

    def batching(step: StepActions) -> None:
        for action in rng.choices(actions, k=rng.randrange(5)) if fixed is None else fixed:
            action(step)

    return batching


def wild_chunk(rng: random.Random) -> Callable[[int, int, bool], int]:
    amounts = rng.choice(((0, 1), (0, 1000), (1000,), (-5, 1, 2), (1,), (0, 0, 0, 3)))
    return lambda want, left, is_first: rng.choice(amounts)


def wild_headroom(rng: random.Random) -> HeadroomRule:
    amounts = rng.choice(((1 << 40,), (-(1 << 40),), (0, 1 << 40), (-3, 0, 1, 2, 5)))
    return lambda request, view: rng.choice(amounts)


@dataclass(frozen=True)
class wild_queue:
    """Random keys that change at every call, clients as groups, random preemption."""

    rng: random.Random
    max_overtakes: int
    keys_change: bool
    preempts: bool
    max_preemptions: int = 3

    def key(self, request: Request, view: SchedulerView) -> Any:
        return self.rng.randrange(5)

    def group(self, request: Request) -> str:
        return request.params.client

    def outranks(self, waiting: Request, running: Request) -> bool:
        return (
            running.history.num_priority_preemptions < self.max_preemptions
            and self.rng.random() < 0.5
        )


def random_queue(rng: random.Random) -> Any:
    max_overtakes = rng.choice((0, 0, 1, 3))
    return rng.choice((
        queues.fcfs(max_overtakes),
        queues.priority(
            rng.choice((0.0, 2.0)), rng.random() < 0.8, max_overtakes=max_overtakes
        ),
        queues.priority(
            preempts=True, max_preemptions=rng.randrange(1, 4), max_overtakes=max_overtakes
        ),
        queues.shortest_first(rng.choice((0.01, 1.0)), max_overtakes=max_overtakes),
        queues.earliest_deadline(rng.choice((1.0, 60.0)), max_overtakes=max_overtakes),
        queues.fair(max_overtakes),
        queues.custom(
            lambda request, view: (-request.num_prompt, request.id), max_overtakes=max_overtakes
        ),
        queues.custom(lambda request, view: rng.random(), max_overtakes=max_overtakes),
        wild_queue(rng, max_overtakes, rng.random() < 0.5, rng.random() < 0.5),
    ))  # fmt: skip


def random_headroom(rng: random.Random) -> HeadroomRule:
    base: HeadroomRule = rng.choice((
        headroom.watermark(rng.choice((0.0, 0.1, 0.5, 1.0))),
        headroom.reserve_outputs(rng.choice((0.2, 1.0, 3.0))),
        headroom.future_peak(rng.choice((headroom.limit, headroom.learned(0.5))), rng.choice((0.0, 0.2))),
        headroom.watermark(0.0),
        wild_headroom(rng),
    ))  # fmt: skip
    return headroom.back_off(base, rng.choice((0.05, 0.3))) if rng.random() < 0.25 else base


def random_slots(rng: random.Random) -> dict[str, Any]:
    """One policy for each of the six slots; every ready-made policy can occur."""
    chunks = (
        *SLOTS["chunk"][:3], at_most(rng.randrange(1, 6)), wild_chunk(rng),
        hold_tbt(rng.choice((0.0, 0.005, 0.02)), weights=0.0, token=1e-3, read=1e-4),
    )  # fmt: skip
    swaps = (
        *SLOTS["swap"][:2], swap,
        swap_if_cheaper(start=rng.choice((0.0, 1e-4))),
        lambda request, view: rng.random() < 0.5,
    )  # fmt: skip
    victims = (
        *SLOTS["victim"],
        lambda request, view: rng.random(),
        lambda request, view: len(request.tokens),
    )
    return {
        "batching": rng.choice((*SLOTS["batching"], wild_batching(rng))),
        "queue": random_queue(rng),
        "chunk": rng.choice(chunks),
        "headroom": random_headroom(rng),
        "victim": rng.choice(victims),
        "swap": rng.choice(swaps),
    }


def greedy(step: StepActions) -> None:
    """Prompts first; decodes use the tokens that are left."""
    step.prefill()
    step.admit()
    step.decode(at_most=step.tokens_left)


def many_swaps(rng: random.Random) -> dict[str, Any]:
    """Settings that cause many swaps between device and host."""
    batchings = (greedy, greedy, prefill_first_charge_cached, *SLOTS["batching"][:2])
    return {
        "batching": rng.choice(batchings),
        "chunk": rng.choice((split_any, at_most(2))),
        "headroom": headroom.watermark(0.0),
        "swap": swap,
        "max_num_seqs": rng.randrange(3, 6),
        "block_size": rng.choice((1, 2, 4)),
        "num_blocks": rng.randrange(4, 9),
        "num_host_blocks": rng.choice((1, 2, 3, 8)),
    }


def random_config(rng: random.Random) -> Config:
    values: dict[str, Any] = {
        **random_slots(rng),
        "max_num_seqs": rng.randrange(1, 7),
        "block_size": rng.choice((1, 2, 3, 4, 8)),
        "num_blocks": rng.randrange(4, rng.choice((8, 25))),
        "num_host_blocks": rng.choice((0, rng.randrange(1, 17))),
    }
    if rng.random() < 0.3:
        values |= many_swaps(rng)
    least = rng.choice((1, values["max_num_seqs"], values["max_num_seqs"]))
    return Config(
        **values,
        max_num_batched_tokens=rng.choice((least, least + rng.randrange(8), least + 12, 64)),
        num_scheduler_steps=rng.choice((1, 1, 2, 3, 4)),
        max_model_len=rng.choice((1 << 20, 1 << 20, rng.randrange(8, 30))),
    )


def random_tokens(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3) for _ in range(length)]


def random_params(rng: random.Random, max_tokens: int | None) -> RequestParams:
    return RequestParams(
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
    """About the length of the longest request that is not refused."""
    room = min(config.num_blocks * config.block_size, config.max_model_len - 1)
    return min(room, config.max_num_batched_tokens) if config.chunk is whole else room


def random_max_tokens(rng: random.Random, config: Config, room: int) -> int | None:
    """Mostly a number that fits; sometimes all of the room, or more than it."""
    if config.max_model_len < 30 and rng.random() < 0.1:
        return None
    if rng.random() < 0.05:
        return room + 2 + rng.randrange(4)
    return max(1, room + 1 if rng.random() < 0.2 else rng.randrange(min(room, 15) + 1))


def random_requests(rng: random.Random, config: Config) -> dict[int, list[Request]]:
    """Requests with shared prefixes, some with several samples, that arrive over some steps."""
    room = most_tokens(config)
    prefixes = [random_tokens(rng, rng.randrange(min(room, 20))) for _ in range(2)]
    arrivals: dict[int, list[Request]] = {}
    spread = rng.choice((1, 4, 20))
    for number in range(rng.randrange(1, 9)):
        prefix = rng.choice((*prefixes, []))
        shared = len(prefix) if rng.random() < 0.7 else rng.randrange(len(prefix) + 1)
        tail = random_tokens(rng, rng.choice((0, 0, 1, 2, rng.randrange(8))))
        prompt = (prefix[:shared] + tail)[: room if rng.random() < 0.97 else None] or [1]
        params = random_params(rng, random_max_tokens(rng, config, max(0, room - len(prompt))))
        step = rng.randrange(spread)
        samples = random_samples(rng, Request(f"{number}", prompt, params, arrival=float(step)))
        arrivals.setdefault(step, []).extend(samples)
    return arrivals


def random_samples(rng: random.Random, parent: Request) -> list[Request]:
    """The request and the other samples of its prompt."""
    samples, params = [parent], parent.params
    for number in range(1, params.n):
        own = replace(params, sampling=rng.randrange(1 << 32))
        samples.append(
            Request(
                f"{parent.id}.{number}", parent.tokens, own, arrival=parent.arrival, parent=parent
            )
        )
    return samples


def with_window(rng: random.Random, config: Config) -> Config:
    """The config for a model with sliding-window layers, mostly with few blocks for them."""
    window = rng.choice((1, 2, 3, 5, 8, 20))
    most = most_useful_window_blocks(window, replace(config, max_model_len=64))
    count = rng.choice((most, rng.randrange(2, 12), rng.randrange(4, 20)))
    return replace(config, num_host_blocks=0, sliding_window=window, num_window_blocks=count)


class WildDrafter:
    """Drafts of which most, or few, or none are right."""

    def __init__(self, rng: random.Random) -> None:
        self._rng, self._share = rng, rng.choice((0.0, 0.5, 0.9, 1.0))
        self.open: set[Request] = set()  # drafted for, and not forgotten

    def propose(self, request: Request, most: int) -> list[int]:
        assert most > 0, "nothing is asked for"
        self.open.add(request)
        state, drafts = 0, list[int]()
        for token in request.tokens:
            state = fold(state, token)
        for _ in range(self._rng.choice((0, most, most, most // 2))):
            token = draw(state, request.params.sampling)  # type: ignore[arg-type]
            if self._rng.random() > self._share:
                token = self._rng.randrange(VOCABULARY)
            state = fold(state, token)
            drafts.append(token)
        return drafts

    def forget(self, request: Request) -> None:
        self.open.discard(request)


def with_drafts(rng: random.Random, config: Config) -> Config:
    """The config with a random draft rule, and drafts that may be right."""
    rules: list[Any] = [
        fixed(rng.randrange(1, 9)), by_cost(most=6), by_cost(most=4, weights=0.0, token=1e-3),
        lambda request, step: rng.randrange(-1, 5),
        lambda request, step: round(6 * step.acceptance(request)),
    ]  # fmt: skip
    return replace(config, draft=rng.choice(rules), drafter=lambda: WildDrafter(rng))


def random_scenario(
    seed: int, async_scheduling: int, *, has_window: bool = False, has_drafts: bool = False
) -> Scenario:
    """The scenario with this seed, of a model with or without sliding-window layers, and drafts."""
    rng = random.Random(seed)
    config = random_config(rng)
    if has_window:
        config = with_window(random.Random(seed), config)
    if has_drafts:
        config = with_drafts(random.Random(seed), config)
    scenario = Scenario(config, async_scheduling, random_requests(rng, config))
    for request in scenario.requests:
        if rng.random() < 0.12:
            key = rng.randrange(30), rng.choice(MOMENTS)
            scenario.aborts.setdefault(key, []).append(request.id)
    if rng.random() < 0.2:
        scenario.resets = frozenset(rng.choices(range(30), k=2))
    if rng.random() < 0.1:
        scenario.crash = rng.randrange(20)
    if rng.random() < 0.5:
        scenario.reads = frozenset(rng.choices(range(60), k=rng.choice((3, 20))))
    continue_some(random.Random(-seed - 1), scenario)
    return scenario


def continue_some(rng: random.Random, scenario: Scenario) -> None:
    """Give some requests a part of their output, as if another engine had begun them."""
    for request in scenario.requests:
        if rng.random() < 0.08 and request.params.max_tokens is not None:
            output, _ = oracle(request.prompt, request.params, scenario.config.max_model_len)
            request.continue_from(output[: rng.randrange(len(output))] if output else [])


class ScenarioRun:
    """Runs one scenario like an engine's loop, and checks the laws after every event."""

    def __init__(self, scenario: Scenario, tamper: Tamper | None = None) -> None:
        self.scenario = scenario
        self.scheduler = Scheduler(scenario.config)
        self.scheduler.observe(self.note)
        shadow = WindowShadow if scenario.config.sliding_window else ShadowExecutor
        self.executor = shadow(self.scheduler)
        self.pending: deque[tuple[Plan, Handle]] = deque()
        self.outputs: dict[Request, list[int]] = {}
        self.finished: list[Request] = []
        self.seen: Counter[str] = Counter()
        self.swapped: set[Request] = set()  # by the latest preemption of each
        self._tamper = tamper
        self._all_rows = list(range(scenario.config.max_num_seqs))

    def note(self, event: Event) -> None:
        """Count what the scheduler records; subclasses extend it."""
        for request in ended_by(event):
            in_flight = any(request in later.decodes for later, _ in self.pending)
            self.seen["stops in flight"] += in_flight and request.finish_reason == "stop"
            self.seen[f"finish: {request.finish_reason}"] += 1
        self.finished += ended_by(event)
        for preemption in preempted_by(event):
            self.seen["preempted, swapped" if preemption.is_swap else "preempted, recomputed"] += 1
            self.seen["discarded outputs"] += preemption.is_discard
            self.seen["priority preemptions"] += preemption.is_priority
            if preemption.is_swap:
                self.swapped.add(preemption.request)

    def run(self) -> Counter[str]:
        """Step until all work is done, within a bound; returns the counts."""
        scenario, step = self.scenario, 0
        last_event = max(
            (*scenario.arrivals, *(s for s, _ in scenario.aborts), *scenario.resets), default=0
        )
        work = sum(r.num_prompt + (r.params.max_tokens or 30) for r in scenario.requests)
        while step <= last_event or self.scheduler.requests or self.pending:
            self.step(step)
            step += 1
            assert step <= last_event + 100 + 20 * work, "too many steps"
        plan = self.scheduler.schedule()
        assert plan.is_empty and not self.scheduler.in_flight
        self.check_end()
        return self.seen

    def step(self, step: int) -> None:
        self._arrive(step)
        self._abort(step, "early")
        if step in self.scenario.resets:
            self._reset()
        plan = self._launch()
        self._abort(step, "launched")
        if step in self.scenario.reads:
            self.check_tokens()
        if step == self.scenario.crash and self.pending:
            self._crash()
        while len(self.pending) > (0 if plan.is_empty else self.scenario.async_scheduling):
            self._complete()
        self._abort(step, "late")

    def _arrive(self, step: int) -> None:
        for request in self.scenario.arrivals.get(step, ()):
            if request.parent is not None and request.parent not in self.outputs:
                continue  # the samples of a request are added together, all or none
            before = dict(self.scheduler.requests)
            try:
                self.scheduler.add(request)
            except RequestTooLong as error:
                assert error.need > error.limit or "chunk rule" in str(error)
                assert self.scheduler.requests == before and request.finish_reason is None
                self.seen["refused"] += 1
            else:
                self.outputs[request] = list(request.history.resumed)
                self.seen["continued requests"] += bool(request.history.resumed)
                self.seen["samples of one prompt"] += request.parent is not None

    def _launch(self) -> Plan:
        scheduler = self.scheduler
        has_work, idle = bool(scheduler.requests), not scheduler.in_flight
        plan = scheduler.schedule()
        assert not (idle and has_work and plan.is_empty), "empty plan although there is work"
        if not plan.is_empty:
            if self._tamper:
                self._tamper(plan, scheduler)
            self.pending.append((plan, self.executor.launch(plan)))
        if plan is scheduler.last_planned.plan:  # else it waits for the tokens of drafts
            self._check_plan(plan)
        self._count(plan)
        self.check_now()
        return plan

    def _complete(self) -> None:
        plan, handle = self.pending.popleft()
        result = handle.wait()
        for draft, tokens in zip(plan.drafts, result.draft_tokens, strict=True):
            self.seen["drafts that were right"] += len(tokens) - 1
            self.seen["drafts that were wrong"] += draft.count + 1 - len(tokens)
        completed = self.scheduler.complete(plan, result)
        for draft, tokens in zip(plan.drafts, result.draft_tokens, strict=True):
            is_stopped = draft.request.finish_reason == "stop" and 0 < len(tokens) <= draft.count
            self.seen["ends within drafts"] += is_stopped
        for request, tokens in completed.outputs():
            assert tokens, f"{request} is reported without tokens"
            self.outputs[request] += tokens
        assert (
            not self.scheduler.state.preempted_in_flight
            and not self.scheduler.state.decode_batch.left_in_flight
        )
        self.check_now()

    def _abort(self, step: int, moment: str) -> None:
        for id in self.scenario.aborts.get((step, moment), ()):
            request = self.scheduler.requests.get(id)
            in_flight = {request for plan, _ in self.pending for request in plan.requests}
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
        self.scheduler.fail("executor failed")
        assert self.scheduler.kv.is_unused, "blocks are held after a failed step"
        assert not self.scheduler.swapped, "requests are swapped out without blocks on the host"
        self.seen["crashes"] += 1
        self.check_now()

    # The laws.

    def _check_plan(self, plan: Plan) -> None:
        """The limits hold, and the plan gives a reason for every waiting request."""
        config, planned = self.scenario.config, self.scheduler.last_planned
        assert planned.num_running <= config.max_num_seqs, "more running requests than max_num_seqs"
        assert plan.num_tokens <= config.max_num_batched_tokens, "token budget exceeded"
        num_rest = plan.not_considered.num_requests if plan.not_considered else 0
        assert len(plan.blocked) + num_rest == planned.num_waiting, "waiting without a reason"
        if plan.blocked:
            waiting = set(self.scheduler.queue)
            assert all(b.request in waiting for b in plan.blocked), "blocked, but does not wait"
            assert len({b.request for b in plan.blocked}) == len(plan.blocked), "blocked twice"
        assert planned.num_free == self.scheduler.kv.num_free

    def check_now(self) -> None:
        """Reference counts, the prefix index, the queue and the rows are consistent."""
        self.check_counts()
        self.executor.check_index()

    def check_counts(self) -> None:
        """Reference counts, the queue and the rows are consistent."""
        scheduler, kv = self.scheduler, self.scheduler.kv
        running, requests = scheduler.running, scheduler.requests.values()
        held, rows = [0] * kv.pool.num_blocks, [*scheduler.state.free_rows]
        for request in running:
            rows.append(request.row)
            for block in request.kv.blocks:
                held[block] += 1
        assert held == kv.pool.refs, "wrong reference counts"
        assert kv.num_free == held.count(0), "wrong number of free blocks"
        assert sorted(rows) == self._all_rows
        self._check_host(kv)
        waiting = list(scheduler.queue)
        assert len(waiting) == len(scheduler.queue)
        known = {*waiting, *running}
        assert len(known) == len(waiting) + len(running), "a request is queued twice, or runs"
        assert known == {*requests}
        swapped = set()
        for request in waiting:
            assert not request.kv.blocks and request.row < 0, (
                "a waiting request holds blocks or a row"
            )
            assert request.num_computed == request.prefill_end == 0, "it waits with computed tokens"
            if request.state is RequestState.SWAPPED:
                swapped.add(request)
        assert swapped == scheduler.swapped.keys()

    def _check_host(self, kv: KVCache) -> None:
        held = [0] * kv.host.num_blocks
        for request in self.scheduler.requests.values():
            if request.kv.host:
                for block in request.kv.host.blocks:
                    held[block] += 1
        for block in kv._leaving_host:
            held[block] += 1
        assert held == kv.host.refs and max(held, default=0) < 2, (
            "wrong reference counts on the host"
        )

    def check_tokens(self) -> None:
        """Every token was reported once: the output, or more where the output was discarded."""
        for request, reported in self.outputs.items():
            num_reported = max(request.num_generated, request.history.num_discarded)
            assert len(reported) == num_reported, "tokens were lost or reported twice"
            assert (
                list(request.tokens[request.num_prompt :]) == reported[: request.num_generated]
            ), "reported tokens differ from the output"

    def check_end(self) -> None:
        """Nothing leaks, and every output equals that of the request running alone."""
        scheduler, decode_batch = self.scheduler, self.scheduler.state.decode_batch
        self.check_now()
        left = (
            scheduler.requests, scheduler.running, scheduler.state.prefilling, scheduler.swapped,
            scheduler.queue, scheduler.in_flight, scheduler.state.stop_tokens, decode_batch.members,
            *decode_batch._due, decode_batch._ending, scheduler.queue._groups,
        )  # fmt: skip
        assert not any(left), f"not empty: {left}"
        assert decode_batch.context == 0 and not any(scheduler.kv.pool.refs)
        assert scheduler.is_idle
        assert sorted(r.id for r in self.finished) == sorted(r.id for r in self.outputs)
        self.check_tokens()
        for request, reported in self.outputs.items():
            self._check_output(request, reported)

    def _check_output(self, request: Request, reported: list[int]) -> None:
        prompt = request.tokens[: request.num_prompt]
        longest = self.scenario.config.max_model_len
        if request.params.max_tokens is None:  # limited by the cache
            longest = request.limit
        output, reason = oracle(prompt, request.params, longest)
        assert request.is_finished and request.row == -1 and not request.kv.blocks
        if request.finish_reason in ("abort", "error"):
            assert reported == output[: len(reported)]
        else:
            assert (reported, request.finish_reason) == (output, reason), (
                "not the output of the request running alone"
            )

    # Counts, so that a test can check that every kind of event occurs.

    def _count(self, plan: Plan) -> None:
        seen, size = self.seen, self.scenario.config.block_size
        for preemption in plan.preempted:
            seen["deferred, then preempted"] += preemption.request in plan.deferred
        for request, num_cached, num_swapped, is_resume, *_ in plan.admitted:
            seen["cache hits"] += num_cached > 0
            seen["resumed from cache and host"] += bool(num_cached and num_swapped)
            seen["resumed from host"] += num_swapped > 0
            seen["swapped without use"] += request in self.swapped and not num_cached + num_swapped
            self.swapped.discard(request)
            seen["resumed from cache"] += is_resume and num_cached > 0
            seen["full hits"] += num_cached == request.num_prompt - 1 and num_cached % size > 0
        seen["drafts beside decodes"] += bool(plan.drafts and plan.decodes)
        seen["drafts beside chunks"] += bool(plan.drafts and plan.chunks)
        seen["blocks for drafts"] += sum(d.end > -(-d.start // size) * size for d in plan.drafts)
        if len(self.pending) > 1:
            seen["plans while another is in flight"] += 1
        self._count_work(plan)
        for blocked in plan.blocked:
            seen[f"blocked: {blocked.reason}"] += 1
        if plan.not_considered:
            seen[f"not considered: {plan.not_considered.reason}"] += 1

    def _count_work(self, plan: Plan) -> None:
        seen = self.seen
        for chunk in plan.chunks:
            seen["full hits not stored again"] += chunk.store_from > chunk.start
            seen["split prompts"] += not chunk.is_last
        if plan.chunks and plan.decodes:
            seen["mixed batches"] += 1
        if plan.copies_out and plan.copies_in:
            seen["swaps both ways"] += 1
        if plan.num_steps > 1:
            seen["multi-step plans"] += 1
            seen["ends within a multi-step plan"] += any(
                self.scheduler.last_planned.reaching_limit[: plan.num_steps - 1]
            )
        if plan.deferred:
            seen["deferred decodes"] += len(plan.deferred)


def run(scenario: Scenario, tamper: Tamper | None = None) -> Counter[str]:
    """Drive a scenario to its end; returns how often each kind of event occurred."""
    return ScenarioRun(scenario, tamper).run()
