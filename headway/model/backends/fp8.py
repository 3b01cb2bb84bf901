"""The GPU's arithmetic with fp8 weights: matrices of the layers in 8 bits, the rest as in gpu.py.

A decode of one row keeps the row in the model's type. All other passes quantize the rows too, each
with its own scale: in the norm, in the gated activation, and after attention. Embeddings, the
output head, norms and biases keep the model's type.

Shapes as in base.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from headway.model.backends.attention_kernels import AttentionKernels
from headway.model.backends.base import ForwardPass, LayerWeights, PassArguments, Weight
from headway.model.backends.gpu import FEW_ROWS, GpuBackend, interleaved
from headway.model.backends.gpu_passes import FusedDecodePass, GpuPass, UnfusedPass, multiply
from headway.model.backends.plain import PlainWeight
from headway.model.backends.split import add_parts
from headway.model.kernels.activation import silu_multiply, silu_multiply_quantized
from headway.model.kernels.norm import rms_norm, rms_norm_quantized
from headway.model.kernels.products.fp8 import QuantizedRows, quantize_rows, scaled_linear
from headway.model.kernels.products.linear import linear
from headway.model.sharding import Shard
from headway.model.weights.checkpoint import Checkpoint
from headway.model.weights.fp8 import FP8, Fp8Matrix, quantize, stacked

Rows = Tensor | QuantizedRows
# Up to these rows our kernel is faster than cuBLASLt, with any matrix and with one of few outputs,
# where cuBLASLt does not use all multiprocessors. Measured on an H200.
MAX_KERNEL_ROWS, MAX_NARROW_KERNEL_ROWS = 64, 256
FEW_OUTPUTS = 8192


class Fp8Backend(GpuBackend):
    """Matrices of the layers in fp8: those of the file, or quantized when they are loaded.

    Norm weights are multiplied into the matrices before these are quantized, except in
    `float_layers`, which stay floats. The matrices of a file in fp8 are used unchanged, so
    `folds_norms` is false for one, and matrices that it stores as floats stay floats.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: str = "cuda",
        kv_dtype: torch.dtype | None = None,
        attention: AttentionKernels | None = None,
        *,
        folds_norms: bool = True,
        float_layers: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(dtype, device, kv_dtype, attention)
        self.folds_norms, self.float_layers = folds_norms, float_layers
        self.name, self.matrix_itemsize = "gpu fp8", FP8.itemsize

    def weight(self, checkpoint: Checkpoint, names: Sequence[str]) -> PlainWeight:
        if self.folds_norms or ".layers." not in names[0]:
            return super().weight(checkpoint, names)
        parts = [checkpoint.read_fp8(f"{name}.weight") for name in names]
        found = [part for part in parts if part is not None]
        if len(found) < len(parts):
            return super().weight(checkpoint, names)
        return self._stored(stacked(found), self._bias(checkpoint, names))

    def _stored(self, matrix: Fp8Matrix, bias: Tensor | None) -> PlainWeight:
        return PlainWeight(
            matrix.q.to(self.device).contiguous(), bias, matrix.scale.to(self.device)
        )

    def prepared(self, number: int, layer: LayerWeights) -> LayerWeights:
        if not self.folds_norms:
            return replace(layer, gate_up=interleaved(layer.gate_up))
        folded, round_ = super().prepared(number, layer), self._quantized
        if number in self.float_layers:
            return folded
        return replace(
            folded, qkv=round_(folded.qkv), output=round_(folded.output),
            gate_up=round_(folded.gate_up), down=round_(folded.down),
        )  # fmt: skip

    def _quantized(self, weight: Weight) -> PlainWeight:
        assert isinstance(weight, PlainWeight)
        return self._stored(quantize(weight.matrix), weight.bias)

    def begin(self, given: PassArguments) -> ForwardPass:
        batch, epsilon = given.batch, given.config.norm_eps
        num_rows = len(batch.tokens_t)
        if batch.num_decodes < num_rows or not self.attention.fuses_decode or num_rows > FEW_ROWS:
            return ScaledPass(UnfusedPass(given, self.attention), epsilon, self.shard)
        if num_rows > 1:
            return ScaledPass(FusedDecodePass(given), epsilon, self.shard)
        kind = FusedDecodePass if self.folds_norms else NormedDecodePass
        return kind(given, self.shard)


class NormedDecodePass(FusedDecodePass):
    """A decode of one row, where norm weights are not part of the matrices."""

    def _normed_product(
        self, x: Tensor, norm: Tensor | None, weight: Weight, *, is_gated: bool = False
    ) -> Tensor:
        assert norm is not None, "a GPU runs models with norms of inputs only"
        return multiply(rms_norm(x, norm, self._config.norm_eps), weight, is_gated=is_gated)


