"""Independent work on two streams of a GPU; one after the other without a GPU."""

from __future__ import annotations

from functools import partial

import torch

from headway.model.backends.streams import run_beside

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def add(target: torch.Tensor, amount: torch.Tensor | int) -> None:
    target += amount


def test_both_see_earlier_work_and_later_work_sees_both() -> None:
    size = 2**22 if DEVICE == "cuda" else 16
    x, first, second = torch.zeros((3, size), device=DEVICE)
    for round in range(1, 50):
        x += 1
        run_beside(partial(add, first, x), partial(add, second, -x))
        total = first + second
        x += first + second
        assert not bool(total.any()), f"in round {round}"
    assert first[0] == 49 * 50 / 2


def test_both_run_in_a_captured_graph() -> None:
    if DEVICE == "cpu":
        calls: list[str] = []
        run_beside(lambda: calls.append("first"), lambda: calls.append("second"))
        assert calls == ["first", "second"]
        return
    x, y = torch.zeros((2, 4), device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_beside(partial(add, x, 1), partial(add, y, 2))
    for _ in range(3):
        graph.replay()
    assert x.tolist() == [3] * 4 and y.tolist() == [6] * 4
