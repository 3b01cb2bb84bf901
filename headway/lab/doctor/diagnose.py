"""The doctor: find problems in the summary of a run, with the likely cause and a remedy to try."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from headway.lab.summary import Summary
from headway.observe import vitals
from headway.scheduler.policies.presets import slot


class Finding(NamedTuple):
    """One problem of a run, and changes of the configuration that may cure it."""

    symptom: str
    cause: str
    remedy: str
    changes: tuple[str, ...] = ()  # such as "chunk=at_most(512)"


class Remedy(NamedTuple):
    """A phrase, and the change of the configuration that it describes."""

    text: str
    change: str


def diagnose(summary: Summary, config: dict[str, Any]) -> list[Finding]:
    """All problems found; empty for a healthy run."""
    if not summary["steps"]:
        return [
            Finding(
                "no steps ran",
                "all requests were rejected",
                "read the reasons listed with the rejected requests",
            )
        ]
    checks = (_thrash, _waiting, _idle, _budget, _prefill, _swap, _swap_in, _stalls, _late, _unfair)
    return [finding for check in checks if (finding := check(summary, config))]


NUM_TOKENS = "max_num_batched_tokens"
CHUNK = 512  # tokens; a chunk that stops other streams for a short time on most machines
MEMORY = ("blocks", "headroom", "back_off", "just_preempted", "after_preemption")
DERIVED = ("behind_blocked", "not_reached", "parent")  # other requests have the actual reason


def _top_reason(summary: Summary) -> str:
    """The most frequent reason for waiting; one that follows from others counts only alone."""
    reasons = summary["waiting_steps_by_reason"]
    own = {reason: steps for reason, steps in reasons.items() if reason not in DERIVED} or reasons
    return max(own, key=lambda reason: own[reason]) if own else ""


def _has(config: dict[str, Any], slot: str, value: str) -> bool:
    """Whether the slot has this value, with any numbers."""
    return str(config[slot]).partition("(")[0] == value.partition("(")[0]


def _use(config: dict[str, Any], slot: str, value: str) -> Remedy | None:
    """Use this value of a slot; None if the configuration has it."""
    is_used = _has(config, slot, value)
    return None if is_used else Remedy(f"use {slot} {value}", f"{slot}={value}")


def _scale(config: dict[str, Any], name: str, factor: float) -> Remedy:
    """Raise or lower a number."""
    verb = "raise" if factor > 1 else "lower"
    return Remedy(f"{verb} {name}", f"{name}={max(1, round(config[name] * factor))}")


def _remedies(*remedies: Remedy | str | None) -> tuple[str, tuple[str, ...]]:
    """The remedies as one sentence, and the changes among them."""
    given = [each for each in remedies if each is not None]
    texts = [each if isinstance(each, str) else each.text for each in given]
    sentence = f"{', '.join(texts[:-1])} or {texts[-1]}" if len(texts) > 1 else texts[0]
    return sentence, tuple(each.change for each in given if isinstance(each, Remedy))


def _thrash(summary: Summary, config: dict[str, Any]) -> Finding | None:
    rate, tax = summary["preemptions_per_second"], summary["recompute_tax"]
    if rate <= vitals.MAX_PREEMPTIONS and tax <= vitals.MAX_RECOMPUTE_TAX:
        return None
    degree = "thrashing" if rate > 10 or tax > 0.15 else "preempting often"
    return Finding(
        f"{degree}: {rate:.1f} preemptions/s, {tax:.1%} of all computed tokens are recomputed",
        "requests are admitted although the KV cache has no room for their outputs",
        *_remedies(
            _use(config, "headroom", "future_peak"),
            "raise the watermark" if "watermark" in str(config["headroom"]) else None,
            _scale(config, "max_num_seqs", 0.5),
            _use(config, "victim", "least_work"),
            "swap if the host has memory" if _has(config, "swap", "recompute") else None,
        ),
    )


def _waiting(summary: Summary, config: dict[str, Any]) -> Finding | None:
    waiting, queue = summary["per_step"]["waiting"], summary["queue_time"]["p90"]
    if waiting <= vitals.MAX_WAITING or queue < 1:
        return None
    remedies: dict[str, str | Remedy | None] = {
        "max_num_seqs": _scale(config, "max_num_seqs", 2),
        "token_budget": _scale(config, NUM_TOKENS, 2),
        "blocks": "add KV blocks (a larger GPU or a smaller model) or lower max_tokens of the requests",
        "window_blocks": "add KV memory: the sliding-window layers have too few blocks",
        "headroom": "add KV blocks or use a less cautious headroom",
        "back_off": "add KV blocks: back_off delays admission after preemptions",
        "just_preempted": "add KV blocks: preempted requests wait until the next step",
        "reserved_rows": "raise max_num_seqs: the last rows are reserved for other clients",
        "after_preemption": _use(config, "headroom", "future_peak")
        or "add KV blocks: preemptions stop admissions",
        "behind_blocked": "set the queue's max_overtakes, so that requests can overtake a blocked one",
        "not_reached": "use a batching rule that admits requests while others decode",
    }
    reason = _top_reason(summary)
    remedy, changes = _remedies(remedies.get(reason, "add capacity"))
    return Finding(
        f"{waiting:.0f} requests wait on average; p90 of the queue time is {queue:.1f} s",
        f"more work arrives than completes; the most frequent reason to wait is "
        f"{reason or 'unknown'}",
        f"{remedy}; or add GPUs",
        changes,
    )


def _idle(summary: Summary, config: dict[str, Any]) -> Finding | None:
    share, waiting = summary["per_step"]["running_share"], summary["per_step"]["waiting"]
    if share >= vitals.MIN_RUNNING or waiting < 1 or _top_reason(summary) in MEMORY:
        return None  # another finding covers memory limits
    return Finding(
        f"only {share:.0%} of max_num_seqs run on average while requests wait",
        "the batching rule or the queue rule admits too few requests; "
        f"the most frequent reason to wait is {_top_reason(summary)}",
        *_remedies(
            _use(config, "batching", "mixed") if _has(config, "batching", "static") else None,
            _use(config, "chunk", "split_any"),
            _scale(config, NUM_TOKENS, 2),
        ),
    )


def _budget(summary: Summary, config: dict[str, Any]) -> Finding | None:
    share, waiting = summary["per_step"]["tokens_share"], summary["per_step"]["waiting"]
    if share >= vitals.MIN_TOKENS or waiting < 1 or _top_reason(summary) in MEMORY:
        return None
    return Finding(
        f"a step computes {summary['per_step']['tokens']:.0f} tokens, {share:.1%} of its budget",
        "steps use little of max_num_batched_tokens while requests wait",
        *_remedies(
            _use(config, "chunk", "split_any"), _scale(config, "max_num_seqs", 2), "add KV blocks"
        ),
    )


def _prefill(summary: Summary, config: dict[str, Any]) -> Finding | None:
    share = summary["per_step"]["prefill_share"]
    if share <= vitals.MAX_PREFILL_SHARE:
        return None
    is_cut = _has(config, "chunk", "at_most")
    smaller = "lower n of at_most(n)" if is_cut else "use chunk at_most(n)"
    return Finding(
        f"{share:.0%} of the computed tokens are prompt tokens (typical: 20-40%)",
        "the workload is prefill-bound: long prompts, short outputs",
        f"raise max_num_batched_tokens with a low max_num_seqs, or share prefixes; {smaller} if the "
        "time between tokens is too long; separate prefill and decode replicas may help as well: see "
        "`headway simulate --disaggregate 1:1`",
        (_scale(config, NUM_TOKENS, 2).change,),
    )


def _swap(summary: Summary, config: dict[str, Any]) -> Finding | None:
    fallbacks = summary["preemptions"] - summary["preemptions_by_swap"]
    wants_swap = not str(config["swap"]).startswith("recompute")
    if not wants_swap or config["num_host_blocks"] or not fallbacks:
        return None
    return Finding(
        f"{fallbacks} preemptions recompute although the swap rule is {config['swap']}",
        "num_host_blocks is 0, so there is no host memory to swap to",
        "set num_host_blocks",
    )


def _swap_in(summary: Summary, config: dict[str, Any]) -> Finding | None:
    seconds = summary["swap_in"]["p50"]
    if seconds <= vitals.MAX_SWAP_IN:
        return None
    return Finding(
        f"a swap-in takes {_ms(seconds)} (p50; usual: 1-5 ms)",
        "the link to the host is slow, or requests are long",
        *_remedies(_use(config, "swap", "swap_if_cheaper"), _use(config, "swap", "recompute")),
    )


MIN_BUDGET = 64  # tokens; a lower one makes the prefill of short prompts slow
MIN_GAP = 0.05  # seconds; p99 of the times between tokens


def _stalls(summary: Summary, config: dict[str, Any]) -> Finding | None:
    gaps, stalls = summary["time_between_tokens"], summary["longest_stall"]
    usual = gaps["p50"] or gaps["mean"]  # with multi-step decodes most gaps are 0
    limits = (
        (gaps["p99"], MIN_GAP), (stalls["p99"], vitals.MAX_P99_STALL),
        (stalls["max"], vitals.MAX_STALL),
    )  # fmt: skip
    if usual <= 0 or not any(value >= max(least, 8 * usual) for value, least in limits):
        return None
    return Finding(
        f"streams pause for up to {_ms(stalls['max'])}, {stalls['max'] / usual:.0f}x the usual time "
        f"between tokens; longest stall of a request: p50 {_ms(stalls['p50'])}, p99 "
        f"{_ms(stalls['p99'])}; time between tokens: p99 {_ms(gaps['p99'])}",
        f"long prompts{' or preemptions' if summary['preemptions'] else ''} delay decoding requests",
        *_remedies(
            _held_steps(config, usual),
            _smaller_chunks(config),
            _lower_budget(config, stalls["max"]),
            None
            if _has(config, "batching", "swapped_first")
            else _use(config, "batching", "mixed"),
            "avoid preemptions" if summary["preemptions"] else None,
        ),
    )


def _held_steps(config: dict[str, Any], usual: float) -> Remedy | None:
    """Steps of about four usual times between tokens; a shorter time makes long prompts wait.

    None if the chunk rule holds that already.
    """
    wanted = max(MIN_GAP, 4 * usual)
    power = 10.0 ** math.floor(math.log10(wanted))
    seconds = max(digit * power for digit in (1, 2, 5) if digit * power <= wanted * (1 + 1e-9))
    change = f"chunk=hold_tbt({seconds:g})"
    if not _has(config, "chunk", "hold_tbt"):
        return Remedy(f"use chunk hold_tbt({seconds:g}) to keep steps under {_ms(seconds)}", change)
    is_longer = slot("chunk", config["chunk"]).seconds > seconds
    return Remedy(f"lower seconds of hold_tbt to {seconds:g}", change) if is_longer else None


def _smaller_chunks(config: dict[str, Any]) -> Remedy:
    """Chunks of at most 512 tokens, and of at most half of the present limit."""
    if _has(config, "chunk", "at_most"):
        limit = int("".join(filter(str.isdigit, config["chunk"])) or CHUNK)
        return Remedy("lower n of at_most(n)", f"chunk=at_most({max(1, limit // 2)})")
    limit = max(1, min(CHUNK, config[NUM_TOKENS] // 2))
    return Remedy("use chunk at_most(n)", f"chunk=at_most({limit})")


def _lower_budget(config: dict[str, Any], stall: float) -> Remedy | None:
    """A budget whose steps are about as long as a stall that is not noticed, as a power of two.

    None with whole prompts: a lower budget would refuse the long ones.
    """
    budget = config[NUM_TOKENS]
    if _has(config, "chunk", "whole") or budget <= MIN_BUDGET:
        return None
    least = vitals.MAX_P99_STALL
    wanted = max(MIN_BUDGET, budget * min(0.5, least / max(stall, least)))
    return Remedy(f"lower {NUM_TOKENS}", f"{NUM_TOKENS}={1 << (int(wanted).bit_length() - 1)}")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms"


def _late(summary: Summary, config: dict[str, Any]) -> Finding | None:
    misses, deadlines = summary["deadline_misses"], summary["deadlines"]
    if not deadlines or misses <= 0.01 * deadlines:
        return None
    return Finding(
        f"{misses} of {deadlines} deadlines missed",
        "capacity is too low"
        if _has(config, "queue", "earliest_deadline")
        else "the queue ignores deadlines, or capacity is too low",
        *_remedies(_use(config, "queue", "earliest_deadline"), "send fewer requests to each GPU"),
    )


def _unfair(summary: Summary, config: dict[str, Any]) -> Finding | None:
    if summary["clients"] < 2 or summary["fairness"] >= 0.8:
        return None
    return Finding(
        f"fairness between clients is {summary['fairness']:.2f} (1 is equal)",
        "a few clients send most of the work",
        *_remedies(_use(config, "queue", "fair"), _scale(config, NUM_TOKENS, 0.5)),
    )
