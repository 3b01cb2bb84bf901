"""Formats in which models write tool calls, and tool calls in OpenAI's format."""

from __future__ import annotations

import string
from dataclasses import dataclass
from random import Random, SystemRandom
from typing import NamedTuple

ALPHANUMERIC = string.ascii_letters + string.digits


class ToolFormat(NamedTuple):
    """A format of calls: {"name": ..., <arguments>: {...}} between `open` and `close`."""

    name: str
    open: str  # empty: the whole output is calls
    close: str
    arguments: str  # the key of the arguments
    begin: str  # `open` and `close` with the line breaks that a grammar writes
    end: str
    between: str  # separator of two calls; empty: only one call is possible
    is_list: bool = False  # the calls are items of a JSON list


HERMES = ToolFormat(
    "hermes", "<tool_call>", "</tool_call>", "arguments", "<tool_call>\n", "\n</tool_call>", "\n"
)
LLAMA3 = ToolFormat("llama3", "", "", "parameters", "", "", "")
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", "", "arguments", "", "", ", ", is_list=True)
HARMONY = ToolFormat("gpt_oss", "", "", "arguments", "", "", "")  # parsed with the reasoning
FORMATS = {"hermes": HERMES, "qwen": HERMES, "llama3": LLAMA3, "mistral": MISTRAL}
AUTO = "auto"  # the format of the model's chat template
PARSERS = (AUTO, *FORMATS, HARMONY.name)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One complete call; `arguments` is JSON."""

    id: str
    name: str
    arguments: str

    def as_message(self) -> dict[str, object]:
        """The call as an item of a message's `tool_calls`."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class CallDelta(NamedTuple):
    """A part of a call: a fragment of the arguments; the first part also has id and name."""

    number: int  # index of the call
    arguments: str
    id: str | None = None
    name: str | None = None

    def as_chunk(self) -> dict[str, object]:
        """The part as an item of a streamed delta's `tool_calls`."""
        if self.id is None:
            return {"index": self.number, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.number, "id": self.id, "type": "function", "function": function}


class ReasoningDelta(NamedTuple):
    """A part of the reasoning of a model, which is not part of its answer."""

    text: str


class ParsedOutput(NamedTuple):
    """A complete output as OpenAI's `content` and `tool_calls`."""

    content: str | None
    calls: list[ToolCall]


OutputPiece = str | CallDelta | ReasoningDelta


def merge_pieces(pieces: list[OutputPiece]) -> ParsedOutput:
    """Join the pieces of one output into its text and calls, without the reasoning."""
    texts: list[str] = []
    calls: dict[int, ToolCall] = {}
    for piece in pieces:
        if isinstance(piece, str):
            texts.append(piece)
        if not isinstance(piece, CallDelta):
            continue
        before = calls.get(piece.number)
        id, name, arguments = piece.id or "", piece.name or "", piece.arguments
        if before is not None:
            id, name, arguments = before.id, before.name, before.arguments + arguments
        calls[piece.number] = ToolCall(id, name, arguments)
    content = "".join(texts)
    return ParsedOutput(None if calls and not content.strip() else content, list(calls.values()))


def merge_reasoning(pieces: list[OutputPiece]) -> str | None:
    """The reasoning of one output; None if there is none."""
    return "".join(piece.text for piece in pieces if isinstance(piece, ReasoningDelta)) or None


def new_call_id(format: ToolFormat, chance: Random | None = None) -> str:
    """A new id; chat templates of Mistral's models accept only nine letters and digits."""
    chance = chance or SystemRandom()
    if format is MISTRAL:
        return "".join(chance.choices(ALPHANUMERIC, k=9))
    return f"call_{chance.getrandbits(96):024x}"
