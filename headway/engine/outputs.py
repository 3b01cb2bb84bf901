"""Converts tokens to results. All detokenization and stop-string handling is here.

An `OutputBuilder` takes the updates of one request. It returns what is new as `Delta`s, and can
give everything so far as a `RequestOutput`. LLM, AsyncEngine and the HTTP server all use it. Knows
no engine, no connection and no JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from headway.engine.messages import NO_TOKENS, FinishInfo, SampleUpdate
from headway.errors import ExecutorError
from headway.plan import Embedding
from headway.sampling_params import SamplingParams, TokenLogprobs
from headway.text.detokenizer import TextStream

if TYPE_CHECKING:  # needs the packages for text, which the simulator does without
    from headway.text.tokenizer import Tokenizer

NO_LOGPROBS: list[TokenLogprobs] = []


class Logprob(NamedTuple):
    """The log probability of one token at one position."""

    logprob: float
    rank: int  # 1: no token was more probable
    decoded_token: str | None  # None: the model has no tokenizer here


Logprobs = dict[int, Logprob]  # by token id; holds the token itself and the top alternatives


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One sample of a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None  # None unless `logprobs` was set
    logprobs: list[Logprobs] | None = None  # by position
    finish_reason: str | None = None  # stop, length, abort or error; None while it runs
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it
    error: str | None = None  # set if finish_reason is error; `text` is incomplete then


@dataclass(slots=True, kw_only=True)
class RequestMetrics:
    """Seconds since the request arrived."""

    queue: float = 0.0  # until the first sample was admitted
    first_token: float = 0.0
    total: float = 0.0


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A prompt and its samples. A refused prompt has no output: its error is raised."""

    request_id: str
    prompt: str | None  # None if the prompt was given as token ids
    prompt_token_ids: list[int]
    prompt_logprobs: list[Logprobs | None] | None = None  # None for the first token
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False  # true once all samples have ended
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    num_preemptions: int = 0
    num_drafted: int = 0  # draft tokens that were computed for the samples
    num_accepted: int = 0  # those that became output

    @property
    def num_generated(self) -> int:
        """Generated tokens of all samples."""
        return sum(len(output.token_ids) for output in self.outputs)


@dataclass(slots=True, kw_only=True)
class EmbeddingOutput:
    """A float32 vector of length 1."""

    embedding: Embedding = field(compare=False)


@dataclass(slots=True, kw_only=True)
class EmbeddingRequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    num_cached_tokens: int = 0
    finished: bool = True


class Delta(NamedTuple):
    """What one sample gained."""

    choice: int  # position of the sample among all samples of the call, those of prompt 0 first
    text: str
    logprobs: list[TokenLogprobs] = NO_LOGPROBS  # of the new tokens, if requested
    finish_reason: str | None = None
    token_ids: list[int] = NO_TOKENS
    num_tokens: int = 0  # of the sample so far


