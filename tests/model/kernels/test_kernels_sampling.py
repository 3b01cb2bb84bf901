"""Sampling on a GPU: the kernels equal their references, and draws follow the distribution."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

triton: Any = pytest.importorskip("triton")
import triton.language as tl

from headway.model.kernels import sampling
from headway.model.kernels.logit_thresholds import find_logit_thresholds
from headway.model.kernels.sampling import SamplingTensors, sample, workspace
from headway.sampling_params import COLDEST
from tests.model.kernels.reference import logit_thresholds as thresholds_reference
from tests.model.kernels.reference import sampling as reference

torch.set_num_threads(1)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = {
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "seed": torch.int64,
    "num_generated": torch.int32,
}
PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1, "num_generated": 0}
RESTRICTIONS: list[dict[str, float]] = [
    {},
    {"temperature": 0.0, "top_k": 2, "top_p": 0.5},
    {"temperature": 0.7},
    {"min_p": 0.2},
    {"top_k": 5},
    {"top_p": 0.8},
    {"top_k": 8, "top_p": 0.9, "temperature": 0.6},
    {"top_p": 0.6, "min_p": 0.05},
    {"top_k": 3, "min_p": 0.3, "temperature": 2.0},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.01, "temperature": 1.5},
]
STRANGE = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # in the interpreter


def settings_of(rows: list[dict[str, float]]) -> SamplingTensors:
    """Settings of rows, each given by its differences from PLAIN."""
    full = [PLAIN | row for row in rows]
    made = {k: torch.tensor([row[k] for row in full], dtype=t) for k, t in KINDS.items()}
    return SamplingTensors(**{name: column.to(DEVICE) for name, column in made.items()})


def some_logits(num_rows: int, vocab_size: int, seed: int, spread: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, vocab_size, generator=generator) * spread).to(DEVICE)


def chosen(
    sampler: Callable[..., None],
    logits: Tensor,
    settings: SamplingTensors,
    row_ids: list[int] | None = None,
) -> list[int]:
    """The tokens of rows with the given row ids, or with ids in order."""
    at = torch.tensor(range(len(logits)) if row_ids is None else row_ids, dtype=torch.int32)
    out = torch.full((len(logits),), -7, dtype=torch.int32, device=DEVICE)
    sampler(logits, at.to(DEVICE), settings, out)
    return [int(token) for token in out.tolist()]


def kept(logits: Tensor, settings: SamplingTensors) -> list[list[bool]]:
    """Whether each token is at or above the kernel's threshold of its row."""
    rows = torch.arange(len(logits), device=DEVICE)
    thresholds_n = torch.full((len(logits),), torch.nan, device=DEVICE)
    find_logit_thresholds(logits, rows, settings, thresholds_n)
    is_kept: list[list[bool]] = (logits >= thresholds_n[:, None]).tolist()
    return is_kept


def checked_tokens(logits: Tensor, rows: list[dict[str, float]]) -> list[int]:
    """The tokens, after checking that kernels and references keep and choose the same."""
    settings, row_ids = settings_of(rows), torch.arange(len(rows), device=DEVICE)
    space = workspace(*logits.shape, DEVICE)
    tokens, expected = (torch.full_like(row_ids, -7, dtype=torch.int32) for _ in range(2))
    sample(logits, row_ids, settings, tokens, space)
    reference.sample(logits, row_ids, settings, expected)
    thresholds_n = torch.full((len(rows),), torch.nan, dtype=torch.float64, device=DEVICE)
    thresholds_reference.find_logit_thresholds(logits, row_ids, settings, thresholds_n)
    assert torch.equal(
        logits >= space.thresholds[:, None], logits.double() >= thresholds_n[:, None]
    )
    assert tokens.tolist() == expected.tolist()
    return [int(token) for token in tokens.tolist()]


def seeded(rows: list[dict[str, float]], seed: int) -> list[dict[str, float]]:
    return [{"seed": seed * 7919 + i, "num_generated": 3 * i} | row for i, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [
        (1, torch.float32),
        (2, torch.float16),
        (37, torch.float32),
        (1000, torch.bfloat16),
        (2051, torch.float32),
    ],
)
def test_kernel_and_reference_choose_the_same(vocab_size: int, dtype: torch.dtype) -> None:
    logits = some_logits(len(RESTRICTIONS), vocab_size, seed=vocab_size).to(dtype)
    checked_tokens(logits, seeded(RESTRICTIONS, vocab_size))


