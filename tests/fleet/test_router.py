"""The router's index and columns decide as a plain loop over the replicas does, in random worlds."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.fleet.prefixes.prompt_keys import PromptKeys
from headway.fleet.router import ReplicaLoad, Router
from headway.fleet.routing import ROUTES, parse_route
from headway.kv.prefix_index import extend_keys
from headway.request import Request, RequestParams
from tests.support.plain_routing import PlainRouter

BLOCK = 2
RULES = [
    *(rule.__name__ for rule in ROUTES),
    "sglang(0.1, 2, 1.2)",
    "chwbl(1.0, 2, 16)",
    "cells(3, 1.1)",
]


class World:
    """A router and the plain one, with the same replicas, caches, loads and requests."""

    def __init__(self, rule: Any, random: Random) -> None:
        self.router, self.plain, self.random = Router(rule, BLOCK), PlainRouter(rule, BLOCK), random
        self.num_joined = 0
        self.prompts = [self.new_prompt([])]
        for _ in range(5):  # prompts that share the first tokens with an earlier one
            shared = random.choice(self.prompts)
            self.prompts.append(self.new_prompt(shared[: random.randint(0, len(shared))]))

    def new_prompt(self, shared: list[int]) -> list[int]:
        own = [self.random.randrange(1000) for _ in range(self.random.choice([0, 5, 60, 90, 200]))]
        return [*shared, *own] or [1]

    def keys(self, prompt: list[int]) -> tuple[PromptKeys, list[bytes]]:
        request, keys = Request("r", prompt, RequestParams(max_tokens=1)), list[bytes]()
        extend_keys(keys, request, BLOCK)
        return PromptKeys(request, BLOCK), keys

    def act(self) -> None:
        names = list(self.plain.held)
        actions = [self.join, self.choose, self.choose]
        if names:
            actions += [self.cache, self.cache, self.load, self.stop, self.leave]
        self.random.choice(actions)()

    def any_name(self) -> str:
        return self.random.choice(list(self.plain.held))

    def join(self) -> None:
        self.num_joined += 1
        name = f"replica-{self.num_joined}"
        self.plain.held[name] = set()
        self.router.tracker.apply(name, [], [], True)
        self.load(name)

    def load(self, name: str | None = None) -> None:
        few = [self.random.randint(0, self.random.choice([1, 3, 1000])) for _ in range(5)]
        load = ReplicaLoad(name or self.any_name(), *few)
        self.plain.loads[load.name] = load
        self.router.update(load)

    def cache(self) -> None:
        """A replica caches a part of a prompt, evicts the end of another one, or all."""
        name, is_cleared = self.any_name(), self.random.random() < 0.1
        held = set() if is_cleared else self.plain.held[name]
        _, new = self.keys(self.random.choice(self.prompts))
        added = [key for key in new[: self.random.randint(0, len(new))] if key not in held]
        held = held | set(added)
        removed = list[bytes]()
        if self.random.random() < 0.5 and not added and not is_cleared:
            chains = [self.keys(prompt)[1] for prompt in self.prompts]
            kept = {key for chain in chains for key in chain[: self.random.randint(0, 40)]}
            removed = [key for key in held if key not in kept]
        self.plain.held[name] = held - set(removed)
        self.router.tracker.apply(name, added, removed, is_cleared)

    def stop(self) -> None:
        name = self.any_name()
        self.plain.loads.pop(name, None)
        self.router.remove(name)

    def leave(self) -> None:
        name = self.any_name()
        del self.plain.held[name]
        self.plain.loads.pop(name, None)
        self.router.forget(name)

    def choose(self) -> None:
        prompt = self.random.choice(self.prompts)
        lazy, keys = self.keys(prompt)
        avoids = self.random.sample(list(self.plain.held), min(len(self.plain.held), 2))
        avoids = avoids if self.random.random() < 0.3 else []
        expected = self.plain.choose(len(prompt), keys, avoids)
        assert self.router.choose("r", len(prompt), lazy, "", avoids) == expected


@pytest.mark.parametrize("text", RULES)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_decisions_are_those_of_a_loop_over_all_replicas(text: str, seed: int) -> None:
    world = World(parse_route(text), Random(seed))
    for _ in range(60):
        world.act()


def test_many_replicas_are_chosen_like_few() -> None:
    """More replicas than the first size of the table, which come and go."""
    world = World(parse_route("prefix_load"), Random(7))
    for _ in range(70):
        world.join()
    for _ in range(300):
        world.random.choice([world.cache, world.load, world.choose, world.choose])()
    for _ in range(60):
        world.leave()
    for _ in range(100):
        world.random.choice([world.join, world.cache, world.leave, world.choose])()
