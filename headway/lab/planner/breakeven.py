"""Swap against recompute: which costs less time for a preempted request of a given length.

A swap copies the request's KV blocks to the host and back. A recomputation adds its tokens to other
steps; as `swap_if_cheaper` does, it counts the time that they add, without a step's fixed time.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from headway.lab.cost import Profile
from headway.lab.svg import Curve, Plot

MIN_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class BreakEvenRow:
    """Seconds for one length."""

    tokens: int
    swap: float  # out and in
    recompute: float  # added to steps that run anyway
    recompute_alone: float  # in a step of its own

    @property
    def cheaper(self) -> str:
        return "swap" if self.swap < self.recompute else "recompute"


def row(profile: Profile, tokens: int) -> BreakEvenRow:
    """The costs for a request with this many computed tokens, none of them shared."""
    rule = profile.swap_if_cheaper()
    return BreakEvenRow(
        tokens=tokens,
        swap=2 * (rule.start + rule.copy * tokens),
        recompute=(rule.compute + rule.pair * tokens / 2) * tokens,
        recompute_alone=profile.prefill_seconds(tokens),
    )


def table(profile: Profile) -> list[BreakEvenRow]:
    """Lengths that double, up to the model's limit."""
    limit = min(profile.model.max_model_len, profile.kv_tokens)
    count = int(math.log2(max(1, limit / MIN_TOKENS))) + 1
    return [row(profile, MIN_TOKENS << place) for place in range(count)]


def crossing(profile: Profile) -> int | None:
    """The shortest length for which a swap is cheaper; None if it never is.

    Recomputation grows at least linearly and a swap linearly, so there is one crossing at most.
    """
    lengths = range(1, profile.model.max_model_len + 1)
    place = bisect_left(lengths, True, key=lambda tokens: row(profile, tokens).cheaper == "swap")
    return lengths[place] if place < len(lengths) else None


def plot(profile: Profile) -> Plot:
    """Milliseconds over the length."""
    rows, title = table(profile), f"preemption on {profile.name}"
    curves = tuple(
        Curve(
            name=name.replace("_", " "),
            points=tuple((r.tokens, 1e3 * getattr(r, name)) for r in rows),
        )
        for name in ("swap", "recompute", "recompute_alone")
    )
    return Plot(title=title, x="tokens", y="ms", curves=curves, is_log=True)
