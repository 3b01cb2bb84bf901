"""The lines of a journal file, as types; docs/trace.md describes them.

A line is one event, in JSON. Fields with their default are left out. Token ids are packed (see
packing.py); a redacted line has their number instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct, field

from headway.plan import Reason

VERSION = 3
Packed = int | list[int | tuple[int, int, int]]
Id = str


class Part(Struct, omit_defaults=True, gc=False):
    """Of a line. Many are kept, and none refers to itself, so the garbage collector skips them."""


class EventLine(Part, tag_field="event"):
    """One event."""


class HeaderLine(Struct, omit_defaults=True, kw_only=True):
    """The first line: how the scheduler was configured, and how the run was recorded."""

    headway_trace: int
    config: dict[str, Any]
    async_scheduling: bool
    has_blocks: bool = False
    is_redacted: bool = False
    profile: str = ""
    replica: str = ""


class RequestLine(Part, kw_only=True):
    """All that is needed to submit a request again."""

    id: Id
    arrival: float
    prompt: Packed
    max_tokens: int | None
    limit: int
    max_total_tokens: int | None = None
    min_tokens: int = 0
    priority: int = 0
    client: str = ""
    deadline: float | None = None
    salt: str = ""
    stop_ids: list[int] = []
    parent: Id | None = None
    sample: int = 0
    reads_cache: bool = True
    pooling: str | None = None
    prediction: Packed | None = None
    output: Packed = 0  # that another engine had generated; 0: none


class EndLine(Part, kw_only=True):
    """How a request ended."""

    id: Id
    finish_reason: str
    output: Packed
    kept: int = 0  # tokens of this plan, if it has several decode steps
    cached: int = 0
    recomputed: int = 0
    preemptions: int = 0
    stop_token: int | None = None
    error: str | None = None
    error_code: str | None = None


class PreemptionLine(Struct, array_like=True, gc=False):
    """A running request that went back to the queue. `kind` is swap, recompute or discard."""

    id: Id
    kind: str
    num_lost: int
    is_priority: bool
    num_due: int
    num_free: int


class BlocksLine(Part, kw_only=True):
    """Block numbers of a plan."""

    hits: list[int] = []  # of each admission: leading blocks that were in the prefix cache
    admitted: list[Packed] = []  # of each admission: its block table
    new: list[int] = []  # of drafts, then of the decodes that need a block, in their order
    out: list[tuple[int, int]] = []
    in_: list[tuple[int, int]] = field(name="in", default_factory=list)


class AddedLine(EventLine, tag="added"):
    t: float
    requests: list[RequestLine]


class AbortedLine(EventLine, tag="aborted"):
    t: float
    end: EndLine


class ResetLine(EventLine, tag="reset"):
    t: float
    is_forced: bool = False
    preempted: list[PreemptionLine] = []


class ReconfiguredLine(EventLine, tag="reconfigured"):
    t: float
    config: dict[str, Any]


class PlannedLine(EventLine, tag="planned", kw_only=True):
    """The decisions of a plan, and why requests wait."""

    step: int
    t: float
    running: int
    waiting: int
    free: int
    preempted: Sequence[PreemptionLine] = ()  # one object for all lines, unlike an empty list
    admitted: Sequence[tuple[Id, int, int, bool]] = ()
    chunks: Sequence[tuple[Id, int, int, bool]] = ()
    drafts: Sequence[tuple[Id, int, int]] = ()
    decodes: int = 0
    num_steps: int = 1
    decode_context: int = 0
    deferred: Sequence[Id] = ()
    copied_out: int = 0
    copied_in: int = 0
    blocked: Sequence[tuple[Id, Reason, int, int]] = ()
    not_considered: tuple[Reason, int] | None = None
    has_failed: bool = False
    blocks: BlocksLine | None = None


class CompletedLine(EventLine, tag="completed", kw_only=True):
    """The end of a step."""

    step: int
    start: float
    end: float
    swap_in: float = 0  # an int, as it is left out only if it is the same object
    builds: int = 0
    gained: Sequence[int] = ()  # tokens, by each request with drafts
    failed: Sequence[tuple[Id, int, str, str | None]] = ()
    finished: Sequence[EndLine] = ()


class FailedLine(EventLine, tag="failed", kw_only=True):
    """A step that failed."""

    t: float
    reason: str
    ended: list[EndLine] = []
    preempted: list[PreemptionLine] = []


Line = (
    AddedLine
    | AbortedLine
    | ResetLine
    | ReconfiguredLine
    | PlannedLine
    | CompletedLine
    | FailedLine
)


def ends_of(line: Line) -> Sequence[EndLine]:
    """The requests that a line ends."""
    match line:
        case CompletedLine():
            return line.finished
        case AbortedLine():
            return [line.end]
        case FailedLine():
            return line.ended
    return ()


def time_of(line: Line) -> float:
    """Seconds on the engine's clock."""
    return line.end if isinstance(line, CompletedLine) else line.t
