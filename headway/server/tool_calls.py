"""Finds tool calls in what a model says, as it says it.

Text that may still become a call is held back until it is known; a call is handed over when it is
whole. What looks like a call and is none stays text, so nothing that was said is ever lost.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

BLANK = " \t\r\n"
LAST_BLANKS = re.compile(r"[ \t\r\n]*\Z")
DECODER = json.JSONDecoder(strict=False)  # models write line breaks into strings


class Style(NamedTuple):
    """How a model writes a call: {"name": ..., <arguments>: ...} between `begin` and `end`."""

    begin: str
    end: str
    arguments: str
    between: str  # of two calls; empty if a model makes one at a time

    @property
    def open(self) -> str:
        return self.begin.strip()

    @property
    def close(self) -> str:
        return self.end.strip()


TAGGED = Style("<tool_call>\n", "\n</tool_call>", "arguments", "\n")
JSON_ALONE = Style("", "", "parameters", "")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call; `arguments` is JSON."""

    id: str
    name: str
    arguments: str

    def as_message(self) -> dict[str, Any]:
        """As it stands in a message."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}

    def as_delta(self, index: int) -> dict[str, Any]:
        """As it stands in a stream: all of it in one piece."""
        return {"index": index, **self.as_message()}


class Parsed(NamedTuple):
    """A whole answer: OpenAI's `content` and `tool_calls`."""

    content: str | None
    calls: list[ToolCall]


Found = list[str | ToolCall]


class CallReader:
    """The calls of one sample. Feed it with `push` and end it with `finish`."""

    def __init__(
        self, style: Style, names: frozenset[str], new_id: Callable[[], str] | None = None
    ) -> None:
        self.style, self._names = style, names
        self.num_calls = 0
        self._new_id = new_id or (lambda: f"call_{secrets.token_hex(12)}")
        self._held = ""  # not known yet to be text or a call
        self._is_inside = False  # of a call's tags
        self._is_plain = False  # JSON_ALONE: it began as text, so it is text

    def push(self, text: str) -> Found:
        """What is now known: texts and calls, in order."""
        self._held += text
        return self._read_tagged() if self.style.open else self._read_json(is_over=False)

    def finish(self) -> Found:
        """The rest."""
        found: Found = [] if self.style.open else self._read_json(is_over=True)
        if self._is_inside:  # cut short, perhaps just before its end
            body, self._is_inside = self._held, False
            call = self._call(_decoded(body)[0])
            found.append(call or f"{self.style.open}{body}")
        elif self._held.strip() or not self.num_calls:
            found.append(self._held)
        self._held = ""
        return [each for each in found if each]

    def parse(self, text: str) -> Parsed:
        """A whole answer at once."""
        found = [*self.push(text), *self.finish()]
        content = "".join(each for each in found if isinstance(each, str))
        calls = [each for each in found if isinstance(each, ToolCall)]
        return Parsed(None if calls and not content.strip() else content, calls)

    def _read_tagged(self) -> Found:
        found: Found = []
        while (step := self._inside() if self._is_inside else self._outside()) is not None:
            found += [each for each in step if each]
        return found

    def _outside(self) -> Found | None:
        """Text up to a call; None if no more is known."""
        before, tag, after = self._held.partition(self.style.open)
        if tag:
            self._held, self._is_inside = after, True
            return [before.rstrip(BLANK)]
        kept = self._num_held_back(before)
        if kept == len(before):
            return None
        self._held = before[len(before) - kept :]
        return [before[: len(before) - kept]]

    def _num_held_back(self, text: str) -> int:
        """Characters at the end that may begin a call, with the blanks before them."""
        tag = self.style.open
        lengths = range(min(len(tag) - 1, len(text)), 0, -1)
        begun = next((n for n in lengths if text.endswith(tag[:n])), 0)
        blanks = LAST_BLANKS.search(text[: len(text) - begun])
        return begun + (len(blanks[0]) if blanks else 0)

    def _inside(self) -> Found | None:
        """A call up to its end; None while it is not there."""
        start = 0
        while (end := self._held.find(self.style.close, start)) >= 0:
            body, start = self._held[:end], end + len(self.style.close)
            value, is_cut = _decoded(body)
            if is_cut:  # inside a string: the tag is part of an argument
                continue
            self._held, self._is_inside = self._held[start:], False
            return [self._call(value) or f"{self.style.open}{body}{self.style.close}"]
        return None

    def _read_json(self, *, is_over: bool) -> Found:
        """Calls one after the other, as long as there is nothing else."""
        found: Found = []
        while not self._is_plain:
            held = self._held.lstrip(BLANK + (";" if self.num_calls else ""))
            if not held or (held[0] == "{" and not is_over and _decoded_first(held) is None):
                return found
            value, length = _decoded_first(held) or (None, 0)
            call = self._call(value)
            if call is None:
                self._is_plain = True
            else:
                found.append(call)
                self._held = held[length:]
        found.append(self._held)
        self._held = ""
        return found

    def _call(self, value: object) -> ToolCall | None:
        """A decoded value as a call; None if it is no call of a tool that was offered."""
        if not isinstance(value, dict) or value.get("name") not in self._names:
            return None
        arguments = value.get(self.style.arguments, {})
        if not isinstance(arguments, dict | str):
            return None
        self.num_calls += 1
        if not isinstance(arguments, str):  # some models write JSON within JSON
            arguments = json.dumps(arguments, ensure_ascii=False)
        return ToolCall(self._new_id(), value["name"], arguments)


def _decoded(body: str) -> tuple[object, bool]:
    """The JSON of a body; None if it is none, and whether it ends within a string."""
    try:
        return DECODER.decode(body.strip()), False
    except json.JSONDecodeError as error:
        return None, error.msg.startswith("Unterminated string")
    except RecursionError:
        return None, False


def _decoded_first(text: str) -> tuple[object, int] | None:
    """The JSON that a text begins with, and its length; None if there is none, or not all of it."""
    try:
        return DECODER.raw_decode(text)
    except (json.JSONDecodeError, RecursionError):
        return None
