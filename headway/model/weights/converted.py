"""Weights of families whose files differ from the decoder's form: split, reordered and scaled."""

from __future__ import annotations

from dataclasses import replace

import torch

from headway.model.families.rope import pair_order
from headway.model.sharding import EVERYTHING, Part
from headway.model.weights.checkpoint import Checkpoint, QuantizedMatrix
from headway.model.weights.fp8 import Fp8Matrix

# Of a matrix in the file: the parts that it consists of.
FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


class ConvertedCheckpoint(Checkpoint):
    """A checkpoint in the decoder's form.

    The rows of q_proj and k_proj of each head are ordered so that row i and row i + head_dim / 2
    rotate together, if only a part of them rotates: the scores do not change.
    """

    def __init__(self, stored: Checkpoint) -> None:
        super().__init__(stored.config, stored.path)
        self._shapes, self._stored = stored.config.shapes(), stored
        config = stored.config
        rotated = config.rope.num_rotated(config.head_dim)
        self._order = None if rotated == config.head_dim else pair_order(rotated, config.head_dim)

    def has(self, name: str) -> bool:
        return name in self._shapes and self._stored.has(self._place(name, EVERYTHING)[0])

    def read(self, name: str, part: Part = EVERYTHING) -> torch.Tensor:
        rows = self._ordered(name, self._stored.read(*self._place(name, part)))
        factor = self._factor(name)
        return rows if factor == 1.0 else rows.float() * factor

    def read_groups(self, name: str, part: Part = EVERYTHING) -> QuantizedMatrix | None:
        found, factor = self._stored.read_groups(*self._place(name, part)), self._factor(name)
        if found is None:
            return None
        return replace(
            found,
            q=self._ordered(name, found.q),
            scale=self._ordered(name, found.scale) * factor,
            minimum=self._ordered(name, found.minimum) * factor,
        )

    def read_fp8(self, name: str, part: Part = EVERYTHING) -> Fp8Matrix | None:
        found, factor = self._stored.read_fp8(*self._place(name, part)), self._factor(name)
        if found is None:
            return None
        q = self._ordered(name, found.q.view(torch.uint8)).view(found.q.dtype)
        return Fp8Matrix(q=q, scale=self._ordered(name, found.scale) * factor)

    def group_bits(self, name: str) -> int | None:
        return self._stored.group_bits(self._place(name, EVERYTHING)[0])

    def _place(self, name: str, part: Part) -> tuple[str, Part]:
        """The name in the file, and where the tensor's part is in it."""
        if not self.config.has_fused_projections:
            return name, part
        for fused, parts in FUSED.items():
            for number, one in enumerate(parts):
                if f".{one}." not in name:
                    continue
                before = (name.replace(one, other) for other in parts[:number])
                first = sum(self._shapes[each][0] for each in before)
                start, stop, _ = part.rows.indices(self._shapes[name][0])
                return name.replace(one, fused), Part(
                    slice(first + start, first + stop), part.columns
                )
        return name, part

    def _ordered(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Rows of whole heads in the decoder's order."""
        if self._order is None or not (".q_" in name or ".k_" in name):
            return rows
        heads = rows.view(-1, self.config.head_dim, *rows.shape[1:])
        return heads[:, self._order].reshape(rows.shape)

    def _factor(self, name: str) -> float:
        config = self.config
        kind = name.split(".")[-2]
        if kind == "q_proj":
            return config.query_factor
        if kind in ("o_proj", "down_proj"):
            return config.residual_factor
        return config.logit_factor if name == "model.norm.weight" else 1.0
