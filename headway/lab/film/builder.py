"""Makes a film from the lines of a trace, one line at a time.

Lines come from a file, from a live server or from a scheduler that runs now. What a line does not
say is derived: which requests decode, how many tokens each has computed, which blocks are cached. A
line is written when its step has ended. With async scheduling the next plan is made before that, so
results are applied when the next line says that they were known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from headway.lab.film.state import FilmState, Op, Status
from headway.observe.trace import Line
from headway.plan import Reason
from headway.record.packing import num_packed, unpack_tokens

REASONS: tuple[str, ...] = get_args(Reason)
FINISH_REASONS = ("stop", "length", "abort", "error")
RUNNING = (Status.PREFILL, Status.DECODING)


@dataclass(slots=True)
class FilmEntry:
    """What a film knows of a request from its arrival."""

    id: str
    num_prompt: int
    limit: int  # length at which it ends
    line: Line


@dataclass(slots=True)
class _Result:
    """The result of a plan: it may be known only after the next plan was made."""

    num_steps: int  # new tokens of every request that decodes, except
    gains: dict[int, int]  # these, with their own numbers
    ended: list[Line]


@dataclass(slots=True)
class Frame:
    """The operations of one line, and the requests that were added with it."""

    ops: list[int] = field(default_factory=list)
    added: list[FilmEntry] = field(default_factory=list)
    finished: dict[str, int] = field(default_factory=dict)  # numbers by id


class FilmBuilder:
    """Follows a trace line by line; `state` is the state after the latest plan."""

    def __init__(self, block_size: int) -> None:
        self.state = FilmState(block_size)
        self.entries: list[FilmEntry] = []
        self._size = block_size
        self.numbers: dict[str, int] = {}  # of the open requests, by id
        self._results: deque[_Result] = deque()  # not known yet when the latest plan was made
        self._aborted: list[Line] = []  # after the latest plan was made
        self._ending: dict[int, list[int]] = {}  # by the decode count at which they may end
        self._blocked: dict[int, tuple[int, int, int]] = {}
        self.has_new_block = False  # in the latest plan a request waits for another reason
        self._num_decoded = 0
        self._in_flight: set[int] = set()  # plans made before the film started
        self._is_partial = False  # the film started in the middle
        self._frame = Frame()

    def load(self, state: dict[str, Any]) -> Frame:
        """Start in the middle of a run, with the state that `live.state_of` describes."""
        self._frame, self._in_flight = Frame(), set(state["in_flight"])
        for line in state["requests"]:
            r = self._add(line)
            request = self.state.requests[r]
            request.status = Status[line["status"].upper()]
            request.computed, request.generated = line["computed"], line["generated"]
            request.cached, request.num_preemptions = line["cached"], line["preemptions"]
            request.blocks, request.host = list(line["blocks"]), list(line["host"])
            for block in request.blocks:
                self.state.refs[block] = self.state.refs.get(block, 0) + 1
            self.state.num_swapped += request.status is Status.SWAPPED
            if request.status is Status.DECODING:
                self._join(r)
        self.state.published.update(state["published"])
        frame, self._frame = self._frame, Frame()
        frame.ops.clear()  # the keyframe of the first chunk has all of it
        self._is_partial = True
        return frame

    def add(self, line: Line) -> Frame:
        """The operations that lead from the previous plan to the plan of this line."""
        self._frame, self.has_new_block = Frame(), False
        if line["step"] in self._in_flight:
            self._skip(line)
            return self._frame
        self._catch_up(line.get("in_flight", 0))
        aborted, later = line.get("aborted", ()), line.get("aborted_in_flight", ())
        finished = list(line.get("finished", ()))
        ends = finished[: len(aborted)]
        self._arrive(line.get("added", ()), [after for _, after in aborted], ends)
        if line["step"] < 0:
            self._preempt_all(line, deque())
            return self._frame
        gains = self._plan(line)
        self._aborted = finished[len(aborted) : len(aborted) + len(later)]
        ended = finished[len(aborted) + len(later) :]
        num_steps = line.get("num_steps", 1) if line["decodes"] else 0
        self._results.append(_Result(num_steps, gains, ended))
        return self._frame

    def finish(self) -> Frame:
        """The operations of results and aborts that no later plan has seen."""
        self._frame = Frame()
        self._catch_up(0)
        return self._frame

    # Between two plans.

    def _catch_up(self, num_in_flight: int) -> None:
        """Apply aborts after the previous plan, and the results that the next plan knows."""
        for end in self._aborted:
            self._finish(end)
        self._aborted = []
        while len(self._results) > num_in_flight:
            self._apply(self._results.popleft())

    def _apply(self, result: _Result) -> None:
        state = self.state
        targets = {
            r: state.generated(r) + gain for r, gain in result.gains.items() if r in state.requests
        }
        if state.joined and result.num_steps:
            self._emit(Op.RESULT, result.num_steps)
        for r, target in targets.items():
            if state.generated(r) != target:
                self._emit(Op.GENERATED, r, target)
        for end in result.ended:
            self._finish(end)

    def _skip(self, line: Line) -> None:
        """A plan that was in flight when the film started: only its result is new."""
        self._in_flight.remove(line["step"])
        num_steps = line.get("num_steps", 1) if line["decodes"] else 0
        gains = {
            r: num_steps for r, request in self.state.requests.items()
            if request.status is Status.DECODING and r not in self.state.joined
        }  # fmt: skip
        deferred = dict.fromkeys(line.get("deferred", ()), 0)
        first = {id: 1 for id, _, _, is_last in line.get("chunks", ()) if is_last}
        gains |= {self.numbers[id]: n for id, n in (deferred | first).items() if id in self.numbers}
        later = {id for id, _ in line.get("aborted_in_flight", ())}
        ends = [end for end in line.get("finished", ()) if end["id"] in self.numbers]
        self._aborted = [end for end in ends if end["id"] in later]
        ended = [end for end in ends if end["id"] not in later]
        self._results.append(_Result(num_steps, gains, ended))

    def _arrive(self, added: Sequence[Line], afters: list[int], ends: list[Line]) -> None:
        """New requests and aborts, in the order in which they came."""
        for place, line in enumerate([*added, None]):
            for after, end in zip(afters, ends, strict=True):
                if after == place:
                    self._finish(end)
            if line is not None:
                self._add(line)

    def _add(self, line: Line) -> int:
        num_prompt = num_packed(line["prompt"])
        limit = line.get("limit") or num_prompt + line["max_tokens"]
        entry = FilmEntry(line["id"], num_prompt, limit, line)
        number = self.numbers[entry.id] = len(self.entries)
        self.entries.append(entry)
        self._frame.added.append(entry)
        self._emit(Op.ADD, number)
        if "output" in line:  # another engine has generated these tokens
            self._emit(Op.GENERATED, number, num_packed(line["output"]))
        return number

    def _finish(self, end: Line) -> None:
        if self._is_partial and end["id"] not in self.numbers:
            return  # it was aborted before the film started
        r = self._frame.finished[end["id"]] = self.numbers.pop(end["id"])
        num_output = num_packed(end["output"])
        published = self._num_published(r, num_output)
        self._leave(r)
        self._emit(Op.FINISH, r, FINISH_REASONS.index(end["finish_reason"]), num_output, published)

    # The plan.

    def _plan(self, line: Line) -> dict[int, int]:
        """The decisions of a plan; returns the requests that gain another number of tokens."""
        blocks = line.get("blocks", {})
        self._preempt_all(line, deque(blocks.get("out", ())))
        if line.get("copied_out") or line.get("copied_in"):
            self._emit(Op.COPY, line.get("copied_out", 0), line.get("copied_in", 0))
        for place, admission in enumerate(line.get("admitted", ())):
            self._admit(admission, place, blocks)
        for id, start, end, _ in line.get("chunks", ()):
            self._emit(Op.CHUNK, self.numbers[id], start, end)
        for id, block in blocks.get("new", ()):
            self._emit(Op.BLOCK, self.numbers[id], block)
        gains = self._decode(line)
        for id, _, _, is_last in line.get("chunks", ()):
            if is_last:
                r = self.numbers[id]
                gains[r] = 1
                self._emit(Op.DECODING, r)
                self._join(r)
        self._wait(line)
        return gains

    def _preempt_all(self, line: Line, copies: deque[Sequence[int]]) -> None:
        """The preemptions of a line, and the reset of the cache among them.

        Requests that ended when a step failed are listed too, if its plan preempted them.
        """
        reset = line.get("reset")
        for place, (id, how, *_) in enumerate(line.get("preempted", ())):
            if reset and place == reset[0]:
                self._emit(Op.FORGET, reset[1])
            r = self.numbers.get(id)
            if r is None:
                continue
            self._preempt(r, how == "swap", copies)
            if how == "discard":
                self._discard_output(r)
        if reset and reset[0] >= len(line.get("preempted", ())):
            self._emit(Op.FORGET, reset[1])

    def _preempt(self, r: int, is_swap: bool, copies: deque[Sequence[int]]) -> None:
        """Put a request back into the queue; its copies are the first of `copies`."""
        table, host = self.state.requests[r].blocks, list[int]()
        if is_swap and copies and table:  # leading blocks that others hold are not copied
            first = table.index(copies[0][0])
            num_used = -(-self.state.computed(r) // self._size)
            host = [copies.popleft()[1] for _ in range(num_used - first)]
        published = self._num_published(r, self.state.generated(r))
        self._leave(r)
        self._emit(Op.PREEMPT, r, int(is_swap), published, len(host), *host)

    def _discard_output(self, r: int) -> None:
        """The request keeps neither its output nor tokens in flight."""
        for result in self._results:
            result.gains[r] = 0
        self._emit(Op.GENERATED, r, 0)

    def _admit(self, admission: Sequence[Any], place: int, blocks: dict[str, list[Any]]) -> None:
        id, num_cached, num_swapped, _ = admission
        num_computed, num_hits = num_cached + num_swapped, 0
        table: tuple[int, ...] = ()
        if "admitted" in blocks:
            table = tuple(unpack_tokens(blocks["admitted"][place]))
            num_hits = blocks["hits"][place]
        published = num_computed // self._size if num_swapped else num_hits
        self._emit(
            Op.ADMIT, self.numbers[id], num_computed, num_cached, num_hits, published,
            len(table), *table,
        )  # fmt: skip

    def _decode(self, line: Line) -> dict[int, int]:
        """Advance the requests that decode; those that reach their limit do not decode again."""
        state, gains = self.state, dict[int, int]()
        deferred = [self.numbers[id] for id in line.get("deferred", ())]
        deferred = [r for r in deferred if state.requests[r].status is Status.DECODING]
        for r in deferred:
            gains[r] = 0
            self._emit(Op.DEFER, r)
            self._leave(r)
        if line["decodes"]:
            num_steps, before = line.get("num_steps", 1), self._num_decoded
            self._emit(Op.DECODE, num_steps)
            self._num_decoded += num_steps
            for count in range(before + 1, self._num_decoded + 1):
                for r in self._ending.pop(count, ()):
                    self._end_decoding(r, count - before, gains)
        for r in deferred:
            self._join(r)
        return gains

    def _end_decoding(self, r: int, num_steps: int, gains: dict[int, int]) -> None:
        """A request reaches its limit, unless it has left and joined again meanwhile."""
        num_last = self.entries[r].limit - 1  # the last token is sampled but not computed
        if r in self.state.joined and self.state.computed(r) >= num_last:
            gains[r] = num_steps
            if self.state.computed(r) > num_last:
                self._emit(Op.COMPUTED, r, num_last)
            self._leave(r)

    def _join(self, r: int) -> None:
        left = self.entries[r].limit - 1 - self.state.computed(r)
        if left > 0:
            for result in self._results:
                result.gains.setdefault(r, 0)
            self._emit(Op.JOIN, r)
            self._ending.setdefault(self._num_decoded + left, []).append(r)

    def _leave(self, r: int) -> None:
        """Stop advancing a request; results in flight still bring it their tokens."""
        if r in self.state.joined:
            for result in self._results:
                result.gains.setdefault(r, result.num_steps)
            self._emit(Op.LEAVE, r)

    def _wait(self, line: Line) -> None:
        """Changes of what requests wait for."""
        state, now = self.state, dict[int, tuple[int, int, int]]()
        for id, reason, need, have in line.get("blocked", ()):
            now[self.numbers[id]] = REASONS.index(reason), need, have
        for r in [r for r in self._blocked if r not in now]:
            if r in state.requests and state.requests[r].blocked:
                self._emit(Op.WAIT, r, -1, 0, 0)
        for r, blocked in now.items():
            before = state.requests[r].blocked
            if before != blocked:
                self._emit(Op.WAIT, r, *blocked)
                self.has_new_block |= before is None or before[0] != blocked[0]
        self._blocked = now
        rest = line.get("not_considered")
        now_rest = (REASONS.index(rest[0]), rest[1]) if rest else None
        if now_rest != state.rest:
            self._emit(Op.REST, *(now_rest or (0, 0)))

    def _num_published(self, r: int, num_output: int) -> int:
        """Full blocks of known and computed tokens; they stay cached when they are released."""
        num_known = self.entries[r].num_prompt + num_output
        return min(self.state.computed(r), num_known) // self._size

    def _emit(self, op: Op, *args: int) -> None:
        self._frame.ops += (op, *args)
        self.state.apply(op, args)
