"""Reads grammars: makes the matchers that follow them, on any thread, and keeps the latest.

Reading a large one takes longer than many steps, so `ready` and `make_ready` do it ahead of a
request, which then carries it. Knows no rows and no logits.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from headway.grammar.checker import GrammarChecker
from headway.grammar.grammar import Grammar, raise_if_invalid
from headway.grammar.sandbox import GrammarVocabulary
from headway.request import Params
from headway.sampling_params import Sampling

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_KEPT = 32  # grammars that are ready for the next request
MAX_ENCODED = 1000  # characters of required text that are split as the model would
NUM_PROBE_STEPS = 16  # tokens for which a grammar is followed before its request is taken


class Spelled(Protocol):
    """The bytes of a token."""

    @property
    def spelled(self) -> bytes: ...


class Speller(Protocol):
    """What is needed of a tokenizer."""

    special_ids: frozenset[int]

    def encode(self, text: str, *, special: bool = True) -> list[int]: ...

    def spell(self, id: int) -> Spelled: ...


@dataclass(frozen=True, slots=True)
class ReadGrammar(Grammar):
    """A grammar with a matcher at the start of an answer, which is only ever copied."""

    first: LLMatcher = field(compare=False, repr=False)
    first_mask: bytes = field(compare=False, repr=False)  # empty if there is an error

    def is_full(self) -> bool:
        """Whether the lexer that all copies share has no room left: not even an answer can begin."""
        copy = self.first.deep_copy()
        copy.compute_bitmask()
        return copy.is_error()


class Matchers:
    """Grammars of one vocabulary, as they are read."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._speller: Speller | None = None
        self._eos_ids: Collection[int] = ()
        self._vocabulary: LLTokenizer | None = None
        self._checker: GrammarChecker | None = None  # with the vocabulary
        self._kept: OrderedDict[Grammar, ReadGrammar] = OrderedDict()  # the latest used last
        self._keeping = threading.Lock()  # held for a moment
        self._spelling = threading.Lock()  # held while the vocabulary is read

    def use(self, speller: Speller | None, eos_ids: Collection[int]) -> None:
        """Take the model's tokenizer; without one no grammar can be read."""
        with self._spelling, self._keeping:
            self._speller, self._eos_ids = speller, eos_ids
            self._vocabulary = self._checker = None
            self._kept.clear()

    def warm_up(self) -> None:
        """Read the vocabulary ahead of the first grammar: a second for a large one."""
        with suppress(ImportError, ValueError, OSError):  # raised again for the first grammar
            self._read_vocabulary()
            self._vocabulary_checker().start()

    def ready(self, params: Params) -> Params | None:
        """Params whose grammar, if any, has been read; None if that has yet to be done."""
        sampling = params.sampling
        if not isinstance(sampling, Sampling) or sampling.grammar is None:
            return params
        found = self._find(sampling.grammar)
        return None if found is None else _with(params, sampling, found)

    def make_ready(self, params: Params) -> Params:
        """The same, however long it takes; raises if no grammar can be read here at all.

        InvalidGrammar for one that cannot be compiled, or cannot be followed within its limits.
        """
        sampling = params.sampling
        assert isinstance(sampling, Sampling) and sampling.grammar is not None, "else it is ready"
        raise_if_invalid(sampling.grammar, self._vocabulary_checker().problem(sampling.grammar))
        return _with(params, sampling, self.read(sampling.grammar))

    def read(self, grammar: Grammar) -> ReadGrammar:
        """A grammar with its matcher, which tells by itself if there is a mistake in it."""
        if (found := self._find(grammar)) is not None:
            return found
        return self._compiled(Grammar(grammar.kind, grammar.text))

    def renew(self, used: ReadGrammar) -> ReadGrammar:
        """The grammar with a lexer that no request has filled yet.

        All matchers of a grammar share a lexer, whose states are limited and never forgotten.
        """
        plain = Grammar(used.kind, used.text)
        with self._keeping:
            kept = self._kept.get(plain)
        return self._compiled(plain) if kept is None or kept.first is used.first else kept

    def _compiled(self, grammar: Grammar) -> ReadGrammar:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(**grammar.limits)
        first = LLMatcher(self._read_vocabulary(), grammar.source, log_level=0, limits=limits)
        copy = first.deep_copy()
        mask = b"" if copy.is_error() else copy.compute_bitmask()  # the costliest, so done here
        found = ReadGrammar(grammar.kind, grammar.text, first, b"" if copy.is_error() else mask)
        with self._keeping:
            self._kept[grammar] = found
            self._kept.move_to_end(grammar)
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return found

    def _find(self, grammar: Grammar) -> ReadGrammar | None:
        """One that was read before."""
        if isinstance(grammar, ReadGrammar):
            return grammar
        with self._keeping:
            found = self._kept.get(grammar)
            if found is not None:
                self._kept.move_to_end(grammar)
        return found

    def _read_vocabulary(self) -> LLTokenizer:
        with self._spelling:
            if self._vocabulary is None:
                form = _form(self._speller, self.vocab_size, self._eos_ids)
                self._vocabulary = form.trie
                self._checker = GrammarChecker(form.vocabulary, num_steps=NUM_PROBE_STEPS)
            return self._vocabulary

    def _vocabulary_checker(self) -> GrammarChecker:
        self._read_vocabulary()
        assert self._checker is not None, "made with the vocabulary"
        return self._checker


def _with(params: Params, sampling: Sampling, grammar: ReadGrammar) -> Params:
    return replace(params, sampling=replace(sampling, grammar=grammar))


def _form(speller: Speller | None, vocab_size: int, eos_ids: Collection[int]) -> _Form:
    """A tokenizer as llguidance knows it; ValueError if there is none, or no end."""
    if speller is None:
        raise ValueError("this model has no tokenizer here")
    ends = sorted(token for token in eos_ids if 0 <= token < vocab_size)
    if not ends:
        raise ValueError("this model has no token that ends an answer")
    return _Form(speller, vocab_size, ends)


class _Form:
    """A tokenizer in the form that llguidance takes."""

    bos_token_id = None

    def __init__(self, speller: Speller, vocab_size: int, ends: list[int]) -> None:
        from llguidance import LLTokenizer, TokenizerWrapper

        self._speller = speller
        self._trie: LLTokenizer | None = None
        self.eos_token_id = ends[0]
        self.special_token_ids = sorted({*speller.special_ids, *ends})
        self.tokens = [speller.spell(id).spelled for id in range(vocab_size)]
        self.vocabulary = GrammarVocabulary(self.tokens, self.special_token_ids, ends)
        self.trie = LLTokenizer(TokenizerWrapper(self), n_vocab=vocab_size, eos_token=ends)
        self._trie = self.trie

    def __call__(self, text: str | bytes) -> list[int]:
        """How the model would write a text that must come next."""
        text = text if isinstance(text, str) else text.decode()
        if self._trie is not None and len(text) > MAX_ENCODED:  # again at every token of it
            rest = self._trie.greedy_tokenize(text[MAX_ENCODED:])
            return self(text[:MAX_ENCODED]) + rest
        found = self._speller.encode(text, special=False)
        # The text of a special token, written in a grammar, is not that token; and a tokenizer may
        # put a space before a text. Then any tokens that spell the text will do.
        is_text = b"".join(self.tokens[id] for id in found) == text.encode()
        if self._trie is None or (is_text and self._speller.special_ids.isdisjoint(found)):
            return found
        return self._trie.greedy_tokenize(text)
