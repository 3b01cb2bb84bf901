"""A journal file reads back as it was written; each plan gives a reason for every waiting request."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway import PRESETS, Plan, StepResult, preset
from headway.errors import FormatError
from headway.events import Added, Completed, Event, Planned
from headway.record.diff import TIMES, decisions
from headway.record.lines import VERSION, AddedLine, CompletedLine, HeaderLine, Line, PlannedLine
from headway.record.packing import _pack_few, _pack_many, num_packed, pack_tokens, unpack_tokens
from headway.record.reader import EventReader, complete, events_of, parse_journal, read_journal
from headway.record.writer import JournalWriter, LineMaker, header, open_journal
from headway.request import Request, RequestParams
from headway.scheduler.policies.presets import describe
from tests.support.journals import all_ends, of_kind, record

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
    assert pack_tokens(array("i", range(100, 5000))) == [(100, 4900, 1)]
    assert pack_tokens(array("i", [7] * 5000)) == [(7, 5000, 0)]
    assert pack_tokens(array("i", [1, 2, 9, 9, 9, 4, 5, 6])) == [1, 2, (9, 3, 0), (4, 3, 1)]
    assert pack_tokens(array("i")) == []


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
    prediction=st.none() | st.lists(TOKENS, max_size=5).map(lambda tokens: array("i", tokens)),
)


@given(PARAMS, st.lists(TOKENS, min_size=1, max_size=9), st.floats(0, 1e6), st.booleans())
def test_a_described_request_reads_back_as_the_same_request(
    params: RequestParams, prompt: list[int], arrival: float, has_parent: bool
) -> None:
    parent = Request("parent", prompt, params, arrival=arrival)
    request = Request("r", prompt, params, arrival=arrival, parent=parent if has_parent else None)
    added = [parent, request] if has_parent else [request]
    text = msgspec.json.encode(LineMaker().line(Added(added)))
    line = msgspec.json.decode(text, type=Line)
    event = EventReader(header(preset(), False)).event(line)
    assert isinstance(event, Added) and LineMaker().line(event) == line
    again = event.requests[-1]
    assert (again.id, again.prompt, again.arrival) == (request.id, request.prompt, arrival)
    assert again.stops == request.stops and (again.parent is None) == (request.parent is None)
    assert again.parent is None or again.parent is event.requests[0]
    for field in (
        "max_tokens", "min_tokens", "priority", "client", "deadline", "salt", "reads_cache",
        "prediction",
    ):  # fmt: skip
        assert getattr(again.params, field) == getattr(params, field), field


def test_the_reader_returns_what_the_writer_wrote(tmp_path: Path) -> None:
    config, file = preset(), tmp_path / "a.jsonl"
    requests = [Request(str(i), [1, 2, 3, i], RequestParams(max_tokens=9)) for i in range(3)]
    planned = Planned(Plan(1, decodes=requests))
    events: list[Event] = [
        Added(requests, 0.25), Planned(Plan(0), num_waiting=3), planned,
        Completed(planned, StepResult(started=1.0, ended=1.5), []),
    ]  # fmt: skip
    head = header(config, True, profile="none")
    with open_journal(file) as out:
        write = JournalWriter(out, head)
        for event in events:
            write(event)
    first, *lines = read_journal(file)
    assert first == head == HeaderLine(
        headway_trace=VERSION, config=describe(config), async_scheduling=True, profile="none"
    )  # fmt: skip
    assert lines == [LineMaker().line(event) for event in events]


SIZES = (
    '"max_num_seqs":4,"max_num_batched_tokens":64,"block_size":16,"num_blocks":9,"max_model_len":99'
)
HEADER = f'{{"headway_trace":3,"config":{{{SIZES}}},"async_scheduling":false}}\n'
STEP = '{"event":"completed","step":0,"start":0,"end":0}\n'


BAD_FILES = {
    "": "1: not a Headway trace: the file is empty",
    "nonsense\n": "1: not a Headway trace",
    "[1]\n": "1: not a Headway trace",
    '{"step":0}\n': "1: not a Headway trace",
    '{"headway_trace":99}\n': "1: trace version 99",
    '{"headway_trace":2,"config":{},"async_scheduling":0}\n': "1: trace version 2",
    HEADER + '{"step":0\n': "2: not an event",
    HEADER + '{"step":0': "2: the file ends within this line",
    HEADER + '{"a":0}\n': "2: not an event",
    HEADER + '{"event":"other"}\n': "2: not an event: Invalid value 'other'",
    HEADER + '{"event":"completed","step":0}\n': "2: not an event: Object missing required field",
    HEADER + STEP + "7\n": "3: not an event",
    HEADER + "\n": "2: not an event",
    '{"headway_trace":3}\n': "1: not a Headway trace: Object missing required field `config`",
}


@pytest.mark.parametrize("text", BAD_FILES)
def test_the_error_for_a_malformed_file_names_file_and_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(FormatError) as caught:
        list(read_journal(file))
    assert f"{file}:{BAD_FILES[text]}" in str(caught.value)


@pytest.mark.parametrize(("size", "token"), [(16, 3_000_000_000), (0, 7)])
def test_a_number_out_of_range_makes_a_file_malformed(size: int, token: int) -> None:
    """Such numbers raise OverflowError and ZeroDivisionError."""
    header = HEADER.replace('"block_size":16', f'"block_size":{size}')
    request = f'{{"id":"a","arrival":0,"prompt":[{token}],"max_tokens":3,"limit":4}}'
    lines = [
        header, f'{{"event":"added","t":0,"requests":[{request}]}}\n',
        '{"event":"planned","step":0,"t":0,"running":1,"waiting":0,"free":1,'
        '"admitted":[["a",0,0,false]],"chunks":[["a",0,1,true]]}\n',
        STEP,
        '{"event":"planned","step":1,"t":0,"running":1,"waiting":0,"free":1,"decodes":1}\n',
    ]  # fmt: skip
    with pytest.raises(FormatError, match="not a complete Headway trace"), complete("x"):
        list(events_of(parse_journal("x", [line.encode() for line in lines])))


def test_the_error_for_an_older_version_gives_both_versions_and_the_remedy(tmp_path: Path) -> None:
    file = tmp_path / "old.jsonl"
    file.write_text(HEADER.replace(":3,", ":2,"), encoding="utf-8")
    with pytest.raises(FormatError, match=r"version 2 .*version 3; record .* again"):
        list(read_journal(file))


def test_the_error_for_a_binary_file_names_it(tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_bytes(b'{"headway_trace":3}\n\xff\xfe\x00\n')
    with pytest.raises(FormatError, match=r"bad\.jsonl"):
        list(read_journal(file))


@pytest.mark.parametrize("name", ["missing.jsonl", "."])
def test_the_error_for_an_unreadable_file_names_it(tmp_path: Path, name: str) -> None:
    with pytest.raises(FormatError) as caught:
        list(read_journal(tmp_path / name))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("async_scheduling", [0, 1])
@pytest.mark.parametrize("name", PRESETS)
def test_every_step_gives_a_reason_for_every_waiting_request(
    name: str, async_scheduling: int
) -> None:
    num_waiting = 0
    journal = record(WORKLOAD, name, async_scheduling, **SMALL, queue="fcfs(2)", swap="swap")
    for line in of_kind(PlannedLine, journal):
        assert len({id for id, *_ in line.blocked}) == len(line.blocked)
        num_rest = line.not_considered[1] if line.not_considered else 0
        assert len(line.blocked) + num_rest == line.waiting, line
        assert all(need > have >= 0 for _, _, need, have in line.blocked)
        num_waiting += line.waiting
    assert num_waiting


@pytest.mark.parametrize("name", ["headway", "vllm", "minivllm"])
def test_a_trace_contains_every_request_from_arrival_to_end(name: str) -> None:
    journal = record(WORKLOAD, name, **SMALL, headroom="watermark(0.0)")
    steps, plans = of_kind(CompletedLine, journal), of_kind(PlannedLine, journal)
    assert [line.step for line in steps] == list(range(len(steps)))
    assert [line.step for line in plans] == list(range(len(steps)))
    added = [asked.id for line in of_kind(AddedLine, journal) for asked in line.requests]
    ended = [end.id for end in all_ends(journal)]
    admissions = [each for line in plans for each in line.admitted]
    admitted = [id for id, *_, is_resume in admissions if not is_resume]
    assert len(added) == len(set(added)) and sorted(added) == sorted(ended) == sorted(admitted)
    assert all(line.start <= line.end for line in steps)
    assert all(a.t <= b.start for a, b in zip(plans, steps, strict=True))
    num_preempted = sum(len(line.preempted) for line in plans)
    assert len(admissions) - len(admitted) == num_preempted > 0
    assert isinstance(journal[0], HeaderLine)
    assert journal[0].config["num_blocks"] == SMALL["num_blocks"]


def test_decisions_leave_out_only_times() -> None:
    for line in record(WORKLOAD, **SMALL)[1:]:
        assert not isinstance(line, HeaderLine)
        all_, kept = msgspec.to_builtins(line), decisions(line)
        assert set(all_) - set(kept) == set(all_) & TIMES
        assert all(kept[key] == all_[key] for key in kept)
    assert {"t", "start", "end"} <= TIMES