@pytest.mark.parametrize("vocab_size", [49_152, 151_936] if DEVICE == "cuda" else [49_152])
def test_the_whole_vocabulary_is_searched(vocab_size: int) -> None:
    logits = some_logits(2, vocab_size, seed=5).bfloat16()
    logits[0, -1] = 90.0
    common = {"top_k": 20, "top_p": 0.95, "temperature": 0.6, "seed": 2**62 + 11}
    assert checked_tokens(logits, [{"temperature": 0.0}, common])[0] == vocab_size - 1


@pytest.mark.parametrize(
    "restriction", [{"top_k": 600}, {"top_p": 0.9}, {"top_k": 700, "top_p": 0.99}]
)
def test_low_thresholds_are_found(restriction: dict[str, float]) -> None:
    """A flat row keeps more tokens than the four largest of each column."""
    checked_tokens(some_logits(1, 1000, seed=3, spread=0.3), [restriction])


@pytest.mark.parametrize("restriction", [{"top_k": 3}, {"top_p": 0.3}, {"top_k": 2, "top_p": 0.9}])
def test_tokens_equal_to_the_smallest_kept_are_kept(restriction: dict[str, float]) -> None:
    logits = torch.tensor([[5.0] + [4.0] * 6 + [-1.0] * 93], device=DEVICE)
    near = kept(logits, settings_of([restriction]))
    assert near == [[True] * 7 + [False] * 93]


def test_zeros_of_both_signs_are_equal() -> None:
    row = [0.0, -0.0, -0.0, -3.0, -0.0, -0.0, -0.0, -0.0]  # a column of eight has one sign
    logits = torch.tensor([row * 15, row[::-1] * 15, (row[::-1] + row) * 7 + row], device=DEVICE)
    for restriction in ({"top_k": 1}, {"top_k": 70}, {"top_p": 0.5}):
        assert kept(logits, settings_of([restriction] * 3)) == (logits == 0).tolist()


def test_many_of_the_best_may_share_a_column() -> None:
    """More than four of a column are found, and all equal ones count."""
    logits = torch.full((2, 512), -4.0, device=DEVICE)
    logits[0, ::32] = 2.0  # 16 in a column of 32
    logits[1, :256:32] = torch.arange(10.0, 2.0, -1.0, device=DEVICE)
    logits[1, 5:8] = 1.0
    near = kept(logits, settings_of([{"top_k": 10}, {"top_k": 6}]))
    assert near == [(logits[0] == 2.0).tolist(), (logits[1] >= 5.0).tolist()]


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = some_logits(4, 3000, seed=8)
    logits[0, 2999], logits[1, [1030, 2100, 2101]], logits[3] = 50.0, 60.0, -torch.inf
    logits[2] = -8.0
    cold = [{"temperature": 0.0}, {"temperature": COLDEST / 2}, {"temperature": 0.0}]
    assert chosen(sample, logits, settings_of([*cold, {"temperature": 0.0}])) == [2999, 1030, 0, 0]


def test_cold_draws_take_the_largest_and_hot_draws_take_any() -> None:
    logits = some_logits(1, 300, seed=4).expand(6, -1).contiguous()
    best = int(logits[0].argmax())
    cold = [{"temperature": heat, "seed": 5} for heat in (COLDEST, 1e-3)]
    hot: list[dict[str, float]] = [{"temperature": 1000.0, "seed": seed} for seed in range(4)]
    tokens = checked_tokens(logits, cold + hot)
    assert tokens[:2] == [best, best]
    assert len(set(tokens[2:])) > 1


def test_ties_are_drawn_by_their_noise() -> None:
    """Each token has its own noise, also if tokens share a counter."""
    rows = seeded([{"temperature": heat} for heat in (1.0, 0.01, 0.5, 3.0)] * 2, seed=1)
    tokens = checked_tokens(torch.full((len(rows), 2000), 1.5, device=DEVICE), rows)
    assert len(set(tokens)) > len(rows) // 2


