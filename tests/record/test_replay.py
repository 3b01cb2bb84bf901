"""Laws of the journal: it can be written, read and repeated, and each time is the same to the byte."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from headway.config import Config
from headway.drafters.ngram import ngram
from headway.drafters.suffix import suffix
from headway.events import Completed, Event, Reconfigured
from headway.record.reader import events_of, parse_journal
from headway.record.writer import JournalWriter, header
from headway.request import Request
from headway.scheduler.policies import victim
from headway.scheduler.policies.draft import by_cost, fixed
from tests.support.journals import Lines, replay
from tests.support.scenarios import Scenario, ScenarioRun, random_scenario
from tests.support.shadow import VOCABULARY, draw, fold

NUM_SEEDS = 60  # for each of the eight kinds


def journal_of(config: Config, events: list[Event], **more: Any) -> list[bytes]:
    lines = Lines()
    write = JournalWriter(lines, header(config, False, **more))
    for event in events:
        write(event)
    return lines


class SeededDrafter:
    """Drafts of which one in eight is wrong; what it answers depends only on the tokens."""

    def __init__(self, seeds: dict[str, int]) -> None:
        self._seeds = seeds  # by request, as a recorded request does not have its own

    def propose(self, request: Request, most: int) -> list[int]:
        state, drafts = 0, list[int]()
        for token in request.tokens:
            state = fold(state, token)
        for _ in range(most - state % 2):
            token = draw(state, self._seeds[request.id])
            drafts.append((token + (draw(state, -1) == 0)) % VOCABULARY)
            state = fold(state, drafts[-1])
        return drafts

    def forget(self, request: Request) -> None: ...


def with_drafts(config: Config, requests: Sequence[Request], seed: int) -> Config:
    """The config with drafts that a replay makes again."""
    rng, seeds = random.Random(seed), {r.id: r.params.sampling for r in requests}
    rules: tuple[Any, ...] = (
        fixed(rng.randrange(1, 6)), by_cost(most=6), by_cost(most=4, weights=0.0, token=1e-3),
        lambda request, step: request.num_computed % 4 - 1,
        lambda request, step: round(5 * step.acceptance(request)),
    )  # fmt: skip
    drafters = (lambda: SeededDrafter(seeds), ngram(1, 2), suffix(min=1, shared=True))  # type: ignore[arg-type]
    return replace(config, draft=rng.choice(rules), drafter=rng.choice(drafters))


def scenario_of(seed: int, async_scheduling: int, has_window: bool, has_drafts: bool) -> Scenario:
    scenario = random_scenario(seed, async_scheduling, has_window=has_window)
    if has_drafts:
        scenario.config = with_drafts(scenario.config, scenario.requests, seed)
    return scenario


class Recorded(ScenarioRun):
    """A random scenario whose events are recorded; some steps change the policies."""

    def __init__(self, seed: int, *kind: Any) -> None:
        super().__init__(scenario_of(seed, *kind))
        self.events: list[Event] = []
        self.lines = Lines()
        head = header(self.scenario.config, False, has_blocks=True)
        self._write = JournalWriter(self.lines, head)
        self._changed = seed % 11 if seed % 3 == 0 else -1

    def note(self, event: Event) -> None:
        super().note(event)
        event.time = float(len(self.events))
        self.events.append(event)
        self._write(event)
        self.seen[type(event).__name__] += 1
        if isinstance(event, Completed):
            self.seen["right drafts"] += sum(num_right for _, num_right in event.verified())

    def step(self, step: int) -> None:
        if step == self._changed:
            self.scheduler.reconfigure(changed(self.scheduler.config))
        super().step(step)


def without_addresses(lines: list[bytes]) -> list[bytes]:
    """The lines without the addresses of random generators, which policies of a scenario have."""
    return [re.sub(rb" at 0x[0-9a-f]+", b"", line) for line in lines]


def changed(config: Config) -> Config:
    """Other policies; a run with drafts goes on with others, or without any."""
    draft = None if config.draft is None or config.max_num_seqs % 2 else fixed(2)
    return replace(config, victim=victim.least_work, draft=draft)


@pytest.mark.parametrize("has_drafts", (False, True))
@pytest.mark.parametrize("has_window", (False, True))
@pytest.mark.parametrize("async_scheduling", (0, 1))
def test_a_journal_that_is_read_or_repeated_is_the_same(
    async_scheduling: int, has_window: bool, has_drafts: bool
) -> None:
    kind, seen = (async_scheduling, has_window, has_drafts), Counter[str]()
    for seed in range(NUM_SEEDS):
        world = Recorded(seed, *kind)
        seen += world.run()
        config = scenario_of(seed, *kind).config
        written = journal_of(config, world.events, has_blocks=True)
        read = list(events_of(parse_journal("a journal", written)))
        assert journal_of(config, read, has_blocks=True) == written, f"seed {seed} is read"
        if world.seen["refused"]:  # a refused request draws numbers of the policies, too
            continue
        seen["repeated"] += 1
        for events in (world.events, read):
            # Policies of a scenario may draw random numbers: a new config begins with the first.
            config = scenario_of(seed, *kind).config
            for event in events:
                if isinstance(event, Reconfigured):
                    event.config = changed(config)
            again = journal_of(config, list(replay(events, config)), has_blocks=True)
            assert without_addresses(again) == without_addresses(written), (
                f"seed {seed} is repeated"
            )
    assert seen["repeated"] > NUM_SEEDS / 2
    assert bool(seen["right drafts"] > NUM_SEEDS / 2) == has_drafts
    kinds = {"Added", "Aborted", "Reset", "Reconfigured", "Planned", "Completed", "Failed"}
    assert kinds <= set(seen), kinds - set(seen)
    assert msgspec.json.decode(written[0])["headway_trace"] == 3
