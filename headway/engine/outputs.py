"""What came of a prompt: one result per prompt, one sample for each of its n, gathered from reports.

Text is made as tokens come where somebody watches it (a stream, or stop strings), else at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headway.errors import ExecutorError, PolicyError, RequestError
from headway.plan import Embedding
from headway.request import Request
from headway.sampling_params import SamplingParams, TokenLogprobs
from headway.text.detokenizer import TextStream
from headway.text.tokenizer import Tokenizer


@dataclass(slots=True, kw_only=True)
class Sample:
    """One continuation of a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # stop, length, abort or error; None while it runs
    stop_reason: str | int | None = None  # the stop string, or the stop token's id
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None


@dataclass(slots=True, kw_only=True)
class Timings:
    """Seconds since the prompt was given."""

    queue: float = 0.0  # until its first sample was seated
    first_token: float = 0.0
    total: float = 0.0


@dataclass(slots=True, kw_only=True)
class Result:
    """A prompt and what came of it."""

    id: str
    prompt: str | None
    prompt_token_ids: list[int]
    samples: list[Sample] = field(default_factory=list)
    timings: Timings = field(default_factory=Timings)
    cached_tokens: int = 0
    preemptions: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # None for the first token
    embedding: Embedding | None = field(default=None, compare=False)  # of `LLM.embed`: no samples
    error: RequestError | PolicyError | None = None  # why it was refused; it has no samples then

    @property
    def text(self) -> str:
        """The text of the first sample."""
        return self.samples[0].text if self.samples else ""

    @property
    def num_generated(self) -> int:
        return sum(len(sample.token_ids) for sample in self.samples)


def drop_sample(result: Result) -> None:
    """Drop the sampled token of an embedding; ExecutorError if the step that computes it failed."""
    for sample in result.samples:
        if sample.finish_reason == "error":
            raise ExecutorError(f"no embedding for prompt {result.id}: {sample.error}")
    result.samples = []


@dataclass(slots=True, kw_only=True)
class Delta:
    """What a streamed sample gained."""

    index: int  # of the prompt
    sample: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None


class ResultBuilder:
    """A result in the making: told of tokens and ends, asked for what is new."""

    def __init__(
        self,
        result: Result,
        requests: Sequence[Request],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        *,
        is_watched: bool,
    ) -> None:
        self.result = result
        self.requests = list(requests)
        self.num_open = len(self.requests)
        self._params = params
        self._tokenizer = tokenizer
        result.samples = [Sample(index=i) for i in range(len(self.requests))]
        if params.logprobs is not None:
            for sample in result.samples:
                sample.logprobs = []
        if params.prompt_logprobs is not None:
            result.prompt_logprobs = [None] * len(result.prompt_token_ids)
        self.is_read = is_watched or bool(params.stop_strings)  # as it is generated
        self.deltas: list[Delta] = []
        has_text = self.is_read and tokenizer is not None
        self.streams = [self._stream(r) for r in self.requests] if has_text else []
        self._is_watched = is_watched

    def _stream(self, request: Request) -> TextStream:
        assert self._tokenizer is not None
        params = self._params
        return TextStream(
            self._tokenizer, params.stop_strings, params.include_stop_str_in_output,
            params.skip_special_tokens, hidden_ids=request.params.stops,
            min_tokens=params.min_tokens,
        )  # fmt: skip

    def push(self, request: Request, tokens: Sequence[int]) -> tuple[str, int]:
        """New text of a sample, and how many of the tokens belong to it: fewer if a stop was hit."""
        if not self.streams:
            return "", len(tokens)
        stream, text = self.streams[request.sample], ""
        for number, token in enumerate(tokens, start=1):
            if stream.hit is not None:
                return text, number - 1
            text += stream.push([token])
        return text, len(tokens)

    def tell(
        self, request: Request, text: str, tokens: list[int], finish_reason: str | None = None
    ) -> None:
        """Keep what a watched sample gained until somebody takes it."""
        if self._is_watched:
            gained = Delta(
                index=0, sample=request.sample, text=text, token_ids=tokens,
                finish_reason=finish_reason,
            )  # fmt: skip
            self.deltas.append(gained)

    def hit(self, request: Request) -> str | None:
        """The stop string that a sample has run into."""
        return self.streams[request.sample].hit if self.streams else None

    def finish(self, request: Request, num_kept: int) -> str:
        """A sample has ended with so many tokens; the text that was held back until now."""
        sample = self.result.samples[request.sample]
        sample.token_ids = list(request.output[:num_kept])
        rest = self.streams[request.sample].finish() if self.streams else ""
        hit = self.hit(request)
        sample.finish_reason = "stop" if hit is not None else request.finish_reason
        sample.stop_reason = hit if hit is not None else request.stop_token
        sample.error = request.error
        if sample.logprobs is not None:
            del sample.logprobs[num_kept:]
        sample.text = self._text(request, sample)
        self.num_open -= 1
        self.result.preemptions += request.history.num_preemptions
        if request.sample == 0:
            self.result.cached_tokens = request.history.num_cached
        return rest

    def _text(self, request: Request, sample: Sample) -> str:
        if self.streams:
            return self.streams[request.sample].text
        if self._tokenizer is None:
            return ""
        shown = [t for t in sample.token_ids if t not in request.params.stops]
        return self._tokenizer.decode(shown, skip_special=self._params.skip_special_tokens)
