"""The configuration of a scheduler: slots that hold policies, and a few numbers.

This file says what a policy may read (`SchedulerView`), what a batching rule may do (`StepActions`)
and which signature each slot has. The ready-made policies are in scheduler/policies/, one file for
each slot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

from headway.checks import Checked, count
from headway.errors import ConfigError
from headway.request import Request
from headway.step_cost import StepWork


class SchedulerView(Protocol):
    """What a policy may read. It changes nothing and has no clock."""

    @property
    def running(self) -> Iterable[Request]: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_free(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def max_num_batched_tokens(self) -> int: ...
    @property
    def tokens_left(self) -> int: ...  # of this step's budget
    @property
    def pressure(self) -> float: ...  # recent preemptions; decays with every step
    @property
    def output_shares(self) -> Sequence[float]: ...  # generated / allowed of finished requests
    @property
    def output_lengths(self) -> Sequence[int]: ...  # tokens of finished open-ended requests
    def service(self) -> dict[str, float]: ...  # weighted tokens served to each client group
    def queue_key(self, request: Request) -> Any: ...  # sorts requests in the queue's order
    def num_uncached(self, request: Request) -> int: ...  # tokens to compute before it decodes
    def blocks_of(self, request: Request) -> list[int]: ...  # held, or found in the cache
    def num_private_blocks(self, request: Request) -> int: ...  # held by no other request


class StepActions(Protocol):
    """What a batching rule may do with the step under construction, and what it may read of it."""

    def decode(self, at_most: int | None = None) -> None: ...
    def prefill(self) -> None: ...
    def admit(self, *, charge_cached: bool = False) -> None: ...
    def admit_swapped(self) -> None: ...  # reserves what the decodes need
    @property
    def is_idle(self) -> bool: ...  # the step has no work yet
    @property
    def tokens_left(self) -> int: ...
    @property
    def num_decoding(self) -> int: ...
    @property
    def prefill_streak(self) -> int: ...  # consecutive steps, up to now, without decodes


ALL = "all"  # the group of queue rules that have only one


class QueueRule(Protocol):
    """The order of the waiting queue: the lowest key is served first."""

    @property
    def max_overtakes(self) -> int: ...  # how often a blocked request may be overtaken; 0: never
    @property
    def keys_change(self) -> bool: ...  # keys change while requests wait
    @property
    def preempts(self) -> bool: ...  # whether `outranks` is used
    def key(self, request: Request, view: SchedulerView) -> Any: ...
    def group(self, request: Request) -> str: ...  # groups are served fairly, see fairness.py
    def outranks(self, waiting: Request, running: Request) -> bool: ...  # may it preempt?


class Headroom(int):
    """Blocks to leave free, and how many of them are not for recent preemptions: `base`.

    A request that could be admitted with `base` alone waits for the reason "back_off".
    """

    base: float = math.inf  # none of them is for recent preemptions


class DraftStep(Protocol):
    """What a draft rule may read of the step under construction."""

    @property
    def work(self) -> StepWork: ...  # of all decodes, and of the drafts so far
    @property
    def tokens(self) -> float: ...  # expected to be kept of them
    @property
    def num_left(self) -> int: ...  # requests that may still get drafts, with the asked one
    def acceptance(self, request: Request) -> float: ...  # probability that its next draft is right


class Drafter(Protocol):
    """Makes drafts: the same calls in the same order make the same drafts.

    It may keep what it needs of requests that run or have ended.
    """

    def propose(self, request: Request, most: int) -> Sequence[int]: ...  # may follow its tokens
    def forget(self, request: Request) -> None: ...  # it has ended, or its output was discarded


BatchingRule = Callable[[StepActions], None]
# (tokens wanted, tokens left, first of its step). A rule that limits the time of a step has a method
# `most_tokens` as well: (tokens wanted, work of the step so far, first token) -> tokens that fit.
ChunkRule = Callable[[int, int, bool], int]
# Blocks that an admission leaves free; see Headroom.
HeadroomRule = Callable[[Request, SchedulerView], int]
VictimRule = Callable[[Request, SchedulerView], Any]  # a key; the largest is preempted first
# True: keep the computed tokens on the host; "discard": drop the output as well.
DraftRule = Callable[[Request, DraftStep], int]  # draft tokens; see policies/draft.py
DrafterRule = Callable[[], Drafter]  # makes a drafter, for one scheduler
SwapRule = Callable[[Request, SchedulerView], bool | Literal["discard"]]


@dataclass(frozen=True, kw_only=True)
class Config(Checked):
    """The complete description of a scheduler."""

    prefix = ""
    batching: BatchingRule
    queue: QueueRule
    chunk: ChunkRule
    headroom: HeadroomRule
    victim: VictimRule
    swap: SwapRule
    draft: DraftRule | None = None  # None: no drafts
    drafter: DrafterRule | None = None  # None: scheduler.drafting has a default
    max_num_seqs: int = count(256, 1, 1 << 20)  # running requests
    max_num_batched_tokens: int = count(8192, 1, (1 << 31) - 1)  # computed in one step
    num_scheduler_steps: int = count(1, 1, 1 << 16)  # decode steps per plan if none waits
    block_size: int = count(16, 1, 1 << 16)  # tokens
    num_blocks: int = count(4096, 1, 1 << 26)
    num_host_blocks: int = count(0, 0, 1 << 26)
    max_model_len: int = count(1 << 20, 2, (1 << 31) - 1)  # prompt and output together
    # For models with sliding-window layers: tokens that such a layer sees (0: there are no such
    # layers), and its blocks, which are a pool of their own.
    sliding_window: int = count(0, 0, (1 << 31) - 1)
    num_window_blocks: int = count(0, 0, 1 << 26)

    @property
    def swap_seconds(self) -> Callable[[Request, SchedulerView], tuple[float, float]] | None:
        """Estimates the time to swap a request out and in, and to recompute it, if the rule does."""
        return getattr(self.swap, "seconds", None)

    @cached_property
    def limits_time(self) -> bool:
        """Whether the chunk rule declares a limit of time; a plain function has none."""
        return getattr(self.chunk, "most_tokens", None) is not None

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.sliding_window) != bool(self.num_window_blocks):
            raise ConfigError(
                f"sliding_window is {self.sliding_window} and num_window_blocks is "
                f"{self.num_window_blocks}; both must be 0, or both above 0"
            )
        if self.sliding_window and self.num_host_blocks:
            raise ConfigError(
                f"num_host_blocks is {self.num_host_blocks}; it must be 0 for a model with "
                "sliding-window layers, which cannot be swapped"
            )
