"""Laws of workload files: reading returns what was written; prefixes are shared as described."""

from __future__ import annotations

import dataclasses
import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from bench.lab.simulate import ideal_cache_hits, measure_hits
from headway.errors import ConfigError, FormatError
from headway.executor.simulated import Histogram, Independent
from headway.lab.cost import load_profile
from headway.lab.simulate import simulate
from headway.lab.workload.files import load_workload, read_workload, write_workload
from headway.lab.workload.request import EOS, FIRST_TOKEN, LAST_TOKEN, TokenSpace, WorkloadRequest
from headway.lab.workload.synthetic import parse_synthetic
from headway.record.packing import num_packed
from headway.scheduler import preset
from tests.support.journals import Lines

OWN = {"arrival": 0, "prompt": 3, "output": 2}


def save(folder: Path, name: str, *lines: str | dict[str, Any]) -> Path:
    path = folder / name
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def mooncake(*rows: tuple[int, list[int]]) -> list[dict[str, Any]]:
    return [
        {"arrival_s": float(i), "prompt_tokens": n, "output_tokens": 5, "hash_ids": ids}
        for i, (n, ids) in enumerate(rows)
    ]


def test_both_spellings_of_azure_files_give_the_same_requests(tmp_path: Path) -> None:
    ours = save(tmp_path, "a.csv", "arrival_s,prompt_tokens,output_tokens", "0.0,374,44", "4.5,6,7")
    dates = ["2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:51.1805900,6,7"]
    theirs = save(tmp_path, "b.csv", "TIMESTAMP,ContextTokens,GeneratedTokens", *dates)
    assert read_workload(ours) == read_workload(theirs)
    found = [(r.arrival, r.num_prompt, r.num_output) for r in read_workload(ours)]
    assert found == [(0.0, 374, 44), (4.5, 6, 7)]


def test_dates_out_of_order_count_from_the_earliest(tmp_path: Path) -> None:
    dates = ["2023-11-16 18:00:02,1,1", "2023-11-16 18:00:00,2,1", "2023-11-16 18:00:03,3,1"]
    path = save(tmp_path, "a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens", *dates)
    assert [(r.arrival, r.num_prompt) for r in read_workload(path)] == [(0, 2), (2, 1), (3, 3)]


def test_a_client_column_names_the_client(tmp_path: Path) -> None:
    path = save(tmp_path, "a.csv", "arrival_s,client_id,prompt_tokens,output_tokens", "0,07,2,1")
    assert [r.client for r in read_workload(path)] == ["07"]


def test_both_spellings_of_mooncake_files_give_the_same_requests(tmp_path: Path) -> None:
    ours = save(tmp_path, "a.jsonl", *mooncake((600, [0, 1]), (512, [0])))
    theirs = save(
        tmp_path, "b.jsonl",
        {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]},
        {"timestamp": 1000, "input_length": 512, "output_length": 5, "hash_ids": [0]},
    )  # fmt: skip
    assert read_workload(ours) == read_workload(theirs)


def test_equal_hash_ids_give_equal_tokens_and_different_ones_share_none(tmp_path: Path) -> None:
    rows = mooncake((1300, [7, 8, 9]), (1100, [7, 8, 5]), (1024, [3, 8]), (1536, [7, 8, 9]))
    a, b, c, d = (r.prompt() for r in read_workload(save(tmp_path, "a.jsonl", *rows)))
    assert [len(t) for t in (a, b, c, d)] == [1300, 1100, 1024, 1536]
    assert a[:1024] == b[:1024] and not set(a[1024:]) & set(b[1024:])
    assert a[512:1024] == c[512:] and not set(a) & set(c[:512])
    assert d[:1300] == a  # a partial block is the beginning of the complete one


def test_ideal_cache_hits_count_leading_blocks_of_earlier_prompts(tmp_path: Path) -> None:
    rows = mooncake((1300, [7, 8, 9]), (1100, [7, 8, 5]), (1024, [3, 8]), (1300, [7, 8, 9]))
    hits = ideal_cache_hits(save(tmp_path, "a.jsonl", *rows))
    assert (hits.num_blocks, hits.num_hits) == (11, 0 + 2 + 0 + 3)
    assert hits.ratio == 5 / 11


def test_rejected_requests_do_not_count_in_the_hit_ratio(tmp_path: Path) -> None:
    """The last block of the third line and the fourth line occur only in the rejected request."""
    too_long = 400  # blocks; the limit of the profile's model is 256
    long = [0, 1, *range(100, 98 + too_long)]
    rows = mooncake((1024, [0, 1]), (too_long * 512, long), (1536, [0, 1, 100]), (512, [101]))
    path = save(tmp_path, "a.jsonl", *rows)
    assert ideal_cache_hits(path, skip={"1"}) == (2 + 3 + 1, 2)
    found = measure_hits(str(path))
    assert found["rejected"] == 1 and found["requests"] == 3 and found["blocks"] == 6
    assert found["hit_ratio"] == found["ideal_hit_ratio"] == round(2 / 6, 5)


