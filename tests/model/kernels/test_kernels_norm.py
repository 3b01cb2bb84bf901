"""Norms and the gated activation: the kernels, their references and the plain backend agree."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from headway.model.backends.plain import PlainBackend
from headway.model.kernels import activation, norm
from tests.model.kernels.reference import activation as activation_reference
from tests.model.kernels.reference import norm as norm_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
# The interpreter truncates bfloat16 where a GPU rounds, so only half precision is equal there.
ROUNDED = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16]
EPSILON = 1e-5
SHAPES = [(1, 1), (5, 80), (3, 576), (4, 1024), (2, 4096), (1, 8192)]


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Uninitialized memory holds NaN. `use_deterministic_algorithms` imports torch's compiler."""
    torch.set_deterministic_debug_mode("error")
    assert torch.empty(3, device=DEVICE).isnan().all()
    yield
    torch.set_deterministic_debug_mode("default")


def numbers(*shape: int, dtype: torch.dtype, seed: int, spread: float = 1.0) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread
    return values.to(DEVICE, dtype)


def distance(found: Tensor, exact: Tensor) -> float:
    """The relative error; NaN if any number is NaN."""
    return float((found.float() - exact.float()).norm() / exact.float().norm())


def share_unlike(found: Tensor, expected: Tensor) -> float:
    return float((found != expected).float().mean())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_a_norm_equals_torch(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, weight = numbers(*shape, dtype=dtype, seed=1), numbers(shape[1], dtype=dtype, seed=2)
    before = x.clone()
    out = norm.rms_norm(x, weight, EPSILON)
    exact = norm_reference.rms_norm(x.float(), weight.float(), EPSILON)
    assert out.dtype == dtype and out.shape == shape
    assert distance(out, exact) < LIMITS[dtype]
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", ROUNDED, ids=str)
def test_norms_round_as_torch_does(dtype: torch.dtype) -> None:
    x, weight = numbers(4, 1024, dtype=dtype, seed=6), numbers(1024, dtype=dtype, seed=8)
    found = norm.rms_norm(x, weight, EPSILON)
    assert share_unlike(found, norm_reference.rms_norm(x, weight, EPSILON)) < 0.01


def test_epsilon_keeps_zero_rows_zero_and_affects_small_rows() -> None:
    x = torch.stack([torch.zeros(96), torch.full((96,), 1e-3)]).to(DEVICE)
    out = norm.rms_norm(x, torch.ones(96, device=DEVICE), 1e-6)
    assert not out[0].any()
    torch.testing.assert_close(out[1], torch.full_like(out[1], 0.5**0.5))


def test_squares_beyond_half_precision_do_not_overflow() -> None:
    x = numbers(2, 576, dtype=torch.float16, seed=9, spread=5e3)
    weight = torch.ones(576, dtype=torch.float16, device=DEVICE)
    exact = norm_reference.rms_norm(x.float(), weight.float(), EPSILON)
    assert distance(norm.rms_norm(x, weight, EPSILON), exact) < LIMITS[torch.float16]


def test_rows_may_have_a_stride() -> None:
    wide, weight = (numbers(*n, dtype=torch.float32, seed=10) for n in ((4, 200), (72,)))
    x = wide[::2, 64:136]
    expected = norm_reference.rms_norm(x, weight, EPSILON)
    torch.testing.assert_close(norm.rms_norm(x, weight, EPSILON), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("rows", "half"), [(1, 1), (5, 72), (3, 1536), (2, 2500)], ids=str)
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_a_gate_equals_torch(dtype: torch.dtype, rows: int, half: int) -> None:
    x = numbers(rows, 2 * half, dtype=dtype, seed=13, spread=2.0)
    out = activation.silu_multiply(x)
    assert out.dtype == dtype and out.shape == (rows, half)
    assert distance(out, activation_reference.silu_multiply(x.float())) < LIMITS[dtype]
    apart = torch.cat([x, x], dim=1)[:, : 2 * half]
    assert torch.equal(activation.silu_multiply(apart), out)


@pytest.mark.parametrize("dtype", ROUNDED, ids=str)
def test_a_gate_rounds_as_torch_does(dtype: torch.dtype) -> None:
    x = numbers(4, 2048, dtype=dtype, seed=14)
    expected = activation_reference.silu_multiply(x)
    assert share_unlike(activation.silu_multiply(x), expected) < 0.01


@pytest.mark.filterwarnings("ignore:overflow")  # the interpreter's exp overflows
def test_a_gate_far_from_zero_is_closed_or_open() -> None:
    gate = torch.tensor([[-3e38, -1e4, -100.0, 0.0, 100.0, 1e4, 3e38]], device=DEVICE)
    found = activation.silu_multiply(torch.stack([gate, torch.ones_like(gate)], dim=2).flatten(1))
    torch.testing.assert_close(found, gate.clamp(min=0.0))


def test_no_rows_launch_nothing() -> None:
    x, weight = torch.empty(0, 64, device=DEVICE), torch.ones(64, device=DEVICE)
    assert norm.rms_norm(x, weight, EPSILON).shape == (0, 64)
    assert activation.silu_multiply(x).shape == (0, 32)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_the_references_equal_the_plain_backend(dtype: torch.dtype) -> None:
    plain = PlainBackend(dtype, DEVICE)
    x, weight = numbers(4, 96, dtype=dtype, seed=15), numbers(96, dtype=dtype, seed=16)
    expected = plain.rms_norm(x, weight, EPSILON)
    assert torch.equal(norm_reference.rms_norm(x, weight, EPSILON), expected)
    halves = torch.cat([x[:, 0::2], x[:, 1::2]], dim=1)
    torch.testing.assert_close(activation_reference.silu_multiply(x), plain.gated(halves, "silu"))
