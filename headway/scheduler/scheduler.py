"""The scheduler: what runs next, as a plan, and what became of it.

Holds who waits, who runs and who is in flight. The verbs that fill a plan are in step.py, what a
result means is in settle.py, what systems do differently is in the slots of the config. Reads no
clock, does no I/O, and is the same object above a GPU, a CPU, the simulator and the tests.

One plan may be in flight while the next is made. Then `num_computed` runs ahead of `tokens`: the
values are still on the device. Blocks that a finished, aborted or preempted request gives up are
free at once, because plans run in order; its tokens in flight are dropped or kept in `complete`.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from headway.config import Config
from headway.kv.cache import AdmissionCost, KVCache
from headway.plan import Admission, Plan, Preemption, StepEvents, StepReport, StepResult
from headway.request import Request, State
from headway.scheduler import validate as door
from headway.scheduler.decode_batch import DecodeBatch
from headway.scheduler.ledger import OUTPUT_WEIGHT, Ledger
from headway.scheduler.output_lengths import is_open_ended
from headway.scheduler.queues import WaitingQueue
from headway.scheduler.results import check_result, settle
from headway.scheduler.step_builder import Step

FADE = 0.97  # of `pressure` per step: a preemption is half forgotten after 23
NUM_OUTPUTS = 256  # finished outputs of each kind, remembered for estimates


class Scheduler:
    """Decides every step: add, abort, schedule, complete."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.kv = KVCache(config.num_blocks, config.block_size, config.num_host_blocks)
        self.num_blocks, self.block_size = config.num_blocks, config.block_size
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.blocks_of, self.num_private_blocks = self.kv.blocks_of, self.kv.num_private_blocks
        self.queue = WaitingQueue(config.queue, self)
        self.ledger = Ledger()
        self.decode_batch: DecodeBatch = DecodeBatch(config.block_size, config.max_num_seqs)
        self.requests: dict[str, Request] = {}  # everyone not finished
        self.running: dict[Request, None] = {}  # everyone with a seat, in the order of admission
        self.prefilling: dict[Request, None] = {}
        self.swapped: dict[Request, None] = {}
        self.unsettled: set[Request] = set()  # preempted, perhaps with a token still in flight
        self.in_flight: deque[Plan] = deque()
        self.pressure = 0.0
        self.prefill_streak = 0
        self.output_shares: deque[float] = deque(maxlen=NUM_OUTPUTS)
        self.output_lengths: deque[int] = deque(maxlen=NUM_OUTPUTS)
        self.last_plan = Plan(-1)
        self._rows = list(range(config.max_num_seqs))[::-1]
        self.watched: Counter[int] = Counter()  # stop tokens of everyone not finished
        self._num_added = self._num_admitted = self._num_steps = 0
        self._events = StepEvents()  # since the last plan that was not empty
        self._step = Step(self, self.last_plan)
        self._service: dict[str, float] | None = None  # kept until somebody comes, goes or steps

    def add(self, *requests: Request) -> None:
        """Take requests, all or none; a RequestError or PolicyError says why one cannot be taken."""
        taken: list[Request] = []
        try:
            for request in requests:
                request.limit = door.check(request, self.config, self.requests)
                request.history.serial = self._num_added + len(taken)
                self.queue.push(request)
                self.requests[request.id] = request
                taken.append(request)
        except BaseException:
            for request in taken:
                self.queue.remove(request)
                del self.requests[request.id]
            raise
        for request in requests:  # from here on nothing can fail
            self.ledger.arrive(self.queue.group_of(request))
            self.watched.update(request.stops)
        self._num_added += len(requests)
        self._events.added += requests

    def abort(self, id: str, reason: str = "abort", error: str | None = None) -> bool:
        """End a request at once, wherever it is; False if there is none of that id."""
        request = self.requests.get(id)
        if request is None:
            return False
        request.error = error
        self.retire(request, reason)
        request.history.aborted_after = len(self._events.added)
        first_new = self._events.added[0].history.serial if self._events.added else self._num_added
        if self.in_flight and request.history.serial < first_new:
            self.in_flight[-1].events.aborted_in_flight.append(request)
        else:  # its end must not be told before its beginning
            self._events.aborted.append(request)
        return True

    def schedule(self) -> Plan:
        """Make the next plan. With work present it is empty only while another is in flight."""
        assert len(self.in_flight) < 2, "at most one plan may be in flight while the next is made"
        self.last_plan = plan = Plan(self._num_steps)
        self._step = step = Step(self, plan)
        plan.events.num_in_flight = len(self.in_flight)
        self._service = None
        if self.config.queue.preempts and self.queue:
            step.make_way()
        self.config.recipe(step)
        if plan.is_empty and self.requests and not self.in_flight:
            step.force()
        step.account()
        self.kv.settle_host()
        for chunk in plan.chunks:
            if chunk.is_last:
                self._start_decoding(chunk.request, plan)
        plan.events.num_free = self.kv.num_free
        plan.events.num_running, plan.events.num_waiting = len(self.running), len(self.queue)
        if not plan.is_empty:
            self._launch(plan)
        elif self.in_flight:  # what has come so far was looked at, before the one in flight settles
            self._events.num_early = len(self._events.added), len(self._events.aborted)
        return plan

    def complete(self, plan: Plan, result: StepResult) -> StepReport:
        """Settle the oldest plan in flight: hand out its tokens, finish who is done."""
        assert plan is self.in_flight[0], "plans are completed in the order they were made"
        check_result(plan, result)
        self.in_flight.popleft()
        self.unsettled.clear()
        finished = [
            *plan.events.aborted,
            *plan.events.aborted_in_flight,
            *settle(plan, result, self),
        ]
        self.decode_batch.strayed.clear()
        return StepReport(plan, result, finished)

    @property
    def has_pending_events(self) -> bool:
        """Whether somebody was aborted whose end no report has told yet."""
        return bool(self._events.aborted)

    def take_pending_events(self) -> StepReport | None:
        """What happened since the last plan, if there is none to report it with."""
        news = self._events
        if self.in_flight or not (news.added or news.aborted or news.preempted):
            return None
        self._events = StepEvents()
        return StepReport(Plan(-1, events=news), StepResult(), news.aborted)

    def fail(self, reason: str) -> None:
        """A step failed: end what was in flight with the reason, distrust all that is cached."""
        plans, news = list(self.in_flight), self._events
        self.in_flight.clear()
        for plan in reversed(plans):  # what they would have reported is news again
            news.added[:0], news.preempted[:0] = plan.events.added, plan.events.preempted
            news.aborted[:0] = [*plan.events.aborted, *plan.events.aborted_in_flight]
        touched = {r for p in plans for r in (*p.decodes, *(c.request for c in p.chunks))}
        for request in [r for r in self.requests.values() if r in touched]:
            self.abort(request.id, "error", reason)
        for request in self.swapped:
            self.kv.discard_host_copy(request)
        for request in reversed(self.running.copy()):
            try:
                self.preempt(request, may_swap=False)
            except Exception:  # a user's queue key is what failed: it cannot be queued again
                self.abort(request.id, "error", reason)
        self.reset_cache(force=True)
        self.kv.settle_host()
        self.decode_batch = DecodeBatch(self.config.block_size, self.config.max_num_seqs)

    def reset_cache(self, *, force: bool = False) -> bool:
        """Forget all cached prefixes. Refuses while blocks are held; `force` recomputes them."""
        if self.in_flight or (self.running and not force):
            return False
        for request in reversed(self.running.copy()):
            self.preempt(request, may_swap=False)
        self.unsettled.clear()
        self.kv.pool.forget_all()
        return True

    # What policies may look at (config.SchedulerView).

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left of any request but what is cached."""
        holds = self.requests or self.running or self.queue or self.swapped or self.in_flight
        blocks = self.kv.num_free, self.kv.host.num_free
        return not holds and blocks == (self.config.num_blocks, self.config.num_host_blocks)

    @property
    def num_free(self) -> int:
        return self.kv.num_free

    @property
    def tokens_left(self) -> int:
        return self._step.tokens_left

    def service(self) -> dict[str, float]:
        """Weighted tokens served to every group; those in seats count with their whole prompts."""
        if self._service is None:
            self._service, group = self.ledger.served.copy(), self.queue.group_of
            for request in self.running:
                self._service[group(request)] += _served(request)
        return self._service

    def place(self, request: Request) -> Any:
        return self.queue.place(request)

    def num_uncached(self, request: Request) -> int:
        if request.row >= 0:
            return max(0, request.prefill_end - request.num_computed)
        return request.num_known - self.kv.survey(request).num_computed

    # Seats: how requests come, go and are sent back.

    def seat(self, request: Request, survey: AdmissionCost) -> None:
        """Out of the queue, into a seat, with blocks for all its known tokens."""
        self.queue.remove(request)
        self.swapped.pop(request, None)
        self.last_plan.copies_in += self.kv.reserve(request, survey)
        request.move(State.PREFILL)
        request.base, request.prefill_end = survey.num_computed, request.num_known
        request.row = self._rows.pop()
        self.running[request] = self.prefilling[request] = None
        num_hit = min(survey.num_hits * self.config.block_size, survey.num_computed)
        is_resume = request.history.admission >= 0
        if not is_resume:
            request.history.num_cached = num_hit
        if self._service is not None:
            self._service[self.queue.group_of(request)] += _served(request)
        request.history.admission = self._num_admitted
        self._num_admitted += 1
        num_swapped = survey.num_computed - num_hit
        self.last_plan.admitted.append(Admission(request, num_hit, num_swapped, is_resume))

    def preempt(
        self, request: Request, *, may_swap: bool = True, is_priority: bool = False
    ) -> None:
        """Send a running request back to its place in the queue; its tokens stay its own."""
        num_computed = request.num_computed
        wants_swap = may_swap and self.config.swap(request, self)
        self.queue.push(request)  # first, so that a user's key that raises changes nothing
        self._unseat(request)
        copies = self.kv.swap_out(request) if wants_swap else None
        if copies is None:
            self.kv.release(request)
            request.move(State.WAITING)
        else:
            self.last_plan.copies_out += copies
            request.move(State.SWAPPED)
            self.swapped[request] = None
        request.base = 0
        request.history.num_preemptions += 1
        request.history.num_priority_preemptions += is_priority
        self.pressure += not is_priority
        self.unsettled.add(request)
        is_swap = copies is not None
        self._events.preempted.append(Preemption(request, is_swap, num_computed, is_priority))

    def _unseat(self, request: Request) -> None:
        """Out of the seat; the caller gives back its blocks."""
        self.ledger.charge(self.queue.group_of(request), _served(request))
        request.history.max_num_computed = max(
            request.history.max_num_computed, request.num_computed
        )
        if request in self.decode_batch.members:
            self.decode_batch.leave(request)
        self.prefilling.pop(request, None)
        del self.running[request]
        self._service = None
        self._rows.append(request.row)
        request.row = -1

    def retire(self, request: Request, reason: str) -> None:
        """The end of a request, running or waiting; what is in flight for it will be dropped."""
        if request in self.running:
            self._unseat(request)
            self.kv.release(request)
        else:
            self.queue.remove(request)
            self.swapped.pop(request, None)
            self.kv.discard_host_copy(request)
        for plan in self.in_flight:
            plan.tokens_kept.setdefault(request, 0)
        request.move(State.FINISHED)
        request.finish_reason = reason
        del self.requests[request.id]
        for token in request.stops:
            self.watched[token] -= 1
            if not self.watched[token]:
                del self.watched[token]
        self.ledger.depart(self.queue.group_of(request))
        if reason in ("stop", "length") and request.params.pooling is None:
            self._remember_output(request)

    def _remember_output(self, request: Request) -> None:
        """Keep what headroom rules learn from: a length if open-ended, a share otherwise."""
        if not is_open_ended(request):
            allowed = request.limit - request.num_prompt
            self.output_shares.append(request.num_generated / allowed)
        elif request.stops:
            self.output_lengths.append(request.num_generated)

    # The two ends of a plan's life.

    def _start_decoding(self, request: Request, plan: Plan) -> None:
        """The known tokens are planned to their end: the next plan may decode."""
        request.move(State.DECODING)
        if request.num_computed + 1 < request.limit:
            self.decode_batch.join(request)
        else:  # the token this plan samples is its last
            if not plan.reaching_limit:
                plan.reaching_limit.append([])
            plan.reaching_limit[0].append(request)

    def _launch(self, plan: Plan) -> None:
        """The plan has work in it: give it the news, and count it as in flight."""
        events, self._events = self._events, StepEvents()
        plan.events.added, plan.events.aborted = events.added, events.aborted
        plan.events.preempted, plan.events.num_early = events.preempted, events.num_early
        self.pressure *= FADE
        self.prefill_streak = 0 if plan.decodes else self.prefill_streak + 1
        self._num_steps += 1
        self.in_flight.append(plan)


def _served(request: Request) -> float:
    """Weighted tokens that a seat gives: the prompt, if it is its first, and what it sampled."""
    num_prompt = 0 if request.history.num_preemptions else request.num_prompt
    num_sampled = max(0, request.num_computed + 1 - request.prefill_end)  # or planned to be
    return num_prompt + OUTPUT_WEIGHT * num_sampled
