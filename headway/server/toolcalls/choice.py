"""What a request's `tools` and `tool_choice` mean for the served model.

A model learns of tools by its chat template, and writes a call as text. A grammar holds it to
calls where `tool_choice` demands one. Knows no HTTP.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeGuard

from headway.errors import InvalidRequest
from headway.grammar.grammar import Grammar, check, with_few_blanks
from headway.grammar.json_schema import closed
from headway.server.toolcalls.formats import FORMATS, HERMES, LLAMA3, MISTRAL, ToolFormat
from headway.server.toolcalls.parser import ToolCallParser
from headway.server.toolcalls.prompt import NOTHING, Message, shown_tools, with_tools_described

AUTO = "auto"
PARSERS = (AUTO, *FORMATS)
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
# How templates explain a call to the model, with words in the place of name and arguments.
EXPLAINS_TAGS = re.compile(r'<tool_call>\s*\{[^{}]*"arguments"')
EXPLAINS_JSON = re.compile(r'\{"name": [^{}"]*, "parameters": [^{}"]*\}')
EXPLAINS_LIST = re.compile(r"\[AVAILABLE_TOOLS\]")
Tool = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of one request."""

    format: ToolFormat
    tools: tuple[Tool, ...]  # shown to the model
    names: frozenset[str]  # of those that it may call
    grammar: Grammar | None  # None: the model may call or not
    is_described: bool  # in the system message: the template knows no tools
    are_closed: bool = False  # the objects of all tools' parameters, not only of strict ones

    def parser(self) -> ToolCallParser:
        """A new parser, for one sample."""
        return ToolCallParser(self.format, self.names, is_forced=self.grammar is not None)

    def messages(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The conversation that the model is shown."""
        if not self.is_described:
            return messages
        return with_tools_described(messages, self.tools, self.format)

    def check(self) -> None:
        """InvalidRequest, naming the tool, if no text can satisfy the grammar."""
        assert self.grammar is not None, "only a grammar can be wrong"
        try:
            check(self.grammar)
        except InvalidRequest:
            for number, tool in enumerate(self.tools):
                with _naming(number):
                    check(Grammar.json_schema(_arguments(tool, is_closed=self.are_closed)))
            raise


class Choice(NamedTuple):
    """A request's `tool_choice`: whether a call must come, and of which tools."""

    must_call: bool
    allowed: dict[int, Tool]  # by place among the tools
    is_one: bool = False  # exactly one call


def tool_use(
    template: str | None,
    tools: Sequence[Tool] | None,
    choice: str | Mapping[str, Any] | None = None,
    *,
    parallel: bool = True,
    parser: str = AUTO,
    disable_additional_properties: bool = False,
) -> ToolUse | None:
    """The tools of a request; None if the model may use none.

    `parser` names the format of calls; `auto` finds it in the template. Arguments have no other
    properties than a tool names if it is strict, or with `disable_additional_properties`.
    InvalidRequest names the field that makes no sense, or says what the template lacks.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice is given without tools; send tools, or leave it out")
        return None
    _check_tools(tools)
    chosen = _chosen(choice, tools)
    if choice == "none":
        return None
    format, is_described = format_of(template, parser)
    grammar = None
    if chosen.must_call:
        is_one = chosen.is_one or not (parallel and format.between)
        schemas = {}
        for number, tool in chosen.allowed.items():
            with _naming(number):
                schemas[number] = _arguments(tool, is_closed=disable_additional_properties)
        grammar = _calls(format, chosen.allowed, schemas, is_one=is_one)
    return ToolUse(
        format=format, tools=tuple(tools), grammar=grammar, is_described=is_described,
        are_closed=disable_additional_properties,
        names=frozenset(_name(tool) for tool in chosen.allowed.values()),
    )  # fmt: skip


@lru_cache(maxsize=32)
def format_of(template: str | None, parser: str = AUTO) -> tuple[ToolFormat, bool]:
    """How a model with this template calls tools, and whether they must be described to it."""
    shown = shown_tools(template)
    if parser != AUTO:
        return FORMATS[parser], not shown
    if not shown:
        raise InvalidRequest(
            "tools cannot be used: this model's chat template does not know any; leave them out, "
            "or start the server with --tool-call-parser to describe them in the system message"
        )
    for pattern, format in (
        (EXPLAINS_TAGS, HERMES), (EXPLAINS_JSON, LLAMA3), (EXPLAINS_LIST, MISTRAL),
    ):  # fmt: skip
        if pattern.search(shown):
            return format, False
    raise InvalidRequest(
        "tools cannot be used: the chat template does not tell in which form this model calls "
        f"them; start the server with --tool-call-parser, one of {', '.join(FORMATS)}"
    )


def _check_tools(tools: Sequence[Tool]) -> None:
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise InvalidRequest(f"tools must be a list, not {tools!r}")
    names = set[str]()
    for number, tool in enumerate(tools):
        where, function = f"tools[{number}]", tool.get("function") if _is_map(tool) else None
        if not _is_map(tool) or tool.get("type") != "function" or not _is_map(function):
            raise InvalidRequest(f'{where} must be {{"type": "function", "function": {{...}}}}')
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            problem = "1 to 64 letters, digits, _ and -"
            raise InvalidRequest(f"{where}.function.name must be {problem}, not {name!r}")
        if name in names:
            raise InvalidRequest(f"{where}.function.name {name!r} is there twice")
        names.add(name)
        if parameters is not None and not _is_map(parameters):
            raise InvalidRequest(f"{where}.function.parameters must be a JSON schema, an object")


def _chosen(choice: str | Mapping[str, Any] | None, tools: Sequence[Tool]) -> Choice:
    """What a `tool_choice` says of these tools."""
    every = dict(enumerate(tools))
    if choice in (None, "none", "auto", "required"):
        return Choice(choice == "required", every)
    if _is_map(choice) and choice.get("type") == "allowed_tools":
        return _allowed(choice.get("allowed_tools"), tools)
    function = choice.get("function") if _is_map(choice) else None
    if not _is_map(function):
        raise InvalidRequest(
            'tool_choice must be none, auto, required, {"type": "function", "function": '
            f'{{"name": ...}}}} or {{"type": "allowed_tools", ...}}, not {choice!r}'
        )
    place = _place(function, tools)
    return Choice(True, {place: tools[place]}, is_one=True)


def _allowed(allowed: Any, tools: Sequence[Tool]) -> Choice:
    """OpenAI's `allowed_tools`: some of the tools, and whether one of them must be called."""
    mode, named = (allowed.get("mode"), allowed.get("tools")) if _is_map(allowed) else (None, None)
    if mode not in ("auto", "required") or not isinstance(named, list) or not named:
        raise InvalidRequest(
            "tool_choice.allowed_tools must have a mode, auto or required, and a list of at least "
            f"1 tool, not {allowed!r}"
        )
    functions = [tool.get("function") if _is_map(tool) else None for tool in named]
    places = sorted({_place(function, tools) for function in functions})
    return Choice(mode == "required", {place: tools[place] for place in places})


def _place(function: Any, tools: Sequence[Tool]) -> int:
    """The place of a named tool among the tools."""
    known = {_name(tool): number for number, tool in enumerate(tools)}
    name = function.get("name") if _is_map(function) else None
    if not isinstance(name, str) or name not in known:
        names = ", ".join(known)
        raise InvalidRequest(f"tool_choice names {name!r}, which is not among the tools: {names}")
    return known[name]


def _calls(
    format: ToolFormat,
    tools: Mapping[int, Tool],
    schemas: Mapping[int, dict[str, Any]],
    *,
    is_one: bool,
) -> Grammar:
    """One call or more of these tools, and nothing else."""
    calls = "one" if is_one else f"one ({json.dumps(format.between)} one)*"
    lines = [f'start: "[" {calls} "]"' if format.is_list else f"start: {calls}"]
    lines.append("one: " + " | ".join(f"call{number}" for number in tools))
    for number, tool in tools.items():
        begin = f'{format.begin}{{"name": {json.dumps(_name(tool))}, "{format.arguments}": '
        end = "}" + format.end
        lines.append(f"call{number}: {json.dumps(begin)} json{number} {json.dumps(end)}")
        with _naming(number):
            lines.append(f"json{number}: %json {Grammar.json_schema(schemas[number]).text}")
    return replace(Grammar.tool_calls("\n".join(lines)), param="tools")


def _arguments(tool: Tool, *, is_closed: bool) -> dict[str, Any]:
    """The schema of a tool's arguments; keywords that cannot be enforced are left out."""
    function = tool["function"]
    parameters = function.get("parameters") or NOTHING
    if is_closed or function.get("strict") is True:
        parameters = closed(parameters)
    return with_few_blanks(parameters, lenient=True)


@contextmanager
def _naming(number: int) -> Iterator[None]:
    """Whatever is wrong in here is wrong with this tool's parameters."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(f"tools[{number}].function.parameters: {error}") from None


def _name(tool: Tool) -> str:
    name: str = tool["function"]["name"]
    return name


def _is_map(value: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping)