@STRANGE
def test_nan_is_not_chosen_if_there_is_a_number() -> None:
    rows = seeded([{}, {"top_k": 60}, {"top_k": 4}, {"min_p": 0.1, "top_p": 0.9}], seed=2)
    logits = torch.full((len(rows), 100), torch.nan, device=DEVICE)
    assert all(0 <= token < 100 for token in chosen(sample, logits, settings_of(rows)))
    logits[:, 3::7] = some_logits(len(rows), 14, seed=1)
    assert {token % 7 for token in checked_tokens(logits, rows)} == {3}
    logits = some_logits(len(rows), 100, seed=1)
    logits[:, 8::9], logits[:, 0] = torch.nan, 12.0  # 0 and 8 share a column
    assert all(token % 9 != 8 for token in checked_tokens(logits, rows))


@STRANGE
def test_an_infinity_is_chosen_and_a_minus_infinity_is_not() -> None:
    rows = seeded([{}, {"top_k": 60}, {"top_p": 0.9}, {"min_p": 0.1, "top_k": 2}], seed=3)
    logits = some_logits(len(rows), 100, seed=2)
    logits[:, 10:] = -torch.inf
    assert max(checked_tokens(logits, rows)) < 10
    logits[:, 70] = torch.inf
    assert set(chosen(sample, logits, settings_of(rows))) == {70}


def test_a_token_depends_only_on_its_own_row() -> None:
    """Not on the batch, the order of rows, the row id or the slices."""
    num_rows, vocab_size = 110, 5_000
    logits = some_logits(num_rows, vocab_size, seed=6)
    others = [{"temperature": 0.0}] * (num_rows - 5)
    drawn = [{"temperature": 0.8}, {}, {"temperature": 2.0}, {"top_k": 9}, {"top_p": 0.2}]
    rows = seeded(others + drawn, seed=4)
    together = chosen(sample, logits, settings_of(rows))[-5:]
    assert sampling._slices(num_rows, vocab_size) != sampling._slices(1, vocab_size)
    alone = [chosen(sample, logits[i, None], settings_of([rows[i]])) for i in range(-5, 0)]
    assert [[token] for token in together] == alone
    row_ids = list(range(num_rows - 5, num_rows))[::-1]
    assert chosen(sample, logits.flip(0)[:5], settings_of(rows), row_ids) == together[::-1]


def test_rows_may_have_a_stride_and_row_ids_64_bits() -> None:
    rows = seeded([{}, {"top_k": 4}, {"top_p": 0.3}, {"temperature": 0.0}], seed=5)
    wide = some_logits(4, 150, seed=9)
    tokens = checked_tokens(wide[:, :101], rows)  # row ids are int64
    assert tokens == chosen(sample, wide[:, :101].contiguous(), settings_of(rows))


def test_the_content_of_a_workspace_does_not_matter() -> None:
    logits, settings = some_logits(3, 1500, seed=9), settings_of([{}, {"top_k": 4}, {}])
    space = workspace(9, 1500, DEVICE)
    for tensor in (space.thresholds, space.scores, space.tokens):
        tensor.fill_(1_000_000)
    out = torch.full((4,), -7, device=DEVICE, dtype=torch.int32)
    sample(logits, torch.arange(3, device=DEVICE), settings, out[:3], space)
    assert out.tolist() == [*chosen(sample, logits, settings), -7]


def test_no_rows_launch_nothing() -> None:
    out = torch.full((1,), -7, dtype=torch.int32, device=DEVICE)
    nothing = torch.empty((0,), dtype=torch.int32, device=DEVICE)
    for sampler in (sample, reference.sample):
        sampler(torch.empty((0, 50), device=DEVICE), nothing, settings_of([{}]), out[:0])
    assert out.tolist() == [-7]


@triton.jit
def _random_words(out, seed, SIZE: tl.constexpr, ROUNDS: tl.constexpr):
    offset = tl.arange(0, SIZE)
    word0, word1, word2, word3 = tl.randint4x(tl.load(seed), offset, ROUNDS)
    tl.store(out + offset, word0)
    tl.store(out + SIZE + offset, word1)
    tl.store(out + 2 * SIZE + offset, word2)
    tl.store(out + 3 * SIZE + offset, word3)


@triton.jit
def _noise_of(out, bits, SIZE: tl.constexpr, ROUGH: tl.constexpr):
    at = tl.arange(0, SIZE)
    word = tl.load(bits + at).to(tl.uint32)
    tl.store(out + at, sampling._noise(word, ROUGH))


