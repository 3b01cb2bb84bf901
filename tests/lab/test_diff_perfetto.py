"""The first difference between two traces, and the events of a Perfetto export."""

from __future__ import annotations

import io
import json
from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any

import pytest

from headway.lab.cost import load_profile
from headway.lab.diff import diff
from headway.lab.simulate import simulate
from headway.lab.workload.synthetic import parse_synthetic
from headway.record.sentences import sentences_of, waits
from headway.record.perfetto import to_perfetto
from headway.observe.trace import Line, decisions
from headway.scheduler import PRESETS, preset

PROFILE = load_profile("qwen3-0.6b-h200")
WORKLOAD = (
    "requests=20,arrivals=poisson(300),prompt=uniform(5,60),output=uniform(1,30),max_tokens=30,"
    "prefix=2x16@0.5,seed=6"
)
SMALL = {"block_size": 4, "num_blocks": 40, "max_num_seqs": 8, "max_num_batched_tokens": 128}
NAMES = ("left", "right")


def record(name: str = "headway", async_scheduling: int = 0, **changes: Any) -> list[Line]:
    file, config = io.StringIO(), preset(name, **{**SMALL, **changes})
    jobs = parse_synthetic(WORKLOAD).generate()
    simulate(jobs, config, PROFILE, async_scheduling=async_scheduling, trace=file)
    return [json.loads(line) for line in file.getvalue().splitlines()]


# Diff.


@pytest.mark.parametrize("name", ["headway", "vllm_v1", "static"])
def test_a_trace_does_not_differ_from_itself(name: str) -> None:
    lines = record(name)
    assert diff(lines, lines, NAMES) == (None, [])


def test_times_are_not_compared() -> None:
    lines = record()
    later = [lines[0]] + [
        {**line, "t": line["t"] + 1, "start": line["start"] + 2, "end": line["end"] + 3}
        for line in lines[1:]
    ]
    assert diff(lines, later, NAMES).step is None


@pytest.mark.parametrize(
    ("left", "right"), [("vllm_v1", "static"), ("nano_vllm", "headway"), ("vllm", "deep_dive")]
)
def test_the_first_step_that_differs_is_found(left: str, right: str) -> None:
    one, other = record(left), record(right)
    difference = diff(one, other, (left, right))
    pairs = zip(one[1:], other[1:], strict=False)
    first = next(a["step"] for a, b in pairs if decisions(a) != decisions(b))
    assert difference.step == first
    text = "\n".join(difference.lines)
    assert left in text and right in text
    batching = (one[0]["config"]["batching"], other[0]["config"]["batching"])
    if batching[0] != batching[1]:
        assert f"batching: {left} {batching[0]}, {right} {batching[1]}" in difference.lines


def test_a_difference_gives_the_decisions_of_both_runs_in_sentences() -> None:
    one, other = record("vllm_v1", max_num_seqs=30), record("deep_dive", max_num_seqs=30)
    difference = diff(one, other, NAMES)
    pairs = zip(one[1:], other[1:], strict=False)
    mine, theirs = next((a, b) for a, b in pairs if decisions(a) != decisions(b))
    lefts, rights = (set(sentences_of(line, 30)) for line in (mine, theirs))
    assert {f"left: {text}" for text in lefts - rights} <= set(difference.lines)
    assert {f"right: {text}" for text in rights - lefts} <= set(difference.lines)
    (blocked,) = [b for b in theirs["blocked"] if b not in mine.get("blocked", [])]
    assert blocked[1] == "headroom" and f"right: {waits(*blocked)}" in difference.lines
    assert any(line.startswith("free blocks after the step") for line in difference.lines)


def test_a_difference_names_the_limit_of_running_requests() -> None:
    difference = diff(record(max_num_seqs=1), record(max_num_seqs=2), NAMES)
    assert any("limit of 1 running" in line for line in difference.lines)
    assert "max_num_seqs: left 1, right 2" in difference.lines


def test_the_shorter_run_is_named() -> None:
    lines = record()
    cut = lines[:-3]
    step, (line,) = diff(lines, cut, NAMES)
    assert step == lines[-3]["step"] and line.startswith("right ends")
    assert diff(cut, lines, NAMES).lines[0].startswith("left ends")


def test_every_pair_of_presets_has_a_difference() -> None:
    traces = {name: record(name) for name in PRESETS}
    for left, one in traces.items():
        for right, other in traces.items():
            difference = diff(one, other, (left, right))
            assert difference.lines or left == right
            assert all(0 < len(line) < 400 for line in difference.lines)


# Perfetto.


TRACES: list[tuple[str, int, dict[str, Any]]] = [
    ("headway", 0, {}),
    ("vllm_v1", 1, {}),
    ("vllm", 0, {"swap": "swap", "num_host_blocks": 20, "headroom": "watermark(0.0)"}),
    ("minivllm", 1, {"num_scheduler_steps": 3}),
]
each_trace = pytest.mark.parametrize(("name", "async_scheduling", "changes"), TRACES)


def events_of(name: str, async_scheduling: int, changes: dict[str, Any]) -> list[dict[str, Any]]:
    events = list(to_perfetto(record(name, async_scheduling, **changes)))
    assert json.loads(json.dumps({"traceEvents": events}))["traceEvents"] == events
    return events


@each_trace
def test_every_event_has_the_fields_of_its_kind(
    name: str, async_scheduling: int, changes: dict[str, Any]
) -> None:
    for event in events_of(name, async_scheduling, changes):
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
    for event in events_of(name, async_scheduling, changes):
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
    for event in events_of(name, async_scheduling, changes):
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
    lines, events = (
        record(name, async_scheduling, **changes),
        events_of(name, async_scheduling, changes),
    )
    for counter, field in (("running",) * 2, ("waiting",) * 2, ("free blocks", "free")):
        shown = [e["args"][counter] for e in events if e["ph"] == "C" and e["name"] == counter]
        assert shown == [line[field] for line in lines[1:]]
    assert any(e["name"] == "tokens" for e in events if e["ph"] == "C")


def test_swapped_requests_have_their_own_phase() -> None:
    names = {e["name"] for e in events_of(*TRACES[2])}
    assert "swapped" in names
