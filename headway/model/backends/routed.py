"""A layer's experts step by step: each token goes through those that the router chose for it.

Tokens are sorted by expert, so that an expert multiplies all its tokens at once, and experts that no
token uses are not read. A token's outputs are added in the order in which its experts were chosen.

Shapes: T tokens, E experts, k chosen experts, P = T k pairs of a token and an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headway.model.backends.base import Backend, ExpertWeights, Weight
from headway.model.experts import Experts

# An output projection of the rank's part of the inputs, given the function that multiplies.
Project = Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]


class Routing:
    """The experts of each token, and their tokens."""

    def __init__(self, ops: Backend, x: Tensor, experts: ExpertWeights, about: Experts) -> None:
        """`x` [T, hidden] is the layer's input."""
        self._ops, self._x = ops, x
        chosen_tk, self.factors = ops.route(ops.linear(x, experts.router), about)  # [T, k + 1]
        self._order_p = chosen_tk.flatten().argsort(stable=True)
        self._num_chosen = about.num_chosen
        counts = chosen_tk.flatten().bincount(minlength=about.num_experts)
        self._counts: list[int] = counts.tolist()

    def outputs(self, experts: ExpertWeights, activation: str, project: Project) -> Tensor:
        """The sum of the chosen experts' outputs, times their factors."""
        rows = self._x[self._order_p // self._num_chosen]
        inner = self._ops.gated(self._products(rows, experts.gate_up), activation)
        return project(inner, lambda whole: self._summed(self._products(whole, experts.down)))

    def _products(self, x_pk: Tensor, weights: Sequence[Weight]) -> Tensor:
        """Each expert's product with its pairs."""
        parts = zip(torch.split(x_pk, self._counts), weights, strict=True)
        return torch.cat([self._ops.linear(part, weight) for part, weight in parts if len(part)])

    def _summed(self, sorted_pn: Tensor) -> Tensor:
        outputs = torch.empty_like(sorted_pn)
        outputs[self._order_p] = sorted_pn
        by_token = outputs.view(-1, self._num_chosen, outputs.shape[1])
        total = by_token[:, 0] * self.factors[:, 0, None]
        for place in range(1, self._num_chosen):
            total += by_token[:, place] * self.factors[:, place, None]
        return total
