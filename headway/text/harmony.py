"""Splits the messages of the harmony format, which gpt-oss writes.

A message is `<|channel|>analysis<|message|>text<|end|>`. The channel `analysis` is reasoning, `final`
and `commentary` are shown, and a message to=functions.name is a call. Other text is never shown as
the answer.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from headway.text.split import ANSWER, CALL, MARKUP, REASONING, Part, Splitter, num_held_back

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
CALL_END, RETURN, CONSTRAIN = "<|call|>", "<|return|>", "<|constrain|>"
TAGS = (START, CHANNEL, MESSAGE, END, CALL_END, RETURN, CONSTRAIN)
OUTPUT_ENDS = (CALL_END, RETURN)  # the model writes nothing after them
RECIPIENT = re.compile(r"to=([\w.-]+)")
SHOWN = ("final", "commentary")


class HarmonySplitter(Splitter):
    """The text begins in the header of a message, before its channel.

    `names` are the functions that the model may call; a call of another one is reasoning.
    """

    def __init__(self, tags: Mapping[str, str], names: Collection[str] = ()) -> None:
        super().__init__(self._header, tags)
        self._names = names
        self._ends = [tags[tag] for tag in (END, CALL_END, RETURN, START, CHANNEL)]
        self._kind = REASONING  # of the current message
        self._gap = ""  # between this message and an earlier one of its kind
        self._has_text = set[str]()  # kinds of earlier messages

    def _header(self) -> list[Part] | None:
        before, tag, _ = self._held.partition(self.tags[MESSAGE])
        if not tag:
            return None
        header = before.rpartition(self.tags[START])[2]
        channel = re.match(r"\s*(\w*)", header.rpartition(self.tags[CHANNEL])[2])
        recipient = RECIPIENT.search(header)
        self._kind, name = REASONING, ""
        if recipient is not None:
            name = recipient[1].removeprefix("functions.")
            if name in self._names and name != recipient[1]:
                self._kind = CALL
        elif channel is not None and channel[1] in SHOWN:
            self._kind = ANSWER
        self._become(REASONING if self._kind == REASONING else MARKUP)
        self._read(len(before) + len(tag))
        self._become(self._kind)
        self._gap = "\n" if self._kind in self._has_text else ""
        self._state = self._body
        return [Part(CALL, "", name)] if self._kind == CALL else []

    def _body(self) -> list[Part] | None:
        places = [(self._held.find(tag), tag) for tag in self._ends]
        place, tag = min([each for each in places if each[0] >= 0], default=(-1, ""))
        if place < 0:
            text = self._read(len(self._held) - num_held_back(self._held, self._ends))
            return self._parts(text) if text else None
        parts = self._parts(self._read(place))
        if tag not in (self.tags[START], self.tags[CHANNEL]):  # these begin the next header
            self._read(len(tag))
        self._become(MARKUP)
        self._state = self._header
        return parts

    def _rest(self, is_cut: bool) -> list[Part]:
        if self._state == self._body:
            return self._parts(self._held)
        text = self._held[max(0, -self.num_read) :]
        is_header = self.kinds or any(tag in text for tag in self.tags.values())
        self._become(MARKUP if is_header else REASONING)
        return [] if is_header else [self._part(REASONING, text)]

    def _parts(self, text: str) -> list[Part]:
        if not text:
            return []
        gap, self._gap = self._gap, ""
        if self._kind != CALL:
            self._has_text.add(self._kind)
        return [self._part(self._kind, gap + text)]
