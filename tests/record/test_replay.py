"""Laws of the journal: it can be written, read and repeated, and each time is the same to the byte."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from headway.config import Config
from headway.events import Event, Reconfigured
from headway.record.reader import events_of, parse_journal
from headway.record.writer import JournalWriter, header
from headway.scheduler.policies import victim
from tests.support.journals import Lines, replay
from tests.support.scenarios import ScenarioRun, random_scenario

NUM_SEEDS = 60  # for each of the four kinds


def journal_of(config: Config, events: list[Event], **more: Any) -> list[bytes]:
    lines = Lines()
    write = JournalWriter(lines, header(config, False, **more))
    for event in events:
        write(event)
    return lines


class Recorded(ScenarioRun):
    """A random scenario whose events are recorded; some steps change the policies."""

    def __init__(self, seed: int, async_scheduling: int, has_window: bool) -> None:
        super().__init__(random_scenario(seed, async_scheduling, has_window=has_window))
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

    def step(self, step: int) -> None:
        if step == self._changed:
            self.scheduler.reconfigure(changed(self.scheduler.config))
        super().step(step)


def without_addresses(lines: list[bytes]) -> list[bytes]:
    """The lines without the addresses of random generators, which policies of a scenario have."""
    return [re.sub(rb" at 0x[0-9a-f]+", b"", line) for line in lines]


def changed(config: Config) -> Config:
    return replace(config, victim=victim.least_work)


@pytest.mark.parametrize("has_window", (False, True))
@pytest.mark.parametrize("async_scheduling", (0, 1))
def test_a_journal_that_is_read_or_repeated_is_the_same(
    async_scheduling: int, has_window: bool
) -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        world = Recorded(seed, async_scheduling, has_window)
        seen += world.run()
        config = random_scenario(seed, async_scheduling, has_window=has_window).config
        written = journal_of(config, world.events, has_blocks=True)
        read = list(events_of(parse_journal("a journal", written)))
        assert journal_of(config, read, has_blocks=True) == written, f"seed {seed} is read"
        if world.seen["refused"]:  # a refused request draws numbers of the policies, too
            continue
        seen["repeated"] += 1
        for events in (world.events, read):
            # Policies of a scenario may draw random numbers: a new config begins with the first.
            config = random_scenario(seed, async_scheduling, has_window=has_window).config
            for event in events:
                if isinstance(event, Reconfigured):
                    event.config = changed(config)
            again = journal_of(config, list(replay(events, config)), has_blocks=True)
            assert without_addresses(again) == without_addresses(written), (
                f"seed {seed} is repeated"
            )
    assert seen["repeated"] > NUM_SEEDS / 2
    kinds = {"Added", "Aborted", "Reset", "Reconfigured", "Planned", "Completed", "Failed"}
    assert kinds <= set(seen), kinds - set(seen)
    assert msgspec.json.decode(written[0])["headway_trace"] == 3
