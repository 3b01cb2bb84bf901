"""The 8-bit format for Arm CPUs with dot products of bytes: exact, and the same in any batch."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from headway.model.backends.native import weights as packing
from headway.model.backends.native.backend import NativeBackend
from headway.model.decoder import Decoder
from headway.model.precision import why_not_native
from tests.model.test_batch_invariance import (
    EPSILON,
    ScaledCheckpoint,
    logits_in_batches,
    multiplied,
    sizes,
)
from tests.support import real

pytestmark = pytest.mark.skipif(
    why_not_native() is not None or packing.layout().wide_group == 0,
    reason="not an Arm CPU with dot products of bytes",
)
GROUP = 64


def matrices(num_outputs: int, num_inputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, weights and a bias; a group of zeros has no scale, and rows differ in size."""
    generator = torch.Generator().manual_seed(num_outputs + num_inputs)
    x = torch.randn(40, num_inputs, generator=generator)
    x[0, :GROUP], x[1] = 0, x[1] * 1e-30
    matrix = torch.randn(num_outputs, num_inputs, generator=generator)
    return x, matrix, torch.randn(num_outputs, generator=generator)


def integers(matrix: Tensor, *, is_half: bool) -> tuple[Tensor, Tensor]:
    """Integers [rows, groups, inputs] and the scales of the groups; weights have half scales."""
    grouped = matrix.view(len(matrix), -1, GROUP)
    most = grouped.abs().amax(2, keepdim=True)
    if is_half:
        scale = (most / 127).half().float()
        return (grouped / scale).round().clamp(-127, 127), scale
    inverse = torch.where(most > 0, torch.tensor(127.0) / most, 0)
    return (grouped * inverse).round(), most / 127


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 64), (15, 128), (33, 64), (130, 576)])
def test_products_are_exact_up_to_rounding(num_outputs: int, num_inputs: int) -> None:
    x, matrix, bias = matrices(num_outputs, num_inputs)
    (q, scale), (i, step) = integers(matrix, is_half=True), integers(x, is_half=False)
    dots = torch.einsum("mgk,ngk->mng", i.double(), q.double())
    terms = dots * step.double().transpose(1, 2) * scale.double().squeeze(2)
    exact, most = terms.sum(2) + bias, (num_inputs // GROUP + 6) * EPSILON * terms.abs().sum(2)
    found = multiplied(packing.pack_wide(matrix, bias), x, None)
    assert ((found - exact).abs() <= most + 4 * EPSILON * (bias.abs() + exact.abs())).all()


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(15, 128), (130, 576)])
def test_a_row_is_bit_identical_for_any_number_of_rows(num_outputs: int, num_inputs: int) -> None:
    x, matrix, bias = matrices(num_outputs, num_inputs)
    weight, onto = packing.pack_wide(matrix, bias), torch.ones(len(x), num_outputs)
    alone = torch.cat([multiplied(weight, x[i : i + 1], onto[:1]) for i in range(len(x))])
    for num_rows in (2, 3, 4, 5, 8, 9, 12, 13, 16, 31, 40):
        together = multiplied(weight, x[:num_rows], onto[:num_rows])
        assert torch.equal(together, alone[:num_rows]), num_rows


def test_unpacked_rows_equal_the_packed_matrix() -> None:
    _, matrix, _ = matrices(75, 128)
    (q, scale), ids = integers(matrix, is_half=True), torch.tensor([74, 0, 15, 16, 16, 63, 64])
    assert torch.equal(packing.pack_wide(matrix, None).rows(ids), (q * scale).flatten(1)[ids])


def test_logits_are_bit_identical_alone_and_in_any_batch() -> None:
    config = sizes(6, 2, 64, hidden_size=128, intermediate_size=192)
    model = Decoder(ScaledCheckpoint(config), NativeBackend(is_quantized=True))
    rng = random.Random(5)
    assert model.layers[0].down.struct.group == GROUP
    sequences = [[rng.randrange(131) for _ in range(length)] for length in (1, 2, 31, 65, 130)]
    alone = [real.logits_of(model, tokens) for tokens in sequences]
    for block_size in (5, 16):
        found = logits_in_batches(model, sequences, block_size, rng)
        assert all(map(torch.equal, alone, found)), block_size