class SampleBuilder:
    """One text as it grows, up to a stop string, and the tokens that belong to it."""

    __slots__ = (
        "_has_stops", "_hidden", "_skips", "_text", "_tokenizer", "end", "logprobs", "stream",
        "tokens",
    )  # fmt: skip

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        hidden: frozenset[int],
        is_live: bool,
    ) -> None:
        self._has_stops = bool(params.stop_strings)
        self._skips, self._hidden = params.skip_special_tokens, hidden
        self._tokenizer, self._text = tokenizer, ""
        self.stream: TextStream | None = None  # else the text is made at the end
        if tokenizer is not None and (is_live or self._has_stops):
            self.stream = TextStream(
                tokenizer, params.stop_strings, params.include_stop_str_in_output,
                params.skip_special_tokens, hidden_ids=hidden, min_tokens=params.min_tokens,
            )  # fmt: skip
        self.tokens: list[int] = []  # generated, up to the one that completes a stop string
        self.logprobs: list[TokenLogprobs] = []  # of `tokens`, if requested
        self.end: FinishInfo | None = None

    @property
    def text(self) -> str:
        return self._text if self.stream is None else self.stream.text

    @property
    def is_stopped(self) -> bool:
        return self._has_stops and self.stream is not None and self.stream.hit is not None

    @property
    def has_failed(self) -> bool:
        """True if an error or an abort has ended the text."""
        end = self.end
        return end is not None and end.reason in ("error", "abort") and not self.is_stopped

    @property
    def stop_string(self) -> str | None:
        return None if self.stream is None else self.stream.hit

    @property
    def finish_reason(self) -> str | None:
        if self.end is None:
            return None
        return "stop" if self.is_stopped else self.end.reason

    def push(self, tokens: list[int]) -> str:
        """Add tokens; returns the text that can be shown now. Nothing is added after a stop."""
        if self.stream is None or not self._has_stops:
            self.tokens += tokens
            return "" if self.stream is None else self.stream.push(tokens)
        text = ""
        for token in tokens:
            if self.is_stopped:
                break
            text += self.stream.push([token])
            self.tokens.append(token)
        return text

    def finish(self, end: FinishInfo) -> str:
        """End the text; returns the part that was not returned before."""
        self.end = end
        if self.stream is not None:
            return self.stream.finish()
        if self._tokenizer is not None:
            shown = [token for token in self.tokens if token not in self._hidden]
            self._text = self._tokenizer.decode(shown, skip_special=self._skips)
        return self._text

    def visible(self, logprobs: list[TokenLogprobs]) -> list[TokenLogprobs]:
        """Log probabilities without those of end tokens, which are not part of the text."""
        return [entry for entry in logprobs if entry.token not in self._hidden]


