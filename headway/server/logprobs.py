"""Log probabilities in OpenAI's two shapes: columns for completions, one object a token for chats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.engine.text import Detokenizer
from headway.engine.tokenizer import Tokenizer
from headway.sampling import TokenLogprobs
from headway.server.offload import pause

NAMES = ("text_offset", "token_logprobs", "tokens", "top_logprobs")
LEAST = -9999.0  # JSON has no infinity


def chat_shape(tokenizer: Tokenizer, scores: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """What a chat's choice has under `logprobs`."""
    entries = []
    for score in scores:
        top = [_token(tokenizer, *each) for each in score.top]
        token = _token(tokenizer, score.token, score.logprob)
        entries.append({**token, "top_logprobs": top})
        pause()
    return {"content": entries, "refusal": None}


def _token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    spelled = tokenizer.spell(token).spelled
    text = spelled.decode("utf-8", "replace")
    return {"token": text, "logprob": max(logprob, LEAST), "bytes": list(spelled)}


class Columns:
    """A completion's logprobs; knows where in the text the next token begins."""

    def __init__(self, tokenizer: Tokenizer, *, start: int = 0, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
        self._offset = start

    def shape(self, scores: Sequence[tuple[int, TokenLogprobs | None]]) -> dict[str, Any]:
        """What a choice has under `logprobs` for these tokens; a first token has no score."""
        columns: dict[str, Any] = {name: [] for name in NAMES}
        offsets, logprobs, tokens, tops = columns.values()
        for token, score in scores:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push([token]))
            logprobs.append(max(score.logprob, LEAST) if score else None)
            tokens.append(self._tokenizer.piece(token))
            tops.append(self._top(score) if score else None)
            pause()
        return columns

    def _top(self, score: TokenLogprobs) -> dict[str, float]:
        """The best ones and the token itself, which may not be among them."""
        found: dict[str, float] = {}
        for token, logprob in (*score.top, (score.token, score.logprob)):
            found.setdefault(self._tokenizer.piece(token), max(logprob, LEAST))
        return found
