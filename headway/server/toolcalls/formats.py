"""How models write tool calls, and calls as clients of OpenAI's API know them."""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass
from typing import Any, NamedTuple

ALPHANUMERIC = string.ascii_letters + string.digits


class ToolFormat(NamedTuple):
    """How a model writes a call: {"name": ..., <arguments>: {...}} between `open` and `close`."""

    name: str
    open: str  # empty: calls are the whole answer
    close: str
    arguments: str
    begin: str  # `open` and `close` as a grammar writes them, with line breaks
    end: str
    between: str  # two calls; empty: one call at a time
    is_list: bool = False  # the calls are the items of a JSON list


HERMES = ToolFormat(
    "hermes", "<tool_call>", "</tool_call>", "arguments", "<tool_call>\n", "\n</tool_call>", "\n"
)
LLAMA3 = ToolFormat("llama3", "", "", "parameters", "", "", "")
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", "", "arguments", "", "", ", ", is_list=True)
FORMATS = {"hermes": HERMES, "qwen": HERMES, "llama3": LLAMA3, "mistral": MISTRAL}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One complete call; `arguments` is JSON."""

    id: str
    name: str
    arguments: str

    def as_message(self) -> dict[str, Any]:
        """The call as an item of a message's `tool_calls`."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class CallDelta(NamedTuple):
    """A part of a call: the first one has id and name, all have some of the arguments."""

    number: int  # of the call
    arguments: str
    id: str | None = None
    name: str | None = None

    def as_chunk(self) -> dict[str, Any]:
        """The part as an item of a streamed delta's `tool_calls`."""
        if self.id is None:
            return {"index": self.number, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.number, "id": self.id, "type": "function", "function": function}


class Parsed(NamedTuple):
    """A complete answer: OpenAI's `content` and `tool_calls`."""

    content: str | None
    calls: list[ToolCall]


Piece = str | CallDelta


def gathered(pieces: list[Piece]) -> Parsed:
    """The text and the calls that the pieces of one answer add up to."""
    texts: list[str] = []
    calls: dict[int, ToolCall] = {}
    for piece in pieces:
        if isinstance(piece, str):
            texts.append(piece)
            continue
        before = calls.get(piece.number)
        id, name, arguments = piece.id or "", piece.name or "", piece.arguments
        if before is not None:
            id, name, arguments = before.id, before.name, before.arguments + arguments
        calls[piece.number] = ToolCall(id, name, arguments)
    content = "".join(texts)
    return Parsed(None if calls and not content.strip() else content, list(calls.values()))


def new_call_id(format: ToolFormat) -> str:
    """An id; templates of Mistral's models take only nine letters and digits."""
    if format is MISTRAL:
        return "".join(secrets.choice(ALPHANUMERIC) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"
