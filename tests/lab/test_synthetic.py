"""Laws of synthetic workloads: draws keep their bounds, rates and shares, and follow the seed."""

from __future__ import annotations

import statistics
from itertools import pairwise

import pytest

from headway.errors import ConfigError
from headway.lab.workload.synthetic import field_workload, parse_synthetic


def test_the_field_workload_is_the_one_that_peers_were_measured_on() -> None:
    jobs, unknown = field_workload(), field_workload(unknown_lengths=True)
    assert len(jobs) == 256 and sum(j.num_output for j in jobs) == 133_966
    assert sum(j.num_prompt for j in jobs) == 142_827
    assert [(j.pieces, j.num_output) for j in jobs] == [(j.pieces, j.num_output) for j in unknown]
    assert all(j.num_output == j.max_tokens for j in jobs)
    assert {j.max_tokens for j in unknown} == {1024}


def gaps(arrivals: str) -> list[float]:
    times = [j.arrival for j in parse_synthetic(f"requests=4000,arrivals={arrivals}").jobs()]
    return [b - a for a, b in pairwise(times)]


@pytest.mark.parametrize(
    ("arrivals", "cv"), [("uniform(5)", 0), ("poisson(5)", 1), ("bursty(5,3)", 3)]
)
def test_arrivals_have_their_rate_and_their_spread(arrivals: str, cv: float) -> None:
    drawn = gaps(arrivals)
    mean = statistics.fmean(drawn)
    assert mean == pytest.approx(0.2, rel=0.2)
    assert statistics.pstdev(drawn) / mean == pytest.approx(cv, rel=0.2, abs=1e-6)


def test_lengths_stay_in_their_bounds_and_reach_their_mean() -> None:
    text = "requests=4000,prompt=uniform(10,20),output=lognormal(200,0.8,20,2000)"
    jobs = parse_synthetic(text).jobs()
    assert {j.num_prompt for j in jobs} == set(range(10, 21))
    assert all(20 <= j.num_output <= 2000 for j in jobs)
    assert statistics.fmean(j.num_output for j in jobs) == pytest.approx(200, rel=0.1)


def test_a_mix_draws_from_its_parts_by_weight() -> None:
    jobs = parse_synthetic("requests=1000,prompt=0.9*fixed(10)+0.1*uniform(4000,5000)").jobs()
    assert 50 < sum(j.num_prompt > 10 for j in jobs) < 150


def test_changing_one_word_leaves_the_others_as_they_were() -> None:
    text = "requests=50,arrivals=poisson(2),prompt=uniform(5,90),clients=4,skew=zipf(1.0)"
    base, other = (
        parse_synthetic(text).jobs(),
        parse_synthetic(text + ",output=uniform(1,9)").jobs(),
    )
    assert [(j.arrival, j.pieces, j.client) for j in base] == [
        (j.arrival, j.pieces, j.client) for j in other
    ]
    assert parse_synthetic(text).jobs() == base
    assert parse_synthetic(text + ",seed=1").jobs() != base


def test_prefixes_and_clients_have_their_shares() -> None:
    text = "requests=2000,prompt=5,prefix=4x16@0.25,clients=8,skew=heavy(0.5)"
    jobs = parse_synthetic(text).jobs()
    shared = [j.prompt()[:16].tobytes() for j in jobs if j.num_prompt == 21]
    assert len(set(shared)) == 4 and 400 < len(shared) < 600
    assert 900 < sum(j.client == "client-0" for j in jobs) < 1100
    assert len({j.client for j in jobs}) == 8


@pytest.mark.parametrize(("text", "problem"), [
    ("colour=red", "unknown word 'colour=red'; known: requests, arrivals"),
    ("arrivals=often(3)", "known: at_once, poisson, uniform, bursty"),
    ("arrivals=poisson(0)", "rate must be a number above 0"),
    ("arrivals=poisson(1,2)", "too few or too many"),
    ("prompt=uniform(9,3)", "must not be the larger"),
    ("prompt=uniform(a,3)", "'a' is not a number"),
    ("prompt=0*fixed(3)+1*fixed(4)", "weight of a part"),
    ("prefix=4of5", "prefix is like 4x512"),
    ("prefix=4x5@2", "prefix is like 4x512"),
    ("skew=heavy(2)", "a share is between 0 and 1"),
    ("requests=0", "requests must be at least 1"),
    ("n=1.5", "not a whole number"),
    ("n=1,n=2", "n is given twice"),
])  # fmt: skip
def test_bad_text_is_refused_with_what_is_known(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_synthetic(text)
