"""Masks logits, so that the output of each running request follows its grammar.

A matcher follows the output of one request and knows which tokens may follow it. Masks are computed
on the host, packed, and applied at once to the logits of all rows that have a grammar. A grammar
that fails ends only its own request: the mask then allows only end tokens, and `take_failed`
returns the reason.

Shapes: n rows that have a grammar, v tokens of the vocabulary, w words of 32 bits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headway.executor.sampling.draw import index
from headway.executor.sampling.matchers import CompiledGrammar, Matchers
from headway.grammar.sandbox import one_line
from headway.plan import Failure, Rows
from headway.request import Request
from headway.sampling_params import Sampling

if TYPE_CHECKING:
    from llguidance import LLMatcher

Words = npt.NDArray[np.int32]
MAX_MASK_SECONDS = 0.1  # CPU time per mask; a grammar that needs more ends its request
MIN_TOKENS_PER_LEXER = 64  # a request that fills a lexer with fewer tokens is ended


@dataclass(slots=True, eq=False)
class GrammarState:
    """A running request and its matcher; the matcher is None if it could not be made."""

    request: Request
    may_ban: bool  # other parameters may ban tokens that the grammar needs
    grammar: CompiledGrammar | None = None
    matcher: LLMatcher | None = None
    tokens: list[int] = field(default_factory=list)  # generated so far
    num_before_lexer: int | None = None  # number of tokens when it last got a new lexer


class Grammars:
    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.matchers = Matchers(vocab_size)
        self._states: dict[int, GrammarState] = {}  # by row
        self._failed: dict[Request, str] = {}  # and why

    def add_request(
        self, row: int, request: Request, sampling: Sampling, output: Sequence[int] = ()
    ) -> None:
        """Assign a row to a request whose output so far is `output`."""
        self._states.pop(row, None)
        if sampling.grammar is None:
            return
        may_ban = bool(sampling.bad_words) or sampling.allowed_tokens is not None
        state = GrammarState(request, may_ban or request.params.min_tokens > 0, tokens=list(output))
        self._states[row] = state
        try:
            self._follow(state, self.matchers.read(sampling.grammar))
        except Exception as error:  # any error ends this request only, not the batch
            self._fail(state, f"{type(error).__name__}: {error}")

    def take_failed(self, step: int = 0) -> dict[Request, Failure]:
        """Return and clear the requests whose grammar failed, as of this step."""
        taken, self._failed = self._failed, {}
        return {request: Failure(step, reason, "grammar") for request, reason in taken.items()}

    def mask(self, choice_nv: Tensor, logits_nv: Tensor, rows: Rows) -> None:
        """Set logits to -inf, in place, for the tokens that a row's grammar does not allow.

        If other parameters have banned every token that the grammar allows, the grammar wins: such
        a row is masked from the raw `logits_nv`.
        """
        places = [i for i, row in enumerate(rows.tolist()) if row in self._states]
        if not places:
            return
        states = [self._states[row] for row in rows[places].tolist()]
        is_allowed = unpacked(self._words(states), self.vocab_size, choice_nv.device)
        at = index(np.array(places), choice_nv)
        kept = choice_nv[at].masked_fill_(~is_allowed, -torch.inf)
        if any(state.may_ban for state in states):
            raw = logits_nv[at].float().masked_fill_(~is_allowed, -torch.inf)
            kept = torch.where((kept == -torch.inf).all(-1, keepdim=True), raw, kept)
        choice_nv[at] = kept

    def remember(self, row: int, token: int) -> None:
        state = self._states.get(row)
        if state is None or state.matcher is None or state.matcher.is_error():
            return
        state.tokens.append(token)
        if not state.matcher.consume_token(token):
            self._recover(state)

    def _words(self, states: list[GrammarState]) -> Words:
        """Compute the masks: one bit for each token that may come next. [n, w]"""
        words = np.zeros((len(states), -(-self.vocab_size // 32)), dtype=np.int32)
        for place, state in enumerate(states):
            begun = time.thread_time()  # CPU time: other load must not end a request
            self._fill(words[place], state)
            seconds = time.thread_time() - begun
            if seconds > MAX_MASK_SECONDS and state.matcher is not None:
                limit = f"the limit is {MAX_MASK_SECONDS * 1e3:.0f} ms"
                self._fail(state, f"a token took {seconds * 1e3:.0f} ms of CPU time; {limit}")
                state.matcher = None
        return words

    def _fill(self, words: Words, state: GrammarState) -> None:
        """Write one row's mask; only end tokens are allowed if the grammar has failed."""
        if not state.tokens and state.grammar is not None and state.grammar.first_mask:
            words[:] = np.frombuffer(state.grammar.first_mask, dtype=np.int32)[: len(words)]
            return
        while state.matcher is not None and not state.matcher.is_error():
            state.matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            if not state.matcher.is_error():
                return
            self._recover(state)
        words[:] = self._ends(state.request)

    def _follow(self, state: GrammarState, grammar: CompiledGrammar) -> None:
        """Create a matcher that has consumed the request's tokens."""
        state.grammar, state.matcher = grammar, grammar.first.deep_copy()
        if state.matcher.is_error() or not state.matcher.consume_tokens(state.tokens):
            self._recover(state)

    def _recover(self, state: GrammarState) -> None:
        """After a matcher error: continue with a new lexer, or fail the request.

        Requests with the same grammar share a lexer. When it is full, each of them continues with
        a new one, except a request that fills lexers by itself.
        """
        assert state.matcher is not None and state.grammar is not None, "it had an error"
        before, num_tokens = state.num_before_lexer, len(state.tokens)
        is_greedy = before is not None and num_tokens - before < MIN_TOKENS_PER_LEXER
        if is_greedy or not state.grammar.is_full():
            self._fail(state)
            return
        state.num_before_lexer = num_tokens
        self._follow(state, self.matchers.renew(state.grammar))

    def _ends(self, request: Request) -> Words:
        """A mask of the end tokens; all tokens if there is none."""
        bits = np.zeros(-(-self.vocab_size // 32) * 32, dtype=np.uint8)
        ends = [token for token in request.params.eos_ids if 0 <= token < self.vocab_size]
        bits[ends or slice(None)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def _fail(self, state: GrammarState, reason: str = "") -> None:
        if not reason and state.matcher is not None:
            reason = one_line(state.matcher.get_error())
        self._failed.setdefault(state.request, f"the grammar cannot be followed: {reason}")


def unpacked(words_nw: Words, vocab_size: int, device: torch.device) -> Tensor:
    """Unpack masks to one boolean per token. [n, v]"""
    if device.type == "cpu":
        bits = np.unpackbits(words_nw.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))
    return unpacked_on_device(torch.from_numpy(words_nw).to(device), vocab_size)  # 1/8 of the bytes


def unpacked_on_device(words_nw: Tensor, vocab_size: int) -> Tensor:
    """Like `unpacked`, on the device of the words."""
    shifts = torch.arange(8, dtype=torch.uint8, device=words_nw.device)
    bits = (words_nw.view(torch.uint8)[:, :, None] >> shifts) & 1
    return bits.view(len(words_nw), -1)[:, :vocab_size].bool()
