"""How many replicas a load needs: by waiting tokens and KV blocks, not by the number of requests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

MAX_USED = 0.9  # fraction of KV blocks in use above which a queue needs another replica
FREE_AFTER = 0.5  # one replica fewer must leave this fraction of blocks free
PLACE_SECONDS = 30.0  # for a new replica to find a machine with free CPUs or GPUs
RETRY_SECONDS = 120.0  # until a replica that found none is asked for again


class ScalingLoad(NamedTuple):
    """The load of one replica."""

    waiting_tokens: float  # of prompts that are not computed yet
    step_tokens: float  # max_num_batched_tokens
    free_blocks: float
    num_blocks: float


def replicas_needed(loads: Sequence[ScalingLoad], num_steps: float = 8.0) -> int:
    """The number of replicas for a load.

    As many as compute the waiting prompts within `num_steps` steps, if that is more; at least one
    more if prompts wait while blocks are short. One less if nothing waits and the others can take
    the blocks in use.
    """
    if not loads:
        return 0
    waiting = sum(load.waiting_tokens for load in loads)
    per_step = sum(load.step_tokens for load in loads) / len(loads)
    blocks = sum(load.num_blocks for load in loads)
    used = blocks - sum(load.free_blocks for load in loads)
    is_short = waiting > 0 and used > MAX_USED * blocks
    left = blocks - blocks / len(loads)
    if not waiting and used <= (1 - FREE_AFTER) * left:
        return len(loads) - 1
    return max(math.ceil(waiting / (num_steps * per_step)), len(loads) + is_short)


def placed(
    needed: int, target: int, num_placed: int, state: Mapping[str, float], now: float
) -> tuple[int, dict[str, float]]:
    """The next target, and the state for the next call.

    `needed`; but if a replica of the target has no place after PLACE_SECONDS, the number that have
    one, for RETRY_SECONDS.
    """
    retry_at = state.get("retry_at", now)
    if target > num_placed:
        since = state.get("since", now)
        if now - since < PLACE_SECONDS:
            return needed, {"since": since, "retry_at": retry_at}
        retry_at = now + RETRY_SECONDS
    return needed if now >= retry_at else min(needed, num_placed), {"retry_at": retry_at}
