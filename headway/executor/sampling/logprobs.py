"""What a step returns besides its tokens, for the requests that asked for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headway.executor.sampling.draw import parts
from headway.model.decoder import Decoder
from headway.plan import Chunk, Embedding
from headway.request import Request
from headway.sampling_params import Sampling, TokenLogprobs

SLICE = 256  # prompt positions whose logits are computed at once; bounds the memory


@dataclass(slots=True)
class ExtraOutputs:
    """Logprobs of generated tokens, logprobs of prompt tokens by position, and embeddings."""

    logprobs: dict[Request, list[TokenLogprobs]] = field(default_factory=dict)
    prompt: dict[Request, list[tuple[int, TokenLogprobs]]] = field(default_factory=dict)
    embeddings: dict[Request, Embedding] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.logprobs or self.prompt or self.embeddings)

    def add_logprobs(self, found: Mapping[int, TokenLogprobs], requests: Iterable[Request]) -> None:
        """Add the sampler's logprobs, which are keyed by row, to their requests."""
        if found:
            for request in requests:
                if request.row in found:
                    self.logprobs.setdefault(request, []).append(found[request.row])

    def score_prompts(
        self, decoder: Decoder, chunks: list[Chunk], hidden: Tensor, starts: list[int]
    ) -> None:
        """Compute the prompt logprobs of these chunks; `starts` are the chunks' first rows."""
        for start, chunk in zip(starts, chunks, strict=True):
            sampling, request = chunk.request.params.sampling, chunk.request
            if not isinstance(sampling, Sampling) or sampling.prompt_logprobs is None:
                continue
            # The last position predicts no prompt token.
            end = min(chunk.end, request.num_prompt - 1)
            for first in range(chunk.start, end, SLICE):
                stop, row = min(first + SLICE, end), start + first - chunk.start
                logits = decoder.logits(hidden[row : row + stop - first])
                targets = torch.tensor(request.prompt[first + 1 : stop + 1], device=logits.device)
                scores = compute_logprobs(logits, targets, sampling.prompt_logprobs)
                self.prompt.setdefault(request, []).extend(enumerate(scores, start=first + 1))


def compute_logprobs(logits_tv: Tensor, targets_t: Tensor, num_top: int) -> list[TokenLogprobs]:
    """Logprobs of each target under its row of logits, and of the `num_top` best tokens."""
    found: list[TokenLogprobs] = []
    for part in parts(logits_tv):
        logprobs = logits_tv[part].float().log_softmax(-1)
        own = logprobs.gather(1, targets_t[part, None])
        ranks = (logprobs > own).sum(-1) + 1
        values, ids = logprobs.topk(min(num_top, logprobs.shape[-1]), -1)
        tops = (
            list(zip(*pair, strict=True))
            for pair in zip(ids.tolist(), values.tolist(), strict=True)
        )
        columns = (targets_t[part].tolist(), own[:, 0].tolist(), ranks.tolist(), tops)
        found += map(TokenLogprobs, *columns)
    return found
