"""Two traces of one workload: the first step where they part, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import zip_longest
from typing import Any, NamedTuple

from headway.observe.trace import Line, decisions

CHOICES = ("preempted", "admitted", "chunks", "decodes", "steps", "deferred", "finished")
WORDS = {
    "preempted": "sends back {}",
    "admitted": "admits {}",
    "chunks": "computes prompt tokens of {}",
    "decodes": "decodes {} requests",
    "steps": "runs {} decode steps in one",
    "deferred": "lets decodes wait: {}",
    "finished": "finishes {}",
}


class Parting(NamedTuple):
    """Where two runs part, in sentences; empty `lines` if they never do."""

    step: int | None
    lines: list[str]


def diff(left: Iterable[Line], right: Iterable[Line], names: tuple[str, str]) -> Parting:
    """Compare two traces step by step; headers first, because settings explain most partings."""
    (left_header, *left_steps), (right_header, *right_steps) = left, right
    settings = _settings(left_header["config"], right_header["config"], names)
    for mine, other in zip_longest(left_steps, right_steps):
        if mine is None or other is None:
            longer, shorter = names if other is None else names[::-1]
            step = (mine or other)["step"]
            return Parting(step, [f"{shorter} has ended; {longer} goes on.", *settings])
        if decisions(mine) != decisions(other):
            lines = [*choices(mine, other, names), *_reasons(mine, other, names)]
            return Parting(mine["step"], [*lines, *settings])
    return Parting(None, settings)


def choices(mine: Line, other: Line, names: tuple[str, str]) -> list[str]:
    """What the one run does in a step and the other does not."""
    lines = []
    for choice in CHOICES:
        if mine.get(choice) != other.get(choice):
            for name, line in zip(names, (mine, other), strict=True):
                what = _short(choice, line.get(choice, "nobody" if choice != "decodes" else 0))
                lines.append(f"{name} {WORDS[choice].format(what)}")
    if not lines:
        fields = sorted(k for k in decisions(mine) | other if mine.get(k) != other.get(k))
        lines = [f"the same is run, but these differ: {', '.join(f for f in fields if f != 't')}"]
    return lines


def _reasons(mine: Line, other: Line, names: tuple[str, str]) -> list[str]:
    """What kept a request waiting in the one run and not in the other."""
    lines = []
    for name, line, rest in ((names[0], mine, other), (names[1], other, mine)):
        elsewhere = {b[0]: b[1:] for b in rest.get("blocked", ())}
        for id, reason, need, have in line.get("blocked", ()):
            if elsewhere.get(id) != [reason, need, have]:
                lines.append(f"{name} leaves {id} waiting: {reason}, needs {need}, has {have}")
        if line.get("behind") and line.get("behind") != rest.get("behind"):
            reason, count = line["behind"]
            lines.append(f"{name} does not look at {count} more: {reason}")
    free = [line["free"] for line in (mine, other)]
    if free[0] != free[1]:
        lines.append(f"free blocks after the step: {names[0]} {free[0]}, {names[1]} {free[1]}")
    return lines


def _settings(mine: dict[str, Any], other: dict[str, Any], names: tuple[str, str]) -> list[str]:
    return [
        f"{key}: {names[0]} {mine.get(key)}, {names[1]} {other.get(key)}"
        for key in mine
        if mine.get(key) != other.get(key)
    ]


def _short(choice: str, value: Any) -> str:
    """The first few of those a choice concerns, each in words."""
    if not isinstance(value, list):
        return str(value)
    parts = [ONE[choice](item) for item in value[:4]]
    return ", ".join(parts) + (f" and {len(value) - 4} more" if len(value) > 4 else "")


ONE: dict[str, Callable[[Any], str]] = {
    "preempted": lambda item: f"{item[0]} ({item[1]}, {item[2]} tokens)",
    "admitted": lambda item: f"{item[0]} ({item[1]} tokens cached, {item[2]} swapped in)",
    "chunks": lambda item: f"{item[0]} ({item[1]} to {item[2]})",
    "deferred": str,
    "finished": lambda item: f"{item['id']} ({item['reason']})",
}
