"""Laws of the trace: what is written is read back, and every waiting request is accounted for."""

from __future__ import annotations

import io
import json
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import FormatError
from headway.lab.cost import load_profile
from headway.lab.simulate import simulate
from headway.lab.workload.synthetic import parse_synthetic
from headway.observe.trace import (
    TIMES,
    VERSION,
    Line,
    TraceWriter,
    decisions,
    describe_request,
    describe_step,
    header,
    read_trace,
    request_of,
    runs,
    unruns,
)
from headway.plan import Plan, StepEvents, StepReport, StepResult
from headway.request import Params, Request
from headway.scheduler import PRESETS, preset
from headway.scheduler.presets import describe

TOKENS = st.integers(0, (1 << 31) - 1)
RUN = st.tuples(st.integers(0, 1 << 30), st.integers(1, 9), st.integers(0, 2))
WORKLOAD = (
    "requests=24,arrivals=poisson(300),prompt=uniform(3,40),output=uniform(1,20),max_tokens=24,"
    "prefix=2x16@0.5,n=2,clients=3,priorities=2,slack=uniform(0.01,0.2),seed=5"
)
SMALL = {
    "block_size": 4, "num_blocks": 40, "max_num_seqs": 6, "max_num_batched_tokens": 64, "num_host_blocks": 20,
}  # fmt: skip


def record(name: str = "headway", async_scheduling: int = 0, **changes: Any) -> str:
    """The trace of a small crowded run."""
    file, config = io.StringIO(), preset(name, **{**SMALL, **changes})
    jobs = parse_synthetic(WORKLOAD).generate()
    simulate(
        jobs, config, load_profile("qwen3-0.6b-h200"), async_scheduling=async_scheduling, trace=file
    )
    return file.getvalue()


def lines_of(text: str) -> list[Line]:
    return [json.loads(line) for line in text.splitlines()]


# Tokens.


def spread(pieces: list[tuple[int, int, int]]) -> array[int]:
    return array("i", [first + i * stride for first, count, stride in pieces for i in range(count)])


@given(st.lists(RUN, max_size=8))
def test_runs_of_tokens_are_read_back(pieces: list[tuple[int, int, int]]) -> None:
    tokens = spread(pieces)
    assert unruns(json.loads(json.dumps(runs(tokens)))) == tokens


@given(st.lists(TOKENS, max_size=30) | st.lists(st.integers(0, 3), max_size=30))
def test_any_tokens_are_read_back(tokens: list[int]) -> None:
    assert unruns(json.loads(json.dumps(runs(array("i", tokens))))).tolist() == tokens


def test_the_largest_and_the_smallest_ids_do_not_wrap_into_a_run() -> None:
    for tokens in ([-(1 << 31), (1 << 31) - 1, -(1 << 31)], [(1 << 31) - 1, -(1 << 31), 0, 1, 2]):
        assert unruns(runs(array("i", tokens))).tolist() == tokens


def test_long_runs_are_short_to_write() -> None:
    assert runs(array("i", range(100, 5000))) == [[100, 4900, 1]]
    assert runs(array("i", [7] * 5000)) == [[7, 5000, 0]]
    assert runs(array("i", [1, 2, 9, 9, 9, 4, 5, 6])) == [1, 2, [9, 3, 0], [4, 3, 1]]
    assert runs(array("i")) == []


# Requests.


PARAMS = st.builds(
    Params,
    max_tokens=st.none() | st.integers(1, 1000),
    min_tokens=st.integers(0, 5),
    eos_ids=st.frozensets(st.integers(0, 5), max_size=2),
    stop_ids=st.frozensets(st.integers(0, 5), max_size=3),
    ignore_eos=st.booleans(),
    priority=st.integers(-3, 3),
    client=st.sampled_from(["", "a", "ünïcode"]),
    deadline=st.none() | st.floats(-1.0, 5.0),
    salt=st.sampled_from(["", "s"]),
    reads_cache=st.booleans(),
)


@given(PARAMS, st.lists(TOKENS, min_size=1, max_size=9), st.floats(0, 1e6), st.booleans())
def test_a_request_described_asks_for_the_same_again(
    params: Params, prompt: list[int], arrival: float, has_parent: bool
) -> None:
    parent = Request("lead", prompt, params, arrival=arrival)
    request = Request("r", prompt, params, arrival=arrival, parent=parent if has_parent else None)
    again = request_of(json.loads(json.dumps(describe_request(request))), {"lead": parent})
    assert (again.id, again.prompt, again.arrival) == (request.id, request.prompt, arrival)
    assert again.stops == request.stops and again.parent is request.parent
    for field in (
        "max_tokens", "min_tokens", "priority", "client", "deadline", "salt", "reads_cache",
    ):  # fmt: skip
        assert getattr(again.params, field) == getattr(params, field), field
    assert describe_request(again) == describe_request(request)


