"""Laws of the doctor: every symptom gives its own finding and no other."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from headway.lab.cost import load_profile
from headway.lab.doctor.diagnose import DERIVED, Finding, diagnose
from headway.lab.simulate import simulate
from headway.lab.summary import Summary, summarize
from headway.lab.workload.synthetic import parse_synthetic
from headway.scheduler import preset
from headway.scheduler.policies.chunk import hold_tbt
from headway.scheduler.policies.presets import PRESETS, SLOTS, describe

CHUNKS = ("split_any", "at_most(64)", "whole", "hold_tbt(0.03)", "hold_tbt(0.5)")
CONFIG: dict[str, Any] = describe(preset("vllm_v1"))
HEALTHY: Summary = {
    "steps": 1000,
    "preemptions": 3,
    "preemptions_by_swap": 0,
    "preemptions_per_second": 0.1,
    "recompute_tax": 0.01,
    "per_step": {
        "waiting": 2.0, "running_share": 0.9, "tokens_share": 0.5, "tokens": 4000.0,
        "prefill_share": 0.3,
    },
    "queue_time": {"p90": 0.2},
    "time_between_tokens": {"mean": 0.02, "p50": 0.02, "p99": 0.04},
    "longest_stall": {"p50": 0.05, "p99": 0.15, "max": 0.9},
    "swap_in": {"p50": 0.004},
    "waiting_steps_by_reason": {"max_num_seqs": 10, "blocks": 3},
    "deadlines": 100,
    "deadline_misses": 1,
    "clients": 3,
    "fairness": 0.95,
    "drafted_tokens": 5000,
    "accepted_share": 0.5,
    "tokens_per_verification": 2.5,
}  # fmt: skip
SYMPTOMS: dict[str, tuple[dict[str, Any], str, str]] = {
    "preempting": ({"preemptions_per_second": 3.0}, "preempting often: 3.0", "future_peak"),
    "thrashing": ({"preemptions_per_second": 30.0}, "thrashing: 30.0", "max_num_seqs"),
    "recompute tax": ({"recompute_tax": 0.2}, "20.0%", "watermark"),
    "waiting": (
        {"per_step.waiting": 60.0, "queue_time.p90": 9.0}, "60 requests", "raise max_num_seqs",
    ),
    "idle": ({"per_step.running_share": 0.2}, "20% of max_num_seqs", "raise max_num_batched"),
    "idle budget": (
        {"per_step.tokens_share": 0.01, "per_step.tokens": 80.0}, "80 tokens, 1.0%", "max_num_seqs",
    ),
    "prefill": ({"per_step.prefill_share": 0.9}, "90%", "max_num_batched_tokens"),
    "stalls": ({"time_between_tokens.p99": 0.4}, "between tokens: p99 400 ms", "hold_tbt(0.05)"),
    "stalls of many": ({"longest_stall.p99": 0.4}, "p99 400 ms", "lower max_num_batched_tokens"),
    "a long stall": ({"longest_stall.max": 1.6}, "up to 1,600 ms, 80x", "at_most"),
    "stalls with multi-step": (
        {"longest_stall.p99": 0.4, "time_between_tokens.p50": 0.0}, "p99 400 ms", "at_most",
    ),
    "swap-in": ({"swap_in.p50": 0.03}, "30 ms", "use swap swap_if_cheaper"),
    "late": ({"deadline_misses": 30}, "30 of 100", "queue earliest_deadline"),
    "unfair": ({"fairness": 0.5}, "0.50", "queue fair"),
}  # fmt: skip


def summary_with(changes: dict[str, Any]) -> Summary:
    """The healthy summary with changed values; `a.b` is the field b of a."""
    summary = deepcopy(HEALTHY)
    for path, value in changes.items():
        *parents, last = path.split(".")
        target = summary
        for parent in parents:
            target = target[parent]
        target[last] = value
    return summary


def test_a_healthy_run_has_no_findings() -> None:
    assert diagnose(HEALTHY, CONFIG) == []


@pytest.mark.parametrize("name", SYMPTOMS)
def test_a_symptom_gives_its_finding_and_no_other(name: str) -> None:
    changes, symptom, remedy = SYMPTOMS[name]
    findings = diagnose(summary_with(changes), CONFIG)
    assert len(findings) == 1
    assert symptom in findings[0].symptom and remedy in findings[0].remedy and findings[0].cause


@pytest.mark.parametrize("name", PRESETS)
def test_no_remedy_names_what_the_configuration_has(name: str) -> None:
    queues = ("fcfs", "fair", "earliest_deadline")
    for chunk, queue in ((c, q) for c in CHUNKS for q in queues):
        config: dict[str, Any] = describe(preset(name, chunk=chunk, queue=queue))
        for changes, _, _ in SYMPTOMS.values():
            summary = summary_with({**changes, "preemptions": 0})
            for finding in diagnose(summary, {**config, "num_host_blocks": 9}):
                for slot in SLOTS:
                    value = str(config[slot]).partition("(")[0]
                    assert f"use {slot} {value}" not in finding.remedy
                assert "avoid preemptions" not in finding.remedy
                assert "watermark" not in finding.remedy or "watermark" in str(config["headroom"])
                assert finding.remedy and "or preemptions" not in finding.cause


def test_a_remedy_names_what_the_configuration_lacks() -> None:
    config = describe(preset("static", chunk="whole"))
    (finding,) = diagnose(summary_with(SYMPTOMS["idle"][0]), config)
    assert "use batching mixed, use chunk split_any or raise" in finding.remedy


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("max_num_seqs", "max_num_seqs"), ("token_budget", "max_num_batched_tokens"), ("blocks", "KV blocks"),
        ("headroom", "headroom"), ("back_off", "KV blocks"),
        ("behind_blocked", "max_overtakes"), ("not_reached", "batching"),
        ("after_preemption", "future_peak"),
        ("", "capacity"),
    ],
)  # fmt: skip
def test_the_remedy_for_waiting_follows_the_most_frequent_reason(reason: str, remedy: str) -> None:
    others = {"other": 1} if reason not in ("", *DERIVED) else {}
    reasons = {**others, **({reason: 99} if reason else {})}
    changes = {
        "per_step.waiting": 60.0, "queue_time.p90": 9.0, "waiting_steps_by_reason": reasons,
    }  # fmt: skip
    (finding,) = diagnose(summary_with(changes), CONFIG)
    assert remedy in finding.remedy and (reason or "unknown") in finding.cause


def test_waiting_in_order_is_not_the_main_reason_if_there_is_another() -> None:
    reasons = {"behind_blocked": 99, "blocks": 5}
    changes = {
        "per_step.waiting": 60.0, "queue_time.p90": 9.0, "waiting_steps_by_reason": reasons,
    }  # fmt: skip
    (finding,) = diagnose(summary_with(changes), CONFIG)
    assert "blocks" in finding.cause and "behind" not in finding.cause


def test_drafts_that_are_rarely_right_are_found_unless_the_rule_knows_the_costs() -> None:
    changes = {"accepted_share": 0.04, "tokens_per_verification": 1.15}
    for draft, is_found in (("fixed(4)", True), ("by_cost", False), ("none", False)):
        config = describe(preset("vllm_v1", draft=draft))
        findings = diagnose(summary_with(changes), config)
        assert len(findings) == is_found
        for finding in findings:
            assert finding.changes == ("draft=by_cost", "draft=none") and "4%" in finding.symptom
    assert not diagnose(HEALTHY, describe(preset("vllm_v1", draft="fixed(4)")))


def test_swapping_without_host_memory_is_found() -> None:
    swapping = {**CONFIG, "swap": "swap"}
    (finding,) = diagnose(HEALTHY, swapping)
    assert "3 preemptions" in finding.symptom and "num_host_blocks" in finding.remedy
    assert diagnose(HEALTHY, {**swapping, "num_host_blocks": 10}) == []
    assert diagnose(summary_with({"preemptions": 0}), swapping) == []


def test_one_client_cannot_be_unfair_and_no_deadline_cannot_be_missed() -> None:
    assert diagnose(summary_with({"clients": 1, "fairness": 0.1}), CONFIG) == []
    assert diagnose(summary_with({"deadlines": 0, "deadline_misses": 0}), CONFIG) == []


def test_a_run_without_steps_has_one_finding() -> None:
    result = simulate([], preset(), load_profile("qwen3-0.6b-h200"))
    (finding,) = diagnose(summarize(result.metrics), result.metrics.config)
    assert "no steps" in finding.symptom and "rejected" in finding.cause


def test_real_summaries_can_be_examined() -> None:
    profile = load_profile("qwen3-0.6b-h200")
    text = "requests=40,arrivals=poisson(2000),prompt=20,output=uniform(20,60),max_tokens=60"
    requests = parse_synthetic(text).generate()
    small = preset(
        "vllm_v1", block_size=4, num_blocks=60, max_num_seqs=16, max_num_batched_tokens=64
    )
    sick = simulate(requests, small, profile).metrics
    findings = diagnose(summarize(sick), sick.config)
    assert findings and findings[0].symptom.startswith("thrashing")
    assert all(isinstance(f, Finding) and all(f) for f in findings)
    well = simulate(requests, preset("vllm_v1"), profile).metrics
    assert not any("thrash" in f.symptom for f in diagnose(summarize(well), well.config))


@pytest.mark.parametrize("name", SYMPTOMS)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_every_change_of_a_finding_is_a_valid_other_configuration(name: str, chunk: str) -> None:
    config: dict[str, Any] = describe(preset("vllm_v1", chunk=chunk))
    (finding,) = diagnose(summary_with(SYMPTOMS[name][0]), config)
    assert finding.changes
    for change in finding.changes:
        slot, _, value = change.partition("=")
        changed = describe(preset(**{**config, slot: int(value) if value.isdigit() else value}))
        assert changed != config and changed | {slot: config[slot]} == config


def stall_changes(chunk: str, usual: float = 0.02) -> tuple[str, ...]:
    """The changes for stalls that are ten times as long as is not noticed."""
    config = describe(preset("vllm_v1", chunk=chunk, max_num_batched_tokens=8192))
    summary = summary_with({"longest_stall.max": 2.0, "time_between_tokens.p50": usual})
    (finding,) = diagnose(summary, config)
    return finding.changes


def test_stalls_with_a_batching_rule_that_mixes_do_not_blame_it() -> None:
    for batching, is_blamed in {"swapped_first": False, "mixed": False, "static": True}.items():
        config = describe(preset("vllm_v1", batching=batching))
        (finding,) = diagnose(summary_with({"longest_stall.max": 2.0}), config)
        assert ("batching=mixed" in finding.changes) == is_blamed


def test_a_change_for_stalls_makes_smaller_chunks() -> None:
    for chunk, smaller in {"split_any": "at_most(512)", "at_most(64)": "at_most(32)"}.items():
        held, *others = stall_changes(chunk)
        assert others == [f"chunk={smaller}", "max_num_batched_tokens=512"]
        assert held == "chunk=hold_tbt(0.05)"


@pytest.mark.parametrize(("usual", "seconds"), [(0.002, 0.05), (0.03, 0.1), (0.15, 0.5)])
def test_the_time_to_hold_follows_the_usual_time_between_tokens(
    usual: float, seconds: float
) -> None:
    assert stall_changes("split_any", usual)[0] == f"chunk=hold_tbt({seconds:g})"
    measured = str(hold_tbt(2 * seconds, weights=0.001))
    assert stall_changes(measured, usual)[0] == f"chunk=hold_tbt({seconds:g})"
    assert not any("hold" in each for each in stall_changes(f"hold_tbt({seconds})", usual))
