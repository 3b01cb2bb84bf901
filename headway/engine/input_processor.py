"""Converts user input to engine input: prompts to tokens, and SamplingParams to RequestParams.

Needs the tokenizer and sizes of a model, not the model itself, so an API process can use it.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import index
from typing import Any

import numpy as np

from headway.errors import InvalidRequest, shorten
from headway.grammar.grammar import check_grammar
from headway.request import Pooling, RequestParams, check_pooling
from headway.sampling_params import Sampling, SamplingParams, check_tokens, token_level
from headway.text.chat_template import render_chat
from headway.text.long_text import check_num_tokens
from headway.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
PromptInput = Prompt | Mapping[str, Any]  # or {"prompt": text}, or {"prompt_token_ids": ids}
Message = Mapping[str, Any]
PROMPT_KEYS = ("prompt", "prompt_token_ids")
PROMPT_TYPES = (Sequence, np.ndarray, Mapping)
RESERVED_VARIABLES = ("template", "messages", "tools", "bos", "eos", "special")


def draw_seed() -> int:
    return random.getrandbits(63)


def seeds(seed: int | None) -> Callable[[], int]:
    """Draws a seed for each request that has none: at random, or reproducibly from `seed`."""
    return draw_seed if seed is None else partial(random.Random(seed).getrandbits, 63)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputProcessor:
    """Tokenizes prompts and checks parameters against one model."""

    tokenizer: Tokenizer | None
    vocab_size: int
    hidden_size: int  # of an embedding
    eos_ids: frozenset[int]
    new_seed: Callable[[], int] = draw_seed  # seeds for requests that give none

    def read_prompt(self, prompt: PromptInput) -> tuple[str | None, array[int]]:
        """The text of a prompt, if it has one, and its tokens; InvalidRequest if malformed."""
        if isinstance(prompt, Mapping):
            given = [key for key in PROMPT_KEYS if prompt.get(key) is not None]
            unknown = [key for key in prompt if key not in PROMPT_KEYS]
            if len(given) != 1 or unknown:
                keys = [*given, *map(str, unknown)]
                wanted = " or ".join(map(repr, PROMPT_KEYS))
                raise InvalidRequest(f"a prompt dict must have {wanted} alone; it has {keys}")
            content: Prompt = prompt[given[0]]
            if isinstance(content, str) != (given[0] == "prompt"):
                wanted = "a string" if given[0] == "prompt" else "a list of token ids"
                raise InvalidRequest(f"{given[0]} must be {wanted}, not {shorten(content)}")
        else:
            content = prompt
        if isinstance(content, str):
            return content, array("i", self.tokens(content))
        return None, self._token_array(content)

    def tokens(
        self, prompt: Prompt, max_tokens: int | None = None, *, special: bool = True
    ) -> list[int]:
        """The tokens of a prompt; InvalidRequest unless it is text or token ids of this model.

        RequestTooLong if there are more than `max_tokens`; a long text is not tokenized to its
        end to find out. `special` adds the tokenizer's special tokens, such as BOS, to a text.
        """
        if isinstance(prompt, str):
            tokenizer = self.need_tokenizer()
            found = tokenizer.encode(prompt, special=special, max_tokens=max_tokens)
            return self._check_known(found)
        return self._token_array(prompt, max_tokens).tolist()

    def _token_array(self, prompt: Sequence[int], max_tokens: int | None = None) -> array[int]:
        """The tokens of a prompt that is not a text; see `tokens`."""
        if not isinstance(prompt, Sequence | np.ndarray) or getattr(prompt, "ndim", 1) != 1:
            raise InvalidRequest(
                f"prompt must be text or a list of token ids, not {shorten(prompt)}"
            )
        check_num_tokens(len(prompt), max_tokens, is_exact=True)
        given: list[Any] = list(prompt)
        # All at once: a check of each token took longer than scheduling a step.
        with suppress(TypeError, OverflowError):
            tokens = array("i", given)  # converts numpy integers to Python's
            seen = np.frombuffer(tokens, dtype=np.intc)
            if not len(seen) or (seen.min() >= 0 and seen.max() < self.vocab_size):
                return tokens
        wrong = next(token for token in given if not _is_below(token, self.vocab_size))
        raise InvalidRequest(
            f"prompt: token id {shorten(wrong)} is not a whole number of at least 0 and below "
            f"{self.vocab_size}"
        )

    def chat_tokens(
        self,
        messages: Sequence[Message],
        max_tokens: int | None = None,
        /,
        *,
        special: bool = False,
        **options: Any,
    ) -> list[int]:
        """The tokens of a conversation, rendered with the model's chat template.

        `options` are variables of the template. RequestTooLong if there are more than `max_tokens`.
        """
        tokenizer = self.need_tokenizer()
        text = render_chat(
            tokenizer.chat_template, messages, bos=tokenizer.bos, eos=tokenizer.eos, **options
        )
        return self._check_known(tokenizer.encode(text, special=special, max_tokens=max_tokens))

    def _check_known(self, tokens: list[int]) -> list[int]:
        """The tokens; InvalidRequest for one that the model has no embedding for."""
        if tokens and (largest := max(tokens)) >= self.vocab_size:
            text = self.need_tokenizer().decode([largest], skip_special=False)
            raise InvalidRequest(
                f"prompt: token {text!r} ({largest}) is not one of the {self.vocab_size} tokens of "
                "the model"
            )
        return tokens

    def params_of_each(
        self, sampling_params: SamplingParams, ids: Sequence[str]
    ) -> list[RequestParams]:
        """The RequestParams of several prompts; the SamplingParams are converted once."""
        first = self.params(sampling_params, ids[0])
        if sampling_params.seed is not None:
            return [first] * len(ids)
        return [first, *(_with_seed(first, self.new_seed()) for _ in ids[1:])]

    def params(self, sampling_params: SamplingParams, id: str) -> RequestParams:
        """The engine's params of a request; InvalidRequest if the model cannot follow them."""
        if not isinstance(sampling_params, SamplingParams):
            raise InvalidRequest(
                f"request {id!r}: sampling_params must be a SamplingParams, not "
                f"{shorten(sampling_params)}"
            )
        try:
            check_tokens(sampling_params, self.vocab_size)
            self._check_grammar(sampling_params)
        except InvalidRequest as error:
            raise InvalidRequest(f"request {id!r}: {error}") from None
        seed = self.new_seed() if sampling_params.seed is None else sampling_params.seed
        bad_words = self._bad_words(sampling_params.bad_words)
        if sampling_params.stop_strings:
            self.need_tokenizer()
        return RequestParams(
            max_tokens=sampling_params.max_tokens, min_tokens=sampling_params.min_tokens,
            eos_ids=self.eos_ids, stop_ids=frozenset(sampling_params.stop_token_ids),
            ignore_eos=sampling_params.ignore_eos, priority=sampling_params.priority,
            client=sampling_params.client, deadline=sampling_params.deadline,
            salt=sampling_params.salt, reads_cache=sampling_params.prompt_logprobs is None,
            n=sampling_params.n,
            sampling=token_level(sampling_params, seed=seed, bad_words=bad_words),
        )  # fmt: skip

    def _check_grammar(self, sampling_params: SamplingParams) -> None:
        """InvalidRequest for a grammar that cannot be used; a check takes milliseconds."""
        grammar = sampling_params.grammar
        if grammar is None:
            return
        self.need_tokenizer()
        if not self.eos_ids:
            raise InvalidRequest(
                f"{grammar.kind}: this model has no token that ends an output, so its output "
                "cannot follow a grammar"
            )
        check_grammar(grammar)

    def need_tokenizer(self) -> Tokenizer:
        """The tokenizer; InvalidRequest if the model has none."""
        if self.tokenizer is None:
            raise InvalidRequest("this model has no tokenizer; give token ids instead of text")
        return self.tokenizer

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The tokens of each word, with and without a space before it."""
        if not words:
            return ()
        encode = self.need_tokenizer().encode
        spelled = [
            encode(lead + word.lstrip(), special=False) for word in words for lead in ("", " ")
        ]
        return tuple(dict.fromkeys(tuple(tokens) for tokens in spelled))


def template_variables(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The `chat_template_kwargs` of a chat; InvalidRequest for a variable that is set elsewhere."""
    given = {} if given is None else given
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise InvalidRequest(f"chat_template_kwargs must be a dict by name, not {shorten(given)}")
    for name in RESERVED_VARIABLES:
        if name in given:
            raise InvalidRequest(f"chat_template_kwargs must not contain {name}")
    return dict(given)


def embedding_params(
    pooling: Pooling,
    *,
    priority: int = 0,
    client: str = "",
    deadline: float | None = None,
    salt: str = "",
) -> RequestParams:
    """RequestParams of a request for an embedding.

    The engine samples one token after every prompt; here it ends the request and is not shown. The
    mean needs the hidden states of all prompt tokens, so it does not read the prefix cache.
    """
    check_pooling(pooling)
    return RequestParams(
        max_tokens=1, priority=priority, client=client, deadline=deadline, salt=salt,
        reads_cache=pooling != "mean", pooling=pooling,
    )  # fmt: skip


def is_single(prompts: object) -> bool:
    """True for one prompt: a text, a dict or token ids. False for a list of prompts."""
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        return not isinstance(prompts, np.ndarray) or prompts.ndim == 1
    return len(prompts) > 0 and not any(isinstance(p, PROMPT_TYPES) for p in prompts)


def _with_seed(params: RequestParams, seed: int) -> RequestParams:
    assert isinstance(params.sampling, Sampling), "made by token_level"
    return replace(params, sampling=replace(params.sampling, seed=seed))


def _is_below(token: Any, size: int) -> bool:
    try:
        return 0 <= index(token) < size
    except TypeError:
        return False
