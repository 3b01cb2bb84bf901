"""Tokens to text as they come: nothing is shown that a later token could change or take back.

`Detokenizer` holds back half characters, `StopScanner` what may become a stop string, `TextStream`
is both for one request. Works on ids and text only; knows nothing of engines or servers.
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
    """One stream of tokens as text; all that push and finish return is decode() of all ids."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._spell = tokenizer.spell
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._num_to_strip = tokenizer.num_stripped or 0  # leading spaces still to be dropped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._run = bytearray()  # byte-fallback tokens whose run has not ended
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        """All the text returned so far."""
        return "".join(self._parts)

    def push(self, ids: Sequence[int]) -> str:
        """The text these tokens settle: whole characters, and no run of bytes that may go on."""
        parts: list[str] = []
        for id in ids:
            if id in self._skipped:
                continue
            spelled, is_fallback = self._spell(id)
            if is_fallback:
                self._run += spelled
            else:
                parts += self._end_run(), self._decoded(spelled)
        return self._keep("".join(parts))

    def finish(self) -> str:
        """The rest: what was held back is now known to stay a fragment."""
        return self._keep(self._end_run() + self._utf8.decode(b"", final=True))

    def _decoded(self, spelled: bytes) -> str:
        """Whole characters. Of half a surrogate Python waits for the rest, which cannot save it."""
        text, (held, _) = self._utf8.decode(spelled), self._utf8.getstate()
        if len(held) == 2 and held[0] == 0xED and held[1] >= 0xA0:
            text += self._utf8.decode(b"", final=True)
        return text

    def _end_run(self) -> str:
        """A run of bytes is read as a whole: if any part of it is no UTF-8, none of it is."""
        if not self._run:
            return ""
        run, self._run = self._run, bytearray()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return "\N{REPLACEMENT CHARACTER}" * len(run)

    def _keep(self, text: str) -> str:
        while self._num_to_strip and text:
            if text[0] == " ":
                text, self._num_to_strip = text[1:], self._num_to_strip - 1
            else:
                self._num_to_strip = 0
        self._parts.append(text)
        return text


class StopScanner:
    """Watches a text for stop strings; the cut into pushes never changes what is found or shown.

    The stop that is complete first wins; of several complete at the same character, the longest.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        for index, stop in enumerate(stops):
            if not isinstance(stop, str) or not stop:
                raise InvalidRequest(f"stop[{index}] is {stop!r}; a stop is a text, not empty")
        self.hit: str | None = None
        self._root = _automaton(tuple(stops)) if stops else None
        self._state = self._root
        self._include = include
        self._held = ""

    def push(self, text: str) -> str:
        """The text that may be shown now; a stop that is hit ends it, and what follows is dropped."""
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
        """What was held back: no stop came of it."""
        held, self._held = self._held, ""
        return held


class _State:
    """The longest end of a text that begins a stop string (Aho and Corasick)."""

    __slots__ = ("children", "depth", "fallback", "stop")

    def __init__(self, depth: int) -> None:
        self.depth = depth  # its number of characters
        self.children: dict[str, _State] = {}
        self.fallback: _State | None = None  # the longest shorter one; None at the root
        self.stop = ""  # the longest stop string that it ends with

    def next(self, letter: str) -> _State:
        """The state after one more letter; constant time on average over a text."""
        state = self
        while letter not in state.children:
            if state.fallback is None:
                return state
            state = state.fallback
        return state.children[letter]


@lru_cache(maxsize=8)
def _automaton(stops: tuple[str, ...]) -> _State:
    """The root of all states; the samples of a request share it."""
    root = _State(0)
    for stop in stops:
        state = root
        for letter in stop:
            if letter not in state.children:
                state.children[letter] = _State(state.depth + 1)
            state = state.children[letter]
        state.stop = stop
    level = [root]
    while level:  # shorter ones first: a fallback is shorter
        for state in level:
            for letter, child in state.children.items():
                child.fallback = state.fallback.next(letter) if state.fallback else root
                child.stop = child.stop or child.fallback.stop
        level = [child for state in level for child in state.children.values()]
    return root


class TextStream:
    """One request's text: its tokens without the hidden ones, up to a stop string."""

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str] = (), include_stop: bool = False,
        skip_special: bool = True, hidden_ids: Set[int] = frozenset(), min_tokens: int = 0,
    ) -> None:  # fmt: skip
        """No stop is seen that begins in the text of the first `min_tokens`."""
        self._detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
        self._scanner = StopScanner(stops, include_stop)
        self._hidden_ids = hidden_ids
        self._num_unseen = min_tokens  # tokens yet to come
        self._parts: list[str] = []

    @property
    def hit(self) -> str | None:
        """The stop string that ended the text."""
        return self._scanner.hit

    @property
    def text(self) -> str:
        """All the text returned so far."""
        return "".join(self._parts)

    def push(self, ids: Sequence[int]) -> str:
        """The text that may be shown after these tokens."""
        unseen = ids[: self._num_unseen]
        self._num_unseen -= len(unseen)
        text = self._decode(unseen) if unseen else ""
        return self._keep(text + self._scanner.push(self._decode(ids[len(unseen) :])))

    def _decode(self, ids: Sequence[int]) -> str:
        return self._detokenizer.push([id for id in ids if id not in self._hidden_ids])

    def finish(self) -> str:
        """The rest; it may still complete a stop."""
        shown = self._scanner.push(self._detokenizer.finish())
        return self._keep(shown + self._scanner.finish())

    def _keep(self, text: str) -> str:
        self._parts.append(text)
        return text