def test_prompts_given_as_lengths_share_no_token(tmp_path: Path) -> None:
    rows = [{**OWN, "prompt": n} for n in (5, 1, 700, 5)]
    requests = read_workload(save(tmp_path, "a.jsonl", *rows))
    tokens = [t for r in requests for t in r.prompt()]
    assert len(set(tokens)) == len(tokens) == 711
    assert EOS not in tokens and min(tokens) >= FIRST_TOKEN and max(tokens) <= LAST_TOKEN


def test_a_named_prefix_is_the_same_in_all_requests(tmp_path: Path) -> None:
    named = [("x", 4), ("y", 4), ("x", 9), ("x", 2)]
    rows = [{**OWN, "prefix": name, "prefix_tokens": count} for name, count in named]
    a, b, c, d = (r.prompt() for r in read_workload(save(tmp_path, "a.jsonl", *rows)))
    assert a[:4] == c[:4] and c[:2] == d[:2] and not set(a) & set(b)
    assert [len(t) for t in (a, b, c, d)] == [7, 7, 12, 5]
    assert len({t[-3:].tobytes() for t in (a, b, c, d)}) == 4


def test_token_ids_are_kept_and_runs_expanded(tmp_path: Path) -> None:
    path = save(tmp_path, "a.jsonl", {**OWN, "prompt": [5, 0, [10, 3, 1], [9, 2, 0], 1]})
    (request,) = read_workload(path)
    assert request.prompt() == array("i", [5, 0, 10, 11, 12, 9, 9, 1]) and request.num_prompt == 8


@pytest.mark.parametrize("text", [
    "requests=40,arrivals=poisson(3),prompt=uniform(1,50),prefix=3x20@0.5",
    "requests=40,arrivals=bursty(3,4),clients=5,priorities=3,slack=uniform(0.5,2),n=2",
    "requests=40,output=lognormal(50,1),max_tokens=80",
    "requests=20,accept=uniform(0.1,0.9),seed=7",
    "requests=2,accept=hist(0.25,1e-3,3)",
])  # fmt: skip
def test_written_requests_are_read_back(tmp_path: Path, text: str) -> None:
    requests = parse_synthetic(text).generate()
    write_workload(tmp_path / "a.jsonl", requests)
    assert read_workload(tmp_path / "a.jsonl") == requests


def test_written_token_ids_are_read_back(tmp_path: Path) -> None:
    prompt = array("i", [4, 4, 7, EOS])
    request = WorkloadRequest(
        id="a/b", pieces=(range(50, 60), prompt), num_output=1, max_tokens=9, deadline=0.0
    )
    write_workload(tmp_path / "a.jsonl", [request])
    assert read_workload(tmp_path / "a.jsonl") == [request]


def test_requests_are_sorted_limited_and_sped_up(tmp_path: Path) -> None:
    rows = [{**OWN, "arrival": t, "deadline": t + 3} for t in (4, 2, 6, 0)]
    path = save(tmp_path, "a.jsonl", *rows)
    assert [r.arrival for r in read_workload(path)] == [0, 2, 4, 6]
    found = [(r.arrival, r.deadline) for r in read_workload(path, limit=2, speed=4)]
    assert found == [(0.5, 3.5), (1.0, 4.0)]
    for bad in ({"limit": 0}, {"speed": 0.0}, {"speed": float("nan")}):
        with pytest.raises(ConfigError):
            read_workload(path, **bad)


def test_a_request_has_an_end_token_only_if_it_ends_early(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {**OWN, "max_tokens": 2},
        {**OWN, "max_tokens": 3, "client": "c", "priority": -1},
    ]
    exact, early = (r.request(start=10.0) for r in read_workload(save(tmp_path, "a.jsonl", *rows)))
    assert exact.stops == frozenset() and early.stops == {EOS}
    assert (early.arrival, early.params.client, early.params.priority) == (10.0, "c", -1)
    assert early.num_prompt == 3 and early.params.max_tokens == 3


def test_max_tokens_is_never_below_the_output(tmp_path: Path) -> None:
    path = save(tmp_path, "a.jsonl", *({**OWN, "output": n} for n in (2, 200)))
    assert [r.max_tokens for r in read_workload(path)] == [2, 200]
    assert [r.max_tokens for r in read_workload(path, max_tokens=64)] == [64, 200]


