"""Journals in memory: runs that are recorded, and read again from their bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from headway import Config, preset
from headway.events import Event
from headway.lab.cost import Profile, load_profile
from headway.lab.simulate import simulate
from headway.lab.workload.request import WorkloadRequest
from headway.lab.workload.synthetic import parse_synthetic
from headway.record.lines import EndLine, HeaderLine, Line, ends_of
from headway.record.reader import parse_journal
from headway.record.replay import Replay
from headway.record.writer import JournalWriter, header

PROFILE = load_profile("qwen3-0.6b-h200")
Journal = list[HeaderLine | Line]
T = TypeVar("T")


class Lines(list[bytes]):
    """A file in memory, line by line."""

    def write(self, data: bytes) -> None:
        self.append(data)

    def read(self) -> Journal:
        return list(parse_journal("a journal", self))


class Recorder:
    """An observer that keeps all events, and writes them to a journal."""

    def __init__(self, config: Config, async_scheduling: bool, **more: Any) -> None:
        self.events: list[Event] = []
        self.lines = Lines()
        self._write = JournalWriter(self.lines, header(config, async_scheduling, **more))

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        self._write(event)


def replay(events: Iterable[Event], config: Config) -> Iterator[Event]:
    """The events of a scheduler with this config that repeats the recorded calls."""
    again = Replay(config)
    for event in list(events):  # all are read: only the end of a request has its tokens
        yield again.repeat(event)


def simulated(
    requests: list[WorkloadRequest], config: Config, profile: Profile, **options: Any
) -> Journal:
    """The journal of a simulated run."""
    lines = Lines()
    simulate(requests, config, profile, trace=lines, **options)
    return lines.read()


def record(
    workload: str,
    name: str = "headway",
    async_scheduling: int = 0,
    *,
    trace_blocks: bool = False,
    **changes: Any,
) -> Journal:
    """The journal of a simulated run of a synthetic workload with a preset."""
    return simulated(
        list(parse_synthetic(workload).generate()), preset(name, **changes), PROFILE,
        async_scheduling=bool(async_scheduling), trace_blocks=trace_blocks,
    )  # fmt: skip


def of_kind(kind: type[T], journal: Iterable[object]) -> list[T]:
    """The lines or events of one type."""
    return [each for each in journal if isinstance(each, kind)]


def all_ends(journal: Iterable[HeaderLine | Line]) -> list[EndLine]:
    """The ends of all requests, in their order."""
    return [end for line in journal if not isinstance(line, HeaderLine) for end in ends_of(line)]
