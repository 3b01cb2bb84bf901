"""Workloads on a real model: the same requests and decisions as in a simulation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from headway import LLM, preset
from headway.errors import ConfigError, RequestTooLong
from headway.lab.cost import load_profile
from headway.lab.real.run import run_workload
from headway.lab.simulate import simulate, with_profile
from headway.lab.summary import Summary, summarize
from headway.lab.workload.request import WorkloadRequest
from headway.lab.workload.synthetic import parse_synthetic

LIMITS = {"block_size": 16, "num_blocks": 60, "num_host_blocks": 60, "max_num_seqs": 12,
          "max_num_batched_tokens": 128, "max_model_len": 400}  # fmt: skip
PROFILE = load_profile("qwen3-0.6b-h200")


@pytest.fixture(scope="module")
def llm(tiny: str) -> Iterator[LLM]:
    with LLM(tiny, threads=1, **LIMITS) as loaded:
        yield loaded


def requests_of(text: str) -> list[WorkloadRequest]:
    return parse_synthetic(text).generate()


def both(llm: LLM, text: str, name: str, is_async: bool) -> tuple[Summary, Summary]:
    """The summaries of a real run and of a simulation."""
    config = with_profile(preset(name, **{**LIMITS, "num_blocks": 36}), PROFILE)
    requests = requests_of(text)
    measured = run_workload(llm, requests, config, async_scheduling=is_async)
    predicted = simulate(requests, config, PROFILE, async_scheduling=is_async)
    return summarize(measured), summarize(predicted.metrics)


@pytest.mark.parametrize("is_async", (False, True))
@pytest.mark.parametrize("name", ("vllm_v1", "nano_vllm", "headway"))
def test_requests_that_arrive_at_once_are_scheduled_as_in_a_simulation(
    llm: LLM, name: str, is_async: bool
) -> None:
    text = "requests=24,prompt=uniform(4,60),output=uniform(2,40),prefix=2x32@0.5"
    measured, predicted = both(llm, text, name, is_async)
    for key in ("requests", "completed", "output_tokens", "steps", "preemptions",
                "recomputed_tokens", "cache_hit_ratio", "finish_reasons"):  # fmt: skip
        assert measured[key] == predicted[key], key
    if name == "nano_vllm":
        assert measured["preemptions"] > 0
    assert measured["cache_hit_ratio"] > 0


@pytest.mark.parametrize("is_async", (False, True))
def test_a_request_ends_after_its_output_below_its_limit(llm: LLM, is_async: bool) -> None:
    requests = requests_of("requests=10,prompt=8,output=uniform(1,20),max_tokens=30,n=2")
    stats = run_workload(llm, requests, preset("vllm_v1", **LIMITS), async_scheduling=is_async)
    wanted = {request.id: request.num_output for request in requests}
    assert len(set(wanted.values())) > 4 and len(stats.requests) == 20
    for times in stats.requests:
        excess = times.num_output - wanted[times.id.partition("/")[0]]
        assert 0 <= excess <= 1 + is_async and times.finish_reason == "stop"


def test_requests_are_submitted_at_their_times(llm: LLM) -> None:
    requests = requests_of("requests=5,arrivals=uniform(50),prompt=8,output=2")
    stats = run_workload(llm, requests, preset("vllm_v1", **LIMITS))
    start = stats.requests[0].arrival - requests[0].arrival
    for request, times in zip(requests, stats.requests, strict=True):
        assert times.arrival - start == pytest.approx(request.arrival, abs=1e-6)
        assert times.admitted >= times.arrival


def test_what_the_loaded_model_cannot_run_is_refused(llm: LLM) -> None:
    config, requests = preset("vllm_v1", **LIMITS), requests_of("requests=1,prompt=8,output=2")
    for name, value in {"max_num_seqs": 13, "num_blocks": 61, "block_size": 8}.items():
        with pytest.raises(ConfigError, match=rf"{name} {value}.*{LIMITS[name]}"):
            run_workload(llm, requests, replace(config, **{name: value}))
    with pytest.raises(RequestTooLong):
        run_workload(llm, requests_of("requests=1,prompt=500,output=2"), config)
    assert run_workload(llm, requests, config).totals["output_tokens"] == 2
