"""What ails a run: symptoms from its summary, the likely cause, the remedy to try."""

from __future__ import annotations

from typing import Any, NamedTuple

from headway.lab.summary import Summary


class Finding(NamedTuple):
    """One line of the doctor's."""

    symptom: str
    cause: str
    remedy: str


def examine(summary: Summary, config: dict[str, Any]) -> list[Finding]:
    """Everything that stands out; empty if the run looks healthy."""
    if not summary["steps"]:
        return [Finding("nothing ran", "every request was refused", "see the reasons given")]
    checks = (_thrash, _waiting, _seats, _budget, _prefill, _swap, _stalls, _late, _unfair)
    return [finding for check in checks if (finding := check(summary, config))]


MEMORY = ("blocks", "headroom", "back_off", "just_preempted")


def _top_reason(summary: Summary) -> str:
    """What the waiting lacked most often; standing behind somebody else is no lack of its own."""
    reasons = summary["waiting_steps_by_reason"]
    lacks = {reason: steps for reason, steps in reasons.items() if reason != "order"} or reasons
    return max(lacks, key=lambda reason: lacks[reason]) if lacks else ""


def _thrash(summary: Summary, config: dict[str, Any]) -> Finding | None:
    rate, tax = summary["preemptions_per_second"], summary["recompute_tax"]
    if rate <= 1 and tax <= 0.05:
        return None
    degree = "thrashing" if rate > 10 or tax > 0.15 else "preempting often"
    return Finding(
        f"{degree}: {rate:.1f} preemptions/s, {tax:.1%} of all computed tokens were computed before",
        "requests are admitted without room for the output they will make",
        "headroom future_peak or a higher watermark, fewer seats (max_num_seqs), "
        "victim least_work; swap if the host has memory",
    )


def _waiting(summary: Summary, config: dict[str, Any]) -> Finding | None:
    waiting, queue = summary["per_step"]["waiting"], summary["queue_time"]["p90"]
    if waiting <= 5 or queue < 1:
        return None
    remedies = {
        "max_num_seqs": "raise max_num_seqs",
        "token_budget": "raise max_num_batched_tokens, the budget of a step",
        "blocks": "more KV blocks: a larger card, a smaller model or a shorter max_tokens",
        "headroom": "more KV blocks, or a less cautious headroom",
        "back_off": "more KV blocks; preemptions hold admission back",
        "just_preempted": "more KV blocks; preemptions hold admission back",
        "reserved_rows": "raise max_num_seqs; its last rows are reserved for other clients",
        "order": "allow the queue some patience, so that small requests pass a blocked one",
    }
    reason = _top_reason(summary)
    return Finding(
        f"{waiting:.0f} requests wait on average, p90 of their queue time {queue:.1f} s",
        f"more work arrives than is done; most often they lack {reason or 'capacity'}",
        remedies.get(reason, "add capacity") + "; or add GPUs",
    )


def _seats(summary: Summary, config: dict[str, Any]) -> Finding | None:
    share, waiting = summary["per_step"]["seats_share"], summary["per_step"]["waiting"]
    if share >= 0.5 or waiting < 1 or _top_reason(summary) in MEMORY:
        return None  # where memory is the limit, that is said already
    return Finding(
        f"only {share:.0%} of the seats are taken while others wait",
        f"the recipe or the queue; most often the waiting lack {_top_reason(summary)}",
        "a continuous recipe instead of static batching; chunk split_any; a larger max_num_batched_tokens",
    )


def _budget(summary: Summary, config: dict[str, Any]) -> Finding | None:
    share = summary["per_step"]["tokens_share"]
    if share >= 0.1 or summary["per_step"]["waiting"] < 1 or _top_reason(summary) in MEMORY:
        return None
    return Finding(
        f"a step computes {summary['per_step']['tokens']:.0f} tokens, {share:.1%} of its budget",
        "steps are under-filled while requests wait",
        "chunk split_any, more seats or more KV blocks",
    )


def _prefill(summary: Summary, config: dict[str, Any]) -> Finding | None:
    share = summary["per_step"]["prefill_share"]
    if share <= 0.8:
        return None
    return Finding(
        f"{share:.0%} of the computed tokens are prompts (healthy: 20-40 %)",
        "prefill-bound: long prompts, short outputs",
        "a larger max_num_batched_tokens with few seats, shared prefixes for the cache; "
        "chunk at_most(n) if the time between tokens suffers",
    )


def _swap(summary: Summary, config: dict[str, Any]) -> Finding | None:
    fallbacks = summary["preemptions"] - summary["preemptions_by_swap"]
    wants_swap = not str(config["swap"]).startswith("recompute")
    if not wants_swap or config["num_host_blocks"] or not fallbacks:
        return None
    return Finding(
        f"{fallbacks} preemptions recomputed although the swap rule is {config['swap']}",
        "there is no host memory to swap to",
        "set num_host_blocks",
    )


def _stalls(summary: Summary, config: dict[str, Any]) -> Finding | None:
    gaps = summary["time_between_tokens"]
    if gaps["p50"] <= 0 or gaps["p99"] < 8 * gaps["p50"] or gaps["p99"] < 0.05:
        return None
    return Finding(
        f"time between tokens p99 {gaps['p99'] * 1e3:.0f} ms, {gaps['p99'] / gaps['p50']:.0f}x p50",
        "long prompts, or preemptions, hold up those who decode",
        "a smaller max_num_batched_tokens or chunk at_most(n), recipe mixed, fewer preemptions",
    )


def _late(summary: Summary, config: dict[str, Any]) -> Finding | None:
    misses, deadlines = summary["deadline_misses"], summary["deadlines"]
    if not deadlines or misses <= 0.01 * deadlines:
        return None
    return Finding(
        f"{misses} of {deadlines} deadlines missed",
        "the queue's order does not look at deadlines, or there is too little capacity",
        "queue deadline; fewer requests per card",
    )


def _unfair(summary: Summary, config: dict[str, Any]) -> Finding | None:
    if summary["clients"] < 2 or summary["fairness"] >= 0.8:
        return None
    return Finding(
        f"fairness between clients {summary['fairness']:.2f} (1 is equal)",
        "a few clients send most of the work",
        "queue fair",
    )
