"""How many replicas a load needs: by waiting tokens and KV blocks, not by the number of requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MAX_USED = 0.9  # fraction of KV blocks in use above which a queue needs another replica
FREE_AFTER = 0.5  # one replica fewer must leave this fraction of blocks free


class ScalingLoad(NamedTuple):
    """The load of one replica."""

    waiting_tokens: float  # of prompts that are not computed yet
    step_tokens: float  # max_num_batched_tokens
    free_blocks: float
    num_blocks: float


def replicas_needed(loads: Sequence[ScalingLoad], num_steps: float = 8.0) -> int:
    """The number of replicas for a load.

    One more if the waiting prompts fill more than `num_steps` steps of each replica, or if
    prompts wait while blocks are short. One less if nothing waits and the others can take the
    blocks in use. An unknown load changes nothing.
    """
    if not loads:
        return 0
    waiting = sum(load.waiting_tokens for load in loads)
    per_step = sum(load.step_tokens for load in loads)
    blocks = sum(load.num_blocks for load in loads)
    used = blocks - sum(load.free_blocks for load in loads)
    if waiting > num_steps * per_step or (waiting and used > MAX_USED * blocks):
        return len(loads) + 1
    left = blocks - blocks / len(loads)
    if not waiting and used <= (1 - FREE_AFTER) * left:
        return len(loads) - 1
    return len(loads)
