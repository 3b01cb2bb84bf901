"""Simulations with several replicas: `--replicas`, `--routes` and `--disaggregate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_cli import PROFILE, WORK, headway, refused, sentence


def test_the_whole_and_each_replica_are_shown() -> None:
    arguments = ("simulate", WORK, "--profile", PROFILE, "--replicas", "3", "--route", "chwbl(1.5)")
    done = headway(*arguments)
    assert done.code == 0 and "max / mean" in done.out and "The doctor found" in done.out
    said = json.loads(headway(*arguments, "--json").out)
    pool = said["pools"]["colocated"]
    assert [each["name"] for each in pool["each"]] == ["0", "1", "2"]
    assert sum(each["requests"] for each in pool["each"]) == said["completed"] == 12
    assert said["route"].startswith("chwbl(load_factor=1.5") and "doctor" in said
    assert all(value >= 1 for value in pool["balance"].values())


def test_every_replica_has_a_trace_that_replays(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    done = headway(
        "simulate", WORK, "--profile", PROFILE, "--replicas", "2", "--trace-out", path, "--json"
    )
    assert done.code == 0
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["run.0.jsonl", "run.1.jsonl"]
    names = [
        json.loads(file.read_text(encoding="utf-8").splitlines()[0])["replica"] for file in files
    ]
    assert names == ["0", "1"]
    for file in files:
        assert headway("trace", file, "--replay").code == 0


def test_routes_are_compared_side_by_side(tmp_path: Path) -> None:
    arguments = ("compare", WORK, "--profile", PROFILE, "--replicas", "2")
    done = headway(*arguments, "--plot", tmp_path / "ttft.svg")
    assert "― sglang" in (tmp_path / "ttft.svg").read_text(encoding="utf-8")
    for name in ("prefix_load", "least_loaded", "round_robin", "chwbl", "sglang", "max/mean"):
        assert name in done.out, name
    routes = "round_robin,chwbl(1.25, 4),tests.cli.test_cli_replicas:last"
    said = json.loads(headway(*arguments, "--routes", routes, "--json").out)
    assert list(said) == ["round_robin", "chwbl(1.25, 4)", "tests.cli.test_cli_replicas:last"]
    each = said["tests.cli.test_cli_replicas:last"]["pools"]["colocated"]["each"]
    assert [replica["requests"] for replica in each] == [0, 12]


def last(request: object, replicas: list[object]) -> int:
    return len(replicas) - 1


def beyond(request: object, replicas: list[object]) -> int:
    return len(replicas)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("simulate", "--replicas", "0"), "--replicas must be a whole number of at least 1, not 0"),
        (("simulate", "--replicas", "65"), "at most 64, not 65"),
        (("simulate", "--replicas", "2", "--route", "fastest"), "unknown route 'fastest'"),
        (("simulate", "--route", "chwbl"), "--route chwbl needs --replicas"),
        (("simulate", "--replicas", "2", "--disaggregate", "1:1"), "--disaggregate"),
        (("compare", "--routes", "chwbl", "--plot", "ttft.gif"), "--plot must end in"),
        (("compare", "--routes", ","), "--routes must name routing rules"),
        (("compare", "--routes", "chwbl", "--presets", "headway,vllm"), "one preset"),
        (
            ("simulate", "--replicas", "2", "--route", "tests.cli.test_cli_replicas:beyond"),
            "returned 2 for request '0'; return an index from 0 to 1",
        ),
    ],
)
def test_wrong_options_are_one_sentence(arguments: tuple[str, ...], said: str) -> None:
    command, *options = arguments
    assert said in sentence(command, WORK, "--profile", PROFILE, *options)


def test_both_ways_are_compared_and_each_pool_is_shown() -> None:
    done = headway("simulate", WORK, "--profile", PROFILE, "--disaggregate", "1:2")
    assert done.code == 0
    for text in ("1:2 disaggregated", "3 colocated", "prefill", "decode", "12 transfers"):
        assert text in done.out, text
    done = headway("simulate", WORK, "--profile", PROFILE, "--disaggregate", "1:2", "--json")
    said = json.loads(done.out)
    assert list(said) == ["disaggregated", "colocated"]
    assert {name: pool["replicas"] for name, pool in said["disaggregated"]["pools"].items()} == {
        "prefill": 1, "decode": 2,
    }  # fmt: skip
    assert said["colocated"]["pools"]["colocated"]["replicas"] == 3
    assert said["disaggregated"]["completed"] == said["colocated"]["completed"] == 12
    assert said["disaggregated"]["transfers"]["requests"] == 12


def test_invalid_pools_are_named() -> None:
    for text in ("1", "0:1", "1:x", "1:1:1", "1:65", ""):
        assert "--disaggregate must be prefill:decode" in (
            said := refused("simulate", WORK, "--disaggregate", text)
        )
        assert repr(text) in said and "64" in said
    assert "--trace-out" in refused(
        "simulate", WORK, "--disaggregate", "1:1", "--trace-out", "t.jsonl"
    )


def test_rejected_requests_give_an_exit_code() -> None:
    done = headway(
        "simulate", "requests=2,prompt=999,output=1", "--profile", PROFILE, "--disaggregate", "1:1",
        "--num-blocks", "40",
    )  # fmt: skip
    assert done.code == 1 and "all requests were rejected" in done.err