class OutputBuilder:
    """The results of one request, from its updates.

    `hidden` are token ids that end a text and are not shown. Unless `is_live`, texts are made when
    they end. `stop_sample` is called with the number of a sample that has hit a stop string and
    must be ended. `first_choice` is added to sample numbers in deltas.
    """

    def __init__(
        self,
        id: str,
        prompt: Sequence[int],
        sampling_params: SamplingParams,
        tokenizer: Tokenizer | None,
        stop_sample: Callable[[int], object],
        *,
        hidden: frozenset[int],
        is_live: bool,
        prompt_text: str | None = None,
        first_choice: int = 0,
    ) -> None:
        self.id, self.prompt, self.sampling_params = id, prompt, sampling_params
        self.num_open = sampling_params.n
        self.samples = [
            SampleBuilder(tokenizer, sampling_params, hidden, is_live) for _ in range(self.num_open)
        ]
        self.prompt_logprobs: dict[int, TokenLogprobs] = {}  # by position
        self.embedding: Embedding | None = None
        self._prompt_text = prompt_text
        self._tokenizer = tokenizer
        self._stop_sample = stop_sample
        self.first_choice = first_choice

    @property
    def num_generated(self) -> int:
        return sum(len(sample.tokens) for sample in self.samples)

    @cached_property
    def prompt_token_ids(self) -> list[int]:
        return list(self.prompt)

    @property
    def num_cached(self) -> int:
        """Prompt tokens found in the prefix cache; 0 until the first sample has ended."""
        end = self.samples[0].end
        return end.num_cached if end else 0

    @property
    def num_drafted(self) -> int:
        """Draft tokens of the samples that have ended."""
        return sum(sample.end.num_drafted for sample in self.samples if sample.end)

    @property
    def num_accepted(self) -> int:
        """Draft tokens that became output, of the samples that have ended."""
        return sum(sample.end.num_accepted for sample in self.samples if sample.end)

    def add(self, updates: Sequence[SampleUpdate]) -> list[Delta]:
        """What each sample gained; several updates of one sample become one delta."""
        if len(updates) == 1:
            return [self.add_one(updates[0])]
        by_sample: dict[int, list[SampleUpdate]] = {}
        for update in updates:
            by_sample.setdefault(update.sample, []).append(update)
        return [self.add_one(_concatenate(own)) for _, own in sorted(by_sample.items())]

    def add_one(self, update: SampleUpdate) -> Delta:
        """What one sample gained; the hot path of every streamed token."""
        number, tokens, found, end = update.sample, update.tokens, update.logprobs, update.end
        sample, text, logprobs = self.samples[number], "", NO_LOGPROBS
        if update.prompt_logprobs:
            self.prompt_logprobs.update(update.prompt_logprobs)
        if sample.is_stopped:
            tokens = NO_TOKENS
        else:
            num_before = len(sample.tokens)
            text = sample.push(tokens)
            if sample.is_stopped:
                tokens = sample.tokens[num_before:]
                if end is None:
                    self._stop_sample(number)
            if found:
                logprobs = found[: len(tokens)]
                sample.logprobs += logprobs
                logprobs = sample.visible(logprobs)
        if end is not None:
            text += sample.finish(end)
            self.num_open -= 1
            if update.embedding is not None:
                self.embedding = update.embedding
        choice = self.first_choice + number
        return Delta(choice, text, logprobs, sample.finish_reason, tokens, len(sample.tokens))

    def output(self) -> RequestOutput:
        """Everything so far."""
        ends = [sample.end for sample in self.samples if sample.end is not None]
        metrics = RequestMetrics(
            queue=min((end.queue for end in ends), default=0.0),
            first_token=min((end.first_token for end in ends), default=0.0),
            total=max((end.total for end in ends), default=0.0),
        )
        prompt_logprobs: list[Logprobs | None] | None = None
        if self.sampling_params.prompt_logprobs is not None:
            logprobs = map(self.prompt_logprobs.get, range(len(self.prompt)))
            prompt_logprobs = [entry and self._logprobs(entry) for entry in logprobs]
        return RequestOutput(
            request_id=self.id, prompt=self._prompt_text, prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=[self._completion(index) for index in range(self.sampling_params.n)],
            finished=not self.num_open, metrics=metrics, num_cached_tokens=self.num_cached,
            num_preemptions=sum(end.num_preemptions for end in ends),
            num_drafted=self.num_drafted, num_accepted=self.num_accepted,
        )  # fmt: skip

    def _completion(self, index: int) -> CompletionOutput:
        sample = self.samples[index]
        completion = CompletionOutput(
            index=index, text=sample.text, token_ids=sample.tokens.copy(),
            finish_reason=sample.finish_reason, stop_reason=sample.stop_string,
        )  # fmt: skip
        if sample.end is not None and not sample.is_stopped:
            completion.stop_reason, completion.error = sample.end.stop_token, sample.end.error
        if self.sampling_params.logprobs is not None:
            completion.logprobs = [self._logprobs(entry) for entry in sample.logprobs]
            completion.cumulative_logprob = sum(entry.logprob for entry in sample.logprobs)
        return completion

    def _logprobs(self, entry: TokenLogprobs) -> Logprobs:
        """The top alternatives, most probable first, and the token itself."""
        tokenizer = self._tokenizer
        found = {token: (logprob, rank) for rank, (token, logprob) in enumerate(entry.top, start=1)}
        found[entry.token] = entry.logprob, entry.rank
        return {
            token: Logprob(*values, None if tokenizer is None else tokenizer.piece(token))
            for token, values in found.items()
        }


def _concatenate(updates: Sequence[SampleUpdate]) -> SampleUpdate:
    """Updates of one sample as a single one."""
    return replace(
        updates[-1],
        tokens=[token for update in updates for token in update.tokens],
        logprobs=[entry for update in updates for entry in update.logprobs or ()],
        prompt_logprobs=[entry for update in updates for entry in update.prompt_logprobs or ()],
    )


def embedding_output(output: RequestOutput, embedding: Embedding | None) -> EmbeddingRequestOutput:
    """ExecutorError if a step failed before the embedding was computed."""
    if embedding is None:
        error = output.outputs[0].error
        raise ExecutorError(f"no embedding for prompt {output.request_id}: {error}")
    return EmbeddingRequestOutput(
        request_id=output.request_id, prompt=output.prompt,
        prompt_token_ids=output.prompt_token_ids,
        outputs=EmbeddingOutput(embedding=embedding),
        num_cached_tokens=output.num_cached_tokens,
    )  # fmt: skip
