"""Log probabilities in the formats of completions (columns), chats (objects) and vLLM's prompts."""

from __future__ import annotations

from collections.abc import Sequence

from headway.sampling_params import TokenLogprobs
from headway.server.generation.prompt_runs import PromptRun
from headway.server.http.offload import yield_gil
from headway.server.openai.response_models import (
    CompletionLogprobs,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from headway.text.detokenizer import Detokenizer
from headway.text.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot express


def token_entries(
    tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs], *, as_ids: bool = False
) -> list[TokenLogprob]:
    """One object per token, with its alternatives; `as_ids` writes tokens as ids."""
    entries = list[TokenLogprob]()
    for entry in logprobs:
        top = [_token(tokenizer, *each, as_ids) for each in entry.top]
        token = _token(tokenizer, entry.token, entry.logprob, as_ids)
        entries.append({**token, "top_logprobs": top})
        yield_gil()
    return entries


def prompt_logprobs_of(tokenizer: Tokenizer, run: PromptRun) -> list[PromptLogprobs | None]:
    """vLLM's `prompt_logprobs`: a map by token id for each position; None for the first."""
    found = list[PromptLogprobs | None]()
    for place in range(len(run.prompt)):
        entry = run.prompt_logprobs.get(place)
        found.append(None if entry is None else _ranked(tokenizer, entry))
        yield_gil()
    return found


def _ranked(tokenizer: Tokenizer, entry: TokenLogprobs) -> PromptLogprobs:
    found = {token: (logprob, rank) for rank, (token, logprob) in enumerate(entry.top, start=1)}
    found[entry.token] = (entry.logprob, entry.rank)
    return {
        str(token): {
            "logprob": max(logprob, MIN_LOGPROB), "rank": rank,
            "decoded_token": tokenizer.piece(token),
        }
        for token, (logprob, rank) in found.items()
    }  # fmt: skip


def _token(tokenizer: Tokenizer, token: int, logprob: float, as_ids: bool) -> TopLogprob:
    spelled = tokenizer.spell(token).spelled
    text = _id_text(token) if as_ids else spelled.decode("utf-8", "replace")
    return {"token": text, "logprob": max(logprob, MIN_LOGPROB), "bytes": list(spelled)}


class CompletionLogprobsBuilder:
    """Builds the `logprobs` of a completion choice; tracks the text offset of the next token.

    `start` is the offset of the first token. It is negative for a token that the text does not show.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, start: int, skip_special: bool, as_ids: bool
    ) -> None:
        self._piece = _id_text if as_ids else tokenizer.piece
        self._detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
        self._offset = start

    def push(
        self,
        tokens_with_logprobs: Sequence[tuple[int, TokenLogprobs | None]],
        columns: CompletionLogprobs | None = None,
    ) -> CompletionLogprobs:
        """Add these tokens to the columns, by default new ones; a prompt's first has no logprob."""
        if columns is None:
            columns = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token, entry in tokens_with_logprobs:
            columns["text_offset"].append(max(0, self._offset))
            self._offset += len(self._detokenizer.push([token]))
            columns["token_logprobs"].append(max(entry.logprob, MIN_LOGPROB) if entry else None)
            columns["tokens"].append(self._piece(token))
            columns["top_logprobs"].append(self._top(entry) if entry else None)
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
