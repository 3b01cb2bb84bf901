"""Random worlds around some requests: other requests, chunks, preemption, swapping, cache hits."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from typing import Any

from headway import Config, Engine, Scheduler, preset
from headway.engine.messages import SampleUpdate, StepUpdates
from headway.events import Completed, Event, preempted_by
from headway.executor.base import Executor
from headway.request import RequestParams
from headway.sampling_params import Sampling, TokenLogprobs

PRESETS = ("headway", "nano_vllm", "vllm", "vllm_v1")


@dataclass(frozen=True, slots=True)
class Asked:
    """A request."""

    prompt: tuple[int, ...]
    params: RequestParams

    @property
    def length(self) -> int:
        return len(self.prompt) + self.params.max_tokens


@dataclass(slots=True)
class Outcome:
    """What a request gets; equal only if all bits are."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt: dict[int, TokenLogprobs] = field(default_factory=dict)

    def add(self, update: SampleUpdate) -> None:
        self.tokens += update.tokens
        self.logprobs += (update.logprobs or [])[: len(update.tokens)]
        self.prompt.update(update.prompt_logprobs or [])


@dataclass(frozen=True, slots=True)
class World:
    """A schedule for some requests; the others join after `num_early` steps."""

    config: Config
    is_async: bool
    requests: list[Asked]
    num_late: int = 0
    num_early: int = 0


def random_requests(
    rng: random.Random, text: Sequence[int], count: int, longest: int, num_output: int
) -> list[Asked]:
    """Prompts from the text, some with a common start; greedy or sampled, some with logprobs."""
    found = list[Asked]()
    for _ in range(count):
        size, start = rng.randint(1, longest), rng.choice((0, rng.randrange(len(text))))
        prompt = [text[(start + place) % len(text)] for place in range(size)]
        sampling = Sampling(
            temperature=rng.choice((0.0, 0.8, 1.5)), top_p=rng.choice((1.0, 0.9)),
            seed=rng.getrandbits(32), logprobs=rng.choice((None, None, 0, 3)),
            prompt_logprobs=rng.choice((None, None, None, 2)),
        )  # fmt: skip
        params = RequestParams(
            max_tokens=rng.randint(1, num_output), ignore_eos=True, sampling=sampling
        )
        found.append(Asked(tuple(prompt), params))
    return found


def random_world(rng: random.Random, targets: list[Asked], limits: Config) -> World:
    """A world that an executor with these limits can run; a target may occur twice."""
    requests = rng.choices(targets, k=rng.randint(2, limits.max_num_seqs))
    size = limits.block_size
    least = max(-(-each.length // size) for each in requests) + 1
    most = limits.max_num_batched_tokens
    budget = rng.choice((most, most // 2, most // 4))
    changes: dict[str, Any] = {
        "max_num_seqs": min(rng.randint(2, limits.max_num_seqs), budget),
        "max_num_batched_tokens": budget, "block_size": size,
        "max_model_len": limits.max_model_len,
        "num_blocks": min(rng.choice((least, least, 2 * least, limits.num_blocks)), limits.num_blocks),
        "num_host_blocks": limits.num_host_blocks, "swap": rng.choice(("recompute", "swap")),
        "chunk": rng.choice(("split_any", f"at_most({rng.choice((7, 32, 100, 200))})")),
        "num_scheduler_steps": rng.choice((1, 1, 3)), "headroom": "watermark(0)",
    }  # fmt: skip
    return World(
        config=preset(rng.choice(PRESETS), **changes), is_async=rng.random() < 0.5,
        requests=requests, num_late=rng.randrange(len(requests)), num_early=rng.randint(0, 12),
    )  # fmt: skip


def run_world(executor: Executor, world: World, seen: Counter[str]) -> list[Outcome]:
    """What each of a world's requests is sent; counts in `seen` what happened to them."""
    outcomes = [Outcome() for _ in world.requests]

    def watch(event: Event) -> None:
        _count(event, seen)
        for update in updates.of(event):
            if isinstance(update, SampleUpdate):
                outcomes[int(update.id)].add(update)
            else:
                for id, tokens in zip(update.ids, update.tokens, strict=True):
                    outcomes[int(id)].tokens += tokens

    engine = Engine(
        Scheduler(world.config), executor, async_scheduling=world.is_async, observers=[watch]
    )
    updates = StepUpdates(engine.clock)
    first = len(world.requests) - world.num_late
    for place, asked in enumerate(world.requests):
        if place == first:
            for _ in range(world.num_early):
                engine.step()
        updates.add(engine.add(str(place), asked.prompt, asked.params))
    engine.run()
    assert engine.fault is None, engine.fault
    return outcomes


def alone(executor: Executor, asked: Asked, limits: Config) -> Outcome:
    """The request without others, one plan at a time, its prompt in as few chunks as possible."""
    return run_world(executor, World(limits, False, [asked]), Counter())[0]


def differences(found: Outcome, expected: Outcome) -> list[str]:
    """What differs, each with its first place. Prompt logprobs may lack a cached prefix."""
    prompt = {place: expected.prompt.get(place) for place in found.prompt}
    pairs: dict[str, tuple[Iterable[object], Iterable[object]]] = {
        "tokens": (found.tokens, expected.tokens), "logprobs": (found.logprobs, expected.logprobs),
        "prompt": (found.prompt.items(), prompt.items()),
    }  # fmt: skip
    wrong = list[str]()
    for name, pair in pairs.items():
        places = enumerate(zip_longest(*pair))
        wrong += islice((f"{name} {k}: {a}, not {b}" for k, (a, b) in places if a != b), 1)
    return wrong


def _count(event: Event, seen: Counter[str]) -> None:
    for each in preempted_by(event):
        seen["swapped" if each.is_swap else "recomputed"] += 1
    if not isinstance(event, Completed):
        return
    plan = event.plan
    seen["steps"] += 1
    seen["decodes"] += len(plan.decodes) * plan.num_steps
    seen["chunks"] += len(plan.chunks)
    seen["steps_of_several"] += plan.num_steps > 1
    seen["cached_tokens"] += sum(each.num_cached for each in plan.admitted)
