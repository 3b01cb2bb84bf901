"""`headway simulate --disaggregate`: the output, and what it refuses."""

from __future__ import annotations

import json

from tests.cli.test_cli import PROFILE, WORK, headway, refused


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
