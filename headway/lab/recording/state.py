"""The state of a recorded run at one step, and the operations that change it.

The lab page has the same interpreter in TypeScript. The state is that of the scheduler right after
it has made a plan: tokens that the plan computes count as computed, tokens that it samples are not
known yet.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from inspect import signature
from itertools import islice


class Op(IntEnum):
    """An operation, followed by its arguments; r is the number of a request in the recording."""

    ADD = 1  # r: it waits
    ADMIT = 2  # r, computed tokens, cached tokens, hit blocks, published blocks, n, n blocks
    CHUNK = 3  # r, start, end
    DECODING = 4  # r: its prompt is computed
    JOIN = 5  # r: the decode steps that follow advance it
    LEAVE = 6  # r: they do not
    DECODE = 7  # n: all that have joined compute n tokens
    COMPUTED = 8  # r, n: computed tokens, where they differ from the others
    RESULT = 9  # n: all that have joined have n more known tokens
    GENERATED = 10  # r, n: known output tokens
    BLOCK = 11  # r, block: one more block
    PREEMPT = 12  # r, is_swap, published blocks, n, n host blocks
    FINISH = 13  # r, reason, output tokens, published blocks
    WAIT = 14  # r, reason, need, have: considered and not admitted; reason -1: no longer
    REST = 15  # reason, n: queued requests that were not considered; n 0: none
    DEFER = 16  # r: its decode is left out of this step
    COPY = 17  # blocks to the host, blocks from the host
    FORGET = 18  # is_all: cached content; with 1 also the copies on the host
    CUT = 19  # r, n: computed tokens, of which the last blocks are released; drafts were wrong
    DRAFT = 20  # r, n, accepted: drafts of this step; accepted -1: the request or the step failed


class Status(IntEnum):
    """The state of a request, as request.RequestState."""

    WAITING = 0
    PREFILL = 1
    DECODING = 2
    SWAPPED = 3


@dataclass(slots=True, eq=False)
class RecordedRequest:
    """A request that has not finished."""

    status: Status = Status.WAITING
    computed: int = 0  # less the decode counter, once it has joined
    generated: int = 0  # less the result counter, once it has joined
    cached: int = 0  # tokens that its latest admission did not compute
    num_preemptions: int = 0
    blocks: list[int] = field(default_factory=list)
    host: list[int] = field(default_factory=list)
    blocked: tuple[int, int, int] | None = None  # reason, need, have


class RecordedState:
    """All requests that have not finished, and the content of the KV blocks."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.requests: dict[int, RecordedRequest] = {}
        self.joined: set[int] = set()  # requests that decode steps advance
        self.refs: Counter[int] = Counter()  # holders of each held block
        self.published: set[int] = set()  # blocks whose content can be matched
        self.rest: tuple[int, int] | None = None  # reason and number of requests not considered
        self.num_swapped = self.num_finished = 0
        self._num_decoded = self._num_results = 0

    def apply(self, op: Op, args: Sequence[int]) -> None:
        """Apply one operation."""
        HANDLERS[op](self, *args)

    def computed(self, r: int) -> int:
        return self.requests[r].computed + (self._num_decoded if r in self.joined else 0)

    def generated(self, r: int) -> int:
        return self.requests[r].generated + (self._num_results if r in self.joined else 0)

    # The operations.

    def _add(self, r: int) -> None:
        self.requests[r] = RecordedRequest()

    def _admit(
        self, r: int, computed: int, cached: int, num_hits: int, published: int, *blocks: int
    ) -> None:
        request = self.requests[r]
        self.num_swapped -= request.status is Status.SWAPPED
        request.status, request.computed, request.cached = Status.PREFILL, computed, cached
        request.blocked, request.host, request.blocks = None, [], list(blocks[1:])
        self.refs.update(request.blocks)  # the new ones had no holder
        self.published.difference_update(request.blocks[num_hits:])
        self.published.update(request.blocks[num_hits:published])

    def _chunk(self, r: int, start: int, end: int) -> None:
        request, size = self.requests[r], self.block_size
        request.computed = end
        self.published.update(request.blocks[start // size : end // size])

    def _decoding(self, r: int) -> None:
        self.requests[r].status = Status.DECODING

    def _join(self, r: int) -> None:
        self.joined.add(r)
        self.requests[r].computed -= self._num_decoded
        self.requests[r].generated -= self._num_results

    def _leave(self, r: int) -> None:
        self.joined.remove(r)
        self.requests[r].computed += self._num_decoded
        self.requests[r].generated += self._num_results

    def _decode(self, n: int) -> None:
        self._num_decoded += n

    def _computed(self, r: int, n: int) -> None:
        self.requests[r].computed += n - self.computed(r)

    def _result(self, n: int) -> None:
        self._num_results += n

    def _generated(self, r: int, n: int) -> None:
        self.requests[r].generated += n - self.generated(r)

    def _block(self, r: int, block: int) -> None:
        self.requests[r].blocks.append(block)
        self.refs[block] = 1
        self.published.discard(block)

    def _cut(self, r: int, n: int) -> None:
        self._computed(r, n)
        blocks, num_kept = self.requests[r].blocks, -(-n // self.block_size)
        for block in blocks[num_kept:]:
            del self.refs[block]  # no other request holds a block of tokens after the prompt
        del blocks[num_kept:]

    def _preempt(self, r: int, is_swap: int, published: int, *host: int) -> None:
        request = self.requests[r]
        self._release(r, published)
        request.status = Status.SWAPPED if is_swap else Status.WAITING
        request.computed, request.host = 0, list(host[1:])
        request.num_preemptions += 1
        self.num_swapped += is_swap

    def _finish(self, r: int, reason: int, num_output: int, published: int) -> None:
        self._release(r, published)
        self.num_swapped -= self.requests.pop(r).status is Status.SWAPPED
        self.num_finished += 1

    def _wait(self, r: int, reason: int, need: int, have: int) -> None:
        self.requests[r].blocked = (reason, need, have) if reason >= 0 else None

    def _rest(self, reason: int, n: int) -> None:
        self.rest = (reason, n) if n else None

    def _defer(self, r: int) -> None:
        """Concerns one step only, as `_copy` and `_draft`."""

    def _copy(self, num_out: int, num_in: int) -> None: ...

    def _draft(self, r: int, n: int, accepted: int) -> None: ...

    def _forget(self, is_all: int) -> None:
        self.published.clear()
        for request in self.requests.values() if is_all else ():
            request.host = []
            if request.status is Status.SWAPPED:
                request.status = Status.WAITING
        self.num_swapped *= not is_all

    def _release(self, r: int, published: int) -> None:
        request = self.requests[r]
        if r in self.joined:
            self._leave(r)
        self.published.update(request.blocks[:published])
        refs, request.blocks, blocks = self.refs, [], request.blocks
        for block in blocks:
            if refs[block] > 1:
                refs[block] -= 1
            else:
                refs.pop(block)  # quicker than del

    # Keyframes.

    def keyframe(self) -> array[int]:
        """The whole state as integers."""
        numbers = array("i", [self.num_finished, *(self.rest or (0, 0)), len(self.requests)])
        for r, request in self.requests.items():
            numbers.extend((r, request.status, self.computed(r), self.generated(r), request.cached))
            numbers.extend((request.num_preemptions, *(request.blocked or (-1, 0, 0))))
            numbers.extend((r in self.joined, len(request.blocks), *request.blocks))
            numbers.extend((len(request.host), *request.host))
        starts = sorted(block for block in self.published if block - 1 not in self.published)
        ends = sorted(block + 1 for block in self.published if block + 1 not in self.published)
        numbers.append(len(starts))
        for start, end in zip(starts, ends, strict=True):
            numbers.extend((start, end - start))
        return numbers

    @classmethod
    def restore(cls, numbers: Sequence[int], block_size: int) -> RecordedState:
        """The state of a keyframe."""
        state, rest = cls(block_size), iter(numbers)
        state.num_finished, reason, num_rest, num_requests = islice(rest, 4)
        state._rest(reason, num_rest)
        for _ in range(num_requests):
            r, status, computed, generated, cached, preemptions = islice(rest, 6)
            *blocked, is_joined = islice(rest, 4)
            blocks, host = (list(islice(rest, next(rest))) for _ in range(2))
            state.requests[r] = RecordedRequest(
                Status(status), computed, generated, cached, preemptions, blocks, host
            )
            state._wait(r, *blocked)
            state.num_swapped += status == Status.SWAPPED
            state.refs.update(blocks)
            if is_joined:
                state.joined.add(r)
        for _ in range(next(rest)):
            start, length = islice(rest, 2)
            state.published.update(range(start, start + length))
        return state


HANDLERS: dict[Op, Callable[..., None]] = {
    op: getattr(RecordedState, f"_{op.name.lower()}") for op in Op
}
NUM_ARGUMENTS = {op: len(signature(handler).parameters) - 1 for op, handler in HANDLERS.items()}
HAS_LIST = frozenset({Op.ADMIT, Op.PREEMPT})  # the last argument is the length of a list
OPS = {op.value: op for op in Op}


def split(ops: Sequence[int]) -> Iterator[tuple[Op, Sequence[int]]]:
    """The operations of a list, each with its arguments."""
    place, end = 0, len(ops)
    while place < end:
        op = OPS[ops[place]]  # faster than Op(...)
        last = place + 1 + NUM_ARGUMENTS[op]
        if op in HAS_LIST:
            last += ops[last - 1]
        yield op, ops[place + 1 : last]
        place = last
