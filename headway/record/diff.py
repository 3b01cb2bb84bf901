"""Compare two journals of one workload: the first step that differs, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import NamedTuple

from msgspec import to_builtins

from headway.events import Completed, Event, Planned
from headway.record.lines import HeaderLine, Line
from headway.record.reader import EventReader, split_header
from headway.record.sentences import accepted, computed, decisions_of, decoded, drafted
from headway.record.writer import LineMaker

MAX_LISTED = 8  # sentences for each run
TIMES = frozenset({"t", "start", "end", "swap_in", "builds"})  # not part of the decisions
Step = list[Event]  # a plan, its result, and what happened before it
Fields = dict[str, object]


class Difference(NamedTuple):
    """The first step that differs, and sentences about it; step None if all decisions agree."""

    step: int | None
    lines: list[str]


def diff(
    left: Iterable[HeaderLine | Line], right: Iterable[HeaderLine | Line], names: tuple[str, str]
) -> Difference:
    """Compare two journals step by step. Times are not compared."""
    (left_header, left_lines), (right_header, right_lines) = map(split_header, (left, right))
    headers = left_header, right_header
    settings = _settings(left_header.config, right_header.config, names)
    pairs = zip_longest(_steps(left_header, left_lines), _steps(right_header, right_lines))
    for mine, other in pairs:
        if mine is None or other is None:
            longer, shorter = names if other is None else names[::-1]
            text = f"{shorter} ends before this step; {longer} continues."
            return Difference(_number(mine or other), [text, *settings])
        if _decisions(mine) != _decisions(other):
            found = differences(mine, other, names, headers)
            return Difference(_number(mine), [*found, *settings])
    return Difference(None, settings)


def _steps(header: HeaderLine, lines: Iterable[Line]) -> Iterator[Step]:
    reader, before = EventReader(header), Step()
    in_flight: list[Step] = []
    for line in lines:
        event = reader.event(line)
        if isinstance(event, Completed):
            in_flight[0].append(event)
            yield in_flight.pop(0)
            continue
        before.append(event)
        if isinstance(event, Planned) and not event.plan.is_empty:
            in_flight.append(before)
            before = []
    yield from in_flight
    if before:
        yield before


def _number(step: Step) -> int:
    return next((event.plan.step for event in step if isinstance(event, Planned)), -1)


def decisions(line: Line) -> Fields:
    """A line without its times. Two runs with equal decisions are the same run."""
    return {key: value for key, value in to_builtins(line).items() if key not in TIMES}


def _decisions(step: Step, *, has_blocks: bool = False) -> list[Fields]:
    maker = LineMaker(has_blocks=has_blocks)
    return [decisions(maker.line(event)) for event in step]


def differences(
    mine: Step,
    other: Step,
    names: tuple[str, str],
    headers: tuple[HeaderLine, HeaderLine],
    *,
    has_blocks: bool = False,
) -> list[str]:
    """The decisions that only one of two runs takes in a step."""
    said = [
        [text for event in step for text in _sentences(event, header.config["max_num_seqs"])]
        for step, header in zip((mine, other), headers, strict=True)
    ]
    lines = []
    for name, these, those in ((names[0], *said), (names[1], *said[::-1])):
        only = [sentence for sentence in these if sentence not in those]
        lines += [f"{name}: {sentence}" for sentence in only[:MAX_LISTED]]
        if len(only) > MAX_LISTED:
            lines.append(f"{name}: {len(only) - MAX_LISTED} more decisions differ")
    free = [_num_free(step) for step in (mine, other)]
    if free[0] != free[1]:
        counts = ", ".join(f"{name} {number}" for name, number in zip(names, free, strict=True))
        lines.append(f"free blocks after the step: {counts}")
    fields = _fields(*(_decisions(step, has_blocks=has_blocks) for step in (mine, other)))
    return lines or [f"the same work runs, but these fields differ: {fields}"]


def _sentences(event: Event, max_num_seqs: int) -> Iterator[str]:
    for decision in decisions_of(event, max_num_seqs):
        if decision.kind != "arrived":
            yield decision.text
    if isinstance(event, Planned):
        for chunk in event.plan.chunks:
            yield computed(chunk.request.id, chunk.start, chunk.end)
        for draft in event.plan.drafts:
            yield drafted(draft.request.id, draft.start, draft.count)
        yield decoded(len(event.plan.decodes), event.plan.num_steps)
    elif isinstance(event, Completed):
        for draft, num_accepted in event.verified():
            yield accepted(draft.request.id, draft.count, num_accepted)


def _num_free(step: Step) -> int:
    return next((event.num_free for event in step if isinstance(event, Planned)), -1)


def _fields(mine: list[Fields], other: list[Fields]) -> str:
    pairs = zip_longest(mine, other, fillvalue=Fields())
    names = {key for a, b in pairs for key in a | b if a.get(key) != b.get(key)}
    return ", ".join(sorted(names))


def _settings(mine: Fields, other: Fields, names: tuple[str, str]) -> list[str]:
    return [
        f"{key}: {names[0]} {mine.get(key)}, {names[1]} {other.get(key)}"
        for key in mine
        if mine.get(key) != other.get(key)
    ]
