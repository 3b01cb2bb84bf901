"""Finds tool calls in generated text while the text is being generated.

The arguments of a call are streamed. Text that may become a call is held back until that is
decided. Text that resembles a call but is none stays text. Only the beginning of a call whose
arguments had not begun at max_tokens is dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from headway.server.toolcalls.formats import CallDelta, OutputPiece, ToolFormat, new_call_id

WHITESPACE = " \t\r\n"
DECODER = json.JSONDecoder(strict=False)  # models write raw line breaks into strings
# The beginning of a call that can be streamed: the name is first and the arguments are an object.
HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([\w-]+)"\s*,\s*"(arguments|parameters)"\s*:\s*(?=\{)')
NAMED_HEAD = re.compile(r"\s*([\w-]+)(?:\[ARGS\])?\s*(?=\{)")  # Mistral since its tokenizer v11


class JsonScanner:
    """Scans JSON from the opening brace of an object to its end."""

    def __init__(self) -> None:
        self.depth = 0
        self.is_over = False  # the object's end has been read
        self._is_string = False
        self._is_escaped = False

    def feed(self, text: str) -> tuple[str, int]:
        """The text up to the object's end with control characters escaped, and the input length."""
        found: list[str] = []
        for place, character in enumerate(text):
            if self._is_string:
                found.append(self._in_string(character))
                continue
            found.append(character)
            if character == '"':
                self._is_string = True
            elif character in "{[":
                self.depth += 1
            elif character in "}]":
                self.depth -= 1
                if self.depth <= 0:
                    self.is_over = True
                    return "".join(found), place + 1
        return "".join(found), len(text)

    def _in_string(self, character: str) -> str:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._is_string = False
        elif character < " ":  # invalid in JSON, but models write raw line breaks
            return json.dumps(character)[1:-1]
        return character


