"""The planner's commands: tables, JSON, plots, and errors of one sentence."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from typer.testing import CliRunner

from headway.cli.main import app
from headway.errors import HeadwayError
from tests.support import real

WORK = "requests=40,arrivals=poisson(20),prompt=uniform(20,200),output=uniform(2,20)"
PROFILES = Path(__file__).parents[2] / "headway/lab/profiles"
FAST = ["--jobs", "1", "--no-history"]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def problem(*arguments: str) -> str:
    with pytest.raises(HeadwayError) as error:
        CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    text = str(error.value)
    assert "\n" not in text
    return text


def test_a_sweep_runs_every_combination(tmp_path: Path) -> None:
    path = tmp_path / "sweep.svg"
    knobs = ["max_num_seqs=2,8", "chunk=at_most(64),split_any"]
    out = run(
        "plan", "sweep", *knobs, "-w", WORK, "--plot", str(path), "--metric", "ttft.p99", *FAST
    )
    assert "8, at_most(64)" in out and "ttft.p99" in out and "data sheet" in out
    assert path.read_text().startswith("<svg") and path.read_text().count("<polyline") == 2
    answer = json.loads(run("plan", "sweep", *knobs, "-w", WORK, "--json", *FAST))
    found = answer["runs"]
    assert "data sheet" in answer["accuracy"]
    assert [r["knobs"] for r in found][1] == {"max_num_seqs": 2, "chunk": "split_any"}
    assert found[0]["ttft"]["p99"] > found[2]["ttft"]["p99"]


def test_a_sweep_over_names_draws_bars(tmp_path: Path) -> None:
    path = tmp_path / "sweep.html"
    out = run("plan", "sweep", "preset=headway,static", "-w", WORK, "--plot", str(path), *FAST)
    assert "█" in out and "preset=static" in path.read_text()


def test_the_speed_of_arrivals_is_a_knob() -> None:
    found = json.loads(run("plan", "sweep", "speed=0.5,2", "-w", WORK, "--json", *FAST))["runs"]
    assert found[0]["seconds"] > 2 * found[1]["seconds"]


@pytest.mark.parametrize("name", ["llama3.1-8b-a100-80gb", "qwen3-0.6b-h200"])
def test_breakeven_crosses_where_its_rows_do(name: str) -> None:
    found = json.loads(run("plan", "breakeven", "--profile", name, "--json"))
    at = found["crossing"]
    for row in found["rows"]:
        assert (row["cheaper"] == "swap") == (at is not None and row["tokens"] >= at)
        assert row["recompute_alone"] >= row["recompute"] > 0
    assert str(at or "never") in run("plan", "breakeven", "--profile", name).replace(",", "")


def test_a_slow_link_moves_the_crossing(tmp_path: Path) -> None:
    profile: dict[str, Any] = json.loads((PROFILES / "llama3.1-8b-a100-80gb.json").read_text())
    profile["machine"] |= {"copy_bandwidth": 3.4e9, "copy_seconds": 0.001}
    path = tmp_path / "slow.json"
    path.write_text(json.dumps(profile))
    at = json.loads(run("plan", "breakeven", "--profile", str(path), "--json"))["crossing"]
    assert 100 < at < 100_000


def test_a_profile_without_a_needed_term_is_named(tmp_path: Path) -> None:
    profile: dict[str, Any] = json.loads((PROFILES / "llama3.1-8b-a100-80gb.json").read_text())
    del profile["machine"]["copy_bandwidth"]
    path = tmp_path / "partial.json"
    path.write_text(json.dumps(profile))
    assert "machine.copy_bandwidth" in problem("plan", "breakeven", "--profile", str(path))


def test_tune_prints_settings_reasons_and_commands(tmp_path: Path) -> None:
    arguments = [
        "plan", "tune", WORK.replace("arrivals=poisson(20),", ""), "--max-num-seqs", "4", "--budget", "14",
        "--knob", "max_num_batched_tokens=64,2048", "--knob", "chunk=at_most(32),split_any",
    ]  # fmt: skip
    kept = ["--jobs", "1", "--history", str(tmp_path / "history.jsonl")]
    out = run(*arguments, *kept)
    for part in ("Best settings", "fresh seeds", "The doctor", "Pareto", "headway serve MODEL",
                 "vllm serve MODEL", "headway lab", "data sheet"):  # fmt: skip
        assert part in out
    again = run(*arguments, "--json", *kept)
    assert again == run(*arguments, "--json", *FAST)
    found = json.loads(again)
    assert found["base"] == {"preset": "headway", "max_num_seqs": 4} and found["cost"] > 3
    assert found["num_settings"] >= 2


def test_capacity_prints_an_interval_and_replicas(tmp_path: Path) -> None:
    arguments = [
        "plan", "capacity", WORK, "--max-num-seqs", "4", "--ttft-p90", "200ms", "--ttft-p50", "1s",
        "--seeds", "3", "--rate", "500", "--jobs", "1", "--history", str(tmp_path / "h.jsonl"),
    ]  # fmt: skip
    found = json.loads(run(*arguments, "--json"))
    rate = found["requests_per_second"]
    assert rate["low"] <= rate["mean"] <= rate["high"] and len(found["by_seed"]) == 3
    assert found["targets"] == {"ttft-p50": 1.0, "ttft-p90": 0.2} and found["replicas"] > 1
    out = run(*arguments)
    assert "95 % interval" in out and "Poisson" in out and "redundant" in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["plan", "sweep", "max_num_seq=3"], "max_num_seqs"),
        (["plan", "sweep", "max_num_seqs=2", "-w", WORK, "--metric", "ttft.p98"], "p99"),
        (["plan", "sweep", "max_num_seqs=2", "-w", WORK, "--metric", "ttft"], "p99"),
        (["plan", "sweep", "max_num_seqs=2", "--plot", "x.doc"], ".svg"),
        (["plan", "sweep", "max_num_seqs=2", "-w", "requests=0"], "requests"),
        (["plan", "sweep", "max_num_seqs=2", "-w", "nowhere.csv"], "nowhere.csv"),
        (["plan", "tune", WORK, "--knob", "victim=oldest"], "newest"),
        (["plan", "tune", WORK, "--budget", "2"], "budget"),
        (["plan", "tune", WORK, "--ttft-p99", "fast"], "--ttft-p99"),
        (["plan", "capacity", WORK, "--rate", "-1"], "rate"),
        (["plan", "capacity", "requests=9"], "arrivals"),
        (["plan", "capacity", WORK, "--ttft-p99", "1us"], "ttft-p99"),
        (["plan", "capacity", WORK, "--num-blocks", "1"], "num_blocks is 1"),
        (["plan", "tune", WORK, "--num-blocks", "1"], "num_blocks is 1"),
        (["plan", "breakeven", "--profile", "b200"], "a100"),
        (["plan", "sweep", "max_num_seqs=2", "--history", "x"], "no-history"),
    ],
)
def test_wrong_input_is_named(arguments: list[str], named: str) -> None:
    assert named in problem(*arguments, *(FAST if arguments[1] != "breakeven" else []))


def test_an_unknown_metric_is_named_before_anything_runs(tmp_path: Path) -> None:
    history = tmp_path / "h.jsonl"
    kept = ("--jobs", "1", "--history", str(history))
    arguments = ("plan", "sweep", "max_num_seqs=2", "-w", WORK, *kept)
    assert "ttft" in problem(*arguments, "--metric", "tfft.p99") and not history.read_text()
    assert "finish_reasons.length" in run(*arguments, "--metric", "finish_reasons.length")


def test_results_are_kept_in_the_history(tmp_path: Path) -> None:
    history = ["--history", str(tmp_path / "h.jsonl"), "--jobs", "1", "--json"]
    first = run("plan", "sweep", "max_num_seqs=2,4", "-w", WORK, *history)
    assert run("plan", "sweep", "max_num_seqs=2,4", "-w", WORK, *history) == first
    assert len((tmp_path / "h.jsonl").read_text().splitlines()) == 2


def test_the_lab_shows_a_second_scheduler_beside_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    links: list[str] = []
    monkeypatch.setattr("headway.cli.commands.lab._serve", lambda *given: links.append(given[3]))
    run("lab", WORK, "--max-num-seqs", "4", "--against", "vllm_v1; max_num_seqs=8")
    parts = dict(part.split("=", 1) for part in links[0].removeprefix("#").split("&"))
    specs = [json.loads(base64.urlsafe_b64decode(text + "==")) for text in parts.values()]
    assert list(parts) == ["spec", "other"] and {each["workload"] for each in specs} == {WORK}
    assert [each["set"] for each in specs] == [{"max_num_seqs": 4}, {"max_num_seqs": 8}]
    assert specs[1]["preset"] == "vllm_v1"
    assert "vllm_v1" in problem("lab", WORK, "--against", "vllm_v2")


def test_the_best_settings_are_measured_on_a_model(tmp_path: Path) -> None:
    found = json.loads(run(
        "plan", "tune", "requests=20,prompt=uniform(4,20),output=uniform(2,6)", "--budget", "14", "--knob",
        "max_num_seqs=2,4", "--num-blocks", "60", "--num-host-blocks", "0", "--max-model-len", "400",
        "--verify", str(real.write_tiny(tmp_path)), "--json", *FAST,
    ))  # fmt: skip
    rows = {row["name"]: row for row in found["verified"]}
    assert rows["TTFT p50"]["measured"] > 0 < rows["output tokens/s"]["predicted"]


def test_a_sweep_with_seeds_shows_means_and_its_json_all_runs(tmp_path: Path) -> None:
    knobs = ["seed=0,1,2", "headroom=watermark(0.0),watermark(0.2)", "max_num_seqs=8"]
    path = tmp_path / "sweep.svg"
    arguments = ("plan", "sweep", *knobs, "-w", WORK, "--metric", "ttft.mean", *FAST)
    out = run(*arguments, "--plot", str(path))
    assert "6 runs" in out and "means over 3 seeds" in out and "headroom=watermark" in out
    found = json.loads(run(*arguments, "--json"))["runs"]
    assert [r["knobs"]["seed"] for r in found] == [0, 0, 1, 1, 2, 2]
    mean = fmean(r["ttft"]["mean"] for r in found if r["knobs"]["headroom"] == "watermark(0.2)")
    assert f"{mean:,.4g}" in out + path.read_text()
    assert path.read_text().count("<circle") == 2, "one point for each watermark"


@pytest.mark.parametrize("columns", ["60", "80", "120"])
def test_no_value_of_a_sweep_is_cut_off(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    knobs = ["max_num_seqs=4,8", "queue=fcfs,shortest_first"]
    out = run("plan", "sweep", *knobs, "-w", WORK, "--num-blocks", "30", *FAST)
    assert "…" not in out and max(map(len, out.splitlines())) <= max(80, int(columns))
    assert ("too narrow for steps" in out) == (columns == "60")
