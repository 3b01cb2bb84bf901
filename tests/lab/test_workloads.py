"""Laws of workloads: what is read is what was written, and tokens are shared where they should be.

Files are made here; no trace of the outside world is needed.
"""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from bench.trace_files import reuse
from headway.errors import ConfigError, FormatError
from headway.lab.workload.files import EOS, Job, TokenSpace, block_reuse, read_jobs, write_jobs
from headway.lab.workload.jobs import FIRST_TOKEN, LAST_TOKEN
from headway.lab.workload.synthetic import parse_synthetic

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


def test_both_spellings_of_azure_give_the_same_jobs(tmp_path: Path) -> None:
    ours = save(tmp_path, "a.csv", "arrival_s,prompt_tokens,output_tokens", "0.0,374,44", "4.5,6,7")
    dates = ["2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:51.1805900,6,7"]
    theirs = save(tmp_path, "b.csv", "TIMESTAMP,ContextTokens,GeneratedTokens", *dates)
    assert read_jobs(ours) == read_jobs(theirs)
    assert [(j.arrival, j.num_prompt, j.num_output) for j in read_jobs(ours)] == [
        (0.0, 374, 44),
        (4.5, 6, 7),
    ]


def test_dates_out_of_order_count_from_the_earliest(tmp_path: Path) -> None:
    dates = ["2023-11-16 18:00:02,1,1", "2023-11-16 18:00:00,2,1", "2023-11-16 18:00:03,3,1"]
    path = save(tmp_path, "a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens", *dates)
    assert [(j.arrival, j.num_prompt) for j in read_jobs(path)] == [(0, 2), (2, 1), (3, 3)]


def test_a_client_column_names_the_client(tmp_path: Path) -> None:
    path = save(tmp_path, "a.csv", "arrival_s,client_id,prompt_tokens,output_tokens", "0,07,2,1")
    assert [j.client for j in read_jobs(path)] == ["07"]


def test_both_spellings_of_mooncake_give_the_same_jobs(tmp_path: Path) -> None:
    ours = save(tmp_path, "a.jsonl", *mooncake((600, [0, 1]), (512, [0])))
    theirs = save(
        tmp_path, "b.jsonl",
        {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]},
        {"timestamp": 1000, "input_length": 512, "output_length": 5, "hash_ids": [0]},
    )  # fmt: skip
    assert read_jobs(ours) == read_jobs(theirs)


def test_equal_hash_ids_are_equal_tokens_and_others_share_none(tmp_path: Path) -> None:
    rows = mooncake((1300, [7, 8, 9]), (1100, [7, 8, 5]), (1024, [3, 8]), (1536, [7, 8, 9]))
    a, b, c, d = (j.prompt() for j in read_jobs(save(tmp_path, "a.jsonl", *rows)))
    assert [len(t) for t in (a, b, c, d)] == [1300, 1100, 1024, 1536]
    assert a[:1024] == b[:1024] and not set(a[1024:]) & set(b[1024:])
    assert a[512:1024] == c[512:] and not set(a) & set(c[:512])
    assert d[:1300] == a  # a cut block is the beginning of the whole one


def test_block_reuse_counts_leading_blocks_seen_before(tmp_path: Path) -> None:
    rows = mooncake((1300, [7, 8, 9]), (1100, [7, 8, 5]), (1024, [3, 8]), (1300, [7, 8, 9]))
    reuse = block_reuse(save(tmp_path, "a.jsonl", *rows))
    assert (reuse.num_blocks, reuse.num_hits) == (11, 0 + 2 + 0 + 3)
    assert reuse.share == 5 / 11


def test_rejected_requests_count_in_no_hit_ratio(tmp_path: Path) -> None:
    """The third line's last block and the fourth line are only in the request that is rejected."""
    too_long = 400  # blocks; the profile's model has room for 256
    long = [0, 1, *range(100, 98 + too_long)]
    rows = mooncake((1024, [0, 1]), (too_long * 512, long), (1536, [0, 1, 100]), (512, [101]))
    path = save(tmp_path, "a.jsonl", *rows)
    assert block_reuse(path, skip={"1"}) == (2 + 3 + 1, 2)
    found = reuse(str(path))
    assert found["rejected"] == 1 and found["requests"] == 3 and found["blocks"] == 6
    assert found["hit_ratio"] == found["trace_reuse"] == round(2 / 6, 5)


