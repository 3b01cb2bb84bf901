"""Runs with drafts of which some are right: an engine over the shadow executor, recorded.

Outputs repeat themselves with now and then another token, so drafters find what follows. All policies
have names, so a run can be repeated from its journal alone.
"""

from __future__ import annotations

import random
from array import array
from typing import Any

from headway.config import Config
from headway.engine.clock import VirtualClock
from headway.engine.engine import Engine
from headway.events import Event
from headway.plan import Plan
from headway.record.lines import HeaderLine
from headway.record.reader import split_header
from headway.request import RequestParams
from headway.scheduler import Scheduler, preset
from tests.support.journals import Journal, Recorder
from tests.support.recorded_states import State, note_states
from tests.support.shadow import Handle, Row, ShadowExecutor

STOP, NUM_REQUESTS = 9, 14
SIZES: dict[str, Any] = {
    "block_size": 4, "num_blocks": 40, "num_host_blocks": 40, "max_num_seqs": 6,
    "max_num_batched_tokens": 70, "max_model_len": 64,
}  # fmt: skip
DRAFTERS = ("ngram(1, 3)", "suffix(min=1, shared=True)")
RULES = ("fixed(3)", "fixed(1)", "by_cost(most=6)", "by_cost(most=4, weights=0.0, token=1e-3)")


class Repeating(ShadowExecutor):
    """Samples the same few tokens again and again; a token depends on its place and the request."""

    def __init__(self, scheduler: Scheduler, clock: VirtualClock, failing: frozenset[int]) -> None:
        super().__init__(scheduler)
        self._clock, self._failing = clock, failing

    def launch(self, plan: Plan) -> Handle:
        handle = super().launch(plan)
        handle.result.started = self._clock.now()
        self._clock.advance_to(self._clock.now() + 0.01 + 1e-3 * plan.num_tokens)
        handle.result.ended = self._clock.now()
        if plan.step in self._failing:
            self.crash([plan])
            raise RuntimeError("the step failed")
        return handle

    def _sample(self, row: Row) -> int:
        seed, place = row.owner.params.sampling, len(row.path)
        assert isinstance(seed, int)
        row.token = 1 + (place % 3 if (place * 7 + seed) % 9 else 3 + (place + seed) % 4)
        if (place + seed) % 31 == 0:
            row.token = STOP
        return row.token


class DraftedRun:
    """A run to its end: its events, its journal, and the scheduler's state after each plan."""

    def __init__(
        self,
        seed: int,
        config: Config,
        async_scheduling: bool = False,
        failing: frozenset[int] = frozenset(),
    ) -> None:
        scheduler, clock = Scheduler(config), VirtualClock()
        self.states: dict[int, State] = note_states(scheduler)
        record = Recorder(config, async_scheduling, has_blocks=True)
        self.engine = Engine(
            scheduler, Repeating(scheduler, clock, failing), clock,
            async_scheduling=async_scheduling, observers=[record],
        )  # fmt: skip
        self.rng = random.Random(seed)
        for number in range(NUM_REQUESTS):
            self._add(number)
            for _ in range(self.rng.choice((0, 1, 3))):
                self._step()
        while self.engine.has_work:
            self._step()
        self.events: list[Event] = record.events
        self.journal: Journal = record.lines.read()

    @property
    def header(self) -> HeaderLine:
        return split_header(self.journal)[0]

    def _step(self) -> None:
        """A step, mostly; rarely an abort, with async scheduling while a plan is in flight."""
        if self.rng.random() < 0.05 and self.engine.scheduler.requests:
            self.engine.abort(self.rng.choice(sorted(self.engine.scheduler.requests)))
        self.engine.step()

    def _add(self, number: int) -> None:
        rng = self.rng
        prompt = [rng.randrange(1, 4) for _ in range(rng.randrange(1, 16))]
        predicted = array("i", [1 + (len(prompt) + place) % 3 for place in range(30)])
        params = RequestParams(
            max_tokens=rng.randrange(1, 45), n=rng.choice((1, 1, 1, 2)),
            stop_ids=frozenset({STOP}) if rng.random() < 0.5 else frozenset(),
            min_tokens=rng.choice((0, 0, 20)), priority=rng.randrange(3), sampling=number,
            prediction=predicted if rng.random() < 0.3 else None,
        )  # fmt: skip
        self.engine.add(str(number), prompt, params)


def drafted_run(
    seed: int, name: str = "vllm_v1", async_scheduling: bool = False, **changes: Any
) -> DraftedRun:
    """A run with the drafter and the rule of a seed."""
    drafts = {"drafter": DRAFTERS[seed % 2], "draft": RULES[seed // 2 % len(RULES)]}
    failing = changes.pop("failing", frozenset())
    config = preset(name, **{**SIZES, **drafts, **changes})
    return DraftedRun(seed, config, async_scheduling, failing)
