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
from headway.kv.cache import AdmissionCost, KVCache
from headway.kv.window import WindowCache
from headway.plan import Admission, Plan, Preemption, WindowBlocks
from headway.request import Request, RequestState
from headway.scheduler.decode_batch import DecodeBatch
from headway.scheduler.fairness import group_of
from headway.scheduler.output_lengths import OutputStatistics
from headway.scheduler.policy_calls import call_swap
from headway.scheduler.queues import WaitingQueue

MAX_DISCARDS = 8  # of one request; then it keeps its output, so that every request ends


class SchedulerState:
    """All requests that are not finished, where they are, and the KV cache."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.kv = KVCache(
            config.num_blocks, config.block_size, config.num_host_blocks, _window_cache(config)
        )
        self.plan = Plan(-1)  # the latest plan
        self.view = StateView(self)
        self.queue = WaitingQueue(config.queue, self.view)
        self.requests: dict[str, Request] = {}
        self.running: dict[Request, None] = {}  # in the order of admission
        self.prefilling: dict[Request, None] = {}  # running ones with prompt tokens left
        self.swapped: dict[Request, None] = {}
        self.decode_batch = DecodeBatch(config.block_size, config.max_num_seqs)
        self.preempted_in_flight: set[Request] = set()  # requests that may have a token in flight
        self.in_flight: deque[Plan] = deque()
        self.preempted: list[Preemption] = []  # by the present call
        self.outputs = OutputStatistics()
        self.tokens_left = config.max_num_batched_tokens  # of the step under construction
        self.prefill_streak = 0  # consecutive plans without decodes
        self.stop_tokens: Counter[int] = Counter()  # of all requests
        self.free_rows = list(range(config.max_num_seqs))[::-1]
        self._num_admitted = 0

    def arrive(self, request: Request) -> None:
        """Count a new request that is in the queue."""
        self.queue.counters.arrive(group_of(request))
        for token in request.stops:
            self.stop_tokens[token] += 1

    def start(self, request: Request, cost: AdmissionCost) -> None:
        """Let a waiting request run: it gets a row, and blocks for all its known tokens."""
        self.queue.remove(request)
        self.swapped.pop(request, None)
        self.plan.copies_in += self.kv.allocate(request, cost)
        window = request.kv.window
        if window is not None and window.blocks:
            entries = WindowBlocks(request, window.first, tuple(window.blocks))
            self.plan.window_blocks.append(entries)
        request.move(RequestState.PREFILL)
        request.computed_base, request.prefill_end = cost.num_computed, request.num_known
        request.row = self.free_rows.pop()
        self.running[request] = self.prefilling[request] = None
        self.queue.counters.start(request)
        num_hit = min(cost.num_hits * self.config.block_size, cost.num_computed)
        is_resume = request.history.admission >= 0
        if not is_resume:
            request.history.num_cached = min(num_hit, request.num_prompt)
        request.history.admission = self._num_admitted
        self._num_admitted += 1
        num_swapped = cost.num_computed - num_hit
        self.plan.admitted.append(
            Admission(
                request, num_hit, num_swapped, is_resume, cost.num_hits, tuple(request.kv.blocks)
            )
        )

    def preempt(
        self,
        request: Request,
        *,
        may_swap: bool = True,
        is_priority: bool = False,
        num_due: int = 0,
    ) -> None:
        """Put a running request back into the queue; it keeps its output unless the rule discards it."""
        num_free = self.kv.num_free if num_due else 0
        num_computed = request.num_computed
        answer = may_swap and call_swap(self.config.swap, request, self.view)
        self.queue.push(request)  # first, so that a user's key that raises changes nothing
        self._stop_running(request)
        copies = self.kv.swap_out(request) if answer is True else None
        if copies is None:
            self.kv.release(request)
            request.move(RequestState.WAITING)
        else:
            self.plan.copies_out += copies
            request.move(RequestState.SWAPPED)
            self.swapped[request] = None
        request.computed_base = request.prefill_end = 0
        request.history.num_preemptions += 1
        request.history.num_priority_preemptions += is_priority
        self.outputs.pressure += not is_priority
        self.preempted_in_flight.add(request)
        is_discard = answer == "discard" and request.history.num_preemptions <= MAX_DISCARDS
        if is_discard:
            self._discard_output(request)
        preemption = Preemption(
            request, copies is not None, num_computed, is_priority, num_due, num_free, is_discard
        )
        self.preempted.append(preemption)

    def _discard_output(self, request: Request) -> None:
        """Forget the output of a request, tokens in flight included."""
        history = request.history
        history.num_discarded = max(history.num_discarded, request.num_generated)
        request.flushed_tokens = array("i")
        self.kv.trim_keys(request)
        for plan in self.in_flight:
            plan.tokens_kept.setdefault(request, 0)

    def finish(self, request: Request, reason: str) -> None:
        """End a request, running or waiting; its tokens in flight will be dropped."""
        if request in self.running:
            self._stop_running(request)
            self.kv.release(request)
        else:
            self.queue.remove(request)
            self.swapped.pop(request, None)
            self.kv.discard_host_copy(request)
        for plan in self.in_flight:
            plan.tokens_kept.setdefault(request, 0)
        request.move(RequestState.FINISHED)
        request.finish_reason = reason
        del self.requests[request.id]
        for token in request.stops:
            self.stop_tokens[token] -= 1
            if not self.stop_tokens[token]:
                del self.stop_tokens[token]
        self.queue.counters.depart(group_of(request))
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
        if self.kv.window is not None:
            self.kv.window.end_prefill(request)
        if request.num_computed + 1 < request.limit:
            self.decode_batch.join(request)
        else:  # the token that this plan samples is its last
            if not self.plan.reaching_limit:
                self.plan.reaching_limit.append([])
            self.plan.reaching_limit[0].append(request)


def _window_cache(config: Config) -> WindowCache | None:
    if not config.sliding_window:
        return None
    return WindowCache(
        config.sliding_window, config.num_window_blocks, config.block_size,
        config.max_num_batched_tokens,
    )  # fmt: skip


class StateView:
    """What policies may read of a scheduler's state; see config.SchedulerView."""

    __slots__ = ("_state", "block_size", "num_blocks")

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        # Sizes, which never change; all else is read from the state, which may be reconfigured.
        self.num_blocks, self.block_size = state.config.num_blocks, state.config.block_size

    @property
    def max_num_batched_tokens(self) -> int:
        return self._state.config.max_num_batched_tokens

    @property
    def running(self) -> Iterable[Request]:
        return self._state.running

    @property
    def num_free(self) -> int:
        return self._state.kv.num_free

    @property
    def tokens_left(self) -> int:
        return self._state.tokens_left

    @property
    def pressure(self) -> float:
        return self._state.outputs.pressure

    @property
    def output_shares(self) -> Sequence[float]:
        return self._state.outputs.shares

    @property
    def output_lengths(self) -> Sequence[int]:
        return self._state.outputs.lengths

    def service(self) -> dict[str, float]:
        return self._state.queue.counters.service(self._state.running)

    def queue_key(self, request: Request) -> Any:
        return self._state.queue.sort_key(request)

    def num_uncached(self, request: Request) -> int:
        if request.row >= 0:
            return max(0, request.prefill_end - request.num_computed)
        return request.num_known - self._state.kv.admission_cost(request).num_computed

    def blocks_of(self, request: Request) -> list[int]:
        return self._state.kv.blocks_of(request)

    def num_private_blocks(self, request: Request) -> int:
        return self._state.kv.num_private_blocks(request)
