"""Compiling ahead: nothing is launched meanwhile, by whoever compiles; all others go on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from headway.model.decoder import Decoder
from headway.model.kernels.blocks import set_aside
from headway.model.kernels.launch import Threads, compiling
from headway.model.plain import PlainBackend
from tests.test_device import Loud, model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def copied() -> Tensor:
    """Zeros, or ones if the kernel ran."""
    blocks = torch.ones((4, 8), device=DEVICE)
    aside = torch.zeros((4, 8), device=DEVICE)
    set_aside(blocks, torch.arange(4, device=DEVICE), aside)
    return aside.cpu()


def test_what_is_compiled_ahead_is_not_launched_until_later() -> None:
    with compiling():
        assert not copied().any()
    assert copied().all()


def test_other_threads_launch_while_one_compiles() -> None:
    with ThreadPoolExecutor(1) as other, compiling():
        assert other.submit(copied).result().all()


def test_whoever_fails_while_compiling_launches_again() -> None:
    with pytest.raises(ZeroDivisionError), compiling():
        print(1 // 0)
    assert copied().all()


def test_all_that_is_compiled_is_told() -> None:
    told: list[tuple[int, int]] = []
    with Threads(lambda *counts: told.append(counts)) as threads:
        for number in range(20):
            threads.submit(pow, number, 2)
    assert [done for done, _ in told] == list(range(1, 21)) and told[-1] == (20, 20)
    assert all(done <= given for done, given in told)


def test_a_decoder_has_all_its_layers_again() -> None:
    decoder = Decoder(Loud(model(num_hidden_layers=3)), PlainBackend())
    layers = decoder.layers
    with pytest.raises(ZeroDivisionError), decoder.shortened(2):
        assert decoder.layers == layers[:2]
        print(1 // 0)
    assert decoder.layers is layers
