"""How a scheduler is configured: six slots that hold policies, and a few numbers.

This file says what a policy may see (`SchedulerView`), what a recipe may do (`StepActions`) and what each slot's
function looks like. The functions themselves are in scheduler/policies.py and queues.py; ready
combinations of them in scheduler/presets.py.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Protocol

from headway.errors import ConfigError, shorten
from headway.request import Request

HUGE = sys.float_info.max


class SchedulerView(Protocol):
    """What a policy may look at. Nothing here changes anything, and there is no clock."""

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
    def pressure(self) -> float: ...  # recent preemptions, fading with every step
    @property
    def output_shares(self) -> Sequence[float]: ...  # generated / allowed of requests that ended
    @property
    def output_lengths(self) -> Sequence[int]: ...  # tokens of open-ended requests that ended
    def service(self) -> dict[str, float]: ...  # tokens served to every group of a fair queue
    def place(self, request: Request) -> Any: ...  # its sort key in the queue's order
    def num_uncached(self, request: Request) -> int: ...  # tokens left to compute before it decodes
    def blocks_of(self, request: Request) -> list[int]: ...  # held, or found in the cache
    def num_private_blocks(self, request: Request) -> int: ...  # held by nobody else


class StepActions(Protocol):
    """What a recipe may do with the step under construction, and what it may ask of it."""

    def decode(self, at_most: int | None = None) -> None: ...
    def prefill(self) -> None: ...
    def admit(self, *, charge_cached: bool = False) -> None: ...
    def admit_swapped(self) -> None: ...  # leaving the decodes what they will need
    @property
    def is_idle(self) -> bool: ...  # the step has no work in it yet
    @property
    def tokens_left(self) -> int: ...
    @property
    def num_decoding(self) -> int: ...
    @property
    def prefill_streak(self) -> int: ...  # steps in a row, up to now, that decoded nobody


class QueueRule(Protocol):
    """Who is served first. `key` sorts; lower is sooner."""

    @property
    def patience(self) -> int: ...  # how often a blocked request may be overtaken; 0: never
    @property
    def drifts(self) -> bool: ...  # keys change while requests wait
    @property
    def preempts(self) -> bool: ...  # whether `outranks` is to be asked at all
    def key(self, request: Request, view: SchedulerView) -> Any: ...
    def group(self, request: Request) -> str: ...  # requests of one group are served in turn
    def outranks(self, waiting: Request, running: Request) -> bool: ...  # may it preempt?


def number(default: float, low: float, high: float = math.inf) -> Any:
    """A field of a policy that is a number in a range."""
    return field(default=default, metadata={"kind": (int, float), "low": low, "high": high})


def count(default: int, low: int) -> Any:
    """A field of a policy that is a whole number of at least `low`."""
    return field(default=default, metadata={"kind": int, "low": low, "high": math.inf})


class Checked:
    """For policies that are dataclasses: refuses numbers out of their range when it is made."""

    def __post_init__(self) -> None:
        for entry in fields(self):  # type: ignore[arg-type]
            if "kind" in entry.metadata:
                name = f"{type(self).__name__}: {entry.name}"
                check(name, getattr(self, entry.name), **entry.metadata)


def check(name: str, value: object, kind: Any, low: float, high: float = math.inf) -> None:
    """ConfigError, in one sentence, unless a value is of its kind and in its range."""
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    # An infinity, or a whole number that no float can hold, would fail later in arithmetic.
    if not is_number or not low <= value <= min(high, HUGE):  # type: ignore[operator]
        wanted = "a whole number" if kind is int else "a number"
        limits = f"from {low:.15g} up" if high == math.inf else f"from {low:.15g} to {high:.15g}"
        raise ConfigError(f"{name} must be {wanted} {limits}, not {shorten(value)}")


Recipe = Callable[[StepActions], None]
ChunkRule = Callable[[int, int, bool], int]  # (tokens wanted, tokens left, first of its step)
HeadroomRule = Callable[
    [Request, SchedulerView], int
]  # blocks an admission of `request` leaves free
VictimRule = Callable[[Request, SchedulerView], Any]  # a key; the largest goes first
SwapRule = Callable[[Request, SchedulerView], bool]  # True: keep its work on the host


MOST = {
    "num_blocks": 1 << 26,
    "num_host_blocks": 1 << 26,
    "max_num_seqs": 1 << 20,
    "max_num_batched_tokens": (1 << 31) - 1,
    "num_scheduler_steps": 1 << 16,
    "block_size": 1 << 16,  # the decoding batch keeps a list entry for each
    "max_model_len": (1 << 31) - 1,
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """One scheduler, completely described."""

    recipe: Recipe
    queue: QueueRule
    chunk: ChunkRule
    headroom: HeadroomRule
    victim: VictimRule
    swap: SwapRule
    max_num_seqs: int = 256  # seats: requests that run at once
    max_num_batched_tokens: int = 8192  # computed by one step
    num_scheduler_steps: int = 1  # decode steps per plan while nobody waits
    block_size: int = 16  # tokens
    num_blocks: int = 4096
    num_host_blocks: int = 0
    max_model_len: int = 1 << 20  # prompt and output together: the model's limit

    def __post_init__(self) -> None:
        least = {"num_host_blocks": 0, "max_model_len": 2}
        for name in (f.name for f in fields(self) if f.default is not MISSING):
            check(name, getattr(self, name), int, least.get(name, 1), MOST[name])
        if self.max_num_batched_tokens < self.max_num_seqs and not getattr(
            self.recipe, "defers", False
        ):
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs ({self.max_num_seqs}): "
                "a step could not give every running request its next token; "
                "raise max_num_batched_tokens or lower max_num_seqs"
            )
