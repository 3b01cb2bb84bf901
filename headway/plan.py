"""One step as data: the scheduler's plan and the executor's result.

Contract with every executor: plans run in the order in which they are launched. Within a plan the
copies out run first, then the copies in, then one forward pass that stores all its keys and values
before it reads any. So a plan may use blocks that an earlier plan, still running, frees.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from headway.request import Request

Rows = npt.NDArray[np.intp]
NO_ROWS: Rows = np.zeros(0, dtype=np.intp)
NONE_DROPPED = (0, 0)
UNKNOWN_TOKEN = -1  # a draft that the executor makes
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


@dataclass(frozen=True, slots=True)
class Draft:
    """Compute the last token of a decoding request, and drafts of the tokens after it.

    One token is sampled after each of these, up to the first that is not the next draft.
    """

    request: Request
    start: int  # place of the last token
    count: int  # drafts
    tokens: tuple[int, ...] = ()  # the drafts; all are UNKNOWN_TOKEN if the executor makes them

    @property
    def end(self) -> int:
        return self.start + 1 + self.count


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
    drafts: list[Draft] = field(default_factory=list)  # of requests that are not in `decodes`
    chunks: list[Chunk] = field(default_factory=list)
    copies_out: list[Copy] = field(default_factory=list)  # device to host
    copies_in: list[Copy] = field(default_factory=list)  # host to device
    preempted: list[Preemption] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    blocked: list[Blocked] = field(default_factory=list)
    not_considered: NotConsidered | None = None
    # For applying the result: the number of tokens kept of requests that do not keep all.
    tokens_kept: dict[Request, int] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether an executor has nothing to do."""
        work = self.decodes, self.drafts, self.chunks, self.copies_out, self.copies_in
        return not any(work)

    @property
    def requests(self) -> list[Request]:
        """All that compute tokens."""
        drafted = [draft.request for draft in self.drafts]
        return [*self.decodes, *drafted, *(chunk.request for chunk in self.chunks)]

    @property
    def num_tokens(self) -> int:
        """Tokens that the first forward pass of this plan computes."""
        return len(self.decodes) + self.num_drafted + self.num_prefill

    @property
    def num_drafted(self) -> int:
        """Tokens that requests with drafts compute."""
        return sum([1 + draft.count for draft in self.drafts]) if self.drafts else 0

    @property
    def num_prefill(self) -> int:
        """Tokens that chunks compute."""
        return sum([c.end - c.start for c in self.chunks]) if self.chunks else 0

    @property
    def dropped(self) -> tuple[int, int]:
        """Decodes that kept no token, and sampled tokens that were not kept, as known now."""
        kept = self.tokens_kept
        if not kept:
            return NONE_DROPPED
        counts = [kept[request] for request in self.places_of(kept)]
        return counts.count(0), sum(self.num_steps - count for count in counts)

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
    # For each of the plan's drafts the tokens that were right, and the one sampled after them. Once
    # the result is applied, those that the request gained.
    draft_tokens: list[list[int]] = field(default_factory=list)
