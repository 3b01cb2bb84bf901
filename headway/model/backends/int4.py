"""The GPU's arithmetic with 4-bit matrices as files store them, with rows in the model's type.

Matrices of the layers stay in 4 bits (kernels/products/int4.py), those that the file stores in floats
stay floats, and the rest is as in gpu.py. Norm weights are not part of the matrices. More rows than
MAX_ROWS are multiplied by a dequantized copy, which lives for one product.

Shapes as in base.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from headway.model.backends.attention_kernels import AttentionKernels
from headway.model.backends.base import ForwardPass, LayerWeights, PassArguments, Weight
from headway.model.backends.gpu import FEW_ROWS, GpuBackend, interleaved
from headway.model.backends.gpu_passes import FusedDecodePass, GpuPass, UnfusedPass, multiply_into
from headway.model.backends.plain import PlainWeight
from headway.model.backends.split import add_parts
from headway.model.kernels.launch import is_compiling
from headway.model.kernels.norm import rms_norm
from headway.model.kernels.products.gated import gated_product
from headway.model.kernels.products.int4 import MAX_ROWS, Int4Matrix, dequantized, int4_linear, pack
from headway.model.quantization import Quantization
from headway.model.sharding import Shard
from headway.model.weights.checkpoint import Checkpoint, QuantizedMatrix

GROUP, TENSORS = 32, ("q", "scale", "minimum")  # of a QuantizedMatrix: inputs of a group


class Int4Backend(GpuBackend):
    """Matrices of the layers in the 4 bits of the file."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: str = "cuda",
        kv_dtype: torch.dtype | None = None,
        attention: AttentionKernels | None = None,
        *,
        quantization: Quantization,
    ) -> None:
        super().__init__(dtype, device, kv_dtype, attention)
        self.name, self.matrix_itemsize = "gpu int4", quantization.int4_itemsize

    def weight(self, checkpoint: Checkpoint, names: Sequence[str]) -> Weight:  # type: ignore[override]
        found = [self._groups(checkpoint, f"{name}.weight") for name in names]
        parts = [each for each in found if each is not None]
        if len(parts) < len(found):
            return super().weight(checkpoint, names)
        given = checkpoint.config.quantization
        packed = pack(*_merged(parts, given.columns if given else None))
        return packed._replace(bias_n=self._bias(checkpoint, names))

    def _groups(self, checkpoint: Checkpoint, name: str) -> QuantizedMatrix | None:
        """The matrix, on this device; None unless it is one of 4 bits."""
        found = checkpoint.read_groups(name) if ".layers." in name else None
        if found is None or found.bits != 4:
            return None
        tensors = {each: getattr(found, each).to(self.device) for each in TENSORS}
        return replace(found, **tensors)

    def prepared(self, number: int, layer: LayerWeights) -> LayerWeights:
        weight = layer.gate_up
        if not isinstance(weight, Int4Matrix):
            return replace(layer, gate_up=interleaved(weight))
        order_n = torch.arange(weight.num_outputs, device=self.device).view(2, -1).T.flatten()
        return replace(layer, gate_up=weight.ordered(order_n))

    def begin(self, given: PassArguments) -> ForwardPass:
        num_rows = len(given.batch.tokens_t)
        is_small = given.batch.num_decodes == num_rows <= FEW_ROWS
        is_fused = is_small and self.attention.fuses_decode
        steps = FusedDecodePass(given) if is_fused else UnfusedPass(given, self.attention)
        return Int4Pass(steps, given.config.norm_eps, self.shard)


class Int4Pass(ForwardPass):
    """Any batch."""

    def __init__(self, steps: GpuPass, epsilon: float, shard: Shard | None) -> None:
        self._steps, self._epsilon, self._shard = steps, epsilon, shard
        self._columns = (shard.attended, shard.inner) if shard else ([], [])

    def layer(self, number: int, layer: LayerWeights, x: Tensor) -> Tensor:
        assert layer.input_norm is not None and layer.post_norm is not None
        qkv = product(rms_norm(x, layer.input_norm, self._epsilon), layer.qkv)
        attended = self._steps.attention(number, layer, qkv)
        self._add(x, attended, layer.output, self._columns[0])
        normed = rms_norm(x, layer.post_norm, self._epsilon)
        inner = product(normed, layer.gate_up, is_gated=True)
        self._add(x, inner, layer.down, self._columns[1])
        return x

    def _add(self, x: Tensor, inner: Tensor, weight: Weight, columns: list[range]) -> None:
        """x += inner w, in place; `columns` of the whole `inner` are those of each rank of a group."""
        if self._shard is None:
            product(inner, weight, residual_mn=x, out_mn=x)
        else:
            add_parts(x, inner, self._shard, columns, partial(product, weight=weight))


def product(
    x: Tensor,
    weight: Weight,
    *,
    is_gated: bool = False,
    residual_mn: Tensor | None = None,
    out_mn: Tensor | None = None,
) -> Tensor:
    """x w; the options are those of linear.linear. A gate has neither a residual nor `out_mn`."""
    if isinstance(weight, Int4Matrix):
        if len(x) <= MAX_ROWS or is_compiling():
            out = int4_linear(x, weight, is_gated=is_gated, residual_mn=residual_mn, out_mn=out_mn)
            if not is_compiling():  # else the kernel of more rows is compiled too
                return out
        weight = PlainWeight(dequantized(weight, x.dtype), weight.bias_n)
    if is_gated:
        assert isinstance(weight, PlainWeight)
        return gated_product(x, weight.matrix, weight.bias)
    return multiply_into(x, weight, residual_mn, out_mn)


def _merged(parts: list[QuantizedMatrix], columns: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Matrices stacked along the outputs: numbers, scales and zero points of groups of `columns`.

    Without `columns` groups are whole rows. They have 32 inputs where the part of a rank cuts them.
    """
    q, scale, minimum = (torch.cat([getattr(part, name) for part in parts]) for name in TENSORS)
    # A zero point is an integer, which its product with the scale determines.
    zero = (-minimum / scale).nan_to_num(0.0, 0.0, 0.0).round()
    size = columns or q.shape[1]
    if q.shape[1] % size == 0:
        groups = [each.view(len(q), -1, size // GROUP) for each in (scale, zero)]
        if all(torch.equal(each[:, :, :1].expand_as(each), each) for each in groups):
            scale, zero = (each[:, :, 0] for each in groups)
    return q, scale, zero
