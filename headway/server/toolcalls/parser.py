"""Finds tool calls in generated text, while the text is still being generated.

The arguments of a call are passed on as they come. Text that may still turn out to be a call is
held back until that is known. Text that looks like a call but is none stays text, so no generated
text is ever lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from headway.server.toolcalls.formats import (
    CallDelta,
    Parsed,
    Piece,
    ToolFormat,
    gathered,
    new_call_id,
)

BLANK = " \t\r\n"
LAST_BLANKS = re.compile(r"[ \t\r\n]*\Z")
DECODER = json.JSONDecoder(strict=False)  # models write line breaks into strings
# A call that can be streamed: the name comes first and the arguments are an object.
HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([\w-]+)"\s*,\s*"(arguments|parameters)"\s*:\s*(?=\{)')
NAMED_HEAD = re.compile(r"\s*([\w-]+)(?:\[ARGS\])?\s*(?=\{)")  # Mistral since its tokenizer v11


class JsonScanner:
    """Follows JSON from the opening brace of an object to its end."""

    def __init__(self) -> None:
        self.depth = 0
        self._is_string = False
        self._is_escaped = False

    def feed(self, text: str) -> tuple[str, int]:
        """The text up to the object's end, with control characters escaped, and its length."""
        found: list[str] = []
        for place, letter in enumerate(text):
            if self._is_string:
                found.append(self._in_string(letter))
                continue
            found.append(letter)
            if letter == '"':
                self._is_string = True
            elif letter in "{[":
                self.depth += 1
            elif letter in "}]":
                self.depth -= 1
                if self.depth <= 0:
                    return "".join(found), place + 1
        return "".join(found), len(text)

    def _in_string(self, letter: str) -> str:
        if self._is_escaped:
            self._is_escaped = False
        elif letter == "\\":
            self._is_escaped = True
        elif letter == '"':
            self._is_string = False
        elif letter < " ":  # a raw line break is no JSON, but models write it
            return json.dumps(letter)[1:-1]
        return letter


