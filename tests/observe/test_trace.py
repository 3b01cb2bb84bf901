"""A trace reads back as it was written, and each step gives a reason for every waiting request."""

from __future__ import annotations

import io
import json
from array import array
from collections.abc import Sequence
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
)
from headway.plan import Plan, StepEvents, StepReport, StepResult
from headway.record.packing import _pack_few, _pack_many, num_packed, pack_tokens, unpack_tokens
from headway.request import Request, RequestParams
from headway.scheduler import PRESETS, preset
from headway.scheduler.policies.presets import describe

TOKENS = st.integers(0, (1 << 31) - 1)
RUN = st.tuples(st.integers(0, 1 << 30), st.integers(1, 9), st.integers(0, 2))
WORKLOAD = (
    "requests=24,arrivals=poisson(300),prompt=uniform(3,40),output=uniform(1,20),max_tokens=24,"
    "prefix=2x16@0.5,n=2,clients=3,priorities=2,slack=uniform(0.01,0.2),seed=5"
)
SMALL = {
    "block_size": 4, "num_blocks": 40, "max_num_seqs": 6, "max_num_batched_tokens": 64,
    "num_host_blocks": 20,
}  # fmt: skip


def record(name: str = "headway", async_scheduling: int = 0, **changes: Any) -> str:
    """The trace of a small run with many waiting requests."""
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
def test_runs_of_tokens_survive_packing(pieces: list[tuple[int, int, int]]) -> None:
    tokens = spread(pieces)
    packed = json.loads(json.dumps(pack_tokens(tokens)))
    assert unpack_tokens(packed) == tokens and num_packed(packed) == len(tokens)


@given(st.lists(TOKENS, max_size=30) | st.lists(st.integers(0, 3), max_size=30))
def test_any_tokens_survive_packing(tokens: list[int]) -> None:
    packed = json.loads(json.dumps(pack_tokens(array("i", tokens))))
    assert unpack_tokens(packed).tolist() == tokens and num_packed(packed) == len(tokens)


@given(st.lists(RUN, max_size=8).map(spread) | st.lists(st.integers(0, 3), max_size=30))
def test_few_and_many_tokens_are_packed_alike(tokens: Sequence[int]) -> None:
    assert _pack_few(tokens) == _pack_many(array("i", tokens))


def test_the_largest_and_smallest_ids_do_not_form_a_run() -> None:
    for tokens in ([-(1 << 31), (1 << 31) - 1, -(1 << 31)], [(1 << 31) - 1, -(1 << 31), 0, 1, 2]):
        assert unpack_tokens(pack_tokens(array("i", tokens))).tolist() == tokens


def test_a_long_run_is_one_entry() -> None:
    assert pack_tokens(array("i", range(100, 5000))) == [[100, 4900, 1]]
    assert pack_tokens(array("i", [7] * 5000)) == [[7, 5000, 0]]
    assert pack_tokens(array("i", [1, 2, 9, 9, 9, 4, 5, 6])) == [1, 2, [9, 3, 0], [4, 3, 1]]
    assert pack_tokens(array("i")) == []


# Requests.


PARAMS = st.builds(
    RequestParams,
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
def test_a_described_request_reads_back_as_the_same_request(
    params: RequestParams, prompt: list[int], arrival: float, has_parent: bool
) -> None:
    parent = Request("parent", prompt, params, arrival=arrival)
    request = Request("r", prompt, params, arrival=arrival, parent=parent if has_parent else None)
    again = request_of(json.loads(json.dumps(describe_request(request))), {"parent": parent})
    assert (again.id, again.prompt, again.arrival) == (request.id, request.prompt, arrival)
    assert again.stops == request.stops and again.parent is request.parent
    for field in (
        "max_tokens", "min_tokens", "priority", "client", "deadline", "salt", "reads_cache",
    ):  # fmt: skip
        assert getattr(again.params, field) == getattr(params, field), field
    assert describe_request(again) == describe_request(request)


# Files.


def test_the_reader_returns_what_the_writer_wrote(tmp_path: Path) -> None:
    config, file = preset(), tmp_path / "a.jsonl"
    requests = [Request(str(i), [1, 2, 3, i], RequestParams()) for i in range(3)]
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


HEADER = '{"headway_trace":2,"config":{},"async_scheduling":0}\n'
STEP = '{"step":0,"t":0,"start":0,"end":0,"running":0,"waiting":0,"free":0,"decodes":0}\n'


BAD_FILES = {
    "": None,
    "nonsense\n": "1: not JSON",
    "[1]\n": "1: not a Headway trace",
    '{"step":0}\n': "1: not a Headway trace",
    '{"headway_trace":99}\n': "1: trace version 99",
    '{"headway_trace":1,"config":{},"async_scheduling":0}\n': "1: trace version 1",
    HEADER + '{"step":0\n': "2: not JSON",
    HEADER + '{"a":0}\n': "2: not a step",
    HEADER + STEP + "7\n": "3: not a step",
    HEADER + "\n": "2: not JSON",
    '{"headway_trace":2}\n': "1: the header needs",
}


@pytest.mark.parametrize("text", BAD_FILES)
def test_the_error_for_a_malformed_file_names_file_and_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(text, encoding="utf-8")
    problem = BAD_FILES[text]
    with pytest.raises(FormatError) as caught:
        list(read_trace(file))
    assert str(file) in str(caught.value)
    assert problem is None or f"{file}:{problem}" in str(caught.value)


def test_the_error_for_an_older_version_gives_both_versions_and_the_remedy(tmp_path: Path) -> None:
    file = tmp_path / "old.jsonl"
    file.write_text(HEADER.replace(":2,", ":1,"), encoding="utf-8")
    with pytest.raises(FormatError, match=r"version 1 .*version 2; record .* again"):
        list(read_trace(file))


def test_the_error_for_a_binary_file_names_it(tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_bytes(b'{"headway_trace":2}\n\xff\xfe\x00\n')
    with pytest.raises(FormatError, match=r"bad\.jsonl"):
        list(read_trace(file))


@pytest.mark.parametrize("name", ["missing.jsonl", "."])
def test_the_error_for_an_unreadable_file_names_it(tmp_path: Path, name: str) -> None:
    with pytest.raises(FormatError) as caught:
        list(read_trace(tmp_path / name))
    assert str(tmp_path) in str(caught.value)


# Steps.


@pytest.mark.parametrize("async_scheduling", [0, 1])
@pytest.mark.parametrize("name", PRESETS)
def test_every_step_gives_a_reason_for_every_waiting_request(
    name: str, async_scheduling: int
) -> None:
    num_waiting = 0
    for line in lines_of(record(name, async_scheduling, queue="fcfs(2)", swap="swap"))[1:]:
        blocked = line.get("blocked", [])
        assert len({b[0] for b in blocked}) == len(blocked)
        num_rest = line.get("not_considered", ["", 0])[1]
        assert len(blocked) + num_rest == line["waiting"], line
        assert all(need > have >= 0 for _, _, need, have in blocked)
        num_waiting += line["waiting"]
    assert num_waiting


@pytest.mark.parametrize("name", ["headway", "vllm", "minivllm"])
def test_a_trace_contains_every_request_from_arrival_to_end(name: str) -> None:
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
def test_decisions_leave_out_only_times(line: Line) -> None:
    kept = decisions(line)
    assert set(line) - set(kept) == set(line) & TIMES == set(line) & {"t", "start", "end"}
    assert all(kept[key] == line[key] for key in kept)
