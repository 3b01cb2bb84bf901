"""Reads the lines of a journal file as events.

The events refer to requests and plans as those of a live scheduler do. A line has the number of
requests that decode and not the requests; which ones they are follows from the earlier lines, as in
the scheduler. A request that reuses an id is a new request.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice, repeat
from operator import gt
from pathlib import Path

import msgspec

from headway.errors import FormatError, HeadwayError
from headway.events import (
    Aborted,
    Added,
    Completed,
    Event,
    Failed,
    Planned,
    Reconfigured,
    Reset,
)
from headway.plan import (
    Admission,
    Blocked,
    Chunk,
    Copy,
    Draft,
    Failure,
    NotConsidered,
    Plan,
    Preemption,
    StepResult,
)
from headway.record.lines import (
    VERSION,
    AbortedLine,
    AddedLine,
    CompletedLine,
    EndLine,
    FailedLine,
    HeaderLine,
    Line,
    Packed,
    PlannedLine,
    PreemptionLine,
    ReconfiguredLine,
    RequestLine,
    ResetLine,
)
from headway.record.packing import unpack_tokens
from headway.request import Request, RequestParams
from headway.scheduler.decode_batch import DecodeBatch

HIDDEN = -1  # in place of each token id of a redacted journal
UNKNOWN = Request("", [], RequestParams())  # a decode that began before the first line
NO_BLOCK = -1  # in place of the numbers of blocks that were not recorded
NUMBERS = ("max_num_seqs", "max_num_batched_tokens", "block_size", "num_blocks", "max_model_len")
# Raised for lines that do not continue the run of the lines before them.
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, AssertionError, ArithmeticError)


class EventReader:
    """Makes events of the lines of one journal, which it must get in order."""

    def __init__(self, head: HeaderLine, before: Iterable[RequestLine] | None = None) -> None:
        """`before` are the requests that are open if the first lines are missing."""
        self._block_size = head.config["block_size"]
        self._is_partial = before is not None
        self.open: dict[str, Request] = {}  # added and not ended
        self._known: dict[str, Request] = {}  # the latest with each id
        self._batch = self._new_batch()
        self._in_flight: deque[Planned] = deque()
        for line in before or ():
            self._add(line)

    def _new_batch(self) -> DecodeBatch:
        return DecodeBatch(self._block_size, 0)

    def event(self, line: Line) -> Event:
        """The event of the next line; an error of MALFORMED if it does not continue the run."""
        match line:
            case PlannedLine():
                return self._planned(line)
            case CompletedLine():
                return self._completed(line)
            case AddedLine():
                return Added([self._add(each) for each in line.requests], line.t)
            case AbortedLine():
                return Aborted(self._end(line.end), line.t)
            case ResetLine():
                return Reset(line.is_forced, self._preempt(line.preempted), line.t)
            case FailedLine():
                return self._failed(line)
            case ReconfiguredLine():
                return Reconfigured(line.config, time=line.t)

    def _add(self, line: RequestLine) -> Request:
        params = RequestParams(
            max_tokens=line.max_tokens, max_total_tokens=line.max_total_tokens,
            min_tokens=line.min_tokens, stop_ids=frozenset(line.stop_ids), priority=line.priority,
            client=line.client, deadline=line.deadline, salt=line.salt,
            reads_cache=line.reads_cache, pooling=line.pooling,  # type: ignore[arg-type]
            prediction=None if line.prediction is None else _tokens(line.prediction),
        )  # fmt: skip
        parent = None if line.parent is None else self._known.get(line.parent)
        request = self.open[line.id] = self._known[line.id] = Request(
            line.id, _tokens(line.prompt), params, arrival=line.arrival, parent=parent,
            sample=line.sample, output=_tokens(line.output),
        )  # fmt: skip
        request.limit = line.limit
        return request

    def _end(self, line: EndLine) -> Request:
        request = self.open.pop(line.id)
        if request in self._batch.members:
            self._batch.leave(request)
        for planned in self._in_flight:
            planned.plan.tokens_kept.setdefault(request, 0)
        history = request.history
        request.finish_reason, request.stop_token = line.finish_reason, line.stop_token
        request.error, request.error_code = line.error, line.error_code
        history.num_cached, history.num_recomputed = line.cached, line.recomputed
        history.num_preemptions = line.preemptions
        request.flushed_tokens = _tokens(line.output)
        return request

    def _planned(self, line: PlannedLine) -> Planned:
        plan = Plan(line.step, num_steps=line.num_steps, decode_context=line.decode_context)
        planned = Planned(
            plan, line.free, line.running, line.waiting, None, line.has_failed, line.t, line.t
        )
        plan.deferred = [self.open[id] for id in line.deferred]
        deferred = [request for request in plan.deferred if request in self._batch.members]
        for request in deferred:
            self._batch.leave(request)
        plan.preempted = self._preempt(line.preempted)
        if line.admitted or line.copied_out or line.copied_in:
            self._admit(plan, line)
        numbers = iter(line.blocks.new if line.blocks is not None else ())
        for id, start, count in line.drafts:
            self._draft(plan, Draft(self.open[id], start, count), numbers)
        if line.decodes:
            self._decode(planned, line, numbers)
        for request in deferred:
            if not any(request is each.request for each in plan.preempted):
                self._batch.join(request)
        for id, start, end, is_last in line.chunks:
            self._compute(plan, Chunk(self.open[id], start, end, start, is_last))
        plan.blocked = [Blocked(self.open[each[0]], *each[1:]) for each in line.blocked]
        if line.not_considered:
            plan.not_considered = NotConsidered(*line.not_considered)
        if not plan.is_empty:
            self._in_flight.append(planned)
        return planned

    def _admit(self, plan: Plan, line: PlannedLine) -> None:
        blocks = line.blocks
        for place, (id, num_cached, num_swapped, is_resume) in enumerate(line.admitted):
            request = self.open[id]
            request.computed_base = num_cached + num_swapped
            num_hits, table = 0, tuple[int, ...]()
            if blocks is not None:
                num_hits, table = blocks.hits[place], tuple(_tokens(blocks.admitted[place]))
            plan.admitted.append(
                Admission(request, num_cached, num_swapped, is_resume, num_hits, table)
            )
        out, back = (blocks.out, blocks.in_) if blocks is not None else ([], [])
        unknown = (NO_BLOCK, NO_BLOCK)
        plan.copies_out = [Copy(*each) for each in out or repeat(unknown, line.copied_out)]
        plan.copies_in = [Copy(*each) for each in back or repeat(unknown, line.copied_in)]

    def _draft(self, plan: Plan, draft: Draft, numbers: Iterator[int]) -> None:
        """Until the result, the request is not one of those that decode."""
        request = draft.request
        if not 0 <= draft.start < draft.end - 1 < request.limit - 1:
            raise ValueError(f"request {request.id} has {draft.count} drafts after {draft.start}")
        if request in self._batch.members:
            self._batch.leave(request)
        request.computed_base = draft.end
        plan.drafts.append(draft)
        num_held, num_needed = (-(-end // self._block_size) for end in (draft.start, draft.end))
        new = islice(chain(numbers, repeat(NO_BLOCK)), num_needed - num_held)
        plan.new_blocks += [(request, block) for block in new]

    def _decode(self, planned: Planned, line: PlannedLine, numbers: Iterator[int]) -> None:
        """Advance the requests that decode; those that reach their limit leave."""
        plan, batch = planned.plan, self._batch
        plan.decodes = [*batch.members]
        if self._is_partial:  # some of them may have begun before
            plan.decodes = [*plan.decodes, *repeat(UNKNOWN, line.decodes)][: line.decodes]
        if len(plan.decodes) != line.decodes:
            raise ValueError(f"{len(plan.decodes)} requests decode, not {line.decodes}")
        for _ in range(line.num_steps):
            if due := batch.due():
                plan.new_blocks += [(request, next(numbers, NO_BLOCK)) for request in due]
            planned.reaching_limit.append(batch.advance())

    def _compute(self, plan: Plan, chunk: Chunk) -> None:
        plan.chunks.append(chunk)
        request, request.computed_base = chunk.request, chunk.end
        if chunk.is_last and chunk.end + 1 < request.limit:
            self._batch.join(request)

    def _preempt(self, lines: Iterable[PreemptionLine]) -> list[Preemption]:
        found = []
        for line in lines:
            request, is_discard = self.open[line.id], line.kind == "discard"
            if request in self._batch.members:
                self._batch.leave(request)
            request.computed_base = 0
            if is_discard:
                for planned in self._in_flight:
                    planned.plan.tokens_kept.setdefault(request, 0)
            found.append(
                Preemption(
                    request, line.kind == "swap", line.num_lost, line.is_priority, line.num_due,
                    line.num_free, is_discard,
                )
            )  # fmt: skip
        return found

    def _completed(self, line: CompletedLine) -> Completed:
        if self._is_partial and (not self._in_flight or self._in_flight[0].plan.step != line.step):
            self._in_flight.appendleft(
                Planned(Plan(line.step))
            )  # it was made before the first line
        planned = self._in_flight.popleft()
        plan = planned.plan
        if plan.step != line.step:
            raise ValueError(f"step {line.step} is completed, but step {plan.step} is in flight")
        failed = {
            self.open[id]: Failure(step, reason, code)
            for id, step, reason, code in line.failed if id in self.open
        }  # fmt: skip
        for end in line.finished:
            if end.kept or plan.num_steps == 1:
                plan.tokens_kept[self.open[end.id]] = end.kept or 1
        finished = [self._end(end) for end in line.finished] if line.finished else []
        gained = _gained(plan, line) if plan.drafts else []
        result = StepResult(
            started=line.start, ended=line.end, swap_in=line.swap_in, num_builds=line.builds,
            failed=failed, draft_tokens=gained,
        )  # fmt: skip
        completed = Completed(planned, result, finished, line.end)
        if gained:
            self._verify(completed)
        self._batch.left_in_flight.clear()
        return completed

    def _verify(self, completed: Completed) -> None:
        """Count the drafts that were right; requests that have not ended decode again."""
        for draft, num_right in completed.verified():
            request = draft.request
            request.history.num_drafted += draft.count
            request.history.num_accepted += num_right
            if self.open.get(request.id) is request:
                request.computed_base = draft.start + num_right + 1
                self._batch.join(request)
            else:
                completed.plan.tokens_kept[request] = num_right + 1

    def _failed(self, line: FailedLine) -> Failed:
        self._in_flight.clear()
        ended = [self._end(end) for end in line.ended]
        by_id = {request.id: request for request in ended}
        self.open.update(by_id)  # a plan may have preempted requests that ended with it
        preempted = self._preempt(line.preempted)
        for request in ended:
            del self.open[request.id]
        self._batch = self._new_batch()
        return Failed(line.reason, ended, preempted, line.t)


def _gained(plan: Plan, line: CompletedLine) -> list[list[int]]:
    """The tokens of requests with drafts; only their number is known yet."""
    most = [draft.count + 1 for draft in plan.drafts]
    if len(line.gained) != len(most) or any(map(gt, line.gained, most)):
        raise ValueError(f"step {line.step} gains at most {most} tokens, not {line.gained}")
    return [[HIDDEN] * count for count in line.gained]


def _tokens(packed: Packed) -> array[int]:
    return array("i", [HIDDEN]) * packed if isinstance(packed, int) else unpack_tokens(packed)


def read_journal(path: Path) -> Iterator[HeaderLine | Line]:
    """Yield the header, then the lines. FormatError names the file and the line that is wrong."""
    try:
        with path.open("rb") as file:
            yield from parse_journal(path, file)
    except OSError as error:
        raise FormatError(path, None, error.strerror or str(error)) from None


def parse_journal(name: object, texts: Iterable[bytes]) -> Iterator[HeaderLine | Line]:
    """Yield the header, then the lines, of lines of text. FormatError has the name and the line."""
    decoder, number = msgspec.json.Decoder(Line), 0
    for number, text in enumerate(texts, start=1):
        if number == 1:
            yield _header(name, text.removeprefix(b"\xef\xbb\xbf"))
            continue
        try:
            yield decoder.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            is_cut = not text.endswith(b"\n")
            problem = "the file ends within this line" if is_cut else f"not an event: {error}"
            raise FormatError(name, number, problem) from None
    if not number:
        raise FormatError(name, 1, "not a Headway trace: the file is empty")


@contextmanager
def complete(name: object) -> Iterator[None]:
    """Raise FormatError with this name in place of an error of MALFORMED."""
    try:
        yield
    except HeadwayError:
        raise
    except MALFORMED as error:
        problem = f"not a complete Headway trace: {type(error).__name__} {error}"
        raise FormatError(name, None, problem) from None


def _header(name: object, text: bytes) -> HeaderLine:
    try:
        head = msgspec.json.decode(text)
        version = head.get("headway_trace") if isinstance(head, dict) else None
        if version is None:
            raise FormatError(name, 1, "not a Headway trace: the header line is missing")
        if version != VERSION:
            problem = (
                f"trace version {version} cannot be read, only version {VERSION}; "
                "record the run again"
            )
            raise FormatError(name, 1, problem)
        header = msgspec.convert(head, HeaderLine)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FormatError(name, 1, f"not a Headway trace: {error}") from None
    for number in NUMBERS:
        if not isinstance(header.config.get(number), int):
            raise FormatError(name, 1, f"the header needs the whole number {number!r} in 'config'")
    return header


def split_header(journal: Iterable[HeaderLine | Line]) -> tuple[HeaderLine, Iterator[Line]]:
    """The header of a journal, and the lines after it."""
    lines = iter(journal)
    header = next(lines)
    assert isinstance(header, HeaderLine), "the first line is the header"
    return header, lines  # type: ignore[return-value]


def events_of(journal: Iterable[HeaderLine | Line]) -> Iterator[Event]:
    """The events of a journal."""
    header, lines = split_header(journal)
    reader = EventReader(header)
    return map(reader.event, lines)
