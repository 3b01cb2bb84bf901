"""Sampling: which tokens may be drawn, how often, and what they must not depend on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import InvalidRequest
from headway.executor.sampling.draw import pick, uniforms
from headway.executor.sampling.logprobs import compute_logprobs
from headway.executor.sampling.sampler import LogitsProcessor, Sampler
from headway.request import Request, RequestParams
from headway.sampling_params import Sampling

torch.set_num_threads(1)
Floats = npt.NDArray[np.float64]
EOS = 2
TOLERANCE = 2e-6  # float32 probabilities against float64 ones


def a_request(sampling: Any, prompt: Sequence[int] = (0,), **params: Any) -> Request:
    return Request("r", prompt, RequestParams(sampling=sampling, **params))


def sampler_of(samplings: Sequence[Any], vocab_size: int, **params: Any) -> Sampler:
    sampler = Sampler(len(samplings), vocab_size)
    for row, sampling in enumerate(samplings):
        sampler.add_request(row, a_request(sampling, **params), [0])
    return sampler


def some_logits(*shape: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def run(sampler: Sampler, row: int, steps: torch.Tensor) -> list[int]:
    """The tokens of a row that gets the logits of one step after the other."""
    return [int(sampler.sample(logits[None], np.array([row]))[0]) for logits in steps]


def run_all(sampler: Sampler, steps: torch.Tensor) -> list[list[int]]:
    """The tokens of each row, all of which get logits in every step."""
    rows = np.arange(steps.shape[1])
    drawn = torch.stack([sampler.sample(logits, rows) for logits in steps], dim=1)
    outputs: list[list[int]] = drawn.tolist()
    return outputs


# Plain references, one row at a time, in float64.


KINDS = [
    Sampling(**more)
    for more in ({}, {"top_p": 0.95}, {"temperature": 0}, {"top_k": 40}, {"min_p": 0.1})
]


def softmax(logits: Floats) -> Floats:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def distribution(logits: Floats, sampling: Sampling) -> Floats:
    """The expected distribution: min_p, then top_k, then top_p of what is left; ties are kept."""
    probs = softmax(logits / sampling.temperature)
    keep = probs >= sampling.min_p * probs.max()
    if sampling.top_k > 0:
        keep &= probs >= np.sort(probs)[::-1][min(sampling.top_k, len(probs)) - 1]
    probs = np.where(keep, probs, 0)
    probs /= probs.sum()
    if sampling.top_p < 1:
        falling = np.sort(probs)[::-1]
        reached = int(np.searchsorted(falling.cumsum(), sampling.top_p))
        probs = np.where(probs >= falling[min(reached, len(probs) - 1)], probs, 0)
    return probs / probs.sum()


def edited(
    logits: Floats,
    sampling: Sampling,
    prompt: Sequence[int],
    output: Sequence[int],
    stops: Sequence[int] = (),
) -> Floats:
    """Masks, bias and penalties, for requests that leave at least one token."""
    logits = logits.copy()
    for token in range(len(logits)):
        if sampling.allowed_tokens is not None and token not in sampling.allowed_tokens:
            logits[token] = -np.inf
    for word in sampling.bad_words:
        if list(output[len(output) - len(word) + 1 :]) == list(word[:-1]):
            logits[word[-1]] = -np.inf
    for token in stops:
        logits[token] = -np.inf
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    for token in {*prompt, *output}:
        penalty = sampling.repetition_penalty
        logits[token] *= penalty if logits[token] <= 0 else 1 / penalty
    for token, count in Counter(output).items():
        logits[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    return logits


cuts = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 1.0, 3.0]),
    top_k=st.sampled_from([0, -1, 1, 3, 50, 64, 65, 200, 10**9]),
    top_p=st.sampled_from([1.0, 1e-6, 0.3, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(-(2**63), 2**64 - 1),
)
tokens = st.integers(0, 29)
histories = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.7, 2.0]),
    top_p=st.sampled_from([1.0, 0.8]),
    repetition_penalty=st.sampled_from([1.0, 0.8, 1.7]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.6]),
    presence_penalty=st.sampled_from([0.0, 1.1, -0.3]),
    logit_bias=st.dictionaries(tokens, st.floats(-5, 5), max_size=3),
    bad_words=st.lists(
        st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=4
    ).map(tuple),
    allowed_tokens=st.none() | st.frozensets(tokens, min_size=6),
    seed=st.integers(0, 2**64 - 1),
)  # fmt: skip


@settings(deadline=None, max_examples=50)
@given(
    st.lists(cuts, min_size=1, max_size=6), st.sampled_from([3, 66, 700, 5000]), st.integers(0, 99)
)
def test_a_draw_inverts_the_reference_distribution(
    samplings: list[Sampling], vocab_size: int, seed: int
) -> None:
    logits = some_logits(len(samplings), vocab_size, seed=seed)
    chosen = sampler_of(samplings, vocab_size).sample(logits, np.arange(len(samplings)))
    for row, sampling in enumerate(samplings):
        probs = distribution(logits[row].double().numpy(), sampling)
        token = int(chosen[row])
        assert probs[token] > 0
        seeds = np.array([sampling.seed % 2**64], dtype=np.uint64)
        chance = uniforms(seeds, np.zeros(1, dtype=np.uint64))[0]
        assert probs[:token].sum() - TOLERANCE <= chance <= probs[: token + 1].sum() + TOLERANCE


@pytest.mark.parametrize(
    "sampling",
    [
        {}, {"temperature": 0.5}, {"temperature": 4.0}, {"top_k": 4}, {"top_p": 0.7},
        {"min_p": 0.2}, {"top_k": 5, "top_p": 0.8, "min_p": 0.05, "temperature": 1.5},
    ],
)  # fmt: skip
def test_tokens_are_drawn_with_their_probability(sampling: dict[str, Any]) -> None:
    num_seeds, num_steps, logits = 600, 10, some_logits(10, seed=3, scale=1.0)
    num_draws = num_seeds * num_steps
    sampler = sampler_of([Sampling(**sampling, seed=seed) for seed in range(num_seeds)], 10)
    chosen = torch.tensor(run_all(sampler, logits.expand(num_steps, num_seeds, 10))).flatten()
    expected = num_draws * distribution(logits.double().numpy(), Sampling(**sampling))
    seen = np.bincount(chosen.numpy(), minlength=10)
    possible = expected > 0
    assert not seen[~possible].any()
    chi_square = ((seen - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_square < 27.9  # exceeded once in a thousand, with 9 degrees of freedom


def test_the_tokens_of_one_request_are_drawn_independently() -> None:
    sampler = sampler_of([Sampling(seed=seed) for seed in range(8)], 4)
    drawn = np.array(run_all(sampler, torch.zeros(500, 8, 4)))
    pairs = np.bincount((4 * drawn[:, ::2] + drawn[:, 1::2]).ravel())
    assert ((pairs - 125) ** 2 / 125).sum() < 37.7  # once in a thousand, 15 degrees of freedom


@pytest.mark.parametrize("stride", [1, 2**32, 0x9E3779B97F4A7C15])
def test_random_numbers_are_uniform_over_seeds_and_indices(stride: int) -> None:
    steps = np.arange(8000, dtype=np.uint64) * np.uint64(stride)
    fixed = np.full(8000, 7, dtype=np.uint64)
    for numbers in (uniforms(steps, fixed), uniforms(fixed, steps)):
        assert numbers.min() >= 0 and numbers.max() < 1
        counts = np.histogram(numbers, bins=50, range=(0, 1))[0]
        assert ((counts - 160) ** 2 / 160).sum() < 85.4  # once in a thousand, 49 degrees
        assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.05


@pytest.mark.parametrize("apart", [1, 0x9E3779B97F4A7C15, 2**63])
def test_two_seeds_share_no_random_numbers(apart: int) -> None:
    places = np.arange(500, dtype=np.uint64)
    one, other = (
        uniforms(np.full(500, s, dtype=np.uint64), places) for s in (3, (3 + apart) % 2**64)
    )
    assert not set(one.tolist()) & set(other.tolist())


@pytest.mark.parametrize("chance", [0.0, 0.5, 1 - 2.0**-53])
def test_a_token_of_weight_0_is_never_picked(chance: float) -> None:
    for weight in (1, 3, 2**40, 2**41 - 1):
        weights = torch.tensor([[0, 0, weight, 0, weight, 0, 0]])
        place = pick(weights, torch.tensor([[chance]], dtype=torch.float64))
        assert int(place) == (2 if chance < 0.5 else 4)


def test_different_seeds_give_different_tokens_and_equal_seeds_equal_ones() -> None:
    steps = torch.zeros(20, 100)
    by_seed = [
        run(sampler_of([Sampling(seed=seed)], 100), 0, steps) for seed in (0, 1, -1, 2**63, 0)
    ]
    assert by_seed[0] == by_seed[4]
    assert len({tuple(drawn) for drawn in by_seed}) == 4


def test_samples_of_one_prompt_differ_with_one_seed() -> None:
    steps, sampler = torch.zeros(20, 100), Sampler(4, 100)
    for row, sample in enumerate((0, 1, 2, 1)):
        request = a_request(Sampling(seed=5))
        request.sample = sample
        sampler.add_request(row, request, [0])
    drawn = [tuple(run(sampler, row, steps)) for row in range(4)]
    assert len(set(drawn)) == 3 and drawn[1] == drawn[3]


@settings(deadline=None, max_examples=40)
@given(
    st.lists(cuts | histories, min_size=1, max_size=24),
    st.randoms(),
    st.integers(0, 99),
    st.booleans(),
)
def test_a_row_does_not_depend_on_its_batch(
    samplings: list[Sampling], random: Any, seed: int, has_ties: bool
) -> None:
    logits = some_logits(len(samplings), 1500, seed=seed)
    logits = logits.round() if has_ties else logits
    rows = list(range(len(samplings)))
    alone = sampler_of(samplings, 1500)
    expected = torch.cat([alone.sample(logits[[row]], np.array([row])) for row in rows])
    assert torch.equal(sampler_of(samplings, 1500).sample(logits, np.array(rows)), expected)
    random.shuffle(rows)
    part = rows[: random.randint(1, len(rows))]
    moved = sampler_of([samplings[row] for row in rows], 1500)  # each is in another row
    assert torch.equal(moved.sample(logits[part], np.arange(len(part))), expected[part])


def test_a_row_does_not_depend_on_its_batch_with_a_large_vocabulary() -> None:
    samplings = [KINDS[row % 5] for row in range(21)]
    logits = some_logits(21, 49_155)
    alone = sampler_of(samplings, 49_155)
    expected = torch.cat([alone.sample(logits[[row]], np.array([row])) for row in range(21)])
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        try:
            together = sampler_of(samplings, 49_155).sample(logits, np.arange(21))
        finally:
            torch.set_num_threads(1)
        assert torch.equal(together, expected)


@settings(deadline=None, max_examples=40)
@given(
    cuts | histories,
    st.lists(tokens, min_size=1, max_size=5),
    st.integers(0, 12),
    st.integers(0, 8),
)
def test_a_resumed_request_continues_as_if_never_preempted(
    sampling: Sampling, prompt: list[int], num_before: int, min_tokens: int
) -> None:
    steps = some_logits(12, 30, seed=sampling.seed % 1000)
    request = a_request(sampling, prompt, min_tokens=min_tokens, eos_ids=frozenset({EOS}))
    straight, resumed = Sampler(1, 30), Sampler(3, 30)
    straight.add_request(0, request, prompt)
    whole = run(straight, 0, steps)
    resumed.add_request(2, request, [*prompt, *whole[:num_before]])
    assert run(resumed, 2, steps[num_before:]) == whole[num_before:]


@settings(deadline=None, max_examples=30)
@given(cuts | histories, cuts | histories)
def test_a_row_keeps_nothing_for_its_next_request(first: Sampling, second: Sampling) -> None:
    steps = some_logits(6, 30)
    used, fresh = Sampler(2, 30), Sampler(2, 30)
    used.add_request(1, a_request(first, min_tokens=9, eos_ids=frozenset({EOS})), [0])
    run(used, 1, steps)
    for sampler in (used, fresh):
        sampler.add_request(1, a_request(second, (4, 5)), [4, 5])
    assert run(used, 1, steps) == run(fresh, 1, steps)
    assert len(used.processors) == len(fresh.processors) <= 1


def test_the_given_logits_are_not_changed() -> None:
    samplings = [Sampling(temperature=0, logit_bias={1: 5.0}), Sampling(top_k=2), Sampling()]
    logits = some_logits(3, 20)
    before = logits.clone()
    sampler_of(samplings, 20).sample(logits, np.arange(3))
    assert torch.equal(logits, before)


def test_a_row_of_nan_yields_a_token_and_does_not_affect_others() -> None:
    samplings, logits = KINDS * 2, some_logits(10, 300)
    sound = sampler_of(samplings, 300).sample(logits, np.arange(10))
    logits[:5] = torch.nan
    chosen = sampler_of(samplings, 300).sample(logits, np.arange(10))
    assert torch.equal(chosen[5:], sound[5:])
    assert chosen.min() >= 0 and chosen.max() < 300


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = torch.tensor([[0.0, 3, 1, 3], [5, 5, 5, 5], [-1, -2, -3, 0]])
    samplings = [None, Sampling(temperature=0), Sampling(temperature=0, seed=4, top_p=0.1)]
    assert sampler_of(samplings, 4).sample(logits, np.arange(3)).tolist() == [1, 0, 3]


@pytest.mark.parametrize(
    "other", [{"temperature": 1.0, "seed": 1}, {"logit_bias": {7: 100.0}}, {"logprobs": 0}]
)
def test_only_plain_greedy_rows_take_the_best_token(other: dict[str, Any]) -> None:
    sampler = sampler_of([None, Sampling(temperature=0, seed=3), Sampling(**other)], 9)
    assert sampler.takes_best(np.arange(2)) and not sampler.takes_best(np.arange(3))
    sampler.add_request(2, a_request(None), [0])
    assert sampler.takes_best(np.arange(3))


def test_no_rows_yield_no_tokens() -> None:
    assert sampler_of([None], 4).sample(torch.zeros(0, 4), np.zeros(0, dtype=np.intp)).shape == (0,)


def test_half_precision_logits_are_accepted() -> None:
    logits = some_logits(2, 50).bfloat16()
    samplings = [None, Sampling(logprobs=1)]
    assert torch.equal(
        sampler_of(samplings, 50).sample(logits, np.arange(2)),
        sampler_of(samplings, 50).sample(logits.float(), np.arange(2)),
    )


@settings(deadline=None, max_examples=50)
@given(
    histories,
    st.lists(tokens, min_size=1, max_size=6),
    st.lists(tokens, max_size=8),
    st.integers(0, 9),
    st.integers(0, 99),
)
def test_logits_are_edited_as_in_the_reference(
    sampling: Sampling, prompt: list[int], output: list[int], min_tokens: int, seed: int
) -> None:
    logits = some_logits(30, seed=seed)
    stops = [EOS] if len(output) < min_tokens else []
    expected = edited(logits.double().numpy(), sampling, prompt, output, stops)
    request = a_request(sampling, prompt, min_tokens=min_tokens, eos_ids=frozenset({EOS, 999}))
    processor = LogitsProcessor(request, sampling, [*prompt, *output], 30, torch.device("cpu"))
    processor.apply(logits, len(output))
    if np.isfinite(expected).any():  # otherwise a ban was dropped; see below
        np.testing.assert_allclose(logits.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_penalties_count_tokens_as_they_are_generated() -> None:
    sampling = Sampling(
        temperature=0, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2
    )
    sampler, prompt, output = Sampler(1, 20), [3, 4, 3], list[int]()
    sampler.add_request(0, a_request(sampling, prompt), prompt)
    logits = some_logits(20, seed=1)
    for _ in range(30):
        expected = int(edited(logits.double().numpy(), sampling, prompt, output).argmax())
        output += run(sampler, 0, logits[None])
        assert output[-1] == expected
    assert len(set(output)) > 3


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 6), st.sampled_from([0.0, 1.0]), st.integers(0, 6))
def test_no_stop_token_is_generated_before_min_tokens(
    min_tokens: int, temperature: float, num_before: int
) -> None:
    steps = torch.zeros(8, 10)
    steps[:, [EOS, 7]] = 50.0  # without the ban, nothing else would be drawn
    request = a_request(
        Sampling(temperature=temperature), min_tokens=min_tokens,
        eos_ids=frozenset({EOS}), stop_ids=frozenset({7}),
    )  # fmt: skip
    sampler = Sampler(1, 10)
    sampler.add_request(0, request, [0] + [1] * num_before)
    num_early = max(0, min_tokens - num_before)
    drawn = run(sampler, 0, steps)
    assert not {EOS, 7} & set(drawn[:num_early])
    assert set(drawn[num_early:]) <= {EOS, 7}
    assert not sampler.processors  # removed once it is no longer needed


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_words_never_appear(temperature: float) -> None:
    words = ((1,), (2, 3), (4, 4, 5), (6, 7))
    steps = some_logits(250, 10, 8, seed=4, scale=0.3)

    def outputs(**more: Any) -> list[list[int]]:
        rows = [Sampling(temperature=temperature, seed=seed, **more) for seed in range(10)]
        return run_all(sampler_of(rows, 8), steps)

    def appears(word: tuple[int, ...], drawn: list[int]) -> bool:
        return any(tuple(drawn[at : at + len(word)]) == word for at in range(len(drawn)))

    banned, free = outputs(bad_words=words), outputs()
    assert not any(appears(word, drawn) for word in words for drawn in banned)
    for word in words:  # without the ban they do appear
        assert any(appears(word, drawn) for drawn in free)
    for drawn in banned:  # the last tokens of bad words are not banned elsewhere
        assert {3, 5, 7} <= set(drawn)


def test_a_bad_word_may_start_before_a_preemption_but_not_in_the_prompt() -> None:
    sampling = Sampling(temperature=0, bad_words=((3, 4),))
    wants_4 = torch.tensor([[0.0, 1, 0, 0, 9]])
    for prompt, output, expected in (([0], [3], 1), ([0, 3], [], 4), ([3], [3], 1)):
        sampler = Sampler(1, 5)
        sampler.add_request(0, a_request(sampling, prompt), [*prompt, *output])
        assert run(sampler, 0, wants_4) == [expected]


def test_plain_requests_have_no_logits_processor() -> None:
    plain = [None, Sampling(), Sampling(top_k=3, top_p=0.5, min_p=0.1), Sampling(logprobs=2)]
    assert not sampler_of(plain, 9, eos_ids=frozenset({EOS})).processors


def test_bad_words_and_stop_tokens_outside_the_vocabulary_are_ignored() -> None:
    sampling = Sampling(temperature=0, bad_words=((3, 5), (9,)))
    sampler = sampler_of([sampling], 5, min_tokens=9, stop_ids=frozenset({5}))
    assert run(sampler, 0, torch.eye(5)) == [*range(5)]


def test_bad_words_are_dropped_if_they_would_ban_every_token() -> None:
    words = tuple((token,) for token in range(5))
    banned = Sampling(temperature=0, bad_words=words)
    assert run(sampler_of([banned], 5), 0, torch.eye(5)) == [*range(5)]
    within = Sampling(temperature=0, bad_words=((3,),), allowed_tokens=frozenset({3}))
    assert run(sampler_of([within], 5), 0, torch.eye(5)) == [3] * 5


def test_bad_words_are_dropped_before_the_ban_on_early_stops() -> None:
    def answer(bad_words: tuple[tuple[int, ...], ...], *allowed: int) -> list[int]:
        sampling = Sampling(temperature=0, bad_words=bad_words, allowed_tokens=frozenset(allowed))
        sampler = sampler_of([sampling], 5, min_tokens=2, eos_ids=frozenset({EOS}))
        return run(sampler, 0, torch.tensor([[0.0, 1, 9, 0, 0]] * 3))

    assert answer(((1,),), 1, EOS) == [1, 1, EOS]
    assert answer((), EOS) == [EOS] * 3


@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_only_allowed_tokens_are_generated(temperature: float) -> None:
    allowed = frozenset({3, 11, 19})
    sampling = Sampling(temperature=temperature, allowed_tokens=allowed)
    drawn = run(sampler_of([sampling], 20), 0, some_logits(200, 20))
    assert set(drawn) == allowed


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_of_100_forces_and_minus_100_bans(temperature: float) -> None:
    steps = some_logits(100, 6)
    forced = Sampling(temperature=temperature, logit_bias={4: 100.0})
    assert set(run(sampler_of([forced], 6), 0, steps)) == {4}
    forbidden = Sampling(temperature=temperature, logit_bias={0: -100.0, 1: -100.0})
    assert set(run(sampler_of([forbidden], 6), 0, steps)) == {2, 3, 4, 5}


def test_a_sampling_of_another_type_is_rejected() -> None:
    with pytest.raises(InvalidRequest, match=r"'r'.*sampling.*temperature"):
        Sampler(1, 5).add_request(0, a_request({"temperature": 1.0}), [0])


def test_logprobs_are_of_the_raw_logits_and_only_where_requested() -> None:
    asks: list[int | None] = [None, 0, 3, 3, 99]
    samplings = [
        Sampling(temperature=2.0, logit_bias={5: 9.0}, seed=n, logprobs=n)
        if n is not None
        else None
        for n in asks
    ]
    sampler, logits = sampler_of(samplings, 30), some_logits(5, 30)
    chosen = sampler.sample(logits, np.arange(5))
    taken = sampler.take_logprobs()
    assert sorted(taken) == [1, 2, 3, 4] and sampler.take_logprobs() == {}
    for row, found in taken.items():
        raw = logits[row].log_softmax(-1)
        order = raw.argsort(descending=True).tolist()
        assert found.token == int(chosen[row]) and found.logprob == float(raw[found.token])
        assert found.rank == 1 + order.index(found.token)
        num_top = min(asks[row] or 0, 30)
        assert found.top == [(token, float(raw[token])) for token in order[:num_top]]


def test_logprobs_are_of_the_latest_call_only() -> None:
    sampler, logits = sampler_of([Sampling(logprobs=1), None], 9), some_logits(2, 9)
    sampler.sample(logits, np.arange(2))
    sampler.sample(logits[:1], np.array([1]))
    assert sampler.take_logprobs() == {}


def test_requesting_logprobs_changes_no_token() -> None:
    scored, plain = (sampler_of([each], 40) for each in (Sampling(logprobs=5), Sampling()))
    steps = some_logits(20, 40)
    assert run(scored, 0, steps) == run(plain, 0, steps)


def test_logprobs_of_many_positions_equal_those_of_each() -> None:
    logits = some_logits(600, 1000)  # more than fits in the cache at once
    targets = torch.arange(600)
    found = compute_logprobs(logits, targets, 2)
    raw = logits.log_softmax(-1)
    assert [entry.token for entry in found] == targets.tolist()
    assert [entry.logprob for entry in found] == raw[targets, targets].tolist()
    assert [entry.rank for entry in found] == [
        int((row > row[token]).sum()) + 1 for token, row in enumerate(raw)
    ]
    assert [entry.top[0] for entry in found] == list(
        zip(raw.argmax(-1).tolist(), raw.amax(-1).tolist(), strict=True)
    )
    assert found[399:401] == compute_logprobs(logits[399:401], targets[399:401], 2)