HEADER = "arrival_s,prompt_tokens,output_tokens"
CSV = [
    ([HEADER, "0,1,1", "1,2"], "a.csv:3: .*3 columns.* 2"),
    ([HEADER, "0,x,1"], "a.csv:2: prompt_tokens .*'x'"),
    ([HEADER, "0,1.5,1"], "prompt_tokens .* not 1.5"),
    ([HEADER, "0,0,1"], "prompt_tokens .* 1, not"),
    ([HEADER, "0,1,-3"], "output_tokens .* 1, not"),
    ([HEADER, "-1,1,1"], "arrival_s .* 0 and"),
    ([HEADER, "9e99,1,1"], "arrival_s .* 0 and"),
    ([HEADER, "nan,1,1"], "arrival_s .* 0 and"),
    (["arrival_s,output_tokens", "0,1"], "a.csv:1: .*column prompt or"),
    (["TIMESTAMP,ContextTokens,GeneratedTokens", "noon,1,1"], "TIMESTAMP .*noon"),
    ([HEADER], "no requests"),
]
JSONL: list[tuple[Any, str]] = [
    ([OWN, "{"], "a.jsonl:2: not JSON"),
    (["[1]"], "must be a JSON object"),
    ([{"arrival": 0, "output": 1}], "field prompt or prompt_tok"),
    ([{**OWN, "prompt": 0}], "prompt .* 1, not"),
    ([{**OWN, "prompt": []}], "prompt .* empty"),
    ([{**OWN, "prompt": True}], "prompt .* whole number"),
    ([{**OWN, "prompt": [1, -1]}], "token id .*(0|2147483647), not"),
    ([{**OWN, "prompt": [1 << 31]}], "token id .*(0|2147483647), not"),
    ([{**OWN, "prompt": [[1, 2]]}], "run of tokens"),
    ([{**OWN, "max_tokens": 1}], r"output \(2\).*max_tokens \(1\)"),
    ([{**OWN, "prefix": "x"}], "field prefix_tokens"),
    ([{**OWN, "prefix_tokens": 4}], "field prefix"),
    ([{**OWN, "colour": 1}], "'colour'; known: arrival"),
    ([{**OWN, "client": [1]}], "client must be a string"),
    ([{**OWN, "id": "a"}, {**OWN, "id": "a"}], "a.jsonl:2: id 'a'"),
    (mooncake((600, [1])), "600 .* need 2 hash_ids"),
    (mooncake((6, [[1]])), "hash_ids must be a list"),  # type: ignore[list-item]
]


@pytest.mark.parametrize(
    ("name", "lines", "problem"),
    [("a.csv", *case) for case in CSV] + [("a.jsonl", *case) for case in JSONL],
)
def test_an_invalid_file_is_rejected_with_its_line(
    tmp_path: Path, name: str, lines: list[Any], problem: str
) -> None:
    with pytest.raises(FormatError, match=problem):
        read_workload(save(tmp_path, name, *lines))


def test_an_unreadable_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "latin.csv").write_bytes(HEADER.encode() + b"\n\xff,1,1\n")
    cases = {"none.csv": "No such file", "a.txt": "known: .csv, .jsonl", "latin.csv": "UTF-8"}
    for name, problem in cases.items():
        with pytest.raises(FormatError, match=problem):
            read_workload(tmp_path / name)


def test_a_token_space_starts_again_within_32_bits() -> None:
    space = TokenSpace()
    runs = [space.take(100_000_000) for _ in range(60)]
    assert all(run.start >= FIRST_TOKEN and run.stop - 1 <= LAST_TOKEN for run in runs)
    assert len({run.start for run in runs}) == len(runs)


TRACED = (
    "requests=30,arrivals=poisson(200),prompt=uniform(5,60),output=uniform(2,30),max_tokens=40,"
    "prefix=2x32@0.5,clients=3,priorities=3,slack=uniform(0.1,2),n=2"
)
TRACE_HEADER = {
    "headway_trace": 3, "async_scheduling": False,
    "config": {
        "max_model_len": 100, "num_blocks": 3, "block_size": 8, "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
    },
}  # fmt: skip
ENTRY = {"id": "a", "arrival": 0.0, "prompt": [5, 6], "max_tokens": None, "limit": 25}


def added(*entries: object) -> dict[str, Any]:
    return {"event": "added", "t": 0.0, "requests": entries}


def finished(**outputs: object) -> dict[str, Any]:
    """The end of a step that ends requests with these packed outputs."""
    ends = [{"id": id, "finish_reason": "stop", "output": each} for id, each in outputs.items()]
    return {"event": "completed", "step": 0, "start": 0.0, "end": 0.0, "finished": ends}


def recorded(text: str | list[WorkloadRequest], *, redact: bool = False) -> list[str]:
    """The trace of a simulated run."""
    jobs = parse_synthetic(text).generate() if isinstance(text, str) else text
    config = preset("headway", num_blocks=60, max_num_seqs=8, queue="priority")
    lines, profile = Lines(), load_profile("qwen3-0.6b-h200")
    assert not simulate(jobs, config, profile, trace=lines, trace_redact=redact).rejected
    return [line.decode().rstrip() for line in lines]