# Files.


def test_what_the_writer_writes_is_what_the_reader_reads(tmp_path: Path) -> None:
    config, file = preset(), tmp_path / "a.jsonl"
    requests = [Request(str(i), [1, 2, 3, i], Params()) for i in range(3)]
    reports = [
        StepReport(
            Plan(0, events=StepEvents(added=requests, num_waiting=3)),
            StepResult(started=0.5, ended=1.0),
            [],
        ),
        StepReport(Plan(1, decodes=requests), StepResult(started=1.0, ended=1.5), []),
    ]
    with file.open("w", encoding="utf-8") as out:
        writer = TraceWriter(out, config, 1, profile="none")
        for report in reports:
            writer(report)
    first, *steps = read_trace(file)
    assert first == header(config, 1, profile="none")
    assert first["headway_trace"] == VERSION and first["config"] == describe(config)
    assert steps == json.loads(json.dumps([describe_step(report) for report in reports]))


HEADER = '{"headway_trace":1,"config":{},"async_scheduling":0}\n'
STEP = '{"step":0,"t":0,"start":0,"end":0,"running":0,"waiting":0,"free":0,"decodes":0}\n'


BAD_FILES = {
    "": None,
    "nonsense\n": "1: not JSON",
    "[1]\n": "1: not a Headway trace",
    '{"step":0}\n': "1: not a Headway trace",
    '{"headway_trace":99}\n': "1: trace version 99",
    HEADER + '{"step":0\n': "2: not JSON",
    HEADER + '{"a":0}\n': "2: not a step",
    HEADER + STEP + "7\n": "3: not a step",
    HEADER + "\n": "2: not JSON",
    '{"headway_trace":1}\n': "1: the header needs",
}


@pytest.mark.parametrize("text", BAD_FILES)
def test_a_malformed_file_names_itself_and_the_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(text, encoding="utf-8")
    problem = BAD_FILES[text]
    with pytest.raises(FormatError) as caught:
        list(read_trace(file))
    assert str(file) in str(caught.value)
    assert problem is None or f"{file}:{problem}" in str(caught.value)


def test_a_file_that_is_not_text_is_refused_with_its_name(tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_bytes(b'{"headway_trace":1}\n\xff\xfe\x00\n')
    with pytest.raises(FormatError, match=r"bad\.jsonl"):
        list(read_trace(file))


@pytest.mark.parametrize("name", ["missing.jsonl", "."])
def test_a_file_that_cannot_be_opened_is_refused_with_its_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(FormatError) as caught:
        list(read_trace(tmp_path / name))
    assert str(tmp_path) in str(caught.value)


# Steps.


@pytest.mark.parametrize("async_scheduling", [0, 1])
@pytest.mark.parametrize("name", PRESETS)
def test_every_waiting_request_is_accounted_for_in_every_step(
    name: str, async_scheduling: int
) -> None:
    num_waiting = 0
    for line in lines_of(record(name, async_scheduling, queue="fcfs(2)", swap="swap"))[1:]:
        blocked = line.get("blocked", [])
        assert len({b[0] for b in blocked}) == len(blocked)
        behind = line.get("behind", ["", 0])[1]
        assert len(blocked) + behind == line["waiting"], line
        assert all(need > have >= 0 for _, _, need, have in blocked)
        num_waiting += line["waiting"]
    assert num_waiting


@pytest.mark.parametrize("name", ["headway", "vllm", "minivllm"])
def test_a_trace_tells_everyones_story(name: str) -> None:
    first, *steps = lines_of(record(name, headroom="watermark(0.0)"))
    assert [line["step"] for line in steps] == list(range(len(steps)))
    added = [asked["id"] for line in steps for asked in line.get("added", ())]
    ended = [end["id"] for line in steps for end in line.get("finished", ())]
    admitted = [a[0] for line in steps for a in line.get("admitted", ()) if not a[3]]
    assert len(added) == len(set(added)) and sorted(added) == sorted(ended) == sorted(admitted)
    assert all(line["start"] <= line["end"] for line in steps)
    assert all(line["t"] <= line["start"] for line in steps)
    resumed = [a for line in steps for a in line.get("admitted", ()) if a[3]]
    preempted = [p for line in steps for p in line.get("preempted", ())]
    assert len(resumed) == len(preempted) > 0
    assert first["config"]["num_blocks"] == SMALL["num_blocks"]


@settings(max_examples=30)
@given(st.dictionaries(st.sampled_from(["t", "start", "end", "step", "free", "x"]), st.integers()))
def test_decisions_leave_out_times_and_nothing_else(line: Line) -> None:
    kept = decisions(line)
    assert set(line) - set(kept) == set(line) & TIMES == set(line) & {"t", "start", "end"}
    assert all(kept[key] == line[key] for key in kept)
