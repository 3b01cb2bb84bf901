"""Makes the operations of a recording from the events of a run, one event at a time.

Events come from a file, from a live server or from a scheduler that runs now. What an event does
not say is derived: how many tokens each request has computed and generated, which blocks are cached.
A frame ends with a plan. With async scheduling the result of a plan comes after the next plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, get_args

from headway.events import Added, Completed, Event, Failed, Planned, Reset, ended_by
from headway.lab.recording.state import Op, RecordedRequest, RecordedState, Status
from headway.plan import Copy, Plan, Preemption, Reason
from headway.request import Request, RequestState
from headway.scheduler import Scheduler

REASONS: tuple[str, ...] = get_args(Reason)
FINISH_REASONS = ("stop", "length", "abort", "error")


class _Gains(NamedTuple):
    """The tokens that a plan in flight will give."""

    num_steps: int  # to every request that decodes, except
    others: dict[int, int]  # these, with their own numbers


class RecordingBuilder:
    """Follows a run; `state` is the state after the latest event."""

    def __init__(self, block_size: int) -> None:
        self.state = RecordedState(block_size)
        self.ops: list[int] = []  # since the latest frame
        self.entries: list[Request] = []  # requests that arrived since the latest frame
        self.numbers: dict[Request, int] = {}  # of the open requests
        self.has_new_block = False  # in the latest plan a request waits for another reason
        self._num_requests = 0
        self._in_flight: deque[_Gains] = deque()
        self._blocked: list[int] = []  # requests that the latest plan considered and did not admit

    def load(self, scheduler: Scheduler) -> None:
        """Start in the middle of a run, between two steps."""
        state = self.state
        for request in scheduler.requests.values():
            history, host = request.history, request.kv.host
            state.requests[self._add(request)] = RecordedRequest(
                Status[request.state.name], request.num_computed, request.num_generated,
                history.num_cached, history.num_preemptions, list(request.kv.blocks),
                list(host.blocks) if host else [],
            )  # fmt: skip
            state.refs.update(request.kv.blocks)
            state.num_swapped += request.state is RequestState.SWAPPED
        key_of = scheduler.kv.pool.index.key_of
        state.published.update(block for block, key in enumerate(key_of) if key is not None)
        for planned in scheduler.in_flight:
            plan = planned.plan
            gains = dict.fromkeys(plan.decodes, plan.num_steps)
            gains |= {chunk.request: 1 for chunk in plan.chunks if chunk.is_last}
            gains |= plan.tokens_kept
            others = {r: gains.get(request, 0) for request, r in self.numbers.items()}
            self._in_flight.append(_Gains(plan.num_steps if plan.decodes else 0, others))
        for request in scheduler.state.decode_batch.members:
            self._join(request)
        self.ops.clear()  # the keyframe of the first chunk has all of it

    def follow(self, event: Event) -> None:
        """Apply the next event."""
        match event:
            case Planned():
                self._plan(event)
            case Completed():
                self._add_results(event)
            case Added(requests):
                for request in requests:
                    self._add(request)
            case Failed():
                self._in_flight.clear()
        for request in ended_by(event):
            self._finish(request)
        if isinstance(event, (Reset, Failed)):
            self._preempt_all(event.preempted, ())
            self._emit(Op.FORGET, int(isinstance(event, Failed)))

    def take(self) -> tuple[list[int], list[Request]]:
        """The operations and the new requests since the previous call."""
        ops, self.ops, entries, self.entries = self.ops, [], self.entries, []
        return ops, entries

    def _emit(self, op: Op, *args: int) -> None:
        self.ops += (op, *args)
        self.state.apply(op, args)

    def _add(self, request: Request) -> int:
        r = self.numbers[request] = self._num_requests
        self._num_requests += 1
        self.entries.append(request)
        self._emit(Op.ADD, r)
        if request.history.resumed:  # another engine has generated these tokens
            self._emit(Op.GENERATED, r, len(request.history.resumed))
        return r

    def _add_results(self, event: Completed) -> None:
        state, gains = self.state, self._in_flight.popleft()
        others = gains.others.items()
        targets = {r: state.generated(r) + n for r, n in others if r in state.requests}
        if state.joined and gains.num_steps:
            self._emit(Op.RESULT, gains.num_steps)
        for r, target in targets.items():
            if state.generated(r) != target:
                self._emit(Op.GENERATED, r, target)
        for draft, num_accepted in event.verified():
            request, num_gained = draft.request, num_accepted + 1
            r = self.numbers[request]
            self._emit(Op.GENERATED, r, state.generated(r) + num_gained)
            if num_accepted < draft.count:
                self._emit(Op.CUT, r, draft.start + num_gained)
            if request not in event.finished:
                self._join(request)

    def _finish(self, request: Request) -> None:
        r = self.numbers.pop(request, None)
        if r is None:
            return
        num_output = request.num_generated
        published = self._num_published(r, request, num_output)
        self._leave(r)
        reason = FINISH_REASONS.index(request.finish_reason or "abort")
        self._emit(Op.FINISH, r, reason, num_output, published)

    def _plan(self, planned: Planned) -> None:
        plan = planned.plan
        self._preempt_all(plan.preempted, plan.copies_out)
        if plan.copies_out or plan.copies_in:
            self._emit(Op.COPY, len(plan.copies_out), len(plan.copies_in))
        for request, num_cached, num_swapped, _, num_hits, table in plan.admitted:
            r, num_computed = self.numbers[request], num_cached + num_swapped
            published = num_computed // self.state.block_size if num_swapped else num_hits
            self._emit(
                Op.ADMIT, r, num_computed, num_cached, num_hits, published, len(table), *table
            )
        for chunk in plan.chunks:
            self._emit(Op.CHUNK, self.numbers[chunk.request], chunk.start, chunk.end)
        for draft in plan.drafts:
            r = self.numbers[draft.request]
            self._leave(r)
            self._emit(Op.COMPUTED, r, draft.end)
        for request, block in plan.new_blocks:
            if block >= 0 and request in self.numbers:
                self._emit(Op.BLOCK, self.numbers[request], block)
        gains = self._decode(planned)
        for chunk in plan.chunks:
            if chunk.is_last:
                r = self.numbers[chunk.request]
                gains.others[r] = 1
                self._emit(Op.DECODING, r)
                self._join(chunk.request)
        self._wait(plan)
        if not plan.is_empty:
            self._in_flight.append(gains)

    def _preempt_all(self, preempted: Iterable[Preemption], copies: Sequence[Copy]) -> None:
        left = deque(copy for copy in copies if copy.source >= 0)
        for preemption in preempted:
            if (r := self.numbers.get(preemption.request)) is None:
                continue
            self._preempt(r, preemption, left)
            if preemption.is_discard:
                for gains in self._in_flight:
                    gains.others[r] = 0
                self._emit(Op.GENERATED, r, 0)

    def _preempt(self, r: int, preemption: Preemption, copies: deque[Copy]) -> None:
        """Put a request back into the queue; its copies are the first of `copies`."""
        table, host, is_swap = self.state.requests[r].blocks, list[int](), preemption.is_swap
        if is_swap and copies and table:  # leading blocks that others hold are not copied
            first = table.index(copies[0].source)
            num_used = -(-self.state.computed(r) // self.state.block_size)
            host = [copies.popleft().target for _ in range(num_used - first)]
        published = self._num_published(r, preemption.request, self.state.generated(r))
        self._leave(r)
        self._emit(Op.PREEMPT, r, int(is_swap), published, len(host), *host)

    def _num_published(self, r: int, request: Request, num_output: int) -> int:
        """Full blocks of known and computed tokens; they stay cached when they are released."""
        num_known = request.num_prompt + num_output
        return min(self.state.computed(r), num_known) // self.state.block_size

    def _decode(self, planned: Planned) -> _Gains:
        """Advance the requests that decode; those that reach their limit do not decode again."""
        plan, requests = planned.plan, self.state.requests
        gains = _Gains(plan.num_steps if plan.decodes else 0, {})
        deferred = [
            request for request in plan.deferred
            if request in self.numbers and requests[self.numbers[request]].status is Status.DECODING
        ]  # fmt: skip
        for request in deferred:
            r = self.numbers[request]
            gains.others[r] = 0
            self._emit(Op.DEFER, r)
            self._leave(r)
        if plan.decodes:
            self._emit(Op.DECODE, plan.num_steps)
        for num_steps, reaching in enumerate(planned.reaching_limit, start=1):
            for request in reaching:
                r = self.numbers.get(request, -1)
                if r in self.state.joined:  # not one that its chunk brings there
                    gains.others[r] = num_steps
                    if num_steps < plan.num_steps:  # the last token is not computed
                        self._emit(Op.COMPUTED, r, request.limit - 1)
                    self._leave(r)
        for request in deferred:
            self._join(request)
        return gains

    def _join(self, request: Request) -> None:
        r = self.numbers[request]
        if self.state.computed(r) < request.limit - 1:
            for gains in self._in_flight:
                gains.others.setdefault(r, 0)
            self._emit(Op.JOIN, r)

    def _leave(self, r: int) -> None:
        """Stop advancing a request; results in flight still bring it their tokens."""
        if r in self.state.joined:
            for gains in self._in_flight:
                gains.others.setdefault(r, gains.num_steps)
            self._emit(Op.LEAVE, r)

    def _wait(self, plan: Plan) -> None:
        """Changes of what requests wait for."""
        requests, self.has_new_block = self.state.requests, False
        blocked = {
            self.numbers[b.request]: (REASONS.index(b.reason), b.need, b.have)
            for b in plan.blocked
        }  # fmt: skip
        for r in self._blocked:
            if r not in blocked and r in requests and requests[r].blocked:
                self._emit(Op.WAIT, r, -1, 0, 0)
        for r, why in blocked.items():
            if (known := requests[r].blocked) != why:
                self._emit(Op.WAIT, r, *why)
                self.has_new_block |= known is None or known[0] != why[0]
        self._blocked = list(blocked)
        rest = plan.not_considered
        now = (REASONS.index(rest.reason), rest.num_requests) if rest else None
        if now != self.state.rest:
            self._emit(Op.REST, *(now or (0, 0)))
