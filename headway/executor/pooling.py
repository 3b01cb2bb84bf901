"""Embeddings: the hidden states of a prompt, after the final norm, pooled into one unit vector.

A prompt may be computed in several chunks, and partly again after a preemption. A mean is therefore
kept as a float64 sum per request, together with the number of positions it covers: positions that
are computed again are not added again. On a CPU the positions are added one by one, in order, so
that the sum does not depend on how the prompt was cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from headway.model.decoder import Decoder
from headway.plan import Chunk, Embedding
from headway.request import Request

SLICE = 256  # positions that are normalized at once; bounds the memory this takes


@dataclass(slots=True)
class PartialSum:
    """The sum of a prompt's hidden states over positions [0, num_summed), in float64."""

    vector: Tensor
    num_summed: int = 0


class Pooler:
    """Pools the chunks of embedding requests; other requests cost one comparison per chunk.

    Sums are kept by request, not by row: a swapped request resumes in another row. A request that
    is aborted takes its sum with it.
    """

    def __init__(self) -> None:
        self._sums = WeakKeyDictionary[Request, PartialSum]()

    def pool(
        self, decoder: Decoder, chunks: list[Chunk], hidden: Tensor, starts: list[int]
    ) -> dict[Request, Embedding]:
        """Embeddings of the prompts that end in this step; `starts` are the chunks' first rows."""
        found: dict[Request, Embedding] = {}
        for start, chunk in zip(starts, chunks, strict=True):
            request, pooling = chunk.request, chunk.request.params.pooling
            if pooling is None:
                continue
            rows = hidden[start : start + chunk.end - chunk.start]
            if pooling == "mean":
                self._add(decoder, chunk, rows)
                if chunk.is_last:
                    found[request] = unit_vector(self._sums.pop(request).vector)
            elif chunk.is_last:
                found[request] = unit_vector(decoder.final_norm(rows[-1:])[0])
        return found

    def _add(self, decoder: Decoder, chunk: Chunk, rows: Tensor) -> None:
        """Add the positions of a chunk that the request's sum does not cover yet."""
        total = self._sums.get(chunk.request)
        if total is None:
            zeros = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
            total = self._sums[chunk.request] = PartialSum(zeros)
        num_known = total.num_summed - chunk.start
        assert num_known >= 0, f"{chunk.request} skips positions before {chunk.start}"
        for begin in range(num_known, len(rows), SLICE):
            add_rows(total.vector, decoder.final_norm(rows[begin : begin + SLICE]))
        total.num_summed = max(total.num_summed, chunk.end)


def add_rows(total: Tensor, rows: Tensor) -> None:
    """Add rows [N, hidden] to a float64 sum in place; in order on a CPU, in any order elsewhere."""
    if total.device.type != "cpu":
        total += rows.sum(0, dtype=torch.float64)
        return
    sums = total.numpy()
    for row in rows.double().numpy():
        sums += row


def unit_vector(pooled: Tensor) -> Embedding:
    """A vector scaled to length 1, in float32; one of length 0 stays as it is."""
    vector = pooled.double().cpu().numpy()
    length = np.sqrt(np.square(vector).sum())
    return np.asarray(vector / length if length else vector, dtype=np.float32)
