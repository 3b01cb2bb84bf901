"""One step as data: the scheduler's plan, the executor's result, and the report for observers.

Contract with every executor: plans run in the order in which they are launched. Within a plan the
copies out run first, then the copies in, then one forward pass that stores all its keys and values
before it reads any. So a plan may use blocks that an earlier plan, still running, frees.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from headway.request import Request

Rows = npt.NDArray[np.intp]
NO_ROWS: Rows = np.zeros(0, dtype=np.intp)
MAX_SEARCHED = 8  # requests that are searched in a list one by one, which is faster for a few
Embedding = npt.NDArray[np.float32]  # [hidden size], normalized to length 1
Column = npt.NDArray[np.intc] | Sequence[int]
Reason = Literal[
    "max_num_seqs", "reserved_rows", "token_budget", "blocks", "headroom", "back_off",
    "just_preempted", "after_preemption", "parent", "behind_blocked", "not_reached",
    "window_blocks",
]  # fmt: skip


class Chunk(NamedTuple):
    """Compute tokens [start, end) of a request; store keys and values from `store_from` on."""

    request: Request
    start: int
    end: int
    store_from: int  # `end` for a full cache hit, whose last token is computed but not stored
    is_last: bool  # the known tokens end here, so the next token is sampled


class Admission(NamedTuple):
    """A request that starts to run, and the tokens that it need not compute."""

    request: Request
    num_cached: int
    num_swapped: int
    is_resume: bool
    num_hits: int = 0  # leading blocks found in the cache
    blocks: tuple[int, ...] = ()  # its block table


class Preemption(NamedTuple):
    """A running request put back into the queue, and how many of its tokens left the device."""

    request: Request
    is_swap: bool
    num_lost: int
    is_priority: bool  # preempted for a higher priority, not for lack of blocks
    num_due: int  # blocks that decodes needed; 0 unless blocks were the cause
    num_free: int  # blocks that were free then
    is_discard: bool = False  # its output is generated again; see policies/swap.py


class CacheReset(NamedTuple):
    """The cached prefixes were forgotten; also the copies on the host after a failed step."""

    num_preempted: int  # preemptions that are reported with it and came before
    is_all: bool


class Blocked(NamedTuple):
    """Why a waiting request was not admitted: what it needed, and what was available."""

    request: Request
    reason: Reason
    need: int
    have: int


class NotConsidered(NamedTuple):
    """The waiting requests that a step did not examine, and the reason they share."""

    reason: Reason
    num_requests: int


class WindowBlocks(NamedTuple):
    """New entries of a request's block table for the sliding-window layers, from `first` on."""

    request: Request
    first: int
    blocks: tuple[int, ...]


class Copy(NamedTuple):
    """Copy one block between the pools; `source` and `target` are block numbers."""

    source: int
    target: int


@dataclass(slots=True, eq=False)
class StepEvents:
    """Arrivals, aborts and preemptions around a step, and the state after planning."""

    added: list[Request] = field(default_factory=list)  # since the previous plan
    aborted: list[Request] = field(default_factory=list)  # since the previous plan
    aborted_in_flight: list[Request] = field(default_factory=list)  # while this plan ran
    preempted: list[Preemption] = field(default_factory=list)
    reset: CacheReset | None = None  # the latest one since the previous plan
    # Numbers of entries in `added` and `aborted` that an earlier, empty plan already considered.
    num_early: tuple[int, int] = (0, 0)
    num_free: int = 0  # blocks
    num_running: int = 0
    num_waiting: int = 0
    num_in_flight: int = 0  # plans without a result when this one was made
    schedule_started: float = 0.0  # on the engine's clock, set by the engine
    schedule_ended: float = 0.0


