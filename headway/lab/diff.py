"""Compare two traces of one workload: the first step that differs, and why."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from typing import Any, NamedTuple

from headway.observe.explain import sentences_of
from headway.observe.trace import Line, decisions

MAX_LISTED = 8  # sentences for each run


class Difference(NamedTuple):
    """The first step that differs, and sentences about it; step None if all decisions agree."""

    step: int | None
    lines: list[str]


def diff(left: Iterable[Line], right: Iterable[Line], names: tuple[str, str]) -> Difference:
    """Compare two traces step by step. Times are not compared."""
    (left_header, *left_steps), (right_header, *right_steps) = left, right
    configs = left_header["config"], right_header["config"]
    settings = _settings(*configs, names)
    for mine, other in zip_longest(left_steps, right_steps):
        if mine is None or other is None:
            longer, shorter = names if other is None else names[::-1]
            step = (mine or other)["step"]
            return Difference(
                step, [f"{shorter} ends before this step; {longer} continues.", *settings]
            )
        if decisions(mine) != decisions(other):
            return Difference(mine["step"], [*differences(mine, other, names, configs), *settings])
    return Difference(None, settings)


def differences(
    mine: Line, other: Line, names: tuple[str, str], configs: tuple[Line, Line]
) -> list[str]:
    """The decisions that only one of two runs takes in a step."""
    steps = (mine, other)
    said = [
        list(sentences_of(line, config["max_num_seqs"]))
        for line, config in zip(steps, configs, strict=True)
    ]
    lines = []
    for name, these, those in ((names[0], *said), (names[1], *said[::-1])):
        only = [sentence for sentence in these if sentence not in those]
        lines += [f"{name}: {sentence}" for sentence in only[:MAX_LISTED]]
        if len(only) > MAX_LISTED:
            lines.append(f"{name}: {len(only) - MAX_LISTED} more decisions differ")
    if mine["free"] != other["free"]:
        counts = ", ".join(
            f"{name} {line['free']}" for name, line in zip(names, steps, strict=True)
        )
        lines.append(f"free blocks after the step: {counts}")
    if not lines:
        fields = sorted(k for k in decisions(mine | other) if mine.get(k) != other.get(k))
        lines.append(f"the same work runs, but these fields differ: {', '.join(fields)}")
    return lines


def _settings(mine: dict[str, Any], other: dict[str, Any], names: tuple[str, str]) -> list[str]:
    return [
        f"{key}: {names[0]} {mine.get(key)}, {names[1]} {other.get(key)}"
        for key in mine
        if mine.get(key) != other.get(key)
    ]
