"""The decoder's arithmetic in plain torch: the reference, and the fallback without kernels.

Works on any device and with any float type. Attention computes one sequence at a time: no padding,
and no more memory than the longest sequence needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from headway.model.backends.base import ForwardPass, LayerWeights, PassArguments, Weight
from headway.model.backends.split import StepwisePass
from headway.model.config import ModelConfig
from headway.model.experts import Experts
from headway.model.families.variant import SWIGLU_ALPHA, SWIGLU_LIMIT
from headway.model.sharding import Shard
from headway.model.weights.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class PlainWeight:
    matrix: Tensor  # [N, K]
    bias: Tensor | None
    scale: Tensor | None = None  # [N], of an fp8 matrix

    @property
    def num_bytes(self) -> int:
        return self.matrix.nbytes + (0 if self.scale is None else self.scale.nbytes)

    def rows(self, ids: Tensor) -> Tensor:
        return self.matrix[ids]


class PlainBackend:
    """torch's operations, in one float type."""

    uses_rope_table = keeps_passes = supports_padding = False

    def __init__(self, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        self.dtype, self.device = dtype, torch.device(device)
        self.matrix_itemsize: float = dtype.itemsize  # bytes of a number in a layer's matrices
        self.shard: Shard | None = None
        self.name = f"torch {dtype}".replace("torch.", "")

    def weight(self, checkpoint: Checkpoint, names: Sequence[str]) -> PlainWeight:
        matrix = self._stacked(checkpoint, [f"{name}.weight" for name in names])
        return PlainWeight(matrix, self._bias(checkpoint, names))

    def _bias(self, checkpoint: Checkpoint, names: Sequence[str]) -> Tensor | None:
        has_bias = checkpoint.has(f"{names[0]}.bias")
        return self._stacked(checkpoint, [f"{n}.bias" for n in names]) if has_bias else None

    def vector(self, checkpoint: Checkpoint, name: str) -> Tensor:
        return self._stacked(checkpoint, [name])

    def _stacked(self, checkpoint: Checkpoint, names: list[str]) -> Tensor:
        if len(names) == 1:
            return checkpoint.read(names[0]).to(self.device, self.dtype).contiguous()
        return torch.cat([checkpoint.read(n).to(self.device, self.dtype) for n in names])

    def prepared(self, number: int, layer: LayerWeights) -> LayerWeights:
        return layer

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        assert isinstance(weight, PlainWeight)
        return F.linear(x, weight.matrix, weight.bias)

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = x.float()  # as the models were trained: mean in float32, then rounded
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        return weight * wide.to(x.dtype)

    def gated(self, x: Tensor, activation: str) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        if activation == "clamped_swiglu":
            gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
            return (up + 1) * (gate * torch.sigmoid(SWIGLU_ALPHA * gate))
        return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up

    def route(self, logits: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
        number = experts.num_experts
        factors, chosen = torch.softmax(logits[:, :number].float(), -1).topk(experts.num_chosen)
        if experts.normalizes:
            factors /= factors.sum(-1, keepdim=True)
        gate = logits[:, number:].float().sigmoid() if experts.has_shared_gate else None
        shared = torch.ones_like(factors[:, :1]) if gate is None else gate
        return chosen, torch.cat([factors, shared], dim=1).to(logits.dtype)

    def kv_blocks(self, config: ModelConfig, num_blocks: int, block_size: int) -> Tensor:
        shape = (config.num_layers, 2, config.num_kv_heads, block_size, config.head_dim)
        return torch.empty((num_blocks, *shape), dtype=self.dtype, device=self.device)

    def begin(self, given: PassArguments) -> ForwardPass:
        return PlainPass(self, given)


class PlainPass(StepwisePass):
    """One batch; attention computes one sequence at a time."""

    def __init__(self, backend: PlainBackend, given: PassArguments) -> None:
        config, batch, self._blocks, cosine_td, sine_td, query_scale_t = given[:6]
        super().__init__(backend, config)
        tables, row_ids_s = batch.tables_sw, batch.row_ids_s
        self._tables = (tables if row_ids_s is None else tables[row_ids_s.long()]).long()
        self._window = batch.window
        self._starts, self._ends = batch.starts_s.tolist(), batch.ends_s.tolist()
        self._cosine = cosine_td.to(backend.dtype)[:, None]
        self._sine = sine_td.to(backend.dtype)[:, None]
        self._query_scale = None if query_scale_t is None else query_scale_t[:, None, None]
        self._rows = (batch.slots_t >= 0).nonzero().squeeze(1)
        slots, size = batch.slots_t[self._rows], self._blocks.shape[4]
        self._slots = slots // size, slots % size

    def rotate_and_store(
        self,
        layer: int,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        *,
        is_rotated: bool = True,
    ) -> None:
        q_thd, k_tgd, v_tgd = self._split(qkv)
        for heads, norm in ((q_thd, q_norm), (k_tgd, k_norm)):
            if norm is not None:
                whole = heads.flatten(1) if self._config.has_whole_qk_norm else heads
                heads.copy_(self._normed(whole, norm).view(heads.shape))
            if is_rotated:
                heads.copy_(self._rotated(heads))
        if self._query_scale is not None:
            q_thd *= self._query_scale.to(q_thd.dtype)
        block, offset = self._slots
        self._blocks[block, layer, 0, :, offset] = k_tgd[self._rows]
        self._blocks[block, layer, 1, :, offset] = v_tgd[self._rows]

    def attention(self, layer: int, qkv: Tensor, sinks: Tensor | None = None) -> Tensor:
        q_thd, _, _ = self._split(qkv)
        out, scale = torch.empty_like(q_thd), self._config.attention_scale
        scale = q_thd.shape[2] ** -0.5 if scale is None else scale
        for s, end in enumerate(self._ends):
            first, last = self._starts[s], self._starts[s + 1]
            begin = self._first_read(end - (last - first))
            k_gpd, v_gpd = self._cached(layer, s, begin, end)
            seen = torch.arange(begin, end, device=qkv.device)
            asking = seen[first - last :, None]
            mask = seen[None] <= asking
            if self._window is not None:
                mask &= seen[None] > asking - self._window
            attended = q_thd[first:last].transpose(0, 1), k_gpd, v_gpd
            if sinks is not None:
                attended, mask = _with_sinks(*attended, sinks / scale), F.pad(mask, (0, 1), value=1)
            q, k, v = (each[None] for each in attended)
            heads = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, enable_gqa=True, scale=scale
            )[0]
            out[first:last] = heads.transpose(0, 1)[..., : q_thd.shape[2]]
        return out.flatten(1)

    def _first_read(self, position: int) -> int:
        """The start of the first block that a token at this position reads."""
        size = self._blocks.shape[4]
        return 0 if self._window is None else max(0, position - self._window + 1) // size * size

    def _cached(self, layer: int, sequence: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values [G, end - begin, D] of a sequence, gathered from its blocks."""
        size = self._blocks.shape[4]
        blocks = self._tables[sequence, begin // size : -(-end // size)]
        held = self._blocks[blocks, layer]  # [B, 2, G, P, D]
        flat = held.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : end - begin]
        return flat[0], flat[1]

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        config = self._config
        heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        q, k, v = torch.split(qkv.view(len(qkv), sum(heads), config.head_dim), heads, dim=1)
        return q, k, v

    def _rotated(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        parts = (a * self._cosine - b * self._sine, b * self._cosine + a * self._sine)
        return torch.cat(parts, dim=-1)


def _with_sinks(
    q_hmd: Tensor, k_gpd: Tensor, v_gpd: Tensor, sinks_h: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values with one more position and dimension: its scores are the sinks."""
    more = sinks_h[:, None, None].expand(-1, q_hmd.shape[1], 1)
    k_gpd, v_gpd = F.pad(k_gpd, (0, 1, 0, 1)), F.pad(v_gpd, (0, 1, 0, 1))
    k_gpd[:, -1, -1] = 1
    return torch.cat([q_hmd, more.to(q_hmd.dtype)], dim=-1), k_gpd, v_gpd
