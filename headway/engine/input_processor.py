"""From what a user writes to what an engine takes: prompts become tokens, wishes become Params.

Needs a model's tokenizer and sizes, not the model: a process that only answers clients has these.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Any

import numpy as np

from headway.errors import InvalidRequest
from headway.grammar.grammar import check_grammar
from headway.request import Params, Pooling, check_pooling
from headway.sampling_params import Sampling, SamplingParams, check_tokens, token_level
from headway.text.chat_template import render_chat
from headway.text.long_text import check_num_tokens
from headway.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class InputProcessor:
    """What prompts and params are checked against."""

    tokenizer: Tokenizer | None
    vocab_size: int
    hidden_size: int  # of an embedding
    eos_ids: frozenset[int]

    def tokens(
        self, prompt: Prompt, max_tokens: int | None = None, *, special: bool = True
    ) -> list[int]:
        """A prompt as tokens; InvalidRequest for what is neither text nor ids of this model.

        RequestTooLong if there are more than `max_tokens`, without looking at all of them.
        `special` adds the tokenizer's own tokens, such as BOS, to a text.
        """
        if isinstance(prompt, str):
            tokenizer = self.need_tokenizer()
            found = tokenizer.encode(prompt, special=special, max_tokens=max_tokens)
            return self._known(found)
        if not isinstance(prompt, Sequence | np.ndarray) or getattr(prompt, "ndim", 1) != 1:
            raise InvalidRequest(f"prompt must be text or a list of token ids, not {prompt!r}")
        check_num_tokens(len(prompt), max_tokens, is_exact=True)
        given: list[Any] = list(prompt)
        try:  # all at once: to look at each took longer than planning a step
            tokens = array("q", given)  # numpy's whole numbers become Python's
        except (TypeError, OverflowError):
            are_known = False
        else:
            seen = np.frombuffer(tokens, dtype=np.int64)
            are_known = not len(seen) or (seen.min() >= 0 and seen.max() < self.vocab_size)
        if not are_known:
            wrong = next(token for token in given if not _is_below(token, self.vocab_size))
            is_huge = isinstance(wrong, int) and wrong.bit_length() > 4096  # too long to be written
            shown = f"of {wrong.bit_length()} bits" if is_huge else repr(wrong)
            raise InvalidRequest(
                f"prompt: token id {shown} is not a whole number of at least 0 and below "
                f"{self.vocab_size}"
            )
        return tokens.tolist()

    def chat_tokens(
        self,
        messages: Sequence[Message],
        max_tokens: int | None = None,
        /,
        *,
        special: bool = False,
        **options: Any,
    ) -> list[int]:
        """A conversation as the model's template writes it, up to where the answer begins.

        RequestTooLong if there are more than `max_tokens`.
        """
        tokenizer = self.need_tokenizer()
        text = render_chat(
            tokenizer.chat_template, messages, bos=tokenizer.bos, eos=tokenizer.eos, **options
        )
        return self._known(tokenizer.encode(text, special=special, max_tokens=max_tokens))

    def _known(self, tokens: list[int]) -> list[int]:
        """A tokenizer may have more tokens than the model was made for, such as one to pad with."""
        if tokens and (largest := max(tokens)) >= self.vocab_size:
            text = self.need_tokenizer().decode([largest], skip_special=False)
            raise InvalidRequest(
                f"prompt: the token {text!r} ({largest}) is not one of the {self.vocab_size} that "
                "the model has"
            )
        return tokens

    def params_of_each(self, asked: SamplingParams, ids: Sequence[str]) -> list[Params]:
        """The params of several prompts with the same SamplingParams, which are read only once."""
        first = self.params(asked, ids[0])
        if asked.seed is not None:
            return [first] * len(ids)
        return [first, *(_with_new_seed(first) for _ in ids[1:])]

    def params(self, asked: SamplingParams, id: str) -> Params:
        """What the engine reads of a request."""
        try:
            check_tokens(asked, self.vocab_size)
            self._check_grammar(asked)
        except InvalidRequest as error:
            raise InvalidRequest(f"request {id!r}: {error}") from None
        seed = _new_seed() if asked.seed is None else asked.seed
        bad_words = self._bad_words(asked.bad_words)
        if asked.stop_strings:
            self.need_tokenizer()
        return Params(
            max_tokens=asked.max_tokens, min_tokens=asked.min_tokens, eos_ids=self.eos_ids,
            stop_ids=frozenset(asked.stop_token_ids), ignore_eos=asked.ignore_eos,
            priority=asked.priority, client=asked.client, deadline=asked.deadline, salt=asked.salt,
            reads_cache=asked.prompt_logprobs is None, n=asked.n,
            sampling=token_level(asked, seed=seed, bad_words=bad_words),
        )  # fmt: skip

    def _check_grammar(self, asked: SamplingParams) -> None:
        """InvalidRequest for a grammar that cannot be followed; reading it takes milliseconds."""
        if asked.grammar is None:
            return
        self.need_tokenizer()
        if not self.eos_ids:
            raise InvalidRequest(
                f"{asked.grammar.kind}: this model has no token that ends an answer, so it cannot "
                "be held to a grammar"
            )
        check_grammar(asked.grammar)

    def need_tokenizer(self) -> Tokenizer:
        """The tokenizer; InvalidRequest where the model has none."""
        if self.tokenizer is None:
            raise InvalidRequest("this model has no tokenizer here: give token ids instead of text")
        return self.tokenizer

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as tokens, at a text's start and after a space."""
        if not words:
            return ()
        encode = self.need_tokenizer().encode
        spelled = [
            encode(lead + word.lstrip(), special=False) for word in words for lead in ("", " ")
        ]
        return tuple(dict.fromkeys(tuple(tokens) for tokens in spelled))


def embedding_params(
    pooling: Pooling,
    *,
    priority: int = 0,
    client: str = "",
    deadline: float | None = None,
    salt: str = "",
) -> Params:
    """What the engine reads of a request for an embedding.

    The engine samples one token after every prompt; this one ends the request and is not shown. A
    mean needs every prompt token to be computed, so it does not read the prefix cache.
    """
    check_pooling(pooling)
    return Params(
        max_tokens=1, priority=priority, client=client, deadline=deadline, salt=salt,
        reads_cache=pooling != "mean", pooling=pooling,
    )  # fmt: skip


def is_single(prompts: object) -> bool:
    """True for one prompt, text or token ids; False for a list of prompts."""
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        return not isinstance(prompts, np.ndarray) or prompts.ndim == 1
    return len(prompts) > 0 and not any(isinstance(p, Sequence | np.ndarray) for p in prompts)


def _new_seed() -> int:
    return random.getrandbits(63)


def _with_new_seed(params: Params) -> Params:
    assert isinstance(params.sampling, Sampling), "made by token_level"
    return replace(params, sampling=replace(params.sampling, seed=_new_seed()))


def _is_below(token: Any, size: int) -> bool:
    try:
        return 0 <= index(token) < size
    except TypeError:
        return False
