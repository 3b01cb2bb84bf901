"""Laws of simulations with several replicas: routed, colocated, and with prefill and decode apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from headway.fleet.routing import ReplicaView, RouteRequest, parse_route, prefix_load
from headway.lab.cluster import Cluster, Pool, ReplicasResult, balance, simulate_replicas
from headway.lab.cost import load_profile
from headway.lab.simulate import simulate
from headway.lab.summary import summarize
from headway.lab.workload.request import TokenSpace, WorkloadRequest
from headway.lab.workload.synthetic import parse_synthetic
from headway.scheduler.policies.presets import preset
from tests.support.tracked import holds, num_keys

PROFILE = load_profile("llama3.1-8b-a100-80gb")
CHAT = "requests=60,arrivals=poisson(10),prompt=lognormal(800,0.8),output=lognormal(60,0.7)"
REQUESTS = parse_synthetic(CHAT).generate()


def config(**changes: Any) -> Any:
    return preset("vllm_v1", **{"num_blocks": PROFILE.num_blocks(16), **changes})


def apart(
    requests: Any = REQUESTS, pools: tuple[int, int] = (1, 1), **changes: Any
) -> ReplicasResult:
    prefill, decode = pools
    chosen = config(**changes)
    return simulate_replicas(requests, chosen, PROFILE, prefill, decode=(chosen, decode))


def test_one_colocated_replica_is_a_simulation() -> None:
    alone = summarize(simulate(REQUESTS, config(), PROFILE).metrics)
    replicas = simulate_replicas(REQUESTS, config(), PROFILE, 1).summary()
    assert {name: replicas[name] for name in alone} == alone
    assert replicas["transfers"]["requests"] == 0
    assert list(replicas["pools"]) == ["colocated"]


@pytest.mark.parametrize("pools", [(1, 1), (2, 1), (1, 3)])
def test_every_request_gets_all_its_tokens(pools: tuple[int, int]) -> None:
    result = apart(pools=pools)
    outputs = {times.id: times.num_output for times in result.metrics.requests}
    assert outputs == {request.id: request.num_output for request in REQUESTS}
    summary = result.summary()
    assert summary["completed"] == len(REQUESTS) == sum(summary["finish_reasons"].values())
    assert summary["output_tokens"] == sum(outputs.values())
    assert [pool["replicas"] for pool in summary["pools"].values()] == list(pools)


def test_one_request_takes_its_prefill_its_transfer_and_its_decodes() -> None:
    prompt, size = TokenSpace().take(1600), 16
    request = WorkloadRequest(id="a", pieces=(prompt,), num_output=3, max_tokens=3)
    times = apart([request]).metrics.requests[0]
    host = PROFILE.machine.host_seconds
    assert times.first_token == pytest.approx(host + PROFILE.prefill_seconds(1600))
    # The prompt is 100 full blocks, so only the first token is computed again.
    again = PROFILE.pass_seconds(1, 1, 1601, 1601)
    waited = PROFILE.transfer_seconds(1600) + host + again
    assert times.longest_stall == pytest.approx(waited)
    last = host + PROFILE.pass_seconds(1, 1, 1601 + 1, 1602)
    assert times.finished == pytest.approx(times.first_token + waited + last, rel=1e-4)
    assert times.num_prompt == len(prompt) == 100 * size


def test_decode_replicas_compute_at_most_a_block_of_a_prompt() -> None:
    result = apart()
    decode, prefill = result.pools["decode"]["0"], result.pools["prefill"]["0"]
    assert sum(prefill.steps["decodes"]) == 0
    assert 0 < sum(decode.steps["prefill"]) <= 17 * len(REQUESTS)


def test_prompts_delay_no_decodes_of_a_separate_pool() -> None:
    together = simulate_replicas(REQUESTS, config(), PROFILE, 2).summary()
    separate = apart().summary()
    assert separate["time_between_tokens"]["p99"] < 0.5 * together["time_between_tokens"]["p99"]
    assert separate["longest_stall"]["max"] < 0.5 * together["longest_stall"]["max"]
    # One replica for all prompts is slower than two.
    assert separate["ttft"]["p99"] > together["ttft"]["p99"]


def test_a_slow_link_delays_the_second_token_and_not_the_first() -> None:
    machine = replace(PROFILE.machine, link_bandwidth=1e9)
    slow = simulate_replicas(
        REQUESTS, config(), replace(PROFILE, machine=machine), 1, decode=(config(), 1)
    )
    fast = apart()
    assert slow.summary()["ttft"] == fast.summary()["ttft"]
    assert slow.summary()["longest_stall"]["p50"] > 2 * fast.summary()["longest_stall"]["p50"]
    # One at a time: the transfers of a burst wait for one another.
    total = sum(tokens for tokens, _ in slow.transfers) * PROFILE.model.kv_bytes / 1e9
    assert slow.metrics.ended_at > total > 3


def test_a_small_decode_cache_still_finishes_every_request() -> None:
    summary = apart(num_blocks=600, max_num_seqs=64).summary()
    assert summary["completed"] == len(REQUESTS)
    assert summary["pools"]["decode"]["cache_hit_ratio"] < 1


def test_a_request_that_can_never_run_is_rejected_before_its_prefill() -> None:
    space = TokenSpace()
    long = WorkloadRequest(id="long", pieces=(space.take(900),), num_output=500, max_tokens=500)
    two = WorkloadRequest(id="two", pieces=(space.take(9),), num_output=5, max_tokens=5, n=2)
    fine = WorkloadRequest(id="fine", pieces=(space.take(900),), num_output=1, max_tokens=1)
    result = apart([long, two, fine], num_blocks=64)
    assert [id for id, _ in result.rejected] == ["long", "two"]
    assert "n must be 1" in result.rejected[1][1]
    assert [times.id for times in result.metrics.requests] == ["fine"]
    assert result.summary()["rejected"] == 2 and not result.transfers


SHARED = "requests=120,arrivals=poisson(30),prompt=uniform(20,300),output=uniform(2,40)"


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_router_knows_exactly_what_the_caches_hold(async_scheduling: bool) -> None:
    """With a small cache, blocks are evicted all the time."""
    requests = parse_synthetic(f"{SHARED},prefix=12x256@0.8").generate()
    pool = Pool("all", 3, config(num_blocks=200), PROFILE, prefix_load, async_scheduling)
    Cluster(pool, None, PROFILE).run(iter(requests), None)
    tracker = pool.router.tracker
    for replica in pool.replicas:
        load = replica.load(float("inf"))
        assert holds(tracker, replica.name, replica.engine.scheduler.kv.pool.index.block_of)
        assert (load.waiting_tokens, load.num_running, load.num_waiting) == (0, 0, 0)
        assert load.num_free_blocks == load.num_blocks == 200
    assert 0 < num_keys(tracker) <= 3 * 200


def longest_prefix(request: RouteRequest, replicas: Sequence[ReplicaView]) -> int:
    return max(range(len(replicas)), key=lambda place: replicas[place].num_cached)


def test_a_hot_prefix_is_shared_by_all_replicas() -> None:
    hot = parse_synthetic("requests=150,arrivals=poisson(60),prompt=100,output=40,prefix=1x2000")
    results = [
        simulate_replicas(hot.generate(), config(), PROFILE, 3, route=rule).summary()
        for rule in (prefix_load, longest_prefix)
    ]
    ours, saturated = (each["pools"]["colocated"]["balance"]["busy"] for each in results)
    assert ours < 1.25 and saturated > 2.5
    assert results[0]["cache_hit_ratio"] > 0.95 * results[1]["cache_hit_ratio"]
    assert results[0]["end_to_end"]["p90"] < results[1]["end_to_end"]["p90"]


def test_a_router_that_reads_the_caches_hits_more_than_one_that_does_not() -> None:
    requests = parse_synthetic(f"{SHARED},prefix=24x1024").generate()
    hits = {
        name: simulate_replicas(
            requests, config(), PROFILE, 4, route=parse_route(name)
        ).summary()["cache_hit_ratio"]
        for name in ("prefix_load", "sglang", "round_robin")
    }  # fmt: skip
    assert min(hits["prefix_load"], hits["sglang"]) > 1.2 * hits["round_robin"], hits


def test_an_arrival_during_a_step_is_routed_with_the_state_before_it() -> None:
    """The router must not know a prefix before the step that computes it has ended."""
    seen: list[list[int]] = []

    def rule(request: RouteRequest, replicas: Sequence[ReplicaView]) -> int:
        seen.append([replicas[0].num_cached, replicas[0].waiting_tokens, replicas[0].num_waiting])
        return 0

    prompt = TokenSpace().take(1600)
    requests = [
        WorkloadRequest(id=str(i), arrival=at, pieces=(prompt,), num_output=2, max_tokens=2)
        for i, at in enumerate((0.0, 0.001, 5.0))
    ]
    simulate_replicas(requests, config(), PROFILE, 1, route=rule)
    assert seen == [[0, 0, 0], [0, 1600, 1], [1600, 0, 0]]


def test_balance_is_the_largest_by_the_mean() -> None:
    assert balance([1, 1, 4]) == 2 and balance([0, 0]) == 1