@pytest.mark.parametrize("seed", [0, 1, -1, 2**40 + 3, -(2**63), 2**63 - 1])
def test_the_references_random_words_equal_tritons(seed: int) -> None:
    out = torch.empty((4, 64), dtype=torch.int32, device=DEVICE)
    _random_words[(1,)](out, torch.tensor([seed], device=DEVICE), SIZE=64, ROUNDS=reference.ROUNDS)
    words = torch.stack(reference.philox(torch.tensor(seed), torch.arange(64), torch.tensor(0)))
    assert torch.equal(out.cpu().long() & 0xFFFFFFFF, words)


def test_the_noise_is_gumbel_over_the_whole_range() -> None:
    bits = [0, 1, 2, 77, 2**15, 2**28, 2**29, 2**30, 2**31, 2**32 - 2**20, 2**32 - 1]
    words = torch.tensor([bits[i % len(bits)] for i in range(16)], device=DEVICE)
    out = torch.empty(16, dtype=torch.float32, device=DEVICE)
    _noise_of[(1,)](out, words, SIZE=16, ROUGH=DEVICE == "cuda")
    chance = ((words.float() + 0.5) / 2**32).clamp(max=reference.LAST).double()
    expected = -torch.log2(-torch.log1p(-chance) / torch.log(torch.tensor(2.0).double()))
    assert out.isfinite().all()
    assert (out.double() - expected).abs().max() < 1e-5


# The tests below need thousands of draws. In the interpreter the reference draws instead of the
# kernels, which the tests above hold to the same tokens.
DRAW = sample if DEVICE == "cuda" else reference.sample
NUM_DRAWS = 20_000 if DEVICE == "cuda" else 1_000


def law(logits: Tensor, row: dict[str, float]) -> Tensor:
    """The expected probabilities of a draw, computed one token at a time."""
    row = PLAIN | row
    weights = (logits.double() / row["temperature"]).softmax(-1).tolist()
    order = sorted(range(len(weights)), key=lambda token: -weights[token])
    order = [token for token in order if weights[token] >= row["min_p"] * weights[order[0]]]
    order = order[: int(row["top_k"]) or None]
    whole, reached, ours = sum(weights[token] for token in order), 0.0, [0.0] * len(weights)
    for token in order:
        if reached < row["top_p"] * whole:
            ours[token] = weights[token]
        reached += weights[token]
    return torch.tensor(ours) / sum(ours)


def is_fair(tokens: list[int], probs: Tensor) -> bool:
    """No impossible token, and Pearson's chi-square within five deviations of its mean."""
    seen, expected = torch.bincount(torch.tensor(tokens), minlength=len(probs)), probs * len(tokens)
    possible = probs > 0
    surplus = ((seen - expected) ** 2 / expected)[possible].sum().item()
    freedom = int(possible.sum()) - 1
    return not seen[~possible].any() and surplus < freedom + 5 * (2 * freedom) ** 0.5 + 1e-9


@pytest.mark.parametrize(
    ("restriction", "moves"),
    [({}, "num_generated")] + [(c, "seed") for c in RESTRICTIONS if c.get("temperature", 1.0) > 0],
)
def test_draws_follow_their_distribution(restriction: dict[str, float], moves: str) -> None:
    logits = torch.tensor([1.0, -1.2, 0.3, 2.1, 1.7, -3.0, 0.9, 1.2], device=DEVICE)
    rows: list[dict[str, float]] = [restriction | {moves: number} for number in range(NUM_DRAWS)]
    tokens = chosen(DRAW, logits.expand(NUM_DRAWS, -1).contiguous(), settings_of(rows))
    assert is_fair(tokens, law(logits.cpu(), restriction))


def test_consecutive_draws_are_independent() -> None:
    rows: list[dict[str, float]] = [{"seed": 3, "num_generated": i} for i in range(NUM_DRAWS)]
    tokens = chosen(DRAW, torch.zeros((NUM_DRAWS, 4), device=DEVICE), settings_of(rows))
    pairs = [4 * a + b for a, b in pairwise(tokens)]
    assert is_fair(pairs, torch.full((16,), 1 / 16))


def test_every_part_of_a_vocabulary_is_drawn() -> None:
    num_draws, vocab_size = NUM_DRAWS // 2, 4096
    rows: list[dict[str, float]] = [{"seed": seed} for seed in range(num_draws)]
    tokens = chosen(DRAW, torch.zeros((num_draws, vocab_size), device=DEVICE), settings_of(rows))
    assert is_fair([token // 256 for token in tokens], torch.full((16,), 1 / 16))
    assert is_fair([token % 16 for token in tokens], torch.full((16,), 1 / 16))
