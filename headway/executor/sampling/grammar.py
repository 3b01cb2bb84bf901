"""Holds the answers of seated requests to their grammars: says which tokens may come next.

A matcher follows the output of one request and knows what may follow it. Its masks are made on the
host, packed, and applied to the logits of all rows that have a grammar at once. A grammar that
breaks ends its own request: only an end is allowed there, and `take_failed` says why.

Shapes: n rows that have a grammar, v tokens of the vocabulary, w words of 32 of them.
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
from headway.executor.sampling.matchers import Matchers, ReadGrammar
from headway.grammar.sandbox import one_line
from headway.plan import Failure, Rows
from headway.request import Request
from headway.sampling_params import Sampling

if TYPE_CHECKING:
    from llguidance import LLMatcher

Words = npt.NDArray[np.int32]
MAX_MASK_SECONDS = 0.1  # CPU time of one mask; a grammar that needs more ends its request
MIN_TOKENS_PER_LEXER = 64  # a request that fills a lexer with fewer tokens ends


@dataclass(slots=True, eq=False)
class Follower:
    """A seated request and its matcher; None if there could be none."""

    request: Request
    may_ban: bool  # tokens that the grammar may need, by another of its wishes
    grammar: ReadGrammar | None = None
    matcher: LLMatcher | None = None
    tokens: list[int] = field(default_factory=list)  # generated so far
    num_before_lexer: int | None = None  # tokens when it last got a new lexer


class Grammars:
    """The matchers of a sampler's rows."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.matchers = Matchers(vocab_size)
        self._followers: dict[int, Follower] = {}  # by row
        self._failed: dict[Request, str] = {}  # and why

    def seat(
        self, row: int, request: Request, sampling: Sampling, output: Sequence[int] = ()
    ) -> None:
        """Give a row to a request that has said `output` so far."""
        self._followers.pop(row, None)
        if sampling.grammar is None:
            return
        may_ban = bool(sampling.bad_words) or sampling.allowed_tokens is not None
        follower = Follower(request, may_ban or request.params.min_tokens > 0, tokens=list(output))
        self._followers[row] = follower
        try:
            self._follow(follower, self.matchers.read(sampling.grammar))
        except Exception as error:  # whatever it is, it is this request's and not the batch's
            self._fail(follower, f"{type(error).__name__}: {error}")

    def take_failed(self, step: int = 0) -> dict[Request, Failure]:
        """Those whose grammar broke since the last call, as of this step."""
        taken, self._failed = self._failed, {}
        return {request: Failure(step, reason, "grammar") for request, reason in taken.items()}

    def mask(self, choice_nv: Tensor, logits_nv: Tensor, rows: Rows) -> None:
        """Rule out, in place, what the grammars of these rows do not allow next.

        Where other wishes have ruled out all that a grammar allows, the grammar is served: such a
        row is taken from the raw `logits_nv`.
        """
        places = [i for i, row in enumerate(rows.tolist()) if row in self._followers]
        if not places:
            return
        followers = [self._followers[row] for row in rows[places].tolist()]
        is_allowed = unpacked(self._words(followers), self.vocab_size, choice_nv.device)
        at = index(np.array(places), choice_nv)
        kept = choice_nv[at].masked_fill_(~is_allowed, -torch.inf)
        if any(follower.may_ban for follower in followers):
            raw = logits_nv[at].float().masked_fill_(~is_allowed, -torch.inf)
            kept = torch.where((kept == -torch.inf).all(-1, keepdim=True), raw, kept)
        choice_nv[at] = kept

    def remember(self, row: int, token: int) -> None:
        """Take note of a token that was generated."""
        follower = self._followers.get(row)
        if follower is None or follower.matcher is None or follower.matcher.is_error():
            return
        follower.tokens.append(token)
        if not follower.matcher.consume_token(token):
            self._recover(follower)

    def _words(self, followers: list[Follower]) -> Words:
        """A bit for each token that may come next. [n, w]"""
        words = np.zeros((len(followers), -(-self.vocab_size // 32)), dtype=np.int32)
        for place, follower in enumerate(followers):
            begun = time.thread_time()  # what else the machine does must not end a request
            self._fill(words[place], follower)
            seconds = time.thread_time() - begun
            if seconds > MAX_MASK_SECONDS and follower.matcher is not None:
                most = f"the limit is {MAX_MASK_SECONDS * 1e3:.0f} ms"
                self._fail(follower, f"a token took {seconds * 1e3:.0f} ms of CPU time; {most}")
                follower.matcher = None
        return words

    def _fill(self, words: Words, follower: Follower) -> None:
        """Write one row's mask; it allows the end alone if the grammar cannot be followed."""
        if not follower.tokens and follower.grammar is not None and follower.grammar.first_mask:
            words[:] = np.frombuffer(follower.grammar.first_mask, dtype=np.int32)[: len(words)]
            return
        while follower.matcher is not None and not follower.matcher.is_error():
            follower.matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            if not follower.matcher.is_error():
                return
            self._recover(follower)
        words[:] = self._ends(follower.request)

    def _follow(self, follower: Follower, grammar: ReadGrammar) -> None:
        """Give a follower a matcher that has seen its tokens."""
        follower.grammar, follower.matcher = grammar, grammar.first.deep_copy()
        if follower.matcher.is_error() or not follower.matcher.consume_tokens(follower.tokens):
            self._recover(follower)

    def _recover(self, follower: Follower) -> None:
        """After an error of its matcher: begin again with a new lexer, or fail.

        Requests with the same grammar share a lexer. When it is full, each goes on with a new one,
        except a request that fills them by itself.
        """
        assert follower.matcher is not None and follower.grammar is not None, "else no error"
        before, num_tokens = follower.num_before_lexer, len(follower.tokens)
        is_greedy = before is not None and num_tokens - before < MIN_TOKENS_PER_LEXER
        if is_greedy or not follower.grammar.is_full():
            self._fail(follower)
            return
        follower.num_before_lexer = num_tokens
        self._follow(follower, self.matchers.renew(follower.grammar))

    def _ends(self, request: Request) -> Words:
        """Only what ends a request; anything, if nothing does."""
        bits = np.zeros(-(-self.vocab_size // 32) * 32, dtype=np.uint8)
        ends = [token for token in request.params.eos_ids if 0 <= token < self.vocab_size]
        bits[ends or slice(None)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def _fail(self, follower: Follower, reason: str = "") -> None:
        if not reason and follower.matcher is not None:
            reason = one_line(follower.matcher.get_error())
        self._failed.setdefault(follower.request, f"the grammar cannot be followed: {reason}")


def unpacked(words_nw: Words, vocab_size: int, device: torch.device) -> Tensor:
    """Packed bits as truths, one for each token. [n, v]"""
    if device.type == "cpu":
        bits = np.unpackbits(words_nw.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))
    return unpacked_there(torch.from_numpy(words_nw).to(device), vocab_size)  # an eighth to send


def unpacked_there(words_nw: Tensor, vocab_size: int) -> Tensor:
    """As `unpacked`, by the device that the words are on."""
    shifts = torch.arange(8, dtype=torch.uint8, device=words_nw.device)
    bits = (words_nw.view(torch.uint8)[:, :, None] >> shifts) & 1
    return bits.view(len(words_nw), -1)[:, :vocab_size].bool()
