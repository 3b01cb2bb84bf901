"""Splits text with reasoning between two tags, such as <think> and </think>, before the answer."""

from __future__ import annotations

from collections.abc import Mapping

from headway.text.split import ANSWER, MARKUP, REASONING, Part, Splitter, num_held_back

START, END = "<think>", "</think>"
PLAIN = {START: START, END: END}
WHITESPACE = " \t\r\n"


class ThinkSplitter(Splitter):
    """Reasoning first, if there is any. Line breaks beside the tags are dropped.

    `is_open`: the text begins within the reasoning; True if the start tag is in the prompt, False
    if the reasoning has ended there, None if only a start tag in the text begins reasoning. An
    answer that has begun may contain tags.
    """

    def __init__(self, tags: Mapping[str, str] = PLAIN, is_open: bool | None = None) -> None:
        super().__init__(self._answer if is_open is False else self._begin, tags)
        self._start, self._end = tags[START], tags[END]
        self.is_open = bool(is_open)
        self._has_begun = False  # the reasoning has text
        if is_open is False:
            self._become(ANSWER)

    def _begin(self) -> list[Part] | None:
        """Before the start tag."""
        held = self._held.lstrip(WHITESPACE)
        if len(held) < len(self._start) and self._start.startswith(held):
            return None
        has_tag = held.startswith(self._start)
        if not has_tag and not self.is_open:
            self._become(ANSWER)
            self._state = self._answer
            return []
        self._become(REASONING)
        self._read(len(self._held) - len(held) + len(self._start) * has_tag)
        self._state = self._reasoning
        return []

    def _reasoning(self) -> list[Part] | None:
        before, tag, _ = self._held.partition(self._end)
        kept = before if tag else before[: len(before) - num_held_back(before, [self._end])]
        text = kept.rstrip("\n")
        if not self._has_begun:
            text = text.lstrip("\n")
            self._has_begun = bool(text)
        if tag:
            self._read(len(before) + len(tag))
            self._become(MARKUP)
            self._state = self._gap
            return [self._part(REASONING, text)]
        length = len(kept.rstrip("\n"))
        return [self._part(REASONING, text)] if self._read(length) else None

    def _gap(self) -> list[Part] | None:
        """After the end tag, before the first character of the answer."""
        self._read(len(self._held) - len(self._held.lstrip("\n")))
        if not self._held:
            return None
        self._become(ANSWER)
        self._state = self._answer
        return []

    def _answer(self) -> list[Part] | None:
        return [self._part(ANSWER, self._read(len(self._held)))] if self._held else None

    def _rest(self, is_cut: bool) -> list[Part]:
        if self._state == self._begin:
            is_tag = is_cut and bool(self._held.strip())  # a part of the start tag
            self._become(REASONING if self.is_open or is_tag else ANSWER)
            return [] if is_tag else [self._part(self.kinds[-1][1], self._held)]
        if self._state == self._reasoning:
            text = self._held if self._has_begun else self._held.lstrip("\n")
            return [self._part(REASONING, text.rstrip("\n"))]
        return []
