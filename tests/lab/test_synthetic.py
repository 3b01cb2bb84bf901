"""Laws of synthetic workloads: values keep their limits, rates and shares, and follow the seed."""

from __future__ import annotations

import statistics
from itertools import pairwise

import pytest

from bench.scheduler.quality import nano_vllm_workload
from headway.errors import ConfigError
from headway.executor.simulated import Histogram, Independent
from headway.lab.workload.synthetic import parse_synthetic


def test_the_nano_vllm_workload_has_the_lengths_of_its_benchmark() -> None:
    requests, unknown = nano_vllm_workload(), nano_vllm_workload(unknown_lengths=True)
    assert len(requests) == 256 and sum(r.num_output for r in requests) == 133_966
    assert sum(r.num_prompt for r in requests) == 142_827
    assert [(r.pieces, r.num_output) for r in requests] == [
        (r.pieces, r.num_output) for r in unknown
    ]
    assert all(r.num_output == r.max_tokens for r in requests)
    assert {r.max_tokens for r in unknown} == {1024}


def gaps(arrivals: str) -> list[float]:
    times = [r.arrival for r in parse_synthetic(f"requests=4000,arrivals={arrivals}").generate()]
    return [b - a for a, b in pairwise(times)]


@pytest.mark.parametrize(
    ("arrivals", "cv"), [("uniform(5)", 0), ("poisson(5)", 1), ("bursty(5,3)", 3)]
)
def test_arrivals_have_their_rate_and_variation(arrivals: str, cv: float) -> None:
    drawn = gaps(arrivals)
    mean = statistics.fmean(drawn)
    assert mean == pytest.approx(0.2, rel=0.2)
    assert statistics.pstdev(drawn) / mean == pytest.approx(cv, rel=0.2, abs=1e-6)


def test_lengths_stay_within_their_limits_and_have_their_mean() -> None:
    text = "requests=4000,prompt=uniform(10,20),output=lognormal(200,0.8,20,2000)"
    requests = parse_synthetic(text).generate()
    assert {r.num_prompt for r in requests} == set(range(10, 21))
    assert all(20 <= r.num_output <= 2000 for r in requests)
    assert statistics.fmean(r.num_output for r in requests) == pytest.approx(200, rel=0.1)


def test_a_mix_draws_from_its_parts_by_weight() -> None:
    requests = parse_synthetic(
        "requests=1000,prompt=0.9*fixed(10)+0.1*uniform(4000,5000)"
    ).generate()
    assert 50 < sum(r.num_prompt > 10 for r in requests) < 150


def test_changing_one_field_does_not_change_the_others() -> None:
    text = "requests=50,arrivals=poisson(2),prompt=uniform(5,90),clients=4,skew=zipf(1.0)"
    base = parse_synthetic(text).generate()
    other = parse_synthetic(text + ",output=uniform(1,9)").generate()
    assert [(r.arrival, r.pieces, r.client) for r in base] == [
        (r.arrival, r.pieces, r.client) for r in other
    ]
    assert parse_synthetic(text).generate() == base
    assert parse_synthetic(text + ",seed=1").generate() != base


def test_prefixes_and_clients_have_their_shares() -> None:
    text = "requests=2000,prompt=5,prefix=4x16@0.25,clients=8,skew=heavy(0.5)"
    requests = parse_synthetic(text).generate()
    shared = [r.prompt()[:16].tobytes() for r in requests if r.num_prompt == 21]
    assert len(set(shared)) == 4 and 400 < len(shared) < 600
    assert 900 < sum(r.client == "client-0" for r in requests) < 1100
    assert len({r.client for r in requests}) == 8


@pytest.mark.parametrize("share", ["1", "1.0", "1.00", ".5", "0.5"])
def test_the_share_of_a_prefix_may_be_written_as_any_decimal_number(share: str) -> None:
    requests = parse_synthetic(f"requests=400,prompt=5,prefix=1x2048@{share}").generate()
    num_shared = sum(r.num_prompt > 5 for r in requests)
    assert num_shared == 400 if float(share) == 1 else 150 < num_shared < 250


def test_a_prefix_without_a_share_is_in_front_of_every_prompt() -> None:
    texts = ("prefix=1x2048", "prefix=1x2048@1.0")
    whole, written = (parse_synthetic(f"requests=9,prompt=5,{text}").generate() for text in texts)
    assert whole == written and {r.num_prompt for r in whole} == {2053}


@pytest.mark.parametrize(("text", "problem"), [
    ("colour=red", "colour=red.*known: requests"),
    ("arrivals=often(3)", "known: at_once, poisson"),
    ("arrivals=poisson(0)", "rate .* above 0, not 0"),
    ("arrivals=poisson(1,2)", "poisson.1,2."),
    ("prompt=uniform(9,3)", "uniform.9,3."),
    ("prompt=uniform(a,3)", "'a'"),
    ("prompt=0*fixed(3)+1*fixed(4)", "weight .* above 0"),
    ("prefix=4of5", "4x512"),
    ("prefix=4x5@2", "above 0 and at most 1, not 2"),
    ("prefix=4x5@0", "above 0 and at most 1, not 0"),
    ("prefix=4x5@0.0", "above 0 and at most 1, not 0"),
    ("prefix=4x5@half", "4x512"),
    ("skew=heavy(2)", "share .* above 0 and below 1, not 2"),
    ("requests=0", "requests must be .* at least 1"),
    ("n=1.5", "1.5.* whole number"),
    ("n=1,n=2", "n is given twice"),
])  # fmt: skip
def test_invalid_text_is_rejected_with_the_value_and_the_limit(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_synthetic(text)


def test_requests_have_the_acceptance_of_the_workload_and_its_seed() -> None:
    def accepted(text: str) -> list[object]:
        return [r.accept for r in parse_synthetic(f"requests=50,seed=3,{text}").generate()]

    assert set(accepted("accept=0.7")) == {Independent(0.7, 3)}
    assert set(accepted("accept=hist(1,0.5, 2)")) == {Histogram((1.0, 0.5, 2.0), 3)}
    assert set(accepted("")) == {None}
    drawn = accepted("accept=uniform(0.2,0.4)")
    shares = [each.share for each in drawn if isinstance(each, Independent)]
    assert len(set(shares)) > 40 and all(0.2 <= share <= 0.4 for share in shares)


@pytest.mark.parametrize(
    ("accept", "named"),
    [
        ("1.5", "at most 1"), ("uniform(0.9,1.2)", "at most 1"), ("hist()", "number"),
        ("hist(0,0)", "not all 0"), ("hist(0.5,x)", "'x'"), ("hist(1", "not a number"),
        ("half", "function"), (f"hist({'1,' * 129}1)", "129"),
    ],
)  # fmt: skip
def test_an_acceptance_that_is_not_one_is_refused(accept: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_synthetic(f"requests=20,accept={accept}").generate()
