"""Laws of the headroom that looks ahead: it equals a plain computation, one loop per request.

The package computes with arrays, several requests and moments at once. Here the same definitions
are written as loops over single numbers, and small random batches must give the same result.
"""

from __future__ import annotations

import math
import random
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headway.request import Request, RequestParams
from headway.scheduler.policies.headroom import Forecast, future_peak, learned, limit
from headway.scheduler.policies.lengths import (
    OutputStatistics,
    going_on,
    is_open_ended,
    survival_curve,
)

EOS = frozenset({0})
PRIOR = [(i + 0.5) / 16 for i in range(16)]
each_seed = pytest.mark.parametrize("seed", range(60))


def a_request(number: int, num_prompt: int, max_tokens: int | None, **changes: Any) -> Request:
    """A running request whose known tokens are computed, with its own block numbers."""
    params = RequestParams(
        max_tokens=max_tokens, eos_ids=EOS if changes.pop("stops", True) else frozenset()
    )
    request = Request(str(number), range(num_prompt), params)
    request.limit = num_prompt + (max_tokens or 5000)
    num_output = changes.pop("num_output", 1)
    request.flushed_tokens.extend([1] * num_output)
    request.prefill_end = request.num_known
    request.computed_base = request.num_known - changes.pop("todo", 0)
    request.row = number
    return request


