"""Compiles grammars to matchers, on any thread, and caches the latest ones.

Compiling a large grammar takes longer than many steps, so `ready` and `make_ready` compile it
before the request reaches the engine. Knows no rows and no logits.
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
from headway.request import RequestParams
from headway.sampling_params import Sampling

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_CACHED = 32  # grammars in the cache
MAX_ENCODED = 1000  # characters of required text that the model's tokenizer encodes
NUM_PROBE_STEPS = 16  # tokens for which a grammar is tried before its request is accepted


class TokenBytes(Protocol):
    @property
    def spelled(self) -> bytes: ...


class GrammarTokenizer(Protocol):
    """The part of a tokenizer that grammars need."""

    special_ids: frozenset[int]

    def encode(self, text: str, *, special: bool = True) -> list[int]: ...

    def spell(self, id: int) -> TokenBytes: ...


@dataclass(frozen=True, slots=True)
class CompiledGrammar(Grammar):
    """A compiled grammar: a matcher at the start of an output, which is only ever copied."""

    first: LLMatcher = field(compare=False, repr=False)
    first_mask: bytes = field(compare=False, repr=False)  # empty if the grammar has an error

    def is_full(self) -> bool:
        """Whether the lexer that all copies share is full, so that no output can start."""
        copy = self.first.deep_copy()
        copy.compute_bitmask()
        return copy.is_error()


class Matchers:
    """Compiles and caches the grammars of one vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._tokenizer: GrammarTokenizer | None = None
        self._eos_ids: Collection[int] = ()
        self._vocabulary: LLTokenizer | None = None
        self._checker: GrammarChecker | None = None  # made with the vocabulary
        # The least recently used grammar comes first.
        self._cache: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._cache_lock = threading.Lock()  # held briefly
        self._vocabulary_lock = threading.Lock()  # held while the vocabulary is read

    def use(self, tokenizer: GrammarTokenizer | None, eos_ids: Collection[int]) -> None:
        """Set the model's tokenizer; without one no grammar can be compiled."""
        with self._vocabulary_lock, self._cache_lock:
            self._tokenizer, self._eos_ids = tokenizer, eos_ids
            self._vocabulary = self._checker = None
            self._cache.clear()

    def warm_up(self) -> None:
        """Read the vocabulary ahead of the first grammar; takes about a second for a large one."""
        with suppress(ImportError, ValueError, OSError):  # the first grammar raises it again
            self._read_vocabulary()
            self._vocabulary_checker().start()

    def ready(self, params: RequestParams) -> RequestParams | None:
        """Return the params with their compiled grammar; None if it has not been compiled yet."""
        sampling = params.sampling
        if not isinstance(sampling, Sampling) or sampling.grammar is None:
            return params
        found = self._find(sampling.grammar)
        return None if found is None else _with_grammar(params, sampling, found)

    def make_ready(self, params: RequestParams) -> RequestParams:
        """Compile the grammar, however long it takes, and return the params with it.

        Raise InvalidGrammar if it cannot be compiled, or not followed within its limits. Raise
        another error if no grammar can be compiled for this model.
        """
        sampling = params.sampling
        assert isinstance(sampling, Sampling) and sampling.grammar is not None, "nothing to compile"
        for grammar in dict.fromkeys((sampling.grammar.answer, sampling.grammar)):
            raise_if_invalid(grammar, self._vocabulary_checker().problem(grammar))
        return _with_grammar(params, sampling, self.read(sampling.grammar))

    def read(self, grammar: Grammar) -> CompiledGrammar:
        """Return a compiled grammar; its matcher reports a mistake in it by itself."""
        if (found := self._find(grammar)) is not None:
            return found
        return self._compiled(Grammar(grammar.kind, grammar.text))

    def renew(self, used: CompiledGrammar) -> CompiledGrammar:
        """Return the grammar with a lexer that no request has filled.

        All matchers of a grammar share a lexer, whose states are limited and are never freed.
        """
        plain = Grammar(used.kind, used.text)
        with self._cache_lock:
            cached = self._cache.get(plain)
        return self._compiled(plain) if cached is None or cached.first is used.first else cached

    def _compiled(self, grammar: Grammar) -> CompiledGrammar:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(**grammar.limits)
        first = LLMatcher(self._read_vocabulary(), grammar.source, log_level=0, limits=limits)
        copy = first.deep_copy()
        mask = b"" if copy.is_error() else copy.compute_bitmask()  # the slowest mask of all
        found = CompiledGrammar(grammar.kind, grammar.text, first, b"" if copy.is_error() else mask)
        with self._cache_lock:
            self._cache[grammar] = found
            self._cache.move_to_end(grammar)
            while len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        return found

    def _find(self, grammar: Grammar) -> CompiledGrammar | None:
        """Return the grammar if it was compiled before."""
        if isinstance(grammar, CompiledGrammar):
            return grammar
        with self._cache_lock:
            found = self._cache.get(grammar)
            if found is not None:
                self._cache.move_to_end(grammar)
        return found

    def _read_vocabulary(self) -> LLTokenizer:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                adapter = _LLTokenizerAdapter(self._tokenizer, self.vocab_size, self._eos_ids)
                self._vocabulary = adapter.trie
                self._checker = GrammarChecker(adapter.vocabulary, num_steps=NUM_PROBE_STEPS)
            return self._vocabulary

    def _vocabulary_checker(self) -> GrammarChecker:
        self._read_vocabulary()
        assert self._checker is not None, "made with the vocabulary"
        return self._checker


def _with_grammar(
    params: RequestParams, sampling: Sampling, grammar: CompiledGrammar
) -> RequestParams:
    return replace(params, sampling=replace(sampling, grammar=grammar))


class _LLTokenizerAdapter:
    """A tokenizer with the interface that llguidance expects."""

    bos_token_id = None

    def __init__(
        self, tokenizer: GrammarTokenizer | None, vocab_size: int, eos_ids: Collection[int]
    ) -> None:
        """ValueError without a tokenizer or an end token."""
        if tokenizer is None:
            raise ValueError("this model has no tokenizer; a grammar needs one")
        ends = sorted(token for token in eos_ids if 0 <= token < vocab_size)
        if not ends:
            raise ValueError("this model has no end token (eos_token_id); a grammar needs one")
        from llguidance import LLTokenizer, TokenizerWrapper

        self._tokenizer = tokenizer
        self._trie: LLTokenizer | None = None
        self.eos_token_id = ends[0]
        self.special_token_ids = sorted({*tokenizer.special_ids, *ends})
        self.tokens = [tokenizer.spell(id).spelled for id in range(vocab_size)]
        self.vocabulary = GrammarVocabulary(self.tokens, self.special_token_ids, ends)
        self.trie = LLTokenizer(TokenizerWrapper(self), n_vocab=vocab_size, eos_token=ends)
        self._trie = self.trie

    def __call__(self, text: str | bytes) -> list[int]:
        """Encode a text that must come next, as the model would write it."""
        text = text if isinstance(text, str) else text.decode()
        if self._trie is not None and len(text) > MAX_ENCODED:  # called again for every token
            rest = self._trie.greedy_tokenize(text[MAX_ENCODED:])
            return self(text[:MAX_ENCODED]) + rest
        found = self._tokenizer.encode(text, special=False)
        # In a grammar, the text of a special token is not that token, and a tokenizer may add a
        # space before a text. In both cases any tokens that spell the text will do.
        is_text = b"".join(self.tokens[id] for id in found) == text.encode()
        if self._trie is None or (is_text and self._tokenizer.special_ids.isdisjoint(found)):
            return found
        return self._trie.greedy_tokenize(text)
