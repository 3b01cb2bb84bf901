"""The doctor's findings on replicas: each symptom gives its finding, and healthy pools give none."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest

from headway.fleet.routing import ReplicaView, RouteRequest, RouteRule, prefix_load
from headway.lab.cluster import simulate_replicas
from headway.lab.cost import load_profile
from headway.lab.doctor.diagnose import Finding
from headway.lab.doctor.replicas import diagnose_replicas
from headway.lab.summary import Summary
from headway.lab.workload.synthetic import parse_synthetic
from headway.scheduler import preset
from tests.lab.doctor.test_doctor import CONFIG, HEALTHY

REPLICA: Summary = {
    "requests": 100, "busy": 0.8, "cache_hit_ratio": 0.4, "queue_time": {"p90": 0.1},
}  # fmt: skip


def found(changes: dict[str, Any], route: str = "round_robin", number: int = 4) -> list[Finding]:
    """The findings if replica 2 of a healthy pool has these values."""
    each = [{**deepcopy(REPLICA), "name": str(place)} for place in range(number)]
    each[min(2, number - 1)] |= changes
    pools = {"colocated": {"replicas": number, "each": each}}
    return diagnose_replicas({**HEALTHY, "route": route, "pools": pools}, CONFIG)


SYMPTOMS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "hot spot": (
        {"queue_time": {"p90": 9.0}, "requests": 900},
        ("hot spot", "9.0 s on replica 2", "0.1 s", "75% of the requests"),
    ),
    "imbalance": ({"busy": 0.0}, ("imbalance", "replica 2 0%", "1.33 times the mean")),
    "cold": ({"cache_hit_ratio": 0.1}, ("cold replica", "10%", "replica 2")),
}


@pytest.mark.parametrize("name", SYMPTOMS)
def test_a_symptom_gives_its_finding(name: str) -> None:
    changes, texts = SYMPTOMS[name]
    (finding,) = found(changes)
    assert all(text in finding.symptom for text in texts), finding.symptom
    assert "prefix_load" in finding.remedy and finding.changes == ("route=prefix_load",)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"queue_time": {"p90": 0.45}},  # more than the others, but short
        {"busy": 0.2},  # 1.23 times the mean
        {"cache_hit_ratio": 0.25},
        {"cache_hit_ratio": 0.0, "requests": 3},  # too few to say
    ],
)
def test_a_healthy_pool_gives_no_finding(changes: dict[str, Any]) -> None:
    assert found(changes) == []


def test_one_replica_cannot_be_uneven() -> None:
    assert found({"queue_time": {"p90": 9.0}}, number=1) == []


def test_the_default_rule_is_not_its_own_remedy() -> None:
    (finding,) = found({"busy": 0.0}, route="prefix_load")
    assert finding.changes == () and "add replicas" in finding.remedy


def longest_prefix(request: RouteRequest, replicas: Sequence[ReplicaView]) -> int:
    return max(range(len(replicas)), key=lambda place: replicas[place].num_cached)


@pytest.mark.parametrize(
    ("rule", "symptoms"), [(longest_prefix, ["hot spot", "imbalance"]), (prefix_load, [])]
)
def test_a_simulated_hot_prefix_is_found(rule: RouteRule, symptoms: list[str]) -> None:
    hot = parse_synthetic("requests=120,arrivals=poisson(60),prompt=60,output=60,prefix=1x1000")
    profile = load_profile("llama3.1-8b-a100-80gb")
    config = preset("vllm_v1", max_num_seqs=16)
    result = simulate_replicas(hot.generate(), config, profile, 4, route=rule)
    findings = diagnose_replicas(result.summary(), result.metrics.config)
    kinds = [finding.symptom.partition(":")[0] for finding in findings]
    assert [kind for kind in kinds if kind in ("hot spot", "imbalance", "cold replica")] == symptoms