@dataclass(slots=True, eq=False)
class Plan:
    """The work of one step. Only `decodes` grows with the batch; the rest lists changes."""

    step: int
    decodes: list[Request] = field(default_factory=list)
    rows: Rows = field(default_factory=lambda: NO_ROWS)  # of `decodes`, in the same order
    num_steps: int = 1  # decode steps that the device runs without the host
    decode_context: int = 0  # cached tokens that the first decode step reads, of all decodes
    new_blocks: list[tuple[Request, int]] = field(default_factory=list)  # blocks for decodes
    window_blocks: list[WindowBlocks] = field(default_factory=list)  # for decodes and chunks
    deferred: list[Request] = field(default_factory=list)  # decodes left out by the token budget
    chunks: list[Chunk] = field(default_factory=list)
    copies_out: list[Copy] = field(default_factory=list)  # device to host
    copies_in: list[Copy] = field(default_factory=list)  # host to device
    preempted: list[Preemption] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    blocked: list[Blocked] = field(default_factory=list)
    not_considered: NotConsidered | None = None
    # For applying the result: requests that reach their limit, by step; and the number of tokens
    # kept of requests that do not keep all.
    reaching_limit: list[list[Request]] = field(default_factory=list)
    tokens_kept: dict[Request, int] = field(default_factory=dict)
    events: StepEvents = field(default_factory=StepEvents)
    # After planning:
    num_free: int = 0  # blocks
    num_running: int = 0
    num_waiting: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether an executor has nothing to do."""
        return not (self.decodes or self.chunks or self.copies_out or self.copies_in)

    @property
    def num_tokens(self) -> int:
        """Tokens that the first forward pass of this plan computes."""
        return len(self.decodes) + sum(c.end - c.start for c in self.chunks)

    def places_of(self, requests: Collection[Request]) -> dict[Request, int]:
        """The places in `decodes` of those of the requests that decode."""
        decodes = self.decodes
        if len(requests) <= MAX_SEARCHED:
            return {r: decodes.index(r) for r in requests if r in decodes}
        return {r: place for place, r in enumerate(decodes) if r in requests}


class Failure(NamedTuple):
    """A request that cannot continue: the step of the plan that found it, and the reason."""

    step: int
    reason: str
    code: str | None = None  # "grammar": the request's own grammar caused it


@dataclass(slots=True)
class StepResult:
    """What the executor sampled. Times are seconds on the engine's clock."""

    decode_tokens: list[Column] = field(default_factory=list)  # [step][decode], as in `decodes`
    first_tokens: list[int] = field(default_factory=list)  # one token per chunk with is_last
    started: float = 0.0
    ended: float = 0.0
    swap_in: float = 0.0  # seconds to copy `copies_in` from the host; 0.0 without copies
    extra: object = None  # logprobs, embeddings and the like; the scheduler does not read it
    failed: dict[Request, Failure] = field(default_factory=dict)
    num_builds: int = 0  # kernels compiled and graphs captured to launch it; it waited for them


@dataclass(slots=True)
class StepReport:
    """A completed step; the only input of streams, metrics, traces and the live page."""

    plan: Plan
    result: StepResult
    finished: list[Request]

    def outputs(self) -> Iterator[tuple[Request, list[int]]]:
        """The tokens that each request gains in this step; none that it has had before."""
        plan, columns = self.plan, self.result.decode_tokens
        for row, request in enumerate(plan.decodes):
            kept = plan.tokens_kept.get(request, plan.num_steps)
            first = _num_repeated(request, kept) if request.history.num_discarded else 0
            if first < kept:
                yield request, [int(column[row]) for column in columns[first:kept]]
        sampled = (c.request for c in plan.chunks if c.is_last)
        for request, token in zip(sampled, self.result.first_tokens, strict=True):
            if plan.tokens_kept.get(request, 1) and not _num_repeated(request, 1):
                yield request, [token]


def _num_repeated(request: Request, num_gained: int) -> int:
    """How many of the latest tokens were reported before a preemption discarded them."""
    num_before = request.num_generated - num_gained
    return max(0, min(num_gained, request.history.num_discarded - num_before))
