"""Journals in memory, and the lines of one kind in them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from headway.lab.cost import load_profile
from headway.lab.simulate import simulate
from headway.lab.workload.synthetic import parse_synthetic
from headway.record.lines import EndLine, HeaderLine, Line, ends_of
from headway.record.reader import parse_journal
from headway.scheduler import preset

PROFILE = load_profile("qwen3-0.6b-h200")
Journal = list[HeaderLine | Line]
T = TypeVar("T")


class JournalFile(list[bytes]):
    """A file of lines in memory."""

    def write(self, line: bytes) -> None:
        self.append(line)

    def read(self) -> Journal:
        return list(parse_journal("a journal", self))


def record(
    workload: str,
    name: str = "headway",
    async_scheduling: int = 0,
    *,
    trace_blocks: bool = False,
    **changes: Any,
) -> Journal:
    """The journal of a simulated run."""
    file = JournalFile()
    simulate(
        parse_synthetic(workload).generate(), preset(name, **changes), PROFILE,
        async_scheduling=bool(async_scheduling), trace=file, trace_blocks=trace_blocks,
    )  # fmt: skip
    return file.read()


def of_kind(kind: type[T], journal: Iterable[object]) -> list[T]:
    """The lines or events of one type."""
    return [each for each in journal if isinstance(each, kind)]


def all_ends(journal: Iterable[HeaderLine | Line]) -> list[EndLine]:
    """The ends of all requests, in their order."""
    return [end for line in journal if not isinstance(line, HeaderLine) for end in ends_of(line)]
