"""One step under construction: the three verbs that fill a plan, called by a recipe in its order.

Room is made before anything is granted, so a plan never takes back what it gave. A waiting request
that is not taken leaves its reason, with what it needed and what was there.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING

from headway.plan import Blocked, Chunk, NotConsidered, Plan, Reason
from headway.request import Request, State
from headway.scheduler import turns
from headway.scheduler.policy_calls import call_chunk
from headway.scheduler.priority_preemption import choose_victims

if TYPE_CHECKING:
    from headway.scheduler.scheduler import Scheduler

UNCOMPUTED = frozenset({State.WAITING, State.PREFILL, State.SWAPPED})


class Step:
    """The verbs of a recipe, over the scheduler whose next plan this is."""

    __slots__ = (
        "_closed", "_entitled", "_kept_blocks", "_ran_short", "_scheduler", "plan", "tokens_left",
    )  # fmt: skip

    def __init__(self, scheduler: Scheduler, plan: Plan) -> None:
        self.plan = plan
        self.tokens_left = scheduler.config.max_num_batched_tokens
        self._scheduler = scheduler
        self._ran_short = False  # somebody had to be preempted
        self._closed: Reason | None = None  # why nobody can be admitted any more
        self._kept_blocks = 0  # for decodes yet to come
        self._entitled: Request | None = None  # way was made for it, so headroom is not asked

    @property
    def is_idle(self) -> bool:
        return not (self.plan.decodes or self.plan.chunks)

    @property
    def num_decoding(self) -> int:
        return len(self._scheduler.decode_batch.members)

    @property
    def prefill_streak(self) -> int:
        return self._scheduler.prefill_streak

    def make_way(self) -> None:
        """If the first in line outranks running requests, send back as many as it needs."""
        head = next(self._scheduler.queue.walk())
        if self._must_wait(head):
            return
        for request in choose_victims(head, self._scheduler):
            self._scheduler.preempt(request, is_priority=True)
            self._entitled = head

    def decode(self, at_most: int | None = None) -> None:
        """Advance everyone past the prompt, making room first."""
        plan, decode_batch = self.plan, self._scheduler.decode_batch
        if plan.decodes or not decode_batch.members:
            return
        if plan.chunks:  # the budget is for all of them together
            at_most = self.tokens_left if at_most is None else min(at_most, self.tokens_left)
        plan.deferred = []
        if at_most is not None and at_most < len(decode_batch.members):
            plan.deferred = sorted(decode_batch.members, key=lambda r: r.history.admission)
            plan.deferred = plan.deferred[max(0, at_most) :]
            for request in plan.deferred:
                decode_batch.leave(request)
        while len(decode_batch.due) > self._scheduler.kv.num_free:
            self._ran_short = True
            self._scheduler.preempt(self._choose_victim())
        if decode_batch.members:
            plan.decodes, plan.rows = decode_batch.lend()
            plan.decode_context = decode_batch.context
            self.tokens_left -= len(plan.decodes)
            self._advance()
            if self._scheduler.config.num_scheduler_steps > 1:
                self._advance_further()
        for request in plan.deferred:
            if request in self._scheduler.running:
                decode_batch.join(request)

    def prefill(self) -> None:
        """Continue prompts that an earlier step cut, behind newcomers who may pass them."""
        scheduler = self._scheduler
        if not scheduler.prefilling:
            return
        given = {chunk.request for chunk in self.plan.chunks}
        begun = [request for request in scheduler.prefilling if request not in given]
        for place, request in enumerate(begun):
            if self.tokens_left <= 0:
                break
            if scheduler.queue.has_others(request):
                self._let_pass(begun[place:])
            granted = self._granted(request.prefill_end - request.num_computed)
            if granted:
                self._compute(request, granted)
                self.tokens_left -= granted

    def _let_pass(self, begun: list[Request]) -> None:
        """Seat the newcomers who may pass the first of these, and put them before all of these."""
        scheduler = self._scheduler
        passing = scheduler.queue.walk_within(turns.had_by(begun[0], scheduler))
        num_seated, first = len(scheduler.running), next(passing, None)
        if first is not None:
            self._admit(chain((first,), passing))
        if len(scheduler.running) > num_seated:
            for request in begun:
                scheduler.prefilling[request] = scheduler.prefilling.pop(request)

    def admit(self, *, charge_cached: bool = False) -> None:
        """Seat waiting requests in the queue's order, until one does not fit."""
        self._admit(self._scheduler.queue.walk(), charge_cached)

    def _admit(self, candidates: Iterable[Request], charge_cached: bool = False) -> None:
        scheduler, plan = self._scheduler, self.plan
        plan.blocked = []
        self._closed = self._reason_to_close()
        if self._closed or not scheduler.queue:
            return
        patience, passed = scheduler.config.queue.patience, list[Request]()
        for request in candidates:
            blocked = self._try(request, charge_cached)
            if blocked is None:
                for other in passed:
                    other.history.num_overtaken += 1
                self._closed = self._reason_to_close()
            else:
                plan.blocked.append(blocked)
                if blocked.reason == "order":  # it waits for its parent, not for room
                    continue
                passed.append(request)
            if self._closed or (blocked and blocked.reason == "token_budget") or len(passed) > patience:
                break
            if any(other.history.num_overtaken >= patience for other in passed):
                break

    def admit_swapped(self) -> None:
        """Bring back who was swapped out, leaving the decodes what they will need."""
        if not self._scheduler.swapped or self._entitled:  # whoever way was made for comes first
            return
        self._kept_blocks = len(self._scheduler.decode_batch.due)
        kept_tokens = min(self.num_decoding, self.tokens_left)
        self.tokens_left -= kept_tokens
        self._admit(sorted(self._scheduler.swapped, key=self._scheduler.place))
        self.tokens_left += kept_tokens
        self._kept_blocks = 0

    def account(self) -> None:
        """Everyone who still waits and was not looked at shares one reason."""
        rest = len(self._scheduler.queue) - len(self.plan.blocked)
        if rest:
            reason = "back_off" if self._ran_short else self._closed
            self.plan.not_considered = NotConsidered(reason or "order", rest)

    def _reason_to_close(self) -> Reason | None:
        """Why nobody at all can be admitted any more in this step."""
        if self._ran_short:
            return "back_off"  # newcomers would only fight those just sent back for room
        if len(self._scheduler.running) >= self._scheduler.config.max_num_seqs:
            return "max_num_seqs"
        return "token_budget" if self.tokens_left <= 0 else None

    def force(self) -> None:
        """The policies left the step empty with work at hand: do the first thing there is."""
        scheduler = self._scheduler
        self.decode()
        if self.plan.is_empty and scheduler.prefilling:
            request = next(iter(scheduler.prefilling))
            want = request.prefill_end - request.num_computed
            self._compute(request, min(want, scheduler.config.max_num_batched_tokens))
        if self.plan.is_empty:
            request = next(scheduler.queue.walk())
            scheduler.seat(request, scheduler.kv.survey(request))
            want = request.prefill_end - request.num_computed
            self._compute(request, min(want, scheduler.config.max_num_batched_tokens))
            self.plan.blocked = [b for b in self.plan.blocked if b.request is not request]

    def _advance(self) -> None:
        """One token for everybody who decodes; blocks for those who cross into a new one."""
        decode_batch = self._scheduler.decode_batch
        due = decode_batch.due
        if due:
            blocks = self._scheduler.kv.pool.take(len(due))
            for put, block in zip(due.values(), blocks, strict=True):
                put(block)
            self.plan.new_blocks += zip(due, blocks, strict=True)
        self.plan.reaching_limit.append(decode_batch.advance())

    def _advance_further(self) -> None:
        """More steps in one plan, as long as nobody waits and nobody must be preempted for it."""
        scheduler, plan, decode_batch = self._scheduler, self.plan, self._scheduler.decode_batch
        if scheduler.queue or scheduler.prefilling or plan.chunks or plan.deferred:
            return
        while (
            plan.num_steps < scheduler.config.num_scheduler_steps
            and decode_batch.members
            and len(decode_batch.due) <= scheduler.kv.num_free
        ):
            self._advance()
            plan.num_steps += 1

    def _choose_victim(self) -> Request:
        """Who goes first, of those this plan has given nothing to."""
        scheduler, given = self._scheduler, {chunk.request for chunk in self.plan.chunks}
        running = (*scheduler.prefilling, *scheduler.decode_batch.members, *self.plan.deferred)
        candidates = [r for r in running if r not in given and r in scheduler.running]
        return max(candidates, key=lambda r: scheduler.config.victim(r, scheduler))

    def _granted(self, want: int) -> int:
        """Tokens of `want` that the chunk rule allows now."""
        left = self.tokens_left
        if left <= 0:
            return 0
        return call_chunk(self._scheduler.config.chunk, want, left, not self.plan.chunks)

    def _compute(self, request: Request, num_tokens: int) -> None:
        """Put the next tokens of a prompt into the plan."""
        scheduler, history = self._scheduler, request.history
        start, size = request.num_computed, scheduler.config.block_size
        end = request.base = start + num_tokens
        # Only a full hit starts in a block with known content: it is shared, so not written again.
        is_stored = scheduler.kv.pool.index.key_of[request.kv.blocks[start // size]] is not None
        is_last = end == request.prefill_end
        self.plan.chunks.append(Chunk(request, start, end, end if is_stored else start, is_last))
        scheduler.kv.publish(request, start // size, end // size)
        history.num_recomputed += max(0, min(end, history.max_num_computed) - start)
        if is_last:
            del scheduler.prefilling[request]

    def _must_wait(self, request: Request) -> Blocked | None:
        """Block a request until its parent has computed the prompt, or until its preemption ends."""
        parent = request.parent
        if parent is not None and not parent.num_generated and parent.state in UNCOMPUTED:
            return Blocked(request, "order", 1, 0)
        if request in self._scheduler.unsettled:
            return Blocked(request, "just_preempted", 1, 0)
        return None

    def _try(self, request: Request, charge_cached: bool) -> Blocked | None:
        """Seat a request if tokens and blocks allow; otherwise say what is missing."""
        scheduler, kv = self._scheduler, self._scheduler.kv
        if blocked := self._must_wait(request) or turns.leaves_seats(request, scheduler):
            return blocked
        survey = kv.survey(request)
        want = request.num_known - survey.num_computed
        price = request.num_known if charge_cached else want
        charge = self._granted(price)
        if not charge:
            return Blocked(request, "token_budget", price, self.tokens_left)
        free, need = kv.num_free, survey.num_blocks - survey.num_hits
        if need <= free < survey.num_blocks:  # it depends on how many hits somebody holds
            need = kv.num_taken(request, survey)
        if need > free:
            return Blocked(request, "blocks", need, free)
        if (scheduler.running or scheduler.in_flight) and request is not self._entitled:
            room = self._kept_blocks + max(0, int(scheduler.config.headroom(request, scheduler)))
            if survey.num_blocks + room > free:
                need = kv.num_taken(request, survey)
            if need + room > free:
                return Blocked(request, self._why_headroom(request, need), need + room, free)
        self.tokens_left -= charge
        scheduler.seat(request, survey)
        self._compute(request, min(want, charge))
        return None

    def _why_headroom(self, request: Request, need: int) -> Reason:
        """Back-off, if the rule it is built on would have let the request in."""
        base = getattr(self._scheduler.config.headroom, "base", None)
        free = self._scheduler.kv.num_free
        fits = base is not None and need + base(request, self._scheduler) <= free
        return "back_off" if fits else "headroom"
