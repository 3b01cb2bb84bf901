"""The scheduler: makes the plan of the next step, and applies its result.

The state and its transitions are in state.py, the plan is filled in step_builder.py, results are
applied in results.py. The differences between systems are policies in the slots of the config. The
scheduler reads no clock and does no I/O. The same class is used with a GPU, with a CPU, in the
simulator and in the tests.

One plan may be in flight while the next is made. Then `num_computed` runs ahead of the known
tokens: their values are still on the device. Blocks that a finished, aborted or preempted request
frees can be reused at once, because plans run in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from headway.config import Config
from headway.errors import ConfigError
from headway.events import (
    Aborted,
    Added,
    Answers,
    Completed,
    Event,
    Failed,
    Planned,
    Reconfigured,
    Reset,
)
from headway.kv.cache import KVCache
from headway.plan import Plan, StepResult
from headway.request import Request
from headway.scheduler.decode_batch import DecodeBatch
from headway.scheduler.draft_planning import must_wait
from headway.scheduler.policies.presets import describe
from headway.scheduler.queue import WaitingQueue
from headway.scheduler.results import apply_result, check_result, end_failed
from headway.scheduler.state import SchedulerState
from headway.scheduler.step_builder import StepBuilder
from headway.scheduler.validate import validate_request

SIZES = (
    "max_num_seqs", "block_size", "num_blocks", "num_host_blocks", "max_model_len",
    "sliding_window", "num_window_blocks",
)  # fmt: skip


def ignore(event: Event) -> None:
    """Record nothing."""


class Scheduler:
    """Decides every step: add, abort, schedule, complete."""

    def __init__(self, config: Config, *, records_answers: bool = False) -> None:
        self.config = config
        self.records_answers = records_answers  # of policies, in the plans
        self.state = SchedulerState(config)
        # Parts of the state that engines and observers read.
        self.kv: KVCache = self.state.kv
        self.queue: WaitingQueue = self.state.queue
        self.requests: dict[str, Request] = self.state.requests  # all that are not finished
        self.running: dict[Request, None] = self.state.running
        self.swapped: dict[Request, None] = self.state.swapped
        self.in_flight: deque[Planned] = self.state.in_flight
        self._num_added = 0
        self._record: Callable[[Event], None] = ignore

    def observe(self, record: Callable[[Event], None]) -> None:
        """From now on, give every event to this function, at the end of the call that caused it."""
        self._record = record

    @property
    def last_planned(self) -> Planned:
        """The latest plan, which is incomplete if a policy raised."""
        return self.state.planned

    @property
    def num_steps(self) -> int:
        """Plans with work so far; the number of the next one."""
        return self.state.num_steps

    @property
    def num_free(self) -> int:
        """Free KV blocks on the device."""
        return self.kv.num_free

    @property
    def is_idle(self) -> bool:
        """True if no request is queued, running or in flight, and all blocks are free."""
        held = (self.requests, self.running, self.queue, self.swapped, self.in_flight)
        return not any(held) and self.kv.is_unused

    def add(self, *requests: Request) -> None:
        """Queue requests, all or none; RequestError or PolicyError if one cannot be queued."""
        queued: list[Request] = []
        try:
            for request in requests:
                request.limit = validate_request(request, self.config, self.requests)
                request.history.serial = self._num_added + len(queued)
                self.queue.push(request)
                self.requests[request.id] = request
                queued.append(request)
        except BaseException:
            for request in queued:
                self.queue.remove(request)
                del self.requests[request.id]
            raise
        for request in requests:  # from here on nothing can fail
            self.state.arrive(request)
        self._num_added += len(requests)
        if requests:
            self._record(Added(requests))

    def abort(self, id: str, reason: str = "abort", error: str | None = None) -> bool:
        """End a request at once, whatever its state; False if there is none with this id."""
        request = self.requests.get(id)
        if request is None:
            return False
        self.state.finish(request, reason, error)
        self._record(Aborted(request))
        return True

    def schedule(self) -> Plan:
        """Make the next plan. With work present it is empty only while another is in flight."""
        assert len(self.in_flight) < 2, "at most one plan may be in flight while the next is made"
        state = self.state
        plan = Plan(state.num_steps)
        if state.drafting is not None and must_wait(state):
            return plan
        planned = Planned(plan, answers=Answers() if self.records_answers else None)
        state.planned, state.preempted = planned, plan.preempted
        state.queue.counters.start_step()
        try:
            StepBuilder(state, plan).build()
        except BaseException:
            rest = Plan(plan.step, preempted=plan.preempted)
            self._record_plan(Planned(rest, answers=planned.answers, has_failed=True))
            raise
        if not plan.is_empty:
            self._launch(planned)
        self._record_plan(planned)
        return plan

    def _record_plan(self, planned: Planned) -> None:
        planned.num_free = self.kv.num_free
        planned.num_running, planned.num_waiting = len(self.running), len(self.queue)
        self._record(planned)

    def complete(self, plan: Plan, result: StepResult) -> Completed:
        """Apply the result of the oldest plan in flight: tokens, and requests that finish."""
        assert plan is self.in_flight[0].plan, "plans are completed in the order they were made"
        check_result(plan, result)
        planned = self.in_flight.popleft()
        self.state.preempted_in_flight.clear()
        ended = apply_result(planned, result, self.state)
        if result.failed:
            ended += end_failed(plan, result, ended, self.state)
        self.state.decode_batch.left_in_flight.clear()
        event = Completed(planned, result, ended)
        self._record(event)
        return event

    def fail(self, reason: str) -> None:
        """A step failed: end the requests in flight with the reason, recompute all others."""
        plans, state = [planned.plan for planned in self.in_flight], self.state
        ended: list[Request] = []
        state.preempted = []
        self.in_flight.clear()
        failed = {r for p in plans for r in p.requests}
        for request in [r for r in self.requests.values() if r in failed]:
            state.finish(request, "error", reason)
            ended.append(request)
        state.forget_host_copies()
        for request in reversed(self.running.copy()):
            try:
                state.preempt(request, may_swap=False)
            except Exception:  # a user's queue key raises: the request cannot be queued again
                state.finish(request, "error", reason)
                ended.append(request)
        self._forget_cache()
        self.kv.free_host_blocks()
        state.decode_batch = DecodeBatch(self.config.block_size, self.config.max_num_seqs)
        self._record(Failed(reason, ended, state.preempted))

    def reset_cache(self, *, force: bool = False) -> bool:
        """Forget all cached prefixes; False while requests run, unless `force` preempts them."""
        if self.in_flight or (self.running and not force):
            return False
        self.state.preempted = []
        for request in reversed(self.running.copy()):
            self.state.preempt(request, may_swap=False)
        self._forget_cache()
        self._record(Reset(force, self.state.preempted))
        return True

    def _forget_cache(self) -> None:
        self.state.preempted_in_flight.clear()
        self.kv.forget_all()

    def reconfigure(self, config: Config) -> None:
        """Use other policies and another token budget from the next plan on.

        Sizes must not change, nor the budget of a model with sliding-window layers, whose blocks
        are reserved by it: ConfigError names a number that does. The waiting queue is sorted again
        if its rule changes.
        """
        fixed = SIZES if not self.config.sliding_window else (*SIZES, "max_num_batched_tokens")
        for name in fixed:
            if getattr(config, name) != getattr(self.config, name):
                raise ConfigError(f"{name} cannot change while the scheduler runs")
        if config.queue is not self.config.queue:
            self.queue.change_rule(config.queue, self.running)
        self.config = config
        self.state.use(config)
        self._record(Reconfigured(describe(config), config))

    def _launch(self, planned: Planned) -> None:
        """The plan has work: it is in flight from now on."""
        state = self.state
        state.outputs.decay()
        has_decodes = planned.plan.decodes or planned.plan.drafts
        state.prefill_streak = 0 if has_decodes else state.prefill_streak + 1
        state.num_steps += 1
        self.in_flight.append(planned)
