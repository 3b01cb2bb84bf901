"""Cosines and sines of positions, as tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from headway.model.families.rope import Rope


class Angles:
    """Cosines and sines of a rope, and the factors of queries, if they depend on positions."""

    def __init__(
        self, rope: Rope, head_dim: int, device: torch.device, growth: tuple[float, int] | None
    ) -> None:
        self._frequencies = torch.from_numpy(rope.inverse_frequencies(head_dim)).to(device)
        self._scale, self._growth = rope.scale, growth
        self._num_unrotated = head_dim // 2 - len(self._frequencies)  # pairs
        self._table: tuple[Tensor, Tensor, Tensor | None] | None = None

    def of(self, positions_t: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        angles, query_scale = positions_t[:, None].float() * self._frequencies, None
        cosine, sine = angles.cos() * self._scale, angles.sin() * self._scale
        if self._num_unrotated:
            cosine = F.pad(cosine, (0, self._num_unrotated), value=1.0)
            sine = F.pad(sine, (0, self._num_unrotated))
        if self._growth is not None:
            beta, length = self._growth
            query_scale = 1 + beta * torch.log(1 + torch.floor(positions_t / length))
        return cosine, sine, query_scale

    def table(self, length: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Those of at least the first `length` positions; the same tensors while they suffice."""
        if self._table is None or len(self._table[0]) < length:
            self._table = self.of(torch.arange(length, device=self._frequencies.device))
        return self._table
