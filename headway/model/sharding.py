"""The part of a model that one rank of a tensor-parallel group computes.

Query and key-value heads, the inner size of the MLP and the vocabulary are divided among the ranks;
hidden states are whole on every rank. `fast` sums divide the inputs of the output projections
(o_proj, down_proj) and add the partial results of all ranks. `exact` sums divide their outputs: the
inputs are gathered first, so every sum has the same terms in the same order as in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from math import gcd
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from headway.errors import ConfigError
from headway.model.config import ModelConfig
from headway.model.experts import matrix_kind

UNIT = 32  # widths are divided in multiples of it: quantized groups and vector lanes stay whole
WHOLE = slice(None)


class Collectives(Protocol):
    """Communication between the ranks; every rank must make the same calls in the same order."""

    rank: int
    size: int

    def gather(self, x: Tensor, widths: tuple[int, ...]) -> Tensor:
        """The columns [T, sum of widths] of all ranks; rank r has x [T, widths[r]]."""
        ...

    def sum(self, x: Tensor) -> None:
        """Replace x by its sum over all ranks, in place."""
        ...

    def broadcast(self, x: Tensor) -> None:
        """Replace x by that of rank 0, in place."""
        ...


class Part(NamedTuple):
    """The rows and columns of a tensor that a rank reads."""

    rows: slice = WHOLE
    columns: slice = WHOLE


EVERYTHING = Part()


class Shard:
    """One rank's part of a model, and the ranges of all ranks."""

    def __init__(self, model: ModelConfig, collectives: Collectives, is_exact: bool) -> None:
        """ConfigError if the heads of the whole model cannot be divided."""
        self.model, self.collectives, self.is_exact = model, collectives, is_exact
        self.rank, self.size = collectives.rank, collectives.size
        check_size(model, self.size)
        group = model.num_heads // model.num_kv_heads
        # With fewer key-value heads than ranks, several ranks have the same.
        copies = max(1, self.size // model.num_kv_heads)
        own = divided(model.num_kv_heads, self.size // copies)
        self.kv_heads = [heads for heads in own for _ in range(copies)]
        # Those that use the rank's key-value heads, or its part of them.
        self.heads = [
            range(heads.start * group + part.start, heads.start * group + part.stop)
            for heads in own
            for part in divided(len(heads) * group, copies)
        ]
        self.attended = [_scaled(heads, model.head_dim) for heads in self.heads]  # columns
        self.inner = divided(model.intermediate_size, self.size, UNIT)  # columns of the MLP
        experts = model.experts
        self.of_experts = divided(experts.width if experts else 0, self.size, UNIT)  # of each
        self.of_shared_expert = divided(experts.shared_width if experts else 0, self.size, UNIT)
        # Outputs of o_proj and down_proj, with exact sums.
        self.hidden = divided(model.hidden_size, self.size, UNIT)
        # Token ids whose embeddings and logits a rank has.
        self.vocabulary = divided(model.vocab_size, self.size, UNIT)
        # The sizes that this rank computes with; the vocabulary is whole, as logits are.
        self.config = replace(
            model,
            num_heads=len(self.heads[self.rank]),
            num_kv_heads=len(self.kv_heads[self.rank]),
            intermediate_size=len(self.inner[self.rank]),
            experts=experts and replace(
                experts, width=len(self.of_experts[self.rank]),
                shared_width=len(self.of_shared_expert[self.rank]),
            ),
        )  # fmt: skip
        # Of any rank: all ranks choose sizes of captured steps by it.
        self.max_kv_heads = max(map(len, self.kv_heads))

    def part(self, name: str) -> Part:
        """The rows and columns of a tensor (by its Hugging Face name) that this rank has."""
        kind, rank = matrix_kind(name.rpartition(".")[0]), self.rank
        inner = self.of_experts if ".experts." in name else self.inner
        inner = self.of_shared_expert if ".shared_expert." in name else inner
        if kind in ("o_proj", "down_proj"):
            if self.is_exact:
                return Part(_slice(self.hidden[rank]))
            if name.endswith(".bias"):
                return EVERYTHING
            return Part(WHOLE, _slice((self.attended if kind == "o_proj" else inner)[rank]))
        keys = [_scaled(heads, self.model.head_dim) for heads in self.kv_heads]
        rows = {
            "self_attn": self.heads,  # the tensor `sinks` itself
            "q_proj": self.attended, "k_proj": keys, "v_proj": keys, "gate_proj": inner, "up_proj": inner,
            "embed_tokens": self.vocabulary, "lm_head": self.vocabulary,
        }.get(kind)  # fmt: skip
        return EVERYTHING if rows is None else Part(_slice(rows[rank]))

    def has(self, name: str) -> bool:
        """Whether this rank has a part of the tensor: with fast sums one rank adds a bias."""
        is_added = name.endswith(("o_proj.bias", "down_proj.bias")) and not self.is_exact
        return self.rank == 0 or not is_added

    def project(
        self, x: Tensor, inputs: list[range], multiply: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """An output projection of x, which has this rank's range of the inputs: [T, hidden]."""
        if self.is_exact:
            return self.gather(multiply(self.gather(x, inputs)), self.hidden)
        out = multiply(x)
        self.collectives.sum(out)
        return out

    def gather(self, x: Tensor, columns: list[range]) -> Tensor:
        """The columns of all ranks; x has this rank's range of them."""
        return self.collectives.gather(x, tuple(map(len, columns)))

    def embed(self, rows: Callable[[Tensor], Tensor], tokens_t: Tensor) -> Tensor:
        """Embeddings of tokens; `rows` looks up those of this rank, numbered from 0."""
        own = self.vocabulary[self.rank]
        places_t = tokens_t - own.start
        near_t = places_t.clamp(0, len(own) - 1)
        found = rows(near_t).masked_fill_((places_t != near_t)[:, None], 0.0)
        self.collectives.sum(found.view(torch.int32))  # bits of one rank and zeros: nothing rounds
        return found

    def sampled(self, sample: Callable[[], Tensor], count: int, device: torch.device) -> Tensor:
        """Tokens [count] int32 that rank 0 samples, on all ranks."""
        tokens = sample().int() if self.rank == 0 else torch.empty(0)
        if self.rank:
            tokens = torch.empty(count, dtype=torch.int32, device=device)
        self.collectives.broadcast(tokens)
        return tokens


def divided(count: int, size: int, unit: int = 1) -> list[range]:
    """`size` ranges of [0, count), longer ones first, in multiples of a unit that divides count."""
    unit = gcd(count, unit)
    least, extra = divmod(count // unit, size)
    ends = [0]
    for rank in range(size):
        ends.append(ends[-1] + (least + (rank < extra)) * unit)
    return [range(*pair) for pair in pairwise(ends)]


def check_size(model: ModelConfig, size: int) -> None:
    """ConfigError unless every rank of `size` gets heads and a part of the MLP."""
    if size > 1 and model.one_rank_only:
        raise ConfigError(
            f"tensor_parallel_size is {size}, but {model.one_rank_only}, which runs on one rank; use "
            "--tensor-parallel-size 1"
        )
    experts = model.experts
    widths = (model.intermediate_size, *((experts.width, experts.shared_width) if experts else ()))
    most = min(model.num_heads, *(width // gcd(width, UNIT) for width in widths if width))
    count = model.num_kv_heads  # ranks have whole ones, or as many ranks share each of them
    sizes = [each for each in range(1, most + 1) if each <= count or each % count == 0]
    if size not in sizes:
        raise ConfigError(
            f"tensor_parallel_size is {size}, but the {model.num_heads} query heads and "
            f"{model.num_kv_heads} key-value heads of this model can be divided among "
            f"{', '.join(map(str, sizes))} ranks; change --tensor-parallel-size"
        )


def _scaled(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)


def _slice(numbers: range) -> slice:
    return slice(numbers.start, numbers.stop)
