"""Laws of the estimate of how often drafts are right."""

from __future__ import annotations

from random import Random
from statistics import fmean

import pytest

from headway.request import Request, RequestParams
from headway.scheduler.acceptance import FIRST, Acceptance


def requests_of(number: int) -> list[Request]:
    return [Request(str(place), [1] * 10, RequestParams()) for place in range(number)]


def verify(
    estimate: Acceptance, request: Request, count: int, share: float, random: Random
) -> None:
    """One step: drafts that are right with this probability."""
    num_right = next((n for n in range(count) if random.random() >= share), count)
    estimate.record(request, count, num_right)
    request.computed_base = request.history.drafts_from = request.num_computed + num_right + 1


@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_estimate_has_no_bias_whatever_the_number_of_drafts(share: float, count: int) -> None:
    """A step ends with the first wrong draft; the latest one must not count for more than it says."""
    random, estimate, found = Random(1), Acceptance(), []
    requests = requests_of(8)
    for step in range(400):
        for request in requests:
            verify(estimate, request, count, share, random)
        if step > 50:
            found.append(fmean(map(estimate.of, requests)))
    assert fmean(found) == pytest.approx(share, abs=0.02)


def test_equal_requests_have_nearly_equal_estimates_and_different_ones_do_not() -> None:
    random = Random(2)
    for shares, spread in (([0.6] * 16, (0.0, 0.12)), ([0.1, 0.9] * 8, (0.5, 0.9))):
        estimate, requests = Acceptance(), requests_of(16)
        for _ in range(200):
            for request, share in zip(requests, shares, strict=True):
                verify(estimate, request, 2, share, random)
        found = sorted(map(estimate.of, requests))
        assert spread[0] <= fmean(found[8:]) - fmean(found[:8]) <= spread[1]


def test_a_new_request_starts_with_what_the_others_have_shown() -> None:
    random, estimate = Random(3), Acceptance()
    (first, new) = requests_of(2)
    assert estimate.of(new) == FIRST
    for _ in range(100):
        verify(estimate, first, 4, 0.2, random)
    new.computed_base = new.num_prompt
    assert estimate.of(new) == pytest.approx(0.2, abs=0.1)


def test_without_drafts_an_estimate_returns_to_the_first_one() -> None:
    random, estimate = Random(4), Acceptance()
    (request,) = requests_of(1)
    for _ in range(50):
        verify(estimate, request, 1, 0.1, random)
    found = []
    for _ in range(3000):
        found.append(estimate.of(request))
        request.computed_base += 1
    assert found == sorted(found) and found[0] < 0.3
    assert found[-1] == pytest.approx(FIRST, abs=0.01)


def test_a_request_counts_all_its_drafts() -> None:
    estimate, (request,) = Acceptance(), requests_of(1)
    for count, num_right in ((4, 4), (4, 0), (1, 1)):
        estimate.record(request, count, num_right)
    assert (request.history.num_drafted, request.history.num_accepted) == (9, 5)
