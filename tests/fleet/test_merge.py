"""Metrics and snapshots of several replicas become one."""

from __future__ import annotations

import io
import re
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from headway import Engine, Scheduler, preset
from headway.cli.view.top import picture
from headway.engine.loop import EngineLoop
from headway.fleet.merge import merge_metrics, merge_snapshots
from headway.observe.server_metrics import ServerMetrics
from headway.on_ray.scaling import ScalingLoad, replicas_needed
from headway.request import RequestParams
from tests.support.served import Capitals


def replica(num_requests: int) -> ServerMetrics:
    """The metrics of an engine that has run this many requests and has as many open."""
    config = preset("headway", max_model_len=256, num_blocks=256, block_size=16)
    engine = Engine(Scheduler(config), Capitals())
    metrics = ServerMetrics(EngineLoop(engine, lambda _: None), "letters")
    for name in ("done", "open"):
        for number in range(num_requests):
            engine.add(f"{name}{number}", list(b"hello"), RequestParams(max_tokens=5))
        for _ in range(6 if name == "done" else 1):
            engine.step()
    return metrics


def value(text: str, name: str) -> float:
    found = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", text, re.M)
    assert len(found) == 1, (name, found)
    return float(found[0])


def test_metrics_have_a_label_for_each_replica_and_sums_under_other_names() -> None:
    texts = {"a": replica(1).text(), "b": replica(2).text()}
    text = merge_metrics(texts, {"replicas": 2, "moves": 3}, "headway")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    tokens = families["headway:generation_tokens"]
    assert {s.labels["replica"]: s.value for s in tokens.samples} == {"a": 6.0, "b": 12.0}
    assert value(text, "headway_fleet:generation_tokens_total") == 18.0
    assert value(text, "headway_fleet:time_to_first_token_seconds_count") == 6.0
    assert value(text, "headway_fleet:num_requests_running") == 3.0
    assert value(text, "headway_fleet:replicas") == 2.0
    assert value(text, "headway_fleet:moves_total") == 3.0
    assert value(text, "headway_fleet:deaths_total") == 0.0
    assert "headway_fleet:kv_cache_usage_perc" not in families
    assert text.count("# TYPE headway:generation_tokens_total ") == 1


def test_a_snapshot_of_the_fleet_adds_up_its_replicas() -> None:
    found: dict[str, Any] = {"a": replica(1).snapshot(), "b": replica(2).snapshot()}
    merged = merge_snapshots(found)
    assert set(merged) == {*found["a"], "replicas"}
    assert merged["running"]["count"] == 3 and merged["kv_blocks"]["total"] == 512
    assert merged["kv_blocks"]["block_size"] == 16 and merged["totals"]["requests"] == 3
    rows = merged["running"]["requests"]
    assert sorted((row["replica"], row["id"]) for row in rows) == [
        ("a", "open0"), ("b", "open0"), ("b", "open1"),
    ]  # fmt: skip
    assert [(row["name"], row["running"]) for row in merged["replicas"]] == [("a", 1), ("b", 2)]
    assert sum(merged["history"]["output_tokens"]) == sum(
        sum(each["history"]["output_tokens"]) for each in found.values()
    )
    assert len(merged["history"]["itl"]) == len(found["a"]["history"]["itl"])


def test_top_shows_every_replica() -> None:
    merged = merge_snapshots({"east": replica(1).snapshot(), "west": replica(2).snapshot()})
    console = Console(file=io.StringIO(), width=100)
    console.print(picture(merged, 100, 40))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert any("2 replicas" in line for line in lines)
    assert any("east" in line and "1/" in line for line in lines)
    assert any("west" in line and "2/" in line for line in lines)


def load(waiting: int = 0, free: int = 100) -> ScalingLoad:
    return ScalingLoad(waiting, 512, free, 100)


def test_the_number_of_replicas_follows_tokens_and_blocks_not_requests() -> None:
    assert replicas_needed([load(), load()]) == 1  # idle
    assert replicas_needed([load(free=40), load(free=40)]) == 2  # one could not take the blocks
    assert replicas_needed([load(waiting=100), load()]) == 2  # a short queue
    assert replicas_needed([load(waiting=100_000), load()]) == 25  # one that they need 98 steps for
    assert replicas_needed([load(waiting=10, free=5)]) == 2  # a short queue, but no blocks
    assert replicas_needed([]) == 0
