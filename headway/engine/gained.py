"""What one sample of a request has gained so far, as one record."""

from __future__ import annotations

from dataclasses import dataclass, field

from headway.engine.messages import FinishInfo, SampleUpdate
from headway.plan import Embedding
from headway.sampling_params import TokenLogprobs


@dataclass(slots=True, eq=False)
class Gained:
    """All updates of one sample, merged."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, TokenLogprobs]] = field(default_factory=list)
    end: FinishInfo | None = None
    embedding: Embedding | None = None

    def add(self, update: SampleUpdate) -> None:
        self.tokens += update.tokens
        self.logprobs += update.logprobs or ()
        self.prompt_logprobs += update.prompt_logprobs or ()
        if update.end is not None:
            self.end, self.embedding = update.end, update.embedding

    def between(
        self, id: str, number: int, start: tuple[int, bool], end: tuple[int, bool]
    ) -> SampleUpdate:
        """What was gained between two positions: a number of tokens, and whether it had ended."""
        (first, _), (last, has_ended) = start, end
        return SampleUpdate(
            id, number, self.tokens[first:last], self.logprobs[first:last] or None,
            end=self.end if has_ended else None,
        )  # fmt: skip

    def update(self, id: str, number: int) -> SampleUpdate:
        """One update that is worth all."""
        return SampleUpdate(
            id, number, self.tokens.copy(), self.logprobs.copy() or None,
            self.prompt_logprobs.copy() or None, self.end, self.embedding,
        )  # fmt: skip