class ToolCallParser:
    """Parses the output of one sample: `push` takes text, `finish` or `cut_off` ends it.

    `is_forced`: a grammar allows only calls, without a special token before them.
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
        self._is_forced = is_forced
        self._new_id = new_id or (lambda: new_call_id(format))
        self._held = ""  # text that is not yet decided to be text or a call
        self._opening = ""  # consumed before `_held`; it is text if no call follows
        self._scanner = JsonScanner()  # of the arguments, then of the rest of the call
        self._has_outer = False  # whether the arguments are inside another object
        starts_with_call = not format.open or (is_forced and format.is_list)
        self._state: Callable[[], list[OutputPiece] | None] = (
            self._start if starts_with_call else self._text
        )

    def push(self, text: str) -> list[OutputPiece]:
        """The pieces that are decided after this text, in order."""
        self._held += text
        found: list[OutputPiece] = []
        while (pieces := self._state()) is not None:
            found += [piece for piece in pieces if piece]
        return found

    def finish(self) -> list[OutputPiece]:
        """The remaining pieces at the end of the output."""
        found: list[OutputPiece] = []
        held, self._held = self._held, ""
        if self._state == self._call:
            found = self._complete_call(_decode(held)[0]) or [self._opening + held]
        elif self._state in (self._start, self._text) and (held.strip() or not self.num_calls):
            found = [held]
        self._state = self._text
        return [piece for piece in found if piece]

    def cut_off(self) -> list[OutputPiece]:
        """The remaining pieces of an output that ended at max_tokens, without a call's beginning."""
        if self._is_call_beginning():
            self._held = self._opening = ""
        return self.finish()

    # States. Each consumes some of the held text, or returns None if it needs more.

    def _start(self) -> list[OutputPiece] | None:
        """Beginning of an output that may consist of calls only."""
        held = self._held.lstrip(WHITESPACE)
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

    def _plain(self) -> list[OutputPiece] | None:
        """Text in a format that allows calls only at the beginning."""
        text, self._held = self._held, ""
        return [text] if text else None

    def _text(self) -> list[OutputPiece] | None:
        """Text up to the opening tag of a call."""
        before, tag, after = self._held.partition(self.format.open)
        if tag:
            text = before.rstrip(WHITESPACE)
            self._held, self._opening = after, before[len(text) :] + tag
            self._state = self._list if self.format.is_list else self._call
            return [text]
        end = len(before) - self._num_held_back(before)
        self._held = before[end:]
        return [before[:end]] if end else None

    def _list(self) -> list[OutputPiece] | None:
        """After the tag of a list: the list or a function name."""
        held = self._held.lstrip(WHITESPACE)
        if not held:
            return None
        if held.startswith("["):
            self._opening, held = f"{self._opening}[", held[1:]
        self._held, self._state = held, self._call
        return []

    def _call(self) -> list[OutputPiece] | None:
        """A call: its arguments are streamed if possible, else it is parsed when complete."""
        head = HEAD.match(self._held)
        if head is None and self.format.is_list:
            head = NAMED_HEAD.match(self._held)
        if head is None or head[1] not in self._names:
            return self._unstreamed_call()
        self._has_outer = head.re is HEAD
        if self._has_outer and head[2] != self.format.arguments:
            return self._unstreamed_call()
        self._scanner = JsonScanner()
        self._held = self._held[head.end() :]
        self._state = self._arguments
        return [self._begin_call(head[1])]

    def _arguments(self) -> list[OutputPiece] | None:
        if not self._held:
            return None
        text, length = self._scanner.feed(self._held)
        self._held = self._held[length:]
        if self._scanner.depth == 0:
            self._state = self._rest
            self._scanner.depth = int(self._has_outer)  # the object around the arguments
        return [CallDelta(self.num_calls - 1, text)]

    def _rest(self) -> list[OutputPiece] | None:
        """The rest of the object around the arguments; further members are ignored."""
        if self._scanner.depth:
            _, length = self._scanner.feed(self._held)
            self._held = self._held[length:]
            if self._scanner.depth:
                return None
        self._state = self._after
        return []

    def _after(self) -> list[OutputPiece] | None:
        """After a call: its closing tag, another call, or text."""
        held = self._held.lstrip(WHITESPACE)
        if self.format.close:
            if held.startswith(self.format.close):
                self._held = held[len(self.format.close) :]
            elif self.format.close.startswith(held):
                return None
            self._state = self._text
            return []
        held = held.lstrip(WHITESPACE + (",]" if self.format.is_list else ";"))
        if not held:
            return None
        if held.startswith("{"):
            self._held, self._state = held, self._call
        elif self.format.is_list:
            self._held, self._state = held, self._text
        else:
            self._state = self._plain
        return []

    def _unstreamed_call(self) -> list[OutputPiece] | None:
        """A call that cannot be streamed, once it is complete; text if it is no call."""
        if self.format.close:
            return self._call_up_to_tag()
        found = _decode_prefix(self._held) if "}" in self._held else None
        if found is None and self._may_be_json():
            return None
        value, length = found or (None, 0)
        call = self._complete_call(value)
        if call is None:
            text, self._held = self._opening + self._held, ""
            self._state = self._text if self.format.open else self._plain
            return [text]
        self._held, self._state = self._held[length:], self._after
        return call

    def _call_up_to_tag(self) -> list[OutputPiece] | None:
        start = 0
        while (end := self._held.find(self.format.close, start)) >= 0:
            body, start = self._held[:end], end + len(self.format.close)
            value, is_in_string = _decode(body)
            if is_in_string:  # the tag is part of an argument
                continue
            self._held, self._state = self._held[start:], self._text
            return self._complete_call(value) or [f"{self._opening}{body}{self.format.close}"]
        return None

    # Helpers of the states.

    def _may_be_json(self) -> bool:
        """Whether the held text may become a call."""
        held = self._held.lstrip(WHITESPACE)
        if not held or held[0] == "{":
            return True
        return self.format.is_list and re.fullmatch(r"[\w-]*(\[A?R?G?S?\]?)?\s*", held) is not None

    def _is_call_beginning(self) -> bool:
        """Whether the held text is an incomplete call; a single character may as well be text."""
        if self._state == self._text:
            return self._is_forced or len(self._held.strip()) > 1
        if self._state != self._call or _decode(self._held)[0] is not None:
            return False
        if self._is_forced or self.format.open:
            return self._may_be_json()
        held = "".join(self._held.split())
        heads = [f'{{"name":"{name}"' for name in self._names]
        return any(held.startswith(head) or head.startswith(held) for head in heads)

    def _num_held_back(self, text: str) -> int:
        """Length of the suffix that may begin a call, including whitespace before it."""
        tag = self.format.open
        lengths = range(min(len(tag) - 1, len(text)), 0, -1)
        num_tag = next((n for n in lengths if text.endswith(tag[:n])), 0)
        return len(text) - len(text[: len(text) - num_tag].rstrip(WHITESPACE))

    def _begin_call(self, name: str, arguments: str = "") -> CallDelta:
        self.num_calls += 1
        self._opening = ""
        return CallDelta(self.num_calls - 1, arguments, self._new_id(), name)

    def _complete_call(self, value: object) -> list[OutputPiece] | None:
        """A decoded value as a call; None if it is not a call of an allowed tool."""
        if not isinstance(value, dict) or value.get("name") not in self._names:
            return None
        arguments = value.get(self.format.arguments, {})
        if not isinstance(arguments, dict | str):
            return None
        if not isinstance(arguments, str):  # some models write the arguments as a JSON string
            arguments = json.dumps(arguments, ensure_ascii=False)
        return [self._begin_call(value["name"], arguments)]


def _decode(body: str) -> tuple[object, bool]:
    """The value of a JSON text, None if it is invalid, and whether it ends inside a string."""
    try:
        return DECODER.decode(body.strip()), False
    except json.JSONDecodeError as error:
        return None, error.msg.startswith("Unterminated string")
    except RecursionError:
        return None, False


def _decode_prefix(text: str) -> tuple[object, int] | None:
    """The JSON value at the beginning of a text and its length; None if there is none."""
    blanks = len(text) - len(text.lstrip(WHITESPACE))
    try:
        value, length = DECODER.raw_decode(text[blanks:])
    except (json.JSONDecodeError, RecursionError):
        return None
    return value, blanks + length