class ScaledPass(ForwardPass):
    """Any batch: rows are quantized before each product with an fp8 matrix."""

    def __init__(self, steps: GpuPass, epsilon: float, shard: Shard | None) -> None:
        self._steps, self._epsilon, self._shard = steps, epsilon, shard
        self._columns = (shard.attended, shard.inner) if shard else ([], [])
        self._pending: Tensor | None = None  # to be added to x, by the next norm if possible

    def layer(self, number: int, layer: LayerWeights, x: Tensor) -> Tensor:
        self._run(number, layer, x)
        self._add_pending(x)
        return x

    def layers(self, layers: Sequence[LayerWeights], x: Tensor) -> Tensor:
        for number, layer in enumerate(layers):
            self._run(number, layer, x)
        self._add_pending(x)
        return x

    def _run(self, number: int, layer: LayerWeights, x: Tensor) -> None:
        """One layer; x is complete after `_add_pending`."""
        qkv = product(self._normed(x, layer.input_norm, layer.qkv), layer.qkv)
        attended = self._steps.attention(number, layer, qkv)
        self._add(x, attended, layer.output, self._columns[0])
        normed = self._normed(x, layer.post_norm, layer.gate_up)
        self._add(x, self._gated(normed, layer), layer.down, self._columns[1])

    def _normed(self, x: Tensor, norm: Tensor | None, weight: Weight) -> Rows:
        assert norm is not None
        if not is_fp8(weight):
            self._add_pending(x)
            return rms_norm(x, norm, self._epsilon)
        added, self._pending = self._pending, None
        return rms_norm_quantized(x, norm, self._epsilon, added)

    def _gated(self, normed: Rows, layer: LayerWeights) -> Rows:
        """The activation of the MLP; ranks of a group quantize it after they exchange it."""
        if uses_kernel(normed, layer.gate_up):
            return product(normed, layer.gate_up, is_gated=True)
        is_quantized = is_fp8(layer.down) and self._shard is None
        gate = silu_multiply_quantized if is_quantized else silu_multiply
        return gate(product(normed, layer.gate_up))

    def _add(self, x: Tensor, inner: Rows, weight: Weight, columns: list[range]) -> None:
        """x += inner w, at once or later; `columns` of `inner` are those of each rank of a group."""
        if self._shard is not None:
            assert isinstance(inner, Tensor)
            add_parts(x, inner, self._shard, columns, partial(product, weight=weight))
        elif uses_kernel(inner, weight):
            product(inner, weight, residual_mn=x, out_mn=x)
        else:
            self._pending = product(inner, weight)

    def _add_pending(self, x: Tensor) -> None:
        if self._pending is not None:
            x += self._pending
        self._pending = None


def product(
    x: Rows,
    weight: Weight,
    *,
    is_gated: bool = False,
    residual_mn: Tensor | None = None,
    out_mn: Tensor | None = None,
) -> Tensor:
    """x w, then silu of one output times the next if gated, plus the residual if one is given.

    The result is in `out_mn` if that is given; it may be the residual. Only our kernel has a gate.
    """
    assert isinstance(weight, PlainWeight)
    has_kernel = uses_kernel(x, weight)
    if weight.scale is not None and isinstance(x, Tensor):
        x = quantize_rows(x)
    if has_kernel:
        assert isinstance(x, QuantizedRows)
        if out_mn is None:
            shape = len(x.values_tk), len(weight.matrix) // (2 if is_gated else 1)
            out_mn = torch.empty(shape, dtype=x.dtype, device=x.values_tk.device)
        return linear(
            x.values_tk, weight.matrix, x_scale_m=x.scale_t, scale_n=weight.scale,
            bias_n=weight.bias, is_gated=is_gated, residual_mn=residual_mn, out_mn=out_mn,
        )  # fmt: skip
    assert not is_gated, "only our kernel has a gate"
    if isinstance(x, QuantizedRows):
        assert weight.scale is not None
        out = scaled_linear(x, weight.matrix, weight.scale, weight.bias)
    else:
        out = F.linear(x, weight.matrix, weight.bias)
    if residual_mn is not None:
        out += residual_mn
    return out if out_mn is None else out_mn.copy_(out)


def is_fp8(weight: Weight) -> bool:
    return isinstance(weight, PlainWeight) and weight.scale is not None


def uses_kernel(x: Rows, weight: Weight) -> bool:
    """Whether our kernel computes this product of quantized rows; it needs two."""
    num_rows = len(x.values_tk if isinstance(x, QuantizedRows) else x)
    if not isinstance(weight, PlainWeight) or weight.scale is None:
        return False
    is_narrow = len(weight.matrix) <= FEW_OUTPUTS
    return 1 < num_rows <= (MAX_NARROW_KERNEL_ROWS if is_narrow else MAX_KERNEL_ROWS)
