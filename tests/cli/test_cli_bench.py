"""Laws of `headway bench`: lengths are exact, no prompt is cached, keys are those of `vllm bench`."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import ConfigError
from headway.lab.loadgen.report import latency, throughput
from headway.lab.loadgen.requests import LengthRange, parse_length_range, random_prompt
from headway.lab.real.dataset import NAMES
from headway.record.lines import PlannedLine
from headway.record.reader import read_journal
from headway.record.stats import RunStats, stats_of
from headway.record.timeline import RequestTimeline
from headway.record.writer import header
from headway.scheduler import preset
from tests.cli.test_cli import headway, sentence
from tests.cli.test_cli_generate import SHAPE, options_of, save_tiny
from tests.support.journals import of_kind

SETTING = {"model", "dtype", "kv_cache_dtype", "load_format", "config"}
THROUGHPUT = {
    "elapsed_time", "num_requests", "total_num_tokens", "requests_per_second", "tokens_per_second",
    "total_input_tokens", "total_output_tokens", "request_throughput", "input_throughput",
    "output_throughput", "total_token_throughput",
}  # fmt: skip
TIMES = {f"{mark}_{name}_ms" for mark in ("mean", "median", "p90", "p99", "p99.9", "max")
         for name in ("ttft", "tpot", "itl", "e2el", "stall")} | {"ttft_by_prompt"}  # fmt: skip


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options for a model that has only a config.json."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return options_of(folder)


def test_throughput_counts_requests_and_tokens(bare: list[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    done = headway(
        "bench", "throughput", *bare, "--num-prompts", "5", "--input-len", "20-70", "--output-len",
        "7", "--seed", "3", "--json", "--trace-out", trace,
    )  # fmt: skip
    result = json.loads(done.out)
    assert done.code == 0 and set(result) == SETTING | THROUGHPUT | TIMES
    assert (result["num_requests"], result["total_output_tokens"]) == (5, 35)
    assert 5 * 20 <= result["total_input_tokens"] <= 5 * 70
    assert result["total_num_tokens"] == result["total_input_tokens"] + 35
    for rate, total in (
        ("tokens_per_second", "total_num_tokens"), ("output_throughput", "total_output_tokens"),
        ("input_throughput", "total_input_tokens"),
    ):  # fmt: skip
        assert result[rate] * result["elapsed_time"] == pytest.approx(result[total])
    assert result["requests_per_second"] == result["request_throughput"]
    assert 0 < result["median_ttft_ms"] <= result["p99_ttft_ms"]
    assert result["p99_e2el_ms"] <= result["elapsed_time"] * 1e3
    metrics = stats_of(read_journal(trace))
    assert metrics.totals["cached_tokens"] == 0
    assert metrics.totals["finished_length"] == 6, "five and the warm-up"


def test_the_same_seed_gives_the_same_work(bare: list[str]) -> None:
    more = ["--num-prompts", "4", "--input-len", "5-300", "--output-len", "1-9", "--json"]
    first, again, other = (
        json.loads(headway("bench", "throughput", *bare, *more, "--seed", seed).out)
        for seed in ("1", "1", "2")
    )
    assert first["total_num_tokens"] == again["total_num_tokens"] != other["total_num_tokens"]


def test_time_to_first_token_and_time_per_token_sum_up(bare: list[str]) -> None:
    done = headway(
        "bench", "throughput", *bare, "--num-prompts", "1", "--input-len", "9", "--output-len",
        "21", "--json",
    )  # fmt: skip
    result = json.loads(done.out)
    rest = result["mean_e2el_ms"] - result["mean_ttft_ms"]
    assert result["mean_tpot_ms"] == pytest.approx(rest / 20)
    assert result["mean_itl_ms"] == pytest.approx(rest / 20)


def test_lines_of_a_dataset_have_their_own_parameters(tmp_path: Path) -> None:
    folder, file = save_tiny(tmp_path), tmp_path / "work.jsonl"
    lines = [{"prompt": "hello", "max_tokens": 3}, {"prompt": "you there"}, {"prompt": "unread"}]
    file.write_text("\n".join(map(json.dumps, lines)))
    arguments = [
        "bench", "throughput", *options_of(folder), "--dataset-path", str(file), "--num-prompts", "2",
        "--output-len", "5", "--json",
    ]  # fmt: skip
    result = json.loads(headway(*arguments).out)
    assert (result["num_requests"], result["total_output_tokens"]) == (2, 8)
    assert result["total_input_tokens"] == len("hello" + "you there")
    file.write_text('{"prompt": "fine"}\n{"prompt": 3}\n')
    assert f"{file}:2: prompt must be" in sentence(*arguments)


def test_latency_excludes_the_warm_up(bare: list[str]) -> None:
    arguments = [
        "bench", "latency", *bare, "--batch-size", "2", "--input-len", "33", "--output-len", "3",
        "--num-iters", "4", "--num-iters-warmup", "2",
    ]  # fmt: skip
    result = json.loads(headway(*arguments, "--json").out)
    assert set(result) == SETTING | {"avg_latency", "latencies", "percentiles"}
    assert len(result["latencies"]) == 4
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert "s per batch" in headway(*arguments).out


def test_batches_share_no_prefix(bare: list[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    headway(
        "bench", "latency", *bare, "--batch-size", "2", "--input-len", "33", "--output-len", "2",
        "--num-iters", "2", "--trace-out", trace,
    )  # fmt: skip
    plans = of_kind(PlannedLine, read_journal(trace))
    admitted = [each for plan in plans for each in plan.admitted]
    assert len(admitted) == 6 and all(num_cached == 0 for _, num_cached, *_ in admitted)


def test_throughput_prints_a_table(bare: list[str]) -> None:
    done = headway("bench", "throughput", *bare, "--num-prompts", "2", "--output-len", "3")
    assert all(text in done.out for text in ("2 requests", "256 prompt", "6 output"))
    assert "output tokens/s" in done.out and "time to first token" in done.out and not done.err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("throughput", "--input-len", "500-600"), "600 input and 64 output"),
        (("throughput", "--input-len", "100", "--num-blocks", "4"), "limit of 65 tokens"),
        (("latency", "--output-len", "1000"), "limit of 512 tokens"),
    ],
)
def test_too_long_requests_are_reported(
    bare: list[str], arguments: tuple[str, ...], problem: str
) -> None:
    command, *more = arguments
    assert problem in sentence("bench", command, *bare, *more)


@pytest.mark.parametrize("text", ["", "0", "9-3", "-4", "4-", "many", "1.5", "0-3"])
def test_an_invalid_length_is_reported_before_the_model_is_loaded(text: str) -> None:
    assert "input-len must be" in sentence("bench", "throughput", f"--input-len={text}")


@given(st.integers(1, 5000), st.integers(0, 5000), st.integers())
def test_lengths_are_drawn_from_their_range(low: int, more: int, seed: int) -> None:
    lengths = parse_length_range("a", f" {low} - {low + more} ")
    assert lengths == LengthRange(low, low + more)
    assert parse_length_range("a", str(low)) == LengthRange(low, low)
    source = random.Random(seed)
    assert all(low <= lengths.draw(source) <= low + more for _ in range(5))


@given(st.integers(1, 300), st.integers(2, 70_000), st.integers())
def test_random_prompts_are_within_the_vocabulary(length: int, vocab_size: int, seed: int) -> None:
    prompt = random_prompt(random.Random(seed), length, vocab_size)
    assert len(prompt) == length and all(0 <= token < vocab_size for token in prompt)
    assert prompt == random_prompt(random.Random(seed), length, vocab_size)


def test_every_statistic_has_its_meaning() -> None:
    metrics = RunStats(header(preset(), False))
    for number, seconds in enumerate((1.0, 2.0, 9.0)):
        first, finished = 10.0 + seconds, 10.0 + 3 * seconds
        metrics.requests.append(
            RequestTimeline(
                str(number), 10.0, 5, first_token=first, finished=finished, num_output=3
            )
        )
    measured = throughput(metrics, 20.0)
    result = measured.latencies
    assert (result["mean_ttft_ms"], result["median_ttft_ms"]) == (4000, 2000)
    assert (result["mean_e2el_ms"], result["median_e2el_ms"]) == (12000, 6000)
    assert (result["mean_tpot_ms"], result["median_tpot_ms"]) == (4000, 2000)
    assert 8000 < result["p99_ttft_ms"] < 9000
    assert measured.requests_per_second == 3 / 20


def test_percentiles_lie_between_minimum_and_maximum() -> None:
    result = latency([3.0, 1.0, 2.0])
    assert result["avg_latency"] == 2.0 and result["percentiles"]["50"] == 2.0
    assert result["latencies"] == [3.0, 1.0, 2.0]
    assert 1.0 <= result["percentiles"]["10"] < result["percentiles"]["99"] <= 3.0


def test_an_invalid_length_range_is_reported_with_its_name() -> None:
    with pytest.raises(ConfigError, match="output-len .*'7x'"):
        parse_length_range("output-len", "7x")


def test_the_lengths_of_a_trace_are_measured_with_caps(bare: list[str], tmp_path: Path) -> None:
    rows = ["arrival_s,prompt_tokens,output_tokens", "0,10,3", "1,40,9", "2,20,2", "3,9,9"]
    (tmp_path / "trace.csv").write_text("\n".join(rows))
    done = headway(
        "bench", "throughput", *bare, "--dataset-path", tmp_path / "trace.csv", "--num-prompts",
        "3", "--max-input-len", "25", "--max-output-len", "5", "--json",
    )  # fmt: skip
    result = json.loads(done.out)
    assert (result["num_requests"], result["total_input_tokens"]) == (3, 10 + 25 + 20)
    assert result["total_output_tokens"] == 3 + 5 + 2 and not done.err


def test_conversations_in_the_format_of_sharegpt(tiny: list[str], tmp_path: Path) -> None:
    said = [["a b c d e", "c d e a b c"], ["a", "too short before"], ["a b c d", "b b b b b"], []]
    turns = [[{"from": "human", "value": text} for text in pair] for pair in said]
    (tmp_path / "chats.json").write_text(json.dumps([{"conversations": each} for each in turns]))
    done = headway(
        "bench", "throughput", *tiny, "--dataset-path", tmp_path / "chats.json", "--json",
        "--max-output-len", "10",
    )  # fmt: skip
    result = json.loads(done.out)
    assert (result["num_requests"], result["total_input_tokens"]) == (2, 9 + 7)
    assert result["total_output_tokens"] == 10 + 9
    assert "2 requests instead of 32" in done.err
    assert "4 conversations, and 2 have fewer than 4 tokens" in done.err


@pytest.mark.parametrize(("name", "content"), [
    ("two.csv", "arrival_s,prompt_tokens,output_tokens\n0,10,3\n1,9,2\n"), ("two.txt", "a b\nc d\n"),
])  # fmt: skip
def test_a_file_with_fewer_requests_than_asked_for_gives_a_note(
    name: str, content: str, tiny: list[str], tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    run = ("bench", "throughput", *tiny, "--dataset-path", tmp_path / name, "--json")
    done = headway(*run, "--num-prompts", "5")
    assert json.loads(done.out)["num_requests"] == 2
    assert f"2 requests instead of 5 (--num-prompts): {tmp_path / name} has no more" in done.err
    assert not headway(*run, "--num-prompts", "2").err


@pytest.mark.parametrize(("options", "content", "said"), [
    (["--dataset-name", "trace"], None, "needs --dataset-path"),
    (["--dataset-name", "other"], "[]", "random, prompts, trace, sharegpt"),
    (["--dataset-name", "random"], "[]", "no --dataset-path"),
    ([], "{", "not JSON"), ([], "{}", "list of conversations"), ([], "[{}]", "no conversation"),
])  # fmt: skip
def test_a_wrong_dataset_is_one_sentence(
    options: list[str], content: str | None, said: str, tiny: list[str], tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "chats.json").write_text(content)
        options = [*options, "--dataset-path", str(tmp_path / "chats.json")]
    assert said in sentence("bench", "throughput", *tiny, *options)


@pytest.mark.parametrize(("row", "is_trace"), [
    ({"timestamp": 0, "input_length": 9, "output_length": 2, "hash_ids": [0]}, True),
    ({"arrival": 0, "prompt": 9, "output": 2}, True),
    ({"headway_trace": 1}, True), ({"prompt": 3}, False), ({"messages": []}, False),
])  # fmt: skip
def test_the_error_for_a_trace_that_is_read_as_prompts_names_the_option(
    row: dict[str, object], is_trace: bool, tiny: list[str], tmp_path: Path
) -> None:
    (tmp_path / "work.jsonl").write_text(json.dumps(row) + "\n")
    run = ("bench", "throughput", *tiny, "--dataset-path", tmp_path / "work.jsonl")
    assert ("--dataset-name trace" in sentence(*run)) == is_trace


def test_an_empty_csv_is_reported_as_empty(tiny: list[str], tmp_path: Path) -> None:
    (file := tmp_path / "zero.csv").write_text("")
    said = sentence("bench", "throughput", *tiny, "--dataset-path", file)
    assert f"{file}: the file is empty" in said


def test_the_help_lists_every_kind_of_dataset() -> None:
    text = " ".join(headway("bench", "throughput", "--help").out.split())
    listed = text.split("--dataset-name", 1)[1].split("--max-input-len")[0]
    assert all(name in listed for name in NAMES)
