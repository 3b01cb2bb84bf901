"""The shape of the tables that texts on LLM schedulers print, from small simulations.

The texts give milliseconds of other machines. What must hold here is which way a number moves, and
roughly how far.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from headway.lab.cost import Profile, load_profile
from headway.lab.simulate import simulate
from headway.lab.summary import Summary, summarize
from headway.lab.workload.request import TokenSpace, WorkloadRequest
from headway.lab.workload.synthetic import parse_synthetic
from headway.record.timeline import RequestTimeline
from headway.scheduler import preset

SMALL, LARGE = load_profile("llama3.1-8b-a100-80gb"), load_profile("llama3-70b-4xa100")
LARGE = replace(LARGE, model=replace(LARGE.model, max_model_len=40_000))
LONG = 32_768
MIX = "requests=512,prompt=16,output=0.9*fixed(4)+0.1*fixed(200)"  # short answers, a few long ones


def job(space: TokenSpace, id: str, prompt: int, output: int, **more: Any) -> WorkloadRequest:
    pieces = (space.take(prompt),)
    return WorkloadRequest(id=id, pieces=pieces, num_output=output, max_tokens=output, **more)


def run(
    jobs: list[WorkloadRequest], profile: Profile = SMALL, **changes: Any
) -> tuple[Summary, dict[str, RequestTimeline]]:
    """The summary, and the timelines by id."""
    config = preset(**{"name": "vllm_v1", "num_blocks": profile.num_blocks(16), **changes})
    result = simulate(jobs, config, profile)
    assert not result.rejected
    return summarize(result.metrics), {each.id: each for each in result.metrics.requests}


def test_smaller_chunks_shorten_the_longest_gap_and_delay_the_long_prompt() -> None:
    """Printed for none, 8K, 4K, 2K: longest gap 120/35/22/15 ms, TTFT 120/480/960/1,920 ms."""
    gaps, ttfts = [], []
    for budget in (None, 8192, 4096, 2048):
        space = TokenSpace()
        jobs = [job(space, str(i), 100, 60) for i in range(12)]
        jobs.append(job(space, "long", LONG, 2, arrival=0.3))
        changes = {"max_num_batched_tokens": budget or 40_000}
        summary, times = run(jobs, max_model_len=40_000, **changes)
        gaps.append(summary["time_between_tokens"]["max"])
        ttfts.append(times["long"].first_token - times["long"].arrival)
        assert summary["longest_stall"]["p50"] == pytest.approx(gaps[-1], rel=0.2)
    assert all(later < 0.6 * earlier for earlier, later in pairwise(gaps)), gaps
    assert all(later > earlier for earlier, later in pairwise(ttfts)), ttfts
    # The texts assume chunks that take equal time however small; here a chunk of 2K tokens still
    # fills the device, so the first token comes only a little later.
    assert ttfts[-1] < 1.25 * ttfts[0]


def stall_of_a_victim(num_tokens: int, swap: str) -> float:
    """How long a preempted request of this length pauses, without the time of the other request.

    The other request is as long, so it overwrites the blocks that the victim left.
    """
    space = TokenSpace()
    victim = job(space, "victim", num_tokens, 40)
    arrival = 0.2 + LARGE.prefill_seconds(num_tokens)
    other = job(space, "other", num_tokens, 40, arrival=arrival, priority=-1)
    blocks = {"num_blocks": num_tokens // 16 + 4, "num_host_blocks": num_tokens // 16 + 4}
    summary, times = run(
        [victim, other], LARGE, **blocks, swap=swap, max_num_seqs=1, max_model_len=40_000,
        max_num_batched_tokens=40_000, queue="priority(preempts=True)",
    )  # fmt: skip
    assert summary["preemptions_for_priority"] == 1
    assert (summary["preemptions_by_swap"] == 1) == (swap == "swap")
    served = times["other"].finished - times["other"].arrival
    return times["victim"].longest_stall - served


def test_swapping_beats_recomputing_more_the_longer_the_request() -> None:
    """Printed for 256, 2K, 8K, 32K tokens: swap 0.6/4/16/64 ms, recompute 3/50/200/800 ms.

    Up to 64 tokens the two differ little; from 256 on swapping wins clearly.
    """
    lengths = (16, 64, 256, 2048, 8192, 32_768)
    swap = [stall_of_a_victim(length, "swap") for length in lengths]
    recompute = [stall_of_a_victim(length, "recompute") for length in lengths]
    assert all(later > earlier for earlier, later in pairwise(swap))
    assert all(later > earlier for earlier, later in pairwise(recompute[1:]))
    # The pass of a short prompt takes as long as reading the weights, which the swapped request's
    # next token needs too: what is left are the copies, and the exchange between the devices.
    assert recompute[:2] == pytest.approx(swap[:2], rel=0.25)
    factors = [slow / fast for slow, fast in zip(recompute[2:], swap[2:], strict=True)]
    assert factors[0] > 5 and all(later > earlier for earlier, later in pairwise(factors)), factors


def test_a_prefix_hit_of_two_thirds_lowers_the_time_to_first_token_by_as_much() -> None:
    """Printed for a hit of 2K of 3K tokens: 75 ms becomes 25 ms."""
    space = TokenSpace()
    shared, tails = space.take(2048), (space.take(1024), space.take(1024))
    jobs = [
        WorkloadRequest(id=id, pieces=(shared, tail), num_output=2, max_tokens=2, arrival=at)
        for id, tail, at in zip(("cold", "hit"), tails, (0.0, 5.0), strict=True)
    ]
    _, times = run(jobs, LARGE)
    cold, hit = (times[id].first_token - times[id].arrival for id in ("cold", "hit"))
    assert hit == pytest.approx(cold / 3, rel=0.15)


def test_multi_step_delays_admission_by_up_to_that_many_steps() -> None:
    """Printed for 4 steps of 25 ms: up to 100 ms."""
    for num_steps in (1, 4, 8):
        space = TokenSpace()
        jobs = [job(space, f"running {i}", 64, 200) for i in range(4)]
        jobs += [job(space, str(i), 64, 1, arrival=0.4 + 0.0831 * i) for i in range(16)]
        summary, _ = run(jobs, num_scheduler_steps=num_steps)
        step = SMALL.pass_seconds(4, 4, 4 * 264, 4 * 264) + SMALL.machine.host_seconds
        assert 0.7 * num_steps * step < summary["queue_time"]["max"] < (num_steps + 0.2) * step


def test_continuous_batching_is_five_times_as_fast_as_static_on_a_mix_of_lengths() -> None:
    """Printed: 5 to 10 times. MIX has that factor; with equal lengths there is none."""
    factors = {}
    for name, text in {"mix": MIX, "equal": "requests=64,prompt=16,output=24"}.items():
        static, continuous = (
            run(parse_synthetic(text).generate(), name=each, max_num_seqs=32)[0]
            for each in ("static", "vllm_v1")
        )
        factors[name] = continuous["requests_per_second"] / static["requests_per_second"]
    assert 5 <= factors["mix"] <= 10 and factors["equal"] == pytest.approx(1, rel=0.05), factors
