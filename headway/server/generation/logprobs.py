"""Log probabilities in the formats of completions (columns), chats (objects) and vLLM's prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headway.sampling_params import TokenLogprobs
from headway.server.http.offload import yield_gil
from headway.text.detokenizer import Detokenizer
from headway.text.tokenizer import Tokenizer

COLUMNS = ("text_offset", "token_logprobs", "tokens", "top_logprobs")
MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot express


def chat_logprobs(
    tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs], *, as_ids: bool = False
) -> dict[str, Any]:
    """The member `logprobs` of a chat choice."""
    return {"content": token_entries(tokenizer, logprobs, as_ids=as_ids), "refusal": None}


def token_entries(
    tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs], *, as_ids: bool = False
) -> list[dict[str, Any]]:
    """One object per token, with its alternatives; `as_ids` writes tokens as ids."""
    entries = []
    for entry in logprobs:
        top = [_token(tokenizer, *each, as_ids) for each in entry.top]
        token = _token(tokenizer, entry.token, entry.logprob, as_ids)
        entries.append({**token, "top_logprobs": top})
        yield_gil()
    return entries


def prompt_logprobs_of(
    tokenizer: Tokenizer, num_tokens: int, logprobs: Mapping[int, TokenLogprobs]
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: a map by token id for each position; None for the first."""
    found: list[dict[str, Any] | None] = []
    for place in range(num_tokens):
        found.append(None if place not in logprobs else _ranked(tokenizer, logprobs[place]))
        yield_gil()
    return found


def _ranked(tokenizer: Tokenizer, entry: TokenLogprobs) -> dict[str, Any]:
    found = {token: (logprob, rank) for rank, (token, logprob) in enumerate(entry.top, start=1)}
    found[entry.token] = (entry.logprob, entry.rank)
    return {
        str(token): {
            "logprob": max(logprob, MIN_LOGPROB), "rank": rank,
            "decoded_token": tokenizer.piece(token),
        }
        for token, (logprob, rank) in found.items()
    }  # fmt: skip


def _token(tokenizer: Tokenizer, token: int, logprob: float, as_ids: bool) -> dict[str, Any]:
    spelled = tokenizer.spell(token).spelled
    text = _id_text(token) if as_ids else spelled.decode("utf-8", "replace")
    return {"token": text, "logprob": max(logprob, MIN_LOGPROB), "bytes": list(spelled)}


class CompletionLogprobsBuilder:
    """Builds the `logprobs` of a completion choice; tracks the text offset of the next token.

    `start` is the offset of the first token. It is negative for a token that the text does not show.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        start: int = 0,
        skip_special: bool = True,
        as_ids: bool = False,
    ) -> None:
        self._piece = _id_text if as_ids else tokenizer.piece
        self._detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
        self._offset = start

    def push(
        self, tokens_with_logprobs: Sequence[tuple[int, TokenLogprobs | None]]
    ) -> dict[str, Any]:
        """The member `logprobs` for these tokens; the first token of a prompt has none."""
        columns: dict[str, Any] = {name: [] for name in COLUMNS}
        offsets, logprobs, tokens, tops = columns.values()
        for token, entry in tokens_with_logprobs:
            offsets.append(max(0, self._offset))
            self._offset += len(self._detokenizer.push([token]))
            logprobs.append(max(entry.logprob, MIN_LOGPROB) if entry else None)
            tokens.append(self._piece(token))
            tops.append(self._top(entry) if entry else None)
            yield_gil()
        return columns

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The alternatives and the token itself, which may not be among them."""
        found: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token, entry.logprob)):
            found.setdefault(self._piece(token), max(logprob, MIN_LOGPROB))
        return found


def _id_text(token: int) -> str:
    return f"token_id:{token}"