def a_view(requests: list[Request], **changes: Any) -> Any:
    """A view whose last request is waiting, with nothing of it in the cache."""
    new, size = requests[-1], changes.get("block_size", 4)
    new.row, new.computed_base, new.prefill_end = -1, 0, 0
    blocks = {
        r: list(range(1000 * i, 1000 * i + -(-r.num_known // size))) for i, r in enumerate(requests)
    }
    blocks[new] = []
    values = {
        "running": requests[:-1], "block_size": size, "num_blocks": 10_000, "num_free": 0,
        "tokens_left": 10_000, "max_num_batched_tokens": 10_000, "pressure": 0.0,
        "output_shares": [], "output_lengths": [], "service": lambda: {"all": 0.0},
        "num_uncached": lambda r: r.num_known if r is new else max(0, r.prefill_end - r.num_computed),
        "blocks_of": blocks.__getitem__,
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


def batch_of(requests: list[Request]) -> Forecast:
    held = [max(r.num_computed, r.prefill_end) for r in requests[:-1]] + [requests[-1].num_known]
    rows = [
        (h, r.num_prompt, r.limit - 1 - h, r.limit - r.num_prompt)
        for h, r in zip(held, requests, strict=True)
    ]
    return Forecast(requests, *np.array(rows, dtype=float).T)


def random_requests(rng: random.Random, stops: bool = True) -> list[Request]:
    requests = []
    for number in range(rng.randint(1, 6)):
        max_tokens = rng.randint(2, 40)
        num_output = rng.randint(1, max_tokens - 1)
        request = a_request(
            number, rng.randint(1, 12), max_tokens, num_output=num_output, stops=stops
        )
        requests.append(request)
    requests.append(
        a_request(len(requests), rng.randint(1, 12), rng.randint(1, 40), num_output=0, stops=stops)
    )
    return requests


@each_seed
def test_the_peak_of_known_lengths_is_the_largest_of_all_steps(seed: int) -> None:
    """Without prompts to compute, a request grows by one token per step and then frees all."""
    rng = random.Random(seed)
    requests = random_requests(rng)
    size = rng.choice((1, 3, 4))
    view, batch = a_view(requests, block_size=size), batch_of(requests)
    held, left = batch.held.astype(int).tolist(), batch.left.astype(int).tolist()
    peaks = [
        sum(-(-(h + step) // size) for h, most in zip(held, left, strict=True) if step <= most)
        for step in range(max(left) + 1)
    ]
    assert limit(batch, view) == max(peaks) - sum(-(-h // size) for h in held)


def test_blocks_that_a_longer_request_holds_too_count_once() -> None:
    """Blocks shared with a request that ends later never become free with the shorter one."""
    long, short = a_request(0, 16, 40), a_request(1, 16, 8)
    new = a_request(2, 4, 2, num_output=0)
    apart = a_view([long, short, new])
    shared = a_view([long, short, new], num_blocks=20, num_free=14)
    tables = {long: [0, 1, 2, 3, 4], short: [0, 1, 2, 3, 5], new: []}
    shared.blocks_of = tables.__getitem__
    batch = batch_of([long, short, new])
    # Apart: the peak is at the end of the long one, 14 blocks, against 11 now. Shared: the peak is
    # the same 14 blocks, against 7 now.
    assert limit(batch, apart) == 14 - 11
    assert limit(batch, shared) == 14 - 7


@each_seed
def test_the_peak_counts_shared_blocks_once_among_many_requests(seed: int) -> None:
    """Lengths are whole blocks, so the steps at which requests end are compared exactly."""
    rng, size = random.Random(seed), 4
    requests = []
    for number in range(60):
        request = a_request(number, size * rng.randint(1, 20), 1 + size * rng.randint(1, 60))
        request.flushed_tokens = array("i")
        request.prefill_end = request.computed_base = request.num_prompt
        requests.append(request)
    view = a_view(requests, num_blocks=3000, num_free=2900)
    for group in range(3):  # requests of a group have their first blocks in common
        for request in requests[group:-1:3]:
            own = view.blocks_of(request)
            is_short = request.limit - request.num_prompt < 30 * size  # the peak comes after them
            num_shared = len(own) if is_short else min(len(own), rng.randint(0, 4))
            own[:num_shared] = range(10_000 * (group + 9), 10_000 * (group + 9) + num_shared)
    batch = batch_of(requests)

    def num_held(step: int) -> int:
        alive = [i for i in range(60) if batch.left[i] >= step]
        shared = {b for i in alive for b in view.blocks_of(requests[i]) if b >= 90_000}
        own = sum(b < 90_000 for i in alive for b in view.blocks_of(requests[i]))
        new = sum(requests[-1].num_prompt // size for i in alive if i == 59)
        return len(shared) + own + new + len(alive) * step // size

    peak = max(num_held(int(step)) for step in {*batch.left, 0.0})
    assert limit(batch, view) == peak - num_held(0)


def chance_by_share(request: Request, held: float, further: float, shares: list[float]) -> float:
    """Of the outputs that got as far as this one, the share that got further still."""
    seen, allowed = PRIOR + shares, request.limit - request.num_prompt
    reached = max(held - request.num_prompt, 0) / allowed
    num_longer = sum(share > reached for share in seen)
    return sum(share > reached + further / allowed for share in seen) / max(num_longer, 1)


def plain_learned(
    requests: list[Request], view: Any, deviations: float, shared: dict[Request, int]
) -> int:
    """The expected peak of a batch of bounded requests, plus standard deviations."""
    size = view.block_size
    held = [max(r.num_computed, r.prefill_end) for r in requests[:-1]] + [requests[-1].num_known]
    left = [r.limit - 1 - h for r, h in zip(requests, held, strict=True)]
    peak = 0.0
    for place in range(32):
        moment = max(left) * place / 31
        expected = variance = 0.0
        for request, have, most in zip(requests, held, left, strict=True):
            chance = chance_by_share(request, have, moment, view.output_shares)
            alive = (chance if request.stops else 1.0) * (moment <= most)
            blocks = (have + moment) / size + 0.5 - shared.get(request, 0)
            expected += alive * blocks
            variance += alive * (1 - alive) * blocks**2
        peak = max(peak, expected + deviations * math.sqrt(variance))
    return max(0, int(peak - sum(math.ceil(h / size) for h in held) + sum(shared.values())))


@each_seed
@pytest.mark.parametrize("deviations", (0.0, 2.5))
def test_the_learned_peak_of_bounded_requests_is_the_expected_one(
    seed: int, deviations: float
) -> None:
    rng = random.Random(seed)
    requests = random_requests(rng)
    for request in requests[1:]:
        if rng.random() < 0.3:
            request.stops = frozenset()
    if not any(request.stops for request in requests):
        requests[0].stops = EOS
    shares = [rng.random() for _ in range(rng.choice((0, 5, 40)))]
    view = a_view(requests, block_size=rng.choice((1, 4)), output_shares=shares)
    wanted = plain_learned(requests, view, deviations, {})
    assert abs(learned(deviations)(batch_of(requests), view) - wanted) <= 1e-9


def test_in_the_learned_peak_the_request_that_ends_last_holds_the_shared_blocks() -> None:
    for first, second in ((40, 8), (8, 40)):
        requests = [a_request(0, 16, first), a_request(1, 16, second)]
        requests.append(a_request(2, 4, 2, num_output=0))
        view = a_view(requests, num_blocks=20, num_free=14)
        tables = {requests[0]: [0, 1, 2, 3, 4], requests[1]: [0, 1, 2, 3, 5], requests[2]: []}
        view.blocks_of = tables.__getitem__
        shared = {requests[first > second]: 4}
        wanted = plain_learned(requests, view, 2.5, shared)
        assert learned()(batch_of(requests), view) == wanted > 0


def test_without_stop_tokens_the_learned_peak_is_that_of_the_limits() -> None:
    for seed in range(20):
        requests = random_requests(random.Random(seed), stops=False)
        view = a_view(requests, output_shares=[0.1] * 50)
        assert learned()(batch_of(requests), view) == limit(batch_of(requests), view)


PER_DOUBLING, NUM_BINS = 4, 84


def edge(place: int) -> float:
    return float(2 ** (place / PER_DOUBLING) - 1)


def place_of(length: float) -> float:
    return min(math.log2(length + 1) * PER_DOUBLING, NUM_BINS - 1e-6)


def plain_curve(finished: list[int], running: list[float]) -> tuple[list[float], list[float]]:
    """Sums of the hazard and of its relative variance up to each edge (Kaplan-Meier, Greenwood)."""
    hazards, variances = [0.0], [0.0]
    ended, reached = [int(place_of(n)) for n in finished], [place_of(n) for n in running]
    for k in range(NUM_BINS):
        ends = sum(place == k for place in ended)
        later = sum(place > k for place in ended)
        passed = sum(min(max(place - k, 0.0), 1.0) for place in reached)
        before, after = (1 / (1 + (edge(place) / 256) ** 2) for place in (k, k + 1))
        entered = ends + later + passed + 4.0
        chance = (ends + 4.0 * (1 - after / before)) / entered
        hazards.append(hazards[-1] - math.log(1 - chance))
        variances.append(variances[-1] + chance / ((1 - chance) * (entered + 1)))
    return hazards, variances


def between(sums: list[float], length: float) -> float:
    place = place_of(length)
    whole = int(place)
    return sums[whole] + (place - whole) * (sums[whole + 1] - sums[whole])


def plain_going_on(
    curve: tuple[list[float], list[float]], reached: float, further: float
) -> tuple[float, float]:
    hazard, variance = (between(s, reached + further) - between(s, reached) for s in curve)
    return math.exp(-hazard), math.sqrt(min(variance, 1.0))


@pytest.mark.parametrize("seed", range(20))
def test_the_survival_curve_is_that_of_a_plain_count(seed: int) -> None:
    rng = random.Random(seed)
    finished = [rng.choice((0, 1, 2, rng.randint(0, 4000))) for _ in range(rng.choice((0, 3, 60)))]
    running = [
        float(rng.choice((0, 3, rng.randint(0, 3000), 3_000_000)))
        for _ in range(rng.choice((0, 1, 20)))
    ]
    curve = survival_curve(np.array(finished, dtype=float), np.array(running))
    reached = [0.0, 1.0, 30.0, 700.0, 5_000_000.0]
    further = [0.0, 1.0, 40.0, 1000.0, 3_000_000.0]
    chance, error = going_on(curve, np.array(reached), np.array(further)[:, None])
    plain = plain_curve(finished, running)
    for i, more in enumerate(further):
        for j, start in enumerate(reached):
            wanted = plain_going_on(plain, start, more)
            assert (chance[i, j], error[i, j]) == pytest.approx(wanted, rel=1e-6, abs=1e-9)


@each_seed
@pytest.mark.parametrize("pressure", (0.0, 3.0))
def test_the_learned_peak_of_open_ended_requests_adds_the_errors_up(
    seed: int, pressure: float
) -> None:
    """Errors of the estimate are the same for all open-ended requests; chance is not."""
    rng = random.Random(seed)
    requests = [
        a_request(i, rng.randint(1, 50), None, num_output=rng.randint(1, 900))
        for i in range(rng.randint(1, 4))
    ]
    requests += [
        a_request(len(requests), 20, 30, num_output=rng.randint(1, 20))
        for _ in range(rng.randint(0, 2))
    ]
    requests.append(a_request(len(requests), 30, rng.choice((None, 20)), num_output=0))
    lengths, shares = [rng.randint(1, 900) for _ in range(30)], [rng.random() for _ in range(9)]
    view = a_view(requests, output_lengths=lengths, output_shares=shares, pressure=pressure)
    batch = batch_of(requests)
    is_open = [r.params.max_tokens is None for r in requests]
    held, left = batch.held.tolist(), batch.left.tolist()
    reached = [max(h - r.num_prompt, 0.0) for h, r in zip(held, requests, strict=True)]
    curve = plain_curve(lengths, [x for x, is_one in zip(reached, is_open, strict=True) if is_one])
    peak = -math.inf
    for place in range(32):
        moment = max(left) * (place / 31) ** 2
        expected = bounded = spread = errors = 0.0
        for i, request in enumerate(requests):
            chance, error = (
                plain_going_on(curve, reached[i], moment)
                if is_open[i]
                else (chance_by_share(request, held[i], moment, shares), 0.0)
            )
            alive, blocks = chance * (moment <= left[i]), (held[i] + moment) / 4 + 0.5
            expected += alive * blocks
            variance = alive * (1 - alive) * blocks**2
            bounded, spread = bounded + variance * (not is_open[i]), spread + variance * is_open[i]
            errors += alive * blocks * error
        deviations = 1.0 + 0.5 * pressure
        peak_now = expected + math.sqrt(2.5**2 * bounded + deviations**2 * (spread + errors**2))
        if not is_open[-1] or chance >= 0.5:  # `chance` is that of the last, the new request
            peak = max(peak, peak_now)
    wanted = max(0, int(peak - sum(math.ceil(h / 4) for h in held)))
    assert learned()(batch, view) == wanted


@pytest.mark.parametrize("budget", (2, 4, 9, 13))  # 2: all others may decode with the whole budget
def test_a_prompt_that_is_not_computed_delays_the_ends_by_its_steps(budget: int) -> None:
    """Prompts are computed in order with the tokens that the other requests leave."""
    for todo in (0, 1, 7, 20):
        for new_prompt in (1, 9, 30):
            old = a_request(0, 24, 9, num_output=0, todo=todo)
            decoding = a_request(1, 4, 30)
            new = a_request(2, new_prompt, 5, num_output=0)
            requests = [old, decoding, new]
            view = a_view(requests, tokens_left=4, max_num_batched_tokens=budget)
            waits = [todo, 0, max(0, new_prompt - 4)]
            rate, before, late = max(1, budget - 3), 0, []
            for wait in waits:
                before += wait
                late.append(-(-before // rate) if wait else 0)
            held, left = [24, 5, new_prompt], [8, 28, 4]
            peaks = []
            for end in {left[i] + late[i] for i in range(3)}:
                peaks.append(sum(
                    -(-(held[i] + min(left[i], max(end - (waits[i] > 0), 0))) // 4)
                    for i in range(3) if left[i] + late[i] >= end
                ))  # fmt: skip
            now = sum(-(-h // 4) for h in held)
            assert limit(batch_of(requests), view) == max(*peaks, now) - now


@each_seed
def test_where_clients_overtake_any_prompt_may_be_the_first_or_the_last_to_be_computed(
    seed: int,
) -> None:
    """With two groups, a prompt starts at once or after all others; decodes never wait."""
    rng = random.Random(seed)
    requests = [a_request(0, 40, rng.randint(2, 12), num_output=0, todo=rng.randint(1, 30))]
    requests += [a_request(i, 4, rng.randint(3, 20)) for i in range(1, rng.randint(2, 4))]
    requests.append(a_request(9, rng.randint(1, 30), rng.randint(2, 12), num_output=0))
    tokens_left, budget = rng.randint(0, 12), rng.randint(6, 20)
    view = a_view(requests, tokens_left=tokens_left, max_num_batched_tokens=budget)
    view.service = lambda: {"a": 0.0, "b": 0.0}
    todo = [r.prefill_end - r.num_computed for r in requests[:-1]]
    todo.append(max(0, requests[-1].num_known - tokens_left))
    steps = math.ceil(sum(todo) / max(1, budget - len(requests)))
    batch = batch_of(requests)
    held, left = batch.held.astype(int).tolist(), batch.left.astype(int).tolist()
    ends = [more + steps * (wait > 0) for more, wait in zip(left, todo, strict=True)]
    places, now = range(len(requests)), sum(-(-h // 4) for h in held)
    peaks = [
        sum(-(-(held[i] + min(left[i], end)) // 4) for i in places if ends[i] >= end)
        for end in ends
    ]
    assert limit(batch, view) == max(*peaks, now) - now


def test_with_room_for_every_limit_the_bound_is_returned_without_an_estimate() -> None:
    """The upper bound counts a block more per request, less what the admission takes anyway."""

    def never(batch: Forecast, view: Any) -> int:
        raise AssertionError("the estimate is not needed")

    requests = [a_request(0, 8, 21), a_request(1, 10, 5, num_output=0)]
    rest = (requests[0].limit - requests[0].prefill_end + requests[1].limit - 0) // 4
    view = a_view(requests, num_blocks=100, num_free=rest + 2 + 10)
    assert future_peak(never, 0.1)(requests[-1], view) == rest + 2 + 10 - 3
    view.num_free -= 1
    assert future_peak(lambda batch, view: 7, 0.1)(requests[-1], view) == 7 + 10
    assert future_peak(None, 0.1)(requests[-1], view) == limit(batch_of(requests), view) + 10


def test_a_forecast_has_the_stored_tokens_and_the_rest_of_each_request() -> None:
    seen: list[Forecast] = []
    requests = [a_request(0, 8, 21, num_output=5), a_request(1, 30, 9, todo=12, num_output=0)]
    requests.append(a_request(2, 10, 5, num_output=2))
    view = a_view(requests, num_free=0)

    def keep(batch: Forecast, view: Any) -> int:
        seen.append(batch)
        return 0

    assert future_peak(keep)(requests[-1], view) == 0
    assert seen[0].requests == requests
    assert seen[0].held.tolist() == [13, 30, 12] and seen[0].prompt.tolist() == [8, 30, 10]
    assert seen[0].left.tolist() == [29 - 1 - 13, 39 - 1 - 30, 15 - 1 - 12]
    assert seen[0].allowed.tolist() == [21, 9, 5]


def test_the_prompt_does_not_make_a_request_open_ended() -> None:
    """The output that is allowed decides; 2048 tokens are the most that are bounded."""
    for max_tokens, is_open in ((16, False), (2048, False), (2049, True), (None, True)):
        for num_prompt in (1, 3000):
            assert is_open_ended(a_request(0, num_prompt, max_tokens)) is is_open


def test_only_outputs_that_could_stop_teach_a_length() -> None:
    """A bounded output teaches its share; an open-ended one its length, if it could stop."""
    statistics = OutputStatistics()
    statistics.record(a_request(0, 5, 20, num_output=5))
    statistics.record(a_request(1, 5, 20, num_output=20, stops=False))
    statistics.record(a_request(2, 5, None, num_output=70))
    statistics.record(a_request(3, 5, None, num_output=90, stops=False))
    assert list(statistics.shares) == [0.25, 1.0] and list(statistics.lengths) == [70]


def test_old_outputs_and_preemptions_are_forgotten() -> None:
    statistics = OutputStatistics()
    for number in range(300):
        statistics.record(a_request(0, 1, 1000, num_output=number))
        statistics.record(a_request(0, 1, None, num_output=number))
    assert list(statistics.lengths) == list(range(44, 300))
    assert list(statistics.shares) == [number / 1000 for number in range(44, 300)]
    statistics.pressure = 1.0
    for _ in range(23):
        statistics.decay()
    assert statistics.pressure == pytest.approx(0.5, abs=0.01)
