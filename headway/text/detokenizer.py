"""Incremental detokenization: returns only text that later tokens cannot change.

`Detokenizer` holds back partial characters, `StopScanner` text that may become a stop string.
`TextStream` combines both for one request. Knows nothing of engines or servers.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence, Set
from functools import lru_cache
from typing import TYPE_CHECKING

from headway.errors import InvalidRequest

if TYPE_CHECKING:
    from headway.text.tokenizer import Tokenizer


class Detokenizer:
    """Text of a stream of tokens; all that push and finish return equals decode() of all ids."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._spell = tokenizer.spell
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._num_to_strip = tokenizer.num_stripped or 0  # leading spaces still to be stripped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._run = bytearray()  # bytes of the current run of byte-fallback tokens
        self._is_simple = not self._num_to_strip  # nothing is held back or still to be stripped

    def push(self, ids: Sequence[int]) -> str:
        """The text that these tokens complete: whole characters, and finished runs of bytes."""
        parts: list[str] = []
        for id in ids:
            if id in self._skipped:
                continue
            spelled, is_fallback, text = self._spell(id)
            if text is not None and self._is_simple:  # almost always
                parts.append(text)
            elif is_fallback:
                self._run += spelled
                self._is_simple = False
            else:
                if text is None:
                    text = self._decoded(spelled)
                else:
                    text = self._utf8.decode(b"", final=True) + text
                parts += self._stripped(self._end_run()), self._stripped(text)
                self._is_simple = not (self._utf8.getstate()[0] or self._num_to_strip)
        return "".join(parts)

    def finish(self) -> str:
        """The text that was held back; partial characters become U+FFFD."""
        return self._stripped(self._end_run() + self._utf8.decode(b"", final=True))

    def _decoded(self, spelled: bytes) -> str:
        """Whole characters. Ends a surrogate early: Python would wait for a third byte."""
        text, (held, _) = self._utf8.decode(spelled), self._utf8.getstate()
        if len(held) == 2 and held[0] == 0xED and held[1] >= 0xA0:
            text += self._utf8.decode(b"", final=True)
        return text

    def _end_run(self) -> str:
        """The text of the run of bytes. If any part is invalid, each byte becomes U+FFFD."""
        if not self._run:
            return ""
        run, self._run = self._run, bytearray()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return "\N{REPLACEMENT CHARACTER}" * len(run)

    def _stripped(self, text: str) -> str:
        while self._num_to_strip and text:
            if text[0] == " ":
                text, self._num_to_strip = text[1:], self._num_to_strip - 1
            else:
                self._num_to_strip = 0
        return text


class StopScanner:
    """Searches a text for stop strings; the result does not depend on how the text is divided.

    The stop string that is complete first wins; among several, the longest.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        for index, stop in enumerate(stops):
            if not isinstance(stop, str) or not stop:
                raise InvalidRequest(f"stop[{index}] is {stop!r}; it must be a non-empty text")
        self.hit: str | None = None
        self._root = _automaton(tuple(stops)) if stops else None
        self._state = self._root
        self._include = include
        self._held = ""

    def push(self, text: str) -> str:
        """The text that can be shown now; a stop string ends it, and the rest is dropped."""
        if self.hit is not None:
            return ""
        if self._state is None:
            return text
        text = self._held + text
        state = self._state
        for index in range(len(self._held), len(text)):
            state = state.next(text[index])
            if state.stop:
                self.hit, self._held = state.stop, ""
                end = index + 1
                return text[: end if self._include else end - len(state.stop)]
        self._state = state
        num_shown = len(text) - state.depth
        self._held = text[num_shown:]
        return text[:num_shown]

    def finish(self) -> str:
        """The text that was held back, which did not become a stop string."""
        held, self._held = self._held, ""
        return held


class _State:
    """The longest suffix of a text that is a prefix of a stop string (Aho-Corasick)."""

    __slots__ = ("children", "depth", "fallback", "stop")

    def __init__(self, depth: int) -> None:
        self.depth = depth  # its length in characters
        self.children: dict[str, _State] = {}
        self.fallback: _State | None = None  # the next shorter such suffix; None at the root
        self.stop = ""  # the longest stop string that ends here

    def next(self, letter: str) -> _State:
        """The state after one more character; amortized constant time."""
        state = self
        while letter not in state.children:
            if state.fallback is None:
                return state
            state = state.fallback
        return state.children[letter]


@lru_cache(maxsize=8)
def _automaton(stops: tuple[str, ...]) -> _State:
    """The root state; the samples of a request share it."""
    root = _State(0)
    for stop in stops:
        state = root
        for letter in stop:
            if letter not in state.children:
                state.children[letter] = _State(state.depth + 1)
            state = state.children[letter]
        state.stop = stop
    level = [root]
    while level:  # in order of depth, because a fallback is shorter
        for state in level:
            for letter, child in state.children.items():
                child.fallback = state.fallback.next(letter) if state.fallback else root
                child.stop = child.stop or child.fallback.stop
        level = [child for state in level for child in state.children.values()]
    return root


class TextStream:
    """The text of one sample: its tokens without the hidden ones, up to a stop string."""

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str] = (), include_stop: bool = False,
        skip_special: bool = True, hidden_ids: Set[int] = frozenset(), min_tokens: int = 0,
    ) -> None:  # fmt: skip
        """Stop strings that begin within the first `min_tokens` tokens are ignored."""
        self._detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
        self._scanner, self._has_stops = StopScanner(stops, include_stop), bool(stops)
        self._hidden_ids = hidden_ids
        self._num_ignored = min_tokens  # tokens still to come in which stop strings are ignored
        self._parts: list[str] = []

    @property
    def hit(self) -> str | None:
        return self._scanner.hit

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def push(self, ids: Sequence[int]) -> str:
        """The text that can be shown after these tokens."""
        if not self._has_stops:
            return self._keep(self._decode(ids))
        ignored = ids[: self._num_ignored]
        self._num_ignored -= len(ignored)
        text = self._decode(ignored) if ignored else ""
        return self._keep(text + self._scanner.push(self._decode(ids[len(ignored) :])))

    def _decode(self, ids: Sequence[int]) -> str:
        return self._detokenizer.push([id for id in ids if id not in self._hidden_ids])

    def finish(self) -> str:
        """The text that was held back; it may still complete a stop string."""
        shown = self._scanner.push(self._detokenizer.finish())
        return self._keep(shown + self._scanner.finish())

    def _keep(self, text: str) -> str:
        self._parts.append(text)
        return text
