"""One of a request's texts as it grows out of tokens. Knows nothing of the engine's messages but ends."""

from __future__ import annotations

from collections.abc import Sequence

from headway.engine.messages import End
from headway.sampling_params import SamplingParams, TokenLogprobs
from headway.server.context import Context
from headway.text.detokenizer import TextStream


class Sample:
    """One text as it grows: up to a stop string, and the tokens that belong to it."""

    __slots__ = ("_hidden", "_is_live", "_stops", "end", "stream", "tokens")

    def __init__(
        self, context: Context, asked: SamplingParams, hidden: frozenset[int], is_live: bool
    ) -> None:
        tokenizer = context.input_processor.tokenizer
        self.stream: TextStream | None = None  # None: the model has no tokenizer here
        if tokenizer is not None:
            self.stream = TextStream(
                tokenizer, asked.stop_strings, asked.include_stop_str_in_output,
                asked.skip_special_tokens, hidden_ids=hidden, min_tokens=asked.min_tokens,
            )  # fmt: skip
        self.tokens: list[int] = []  # generated, up to the one that completes a stop string
        self.end: End | None = None
        self._hidden = hidden
        self._stops = bool(asked.stop_strings)
        self._is_live = is_live or self._stops

    @property
    def num_kept(self) -> int:
        return len(self.tokens)

    @property
    def is_stopped(self) -> bool:
        return self._stops and self.stream is not None and self.stream.hit is not None

    def push(self, tokens: Sequence[int]) -> str:
        """The text that may be shown after these tokens."""
        if self.stream is None or not self._is_live:
            self.tokens += tokens
            return ""
        if not self._stops:
            self.tokens += tokens
            return self.stream.push(tokens)
        text = ""
        for token in tokens:
            if self.is_stopped:
                break
            text += self.stream.push([token])
            self.tokens.append(token)
        return text

    def finish(self, end: End) -> str:
        """The rest of the text."""
        self.end = end
        if self.stream is None:
            return ""
        unread = [] if self._is_live else self.tokens
        return self.stream.push(unread) + self.stream.finish()

    def seen(self, scores: Sequence[TokenLogprobs], num_kept: int) -> list[TokenLogprobs]:
        """Of newly generated tokens' scores those whose tokens are kept, and no end tokens."""
        return [score for score in scores[:num_kept] if score.token not in self._hidden]

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text."""
        return None if self.stream is None else self.stream.hit

    @property
    def finish_reason(self) -> str | None:
        if self.end is None:
            return None
        return "stop" if self.is_stopped else self.end.reason
