"""The doctor: find problems in the summary of a run, with the likely cause and a remedy to try."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from headway.lab.summary import Summary
from headway.observe import vitals
from headway.scheduler.policies.presets import slot

NUM_TOKENS = "max_num_batched_tokens"
CHUNK = 512  # tokens; a chunk that stops other streams for a short time on most machines
MIN_BUDGET = 64  # tokens; a lower one makes the prefill of short prompts slow
MIN_GAP = 0.05  # seconds; p99 of the times between tokens
MIN_KEPT = 1.2  # tokens of a request with drafts in a step
MEMORY = ("blocks", "headroom", "back_off", "just_preempted", "after_preemption")
DERIVED = ("behind_blocked", "not_reached", "parent")  # other requests have the actual reason


class Finding(NamedTuple):
    """One problem of a run, and changes of the configuration that may cure it."""

    symptom: str
    cause: str
    remedy: str
    changes: tuple[str, ...] = ()  # such as "chunk=at_most(512)"


class Remedy(NamedTuple):
    """A phrase, and the change of the configuration that it describes; "" for none."""

    text: str
    change: str = ""


@dataclass(frozen=True, slots=True)
class Examined:
    """A run, and remedies that change its configuration."""

    summary: Summary
    config: Mapping[str, str | int]

    def has(self, slot: str, value: str) -> bool:
        """Whether the slot has this value, with any numbers."""
        return str(self.config[slot]).partition("(")[0] == value.partition("(")[0]

    def use(self, slot: str, value: str) -> Remedy | None:
        """Use this value of a slot; None if the configuration has it."""
        is_used = self.has(slot, value)
        return None if is_used else Remedy(f"use {slot} {value}", f"{slot}={value}")

    def scale(self, name: str, factor: float) -> Remedy:
        verb = "raise" if factor > 1 else "lower"
        return Remedy(f"{verb} {name}", f"{name}={max(1, round(int(self.config[name]) * factor))}")

    @property
    def top_reason(self) -> str:
        """The most frequent reason for waiting; one that follows from others counts only alone."""
        reasons: dict[str, int] = self.summary["waiting_steps_by_reason"]
        own = {reason: n for reason, n in reasons.items() if reason not in DERIVED} or reasons
        return max(own, key=lambda reason: own[reason], default="")

    @property
    def is_held_up(self) -> bool:
        """Whether requests wait although there is memory, which other findings cover."""
        return self.top_reason not in MEMORY and bool(self.summary["per_step"]["waiting"] >= 1)


def diagnose(summary: Summary, config: Mapping[str, str | int]) -> list[Finding]:
    """All problems found; empty for a healthy run."""
    if not summary["steps"]:
        remedy = "read the reasons listed with the rejected requests"
        return [Finding("no steps ran", "all requests were rejected", remedy)]
    checks = (
        _thrash, _waiting, _idle, _budget, _prefill, _swap, _swap_in, _stalls, _drafts, _late, _unfair,
    )  # fmt: skip
    return [finding for check in checks if (finding := check(Examined(summary, config)))]


def _finding(symptom: str, cause: str, *remedies: Remedy | str | None) -> Finding:
    """A finding with the remedies as one sentence; None is left out."""
    given = [Remedy(each) if isinstance(each, str) else each for each in remedies if each]
    *others, last = (each.text for each in given)
    sentence = f"{', '.join(others)} or {last}" if others else last
    return Finding(symptom, cause, sentence, tuple(each.change for each in given if each.change))


def _thrash(run: Examined) -> Finding | None:
    rate, tax = run.summary["preemptions_per_second"], run.summary["recompute_tax"]
    if rate <= vitals.MAX_PREEMPTIONS and tax <= vitals.MAX_RECOMPUTE_TAX:
        return None
    degree = "thrashing" if rate > 10 or tax > 0.15 else "preempting often"
    return _finding(
        f"{degree}: {rate:.1f} preemptions/s, {tax:.1%} of all computed tokens are recomputed",
        "requests are admitted although the KV cache has no room for their outputs",
        run.use("headroom", "future_peak"),
        "raise the watermark" if "watermark" in str(run.config["headroom"]) else None,
        run.scale("max_num_seqs", 0.5),
        run.use("victim", "least_work"),
        "swap if the host has memory" if run.has("swap", "recompute") else None,
    )


def _waiting(run: Examined) -> Finding | None:
    waiting, queue = run.summary["per_step"]["waiting"], run.summary["queue_time"]["p90"]
    if waiting <= vitals.MAX_WAITING or queue < 1:
        return None
    remedies: dict[str, str | Remedy] = {
        "max_num_seqs": run.scale("max_num_seqs", 2),
        "token_budget": run.scale(NUM_TOKENS, 2),
        "blocks": "add KV blocks (a larger GPU or a smaller model) or lower max_tokens of the requests",
        "window_blocks": "add KV memory: the sliding-window layers have too few blocks",
        "headroom": "add KV blocks or use a less cautious headroom",
        "back_off": "add KV blocks: back_off delays admission after preemptions",
        "just_preempted": "add KV blocks: preempted requests wait until the next step",
        "reserved_rows": "raise max_num_seqs: the last rows are reserved for other clients",
        "after_preemption": run.use("headroom", "future_peak")
        or "add KV blocks: preemptions stop admissions",
        "behind_blocked": "set the queue's max_overtakes, so that requests can overtake a blocked one",
        "not_reached": "use a batching rule that admits requests while others decode",
    }
    found = _finding(
        f"{waiting:.0f} requests wait on average; p90 of the queue time is {queue:.1f} s",
        f"more work arrives than completes; the most frequent reason to wait is "
        f"{run.top_reason or 'unknown'}",
        remedies.get(run.top_reason, "add capacity"),
    )
    return found._replace(remedy=f"{found.remedy}; or add GPUs")


def _idle(run: Examined) -> Finding | None:
    share = run.summary["per_step"]["running_share"]
    if share >= vitals.MIN_RUNNING or not run.is_held_up:
        return None
    return _finding(
        f"only {share:.0%} of max_num_seqs run on average while requests wait",
        "the batching rule or the queue rule admits too few requests; "
        f"the most frequent reason to wait is {run.top_reason}",
        run.use("batching", "mixed") if run.has("batching", "static") else None,
        run.use("chunk", "split_any"),
        run.scale(NUM_TOKENS, 2),
    )


def _budget(run: Examined) -> Finding | None:
    per_step = run.summary["per_step"]
    if per_step["tokens_share"] >= vitals.MIN_TOKENS or not run.is_held_up:
        return None
    return _finding(
        f"a step computes {per_step['tokens']:.0f} tokens, {per_step['tokens_share']:.1%} of its "
        "budget",
        "steps use little of max_num_batched_tokens while requests wait",
        run.use("chunk", "split_any"),
        run.scale("max_num_seqs", 2),
        "add KV blocks",
    )


def _prefill(run: Examined) -> Finding | None:
    share = run.summary["per_step"]["prefill_share"]
    if share <= vitals.MAX_PREFILL_SHARE:
        return None
    smaller = _smaller_chunks(run).text
    return Finding(
        f"{share:.0%} of the computed tokens are prompt tokens (typical: 20-40%)",
        "the workload is prefill-bound: long prompts, short outputs",
        f"raise max_num_batched_tokens with a low max_num_seqs, or share prefixes; {smaller} if the "
        "time between tokens is too long; separate prefill and decode replicas may help as well: see "
        "`headway simulate --disaggregate 1:1`",
        (run.scale(NUM_TOKENS, 2).change,),
    )


def _swap(run: Examined) -> Finding | None:
    fallbacks = run.summary["preemptions"] - run.summary["preemptions_by_swap"]
    rule = str(run.config["swap"])
    if rule.startswith("recompute") or run.config["num_host_blocks"] or not fallbacks:
        return None
    return Finding(
        f"{fallbacks} preemptions recompute although the swap rule is {rule}",
        "num_host_blocks is 0, so there is no host memory to swap to",
        "set num_host_blocks",
    )


def _swap_in(run: Examined) -> Finding | None:
    seconds = run.summary["swap_in"]["p50"]
    if seconds <= vitals.MAX_SWAP_IN:
        return None
    return _finding(
        f"a swap-in takes {_ms(seconds)} (p50; usual: 1-5 ms)",
        "the link to the host is slow, or requests are long",
        run.use("swap", "swap_if_cheaper"),
        run.use("swap", "recompute"),
    )


def _stalls(run: Examined) -> Finding | None:
    gaps, stalls = run.summary["time_between_tokens"], run.summary["longest_stall"]
    usual = gaps["p50"] or gaps["mean"]  # with multi-step decodes most gaps are 0
    limits = (
        (gaps["p99"], MIN_GAP), (stalls["p99"], vitals.MAX_P99_STALL),
        (stalls["max"], vitals.MAX_STALL),
    )  # fmt: skip
    if usual <= 0 or not any(value >= max(least, 8 * usual) for value, least in limits):
        return None
    preemptions = run.summary["preemptions"]
    return _finding(
        f"streams pause for up to {_ms(stalls['max'])}, {stalls['max'] / usual:.0f}x the usual time "
        f"between tokens; longest stall of a request: p50 {_ms(stalls['p50'])}, p99 "
        f"{_ms(stalls['p99'])}; time between tokens: p99 {_ms(gaps['p99'])}",
        f"long prompts{' or preemptions' if preemptions else ''} delay decoding requests",
        _held_steps(run, usual),
        _smaller_chunks(run),
        _lower_budget(run, stalls["max"]),
        None if run.has("batching", "swapped_first") else run.use("batching", "mixed"),
        "avoid preemptions" if preemptions else None,
    )


def _held_steps(run: Examined, usual: float) -> Remedy | None:
    """Steps of about four usual times between tokens; a shorter time makes long prompts wait.

    None if the chunk rule holds that already.
    """
    wanted = max(MIN_GAP, 4 * usual)
    power = 10.0 ** math.floor(math.log10(wanted))
    seconds = max(digit * power for digit in (1, 2, 5) if digit * power <= wanted * (1 + 1e-9))
    change = f"chunk=hold_tbt({seconds:g})"
    if not run.has("chunk", "hold_tbt"):
        return Remedy(f"use chunk hold_tbt({seconds:g}) to keep steps under {_ms(seconds)}", change)
    is_longer = slot("chunk", run.config["chunk"]).seconds > seconds
    return Remedy(f"lower seconds of hold_tbt to {seconds:g}", change) if is_longer else None


def _smaller_chunks(run: Examined) -> Remedy:
    """Chunks of at most 512 tokens, and of at most half of the present limit."""
    if run.has("chunk", "at_most"):
        limit = int("".join(filter(str.isdigit, str(run.config["chunk"]))) or CHUNK)
        return Remedy("lower n of at_most(n)", f"chunk=at_most({max(1, limit // 2)})")
    limit = max(1, min(CHUNK, int(run.config[NUM_TOKENS]) // 2))
    return Remedy("use chunk at_most(n)", f"chunk=at_most({limit})")


def _lower_budget(run: Examined, stall: float) -> Remedy | None:
    """A budget whose steps are about as long as a stall that is not noticed, as a power of two.

    None with whole prompts: a lower budget would refuse the long ones.
    """
    budget = int(run.config[NUM_TOKENS])
    if run.has("chunk", "whole") or budget <= MIN_BUDGET:
        return None
    least = vitals.MAX_P99_STALL
    wanted = max(MIN_BUDGET, budget * min(0.5, least / max(stall, least)))
    return Remedy(f"lower {NUM_TOKENS}", f"{NUM_TOKENS}={1 << (int(wanted).bit_length() - 1)}")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms"


def _drafts(run: Examined) -> Finding | None:
    kept, share = run.summary["tokens_per_verification"], run.summary["accepted_share"]
    if not run.has("draft", "fixed") or not 0 < kept < MIN_KEPT:
        return None
    return _finding(
        f"{share:.0%} of the drafts are right; verifying drafts gives a request {kept:.2f} tokens "
        "instead of 1",
        "the drafter cannot foresee these outputs, and a wrong draft costs a row of the step",
        run.use("draft", "by_cost"),
        Remedy("make no drafts", "draft=none"),
    )


def _late(run: Examined) -> Finding | None:
    misses, deadlines = run.summary["deadline_misses"], run.summary["deadlines"]
    if not deadlines or misses <= 0.01 * deadlines:
        return None
    ignored = "" if run.has("queue", "earliest_deadline") else "the queue ignores deadlines, or "
    return _finding(
        f"{misses} of {deadlines} deadlines missed",
        f"{ignored}capacity is too low",
        run.use("queue", "earliest_deadline"),
        "send fewer requests to each GPU",
    )


def _unfair(run: Examined) -> Finding | None:
    if run.summary["clients"] < 2 or run.summary["fairness"] >= 0.8:
        return None
    return _finding(
        f"fairness between clients is {run.summary['fairness']:.2f} (1 is equal)",
        "a few clients send most of the work",
        run.use("queue", "fair"),
        run.scale(NUM_TOKENS, 0.5),
    )
