"""Requests without max_tokens: the default headroom learns lengths within tens of requests."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from headway import Plan, preset
from headway.lab.cost import load_profile
from headway.lab.simulate import simulate
from headway.lab.summary import Summary, summarize
from headway.lab.workload.request import ENDS, WorkloadRequest
from headway.lab.workload.synthetic import parse_synthetic
from headway.request import Request, RequestParams
from headway.scheduler.policies.lengths import OPEN_ENDED, going_on, is_open_ended, survival_curve
from tests.support.drive import Driver
from tests.support.events import Events

MAX_MODEL_LEN = 8192
EOS = 7
CHAT = "prompt=lognormal(200,1.0,16,1000),output=lognormal(120,0.8,4,600)"
LONG = "prompt=lognormal(200,1.0,16,1000),output=lognormal(700,0.4,300,2000)"


class OpenEnded(WorkloadRequest):
    """A job that does not set max_tokens."""

    __slots__ = ()

    def params(self, start: float = 0.0) -> RequestParams:
        return replace(super().params(start), max_tokens=None, eos_ids=ENDS)


def chats(text: str) -> list[WorkloadRequest]:
    return [
        OpenEnded(
            id=job.id, arrival=job.arrival, pieces=job.pieces, num_output=job.num_output,
            max_tokens=MAX_MODEL_LEN,
        )
        for job in parse_synthetic(text).generate()
    ]  # fmt: skip


@cache
def serve(name: str, text: str, num_blocks: int, **changes: Any) -> tuple[Summary, list[Plan]]:
    """The summary of a run on the 8B profile, and all its plans."""
    events = Events()
    config = preset(name, num_blocks=num_blocks, max_model_len=MAX_MODEL_LEN, **changes)
    profile = load_profile("llama3.1-8b-a100-80gb")
    run = simulate(chats(text), config, profile, observers=[events])
    assert not run.rejected
    return summarize(run.metrics), events.plans


def lone(max_tokens: int | None, num_prompt: int = 10) -> Request:
    request = Request("a", range(num_prompt), RequestParams(max_tokens=max_tokens))
    request.limit = num_prompt + (max_tokens or 50)
    return request


def test_a_request_is_open_ended_without_max_tokens_or_with_a_very_large_value() -> None:
    assert is_open_ended(lone(None))
    assert is_open_ended(lone(OPEN_ENDED + 1))
    assert not is_open_ended(lone(OPEN_ENDED))
    assert not is_open_ended(lone(16))


def reaches(length: float, finished: list[int], running: list[int]) -> float:
    curve = survival_curve(np.array(finished, dtype=float), np.array(running, dtype=float))
    chance, _ = going_on(curve, np.zeros(1), np.array([[length]]))
    return float(chance[0, 0])


def test_without_observations_the_median_output_is_256_tokens() -> None:
    assert reaches(256, [], []) == pytest.approx(0.5, abs=0.02)
    assert 0.01 < reaches(1500, [], []) < 0.1  # a heavy tail


def test_with_many_observations_the_curve_matches_them() -> None:
    finished = [round(10 * 2 ** (place / 64)) for place in range(256)]  # 10 to 160, log-uniform
    for share in (0.25, 0.5, 0.75):
        length = 10 * 16**share
        assert reaches(length, finished, []) == pytest.approx(1 - share, abs=0.03)


def test_a_few_tens_of_short_outputs_outweigh_the_prior() -> None:
    assert reaches(200, [50] * 30, []) < 0.15 < reaches(200, [], [])


def test_running_outputs_count_before_they_end() -> None:
    short = [50] * 30
    assert reaches(1000, short, [1200] * 30) > 0.35 > 20 * reaches(1000, short, [])


def test_the_chance_decreases_with_length_and_is_1_for_the_current_length() -> None:
    curve = survival_curve(np.array([5.0, 90.0]), np.array([40.0, 3000.0]))
    further = np.array([0.0, 1, 10, 100, 1e4, 1e8])[:, None]
    chance, error = going_on(curve, np.array([0.0, 40, 3000]), further)
    assert (chance[0] == 1).all() and (error[0] == 0).all()
    assert (np.diff(chance, axis=0) <= 0).all() and (chance >= 0).all()
    assert (np.diff(error, axis=0) >= 0).all() and (error <= 1).all()


def test_the_error_of_the_estimate_decreases_with_observations() -> None:
    def error(finished: list[float]) -> float:
        curve = survival_curve(np.array(finished), np.zeros(0))
        return float(going_on(curve, np.zeros(1), np.array([[100.0]]))[1][0, 0])

    seen = [50.0, 100.0, 200.0, 400.0]
    assert error(seen) > 3 * error(seen * 64) > 0


def recorded(max_tokens: int | None, **more: Any) -> tuple[list[int], list[float]]:
    """The lengths and shares recorded for a request that generates 3 tokens, the last one EOS."""
    driver = Driver("headway", sample=lambda r, place: EOS if place >= 7 else 100, max_model_len=64)
    driver.add("a", 5, max_tokens, **{"eos_ids": frozenset({EOS}), **more})
    driver.run()
    return list(driver.scheduler.state.outputs.lengths), list(driver.scheduler.state.outputs.shares)


def test_open_ended_requests_record_lengths_and_others_record_shares() -> None:
    assert recorded(None) == ([3], [])
    assert recorded(6) == ([], [0.5])


def test_an_output_that_ignores_eos_is_not_recorded() -> None:
    assert recorded(None, ignore_eos=True) == ([], [])


def test_a_burst_of_short_chats_that_fits_is_admitted_at_once() -> None:
    """32 chats of 64 + 150 tokens need 448 blocks; at their limits they would need 16,000."""
    _, plans = serve("headway", "requests=32,prompt=64,output=150", num_blocks=600)
    assert len(plans[0].admitted) == 32
    assert not any(plan.preempted for plan in plans)


def test_short_outputs_fill_the_batch_within_160_admissions() -> None:
    """64 requests of 48 + 40 tokens hold 384 blocks; with the prior alone fewer are admitted."""
    text = "requests=400,prompt=48,output=uniform(20,60)"
    _, plans = serve("headway", text, num_blocks=400, max_num_seqs=64)
    num_running, num_admitted = 0, 0
    for plan in plans:
        num_admitted += len(plan.admitted)
        num_running = max(num_running, len(plan.decodes) + len(plan.chunks))
        if num_running >= 60:
            break
    assert num_running >= 60
    assert len(plans[0].admitted) < 60 < num_admitted <= 160
    assert sum(len(plan.preempted) for plan in plans) <= 8


def test_long_outputs_are_learned_within_32_requests() -> None:
    _, plans = serve("headway", f"requests=96,{LONG},seed=0", 800)
    num_ended, num_late = 0, 0
    for plan in plans:
        num_late += len(plan.preempted) if num_ended >= 32 else 0
        num_ended += len(plan.tokens_kept)
    assert num_ended == 96
    assert num_late <= 64 // 4


REGIMES = {  # workload, seeds, blocks
    "a burst with room for all": (f"requests=32,{CHAT}", 1, 1000),
    "a burst with room for few": (f"requests=96,{CHAT}", 3, 400),
    "a steady stream": (f"requests=150,arrivals=poisson(14),{CHAT}", 1, 300),
    "long outputs": (f"requests=96,{LONG}", 1, 800),
}


@pytest.mark.parametrize("regime", REGIMES)
def test_throughput_is_within_3_percent_of_vllm_v1_with_few_tokens_recomputed(regime: str) -> None:
    """Over several bursts, because the last output decides when a burst ends."""
    text, num_seeds, num_blocks = REGIMES[regime]
    rate, recomputed = {}, {}
    for name in ("headway", "vllm_v1"):
        runs = [serve(name, f"{text},seed={seed}", num_blocks)[0] for seed in range(num_seeds)]
        rate[name] = sum(r["output_tokens"] for r in runs) / sum(r["seconds"] for r in runs)
        recomputed[name] = sum(r["recomputed_tokens"] for r in runs)
    assert rate["headway"] > 0.97 * rate["vllm_v1"]
    assert recomputed["headway"] <= 0.5 * recomputed["vllm_v1"]


def test_preemptions_increase_the_headroom() -> None:
    driver = Driver("headway", num_blocks=200, block_size=4, max_model_len=512)
    for place in range(8):
        driver.add(str(place), 8, None, eos_ids=frozenset({EOS}))
        driver.step()
    coming = Request("new", range(8), RequestParams(max_tokens=None, eos_ids=frozenset({EOS})))
    coming.limit = 512
    scheduler = driver.scheduler
    view = scheduler.state.view
    calm = scheduler.config.headroom(coming, view)
    scheduler.state.outputs.pressure += 2.0
    assert scheduler.config.headroom(coming, view) > calm > 0