def test_prompts_given_as_lengths_share_no_token(tmp_path: Path) -> None:
    rows = [{**OWN, "prompt": n} for n in (5, 1, 700, 5)]
    jobs = read_jobs(save(tmp_path, "a.jsonl", *rows))
    tokens = [t for j in jobs for t in j.prompt()]
    assert len(set(tokens)) == len(tokens) == 711
    assert EOS not in tokens and min(tokens) >= FIRST_TOKEN and max(tokens) <= LAST_TOKEN


def test_a_prefix_is_the_same_for_all_who_name_it(tmp_path: Path) -> None:
    named = [("x", 4), ("y", 4), ("x", 9), ("x", 2)]
    rows = [{**OWN, "prefix": name, "prefix_tokens": count} for name, count in named]
    a, b, c, d = (j.prompt() for j in read_jobs(save(tmp_path, "a.jsonl", *rows)))
    assert a[:4] == c[:4] and c[:2] == d[:2] and not set(a) & set(b)
    assert [len(t) for t in (a, b, c, d)] == [7, 7, 12, 5]
    assert len({t[-3:].tobytes() for t in (a, b, c, d)}) == 4


def test_given_tokens_are_kept_and_runs_unpacked(tmp_path: Path) -> None:
    path = save(tmp_path, "a.jsonl", {**OWN, "prompt": [5, 0, [10, 3, 1], [9, 2, 0], 1]})
    (job,) = read_jobs(path)
    assert job.prompt() == array("i", [5, 0, 10, 11, 12, 9, 9, 1]) and job.num_prompt == 8


@pytest.mark.parametrize("text", [
    "requests=40,arrivals=poisson(3),prompt=uniform(1,50),prefix=3x20@0.5",
    "requests=40,arrivals=bursty(3,4),clients=5,priorities=3,slack=uniform(0.5,2),n=2",
    "requests=40,output=lognormal(50,1),max_tokens=80",
])  # fmt: skip
def test_jobs_written_and_read_are_the_same(tmp_path: Path, text: str) -> None:
    jobs = parse_synthetic(text).jobs()
    write_jobs(tmp_path / "a.jsonl", jobs)
    assert read_jobs(tmp_path / "a.jsonl") == jobs


def test_written_tokens_are_read_back(tmp_path: Path) -> None:
    prompt = array("i", [4, 4, 7, EOS])
    job = Job(id="a/b", pieces=(range(50, 60), prompt), num_output=1, max_tokens=9, deadline=0.0)
    write_jobs(tmp_path / "a.jsonl", [job])
    assert read_jobs(tmp_path / "a.jsonl") == [job]


def test_jobs_are_sorted_limited_and_sped_up(tmp_path: Path) -> None:
    rows = [{**OWN, "arrival": t, "deadline": t + 3} for t in (4, 2, 6, 0)]
    path = save(tmp_path, "a.jsonl", *rows)
    assert [j.arrival for j in read_jobs(path)] == [0, 2, 4, 6]
    assert [(j.arrival, j.deadline) for j in read_jobs(path, limit=2, speed=4)] == [
        (0.5, 3.5),
        (1.0, 4.0),
    ]
    for bad in ({"limit": 0}, {"speed": 0.0}, {"speed": float("nan")}):
        with pytest.raises(ConfigError):
            read_jobs(path, **bad)


def test_a_job_ends_by_eos_only_where_it_ends_early(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {**OWN, "max_tokens": 2},
        {**OWN, "max_tokens": 3, "client": "c", "priority": -1},
    ]
    exact, early = (j.request(start=10.0) for j in read_jobs(save(tmp_path, "a.jsonl", *rows)))
    assert exact.stops == frozenset() and early.stops == {EOS}
    assert (early.arrival, early.params.client, early.params.priority) == (10.0, "c", -1)
    assert early.num_prompt == 3 and early.params.max_tokens == 3


