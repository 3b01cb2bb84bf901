"""Splits generated text into reasoning, answer and calls while it is generated: the shared part.

A splitter holds back text that may become a tag. What it returns in total does not depend on how
the text is divided. Knows no tokens and no requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

QWEN3, DEEPSEEK_R1, GPT_OSS, AUTO = "qwen3", "deepseek_r1", "gpt_oss", "auto"
REASONING_PARSERS = (QWEN3, DEEPSEEK_R1, GPT_OSS, AUTO)
REASONING, ANSWER, CALL, MARKUP = "reasoning", "answer", "call", "markup"


class Part(NamedTuple):
    """A text of one kind; the first part of a call has the function's name."""

    kind: str
    text: str
    name: str = ""


class Splitter:
    """Base of the splitters: `push` takes text, `finish` ends it.

    `tags` maps each tag to what stands for it in the text: itself, or a mark. `kinds` has a pair (offset, kind) for each place of the raw text where the kind changes, and
    `num_read` is the length of the raw text that has been read, so that its kinds are known.
    """

    def __init__(self, state: Callable[[], list[Part] | None], tags: Mapping[str, str]) -> None:
        self.tags = tags
        self._marks = [(mark, tag) for tag, mark in tags.items() if mark != tag]
        self.kinds: list[tuple[int, str]] = []
        self.num_read = 0
        self._held, self._state = "", state

    def push(self, text: str) -> list[Part]:
        """The parts that are decided after this text, in order."""
        self._held += text
        found: list[Part] = []
        while (parts := self._state()) is not None:
            found += [part for part in parts if part.text or part.name]
        return found

    def finish(self, *, is_cut: bool = False) -> list[Part]:
        """The remaining parts; `is_cut`: the text ended at a limit, maybe within a tag."""
        parts = self._rest(is_cut)
        self._read(len(self._held))
        return [part for part in parts if part.text]

    def skip(self) -> None:
        """Ignore what has been pushed so far: it is the end of the prompt."""
        self.num_read = -len(self._held)
        self.kinds = [(0, kind) for _, kind in self.kinds[-1:]]

    @property
    def is_answering(self) -> bool:
        """Whether the text is in the answer, or in a call."""
        return bool(self.kinds) and self.kinds[-1][1] in (ANSWER, CALL)

    def _part(self, kind: str, text: str) -> Part:
        """A part; tags that are not read as tags are text."""
        for mark, tag in self._marks:
            text = text.replace(mark, tag)
        return Part(kind, text)

    def _rest(self, is_cut: bool) -> list[Part]:
        raise NotImplementedError

    def _read(self, length: int) -> str:
        """Consume this many characters of the held text and return them."""
        text, self._held = self._held[:length], self._held[length:]
        self.num_read += length
        return text

    def _become(self, kind: str) -> None:
        """From here on the raw text is of this kind."""
        self.kinds.append((self.num_read, kind))


def num_held_back(text: str, tags: Sequence[str]) -> int:
    """Length of the longest suffix of a text that may begin one of the tags."""
    longest = max(map(len, tags)) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(tag.startswith(text[-length:]) for tag in tags):
            return length
    return 0
