"""What a step returns besides its tokens, for the requests that asked for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from headway.executor.sampling.draw import parts
from headway.model.decoder import Decoder
from headway.plan import Chunk, Embedding
from headway.request import Request
from headway.sampling_params import Sampling, TokenLogprobs, pack_top

SLICE = 256  # prompt positions whose logits are computed at once; bounds the memory
ALIGNED = 4  # float32 numbers that a GPU loads at once


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
    """Logprobs of each target under its row of logits, and of the `num_top` best tokens.

    A row's values do not depend on other rows: a GPU would order the sums of rows by their
    alignment, so all rows are aligned. Of equal logprobs the lower token is first.
    """
    vocab_size = logits_tv.shape[1]
    found: list[TokenLogprobs] = []
    for part in parts(logits_tv):
        aligned = F.pad(logits_tv[part].float(), (0, -vocab_size % ALIGNED), value=-torch.inf)
        logprobs = aligned.log_softmax(-1)[:, :vocab_size]
        own = logprobs.gather(1, targets_t[part, None])
        ranks = (logprobs > own).sum(-1) + 1
        values, ids = logprobs.topk(min(num_top, vocab_size), -1)
        tops = (
            pack_top(sorted(zip(*pair, strict=True), key=lambda found: (-found[1], found[0])))
            for pair in zip(ids.tolist(), values.tolist(), strict=True)
        )
        columns = (targets_t[part].tolist(), own[:, 0].tolist(), ranks.tolist(), tops)
        found += map(TokenLogprobs, *columns)
    return found