class ToolCallParser:
    """The calls of one answer. Give it text with `push` and end it with `finish`.

    `is_forced`: a grammar allows nothing but calls, and no special token before them.
    """

    def __init__(
        self,
        format: ToolFormat,
        names: frozenset[str],
        new_id: Callable[[], str] | None = None,
        *,
        is_forced: bool = False,
    ) -> None:
        self.format, self._names = format, names
        self.num_calls = 0
        self._new_id = new_id or (lambda: new_call_id(format))
        self._held = ""  # text whose meaning is not known yet
        self._opening = ""  # consumed before it; part of the text if no call follows
        self._scanner = JsonScanner()  # of arguments, and then of the rest of the call
        self._has_outer = False  # whether an object is around the arguments
        starts_with_call = not format.open or (is_forced and format.is_list)
        self._state: Callable[[], list[Piece] | None] = (
            self._start if starts_with_call else self._text
        )

    def push(self, text: str) -> list[Piece]:
        """The pieces that are known after this text, in order."""
        self._held += text
        found: list[Piece] = []
        while (pieces := self._state()) is not None:
            found += [piece for piece in pieces if piece]
        return found

    def finish(self) -> list[Piece]:
        """The rest of the answer, now that no more text comes."""
        found: list[Piece] = []
        held, self._held = self._held, ""
        if self._state == self._call:
            call = self._whole_call(_decoded(held)[0])
            found += call or [self._opening + held]
        elif self._state in (self._start, self._text) and (held.strip() or not self.num_calls):
            found.append(held)
        self._state = self._text
        return [piece for piece in found if piece]

    def parse(self, text: str) -> Parsed:
        """A complete answer at once."""
        return gathered([*self.push(text), *self.finish()])

    # States. Each consumes some of the held text; None: it needs more.

    def _start(self) -> list[Piece] | None:
        """At the beginning of an answer that may be nothing but calls."""
        held = self._held.lstrip(BLANK)
        opening = "[" if self.format.is_list else "{"
        if not held:
            return None
        if not held.startswith(opening):
            self._state = self._plain if not self.format.open else self._text
            return []
        if self.format.is_list:
            self._opening, self._held = "[", held[1:]
        self._state = self._call
        return []

    def _plain(self) -> list[Piece] | None:
        """Text of a model that writes calls only at the beginning."""
        if not self._held:
            return None
        text, self._held = self._held, ""
        return [text]

    def _text(self) -> list[Piece] | None:
        """Text up to a call's opening tag."""
        before, tag, after = self._held.partition(self.format.open)
        if tag:
            text = before.rstrip(BLANK)
            self._held, self._opening = after, before[len(text) :] + tag
            self._state = self._list if self.format.is_list else self._call
            return [text]
        num_held = self._num_held_back(before)
        if num_held == len(before):
            return None
        self._held = before[len(before) - num_held :]
        return [before[: len(before) - num_held]]

    def _list(self) -> list[Piece] | None:
        """After the tag of a list: the list, or a bare name."""
        held = self._held.lstrip(BLANK)
        if not held:
            return None
        if held.startswith("["):
            self._opening, held = f"{self._opening}[", held[1:]
        self._held, self._state = held, self._call
        return []

    def _call(self) -> list[Piece] | None:
        """A call: streamed from its arguments on if it can be, else once it is complete."""
        head = HEAD.match(self._held)
        if head is None and self.format.is_list:
            head = NAMED_HEAD.match(self._held)
        is_known = head is not None and head[1] in self._names
        if is_known and head is not None and head.re is HEAD:
            is_known = head[2] == self.format.arguments
        if not is_known or head is None:
            return self._complete()
        self._scanner, self._has_outer = JsonScanner(), head.re is HEAD
        self._held = self._held[head.end() :]
        self._state = self._arguments
        return [self._begun(head[1])]

    def _arguments(self) -> list[Piece] | None:
        if not self._held:
            return None
        text, length = self._scanner.feed(self._held)
        self._held = self._held[length:]
        if self._scanner.depth == 0:
            self._state = self._rest
            self._scanner.depth = 1 if self._has_outer else 0  # the object around the arguments
        return [CallDelta(self.num_calls - 1, text)]

    def _rest(self) -> list[Piece] | None:
        """The end of the call's own object, with any further members, which mean nothing here."""
        if self._scanner.depth:
            if not self._held:
                return None
            _, length = self._scanner.feed(self._held)
            self._held = self._held[length:]
            if self._scanner.depth:
                return None
        self._state = self._after
        return []

    def _after(self) -> list[Piece] | None:
        """Between a call and what follows it: its closing tag, another call, or text."""
        held = self._held.lstrip(BLANK)
        if self.format.close:
            if held.startswith(self.format.close):
                self._held = held[len(self.format.close) :]
            elif self.format.close.startswith(held):
                return None
            self._state = self._text
            return []
        held = held.lstrip(BLANK + (",]" if self.format.is_list else ";"))
        if not held:
            return None
        if held.startswith("{"):
            self._held, self._state = held, self._call
        elif self.format.is_list:
            self._held, self._state = held, self._text
        else:
            self._state = self._plain
        return []

    def _complete(self) -> list[Piece] | None:
        """A call that cannot be streamed, once all of it is there; text if it is none."""
        if self.format.close:
            return self._closed()
        found = _decoded_first(self._held) if "}" in self._held else None
        if found is None and self._may_be_json():
            return None
        value, length = found or (None, 0)
        call = self._whole_call(value)
        if call is None:
            text, self._held = self._opening + self._held, ""
            self._state = self._text if self.format.open else self._plain
            return [text]
        self._held, self._state = self._held[length:], self._after
        return call

    def _closed(self) -> list[Piece] | None:
        start = 0
        while (end := self._held.find(self.format.close, start)) >= 0:
            body, start = self._held[:end], end + len(self.format.close)
            value, is_cut = _decoded(body)
            if is_cut:  # inside a string: the tag is part of an argument
                continue
            self._held, self._state = self._held[start:], self._text
            return self._whole_call(value) or [f"{self._opening}{body}{self.format.close}"]
        return None

    # Parts of the states.

    def _may_be_json(self) -> bool:
        """Whether the held text may still become a call."""
        held = self._held.lstrip(BLANK)
        if not held or held[0] == "{":
            return True
        return self.format.is_list and re.fullmatch(r"[\w-]*(\[A?R?G?S?\]?)?\s*", held) is not None

    def _num_held_back(self, text: str) -> int:
        """Characters at the end that may begin a call, with the blanks before them."""
        tag = self.format.open
        lengths = range(min(len(tag) - 1, len(text)), 0, -1)
        begun = next((n for n in lengths if text.endswith(tag[:n])), 0)
        blanks = LAST_BLANKS.search(text[: len(text) - begun])
        return begun + (len(blanks[0]) if blanks else 0)

    def _begun(self, name: str, arguments: str = "") -> CallDelta:
        self.num_calls += 1
        self._opening = ""
        return CallDelta(self.num_calls - 1, arguments, self._new_id(), name)

    def _whole_call(self, value: object) -> list[Piece] | None:
        """A decoded value as a call; None if it is no call of a tool that may be called."""
        if not isinstance(value, dict) or value.get("name") not in self._names:
            return None
        arguments = value.get(self.format.arguments, {})
        if not isinstance(arguments, dict | str):
            return None
        if not isinstance(arguments, str):  # some models write JSON within JSON
            arguments = json.dumps(arguments, ensure_ascii=False)
        return [self._begun(value["name"], arguments)]


def _decoded(body: str) -> tuple[object, bool]:
    """The JSON of a text; None if it is none, and whether it ends within a string."""
    try:
        return DECODER.decode(body.strip()), False
    except json.JSONDecodeError as error:
        return None, error.msg.startswith("Unterminated string")
    except RecursionError:
        return None, False


def _decoded_first(text: str) -> tuple[object, int] | None:
    """The JSON that a text begins with, and its length; None if there is none, or not all of it."""
    blanks = len(text) - len(text.lstrip(BLANK))
    try:
        value, length = DECODER.raw_decode(text[blanks:])
    except (json.JSONDecodeError, RecursionError):
        return None
    return value, blanks + length
