"""Laws of the doctor: a finding comes with its symptom, and with nothing else."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from headway.lab.cost import load_profile
from headway.lab.doctor import Finding, examine
from headway.lab.simulate import simulate
from headway.lab.summary import Summary, summarize
from headway.lab.workload.synthetic import parse_synthetic
from headway.scheduler import preset
from headway.scheduler.presets import describe

CONFIG: dict[str, Any] = describe(preset("vllm_v1"))
HEALTHY: Summary = {
    "steps": 1000,
    "preemptions": 3,
    "preemptions_by_swap": 0,
    "preemptions_per_second": 0.1,
    "recompute_tax": 0.01,
    "per_step": {
        "waiting": 2.0, "seats_share": 0.9, "tokens_share": 0.5, "tokens": 4000.0,
        "prefill_share": 0.3,
    },
    "queue_time": {"p90": 0.2},
    "time_between_tokens": {"p50": 0.02, "p99": 0.04},
    "waiting_steps_by_reason": {"max_num_seqs": 10, "blocks": 3},
    "deadlines": 100,
    "deadline_misses": 1,
    "clients": 3,
    "fairness": 0.95,
}  # fmt: skip
SYMPTOMS: dict[str, tuple[dict[str, Any], str, str]] = {
    "preempting": ({"preemptions_per_second": 3.0}, "preempting often: 3.0", "future_peak"),
    "thrashing": ({"preemptions_per_second": 30.0}, "thrashing: 30.0", "max_num_seqs"),
    "taxed": ({"recompute_tax": 0.2}, "20.0% of all computed tokens", "watermark"),
    "waiting": (
        {"per_step.waiting": 60.0, "queue_time.p90": 9.0}, "60 requests wait", "raise max_num_seqs",
    ),
    "idle seats": ({"per_step.seats_share": 0.2}, "only 20% of the seats", "continuous recipe"),
    "idle budget": (
        {"per_step.tokens_share": 0.01, "per_step.tokens": 80.0}, "80 tokens, 1.0%", "split_any",
    ),
    "prefill": ({"per_step.prefill_share": 0.9}, "90% of the computed tokens", "max_num_batched_tokens"),
    "stalls": ({"time_between_tokens.p99": 0.4}, "p99 400 ms, 20x p50", "at_most"),
    "late": ({"deadline_misses": 30}, "30 of 100 deadlines missed", "queue deadline"),
    "unfair": ({"fairness": 0.5}, "fairness between clients 0.50", "queue fair"),
}  # fmt: skip


def ill(changes: dict[str, Any]) -> Summary:
    """The healthy run with some numbers changed, `a.b` for the field b of a."""
    summary = deepcopy(HEALTHY)
    for path, value in changes.items():
        *parents, last = path.split(".")
        target = summary
        for parent in parents:
            target = target[parent]
        target[last] = value
    return summary


def test_a_healthy_run_has_no_findings() -> None:
    assert examine(HEALTHY, CONFIG) == []


@pytest.mark.parametrize("illness", SYMPTOMS)
def test_a_symptom_brings_its_finding_and_no_other(illness: str) -> None:
    changes, symptom, remedy = SYMPTOMS[illness]
    findings = examine(ill(changes), CONFIG)
    assert len(findings) == 1
    assert symptom in findings[0].symptom and remedy in findings[0].remedy and findings[0].cause


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("max_num_seqs", "max_num_seqs"), ("token_budget", "max_num_batched_tokens"), ("blocks", "KV blocks"),
        ("headroom", "headroom"), ("back_off", "KV blocks"), ("order", "patience"),
        ("", "capacity"),
    ],
)  # fmt: skip
def test_the_remedy_for_waiting_follows_what_was_lacked_most(reason: str, remedy: str) -> None:
    others = {"tokens": 1, "seats": 1} if reason not in ("", "order") else {}
    reasons = {**others, **({reason: 99} if reason else {})}
    changes = {
        "per_step.waiting": 60.0, "queue_time.p90": 9.0, "waiting_steps_by_reason": reasons,
    }  # fmt: skip
    (finding,) = examine(ill(changes), CONFIG)
    assert remedy in finding.remedy and (reason or "capacity") in finding.cause


def test_standing_behind_somebody_is_no_lack_of_its_own() -> None:
    reasons = {"order": 99, "blocks": 5}
    changes = {
        "per_step.waiting": 60.0, "queue_time.p90": 9.0, "waiting_steps_by_reason": reasons,
    }  # fmt: skip
    (finding,) = examine(ill(changes), CONFIG)
    assert "lack blocks" in finding.cause


def test_swapping_without_host_memory_is_found() -> None:
    swapping = {**CONFIG, "swap": "swap"}
    (finding,) = examine(HEALTHY, swapping)
    assert "3 preemptions recomputed" in finding.symptom and "num_host_blocks" in finding.remedy
    assert examine(HEALTHY, {**swapping, "num_host_blocks": 10}) == []
    assert examine(ill({"preemptions": 0}), swapping) == []


def test_one_client_cannot_be_unfair_and_no_deadline_cannot_be_missed() -> None:
    assert examine(ill({"clients": 1, "fairness": 0.1}), CONFIG) == []
    assert examine(ill({"deadlines": 0, "deadline_misses": 0}), CONFIG) == []


def test_a_run_of_nothing_is_told_so() -> None:
    run = simulate([], preset(), load_profile("qwen3-0.6b-h200"))
    (finding,) = examine(summarize(run.metrics), run.metrics.config)
    assert finding.symptom == "nothing ran"


def test_real_summaries_can_be_examined() -> None:
    profile = load_profile("qwen3-0.6b-h200")
    text = "requests=40,arrivals=poisson(2000),prompt=20,output=uniform(20,60),max_tokens=60"
    jobs = parse_synthetic(text).jobs()
    small = preset(
        "vllm_v1", block_size=4, num_blocks=60, max_num_seqs=16, max_num_batched_tokens=64
    )
    sick = simulate(jobs, small, profile).metrics
    findings = examine(summarize(sick), sick.config)
    assert findings and findings[0].symptom.startswith("thrashing")
    assert all(isinstance(f, Finding) and all(f) for f in findings)
    well = simulate(jobs, preset("vllm_v1"), profile).metrics
    assert not any("thrash" in f.symptom for f in examine(summarize(well), well.config))
