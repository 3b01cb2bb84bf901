"""The state of a scheduler, and how requests move through it: queued, running, preempted, finished.

Every change of a request's state is here; which request changes, and when, is decided elsewhere
(step_builder.py, results.py). `StateView` is the part of the state that policies may read.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any

from headway.config import Config
from headway.events import Planned
from headway.kv.cache import AdmissionCost, KVCache
from headway.kv.window import WindowCache
from headway.plan import Admission, Chunk, Plan, Preemption
from headway.request import Request, RequestState
from headway.scheduler.decode_batch import DecodeBatch
from headway.scheduler.drafting import Drafting
from headway.scheduler.fairness import group_of
from headway.scheduler.policies.lengths import OutputStatistics
from headway.scheduler.policy_calls import Policies
from headway.scheduler.queue import WaitingQueue

MAX_DISCARDS = 8  # of one request; then it keeps its output, so that every request ends


class SchedulerState:
    """All requests that are not finished, where they are, and the KV cache."""

    def __init__(self, config: Config) -> None:
        self.drafting: Drafting | None = None
        self.use(config)
        window = WindowCache(config) if config.sliding_window else None
        self.kv = KVCache(config.num_blocks, config.block_size, config.num_host_blocks, window)
        self.planned = Planned(Plan(-1))  # the latest plan; incomplete if a policy raised
        self.requests: dict[str, Request] = {}
        self.running: dict[Request, None] = {}  # in the order of admission
        self.prefilling: dict[Request, None] = {}  # running ones with prompt tokens left
        self.swapped: dict[Request, None] = {}
        self.decode_batch = DecodeBatch(config.block_size, config.max_num_seqs)
        self.preempted_in_flight: set[Request] = set()  # requests that may have a token in flight
        self.in_flight: deque[Planned] = deque()
        self.preempted: list[Preemption] = []  # by the present call
        self.outputs = OutputStatistics()
        self.tokens_left = config.max_num_batched_tokens  # of the step under construction
        self.num_steps = 0  # plans with work so far; the number of the next one
        self.prefill_streak = 0  # consecutive plans without decodes
        self.stop_tokens: Counter[int] = Counter()  # of all requests
        self.free_rows = list(range(config.max_num_seqs))[::-1]
        self._num_admitted = 0
        self.view = StateView(self)
        self.queue = WaitingQueue(config.queue, self.view)

    @property
    def plan(self) -> Plan:
        return self.planned.plan

    def use(self, config: Config) -> None:
        """Use the policies and numbers of a config; the waiting queue changes its rule itself."""
        self.config, self.policies = config, Policies(config)
        if config.draft is None:
            self.drafting = None
        elif self.drafting is None or config.drafter is not self.drafting.rule:
            self.drafting = Drafting(config.drafter)

    def arrive(self, request: Request) -> None:
        """Count a new request that is in the queue."""
        self.queue.counters.arrive(group_of(request))
        for token in request.stops:
            self.stop_tokens[token] += 1

    def admit(self, request: Request, cost: AdmissionCost) -> None:
        """Move a waiting request to running, with a row, and blocks for prompt and output."""
        self.queue.remove(request)
        self.swapped.pop(request, None)
        self.plan.copies_in += self.kv.allocate(request, cost)
        request.move(RequestState.PREFILL)
        request.computed_base, request.prefill_end = cost.num_computed, request.num_known
        request.row = self.free_rows.pop()
        self.running[request] = self.prefilling[request] = None
        self.queue.counters.start(request)
        num_hit = min(cost.num_hits * self.config.block_size, cost.num_computed)
        history, num_swapped = request.history, cost.num_computed - num_hit
        is_resume, blocks = history.admission >= 0, tuple(request.kv.blocks)
        if not is_resume:
            history.num_cached = min(num_hit, request.num_prompt)
        history.admission = self._num_admitted
        self._num_admitted += 1
        admission = Admission(request, num_hit, num_swapped, is_resume, cost.num_hits, blocks)
        self.plan.admitted.append(admission)

    def compute(self, request: Request, num_tokens: int) -> None:
        """Put the next tokens of a prompt into the plan."""
        history, start = request.history, request.num_computed
        end = request.computed_base = start + num_tokens
        is_last = end == request.prefill_end
        store_from = self.kv.store(request, start, end)
        self.plan.chunks.append(Chunk(request, start, end, store_from, is_last))
        history.num_recomputed += max(0, min(end, history.max_num_computed) - start)
        if is_last:
            del self.prefilling[request]

    def preempt(
        self,
        request: Request,
        *,
        may_swap: bool = True,
        is_priority: bool = False,
        num_due: int = 0,
    ) -> None:
        """Put a running request back into the queue; it keeps its output unless the rule discards it."""
        history, num_computed = request.history, request.num_computed
        num_free = self.kv.num_free if num_due else 0
        answer = may_swap and self.policies.swap(request, self.view)
        answers, seconds = self.planned.answers, self.config.swap_seconds
        if may_swap and answers is not None and seconds is not None:
            answers.swap_seconds[request] = seconds(request, self.view)
        self.queue.push(request)  # first, so that a user's key that raises changes nothing
        self._stop_running(request)
        copies = self.kv.swap_out(request) if answer is True else None
        is_swap = copies is not None
        if copies is None:
            self.kv.release(request)
        else:
            self.plan.copies_out += copies
            self.swapped[request] = None
        request.move(RequestState.SWAPPED if is_swap else RequestState.WAITING)
        request.computed_base = request.prefill_end = 0
        history.num_preemptions += 1
        history.num_priority_preemptions += is_priority
        self.outputs.pressure += num_due > 0
        self.preempted_in_flight.add(request)
        is_discard = answer == "discard" and history.num_preemptions <= MAX_DISCARDS
        if is_discard:
            self._discard_output(request)
        numbers = num_computed, is_priority, num_due, num_free
        self.preempted.append(Preemption(request, is_swap, *numbers, is_discard))

    def _discard_output(self, request: Request) -> None:
        """Forget the output of a request; it is generated again."""
        history = request.history
        history.num_discarded = max(history.num_discarded, request.num_generated)
        request.flushed_tokens = array("i")
        self.kv.trim_keys(request)
        self._drop_tokens_in_flight(request)
        if self.drafting is not None:
            self.drafting.forget(request)

    def _drop_tokens_in_flight(self, request: Request) -> None:
        for planned in self.in_flight:
            planned.plan.tokens_kept.setdefault(request, 0)

    def forget_host_copies(self) -> None:
        """Swapped requests are computed again."""
        for request in self.swapped:
            self.kv.discard_host_copy(request)
            request.move(RequestState.WAITING)
        self.swapped.clear()

    def finish(self, request: Request, reason: str, error: str | None = None) -> None:
        """End a request, running or waiting; its tokens in flight will be dropped."""
        if request in self.running:
            self._stop_running(request)
            self.kv.release(request)
        else:
            self.queue.remove(request)
            self.swapped.pop(request, None)
            self.kv.discard_host_copy(request)
        self._drop_tokens_in_flight(request)
        request.move(RequestState.FINISHED)
        request.finish_reason, request.error = reason, error
        del self.requests[request.id]
        for token in request.stops:
            self.stop_tokens[token] -= 1
            if not self.stop_tokens[token]:
                del self.stop_tokens[token]
        self.queue.counters.depart(group_of(request), self.num_steps)
        if self.drafting is not None:
            self.drafting.forget(request)
        if reason in ("stop", "length") and request.params.pooling is None:
            self.outputs.record(request)

    def _stop_running(self, request: Request) -> None:
        """Free the row; the caller frees the blocks."""
        self.queue.counters.charge(request)
        history = request.history
        history.max_num_computed = max(history.max_num_computed, request.num_computed)
        if request in self.decode_batch.members:
            self.decode_batch.leave(request)
        self.prefilling.pop(request, None)
        del self.running[request]
        self.free_rows.append(request.row)
        request.row = -1

    def start_decoding(self, request: Request) -> None:
        """All known tokens are planned: the next plan may decode."""
        request.move(RequestState.DECODING)
        self.kv.end_prefill(request)
        if request.num_computed + 1 < request.limit:
            self.decode_batch.join(request)
        else:  # the token that this plan samples is its last
            if not self.planned.reaching_limit:
                self.planned.reaching_limit.append([])
            self.planned.reaching_limit[0].append(request)


class StateView:
    """What policies may read of a scheduler's state; see config.SchedulerView."""

    def __init__(self, state: SchedulerState) -> None:
        self._state, kv = state, state.kv
        self.num_blocks, self.block_size = state.config.num_blocks, state.config.block_size
        self.running: Iterable[Request] = state.running
        self.output_shares: Sequence[float] = state.outputs.shares
        self.output_lengths: Sequence[int] = state.outputs.lengths
        self.blocks_of, self.num_private_blocks = kv.blocks_of, kv.num_private_blocks

    @property
    def max_num_batched_tokens(self) -> int:
        return self._state.config.max_num_batched_tokens  # which may be reconfigured

    @property
    def num_free(self) -> int:
        return self._state.kv.num_free

    @property
    def tokens_left(self) -> int:
        return self._state.tokens_left

    @property
    def pressure(self) -> float:
        return self._state.outputs.pressure

    def service(self) -> dict[str, float]:
        return self._state.queue.counters.service(self._state.running)

    def queue_key(self, request: Request) -> Any:
        return self._state.queue.sort_key(request)

    def num_uncached(self, request: Request) -> int:
        if request.row >= 0:
            return max(0, request.prefill_end - request.num_computed)
        return request.num_known - self._state.kv.admission_cost(request).num_computed
