"""Rows through their experts: the kernels equal a plain reference, whatever the router chooses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from headway.model.kernels import routing
from headway.model.kernels.products import experts
from headway.model.kernels.products.experts import ExpertRows, VectorTile
from headway.model.kernels.products.grouped import TILES, Stack, most_tiles, tiles_for

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HIDDEN, WIDTH, EPSILON = 40, 24, 1e-3


@dataclass(frozen=True, kw_only=True)
class Case:
    """A routing; `used` experts have higher outputs of the router than the others."""

    rows: int
    experts: int = 6
    chosen: int = 3
    used: int = 6
    normalizes: bool = True
    has_norm: bool = True
    has_residual: bool = True
    is_gpt_oss: bool = False  # with biases, and its activation
    max_few: int = 0
    ranked: int = routing.RANKED_ROWS


CASES = {
    "one row": Case(rows=1, experts=40, used=40, max_few=2),
    "one row in lists": Case(rows=1),
    "a few rows": Case(
        rows=2, experts=5, chosen=2, normalizes=False, has_residual=False, max_few=2
    ),
    "more than a few rows": Case(rows=3, has_residual=False, max_few=2),
    "one row of one expert": Case(rows=1, chosen=1, has_norm=False, max_few=2),
    "biases of a few rows": Case(rows=3, chosen=2, is_gpt_oss=True, max_few=3),
    "no whole tile": Case(rows=37, experts=5, has_norm=False),
    "biases": Case(rows=16, chosen=2, is_gpt_oss=True),
    "biases of more rows": Case(rows=18, is_gpt_oss=True, normalizes=False),
    "experts without rows": Case(rows=21, used=2, chosen=2),
    "all rows to one expert": Case(rows=35, used=1, chosen=1, normalizes=False),
    "chosen before listed": Case(rows=9, ranked=0, has_residual=False),
    "all experts": Case(rows=9, experts=4, chosen=4, used=4, ranked=0),
}


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def logits_of(case: Case) -> Tensor:
    """Outputs of the router, with a column that belongs to no expert."""
    logits = draw(1, case.rows, case.experts + 1)
    logits[:, : case.used] += 10
    logits[:, -1] += 100
    return logits


def reference(case: Case, x: Tensor, gate_up: Stack, down: Stack) -> Tensor:
    """One row and expert after the other, in float64."""
    shares = logits_of(case)[:, :-1].double().softmax(-1)
    wide = x.double()
    if case.has_norm:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)
    out = x.double() if case.has_residual else torch.zeros_like(wide)
    for row, each in enumerate(shares):
        chosen = each.argsort(descending=True)[: case.chosen].tolist()
        total = each[chosen].sum() if case.normalizes else 1.0
        for expert in chosen:
            gate, up = product(gate_up, expert, wide[row]).view(-1, 2).T
            if case.is_gpt_oss:
                gate, up = gate.clamp(max=7), up.clamp(-7, 7) + 1
            inner = gate * torch.sigmoid(gate * (1.702 if case.is_gpt_oss else 1)) * up
            out[row] += each[expert] / total * product(down, expert, inner)
    return out


def product(experts: Stack, expert: int, x: Tensor) -> Tensor:
    bias = 0.0 if experts.bias_en is None else experts.bias_en[expert].double()
    return experts.weight_enk[expert].double() @ x + bias


def stacks(case: Case) -> tuple[Stack, Stack]:
    gate_up = draw(3, case.experts, 2 * WIDTH, HIDDEN) / 5
    down = draw(4, case.experts, HIDDEN, WIDTH) / 5
    if not case.is_gpt_oss:
        return Stack(gate_up), Stack(down)
    biases = draw(6, case.experts, 2 * WIDTH) * 5, draw(7, case.experts, HIDDEN)
    return Stack(gate_up, biases[0]), Stack(down, biases[1])


@pytest.mark.parametrize("name", CASES)
def test_rows_go_through_their_experts_only(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of experts that no row chooses are not numbers."""
    case = CASES[name]
    monkeypatch.setattr(routing, "RANKED_ROWS", case.ranked)
    for name in ("GATED_TILE", "DOWN_TILE"):
        monkeypatch.setattr(experts, name, VectorTile(16, 16, warps=1))  # not all inputs at once
    x, logits = draw(2, case.rows, HIDDEN), logits_of(case)
    gate_up, down = stacks(case)
    unused = set(range(case.experts)) - set(logits[:, :-1].topk(case.chosen)[1].flatten().tolist())
    gate_up.weight_enk[list(unused)] = down.weight_enk[list(unused)] = torch.nan
    expected = reference(case, x, gate_up, down)
    norm: dict[str, Any] = {"epsilon": EPSILON} if case.has_norm else {}
    is_listed = case.rows > case.max_few
    if case.has_norm and is_listed:
        norm["squares_mj"] = torch.stack([part.square().sum(1) for part in x.split(16, 1)], 1)
    routed = ExpertRows(
        x, logits, gate_up, down, num_chosen=case.chosen, normalizes=case.normalizes,
        activation="clamped_swiglu" if case.is_gpt_oss else "silu", max_few=case.max_few, **norm,
    )  # fmt: skip
    out = x if case.has_residual else torch.full_like(x, torch.nan)
    squares = torch.full((case.rows, routed.num_parts), torch.nan, device=DEVICE)
    routed.summed(
        routed.inner_pn, residual_mn=x if case.has_residual else None, out_mn=out,
        squares_out_mj=squares,
    )  # fmt: skip
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    assert (routed.num_parts > 0) == is_listed
    if is_listed:
        torch.testing.assert_close(squares.sum(1), out.square().sum(1), rtol=1e-5, atol=1e-5)


