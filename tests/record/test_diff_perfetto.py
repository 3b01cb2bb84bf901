"""The first difference between two journals, and the events of a Perfetto export."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from headway.events import Planned
from headway.record.diff import TIMES, decisions, diff
from headway.record.lines import CompletedLine, HeaderLine, PlannedLine
from headway.record.perfetto import to_perfetto
from headway.record.reader import events_of
from headway.record.sentences import decisions_of, waits
from headway.scheduler import PRESETS
from tests.support import journals
from tests.support.journals import Journal, of_kind

WORKLOAD = (
    "requests=20,arrivals=poisson(300),prompt=uniform(5,60),output=uniform(1,30),max_tokens=30,"
    "prefix=2x16@0.5,seed=6"
)
SMALL = {"block_size": 4, "num_blocks": 40, "max_num_seqs": 8, "max_num_batched_tokens": 128}
NAMES = ("left", "right")


def record(name: str = "headway", async_scheduling: int = 0, **changes: Any) -> Journal:
    return journals.record(WORKLOAD, name, async_scheduling, **{**SMALL, **changes})


def first_difference(one: Journal, other: Journal) -> int:
    """The step of the first plan that differs."""
    pairs = zip(of_kind(PlannedLine, one), of_kind(PlannedLine, other), strict=False)
    return next(a.step for a, b in pairs if decisions(a) != decisions(b))


def waiting(journal: Journal, step: int) -> set[str]:
    """The sentences about waiting requests in a plan."""
    head = journal[0]
    assert isinstance(head, HeaderLine)
    events = of_kind(Planned, events_of(journal))
    found = decisions_of(events[step], head.config["max_num_seqs"])
    return {each.text for each in found if each.kind == "waiting"}


@pytest.mark.parametrize("name", ["headway", "vllm_v1", "static"])
def test_a_trace_does_not_differ_from_itself(name: str) -> None:
    lines = record(name)
    assert diff(lines, lines, NAMES) == (None, [])


def test_times_are_not_compared() -> None:
    lines = record()
    later = [
        msgspec.structs.replace(
            line, **{n: i + 1.0 for i, n in enumerate(TIMES) if hasattr(line, n)}
        )
        for line in lines
    ]
    assert lines[1:] != later[1:]
    assert diff(lines, later, NAMES).step is None


@pytest.mark.parametrize(
    ("left", "right"), [("vllm_v1", "static"), ("nano_vllm", "headway"), ("vllm", "deep_dive")]
)
def test_the_first_step_that_differs_is_found(left: str, right: str) -> None:
    one, other = record(left), record(right)
    difference = diff(one, other, (left, right))
    assert difference.step == first_difference(one, other)
    text = "\n".join(difference.lines)
    assert left in text and right in text
    batching = [head.config["batching"] for head in of_kind(HeaderLine, [*one, *other])]
    if batching[0] != batching[1]:
        assert f"batching: {left} {batching[0]}, {right} {batching[1]}" in difference.lines


def test_a_difference_gives_the_decisions_of_both_runs_in_sentences() -> None:
    one, other = record("vllm_v1", max_num_seqs=30), record("deep_dive", max_num_seqs=30)
    difference = diff(one, other, NAMES)
    step = first_difference(one, other)
    lefts, rights = waiting(one, step), waiting(other, step)
    assert {f"left: {text}" for text in lefts - rights} <= set(difference.lines)
    assert {f"right: {text}" for text in rights - lefts} <= set(difference.lines)
    mine, theirs = (of_kind(PlannedLine, journal)[step] for journal in (one, other))
    (blocked,) = [each for each in theirs.blocked if each not in mine.blocked]
    assert blocked[1] == "headroom" and f"right: {waits(*blocked)}" in difference.lines
    assert any(line.startswith("free blocks after the step") for line in difference.lines)


def test_a_difference_names_the_limit_of_running_requests() -> None:
    difference = diff(record(max_num_seqs=1), record(max_num_seqs=2), NAMES)
    assert any("limit of 1 running" in line for line in difference.lines)
    assert "max_num_seqs: left 1, right 2" in difference.lines


def test_the_shorter_run_is_named() -> None:
    lines = record()
    first_cut = of_kind(PlannedLine, lines)[-3]
    cut = lines[: lines.index(first_cut)]
    step, (line,) = diff(lines, cut, NAMES)
    assert step == first_cut.step and line.startswith("right ends")
    assert diff(cut, lines, NAMES).lines[0].startswith("left ends")


def test_every_pair_of_presets_has_a_difference() -> None:
    traces = {name: record(name) for name in PRESETS}
    for left, one in traces.items():
        for right, other in traces.items():
            difference = diff(one, other, (left, right))
            assert difference.lines or left == right
            assert all(0 < len(line) < 400 for line in difference.lines)


TRACES: list[tuple[str, int, dict[str, Any]]] = [
    ("headway", 0, {}),
    ("vllm_v1", 1, {}),
    ("vllm", 0, {"swap": "swap", "num_host_blocks": 20, "headroom": "watermark(0.0)"}),
    ("minivllm", 1, {"num_scheduler_steps": 3}),
]
each_trace = pytest.mark.parametrize(("name", "async_scheduling", "changes"), TRACES)


def exported(name: str, async_scheduling: int, changes: dict[str, Any]) -> list[dict[str, Any]]:
    """The events after a round trip through JSON."""
    events = to_perfetto(record(name, async_scheduling, **changes))
    return list(json.loads(json.dumps({"traceEvents": list(events)}))["traceEvents"])


@each_trace
def test_every_event_has_the_fields_of_its_kind(
    name: str, async_scheduling: int, changes: dict[str, Any]
) -> None:
    for event in exported(name, async_scheduling, changes):
        assert event["pid"] == 1 and event["ph"] in "MiXCbe" and event["name"]
        if event["ph"] != "M":
            assert isinstance(event["ts"], int | float) and event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] in "be":
            assert event["id"] and event["cat"]


@each_trace
def test_every_slice_ends_once_and_in_order(
    name: str, async_scheduling: int, changes: dict[str, Any]
) -> None:
    open_: dict[str, list[tuple[str, float]]] = defaultdict(list)
    seen: Counter[str] = Counter()
    for event in exported(name, async_scheduling, changes):
        if event["ph"] == "b":
            open_[event["id"]].append((event["name"], event["ts"]))
            seen[event["name"]] += 1
        elif event["ph"] == "e":
            began, ts = open_[event["id"]].pop()
            assert began == event["name"] and ts <= event["ts"]
    assert len(open_) == 20 and not any(open_.values())
    assert seen["queued"] == 20 and seen["prefill"] >= 20 and seen["decode"] >= 20


@each_trace
def test_times_never_decrease_on_a_track(
    name: str, async_scheduling: int, changes: dict[str, Any]
) -> None:
    tracks: dict[Any, list[float]] = defaultdict(list)
    ends: list[tuple[float, float]] = []
    for event in exported(name, async_scheduling, changes):
        if event["ph"] == "X":
            ends.append((event["ts"], event["ts"] + event["dur"]))
        if event["ph"] in "XC":
            tracks[event["ph"], event["name"] if event["ph"] == "C" else ""].append(event["ts"])
        elif event["ph"] in "be":
            tracks[event["id"]].append(event["ts"])
    assert len(tracks) == 20 + 4 + 1
    for times in tracks.values():
        assert times == sorted(times)
    for (_, end), (start, _) in pairwise(ends):
        assert end <= start + 1e-3  # a step starts after the previous one has ended


@each_trace
def test_counters_equal_the_fields_of_the_steps(
    name: str, async_scheduling: int, changes: dict[str, Any]
) -> None:
    lines = record(name, async_scheduling, **changes)
    events = exported(name, async_scheduling, changes)
    plans = {line.step: line for line in of_kind(PlannedLine, lines)}  # without empty ones
    for counter, field in (("running",) * 2, ("waiting",) * 2, ("free blocks", "free")):
        shown = [e["args"][counter] for e in events if e["ph"] == "C" and e["name"] == counter]
        assert shown == [getattr(plans[line.step], field) for line in of_kind(CompletedLine, lines)]
    assert any(e["name"] == "tokens" for e in events if e["ph"] == "C")


def test_swapped_requests_have_their_own_phase() -> None:
    names = {e["name"] for e in exported(*TRACES[2])}
    assert "swapped" in names
