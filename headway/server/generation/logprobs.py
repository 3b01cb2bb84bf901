"""Log probabilities in OpenAI's two shapes: columns for completions, one object a token for chats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headway.sampling_params import TokenLogprobs
from headway.server.http.offload import pause
from headway.text.detokenizer import Detokenizer
from headway.text.tokenizer import Tokenizer

NAMES = ("text_offset", "token_logprobs", "tokens", "top_logprobs")
LEAST = -9999.0  # JSON has no infinity


def chat_shape(
    tokenizer: Tokenizer, scores: Sequence[TokenLogprobs], *, as_ids: bool = False
) -> dict[str, Any]:
    """What a chat's choice has under `logprobs`."""
    return {"content": token_entries(tokenizer, scores, as_ids=as_ids), "refusal": None}


def token_entries(
    tokenizer: Tokenizer, scores: Sequence[TokenLogprobs], *, as_ids: bool = False
) -> list[dict[str, Any]]:
    """One entry for each token, with its alternatives; `as_ids` writes tokens as ids."""
    entries = []
    for score in scores:
        top = [_token(tokenizer, *each, as_ids) for each in score.top]
        token = _token(tokenizer, score.token, score.logprob, as_ids)
        entries.append({**token, "top_logprobs": top})
        pause()
    return entries


def prompt_shape(
    tokenizer: Tokenizer, num_tokens: int, scores: Mapping[int, TokenLogprobs]
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each place a map from token ids; the first has none."""
    found: list[dict[str, Any] | None] = []
    for place in range(num_tokens):
        found.append(None if place not in scores else _ranked(tokenizer, scores[place]))
        pause()
    return found


def _ranked(tokenizer: Tokenizer, score: TokenLogprobs) -> dict[str, Any]:
    found = {token: (logprob, rank) for rank, (token, logprob) in enumerate(score.top, start=1)}
    found[score.token] = (score.logprob, score.rank)
    return {
        str(token): {
            "logprob": max(logprob, LEAST), "rank": rank, "decoded_token": tokenizer.piece(token)
        }
        for token, (logprob, rank) in found.items()
    }  # fmt: skip


def _token(tokenizer: Tokenizer, token: int, logprob: float, as_ids: bool) -> dict[str, Any]:
    spelled = tokenizer.spell(token).spelled
    text = f"token_id:{token}" if as_ids else spelled.decode("utf-8", "replace")
    return {"token": text, "logprob": max(logprob, LEAST), "bytes": list(spelled)}


class Columns:
    """A completion's logprobs; knows where in the text the next token begins."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        start: int = 0,
        skip_special: bool = True,
        as_ids: bool = False,
    ) -> None:
        self._piece = _id_of if as_ids else tokenizer.piece
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
            tokens.append(self._piece(token))
            tops.append(self._top(score) if score else None)
            pause()
        return columns

    def _top(self, score: TokenLogprobs) -> dict[str, float]:
        """The best ones and the token itself, which may not be among them."""
        found: dict[str, float] = {}
        for token, logprob in (*score.top, (score.token, score.logprob)):
            found.setdefault(self._piece(token), max(logprob, LEAST))
        return found


def _id_of(token: int) -> str:
    return f"token_id:{token}"