def route(rows: int, ranked: int, logits: Tensor, chosen: int) -> tuple[Tensor, routing.Lists]:
    """Route the first rows, with an expert for each column."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "RANKED_ROWS", ranked)
        patch.setattr(routing, "LISTED", 16)
        return routing.list_pairs(logits[:rows], logits.shape[1], chosen)


@pytest.mark.filterwarnings("ignore:invalid value")  # of numpy, in the interpreter
def test_the_lists_have_each_pair_once_in_the_order_of_rows() -> None:
    logits = draw(5, 35, 7).round()  # with equal outputs, also -0.0 and 0.0
    logits[4, 2] = -torch.inf
    order = logits.argsort(dim=1, descending=True, stable=True)[:, :2]
    expected = logits.softmax(-1).gather(1, order)
    whole, _ = route(35, 0, logits, 2)
    torch.testing.assert_close(whole, expected)
    line, ranked = routing.LINE.value, routing.RANKED_ROWS
    for rows in (5, line, line + 1, ranked, ranked + 1):
        shares, lists = route(rows, ranked, logits, 2)
        assert torch.equal(chosen_by(lists, rows, 2), order[:rows])
        assert torch.equal(shares, whole[:rows])  # the same bits


@pytest.mark.filterwarnings("ignore:invalid value|All-NaN")  # of numpy, in the interpreter
@pytest.mark.parametrize("ranked", [0, 16])
def test_every_row_has_as_many_experts_whatever_the_router_says(ranked: int) -> None:
    """There would not be enough programs for more pairs."""
    logits = draw(5, 5, 7)
    logits[1], logits[2, :3], logits[3, 1] = torch.nan, torch.nan, torch.inf
    logits[4] = torch.full((7,), -1, dtype=torch.int32).view(torch.float32)  # NaN too
    shares, lists = route(5, ranked, logits, 3)
    assert all(len(set(row)) == 3 for row in chosen_by(lists, 5, 3).tolist())
    assert shares[0].isfinite().all() and shares[[1, 2, 4]].isnan().all()


def chosen_by(lists: routing.Lists, rows: int, chosen: int) -> Tensor:
    """The expert of each place of each row, whose pairs are in the order of rows and listed once."""
    experts = torch.full((rows * chosen,), -1, device=lists.counts_e.device)
    for expert, (count, pairs) in enumerate(zip(*lists, strict=True)):
        own = pairs[:count].long()
        assert own.tolist() == sorted(own.tolist()) and (experts[own] == -1).all()
        experts[own] = expert
    assert (experts >= 0).all()
    return experts.view(rows, chosen)


@pytest.mark.filterwarnings("ignore:invalid value|All-NaN")  # of numpy, in the interpreter
def test_a_few_rows_choose_as_listed_ones_whatever_the_router_says() -> None:
    """A row whose outputs of the router are not numbers harms no other row."""
    x, logits = draw(2, 5, HIDDEN), draw(1, 5, 4).round()
    logits[0, 1], logits[1], logits[2, :2], logits[3, 1] = (
        logits[0, 0],
        torch.nan,
        torch.nan,
        torch.inf,
    )
    given = stacks(Case(rows=5, experts=4))
    found = []
    for max_few in (0, 5):
        routed = ExpertRows(x, logits, *given, num_chosen=2, normalizes=False, max_few=max_few)
        found.append(routed.summed(routed.inner_pn))
    assert found[0][[0, 4]].isfinite().all() and found[0][1:4].isnan().all()
    torch.testing.assert_close(*found, equal_nan=True)


def test_there_are_programs_for_all_tiles_of_any_lists() -> None:
    for num_pairs, num_experts, rows in ((1, 8, 16), (40, 4, 16), (33, 1, 32), (5, 5, 16)):
        for most in {1, num_pairs // num_experts, num_pairs}:  # of one expert
            counts = [0] * num_experts
            for pair in range(num_pairs):
                counts[min(pair // max(most, 1), num_experts - 1)] += 1
            needed = sum(-(-count // rows) for count in counts)
            assert needed <= most_tiles(num_pairs, num_experts, rows)


def test_tiles_fit_into_memory_and_keep_one_order_of_summation() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for mean in (0.1, 2, 5, 12, 30, 60, 10000):
            (tile,) = tiles_for(mean, dtype)
            assert tile.rows >= 16 and tile.slices == 1 and tile.stages > 1
            assert (
                tile.inputs * dtype.itemsize == TILES[min(n for n in TILES if mean <= n)].inputs * 2
            )