def test_a_trace_of_a_simulation_is_its_workload(tmp_path: Path) -> None:
    """The recorded requests, simulated again, give the same decisions."""
    trace = recorded(TRACED)
    found = read_workload(save(tmp_path, "a.jsonl", *trace))
    assert found == [
        dataclasses.replace(job, pieces=mine.pieces)
        for job, mine in zip(parse_synthetic(TRACED).generate(), found, strict=True)
    ]
    assert recorded(found) == trace
    assert any(job.deadline and job.client and job.priority for job in found)


def test_a_trace_with_drafts_says_how_often_they_were_right(tmp_path: Path) -> None:
    lines, profile = Lines(), load_profile("qwen3-0.6b-h200")
    jobs = parse_synthetic("requests=20,prompt=30,output=100,accept=0.4").generate()
    simulate(jobs, preset(draft="fixed(3)"), profile, trace=lines)
    path = save(tmp_path, "a.jsonl", *(line.decode().rstrip() for line in lines))
    shares = {
        job.accept.share for job in read_workload(path) if isinstance(job.accept, Independent)
    }
    (share,) = shares
    assert share == pytest.approx(0.4, abs=0.03)


def test_the_given_acceptance_is_for_requests_without_one(tmp_path: Path) -> None:
    first = {"arrival": 0, "prompt": 5, "output": 9}
    rows = (first, {**first, "accept": 0.25, "seed": 4}, {**first, "accept": "hist(1,2)"})
    path = str(save(tmp_path, "a.jsonl", *map(json.dumps, rows)))
    found = [job.accept for job in load_workload(path, None, 1.0, None, "0.5")]
    assert found == [Independent(0.5), Independent(0.25, 4), Histogram((1.0, 2.0))]
    with pytest.raises(ConfigError, match="field accept: 'requests=3,accept=0.5'"):
        load_workload("requests=3", None, 1.0, None, "0.5")


def test_a_redacted_trace_has_prompts_of_the_same_length_without_prefixes(tmp_path: Path) -> None:
    trace = recorded(TRACED, redact=True)
    found, jobs = read_workload(save(tmp_path, "a.jsonl", *trace)), parse_synthetic(TRACED)
    lengths = [(job.num_prompt, job.num_output, job.n) for job in jobs.generate()]
    assert [(job.num_prompt, job.num_output, job.n) for job in found] == lengths
    assert len({job.prompt()[0] for job in found}) == len(found)


def test_ids_that_repeat_requests_without_limit_and_open_requests_are_read(tmp_path: Path) -> None:
    entry = {**ENTRY, "arrival": 1.0}
    again = {**entry, "arrival": 2.0, "max_tokens": 9}
    path = save(
        tmp_path, "a.jsonl", TRACE_HEADER, added(entry, {**entry, "id": "b", "parent": "a"}),
        finished(a=[[7, 3, 0]], b=[[7, 6, 0]]), added(again),
    )  # fmt: skip
    first, second = read_workload(path)
    assert (first.num_output, first.max_tokens, first.n) == (4, 3 * 8 + 1 - 2, 2)
    assert (second.num_output, second.max_tokens, second.arrival) == (9, 9, 2.0)
    assert first.id != second.id


@pytest.mark.parametrize("is_redacted", [False, True])
def test_a_continued_request_generates_only_the_rest(tmp_path: Path, is_redacted: bool) -> None:
    """It has 40 prompt tokens and 5 of 12 output tokens, of at most 20, from another engine."""
    prompt, before, output = [[100, 40, 1]], [7, 8, [9, 3, 0]], [7, 8, [9, 3, 0], [1, 7, 0]]
    packed: Any = num_packed if is_redacted else list
    entry = {**ENTRY, "prompt": packed(prompt), "max_tokens": 20, "output": packed(before)}
    path = save(tmp_path, "a.jsonl", TRACE_HEADER, added(entry), finished(a=packed(output)))
    (found,) = read_workload(path)
    assert (found.num_prompt, found.num_output, found.max_tokens) == (45, 7, 15)
    assert is_redacted or list(found.prompt()[-5:]) == [7, 8, 9, 9, 9]


@pytest.mark.parametrize(
    "entry",
    [
        {"id": "a"}, {**ENTRY, "arrival": -1}, {**ENTRY, "prompt": [[1, 2]]},
        {**ENTRY, "parent": "b"}, 7,
    ],
)  # fmt: skip
def test_an_incomplete_trace_is_reported_with_its_name(tmp_path: Path, entry: object) -> None:
    path = save(tmp_path, "a.jsonl", TRACE_HEADER, added(entry))
    with pytest.raises(FormatError, match=r"a\.jsonl:"):
        read_workload(path)