def test_what_users_allow_is_never_below_the_real_output(tmp_path: Path) -> None:
    path = save(tmp_path, "a.jsonl", *({**OWN, "output": n} for n in (2, 200)))
    assert [j.max_tokens for j in read_jobs(path)] == [2, 200]
    assert [j.max_tokens for j in read_jobs(path, max_tokens=64)] == [64, 200]


HEADER = "arrival_s,prompt_tokens,output_tokens"
CSV = [
    ([HEADER, "0,1,1", "1,2"], "a.csv:3: 3 columns expected, but there are 2"),
    ([HEADER, "0,x,1"], "a.csv:2: prompt_tokens must be a whole number, not 'x'"),
    ([HEADER, "0,1.5,1"], "prompt_tokens must be a whole number, not 1.5"),
    ([HEADER, "0,0,1"], "prompt_tokens must be from 1"),
    ([HEADER, "0,1,-3"], "output_tokens must be from 1"),
    ([HEADER, "-1,1,1"], "arrival_s must be a number from 0 up"),
    ([HEADER, "9e99,1,1"], "arrival_s must be a number from 0 up"),
    ([HEADER, "nan,1,1"], "arrival_s must be a number from 0 up"),
    (["arrival_s,output_tokens", "0,1"], "a.csv:1: the header has no column prompt or"),
    (["TIMESTAMP,ContextTokens,GeneratedTokens", "noon,1,1"], "must be a date and a time"),
    ([HEADER], "there are no requests"),
]
JSONL: list[tuple[Any, str]] = [
    ([OWN, "{"], "a.jsonl:2: not JSON"),
    (["[1]"], "must be a JSON object"),
    ([{"arrival": 0, "output": 1}], "there is no field prompt or prompt_tokens"),
    ([{**OWN, "prompt": 0}], "prompt must be from 1"),
    ([{**OWN, "prompt": []}], "the prompt is empty"),
    ([{**OWN, "prompt": True}], "prompt must be a whole number"),
    ([{**OWN, "prompt": [1, -1]}], "a token must be from 0"),
    ([{**OWN, "prompt": [1 << 31]}], "a token must be from 0"),
    ([{**OWN, "prompt": [[1, 2]]}], "a run of tokens is"),
    ([{**OWN, "max_tokens": 1}], r"output \(2\) is more than max_tokens \(1\)"),
    ([{**OWN, "prefix": "x"}], "there is no field prefix_tokens"),
    ([{**OWN, "prefix_tokens": 4}], "there is no field prefix"),
    ([{**OWN, "colour": 1}], "unknown field 'colour'; known: arrival"),
    ([{**OWN, "client": [1]}], "client must be a text"),
    ([{**OWN, "id": "a"}, {**OWN, "id": "a"}], "a.jsonl:2: id 'a' is used twice"),
    (mooncake((600, [1])), "600 prompt tokens make 2 blocks"),
    (mooncake((6, [[1]])), "hash_ids must be a list"),  # type: ignore[list-item]
]


@pytest.mark.parametrize(
    ("name", "lines", "problem"),
    [("a.csv", *case) for case in CSV] + [("a.jsonl", *case) for case in JSONL],
)
def test_a_bad_file_is_refused_with_its_line(
    tmp_path: Path, name: str, lines: list[Any], problem: str
) -> None:
    with pytest.raises(FormatError, match=problem):
        read_jobs(save(tmp_path, name, *lines))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.csv").write_bytes(HEADER.encode() + b"\n\xff,1,1\n")
    cases = {"none.csv": "No such file", "a.txt": "known: .csv, .jsonl", "latin.csv": "UTF-8"}
    for name, problem in cases.items():
        with pytest.raises(FormatError, match=problem):
            read_jobs(tmp_path / name)


def test_a_token_space_begins_again_without_leaving_32_bits() -> None:
    space = TokenSpace()
    runs = [space.take(100_000_000) for _ in range(60)]
    assert all(run.start >= FIRST_TOKEN and run.stop - 1 <= LAST_TOKEN for run in runs)
    assert len({run.start for run in runs}) == len(runs)
